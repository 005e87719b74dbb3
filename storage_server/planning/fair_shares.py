"""Shares of something that all requests use, such as memory: no bucket has all of it, and no caller. Pure state.

A caller may have any number of buckets, so that a bound for each bucket keeps nobody from taking all.

    of 16 with the fraction 1/2:   caller x has 8, in two buckets   ->  y may have 4, and z then 2
"""

from __future__ import annotations

from collections import Counter


class FairShares:
    """At most `total` in all. One bucket has at most `fraction` of that, and one caller `fraction` of what other
    callers leave: so there is always some for one more.
    """

    def __init__(self, total: int, fraction: float) -> None:
        self._total = total
        self._fraction = fraction
        self._of_buckets: Counter[str] = Counter()
        self._of_callers: Counter[str] = Counter()
        self.held = 0
        """The sum of what all have."""

    def left(self, bucket: str, caller: str) -> float:
        """How much more the caller may have for the bucket."""
        of_caller = self._of_callers[caller]
        others_leave = self._total - (self.held - of_caller)
        return min(
            self._total - self.held,
            self._fraction * self._total - self._of_buckets[bucket],
            self._fraction * others_leave - of_caller,
        )

    def take(self, bucket: str, caller: str, amount: int) -> None:
        """Count so much more."""
        self._of_buckets[bucket] += amount
        self._of_callers[caller] += amount
        self.held += amount

    def give_back(self, bucket: str, caller: str, amount: int) -> None:
        """Count so much less."""
        for amounts, name in ((self._of_buckets, bucket), (self._of_callers, caller)):
            amounts[name] -= amount
            if not amounts[name]:
                del amounts[name]  # by itself: `-=` of Counters looks at all, and a caller names many buckets
        self.held -= amount
