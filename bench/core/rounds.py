"""Rounds of ways that take turns, ratios within a round, and targets: what benches make of their samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeVar

import numpy as np

from bench.beds.processes import BaselineError
from bench.core.lines import plain
from objectcache.calibration.samples import RoundTurns, Spread, interleaved, spread

Way = TypeVar("Way")
Sample = TypeVar("Sample")
RESAMPLES = 2000
Failed = Callable[[Way, BaselineError], None]


def sampled(
    ways: Mapping[Way, Callable[[int], Sample]],
    runs: int,
    title: str,
    *,
    uncounted: int = 1,
    turns: RoundTurns = RoundTurns.SAME,
    failed: Failed[Way] | None = None,
) -> dict[Way, list[Sample]]:
    """A sample of each way in every counted round; a way is given the number of the round. `failed` is told of a way
    that raises BaselineError, whose samples are dropped, and which is left out from there on. Raises what ways raise.
    """
    taken: dict[Way, list[Sample]] = {way: [] for way in ways}
    for round_index, way in interleaved(list(ways), runs, title, uncounted=uncounted, turns=turns):
        if way not in taken:
            continue
        try:
            sample = ways[way](round_index)
        except BaselineError as error:
            if failed is None:
                raise
            failed(way, error)
            del taken[way]
            continue
        if round_index > 0:
            taken[way].append(sample)
    return taken


def paired(
    ours: Sequence[Sample],
    theirs: Sequence[Sample],
    ratio: Callable[[Sample, Sample], float] = lambda a, b: a / b,  # type: ignore[operator]
) -> list[float]:
    """Ratios of samples of the same round. Raises ValueError where they have not the same rounds."""
    return [ratio(one, other) for one, other in zip(ours, theirs, strict=True)]


class Side(Enum):
    """On which side of its limit a value has to be."""

    AT_LEAST = "at least"
    MORE_THAN = "more than"
    AT_MOST = "at most"


@dataclass(frozen=True, slots=True)
class Target:
    """A limit from the issue of this project, and the worst of the cases that it speaks of: a value, or a spread whose
    median is judged. `value` is None, with the `reason`, where nothing was measured.
    """

    what: str
    limit: float
    value: float | Spread | None
    side: Side = Side.AT_LEAST
    case: str | None = None
    ours: str | None = None
    reason: str | None = None

    @property
    def is_met(self) -> bool | None:
        """None where nothing was measured."""
        if self.value is None:
            return None
        seen = self.value.median if isinstance(self.value, Spread) else self.value
        if self.side is Side.AT_MOST:
            return seen <= self.limit
        return seen > self.limit or (self.side is Side.AT_LEAST and seen == self.limit)

    def json(self, *further: str, limit_name: str = "limit") -> dict[str, Any]:
        """Plain values, the limit under a name of the result's own, and these further fields."""
        found = {"what": self.what, limit_name: self.limit, "value": plain(self.value), "is_met": self.is_met}
        return found | {name: plain(getattr(self, name)) for name in further}


def interval(values: Sequence[float], seed: int = 1) -> Spread:
    """The median, and the interval in which it lies in 95 % of the cases where the values are drawn anew (bootstrap).
    Raises ValueError without a value.
    """
    if not values:
        raise ValueError("no samples")
    drawn = np.random.default_rng(seed).choice(np.asarray(values), (RESAMPLES, len(values)))
    low, high = np.percentile(np.median(drawn, axis=1), (2.5, 97.5))
    return Spread(float(np.median(values)), float(low), float(high))


def spreads(samples: Mapping[str, Sequence[float]]) -> dict[str, Spread]:
    """The spread of each."""
    return {name: spread(values) for name, values in samples.items()}
