"""Bodies that arrive into room that they got for all they announced, and which of them give it up while others wait."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from descriptors.units import KIB

SLOW_S, LEAST_BYTES_PER_S = 5.0, 256 * KIB
"""Where others wait for room, a body that arrives for so long must have come at this rate,"""
WHOLE_S = 60.0
"""and at the rate by which all that it announced comes within this time."""
PART_COMING = 1 / 2
"""While others wait, one access key may have announced no more than this part of a cache that has not come."""


@dataclass(slots=True, eq=False)
class ArrivingBody:
    """A body that arrives since `begun_s` of the event loop's time into `room_bytes` that it got here, and of which
    `nbytes` have come. `limit` ends it. Its pace is that of the last one or two SLOW_S, so that nobody may send much at
    once and drip afterwards. Time in which the server is busy with what has come does not count.
    """

    begun_s: float
    limit: asyncio.Timeout
    room_bytes: int = 0
    nbytes: int = 0
    by: str = ""
    """The access key that it is for."""
    _busy_s: float = 0.0
    _busy_since_s: float | None = None
    _marks: tuple[tuple[float, int], tuple[float, int]] | None = None
    """When the last two windows began, and how much had come by then."""

    def came(self, nbytes: int, now_s: float) -> None:
        """Count bytes that have come."""
        clock_s = self._clock_s(now_s)
        older, newer = self._marks or ((self.begun_s, 0), (self.begun_s, 0))
        if clock_s - newer[0] >= SLOW_S:
            older, newer = newer, (clock_s, self.nbytes)
        self._marks = older, newer
        self.nbytes += nbytes

    @contextmanager
    def busy(self) -> Iterator[None]:
        """The server is busy with what has come, and takes nothing more meanwhile."""
        clock = asyncio.get_running_loop().time
        self._busy_since_s = clock()
        try:
            yield
        finally:
            self._busy_s += clock() - self._busy_since_s
            self._busy_since_s = None

    def is_slow(self, now_s: float) -> bool:
        """Whether it comes too slowly for a body that keeps others waiting."""
        clock_s = self._clock_s(now_s)
        older, newer = self._marks or ((self.begun_s, 0), (self.begun_s, 0))
        since_s, known = newer if clock_s - newer[0] >= SLOW_S else older
        least_bytes_per_s = max(LEAST_BYTES_PER_S, self.room_bytes / WHOLE_S)
        return clock_s - since_s >= SLOW_S and self.nbytes - known < least_bytes_per_s * (clock_s - since_s)

    @property
    def coming_bytes(self) -> int:
        """The bytes that it has room for and that have not come."""
        return max(0, self.room_bytes - self.nbytes)

    def end(self, now_s: float) -> None:
        """Have it give up the room that it got for all it announced."""
        if self.limit.when() is None:
            self.limit.reschedule(now_s)

    def _clock_s(self, now_s: float) -> float:
        """The loop's time, without that in which the server was busy."""
        return (now_s if self._busy_since_s is None else self._busy_since_s) - self._busy_s


class ArrivingBodies:
    """The bodies that arrive into the room of one bound."""

    def __init__(self) -> None:
        self._bodies: list[ArrivingBody] = []

    @contextmanager
    def taken_by(self, body: ArrivingBody) -> Iterator[None]:
        """A body arrives into room that it got here."""
        self._bodies.append(body)
        try:
            yield
        finally:
            self._bodies.remove(body)

    def end_slow(self, lacking_bytes: float, now_s: float, greedy: frozenset[str] = frozenset()) -> bool:
        """Have bodies that come too slowly, or for one of these keys, give room up, the largest first, where that is
        enough for so many bytes. Returns whether it is enough.
        """
        ended = (each for each in self._bodies if each.is_slow(now_s) or each.by in greedy)
        slow = sorted(ended, key=lambda body: -body.room_bytes)
        if sum(body.room_bytes for body in slow) < lacking_bytes:
            return False
        for body in slow:
            if lacking_bytes <= 0:
                break
            body.end(now_s)
            lacking_bytes -= body.room_bytes
        return True

    def greedy_keys(self, limit_bytes: float) -> frozenset[str]:
        """The access keys whose bytes to come take too much of a bound."""
        coming_bytes: Counter[str] = Counter()
        for body in self._bodies:
            coming_bytes[body.by] += body.coming_bytes
        return frozenset(by for by, nbytes in coming_bytes.items() if nbytes > PART_COMING * limit_bytes)
