"""Stamps: the time of day in microseconds, but always behind every stamp that was seen. Of two changes of which the
later one knows the earlier one, the later one has the greater stamp, however wrong the servers' clocks are (a hybrid
logical clock). The time of day is that of the shared file system, which all servers see alike. A stamp that is more
than AHEAD_S later makes no sense: a server that took it over could soon give no stamp any more.
"""

from __future__ import annotations

from collections.abc import Callable

AHEAD_S = 86_400.0


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
        """A stamp behind all that were given or seen."""
        self._last = max(self._last + 1, int(self._now_s() * 1e6))
        return self._last
