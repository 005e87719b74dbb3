"""Stamps: the time of day in microseconds, but always behind every stamp that was seen. Of two changes of which the
later one knows the earlier one, the later one has the greater stamp, however wrong the servers' clocks are (a hybrid
logical clock). The time of day is that of the shared file system, which all servers see alike. A stamp that is more
than AHEAD_S later is not taken over yet, and none is given: changes of a server whose stamps run ahead would hide those
of all others.
"""

from __future__ import annotations

from collections.abc import Callable

AHEAD_S = 86_400.0


class ClockError(Exception):
    """No stamp can be given; the message says why."""


class StampClock:
    """Used by one thread, but for `latest`. `now_s` gives Unix seconds."""

    def __init__(self, now_s: Callable[[], float], last: int) -> None:
        self._now_s = now_s
        self._last = last

    def observe(self, stamp: int) -> None:
        """Note that this stamp was seen."""
        self._last = max(self._last, stamp)

    @property
    def latest(self) -> int:
        """The latest stamp that makes sense now."""
        return int((self._now_s() + AHEAD_S) * 1e6)

    def stamp(self) -> int:
        """A stamp behind all that were given or seen. Raises ClockError where others would not take it over."""
        stamp = max(self._last + 1, int(self._now_s() * 1e6))
        if stamp > self.latest:
            ahead_s = stamp / 1e6 - self._now_s()
            raise ClockError(
                f"the newest stamp is {ahead_s:.0f} s ahead of the file system's clock: has that gone back?"
            )
        self._last = stamp
        return stamp
