"""What a prefill asks of the transfer (ObjectCache paper, section 5.3). Pure.

P context   r hit rate   D layer_bytes = 2 n_kv d p (P r)   t layer_compute_s   B_req = D / t

With B the throughput of layers, D/B <= t leaves only the first layer's transfer visible: the prefill is compute-bound.
Otherwise every layer adds its stall (Eq. 4), and the prefill is transfer-bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from bench.compute.cost_model import Fit
from bench.compute.shapes import ModelShape
from descriptors.ttft import ttft_layerwise_s, zero_stall_rate_bytes_per_s


class Origin(Enum):
    """Where a layer's compute time comes from."""

    TABLE_A8 = "table_a8"
    TABLES_A1_A2 = "tables_a1_a2"
    MEASURED = "measured"
    INTERPOLATED = "interpolated"
    EXTRAPOLATED = "extrapolated"
    SCALED = "scaled"

    @property
    def mark(self) -> str:
        """One letter for tables."""
        return _MARKS[self]

    @property
    def meaning(self) -> str:
        """For people."""
        return _MEANINGS[self]


_MARKS = {
    Origin.TABLE_A8: "a",
    Origin.TABLES_A1_A2: "b",
    Origin.MEASURED: "m",
    Origin.INTERPOLATED: "i",
    Origin.EXTRAPOLATED: "x",
    Origin.SCALED: "s",
}
_MEANINGS = {
    Origin.TABLE_A8: "as Table A8 gives it",
    Origin.TABLES_A1_A2: "TTFTs of Tables A1 and A2, taken for compute, extended from G=16 and 512 to no missing chunk",
    Origin.MEASURED: "measured on this machine",
    Origin.INTERPOLATED: "by the fitted cost model, between what it was fitted to",
    Origin.EXTRAPOLATED: "by the fitted cost model, beyond what it was fitted to",
    Origin.SCALED: "another model's fit, scaled by operations: the paper has no table of this model",
}


class Bound(Enum):
    """What a prefill waits for after its first layer."""

    COMPUTE = "compute"
    TRANSFER = "transfer"


@dataclass(frozen=True, slots=True)
class Requirement:
    """One cell of the heatmaps."""

    context_tokens: int
    hit_rate: float
    cached_tokens: int
    layer_bytes: int
    layer_compute_s: float
    origin: Origin

    @property
    def required_bytes_per_s(self) -> float:
        """B_req."""
        return zero_stall_rate_bytes_per_s(self.layer_bytes, self.layer_compute_s)

    def bound(self, rate_bytes_per_s: float) -> Bound:
        """At a throughput of layers."""
        return Bound.COMPUTE if self.required_bytes_per_s <= rate_bytes_per_s else Bound.TRANSFER

    def added_ttft_s(self, rate_bytes_per_s: float, num_layers: int) -> float:
        """Eq. 3 at that throughput, less the compute."""
        transfers_s = [self.layer_bytes / rate_bytes_per_s] * num_layers
        computes_s = [self.layer_compute_s] * num_layers
        return ttft_layerwise_s(transfers_s, computes_s) - sum(computes_s)


@dataclass(frozen=True, slots=True)
class Grid:
    """One model on one device. `fit` is what gives the cells that no table and no measurement has; `fitted_to` says in
    words what it was fitted to.
    """

    shape: ModelShape
    device: str
    cells: tuple[Requirement, ...]
    fit: Fit
    fitted_to: str

    @property
    def key(self) -> str:
        """Tells it from all others of a report."""
        return f"{self.shape.name}/{self.device}"

    def operations_per_s(self, cell: Requirement) -> float:
        """What the device does in the cell: the model FLOP utilization of Figure A6, before it is divided by a peak."""
        operations = self.shape.prefill_operations(cell.cached_tokens, cell.context_tokens)
        return operations / (cell.layer_compute_s * self.shape.num_layers)


def share_below(grids: Sequence[Grid], rate_bytes_per_s: float) -> float:
    """Share of all cells that a throughput suffices for. Raises ZeroDivisionError without a cell."""
    bounds = [cell.bound(rate_bytes_per_s) for grid in grids for cell in grid.cells]
    return bounds.count(Bound.COMPUTE) / len(bounds)
