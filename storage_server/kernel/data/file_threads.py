"""Threads that read files. A file may hang, and nothing ends a read that hangs: it keeps its thread, and nobody else.

A read that has brought nothing for HANGS_S hangs, and gives its place to others, for which there are spare threads.
Files have owners, by default each is its own, and reads of one owner's files may have a few threads at most. While all
of these hang, further reads are told to slow down at once: they would keep what others need, such as memory and turns.

    waiting, by owner  ──▶  at the threads, AHEAD for each  ──▶  reading

A thread that is done takes the next read itself: the event loop may be busy, and would be late with each.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from descriptors.errors import ErrorCode, ServerError
from objectcache.adapters.threads import to_end
from storage_server.kernel.data.disk import disk_error
from storage_server.kernel.data.replaceable_threads import ReplaceableThreads, ThreadCall

HANGS_S = 4.0
AHEAD = 8
"""So many reads are at the threads for each of them."""
SPARE_THREADS = 32
"""So many reads that hang give their places to others."""
_SEVERAL = ""
"""The owner of a read of several owners' files, of which nobody knows which one hangs."""
_T = TypeVar("_T")


class ReadProgress:
    """When a long read has brought something last, by the steady clock. One of many places says nothing in between, and
    may take `first_s` longer. Used in any thread.
    """

    def __init__(self, first_s: float = 0.0) -> None:
        self.first_s = first_s
        self.at_s = float("-inf")

    def note(self, pause_s: float = 0.0) -> None:
        """It has brought something now, or begins, and goes on after a pause of its own."""
        self.at_s = time.monotonic() + pause_s


@dataclass(eq=False, slots=True)
class _Read:
    """A read of files of these owners."""

    owners: frozenset[str]
    progress: ReadProgress
    call: ThreadCall | None = None
    has_begun: bool = False
    hangs: bool = False
    """Another thread is in place of its own then."""
    watch: asyncio.TimerHandle | None = None

    @property
    def owner(self) -> str:
        """The one whose threads it takes."""
        return next(iter(self.owners)) if len(self.owners) == 1 else _SEVERAL


@dataclass(eq=False, slots=True)
class _Owner:
    """The reads that are at the threads, and those that wait. So many of the former hang."""

    running: set[_Read] = field(default_factory=set)
    hanging_count: int = 0
    waiting: deque[tuple[_Read, asyncio.Future[None]]] = field(default_factory=deque)


