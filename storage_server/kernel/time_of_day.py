"""The time of day for what deletes objects: a clock that leaps ahead must not delete them."""

from __future__ import annotations

import logging

LEAP_S_MAX = 300.0
"""A slewed clock moves by less than this against the steady clock between two looks at it."""
_log = logging.getLogger(__name__)


class TimeOfDay:
    """The time of day, without leaps forward: after a leap it goes on at the pace of the steady clock. The reason: an
    object that expires late can still expire, but an object that a wrong clock expired is lost. Times in seconds.
    """

    def __init__(self, unix_s: float, monotonic_s: float) -> None:
        self._ahead_s = unix_s - monotonic_s
        self.leap_s = 0.0
        """By how much the clock was ahead of this time when it was last asked; 0 while it is followed."""

    def now(self, unix_s: float, monotonic_s: float) -> float:
        """The time of day, or the time that it should be by the steady clock if that is earlier."""
        ahead_s = unix_s - monotonic_s
        if ahead_s - self._ahead_s > LEAP_S_MAX:
            leap_s = ahead_s - self._ahead_s
            if not self.leap_s:
                _log.warning("the clock has leapt %.0f s ahead: what expires ignores the leap until a restart", leap_s)
            self.leap_s = leap_s
            return monotonic_s + self._ahead_s
        self._ahead_s, self.leap_s = ahead_s, 0.0
        return unix_s
