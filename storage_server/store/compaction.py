"""Compaction: live extents of sparse and small segments are written into new ones, and the old files go.

Per job, in this order, each step only after the one before:

1. the old files are pinned, and what rows name in them is read from the index;
2. those bytes are read, each block proved, and written to a new file whose name is synced;
3. the new file is synced, dropped from memory, read back, each block proved;
4. one transaction moves the rows that still name the old places (storage_server.store.compaction_rows);
5. when that is durable, files no row names are deleted, each after its last reader.

Before the transaction the new file is one that no row names, after it the old ones are: whatever fails, and wherever it
ends, one whole copy is named and another is nobody's. A block that fails its checksum stays where it is, and so does
all of its segment: no copy could be proved against anything.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from adapters.threads import to_end
from descriptors.errors import ErrorCode, ObjectCacheError, ServerError
from descriptors.units import MIB
from storage_server.store.committer import Committer
from storage_server.store.compaction_plan import Move, Rules, SegmentUse, Span, layout, plan, steps
from storage_server.store.compaction_rows import FileUse, file_uses, live_places, move_rows
from storage_server.store.disk import Disk
from storage_server.store.extents import CorruptExtentError, ExtentFiles, extent_path
from storage_server.store.io_threads import IoThreads
from storage_server.store.reader import IndexReader
from storage_server.store.segments import Segments, WriteFile

STEP_BYTES = MIB
SYNC_BYTES = 8 * MIB
"""Synced this often: one sync of a whole segment would hold up every other."""
FILES_PER_QUERY = 512
ROOM_BYTES_MIN = 64 * MIB
"""Left free beside the new segment: writers must not find the disk full because of us."""
BUSY_SLOWDOWN = 16
TICK_S = 0.05
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Damaged:
    """A segment that stays as it is, and why."""

    file_id: str
    reason: str


@dataclass(slots=True)
class Tally:
    """What was done."""

    segments_read: int = 0
    segments_written: int = 0
    extents: int = 0
    nbytes: int = 0
    rows: int = 0
    damaged: list[Damaged] = field(default_factory=list)

    @property
    def progress(self) -> int:
        """Grows with every job that changes what is left to do."""
        return self.segments_read + len(self.damaged)


class Compactor:
    """One job at a time. `is_busy` says whether anybody else uses the store; it is told how many files are ours."""

    def __init__(
        self,
        directory: Path,
        reader: IndexReader,
        committer: Committer,
        segments: Segments,
        files: ExtentFiles,
        disk: Disk,
        io: IoThreads,
        live_fraction_max: float,
        is_busy: Callable[[int], bool],
    ) -> None:
        self._directory = directory
        self._reader = reader
        self._committer = committer
        self._segments = segments
        self._files = files
        self._disk = disk
        self._io = io
        self._live_fraction_max = live_fraction_max
        self._is_busy = is_busy
        self._pinned_count = 0
        self._damaged: set[str] = set()

    async def run(self, interval_s: float, bytes_per_s: float) -> None:
        """Compact what is worth it, again and again, until cancelled."""
        while True:
            await asyncio.sleep(interval_s)
            try:
                tally = await self.compact(bytes_per_s)
            except ObjectCacheError as error:
                _log.warning("compaction: %s", error)
            except Exception:
                _log.exception("compaction failed; it is tried again")
            else:
                if tally.segments_read:
                    _log.info("%d segments became %d", tally.segments_read, tally.segments_written)

    async def compact(self, bytes_per_s: float = math.inf) -> Tally:
        """Until nothing is left that is worth it; reading, writing and reading back at `bytes_per_s` each.

        Raises ServerError (InsufficientStorage, InternalError, SlowDown): what was begun then is undone.
        """
        tally = Tally()
        is_done = False
        while not is_done:
            before = tally.progress
            for job in plan(await self._uses(), self._rules()):
                await self._rewrite(job, tally, bytes_per_s)
            is_done = tally.progress == before
        return tally

    def _rules(self) -> Rules:
        return Rules(self._live_fraction_max, self._segments.extents_max, self._segments.bytes_max)

    async def _uses(self) -> list[SegmentUse]:
        """Of all segments that are closed and sound; files of one large extent are none."""
        found: list[SegmentUse] = []
        seen: set[str] = set()
        after = ""
        while page := await self._reader.threaded(partial(file_uses, after=after, limit=FILES_PER_QUERY)):
            after = page[-1].file_id
            seen.update(use.file_id for use in page)
            found += await self._io.run(partial(self._sized, page))
        self._damaged &= seen
        return found

    def _sized(self, uses: Sequence[FileUse]) -> list[SegmentUse]:
        sized = []
        for use in uses:
            is_alone = use.extent_count == 1 and use.extent_bytes_max > self._segments.packed_bytes_max
            if is_alone or use.file_id in self._damaged or self._segments.is_written(use.file_id):
                continue
            try:
                nbytes = self._disk.size(extent_path(self._directory, use.file_id))
            except FileNotFoundError:
                continue
            counts = (use.live_bytes, use.extent_count, use.row_count, use.first_version)
            sized.append(SegmentUse(use.file_id, nbytes, *counts))
        return sized

    async def _rewrite(self, file_ids: Sequence[str], tally: Tally, bytes_per_s: float) -> None:
        """One job. What a source says of itself goes to the tally; what a disk says of us is raised."""
        async with self._pinned(file_ids) as are_there:
            if not are_there:
                return
            moves = layout(await self._reader.threaded(partial(live_places, file_ids=file_ids)))
            if not moves:
                return
            await self._io.run(partial(self._require_room, moves))
            target = await self._io.run(self._segments.new_file, undo=WriteFile.release)
            try:
                damaged = await self._copy(moves, target, bytes_per_s)
                if damaged is not None:
                    self._damaged.add(damaged.file_id)
                    tally.damaged.append(damaged)
                    _log.error("segment %s is damaged and stays as it is: %s", damaged.file_id, damaged.reason)
                    return
                await self._prove(moves, target.file_id, bytes_per_s)
                change = partial(move_rows, file_id=target.file_id, moves=moves)
                rows = await to_end(asyncio.ensure_future(self._committer.commit(change)))
            finally:
                target.release()
        tally.segments_read += len(file_ids)
        tally.segments_written += 1
        tally.extents += len(moves)
        tally.nbytes += sum(move.source.nbytes for move in moves)
        tally.rows += rows

    @asynccontextmanager
    async def _pinned(self, file_ids: Sequence[str]) -> AsyncIterator[bool]:
        """Keeps the files readable, and unchanged: holes in them wait, too. False when one is gone already."""
        are_there = self._files.pin(file_ids)
        self._pinned_count = len(file_ids) if are_there else 0
        try:
            yield are_there
        finally:
            self._pinned_count = 0
            if are_there:  # the last to hold a large file deletes it, which takes a while
                await self._io.run(partial(self._files.unpin, file_ids))

    async def _copy(self, moves: Sequence[Move], target: WriteFile, bytes_per_s: float) -> Damaged | None:
        """Every move's bytes, on the disk on return. The source that failed its checksums, if one did."""
        buffer = memoryview(bytearray(STEP_BYTES))
        unsynced_bytes = 0
        for spans in steps(moves, STEP_BYTES):
            damaged = await self._io.run(partial(self._copy_some, spans, target, buffer))
            if damaged is not None:
                return damaged
            nbytes = sum(span.nbytes for span in spans)
            unsynced_bytes += nbytes
            if unsynced_bytes >= SYNC_BYTES:
                unsynced_bytes = 0
                await self._io.run(target.sync)
            await self._wait_turn(nbytes, bytes_per_s)
        await self._io.run(partial(self._settle, target))
        return None

    def _copy_some(self, spans: Sequence[Span], target: WriteFile, buffer: memoryview) -> Damaged | None:
        for span in spans:
            view = buffer[: span.nbytes]
            try:
                self._files.read_into(span.move.source, span.start, view)
            except CorruptExtentError as error:
                return Damaged(span.move.source.file_id, str(error))
            target.write(view, span.move.offset + span.start, self._disk)
        return None

    def _settle(self, target: WriteFile) -> None:
        target.sync()
        self._disk.drop_cached(target.fd)

    async def _prove(self, moves: Sequence[Move], file_id: str, bytes_per_s: float) -> None:
        """Raises ServerError(InternalError) where what was written is not what was to be."""
        buffer = memoryview(bytearray(STEP_BYTES))
        for spans in steps(moves, STEP_BYTES):
            await self._io.run(partial(self._prove_some, spans, file_id, buffer))
            await self._wait_turn(sum(span.nbytes for span in spans), bytes_per_s)

    def _prove_some(self, spans: Sequence[Span], file_id: str, buffer: memoryview) -> None:
        for span in spans:
            try:
                self._files.read_into(span.move.target(file_id), span.start, buffer[: span.nbytes])
            except CorruptExtentError as error:
                raise ServerError(
                    ErrorCode.INTERNAL_ERROR, f"a new segment does not read as it was written: {error}", retryable=True
                ) from error

    def _require_room(self, moves: Sequence[Move]) -> None:
        last = moves[-1]
        needed = last.offset + last.source.nbytes + ROOM_BYTES_MIN
        if self._disk.free_bytes(self._directory) < needed:
            raise ServerError(ErrorCode.INSUFFICIENT_STORAGE, "no room to compact in", retryable=True)

    async def _wait_turn(self, nbytes: int, bytes_per_s: float) -> None:
        """As long as `nbytes` may take; BUSY_SLOWDOWN times as long while others use the store."""
        left_s = nbytes / bytes_per_s
        while left_s > 0:
            slowdown = BUSY_SLOWDOWN if self._is_busy(self._pinned_count) else 1
            slept_s = min(left_s * slowdown, TICK_S)
            await asyncio.sleep(slept_s)
            left_s -= slept_s / slowdown
