"""Threads that read files. A file may be slow, or hang, and nothing ends a read that hangs: it keeps its thread, and
nobody else.

A read that has brought nothing for SLOW_S gives its place to others, for which there are spare threads. One that has
brought nothing for HANGS_S hangs: further reads of its file are told to slow down at once, since they would keep what
others need, such as memory and turns. Files have owners, by default each is its own. Where several files of one owner
hang, so do all, as far as anybody knows.

    waiting, by owner and file (rules/thread_turns)  ──▶  reading  ──▶  slow: place given up  ──▶  hangs: refused
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Collection
from functools import partial
from typing import TypeVar

from descriptors.errors import ErrorCode, ServerError
from objectcache.adapters.threads import finished
from storage_server.kernel.data import replaceable_threads
from storage_server.kernel.data.disk import disk_error
from storage_server.kernel.data.replaceable_threads import CallProgress, ReplaceableThreads, SlowCalls, ThreadCall
from storage_server.kernel.rules.thread_turns import SEVERAL, ThreadTurns, TurnBounds

HANGS_S = 4.0
AHEAD = 8
"""So many reads for each thread may wait that nobody can call off."""
OWNER_FILES_MAX = 4
"""An owner of whose files so many hang is taken for one that hangs."""
_T = TypeVar("_T")


class _Read(ThreadCall):
    """A read of these files."""

    def __init__(self, file_ids: Collection[str], read: Callable[[], object], progress: CallProgress | None) -> None:
        self.file_ids = frozenset(file_ids)
        file_id = next(iter(self.file_ids)) if len(self.file_ids) == 1 else SEVERAL
        super().__init__(file_id, partial(_carry_out, read), progress)
        self.is_doubtful = False
        self.hangs = False


class FileThreads:
    """`count` reads at a time, of which reads of one owner's files are at most `owner_max`; `owner_of` says whose a
    file is. Used on one event loop.
    """

    def __init__(self, count: int, owner_max: int, owner_of: Callable[[str], str] = str) -> None:
        spare_count = replaceable_threads.SPARE_THREADS
        bounds = TurnBounds(owner_max, owner_max + spare_count // 2, owner_max)
        turns: ThreadTurns[ThreadCall] = ThreadTurns(bounds, owner_of)
        self._threads = ReplaceableThreads(count, "file-reads", turns)
        self._slow = SlowCalls(self._threads, spare_count, self._note_quiet)
        self._owner_of = owner_of
        self._ahead_max = AHEAD * count
        self._hanging_max = count + spare_count
        self._doubtful: Counter[str] = Counter()
        """Files of reads that are slow."""
        self._hanging: dict[str, Counter[str]] = {}
        """Files of which reads hang, by their owners: how many do."""
        self._hanging_count = 0

    @property
    def has_queue(self) -> bool:
        """Whether a read waits for a place."""
        return self._threads.waiting_count > 0

    def close(self) -> None:
        """Finish running reads."""
        self._slow.close()
        self._threads.close()

    def may_hang(self, file_ids: Collection[str]) -> bool:
        """Whether a read that uses one of these files is slow. A reader of several files reads them one by one then, so
        that it is known which of them hangs.
        """
        return bool(self._doubtful) and not self._doubtful.keys().isdisjoint(file_ids)

    def begin(
        self, file_ids: Collection[str], read: Callable[[], _T], progress: CallProgress | None = None
    ) -> asyncio.Future[_T] | None:
        """The result of `run_on`, where the read begins soon, else None. Nobody may cancel it, for its thread uses the
        caller's memory until it ends.
        """
        made = _Read(file_ids, read, progress)
        if self._is_stuck(made.file_id) or self._doubtful or self._threads.waiting_count >= self._ahead_max:
            return None
        return self._submitted(made)

    async def run_on(
        self, file_ids: Collection[str], read: Callable[[], _T], progress: CallProgress | None = None
    ) -> _T:
        """Call `read`, which reads these files; where it has begun to its end, even when the caller is cancelled. One
        that may take longer than HANGS_S notes its `progress`. An OSError becomes a ServerError. Raises
        ServerError(SlowDown) where reads of the file hang.
        """
        made = _Read(file_ids, read, progress)
        if self._is_stuck(made.file_id):
            raise _slow_down()
        result: asyncio.Future[_T] = self._submitted(made)
        try:
            return await asyncio.shield(result)
        except asyncio.CancelledError:
            if not self._threads.withdraw(made):
                await finished(result)
            raise

    def _submitted(self, made: _Read) -> asyncio.Future[_T]:
        self._threads.submit(made)
        self._slow.watch()
        result: asyncio.Future[_T] = asyncio.wrap_future(made.result)
        result.add_done_callback(lambda _: self._end(made))
        return result

    def _note_quiet(self, read: ThreadCall, quiet_s: float) -> None:
        assert isinstance(read, _Read)
        if not read.is_doubtful:
            read.is_doubtful = True
            self._doubtful.update(read.file_ids)
        if quiet_s < HANGS_S or read.hangs:
            return
        read.hangs = True
        self._hanging_count += 1
        self._hanging.setdefault(self._owner(read.file_id), Counter())[read.file_id] += 1
        self._threads.refuse(self._is_stuck, _slow_down)

    def _end(self, read: _Read) -> None:
        if read.is_doubtful:
            self._doubtful -= Counter(read.file_ids)
        if read.hangs:
            self._hanging_count -= 1
            owner = self._owner(read.file_id)
            self._hanging[owner] -= Counter((read.file_id,))
            if not self._hanging[owner]:
                del self._hanging[owner]

    def _is_stuck(self, file_id: str) -> bool:
        """Whether no read of this file is likely to come to an end. Nobody knows that of reads of several files."""
        if self._hanging_count >= self._hanging_max:
            return True
        hanging = self._hanging.get(self._owner(file_id))
        return file_id != SEVERAL and hanging is not None and (file_id in hanging or len(hanging) >= OWNER_FILES_MAX)

    def _owner(self, file_id: str) -> str:
        return SEVERAL if file_id == SEVERAL else self._owner_of(file_id)


def _carry_out(read: Callable[[], _T]) -> _T:
    try:
        return read()
    except OSError as error:
        raise disk_error(error, "serving the request") from error


def _slow_down() -> ServerError:
    return ServerError(ErrorCode.SLOW_DOWN, "the file system does not answer", retryable=True)
