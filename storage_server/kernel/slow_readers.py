"""SlowReaders: what is read stays on the disk until it has been read, also where it was evicted or deleted meanwhile.
While others lack room, reads end that have lasted long, by access keys whose reads withhold more than their share.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from descriptors.errors import ErrorCode, ServerError
from storage_server.planning.extent import Extent

SLOW_S = 5.0
"""A client that reads at the least rate has read 320 KiB in this time, and any other one its object."""
SHARE = 0.25
"""One key's reads may withhold this part of the directory's bound while others lack room."""


@dataclass(frozen=True, slots=True, eq=False)
class ReadUnderWay:
    """One read under way: whose it is, the extents that it keeps readable, when it began, and the task that carries it
    out.
    """

    access_key: str
    extents: Sequence[Extent]
    began_s: float
    task: asyncio.Task[object] | None


def to_end(withheld: Iterable[tuple[ReadUnderWay, int]], share_bytes: float, now_s: float) -> list[ReadUnderWay]:
    """The reads that must end, given each with the bytes that it withholds: of each key whose reads withhold more than
    its share the longest ones, until they do not. A read that withholds nothing gives no room, and goes on.
    """
    found: list[ReadUnderWay] = []
    ordered = sorted(((each, nbytes) for each, nbytes in withheld if nbytes), key=lambda each: each[0].began_s)
    kept = Counter[str]()
    for each, nbytes in ordered:
        kept[each.access_key] += nbytes
    for each, nbytes in ordered:
        if kept[each.access_key] > share_bytes and now_s - each.began_s >= SLOW_S:
            kept[each.access_key] -= nbytes
            found.append(each)
    return found


class SlowReaders:
    """The reads of one directory. `limit_bytes` (None: no bound) is what it may hold, `lacks_room` says whether
    somebody lacks room, and `withheld_bytes` how many bytes of these extents are kept for their readers alone. Used on
    one event loop, but for `keep_others_out`.
    """

    def __init__(
        self,
        limit_bytes: Callable[[], int | None],
        lacks_room: Callable[[], bool],
        withheld_bytes: Callable[[Sequence[Extent]], int],
    ) -> None:
        self._limit_bytes = limit_bytes
        self._lacks_room = lacks_room
        self._withheld_bytes = withheld_bytes
        self._readings: set[ReadUnderWay] = set()
        self._ended: set[ReadUnderWay] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._looking: asyncio.Task[None] | None = None
        self.ended_count = 0

    @contextmanager
    def reading(self, access_key: str, extents: Sequence[Extent]) -> Iterator[None]:
        """Until the block ends the current task reads these extents.

        Raises ServerError(SlowDown) out of the block where the read must end.
        """
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        cancelled_before = 0 if task is None else task.cancelling()
        each = ReadUnderWay(access_key, extents, loop.time(), task)
        self._readings.add(each)
        if self._timer is None and self._looking is None:
            self._timer = loop.call_later(SLOW_S, self._look, loop)
        try:
            yield
        except asyncio.CancelledError:
            if each in self._ended and task is not None and task.uncancel() <= cancelled_before:
                reason = "this read took long, and others lack the room that its bytes take: read again, and faster"
                raise ServerError(ErrorCode.SLOW_DOWN, reason, retryable=True) from None
            raise
        finally:
            self._readings.discard(each)
            self._ended.discard(each)

    def keep_others_out(self) -> bool:
        """Whether some key's reads withhold more than its share, so that room comes when they end. May be called from
        any thread.
        """
        limit_bytes = self._limit_bytes()
        if limit_bytes is None:
            return False
        kept = Counter[str]()
        for each in tuple(self._readings):
            kept[each.access_key] += self._withheld_bytes(each.extents)
            if kept[each.access_key] > SHARE * limit_bytes:
                return True
        return False

    def _withheld(self, readings: Sequence[ReadUnderWay]) -> list[tuple[ReadUnderWay, int]]:
        return [(each, self._withheld_bytes(each.extents)) for each in readings]

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = None
        if self._limit_bytes() is not None and self._lacks_room():
            self._looking = loop.create_task(self._end_some(loop))
        else:
            self._look_later(loop)

    def _look_later(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = loop.call_later(SLOW_S / 5, self._look, loop) if self._readings else None

    async def _end_some(self, loop: asyncio.AbstractEventLoop) -> None:
        """Read in a thread what is withheld, because a delivery has up to 65,536 chunks."""
        try:
            withheld = await asyncio.to_thread(self._withheld, tuple(self._readings))
            limit_bytes = self._limit_bytes()
            if limit_bytes is None:
                return
            for each in to_end(withheld, SHARE * limit_bytes, loop.time()):
                if each in self._readings and each.task is not None:
                    self._readings.discard(each)
                    self._ended.add(each)
                    self.ended_count += 1
                    each.task.cancel()
        finally:
            self._looking = None
            self._look_later(loop)
