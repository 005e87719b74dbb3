"""The bytes that a data directory takes, and the bound on them.

Counted is what the file system has allocated: the files of extents, each from the moment its space is reserved until
the space is given back, and all other files, which are measured after each commit where there is a bound.
"""

from __future__ import annotations

import asyncio
import math
import os
import threading
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from descriptors.errors import ErrorCode, ServerError
from descriptors.units import KIB, MIB, format_bytes
from objectcache.adapters.caller import CALLER
from storage_server.planning.extent import aligned

ROOM_BYTES = 16 * MIB
"""The index and its log may grow by so much between two measurements, besides their part of the bound."""
ROOM_FRACTION = 1 / 256
"""The index of a full directory grows with the bound: a chunk's row has 4 bytes for each 16 KiB."""
BLOCK_UNIT_BYTES = 512
OFFERED_FRACTION = 0.8
"""A cache that has no size takes this fraction of a file system: others write there, too."""
WAITING_MAX = 1024
WAITING_PART = 1 / 8
"""One access key has no more than this part of these places."""
PATIENCE_S = 10.0
SLOW_S, LEAST_BYTES_PER_S = 5.0, 256 * KIB
"""Where others wait for room, a body that arrives for so long must have come at this rate,"""
WHOLE_S = 60.0
"""and at the rate by which all that it announced comes within this time."""
LACKING_S = 10.0
"""So long after a refusal somebody lacks room: writers come again, and slow reads are looked at meanwhile."""
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


class Space:
    """Methods may be called from any thread."""

    def __init__(
        self, directory: Path, bound_bytes: int | None, free_bytes: Callable[[Path], int] | None = None
    ) -> None:
        self._directory = directory
        self._free_bytes = free_bytes
        self._is_derived = False
        self._lock = threading.Lock()
        self._of_files: Counter[str] = Counter()
        self._dying: Counter[str] = Counter()
        self._extent_bytes = 0
        self._dying_bytes = 0
        self._other_bytes = 0
        self._aside_bytes = 0
        self._folders = [directory]
        self.bound_bytes = bound_bytes
        self.freed: Callable[[], None] = lambda: None
        """Called when there may be more room."""

    def derive_bound(self) -> None:
        """Bound what has no bound by OFFERED_FRACTION of what the file system offers, which is what the files take now
        and what is free beside them. Bytes that others write there count from the next commit on.
        """
        if self.bound_bytes is None and self._free_bytes is not None:
            self._is_derived = True
            self._derive()

    def count_too(self, folder: Path) -> None:
        """Measure the files of this folder, too: somebody else writes there. Call it before `load`."""
        self._folders.append(folder)

    @property
    def used_bytes(self) -> int:
        """The bytes that all files take now."""
        return self._extent_bytes + self._other_bytes

    @property
    def extent_bytes(self) -> int:
        """The bytes that extents take now."""
        return self._extent_bytes

    @property
    def dying_bytes(self) -> int:
        """The bytes that are about to be given back."""
        return self._dying_bytes

    @property
    def kept_bytes(self) -> int:
        """The bytes that extents take, without the locations that are about to be given back."""
        return self._extent_bytes - self._dying_bytes

    @property
    def extent_bytes_max(self) -> int | None:
        """How many bytes extents may take, beside all other files and what these may grow by; None for no bound."""
        if self.bound_bytes is None:
            return None
        room_bytes = ROOM_BYTES + int(ROOM_FRACTION * self.bound_bytes)
        return max(0, self.bound_bytes - room_bytes - self._other_bytes)

    @property
    def has_index_room(self) -> bool:
        """Whether the index may grow. Objects without bytes, and changes of rows, take space there alone."""
        return self.bound_bytes is None or self.used_bytes + ROOM_BYTES // 2 <= self.bound_bytes

    def take(self, file_id: str, nbytes: int) -> None:
        """Count space in a file that is reserved for a body."""
        with self._lock:
            self._of_files[file_id] += aligned(nbytes)
            self._extent_bytes += aligned(nbytes)

    def doom(self, locations: Iterable[tuple[str, int, int]]) -> None:
        """Note that no row names these locations (file, offset, bytes) any more: they are given back as soon as nobody
        can be reading them.
        """
        with self._lock:
            for file_id, _, nbytes in locations:
                self._dying[file_id] += aligned(nbytes)
                self._dying_bytes += aligned(nbytes)

    def doom_file(self, file_id: str) -> None:
        """Note that a file is about to be deleted."""
        with self._lock:
            more = self._of_files.get(file_id, 0) - self._dying.get(file_id, 0)
            if more > 0:
                self._dying[file_id] += more
                self._dying_bytes += more

    def give_back(self, file_id: str, nbytes: int) -> None:
        """Note that the file system has got these bytes of a file back."""
        with self._lock:
            given = min(aligned(nbytes), self._of_files[file_id])
            self._of_files[file_id] -= given
            self._extent_bytes -= given
            self._survive(file_id, aligned(nbytes))
        self.freed()

    def forget(self, file_id: str) -> None:
        """Note that a file was deleted."""
        with self._lock:
            self._extent_bytes -= self._of_files.pop(file_id, 0)
            self._survive(file_id, self._dying[file_id])
        self.freed()

    def revive(self, file_id: str, nbytes: int | None = None) -> None:
        """Note that so many of a file's doomed bytes (None: all) stay for nobody knows how long: a reader has the file
        pinned, or other rows name it again.
        """
        with self._lock:
            self._survive(file_id, self._dying[file_id] if nbytes is None else aligned(nbytes))

    def load(self, extents: Collection[Path]) -> None:
        """Count the files that a start has found; `extents` are those that extents may name."""
        of_files: Counter[str] = Counter()
        aside_bytes = 0
        known = frozenset(extents)
        for folder, _, names in os.walk(self._directory):
            if Path(folder) in self._folders:
                continue
            for path in (Path(folder, name) for name in names):
                if path in known:
                    of_files[path.name] = _allocated(path)
                else:
                    aside_bytes += _allocated(path)
        with self._lock:
            self._of_files, self._extent_bytes, self._aside_bytes = of_files, of_files.total(), aside_bytes
        self.measure()

    def measure(self) -> None:
        """Count the files beside the directories."""
        total_bytes = self._aside_bytes
        for folder in self._folders:
            with suppress(FileNotFoundError), os.scandir(folder) as entries:
                for entry in entries:
                    with suppress(FileNotFoundError):
                        if not entry.is_dir(follow_symlinks=False):
                            total_bytes += entry.stat(follow_symlinks=False).st_blocks * BLOCK_UNIT_BYTES
        self._other_bytes = total_bytes
        if self._is_derived:
            self._derive()

    def _derive(self) -> None:
        assert self._free_bytes is not None
        with suppress(OSError):
            self.bound_bytes = int(OFFERED_FRACTION * (self.used_bytes + self._free_bytes(self._directory)))

    def _survive(self, file_id: str, nbytes: int) -> None:
        fewer = min(nbytes, self._dying[file_id])
        self._dying[file_id] -= fewer
        self._dying_bytes -= fewer
        if not self._dying[file_id]:
            del self._dying[file_id]


