"""The ObjectCache paper's tables as values: A1, A2 and A8 to A12, Llama 3.1 8B on an A100 unless a row says otherwise;
and how many bytes of KV current open-weight models keep, from the constants of their published configurations.

A layer's compute window c is the total of Table A8 over 32; the table's own column is that, rounded to 10 us. BW-prop
of Table A9 comes out to the printed digits from the unrounded c and up to 0.01 Gbps off from the rounded one; the B_req
that Table A8 prints for 4K at 87.5 % (7.41 GB/s) is that of the rounded one (unrounded: 7.40).

The source of a model's row is the file config.json of the repository it names at huggingface.co. What counts for a
layer (ObjectCache paper, Eq. 1) is 2 * n_kv * d elements a token; with multi-head latent attention (MLA) it is one
latent vector and the rotary part of the key, shared by all heads (DeepSeek-V2, section 2.1.3).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache
from inspect import signature
from pathlib import Path
from typing import Any, TypeVar

from descriptors.layout import slice_bytes
from descriptors.units import KIB, bytes_per_s_from_gbps

ELEMENT_BYTES = 2
"""bfloat16, what all of these were published in or are served with; an 8-bit cache halves every figure."""


@dataclass(frozen=True, slots=True)
class GroupedQuery:
    """num_key_value_heads and head_dim."""

    kv_heads: int
    head_dim: int

    def token_bytes(self) -> int:
        """Keys and values of one layer and token."""
        return slice_bytes(1, self.kv_heads, self.head_dim, ELEMENT_BYTES)


@dataclass(frozen=True, slots=True)
class Latent:
    """kv_lora_rank and qk_rope_head_dim."""

    rank: int
    rope_dim: int

    def token_bytes(self) -> int:
        """Latent and rotary key of one layer and token."""
        return (self.rank + self.rope_dim) * ELEMENT_BYTES


@dataclass(frozen=True, slots=True)
class Model:
    """`source` is a repository at huggingface.co. `kv_layers` counts the layers that keep KV for the whole context;
    layers with a sliding window keep the same bytes a token but fewer tokens, and are counted too.
    """

    family: str
    name: str
    source: str
    kv_layers: int
    attention: GroupedQuery | Latent

    def payload_bytes(self, chunk_tokens: int) -> int:
        """S: one layer of a chunk."""
        return chunk_tokens * self.attention.token_bytes()


def _models() -> Iterator[Model]:
    """Those of models.json, whose attention is grouped-query (kv_heads, head_dim) or latent (rank, rope_dim)."""
    for row in json.loads(Path(__file__).with_name("models.json").read_text()):
        attention = Latent(*row.pop("latent")) if "latent" in row else GroupedQuery(*row.pop("grouped"))
        yield Model(attention=attention, **row)


MODELS = tuple(_models())


NUM_LAYERS = 32
TOKEN_LAYER_BYTES = 4096
MARGIN_BYTES_PER_S = bytes_per_s_from_gbps(5)
"""delta of Eq. 7."""
WORKLOADS = ("A", "B", "C")
_FILE = Path(__file__).resolve().parent / "paper_tables.json"
Row = Mapping[str, Any]
T = TypeVar("T")


class PaperPolicy(Enum):
    """The five of section 5.7; the values are those of the setting `scheduler.policy`."""

    EQUAL = "equal"
    KV_PROP = "kv-prop"
    BW_PROP = "bw-prop"
    STALL_OPT = "stall-opt"
    CALIBRATED_STALL_OPT = "calibrated"


POLICIES = dict(zip(("Equal", "KV-prop", "BW-prop", "Stall-opt", "Cal. Stall-opt"), PaperPolicy, strict=True))
"""As Tables A9 to A12 call them."""


@dataclass(frozen=True, slots=True)
class PaperRequest:
    """A row of Table A8. `compute_s` is the prefill of the tokens that missed, all layers; `printed_layer_compute_s`
    and `printed_bytes_per_s` are the table's own rounded columns (the latter B_req).
    """

    context: str
    hit_rate: float
    cached_tokens: int
    compute_s: float
    printed_layer_compute_s: float
    printed_bytes_per_s: float

    @property
    def name(self) -> str:
        """As Tables A9 to A11 have it."""
        return f"{self.context}, {100 * self.hit_rate:g}%"

    @property
    def context_tokens(self) -> int:
        """P."""
        return context_tokens(self.context)

    @property
    def layer_bytes(self) -> int:
        """s_i = D: one layer of the cached prefix."""
        return self.cached_tokens * TOKEN_LAYER_BYTES

    @property
    def layer_compute_s(self) -> float:
        """c_i, unrounded."""
        return self.compute_s / NUM_LAYERS

    @property
    def zero_stall_bytes_per_s(self) -> float:
        """r*_i = s_i / c_i = B_req."""
        return self.layer_bytes / self.layer_compute_s


@dataclass(frozen=True, slots=True)
class MeasuredTtft:
    """A row of Table A10 or A11: what the paper measured under a rate."""

    workload: str
    policy: PaperPolicy
    context: str
    hit_rate: float
    rate_bytes_per_s: float
    ttft_s: float


@dataclass(frozen=True, slots=True)
class AddedTtft:
    """A row of Table A12: a workload's TTFTs added up, and without a limit."""

    workload: str
    policy: PaperPolicy
    total_ttft_s: float
    no_limit_s: float
    added_ttft_s: float


