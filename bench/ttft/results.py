"""From samples to what the figures show. Pure.

Ratios are taken within a round, whose requests were made one after the other, and then their median.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bench.paper import TOKEN_LAYER_BYTES
from bench.samples import Spread, spread
from bench.ttft.cases import Case, Scale, System
from bench.ttft.knee import Knee, Sample, find_knee, without_first_layer
from bench.ttft.play import Played

OVERHEAD_LIMIT = 1.02
OVER_BOUND_S_MAX = 0.010
TARGET_CHUNK_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Cell:
    """Counted runs of one thing. `link_bytes_per_s` is the link that was played, unscaled; None: not limited."""

    case: Case
    system: System
    link_bytes_per_s: float | None
    runs: tuple[Played, ...]

    def ttfts_s(self) -> list[float]:
        """Of each run."""
        return [run.ttft_s for run in self.runs]

    def loads_s(self) -> list[float]:
        """When everything was there, in each run."""
        return [max(run.ready_s) for run in self.runs]


@dataclass(frozen=True, slots=True)
class Overhead:
    """TTFT over another cell's of the same rounds, as a ratio and in seconds."""

    ratio: Spread
    added_s: Spread
    sample_count: int


@dataclass(frozen=True, slots=True)
class Sweep:
    """Figure 15: one workload at many rates, unscaled; what the model says and what was seen. `knee` is None with too
    few rates. Times have the first layer taken out for it: no rate hides that.
    """

    case: Case
    samples: tuple[Sample, ...]
    knee: Knee | None


@dataclass(frozen=True, slots=True)
class Target:
    """A limit from the issue of this project, and the worst of the cells it speaks of; None: not measured."""

    what: str
    limit: float
    value: float | None

    @property
    def is_met(self) -> bool | None:
        """None where nothing was measured."""
        return None if self.value is None else self.value <= self.limit


def overhead(cell: Cell, baseline: Cell) -> Overhead:
    """Round by round. Raises ValueError where they have not the same rounds, or none."""
    pairs = list(zip(cell.ttfts_s(), baseline.ttfts_s(), strict=True))
    return Overhead(
        spread([ours / theirs for ours, theirs in pairs]), spread([ours - theirs for ours, theirs in pairs]), len(pairs)
    )


def overheads(cells: Sequence[Cell], link_bytes_per_s: float | None) -> list[tuple[Cell, Overhead]]:
    """Figure 13: every cell at that link over opt-local-LW, the baseline itself left out."""
    here = [cell for cell in cells if cell.link_bytes_per_s == link_bytes_per_s]
    baselines = {cell.case: cell for cell in here if cell.system is System.OPT_LOCAL_LW}
    return [
        (cell, overhead(cell, baselines[cell.case]))
        for cell in here
        if cell.system is not System.OPT_LOCAL_LW and cell.case in baselines
    ]


def increases(
    cells: Sequence[Cell], link_bytes_per_s: float | None, cap_bytes_per_s: float
) -> list[tuple[Cell, Overhead]]:
    """Figure 14: every cell at the cap over the same one at the link."""
    full = {(cell.case, cell.system): cell for cell in cells if cell.link_bytes_per_s == link_bytes_per_s}
    return [
        (cell, overhead(cell, full[cell.case, cell.system]))
        for cell in cells
        if cell.link_bytes_per_s == cap_bytes_per_s and (cell.case, cell.system) in full
    ]


def over_bound(cell: Cell, scale: Scale) -> Spread:
    """Seconds beyond Eq. 3 at the played link."""
    link = None if cell.link_bytes_per_s is None else scale.link_bytes_per_s(cell.link_bytes_per_s)
    bound_s = cell.case.bound_s(scale, link)
    return spread([ttft_s - bound_s for ttft_s in cell.ttfts_s()])


def make_sweep(cells: Sequence[Cell], scale: Scale) -> Sweep:
    """One workload's cells of all rates. Times are put back to the paper's scale. Raises ValueError without a cell."""
    if not cells:
        raise ValueError("no cells")
    case = cells[0].case
    samples = [
        Sample(cell.link_bytes_per_s, ttft_s / scale.time)
        for cell in cells
        if cell.link_bytes_per_s is not None
        for ttft_s in cell.ttfts_s()
    ]
    rates = {each.rate_bytes_per_s for each in samples}
    stalls = without_first_layer(samples, case.cached_tokens * TOKEN_LAYER_BYTES)
    return Sweep(case, tuple(samples), find_knee(stalls) if len(rates) >= 3 else None)


def targets(cells: Sequence[Cell], link_bytes_per_s: float | None, scale: Scale) -> list[Target]:
    """The two of S3Agg-LW, at G of TARGET_CHUNK_TOKENS. Shortened windows say nothing about them."""
    ratios: dict[str, list[float]] = {}
    beyond: dict[str, list[float]] = {}
    for cell, found in overheads(cells, link_bytes_per_s) if scale.time == 1 else ():
        if cell.system is System.S3_AGG_LW and cell.case.chunk_tokens == TARGET_CHUNK_TOKENS:
            ratios.setdefault(cell.case.context, []).append(found.ratio.median)
            beyond.setdefault(cell.case.context, []).append(over_bound(cell, scale).median)
    grain = f"G={TARGET_CHUNK_TOKENS}"
    return [
        Target(f"64K, {grain}: S3Agg-LW over opt-local-LW", OVERHEAD_LIMIT, _worst(ratios, "64K")),
        Target(f"4K, {grain}: seconds beyond the transfer-time bound", OVER_BOUND_S_MAX, _worst(beyond, "4K")),
    ]


def _worst(found: Mapping[str, Sequence[float]], context: str) -> float | None:
    return max(found[context]) if context in found else None
