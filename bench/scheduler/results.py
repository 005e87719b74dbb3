"""What was seen of workloads A, B and C, simulated or live, and what follows from it. Pure.

Times and rates are unscaled: those of the paper's sizes. Added TTFT is that over computing alone, simulated and live;
beside it stands what the paper's tables have, added TTFT over the same round's without a limit, which flatters whoever
has a slow way: a run without a limit holds what the way itself takes. Ratios are of one round, and then their median.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bench.paper import workload
from bench.samples import Spread, spread
from bench.scheduler.simulation import LinkSettings, simulate
from bench.scheduler.variants import CALIBRATED, EQUAL, SLACK, VARIANTS, WORK_CONSERVING, Variant
from bench.scheduler.workloads import paper_batch

PAPER_PART = 0.9
TIME_SCALE_MIN = 0.1
"""Shorter windows than that part of the paper's say more about this machine's timers than about the scheduler."""
SLACK_TARGETS = {"added_ttft_calibrated_over_slack": 1.5, "added_ttft_best_work_conserving_over_slack": 1.1}
"""Of the issue of this project, on each workload."""


@dataclass(frozen=True, slots=True)
class Round:
    """One run of a workload, a value for each request; `compute_s` is computing alone, `no_limit_s` are TTFTs
    over a link that is not limited.
    """

    ttfts_s: tuple[float, ...]
    compute_s: tuple[float, ...]
    no_limit_s: tuple[float, ...]
    rates_bytes_per_s: tuple[float, ...]

    @property
    def added_s(self) -> float:
        """All requests together, over computing alone."""
        return sum(self.ttfts_s) - sum(self.compute_s)

    @property
    def added_over_no_limit_s(self) -> float:
        """All requests together, as Table A12."""
        return sum(self.ttfts_s) - sum(self.no_limit_s)


@dataclass(frozen=True, slots=True)
class Cell:
    """A workload under a variant; at least one round."""

    workload: str
    variant: Variant
    rounds: tuple[Round, ...]

    def ttfts_s(self) -> list[float]:
        """Medians, one for each request."""
        return [statistics.median(each) for each in zip(*(one.ttfts_s for one in self.rounds), strict=True)]

    def rates_bytes_per_s(self) -> list[float]:
        """Medians, one for each request."""
        return [statistics.median(each) for each in zip(*(one.rates_bytes_per_s for one in self.rounds), strict=True)]

    def added(self) -> Spread:
        """Over computing alone, of the rounds."""
        return spread([one.added_s for one in self.rounds])

    def added_over_no_limit(self) -> Spread:
        """As the paper's tables, of the rounds."""
        return spread([one.added_over_no_limit_s for one in self.rounds])


@dataclass(frozen=True, slots=True)
class ModelError:
    """Found over the paper's measurement, less one: of each request's TTFT, and of a workload's added TTFT over a link
    that is not limited, which is what Table A12 has.
    """

    ttft: tuple[float, ...]
    added: float


@dataclass(frozen=True, slots=True)
class Target:
    """A ratio that is to be at least `least`; `value` is None where it was not measured."""

    what: str
    least: float
    value: float | None

    @property
    def is_met(self) -> bool | None:
        """None where nothing was measured."""
        return None if self.value is None else self.value >= self.least


def simulate_paper(workloads: Sequence[str], payload_bytes_max: int) -> list[Cell]:
    """Every variant on the paper's workloads, unscaled. A GPU that never waits is its baseline."""
    cells = []
    for name in workloads:
        batch = paper_batch(name)
        for each in VARIANTS:
            link = LinkSettings(batch.link_bytes_per_s, each.pool_settings(), payload_bytes_max)
            found = simulate(batch.requests, [link]).results
            compute_s = tuple(result.ttft_s - result.added_ttft_s for result in found)
            one = Round(
                tuple(result.ttft_s for result in found),
                compute_s,
                compute_s,
                tuple(result.rate_bytes_per_s for result in found),
            )
            cells.append(Cell(name, each, (one,)))
    return cells


def model_error(cell: Cell) -> ModelError | None:
    """Against Tables A10 to A12; None for what the paper did not measure."""
    policy = cell.variant.paper_policy
    if policy is None:
        return None
    measured = workload(cell.workload).measured(policy)
    ttft = tuple(ours / theirs.ttft_s - 1 for ours, theirs in zip(cell.ttfts_s(), measured, strict=True))
    added = cell.added_over_no_limit().median / workload(cell.workload).added(policy).added_ttft_s - 1
    return ModelError(ttft, added)


def error_spread(cells: Sequence[Cell]) -> Spread:
    """Sizes of the errors of all requests' TTFTs. Raises ValueError where the paper measured none of it."""
    errors = [model_error(cell) for cell in cells]
    return spread([abs(one) for error in errors if error is not None for one in error.ttft])


def added_error_spread(cells: Sequence[Cell]) -> Spread:
    """Sizes of the errors of workloads' added TTFTs. Raises as `error_spread`."""
    errors = [model_error(cell) for cell in cells]
    return spread([abs(error.added) for error in errors if error is not None])


def ratios(cells: Sequence[Cell]) -> dict[str, dict[str, float]]:
    """By workload; only those of which all that is needed was measured. The best work-conserving variant is that of the
    least median.
    """
    found: dict[str, dict[str, float]] = {}
    for name in dict.fromkeys(cell.workload for cell in cells):
        here = {cell.variant: cell for cell in cells if cell.workload == name}
        pairs = {
            "added_ttft_equal_over_slack": (EQUAL, SLACK),
            "added_ttft_calibrated_over_slack": (CALIBRATED, SLACK),
            "added_ttft_equal_over_calibrated": (EQUAL, CALIBRATED),
        }
        conserving = [each for each in WORK_CONSERVING if each in here]
        if conserving:
            best = min(conserving, key=lambda each: here[each].added().median)
            pairs["added_ttft_best_work_conserving_over_slack"] = (best, SLACK)
        found[name] = {
            what: _ratio(here[over], here[under])
            for what, (over, under) in pairs.items()
            if over in here and under in here
        }
    return found


def targets(found: Mapping[str, Mapping[str, float]]) -> list[Target]:
    """Of the live run: Equal over Calibrated by 0.9 of the paper's own factor, and slack below both kinds of rates."""
    listed = []
    for name, values in found.items():
        paper = workload(name)
        calibrated = CALIBRATED.paper_policy
        equal = EQUAL.paper_policy
        assert calibrated is not None
        assert equal is not None
        factor = paper.added(equal).added_ttft_s / paper.added(calibrated).added_ttft_s
        what = "added_ttft_equal_over_calibrated"
        listed.append(Target(f"{name}: {what}", PAPER_PART * factor, values.get(what)))
        listed += [Target(f"{name}: {what}", least, values.get(what)) for what, least in SLACK_TARGETS.items()]
    return listed


def paper_rates_gbps(cell: Cell) -> tuple[float, ...] | None:
    """Table A9's; None for what it does not have."""
    policy = cell.variant.paper_policy
    return None if policy is None else workload(cell.workload).rates_gbps[policy]


def _ratio(over: Cell, under: Cell) -> float:
    return statistics.median(one.added_s / other.added_s for one, other in zip(over.rounds, under.rounds, strict=True))