@dataclass(frozen=True, slots=True)
class BoundaryTtft:
    """A row of Tables A1 and A2: steady-state TTFT with M - G tokens reused, M = hit_rate * context, by G."""

    model: str
    gpu: str
    context: str
    hit_rate: float
    ttft_s_by_chunk_tokens: Mapping[int, float]

    @property
    def context_tokens(self) -> int:
        """P."""
        return context_tokens(self.context)

    @property
    def hit_tokens(self) -> int:
        """M; where the boundary chunk of G tokens missed, M - G are reused."""
        return round(self.hit_rate * self.context_tokens)


@dataclass(frozen=True, slots=True)
class Workload:
    """One of section 5.7's, in the tables' order. `rates_gbps` is Table A9, one rate for each request."""

    name: str
    cap_gbps: float
    requests: tuple[PaperRequest, ...]
    rates_gbps: Mapping[PaperPolicy, tuple[float, ...]]

    @property
    def budget_bytes_per_s(self) -> float:
        """B."""
        return bytes_per_s_from_gbps(self.cap_gbps)

    def measured(self, policy: PaperPolicy) -> tuple[MeasuredTtft, ...]:
        """Tables A10 and A11 for the policy, one for each request in their order."""
        return tuple(row for row in table_a10_a11() if (row.workload, row.policy) == (self.name, policy))

    def added(self, policy: PaperPolicy) -> AddedTtft:
        """Table A12 for the policy."""
        return next(row for row in table_a12() if row.workload == self.name and row.policy is policy)


def context_tokens(context: str) -> int:
    """4K is 4096 tokens."""
    return int(context.removesuffix("K")) * KIB


def table_a7() -> Sequence[Row]:
    """Elements that a client sees, by context and chunk size."""
    return _table("table_a7")


@cache
def table_a8() -> tuple[PaperRequest, ...]:
    """Compute and B_req by context and hit rate."""
    return _rows(
        PaperRequest,
        "table_a8",
        compute_s=lambda row: row["compute_ms_total"] / 1e3,
        printed_layer_compute_s=lambda row: row["compute_ms_per_layer"] / 1e3,
        printed_bytes_per_s=lambda row: row["required_gbytes_per_s"] * 1e9,
    )


@cache
def workload(name: str) -> Workload:
    """A, B or C (Table A9). Raises KeyError for another."""
    rows = [row for row in _table("table_a9") if row["workload"] == name]
    if not rows:
        raise KeyError(name)
    requests = {(request.context, request.hit_rate): request for request in table_a8()}
    return Workload(
        name=name,
        cap_gbps=rows[0]["cap_gbps"],
        requests=tuple(requests[row["context"], row["hit_rate"]] for row in rows),
        rates_gbps={each: tuple(row[f"{each.name.lower()}_gbps"] for row in rows) for each in PaperPolicy},
    )


@cache
def table_a10_a11() -> tuple[MeasuredTtft, ...]:
    """Measured TTFT of every request under every policy."""
    return _rows(MeasuredTtft, "table_a10_a11")


@cache
def table_a12() -> tuple[AddedTtft, ...]:
    """Total and added TTFT by workload and policy."""
    return _rows(AddedTtft, "table_a12")


@cache
def table_a1_a2() -> tuple[BoundaryTtft, ...]:
    """TTFT of two models on two GPUs by hit rate and by G of 16 and 512."""
    return _rows(
        BoundaryTtft,
        "table_a1_a2",
        hit_rate=lambda row: row["hit_percent"] / 100,
        ttft_s_by_chunk_tokens=lambda row: {grain: row[f"ttft_ms_g{grain}"] / 1e3 for grain in (16, 512)},
    )


def _rows(kind: Callable[..., T], table: str, **others: Callable[[Row], Any]) -> tuple[T, ...]:
    """Fields are the columns of their names, in our units, but for `others`."""
    names = signature(kind).parameters
    return tuple(
        kind(**{name: others[name](row) if name in others else _value(name, row) for name in names})
        for row in _table(table)
    )


def _value(name: str, row: Row) -> Any:
    if name == "policy":
        return POLICIES[row[name]]
    if name.endswith("_bytes_per_s"):
        return bytes_per_s_from_gbps(row[name.removesuffix("bytes_per_s") + "gbps"])
    return row[name.removesuffix("_s") + "_ms"] / 1e3 if name.endswith("_s") else row[name]


@cache
def _table(name: str) -> Sequence[Row]:
    rows: Sequence[Row] = json.loads(_FILE.read_text())[name]
    return rows
