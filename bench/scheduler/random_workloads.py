"""Many random workloads through the simulation, in a few processes: how often, and by how much, slack is better."""

from __future__ import annotations

import multiprocessing
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bench.progress import progress_bar
from bench.samples import Spread
from bench.scheduler.simulation import LinkSettings, Simulated, simulate
from bench.scheduler.variants import CALIBRATED, EQUAL, EQUAL_WORK_CONSERVING, SLACK, Variant
from bench.scheduler.workloads import Batch, random_batch, with_wrong_compute
from descriptors.units import MIB

Floats = NDArray[np.float64]
PAYLOAD_BYTES_MAX = 16 * MIB
"""A server's, for chunks in memory."""
PART = 20
"""Workloads that a process does at once."""
MEAN_TARGET = 1.3
PERCENTILE_TARGET = 1.02
DELAY_BOUND = 1.25
LOST_GAIN_TARGET = 0.15


@dataclass(frozen=True, slots=True)
class RandomOutcome:
    """One workload: added TTFT of all its requests together, in seconds, and the worst of their TTFTs under slack over
    that under Equal, where rates are held and where what is freed is shared again. `wrong_*`: with wrong c_i stated.
    """

    request_count: int
    equal_s: float
    equal_work_conserving_s: float
    calibrated_s: float
    slack_s: float
    delay_over_equal: float
    delay_over_equal_work_conserving: float
    wrong_calibrated_s: float
    wrong_slack_s: float
    wrong_delay_over_equal: float
    wrong_delay_over_equal_work_conserving: float


@dataclass(frozen=True, slots=True)
class RandomSummary:
    """Over all workloads. `lost_gain` is how much of (Equal - slack) wrong compute times cost, all workloads' seconds
    added up; `calibrated_over_slack_sums` is of such sums, too.
    """

    count: int
    calibrated_over_slack: Spread
    mean_calibrated_over_slack: float
    calibrated_over_slack_sums: float
    p99_slack_over_calibrated: float
    max_slack_over_calibrated: float
    worst_delay_over_equal: float
    worst_delay_over_equal_work_conserving: float
    mean_wrong_calibrated_over_slack: float
    lost_gain: float
    lost_gain_calibrated: float
    wrong_worst_delay_over_equal: float
    wrong_worst_delay_over_equal_work_conserving: float


def measure_random(count: int, seed: int, processes: int) -> list[RandomOutcome]:
    """Workloads 0 to count-1 of the seed, in order; the same whatever the processes."""
    firsts = range(0, count, PART)
    parts = [range(first, min(first + PART, count)) for first in firsts]
    with progress_bar(count, "random workloads") as advance:
        outcomes: list[RandomOutcome] = []
        if processes == 1:
            for part in parts:
                outcomes += _outcomes(seed, part)
                advance(len(part))
            return outcomes
        with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
            for found in pool.map(_outcomes, [seed] * len(parts), parts):
                outcomes += found
                advance(len(found))
        return outcomes


def summarize(outcomes: Sequence[RandomOutcome]) -> RandomSummary:
    """Raises ValueError without an outcome."""
    if not outcomes:
        raise ValueError("no outcomes")
    slack = _array(outcomes, "slack_s")
    calibrated = _array(outcomes, "calibrated_s")
    equal = _array(outcomes, "equal_s")
    wrong_slack = _array(outcomes, "wrong_slack_s")
    wrong_calibrated = _array(outcomes, "wrong_calibrated_s")
    better = calibrated / slack
    return RandomSummary(
        count=len(outcomes),
        calibrated_over_slack=Spread(float(np.median(better)), float(better.min()), float(better.max())),
        mean_calibrated_over_slack=float(better.mean()),
        calibrated_over_slack_sums=float(calibrated.sum() / slack.sum()),
        p99_slack_over_calibrated=float(np.percentile(1 / better, 99)),
        max_slack_over_calibrated=float((1 / better).max()),
        worst_delay_over_equal=_worst(outcomes, "delay_over_equal"),
        worst_delay_over_equal_work_conserving=_worst(outcomes, "delay_over_equal_work_conserving"),
        mean_wrong_calibrated_over_slack=float((wrong_calibrated / wrong_slack).mean()),
        lost_gain=_lost_gain(equal, slack, wrong_slack),
        lost_gain_calibrated=_lost_gain(equal, calibrated, wrong_calibrated),
        wrong_worst_delay_over_equal=_worst(outcomes, "wrong_delay_over_equal"),
        wrong_worst_delay_over_equal_work_conserving=_worst(outcomes, "wrong_delay_over_equal_work_conserving"),
    )


def outcome_of(batch: Batch, wrong: Batch) -> RandomOutcome:
    """`wrong` is the batch with other compute times stated."""
    equal, equal_again = _run(batch, EQUAL), _run(batch, EQUAL_WORK_CONSERVING)
    slack, wrong_slack = _run(batch, SLACK), _run(wrong, SLACK)
    return RandomOutcome(
        request_count=len(batch.requests),
        equal_s=equal.added_ttft_s,
        equal_work_conserving_s=equal_again.added_ttft_s,
        calibrated_s=_run(batch, CALIBRATED).added_ttft_s,
        slack_s=slack.added_ttft_s,
        delay_over_equal=_delay(slack, equal),
        delay_over_equal_work_conserving=_delay(slack, equal_again),
        wrong_calibrated_s=_run(wrong, CALIBRATED).added_ttft_s,
        wrong_slack_s=wrong_slack.added_ttft_s,
        wrong_delay_over_equal=_delay(wrong_slack, equal),
        wrong_delay_over_equal_work_conserving=_delay(wrong_slack, equal_again),
    )


def _outcomes(seed: int, part: Sequence[int]) -> list[RandomOutcome]:
    found = []
    for index in part:
        batch = random_batch(seed, index)
        found.append(outcome_of(batch, with_wrong_compute(batch, seed, index)))
    return found


def _run(batch: Batch, variant: Variant) -> Simulated:
    link = LinkSettings(batch.link_bytes_per_s, variant.pool_settings(), PAYLOAD_BYTES_MAX)
    return simulate(batch.requests, [link])


def _delay(found: Simulated, other: Simulated) -> float:
    return max(ours.ttft_s / theirs.ttft_s for ours, theirs in zip(found.results, other.results, strict=True))


def _lost_gain(without: Floats, right: Floats, wrong: Floats) -> float:
    gain = float((without - right).sum())
    return float((wrong - right).sum()) / gain if gain > 0 else 0.0


def _array(outcomes: Sequence[RandomOutcome], name: str) -> Floats:
    return np.array([getattr(each, name) for each in outcomes])


def _worst(outcomes: Sequence[RandomOutcome], name: str) -> float:
    return float(_array(outcomes, name).max())
