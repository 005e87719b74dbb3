"""SlowReaders: what is read stays on the disk until it has been read, also where it was evicted meanwhile. While others
wait for room, reads end that have lasted long, by access keys that read more than their share.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

SLOW_S = 5.0
"""A client that reads at the least rate has read 320 KiB in this time, and any other one its object."""
SHARE = 0.25
"""Of the directory's bound: what one key may be reading while others wait."""


@dataclass(frozen=True, slots=True, eq=False)
class Reading:
    """One read under way: whose it is, the bytes that it keeps, when it began, and the task that it ends with."""

    access_key: str
    nbytes: int
    began_s: float
    task: asyncio.Task[object] | None


def to_end(readings: Iterable[Reading], share_bytes: float, now_s: float) -> list[Reading]:
    """The reads that must end: of each key that reads more than its share the longest ones, until it does not."""
    found: list[Reading] = []
    ordered = sorted(readings, key=lambda each: each.began_s)
    kept = Counter[str]()
    for each in ordered:
        kept[each.access_key] += each.nbytes
    for each in ordered:
        if kept[each.access_key] > share_bytes and now_s - each.began_s >= SLOW_S:
            kept[each.access_key] -= each.nbytes
            found.append(each)
    return found


class SlowReaders:
    """The reads of one directory. `limit_bytes` (None: no bound) is what it may hold, and `is_waited` says whether
    somebody waits for room. Used on one event loop.
    """

    def __init__(self, limit_bytes: Callable[[], int | None], is_waited: Callable[[], bool]) -> None:
        self._limit_bytes = limit_bytes
        self._is_waited = is_waited
        self._readings: set[Reading] = set()
        self._timer: asyncio.TimerHandle | None = None
        self.ended_count = 0

    @contextmanager
    def reading(self, access_key: str, nbytes: int) -> Iterator[None]:
        """Until the block ends the current task reads so many bytes, and may be cancelled."""
        loop = asyncio.get_running_loop()
        each = Reading(access_key, nbytes, loop.time(), asyncio.current_task())
        self._readings.add(each)
        if self._timer is None:
            self._timer = loop.call_later(SLOW_S, self._look, loop)
        try:
            yield
        finally:
            self._readings.discard(each)

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = loop.call_later(SLOW_S / 5, self._look, loop) if self._readings else None
        limit_bytes = self._limit_bytes()
        if limit_bytes is None or not self._is_waited():
            return
        for each in to_end(self._readings, SHARE * limit_bytes, loop.time()):
            self._readings.discard(each)
            self.ended_count += 1
            if each.task is not None:
                each.task.cancel()
