"""Compaction: live extents of sparse and small segments are written into new segments, and the old files are deleted.

Each job takes these steps, in this order:

1. The old files are pinned, and the locations that rows name in them are read from the index.
2. Those bytes are read, each block proved, and written to a new file whose name is synced.
3. The new file is synced, dropped from the page cache, read back, and each block proved.
4. One transaction moves the rows that still name the old locations (storage_server.kernel.upkeep.compaction_rows).
5. When the transaction is durable, files that no row names are deleted, each after its last reader.

Before the transaction no row names the new file, after it no row names the old files. So whatever fails, rows name one
whole copy, and the other copy is a leftover. A segment with a block that fails its checksum stays where it is, because
no copy of that block could be proved.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from collections.abc import Set as AbstractSet
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from descriptors.errors import ErrorCode, ObjectCacheError, ServerError
from descriptors.units import MIB
from objectcache.adapters.threads import to_end
from storage_server.kernel.data.bound import Bound
from storage_server.kernel.data.disk import Disk
from storage_server.kernel.data.extents import ExtentFiles, extent_place
from storage_server.kernel.data.io_threads import IoThreads
from storage_server.kernel.data.segments import Segments, WriteFile
from storage_server.kernel.index.committer import Committer
from storage_server.kernel.index.reader import IndexReader
from storage_server.kernel.rules.compaction_plan import (
    CopyStep,
    ExtentMove,
    Rules,
    SegmentUse,
    is_candidate,
    layout,
    plan,
    steps,
)
from storage_server.kernel.upkeep.compaction_rows import FileUse, file_uses, files_after, live_extents, move_rows
from storage_server.kernel.upkeep.pace import wait_turn
from storage_server.planning.extent import CorruptExtentError

STEP_BYTES = MIB
SYNC_BYTES = 8 * MIB
"""The copy is synced whenever this many bytes were written: one sync of a whole segment would delay all other syncs."""
FILES_PER_QUERY = 512
CHANGED_MAX = 65_536
"""Where more files have changed since the last look, all are looked at."""
ROOM_BYTES_MIN = 64 * MIB
"""Bytes that stay free beside the new segment, so that compaction never fills the disk."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Damaged:
    """A segment that stays as it is, and the reason."""

    file_id: str
    reason: str


@dataclass(slots=True)
class CompactionTally:
    """The result of a compaction run."""

    files_looked_at: int = 0
    """Files that had changed since they were looked at, and were looked at again."""
    segments_read: int = 0
    segments_written: int = 0
    extents: int = 0
    nbytes: int = 0
    rows: int = 0
    damaged: list[Damaged] = field(default_factory=list)

    @property
    def progress(self) -> int:
        """A number that grows with every job that changes the remaining work."""
        return self.segments_read + len(self.damaged)


