"""Stamps: the time of day in microseconds, but always behind every stamp that was seen. Of two changes of which the
later one knows the earlier one, the later one has the greater stamp, however wrong the servers' clocks are (a hybrid
logical clock).
"""

from __future__ import annotations

from collections.abc import Callable


class StampClock:
    """Used by one thread. `now_s` gives Unix seconds."""

    def __init__(self, now_s: Callable[[], float], last: int) -> None:
        self._now_s = now_s
        self._last = last

    def observe(self, stamp: int) -> None:
        """Note that this stamp was seen."""
        self._last = max(self._last, stamp)

    def stamp(self) -> int:
        """A stamp behind all that were given or seen."""
        self._last = max(self._last + 1, int(self._now_s() * 1e6))
        return self._last
