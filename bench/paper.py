"""The ObjectCache paper's tables as values: A1, A2 and A8 to A12. Llama 3.1 8B on an A100 unless a row says otherwise.

A layer's compute window c is the total of Table A8 over 32; the table's own column is that, rounded to 10 us. BW-prop
of Table A9 comes out to the printed digits from the unrounded c and up to 0.01 Gbps off from the rounded one; the B_req
that Table A8 prints for 4K at 87.5 % (7.41 GB/s) is that of the rounded one (unrounded: 7.40).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any

from descriptors.units import KIB, bytes_per_s_from_gbps

NUM_LAYERS = 32
TOKEN_LAYER_BYTES = 4096
MARGIN_BYTES_PER_S = bytes_per_s_from_gbps(5)
"""delta of Eq. 7."""
WORKLOADS = ("A", "B", "C")
_FILE = Path(__file__).resolve().parent / "data" / "paper_tables.json"


class PaperPolicy(Enum):
    """The five of section 5.7; the values are those of the setting `scheduler.policy`."""

    EQUAL = "equal"
    KV_PROP = "kv-prop"
    BW_PROP = "bw-prop"
    STALL_OPT = "stall-opt"
    CALIBRATED_STALL_OPT = "calibrated"

    @property
    def title(self) -> str:
        """As Tables A9 to A12 have it."""
        return _TITLES[self]


_TITLES = {
    PaperPolicy.EQUAL: "Equal",
    PaperPolicy.KV_PROP: "KV-prop",
    PaperPolicy.BW_PROP: "BW-prop",
    PaperPolicy.STALL_OPT: "Stall-opt",
    PaperPolicy.CALIBRATED_STALL_OPT: "Cal. Stall-opt",
}
_COLUMNS = {
    PaperPolicy.EQUAL: "equal_gbps",
    PaperPolicy.KV_PROP: "kv_prop_gbps",
    PaperPolicy.BW_PROP: "bw_prop_gbps",
    PaperPolicy.STALL_OPT: "stall_opt_gbps",
    PaperPolicy.CALIBRATED_STALL_OPT: "calibrated_stall_opt_gbps",
}


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
    stdev_s: float


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

    def cached_tokens(self, chunk_tokens: int) -> int:
        """Tokens reused where the boundary chunk of that size missed."""
        return round(self.hit_rate * self.context_tokens) - chunk_tokens


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
        found = {
            (row.context, row.hit_rate): row
            for row in table_a10_a11()
            if row.workload == self.name and row.policy is policy
        }
        return tuple(found[request.context, request.hit_rate] for request in self.requests)

    def added(self, policy: PaperPolicy) -> AddedTtft:
        """Table A12 for the policy."""
        return next(row for row in table_a12() if row.workload == self.name and row.policy is policy)


def context_tokens(context: str) -> int:
    """4K is 4096 tokens."""
    return int(context.removesuffix("K")) * KIB


@cache
def table_a8() -> tuple[PaperRequest, ...]:
    """Compute and B_req by context and hit rate."""
    return tuple(
        PaperRequest(
            context=row["context"],
            hit_rate=row["hit_rate"],
            cached_tokens=row["cached_tokens"],
            compute_s=row["compute_ms_total"] / 1e3,
            printed_layer_compute_s=row["compute_ms_per_layer"] / 1e3,
            printed_bytes_per_s=row["required_gbytes_per_s"] * 1e9,
        )
        for row in _table("table_a8")
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
        rates_gbps={policy: tuple(row[column] for row in rows) for policy, column in _COLUMNS.items()},
    )


@cache
def table_a10_a11() -> tuple[MeasuredTtft, ...]:
    """Measured TTFT of every request under every policy."""
    return tuple(
        MeasuredTtft(
            workload=row["workload"],
            policy=_policy(row["policy"]),
            context=row["context"],
            hit_rate=row["hit_rate"],
            rate_bytes_per_s=bytes_per_s_from_gbps(row["rate_gbps"]),
            ttft_s=row["ttft_ms"] / 1e3,
            stdev_s=row["stdev_ms"] / 1e3,
        )
        for row in _table("table_a10_a11")
    )


@cache
def table_a12() -> tuple[AddedTtft, ...]:
    """Total and added TTFT by workload and policy."""
    return tuple(
        AddedTtft(
            workload=row["workload"],
            policy=_policy(row["policy"]),
            total_ttft_s=row["total_ttft_ms"] / 1e3,
            no_limit_s=row["no_limit_ms"] / 1e3,
            added_ttft_s=row["added_ttft_ms"] / 1e3,
        )
        for row in _table("table_a12")
    )


@cache
def table_a1_a2() -> tuple[BoundaryTtft, ...]:
    """TTFT of two models on two GPUs by hit rate and by G of 16 and 512."""
    return tuple(
        BoundaryTtft(
            model=row["model"],
            gpu=row["gpu"],
            context=row["context"],
            hit_rate=row["hit_percent"] / 100,
            ttft_s_by_chunk_tokens={16: row["ttft_ms_g16"] / 1e3, 512: row["ttft_ms_g512"] / 1e3},
        )
        for row in _table("table_a1_a2")
    )


def _policy(title: str) -> PaperPolicy:
    return next(policy for policy, known in _TITLES.items() if known == title)


@cache
def _tables() -> Mapping[str, Any]:
    tables: Mapping[str, Any] = json.loads(_FILE.read_text())
    return tables


def _table(name: str) -> Sequence[Mapping[str, Any]]:
    rows: Sequence[Mapping[str, Any]] = _tables()[name]
    return rows
