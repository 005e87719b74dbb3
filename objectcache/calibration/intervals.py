"""Means of a few samples, and the intervals in which they lie. Pure.

mean ± t · s / √n      t: 97.5 % of Student's distribution with n - 1 degrees of freedom
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

_STUDENT = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120,
    2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
"""For 1 to 30 degrees of freedom."""


@dataclass(frozen=True, slots=True)
class MeanInterval:
    """A mean, and the ends of its 95 % interval. One sample has no interval: its ends are infinite."""

    mean: float
    low: float
    high: float

    def mapped(self, change: Callable[[float], float]) -> MeanInterval:
        """The same in another scale; `change` grows with its argument."""
        return MeanInterval(change(self.mean), change(self.low), change(self.high))

    def within(self, least: float, most: float) -> MeanInterval:
        """The same with ends that are between these bounds of what is measured."""
        return MeanInterval(self.mean, max(least, self.low), min(most, self.high))

    def text(self, form: str) -> str:
        """The mean, and in brackets the ends."""
        return f"{self.mean:{form}} ({self.low:{form}} to {self.high:{form}})"


def student(freedom: int) -> float:
    """The 97.5 % quantile. Beyond the table by 1.96 + 2.4 / n, which is right to 0.003."""
    return _STUDENT[freedom - 1] if freedom <= len(_STUDENT) else 1.96 + 2.4 / freedom


def mean_interval(samples: Sequence[float]) -> MeanInterval:
    """Raises ValueError where there are no samples."""
    count = len(samples)
    if not count:
        raise ValueError("no samples")
    mean = sum(samples) / count
    if count == 1:
        return MeanInterval(mean, -math.inf, math.inf)
    deviation = math.sqrt(sum((each - mean) ** 2 for each in samples) / (count - 1))
    half = student(count - 1) * deviation / math.sqrt(count)
    return MeanInterval(mean, mean - half, mean + half)