def _allocated(path: Path) -> int:
    with suppress(OSError):
        return path.lstat().st_blocks * BLOCK_UNIT_BYTES
    return 0


@asynccontextmanager
async def reserved_in(bounds: Sequence[Bound], nbytes: int) -> AsyncIterator[None]:
    """Keep room for `nbytes` in all of these until the block ends. Raises what `Bound.reserved` raises."""
    async with AsyncExitStack() as stack:
        for bound in bounds:
            await stack.enter_async_context(bound.reserved(nbytes))
        yield


@dataclass(frozen=True, slots=True, eq=False)
class _Waiter:
    """A write that waits for room, and the access key that it is for."""

    nbytes: int
    by: str
    coming: asyncio.Future[None]


DELETE = "delete objects"
"""The remedy of a bound that names none."""


class Bound:
    """Room for bytes that are about to come, in the order in which it was asked for; while the first one waits for
    more, later ones may pass it, with as many bytes in all as it waits for. `limit_bytes` (None: no bound) and
    `used_bytes` say how much there is now; `remedy` tells a client what helps; `wants` is called when somebody waits.
    Used on one event loop, but for `notify`.
    """

    def __init__(
        self, what: str, limit_bytes: Callable[[], int | None], used_bytes: Callable[[], int], remedy: str = DELETE
    ) -> None:
        self._what = what
        self._remedy = remedy
        self._limit_bytes = limit_bytes
        self._used_bytes = used_bytes
        self._waiting: deque[_Waiter] = deque()
        self._waiting_bytes: Counter[str] = Counter()
        self._waiting_counts: Counter[str] = Counter()
        """How many wait, by access key."""
        self._is_notified = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._bodies: list[ArrivingBody] = []
        self._passed_bytes = 0
        """The bytes of those that have passed the first one in the queue."""
        self._refused_at_s = -math.inf
        self.wants: Callable[[], None] | None = None
        """Called when somebody waits. None where nobody can make room, so that nobody needs to wait."""
        self.reserved_bytes = 0
        """Bytes that were promised, and have not come yet."""
        self.arriving_count = 0
        """Objects that count as used, and have no row yet: they may leave when they have one."""

    @property
    def waiting_bytes(self) -> int:
        """Bytes that somebody waits for, and that there could be."""
        waiting_bytes, limit_bytes = self._waiting_bytes.total(), self._limit_bytes()
        return waiting_bytes if limit_bytes is None else min(waiting_bytes, limit_bytes)

    @property
    def lacking_bytes(self) -> int:
        """Bytes that must become free so that those who wait get room."""
        limit_bytes = self._limit_bytes()
        if limit_bytes is None or not self._waiting:
            return 0
        return self.waiting_bytes - min(
            self.waiting_bytes, max(0, limit_bytes - self._used_bytes() - self.reserved_bytes)
        )

    def lacks_room(self) -> bool:
        """Whether somebody waits for room, or was refused it within the last LACKING_S."""
        return bool(self._waiting) or asyncio.get_running_loop().time() - self._refused_at_s < LACKING_S

    @property
    def promised_bytes(self) -> int:
        """Bytes that somebody waits for, or that were promised and have not come."""
        return self.waiting_bytes + self.reserved_bytes

    @asynccontextmanager
    async def reserved(self, nbytes: int, patience_s: float = PATIENCE_S) -> AsyncIterator[None]:
        """Keep room for `nbytes` until the block ends; by then they are counted among what is used.

        Raises ServerError: InsufficientStorage where no room comes within `patience_s`, SlowDown where too many wait.
        """
        if self._waiting or not self._fits(nbytes):
            await self._wait(nbytes, patience_s)
        else:
            self.reserved_bytes += nbytes
        try:
            yield
        finally:
            self.reserved_bytes -= nbytes
            self._admit()

    @contextmanager
    def arriving(self) -> Iterator[None]:
        """An object counts as used, and gets its row before the block ends."""
        self.arriving_count += 1
        try:
            yield
        finally:
            self.arriving_count -= 1
            if self._waiting and self.wants is not None:
                self.wants()

    @contextmanager
    def taken_by(self, body: ArrivingBody) -> Iterator[None]:
        """A body arrives into room that it got here."""
        self._bodies.append(body)
        try:
            yield
        finally:
            self._bodies.remove(body)

    def has_room(self, nbytes: int) -> bool:
        """Whether there is room without waiting, for a caller that counts the bytes as used before it awaits."""
        return not self._waiting and self._fits(nbytes)

    def notify(self) -> None:
        """There may be more room. May be called from any thread."""
        if self._waiting and self._loop is not None and not self._is_notified:
            self._is_notified = True  # bytes are given back piece by piece, and one look at the queue is enough
            with suppress(RuntimeError):  # the loop is closed, so nobody waits any more
                self._loop.call_soon_threadsafe(self._notified)

    def _notified(self) -> None:
        self._is_notified = False
        self._admit()

    def refuse(self) -> None:
        """No more room can be made: those that wait and do not fit are told so, one after the other."""
        free_bytes, self._passed_bytes = self._free_bytes(), 0
        for waiter in list(self._waiting):
            self._drop(waiter)
            if waiter.nbytes <= free_bytes:
                free_bytes -= waiter.nbytes
                self._give(waiter)
            else:
                waiter.coming.set_exception(self._refusal(waiter.nbytes))

    def _free_bytes(self) -> float:
        limit_bytes = self._limit_bytes()
        return math.inf if limit_bytes is None else limit_bytes - self._used_bytes() - self.reserved_bytes

    def _fits(self, nbytes: int) -> bool:
        return nbytes <= self._free_bytes()

    async def _wait(self, nbytes: int, patience_s: float) -> None:
        limit_bytes = self._limit_bytes()
        if limit_bytes is not None and nbytes > limit_bytes:
            raise self._refusal(nbytes)
        by = CALLER.get()
        self._require_place(by, nbytes, limit_bytes)
        if self.wants is None and not self._end_slow(nbytes):
            raise self._refusal(nbytes)
        self._loop = asyncio.get_running_loop()
        coming: asyncio.Future[None] = self._loop.create_future()
        waiter = _Waiter(nbytes, by, coming)
        self._waiting.append(waiter)
        self._waiting_bytes[by] += nbytes
        self._waiting_counts[by] += 1
        self._admit()  # room that came just before was told to nobody
        if self.wants is not None:
            self.wants()
        until_s = self._loop.time() + patience_s
        is_kept = False
        try:
            await asyncio.wait((coming,), timeout=min(SLOW_S, patience_s))
            if not coming.done() and patience_s > SLOW_S:
                self._end_slow(nbytes)
                await asyncio.wait((coming,), timeout=until_s - self._loop.time())
            is_kept = coming.done()
        finally:
            if not is_kept:
                if waiter in self._waiting:
                    if self._waiting[0] is waiter:
                        self._passed_bytes = 0
                    self._drop(waiter)
                elif coming.exception() is None:
                    self.reserved_bytes -= nbytes
                self._admit()
        if not is_kept:
            raise self._refusal(nbytes)
        coming.result()

    def _require_place(self, by: str, nbytes: int, limit_bytes: int | None) -> None:
        """Raises ServerError(SlowDown) where too many wait, or too many of one access key, or for too much."""
        is_full = len(self._waiting) >= WAITING_MAX or self._waiting_counts[by] >= WAITING_PART * WAITING_MAX
        waits_for = self._waiting_bytes[by]
        if is_full or (limit_bytes is not None and waits_for and waits_for + nbytes > limit_bytes):
            raise ServerError(ErrorCode.SLOW_DOWN, f"too many wait for room in {self._what}", retryable=True)

    def _end_slow(self, nbytes: int) -> bool:
        """Have bodies that come too slowly give room up, the largest first, where that is enough for so many bytes, and
        in a cache those of other keys that have announced too much of it. Returns whether it is enough.
        """
        now_s, lacking_bytes = asyncio.get_running_loop().time(), nbytes - self._free_bytes()
        greedy = self._greedy_keys() if self.wants is not None else set()
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

    def _greedy_keys(self) -> set[str]:
        """The keys, but for that of this task, whose bytes to come take too much of the bound."""
        coming_bytes: Counter[str] = Counter()
        for body in self._bodies:
            coming_bytes[body.by] += body.coming_bytes
        most = PART_COMING * (self._limit_bytes() or math.inf)
        return {by for by, nbytes in coming_bytes.items() if nbytes > most and by != CALLER.get()}

    def _admit(self) -> None:
        """Give room to the first ones that fit, and to later ones that may pass the first one that does not."""
        if not self._waiting:
            return
        free_bytes = self._free_bytes()
        while self._waiting and self._waiting[0].nbytes <= free_bytes:
            free_bytes -= self._waiting[0].nbytes
            self._passed_bytes = 0
            self._give(self._drop(self._waiting[0]))
        if free_bytes <= 0 or not self._waiting:
            return
        first_bytes = self._waiting[0].nbytes
        for waiter in list(self._waiting)[1:]:
            if waiter.nbytes <= min(free_bytes, first_bytes - self._passed_bytes):
                free_bytes -= waiter.nbytes
                self._passed_bytes += waiter.nbytes
                self._give(self._drop(waiter))

    def _give(self, waiter: _Waiter) -> None:
        self.reserved_bytes += waiter.nbytes
        waiter.coming.set_result(None)

    def _drop(self, waiter: _Waiter) -> _Waiter:
        self._waiting.remove(waiter)
        self._waiting_bytes -= Counter({waiter.by: waiter.nbytes})
        self._waiting_counts -= Counter({waiter.by: 1})
        return waiter

    def _refusal(self, nbytes: int) -> ServerError:
        limit_bytes = self._limit_bytes()
        if limit_bytes is None or nbytes <= limit_bytes:
            self._refused_at_s = asyncio.get_running_loop().time()
        limit = "" if limit_bytes is None else f", which has {format_bytes(limit_bytes)}"
        is_too_large = limit_bytes is not None and nbytes > limit_bytes
        remedy = "it is smaller than the object; raise its bound" if is_too_large else self._remedy
        problem = f"no room for {nbytes} bytes in {self._what}{limit}: {remedy}"
        return ServerError(ErrorCode.INSUFFICIENT_STORAGE, problem, retryable=True)
