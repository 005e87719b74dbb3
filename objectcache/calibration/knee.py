"""Where more bandwidth stops helping: the knee of TTFT over rate, and the margin it stands beyond r*. Pure.

    r rate   T(r) TTFT   r* = s/c the rate of perfect overlap (Eq. 4)   delta = knee - r* (Eq. 7's margin)

T(r) is the median of a rate's samples, made non-increasing by isotonic regression: more bandwidth cannot make a request
slower, what looks like it is noise. The knee is the smallest r with T(r) <= (1 + tolerance) * T(largest r). Between two
measured rates T is taken to be linear in 1/r, as a transfer-bound TTFT is.

The first layer is never hidden, so T has s/r in it at any rate; `without_first_layer` takes it out where the question
is which rate leaves no stall.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise

import numpy as np

TOLERANCE = 0.01
RESAMPLES = 400
CONFIDENCE = 0.9


class Side(Enum):
    """BETWEEN: among the measured rates. BELOW_ALL: no measured rate is too slow, so the knee is at most the least.
    ABOVE_ALL: TTFT still improves between the two largest, so the knee is at least the largest but one.
    """

    BETWEEN = "between"
    BELOW_ALL = "below_all"
    ABOVE_ALL = "above_all"


@dataclass(frozen=True, slots=True)
class Sample:
    """One measured request."""

    rate_bytes_per_s: float
    ttft_s: float


@dataclass(frozen=True, slots=True)
class Knee:
    """The rate, and the interval in which it lies when samples are drawn anew (bootstrap, `CONFIDENCE`)."""

    rate_bytes_per_s: float
    low_bytes_per_s: float
    high_bytes_per_s: float
    side: Side

    def margin_bytes_per_s(self, zero_stall_bytes_per_s: float) -> float:
        """delta; negative where less than r* is enough."""
        return self.rate_bytes_per_s - zero_stall_bytes_per_s


def without_first_layer(samples: Sequence[Sample], layer_bytes: float) -> list[Sample]:
    """The same, less what the first layer takes at each rate."""
    return [Sample(each.rate_bytes_per_s, each.ttft_s - layer_bytes / each.rate_bytes_per_s) for each in samples]


def find_knee(
    samples: Sequence[Sample], tolerance: float = TOLERANCE, seed: int = 1, resamples: int = RESAMPLES
) -> Knee:
    """From samples of at least three rates, in any order. Raises ValueError for fewer, and for rates or times that are
    not positive.
    """
    by_rate = _by_rate(samples)
    if len(by_rate) < 3:
        raise ValueError(f"a knee needs three rates, not {len(by_rate)}")
    rate, side = _knee(by_rate, tolerance)
    random = np.random.default_rng(seed)
    found = [
        _knee({each: random.choice(times, len(times)).tolist() for each, times in by_rate.items()}, tolerance)[0]
        for _ in range(resamples)
    ]
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(found, [tail, 1 - tail], method="nearest") if found else (rate, rate)
    return Knee(rate, min(rate, float(low)), max(rate, float(high)), side)


def falling_curve(samples: Sequence[Sample]) -> list[Sample]:
    """T(r): a sample for each rate, ascending."""
    return _curve(_by_rate(samples))


def _by_rate(samples: Sequence[Sample]) -> dict[float, list[float]]:
    if any(each.rate_bytes_per_s <= 0 or each.ttft_s <= 0 for each in samples):
        raise ValueError("rates and times are positive")
    found: dict[float, list[float]] = {}
    for each in sorted(samples, key=lambda sample: sample.rate_bytes_per_s):
        found.setdefault(each.rate_bytes_per_s, []).append(each.ttft_s)
    return found


def _curve(by_rate: Mapping[float, Sequence[float]]) -> list[Sample]:
    """Medians, made non-increasing by pooling neighbours that are not (each median weighs as much as any other)."""
    pools: list[list[float]] = []
    for times in by_rate.values():
        pools.append([statistics.median(times)])
        while len(pools) > 1 and statistics.fmean(pools[-1]) > statistics.fmean(pools[-2]):
            last = pools.pop()
            pools[-1] += last
    return list(map(Sample, by_rate, (statistics.fmean(pool) for pool in pools for _ in pool)))


def _knee(by_rate: Mapping[float, Sequence[float]], tolerance: float) -> tuple[float, Side]:
    curve = _curve(by_rate)
    enough_s = (1 + tolerance) * curve[-1].ttft_s
    if curve[0].ttft_s <= enough_s:
        return curve[0].rate_bytes_per_s, Side.BELOW_ALL
    if curve[-2].ttft_s > enough_s:
        return curve[-2].rate_bytes_per_s, Side.ABOVE_ALL
    slower, faster = next(pair for pair in pairwise(curve) if pair[1].ttft_s <= enough_s)
    share = (slower.ttft_s - enough_s) / (slower.ttft_s - faster.ttft_s)
    inverse = 1 / slower.rate_bytes_per_s
    return 1 / (inverse + share * (1 / faster.rate_bytes_per_s - inverse)), Side.BETWEEN