class Compactor:
    """Runs one job at a time. `is_busy` gets the number of files that compaction has pinned, and says whether anybody
    else uses the store.
    """

    def __init__(
        self,
        directory: Path,
        reader: IndexReader,
        committer: Committer,
        segments: Segments,
        files: ExtentFiles,
        disk: Disk,
        io: IoThreads,
        bound: Bound,
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
        self._bound = bound
        self._live_fraction_max = live_fraction_max
        self._is_busy = is_busy
        self._pinned_count = 0
        self._damaged: set[str] = set()
        self._candidates: dict[str, SegmentUse] = {}
        """The segments that a plan may rewrite."""
        self._written: set[str] = set()
        """Segments that were written to when they were looked at."""
        self._changed: set[str] | None = None
        """The files of which rows have come or gone since they were looked at; None: all must be looked at."""
        self._changed_lock = threading.Lock()
        self.rewritten_bytes = 0
        """How many bytes were copied into new segments since the start."""

    def note_files(self, file_ids: AbstractSet[str]) -> None:
        """Note that rows of these files have come or gone. May be called from any thread."""
        with self._changed_lock:
            if self._changed is not None:
                self._changed |= file_ids
                if len(self._changed) > CHANGED_MAX:
                    self._changed = None

    async def run(self, interval_s: float, bytes_per_s: float) -> None:
        """Compact worthwhile segments every `interval_s`, until cancelled."""
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

    async def compact(
        self, bytes_per_s: float = math.inf, on_job: Callable[[CompactionTally], None] | None = None
    ) -> CompactionTally:
        """Compact until no worthwhile segment is left, at `bytes_per_s` for each of reading, writing and reading back.
        `on_job` is called with the tally after each group of segments.

        Raises ServerError (InsufficientStorage, InternalError, SlowDown); the job that was under way is undone.
        """
        tally = CompactionTally()
        is_done = False
        while not is_done:
            before = tally.progress
            tally.files_looked_at += await self._look()
            for job in plan(self._candidates.values(), self._rules()):
                await self._rewrite(job, tally, bytes_per_s)
                if on_job is not None:
                    on_job(tally)
            is_done = tally.progress == before
        return tally

    def _rules(self) -> Rules:
        return Rules(self._live_fraction_max, self._segments.extents_max, self._segments.bytes_max)

    async def _look(self) -> int:
        """Look at the files that have changed, at first at all. Returns how many."""
        with self._changed_lock:
            changed, self._changed = self._changed, set()
        try:
            if changed is None:
                return await self._look_at_all()
            file_ids = sorted(changed | self._written)
            for start in range(0, len(file_ids), FILES_PER_QUERY):
                await self._look_at(file_ids[start : start + FILES_PER_QUERY])
            return len(file_ids)
        except BaseException:
            with self._changed_lock:
                self._changed = None
            raise

    async def _look_at_all(self) -> int:
        self._candidates, self._written, count = {}, set(), 0
        sound: set[str] = set()
        after = ""
        while file_ids := await self._reader.threaded(partial(files_after, after=after, limit=FILES_PER_QUERY)):
            after = file_ids[-1]
            count += len(file_ids)
            sound |= self._damaged.intersection(file_ids)
            await self._look_at(file_ids)
        self._damaged &= sound
        return count

    async def _look_at(self, file_ids: Sequence[str]) -> None:
        """Note which of these files are segments that a plan may rewrite: closed and sound ones. A file of one large
        extent is not a segment.
        """
        uses = await self._reader.threaded(partial(file_uses, file_ids=file_ids))
        written = {use.file_id for use in uses if self._segments.is_written(use.file_id)}
        sized = await self._io.run(partial(self._sized, [use for use in uses if use.file_id not in written]))
        self._damaged -= set(file_ids) - {use.file_id for use in uses}
        self._written = self._written.difference(file_ids) | written
        for file_id in file_ids:
            self._candidates.pop(file_id, None)
        self._candidates |= {use.file_id: use for use in sized if is_candidate(use, self._rules())}

    def _sized(self, uses: Sequence[FileUse]) -> list[SegmentUse]:
        sized = []
        for use in uses:
            is_alone = use.extent_count == 1 and use.extent_bytes_max > self._segments.packed_bytes_max
            if is_alone or use.file_id in self._damaged:
                continue
            try:
                nbytes = self._disk.size(extent_place(self._directory, use.file_id))
            except FileNotFoundError:
                continue
            counts = (use.live_bytes, use.extent_count, use.row_count, use.first_version)
            sized.append(SegmentUse(use.file_id, nbytes, *counts))
        return sized

    async def _rewrite(self, file_ids: Sequence[str], tally: CompactionTally, bytes_per_s: float) -> None:
        """Carry out one job. Damage of a source goes to the tally; a failure of the disk is raised."""
        async with self._pinned(file_ids) as are_there:
            if not are_there:
                return
            moves = layout(await self._reader.threaded(partial(live_extents, file_ids=file_ids)))
            if not moves:
                return
            await self._io.run(partial(self._require_space, moves))
            nbytes = moves[-1].offset + moves[-1].source.nbytes
            async with self._bound.reserved(nbytes):
                target = await self._io.run(self._segments.new_file, undo=WriteFile.release)
                target.reserve(nbytes)
            try:
                damaged = await self._copy(moves, target, bytes_per_s)
                if damaged is not None:
                    self._damaged.add(damaged.file_id)
                    self._candidates.pop(damaged.file_id, None)
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
        """Keep the files readable and unchanged: holes in them wait, too. Yields False when a file is gone already."""
        are_there = self._files.pin(file_ids)
        self._pinned_count = len(file_ids) if are_there else 0
        try:
            yield are_there
        finally:
            self._pinned_count = 0
            if are_there:  # unpinning may delete a large file, which takes a while
                await self._io.run(partial(self._files.unpin, file_ids))

    async def _copy(self, moves: Sequence[ExtentMove], target: WriteFile, bytes_per_s: float) -> Damaged | None:
        """Copy the bytes of every move; on return they are on the disk. Returns the source that failed
        its checksums.
        """
        buffer = memoryview(bytearray(STEP_BYTES))
        unsynced_bytes = 0
        for spans in steps(moves, STEP_BYTES):
            damaged = await self._io.run(partial(self._copy_some, spans, target, buffer))
            if damaged is not None:
                return damaged
            nbytes = sum(span.nbytes for span in spans)
            self.rewritten_bytes += nbytes
            unsynced_bytes += nbytes
            if unsynced_bytes >= SYNC_BYTES:
                unsynced_bytes = 0
                await self._io.run(target.sync)
            await wait_turn(nbytes, bytes_per_s, self._is_used_by_others)
        await self._io.run(partial(self._settle, target))
        return None

    def _copy_some(self, spans: Sequence[CopyStep], target: WriteFile, buffer: memoryview) -> Damaged | None:
        for span in spans:
            view = buffer[: span.nbytes]
            try:
                self._files.open.read_into(span.move.source, span.start, view)
            except CorruptExtentError as error:
                return Damaged(span.move.source.file_id, str(error))
            target.write(view, span.move.offset + span.start, self._disk)
        return None

    def _settle(self, target: WriteFile) -> None:
        target.sync()
        self._disk.drop_cached(target.fd)

    async def _prove(self, moves: Sequence[ExtentMove], file_id: str, bytes_per_s: float) -> None:
        """Read the new file back. Raises ServerError(InternalError) where its bytes fail the checksums."""
        buffer = memoryview(bytearray(STEP_BYTES))
        for spans in steps(moves, STEP_BYTES):
            await self._io.run(partial(self._prove_some, spans, file_id, buffer))
            await wait_turn(sum(span.nbytes for span in spans), bytes_per_s, self._is_used_by_others)

    def _prove_some(self, spans: Sequence[CopyStep], file_id: str, buffer: memoryview) -> None:
        for span in spans:
            try:
                self._files.open.read_into(span.move.target(file_id), span.start, buffer[: span.nbytes])
            except CorruptExtentError as error:
                raise ServerError(
                    ErrorCode.INTERNAL_ERROR, f"a new segment does not read as it was written: {error}", retryable=True
                ) from error

    def _require_space(self, moves: Sequence[ExtentMove]) -> None:
        last = moves[-1]
        needed = last.offset + last.source.nbytes + ROOM_BYTES_MIN
        if self._disk.free_bytes(self._directory) < needed:
            raise ServerError(ErrorCode.INSUFFICIENT_STORAGE, "no space to compact in", retryable=True)

    def _is_used_by_others(self) -> bool:
        return self._is_busy(self._pinned_count)
