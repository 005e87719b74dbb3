"""A clock that never goes back, and never leaps while something is waited for: what a suspended process would otherwise
do to deadlines. Pure.
"""

from __future__ import annotations

import math

LEAP_S_MAX = 0.25
"""A wake-up that comes later than this is taken to come this late."""


class SteadyClock:
    """Turns the caller's time into its own and back."""

    def __init__(self) -> None:
        self._now = -math.inf
        self._ahead_s = 0.0

    def steady(self, now: float, awaited_s: float) -> float:
        """The time, where the caller was to come back at `awaited_s` of this clock, if not infinity."""
        steady_s = now + self._ahead_s
        if steady_s < self._now:
            self._ahead_s = self._now - now
        elif self._now < awaited_s < math.inf and steady_s > awaited_s + LEAP_S_MAX:
            self._ahead_s += awaited_s + LEAP_S_MAX - steady_s
        self._now = now + self._ahead_s
        return self._now

    def callers(self, at_s: float) -> float:
        """A time of this clock as the caller counts, and none too early by rounding."""
        if at_s == math.inf or not self._ahead_s:
            return at_s
        return at_s - self._ahead_s + math.ulp(max(abs(at_s), abs(self._ahead_s)))
