"""Stamps: the time of day in microseconds, but always behind every stamp that was seen. Of two changes of which the
later one knows the earlier one, the later one has the greater stamp, however wrong the servers' clocks are (a hybrid
logical clock). The time of day is that of the shared file system, which all servers see alike. A stamp that is more
than AHEAD_S later is not taken over yet, and none is given: changes of a server whose stamps run ahead would hide those
of all others.

The clock of a file system may leap years ahead, and come back. Then stamps go on behind those of the leap, since the
changes that were answered meanwhile hold. So "later" counts from the latest time that the file system has ever shown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

AHEAD_S = 86_400.0
SHOWN_STEP_S = AHEAD_S / 2
"""The times that a file system has shown are known to this step."""
TIME_S_MAX = 250_000_000_000.0
"""A later time, of the year 9892, is taken for this one: stamps end with the year 9999, and need room behind it."""


class ClockError(Exception):
    """No stamp can be given; the message says why."""


class StampClock:
    """Used by one thread, but for `latest` and `note_shown`. `now_s` gives Unix seconds."""

    def __init__(self, now_s: Callable[[], float], last: int) -> None:
        self._now_s = now_s
        self._last = last
        self._shown_s = 0.0

    def observe(self, stamp: int) -> None:
        """Note that this stamp was seen."""
        self._last = max(self._last, stamp)

    def note_shown(self, shown_s: float) -> None:
        """Note that the clock of the file system has shown this time. May be called from any thread."""
        self._shown_s = max(self._shown_s, shown_s)

    def go_on_behind(self, last: int, shown_s: Iterable[float]) -> None:
        """Give no stamp up to `last`, which was taken over in an earlier run. Where it is later than any may be, one
        of the times explains it that others were shown; or else it proves by itself that such a time was shown. That
        says half a day more than others know, so that a neighbour could step stamps up with it: it counts last.
        """
        self.observe(last)
        if last > self.latest:
            self.note_shown(max(shown_s, default=0.0))
        if last > self.latest:
            self.note_shown(last / 1e6 - SHOWN_STEP_S)

    @property
    def latest(self) -> int:
        """The latest stamp that makes sense now."""
        return int((min(max(self._now_s(), self._shown_s), TIME_S_MAX) + AHEAD_S) * 1e6)

    def stamp(self) -> int:
        """A stamp behind all that were given or seen. Raises ClockError where others would not take it over."""
        stamp = max(self._last + 1, int(min(self._now_s(), TIME_S_MAX) * 1e6))
        if stamp > self.latest:
            ahead_s = stamp / 1e6 - self._now_s()
            raise ClockError(
                f"the newest stamp is {ahead_s:.0f} s ahead of the file system's clock: has that gone back?"
            )
        self._last = stamp
        return stamp