class FileThreads:
    """`count` reads at a time, of which reads of one owner's files are at most `owner_max`; `owner_of` says whose a
    file is. Where an owner may have all places, one read of it that hangs is enough for others to be told to slow
    down. Used on one event loop.
    """

    def __init__(self, count: int, owner_max: int, owner_of: Callable[[str], str] = str) -> None:
        self._threads = ReplaceableThreads(count, "file-reads")
        self._count = count
        self._owner_max = owner_max
        self._owner_ahead_max = owner_max if owner_max < count else AHEAD * count
        self._owner_hanging_max = owner_max if owner_max < count else 1
        self._owner_of = owner_of
        self._running_count = 0
        self._owners: dict[str, _Owner] = {}
        """Those of reads that run or wait, and no others: a store has millions of files."""
        self._order: OrderedDict[str, None] = OrderedDict()
        """The owners for whose files reads wait, or have waited: the first one is next."""
        self._hanging: Counter[str] = Counter()
        self._hanging_count = 0

    @property
    def has_queue(self) -> bool:
        """Whether a read waits for a place."""
        return bool(self._order) or self._running_count - self._hanging_count > self._count

    def close(self) -> None:
        """Finish running reads."""
        self._threads.close()

    def may_hang(self, file_ids: Collection[str]) -> bool:
        """Whether a read of files of one of these owners hangs. A reader of several files reads them one by one
        then, so that it is known which of them hangs.
        """
        return bool(self._hanging) and any(self._owner_of(file_id) in self._hanging for file_id in file_ids)

    def begin(
        self, file_ids: Collection[str], read: Callable[[], _T], progress: ReadProgress | None = None
    ) -> asyncio.Future[_T] | None:
        """The result of `run_on`, where the read can begin at once, else None. Nobody may cancel it, for its thread
        uses the caller's memory until it ends.
        """
        made = _Read(frozenset(map(self._owner_of, file_ids)), progress or ReadProgress())
        owner = self._owners.setdefault(made.owner, _Owner())
        if self._is_stuck(owner) or not self._may_begin(made.owner, owner):
            self._forget(made.owner, owner)
            return None
        self._begin(made, owner)
        return self._submitted(made, owner, read)

    async def run_on(
        self, file_ids: Collection[str], read: Callable[[], _T], progress: ReadProgress | None = None
    ) -> _T:
        """Call `read`, which reads these files, to its end, even when the caller is cancelled. One that may take longer
        than HANGS_S notes its `progress`. An OSError becomes a ServerError. Raises ServerError(SlowDown) where all
        other reads of the owner's files hang.
        """
        made = _Read(frozenset(map(self._owner_of, file_ids)), progress or ReadProgress())
        owner = self._owners.setdefault(made.owner, _Owner())
        if self._is_stuck(owner):
            self._forget(made.owner, owner)
            raise _slow_down()
        if self._may_begin(made.owner, owner):
            self._begin(made, owner)
        else:
            await self._wait(made, owner)
        return await to_end(self._submitted(made, owner, read))

    def _submitted(self, made: _Read, owner: _Owner, read: Callable[[], _T]) -> asyncio.Future[_T]:
        made.call = self._threads.submit(partial(self._in_turn, made, owner, read))
        result: asyncio.Future[_T] = asyncio.wrap_future(made.call.result)
        result.add_done_callback(lambda _: self._end(made, owner))
        return result

    def _in_turn(self, made: _Read, owner: _Owner, read: Callable[[], _T]) -> _T:
        """Read, in a thread. Others of the owner's files may have been found to hang meanwhile."""
        if self._is_stuck(owner):
            raise _slow_down()
        made.progress.note(made.progress.first_s)
        made.has_begun = True
        try:
            return read()
        except OSError as error:
            raise disk_error(error, "serving the request") from error

    async def _wait(self, read: _Read, owner: _Owner) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        owner.waiting.append((read, turn))
        self._order.setdefault(read.owner)
        try:
            await turn
        except asyncio.CancelledError:
            if read in owner.running:
                self._end(read, owner)
            elif turn.done() and not turn.cancelled():
                turn.exception()
            raise

    def _may_begin(self, name: str, owner: _Owner) -> bool:
        return not owner.waiting and self._has_place and self._is_below(name, owner)

    @property
    def _has_place(self) -> bool:
        return self._running_count - min(self._hanging_count, SPARE_THREADS) < AHEAD * self._count

    def _is_below(self, name: str, owner: _Owner) -> bool:
        """Whether a further read of this owner's files may go to the threads, where there is room."""
        return name == _SEVERAL or len(owner.running) < self._owner_ahead_max

    def _begin(self, read: _Read, owner: _Owner) -> None:
        self._running_count += 1
        owner.running.add(read)
        read.watch = asyncio.get_running_loop().call_later(HANGS_S, self._look_at, read)

    def _end(self, read: _Read, owner: _Owner) -> None:
        self._running_count -= 1
        owner.running.discard(read)
        assert read.watch is not None
        read.watch.cancel()
        if read.hangs:
            self._hanging_count -= 1
            owner.hanging_count -= 1
            self._hanging -= Counter(read.owners)
        self._serve()
        self._forget(read.owner, owner)

    def _forget(self, name: str, owner: _Owner) -> None:
        if not owner.running and not owner.waiting:
            self._owners.pop(name, None)

    def _look_at(self, read: _Read) -> None:
        """Whether a read hangs: its place is for others then. One that waits for its place does not."""
        left_s = read.progress.at_s + HANGS_S - time.monotonic() if read.has_begun else HANGS_S
        if left_s > 0 or not read.has_begun:
            read.watch = asyncio.get_running_loop().call_later(left_s, self._look_at, read)
            return
        if read.call is None or not self._threads.replace(read.call):
            return
        read.hangs = True
        self._hanging_count += 1
        self._owners[read.owner].hanging_count += 1
        self._hanging.update(read.owners)
        for name in list(self._order):
            if self._is_stuck(self._owners[name]):
                self._refuse(name)
        self._serve()

    def _is_stuck(self, owner: _Owner) -> bool:
        """Whether no thread comes free for this owner. Reads of several owners' files are never so for being many."""
        return self._hanging_count >= self._count + SPARE_THREADS or (
            owner.hanging_count >= self._owner_hanging_max and owner is not self._owners.get(_SEVERAL)
        )

    def _refuse(self, name: str) -> None:
        del self._order[name]
        owner = self._owners[name]
        while owner.waiting:
            _, turn = owner.waiting.popleft()
            if not turn.done():
                turn.set_exception(_slow_down())
        self._forget(name, owner)

    def _serve(self) -> None:
        """Let those begin that may, one of each owner in turn. An owner that has its most is passed over; there are
        few such owners, however many wait.
        """
        passed_over = 0
        while self._has_place and passed_over < len(self._order):
            name = next(iter(self._order))
            owner = self._owners[name]
            while owner.waiting and owner.waiting[0][1].done():
                owner.waiting.popleft()
            if not owner.waiting:
                del self._order[name]
                self._forget(name, owner)
                continue
            if not self._is_below(name, owner):
                self._order.move_to_end(name)
                passed_over += 1
                continue
            read, turn = owner.waiting.popleft()
            self._begin(read, owner)
            turn.set_result(None)
            passed_over = 0
            if owner.waiting:
                self._order.move_to_end(name)
            else:
                del self._order[name]


def _slow_down() -> ServerError:
    return ServerError(ErrorCode.SLOW_DOWN, "the file system does not answer", retryable=True)
