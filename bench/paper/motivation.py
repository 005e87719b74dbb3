"""Why cached KV needs capacity: how much of it long prefixes have, and what it costs to keep. Computed, not measured.

The ObjectCache paper shows its Figures 1 and A1 as pictures without numbers. Figure 1 is that prefixes become longer
and are kept longer, Figure A1 that repositories have large KV. Here the KV of a prefix is counted for prefixes of these
lengths and for the models of `models.json`. The prices are those of the paper's Table A5.
"""

from __future__ import annotations

from dataclasses import dataclass

from bench.core.show import Column, Section, Table, size, table
from bench.paper.tables import MODELS, Model
from descriptors.units import GIB, KIB, MIB

PREFIXES = (
    ("a system prompt", 4 * KIB),
    ("a document", 32 * KIB),
    ("a long conversation or an agent's history", 128 * KIB),
    ("a small repository", MIB),
    ("a large repository", 16 * MIB),
)
"""Tokens. A token of code has three to four characters, so 16 Mi tokens are a source tree of about 50 MB."""
SHOWN = ("Llama 3.1 8B", "Llama 3.1 70B", "Qwen3 235B-A22B", "DeepSeek-V3 and R1")
REPRESENTATIVE = ("Llama 3.1 8B", "Llama 3.1 70B")
"""The models of Figure A1: two sizes of KV a token."""


@dataclass(frozen=True, slots=True)
class Tier:
    """A row of Table A5. Prices are in US dollars for a GB and month."""

    name: str
    capacity: str
    least_price: float
    most_price: float
    latency: str


TIERS = (
    Tier("GPU VRAM (H100 80GB)", "80 GB", 25.0, 25.0, "<1 µs"),
    Tier("CPU DRAM", "512 GB", 3.0, 5.0, "100 ns"),
    Tier("remote DRAM (RDMA)", "TB-scale", 1.0, 2.0, "10 to 100 µs"),
    Tier("NVMe SSD (local)", "TB-scale", 0.10, 0.10, "100 µs"),
    Tier("S3, object storage", "PB-scale", 0.02, 0.02, "10 to 50 ms"),
)


def figure_1() -> Table:
    """The KV of one prefix, by its kind and by the model."""
    rows = [
        [what, f"{tokens:,}", *(size(_kv_bytes(_model(name), tokens)) for name in SHOWN)] for what, tokens in PREFIXES
    ]
    return Table(["prefix", "tokens", *SHOWN], rows)


def figure_a1() -> Table:
    """The KV of repositories at two sizes of KV a token, and how many GPUs' memory (80 GB) it would fill."""
    small, large = map(_model, REPRESENTATIVE)
    return table(
        [tokens for _, tokens in PREFIXES[2:]],
        Column("tokens", lambda tokens: f"{tokens:,}"),
        Column(f"KV at {_token_kib(small)} KiB a token ({small.name})", lambda tokens: size(_kv_bytes(small, tokens))),
        Column(f"KV at {_token_kib(large)} KiB a token ({large.name})", lambda tokens: size(_kv_bytes(large, tokens))),
        Column("GPUs of 80 GB that the latter fills", lambda tokens: f"{_kv_bytes(large, tokens) / 80e9:,.1f}"),
    )


def table_a5() -> Table:
    """The paper's table, with what the KV of a prefix of 64K tokens of Llama 3.1 8B costs in a month."""
    nbytes = _kv_bytes(_model(REPRESENTATIVE[0]), 64 * KIB)
    return table(
        TIERS,
        Column("tier", lambda tier: tier.name),
        Column("capacity", lambda tier: tier.capacity),
        Column("$ for a GB and month", lambda tier: _between(tier.least_price, tier.most_price)),
        Column("latency", lambda tier: tier.latency),
        Column(
            f"$ a month for 64K tokens ({nbytes / GIB:g} GiB)",
            lambda tier: _between(tier.least_price * nbytes / 1e9, tier.most_price * nbytes / 1e9),
        ),
    )


def motivation() -> Section:
    """All three."""
    return ("Figure 1:", figure_1(), "Figure A1:", figure_a1(), "Table A5, prices of the paper:", table_a5())


def _model(name: str) -> Model:
    return next(model for model in MODELS if model.name == name)


def _kv_bytes(model: Model, tokens: int) -> int:
    return tokens * model.kv_layers * model.attention.token_bytes()


def _token_kib(model: Model) -> str:
    return f"{_kv_bytes(model, 1) / KIB:g}"


def _between(least: float, most: float) -> str:
    shown = [f"{price:.2f}" for price in dict.fromkeys((least, most))]
    return " to ".join(shown)
