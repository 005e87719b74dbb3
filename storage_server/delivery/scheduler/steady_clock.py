"""A clock that never goes back, and never leaps while a time is awaited. So a process that was suspended does not find
all its deadlines missed. Pure.

Example: the caller was to come back at 10 s, but the process was suspended and it comes at 70 s. This clock says 10.25
(`LEAP_S_MAX` = 0.25) and from then on runs 59.75 s behind the caller's clock.
"""

from __future__ import annotations

import math

LEAP_S_MAX = 0.25
"""A wake-up that comes later than this is treated as if it came this late."""


class SteadyClock:
    """Turns the caller's time into this clock's time and back."""

    def __init__(self) -> None:
        self._now = -math.inf
        self._ahead_s = 0.0

    def steady(self, now: float, awaited_s: float) -> float:
        """This clock's time. `awaited_s` is the time of this clock at which the caller was to come
        back, or infinity.
        """
        steady_s = now + self._ahead_s
        if steady_s < self._now:
            self._ahead_s = self._now - now
        elif self._now < awaited_s < math.inf and steady_s > awaited_s + LEAP_S_MAX:
            self._ahead_s += awaited_s + LEAP_S_MAX - steady_s
        self._now = now + self._ahead_s
        return self._now

    def callers_time(self, at_s: float) -> float:
        """The caller's time for a time of this clock, rounded up so that the caller does not come too early."""
        if at_s == math.inf or not self._ahead_s:
            return at_s
        return at_s - self._ahead_s + math.ulp(max(abs(at_s), abs(self._ahead_s)))
