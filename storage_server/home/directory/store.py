"""A directory that many servers share, on a parallel or network file system, as the home of objects (CASCADE, sections
III-D to III-F).

    ROOT/format.json
    ROOT/writers/<writer>/extents/…           the bytes that this server has stored
    ROOT/writers/<writer>/journal-<n>         what it has changed
    ROOT/writers/<writer>/succession-<n>      where journal n goes on from the one before
    ROOT/writers/<writer>/alive               when it was there last
    ROOT/writers/<writer>/shown               the latest time that it has seen
    DATA/shared/index.sqlite3                 what all journals together say, in each server's own data directory

No two servers write one file, so none takes a lock. A change is made when its record is durable in the own journal;
other servers see it when they read the journal next. docs/guides/shared-files.md lists the promises.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import sys
import time
from collections.abc import Sequence
from contextlib import closing, suppress
from functools import partial
from pathlib import Path

from descriptors.errors import ErrorCode, ServerError
from objectcache.adapters.beneath import Beneath
from objectcache.adapters.renewals import RENEWALS, Renewals
from storage_server.home.directory import merge, upkeep
from storage_server.home.directory.files import GRACE_S, SharedFiles
from storage_server.home.directory.following import Following
from storage_server.home.directory.journal import OwnJournal
from storage_server.home.directory.membership import joined
from storage_server.home.directory.objects import SharedObjects, SharedUploads
from storage_server.home.directory.reading import SharedReads
from storage_server.home.directory.rewriting import Rewriting
from storage_server.home.directory.rules.clock import ClockError, StampClock
from storage_server.home.directory.rules.records import (
    OBJECT_BYTES_MAX,
    RECORDS_READER,
    WRITERS,
    BadRecordError,
    Record,
    file_ids,
    framed,
    writer_of,
)
from storage_server.home.directory.rules.shares import WrittenShares
from storage_server.home.directory.upkeep import SharedUpkeep
from storage_server.home.service import OnChanged
from storage_server.kernel.data.bodies import BodyReader, BodyWriter
from storage_server.kernel.data.bound import Bound
from storage_server.kernel.data.buffers import BufferShare
from storage_server.kernel.data.disk import Disk, disk_error
from storage_server.kernel.data.file_threads import FileThreads
from storage_server.kernel.data.io_threads import IoThreads
from storage_server.kernel.data.replaceable_threads import SPARE_THREADS
from storage_server.kernel.data.segments import Segments
from storage_server.kernel.data.space import Space
from storage_server.kernel.index import queries
from storage_server.kernel.index.committer import Committer, RefusedChangesError
from storage_server.kernel.index.identity import Mark
from storage_server.kernel.index.reader import IndexReader
from storage_server.kernel.index.reserve import Reserve
from storage_server.kernel.index.resolved import ResolvedKeys
from storage_server.kernel.index.schema import connect_current
from storage_server.kernel.index.transaction import Transaction
from storage_server.kernel.objects import Objects
from storage_server.kernel.rules.rows import Touched
from storage_server.kernel.upkeep.lifecycle import Lifecycle
from storage_server.kernel.uploads import Uploads
from storage_server.kernel.watcher import Watcher
from storage_server.planning.durability import Durability
from storage_server.settings import StorageSettings, UpstreamSettings

IO_THREADS = 4
READ_THREADS = 32
READ_THREADS_OF_WRITER = 4
"""A file of one server may hang, and reads of it then hold these for as long."""
READER = int("".join(f"{number:03}" for number in (RECORDS_READER, *sys.version_info[:3])))
"""The reader of journals that this process is. It may know records that another reader has passed over."""
LONG_S = 2.0
"""A start that reads for longer says so."""
_SLOW = "the shared directory answers too slowly"
_log = logging.getLogger(__name__)


class SharedDirectory:
    """Implements storage_server.home.service.Service, and SharedJournal of storage_server.kernel.index.committer.
    The index lies in `local`.
    """

    def __init__(
        self, settings: UpstreamSettings, storage: StorageSettings, local: Path, disk: Disk | None = None
    ) -> None:
        assert settings.directory is not None
        self._settings = settings
        self._root = root = settings.directory
        self._disk = disk = disk or Disk()
        self._membership = joined(root, local)
        writer = self._membership.writer
        self._folder = Beneath(root, WRITERS) / writer
        self.files = SharedFiles(root, writer, storage.open_files_max, disk)
        self.files.start()
        self._journal = OwnJournal(self._folder, disk)
        self._reserve = Reserve(self._folder)
        self._clock = StampClock(self.files.now_s, 0)
        self._written = WrittenShares()
        self._mark = Mark(local)
        self._index = local / "index.sqlite3"
        space = Space(local, None)
        resolved = ResolvedKeys(storage.resolved_keys_max, storage.resolved_bytes_max)
        self.committer = Committer(
            path=self._index,
            durability=Durability.STRICT,
            disk=disk,
            dispose=self._dispose,
            punch=lambda holes: None,  # a location that nothing names may be named by a record that was not read yet
            punch_delay_s=0.0,
            resolved=resolved,
            mark=self._mark,
            space=space,
            on_changes=Watcher().note_changes,
            journal=self,
        )
        self.segments = Segments(self.files, disk, settings.segment_body_bytes_max, space, self.committer.consider)
        self.reader = IndexReader(self._index)
        self._io, self._beside = IoThreads(IO_THREADS, SPARE_THREADS), IoThreads(1)
        self._body_reads = FileThreads(READ_THREADS, READ_THREADS_OF_WRITER, writer_of)
        self._rewriting = Rewriting(self._index, writer, self._journal, self.committer, self._io)
        self._beats = Renewals("the sign of life in the shared directory", RENEWALS * upkeep.UPKEEP_S, self._beat)
        bound = Bound("the shared directory", lambda: None, lambda: 0)
        share = BufferShare(storage.buffer_bytes)
        bodies = BodyWriter(
            segments=self.segments, disk=disk, durability=Durability.STRICT, share=share, io=self._io, bound=bound
        )
        change = partial(self.committer.commit, frees=True)
        watcher = Watcher()  # objects of a home are never evicted
        objects = Objects(
            index=self.reader,
            files=self.files,
            reader=BodyReader(self.files.open, share, self._body_reads),
            resolved=resolved,
            committer=self.committer,
            writer=bodies,
            io=self._io,
            object_bytes_max=storage.object_bytes_max,
            watcher=watcher,
            now_s=self.files.now_s,  # a rule of one server deletes what all have written
        )
        uploads = Uploads(
            reader=self.reader,
            committer=self.committer,
            bodies=bodies,
            part_bytes_max=storage.object_bytes_max,
            objects=objects,
            watcher=watcher,
            whole_bytes_max=OBJECT_BYTES_MAX,
        )
        self.following = Following(
            root=root,
            writer=writer,
            committer=self.committer,
            clock=self._clock,
            patience_s=settings.read_timeout_s,
            shown_s=self.files.shown_s,
        )
        self.upkeep = SharedUpkeep(
            root=root,
            writer=writer,
            files=self.files,
            journal=self._journal,
            rewriting=self._rewriting,
            reserve=self._reserve,
            following=self.following,
            committer=self.committer,
            reader=self.reader,
            io=self._io,
            beside=self._beside,
        )
        self._reads = SharedReads(self.files.open, settings.fetches_max, settings.read_bytes_per_s)
        self.objects = SharedObjects(objects, self.files, self.following, self._reads)
        self.uploads = SharedUploads(uploads, self.following)
        self.lifecycle = Lifecycle(objects, uploads, self.reader, change)
        self._lifecycle_s = storage.lifecycle_interval_s, storage.lifecycle_day_s
        self._works: list[asyncio.Task[None]] = []

    @property
    def writer(self) -> str:
        """The id of this server in the directory."""
        return self._membership.writer

    @property
    def failed_count(self) -> int:
        """How many reads of the directory failed."""
        return self._reads.failed_count

    @property
    def unread_count(self) -> int:
        """How many journals cannot be read to their ends."""
        return self.following.problems.count

    @property
    def bad_record_count(self) -> int:
        """How many records of journals were passed over because they make no sense."""
        return self.following.problems.bad_record_count

    def on_changed(self, tell: OnChanged) -> None:
        """Call `tell` with what other servers have changed."""
        self.following.on_changed = tell

    async def start(self) -> None:
        """Read all journals to their ends, and begin to follow them."""
        await asyncio.to_thread(self._beat)
        self.upkeep.rewritten_bytes = await self.committer.commit(self._open_journal)
        long_start = asyncio.get_running_loop().call_later(
            LONG_S, _log.warning, "reading what other servers have written to the shared directory: the first time, and"
            " after a long absence, that takes minutes",
        )  # fmt: skip
        try:
            await self.following.start(await self.reader.threaded(merge.positions))
        finally:
            long_start.cancel()
        named = await self.reader.threaded(queries.file_ids)
        stored = await self._io.run(lambda: self.files.stored(self._membership.writer))
        self.files.found_dead(file_id for file_id in stored if file_id not in named)
        works = (
            self.following.run(self._settings.poll_s),
            self.lifecycle.run(*self._lifecycle_s),
            self.upkeep.run(),
        )
        self._beats.start(first_in_s=0.0)
        self._works = [asyncio.create_task(work) for work in works]

    async def close(self) -> None:
        """Finish running work and close every file."""
        for work in self._works:
            work.cancel()
        if self._works:
            await asyncio.wait(self._works)
        await self.following.close()
        await asyncio.to_thread(self._reads.close)
        self._io.close()
        self._body_reads.close()
        self._beside.close()
        await asyncio.to_thread(self._beats.stop)
        self.segments.close()
        self.committer.close()
        self._journal.close()
        self.reader.close()
        self.files.close()

    def _beat(self) -> None:
        self.files.beat()
        self._clock.note_shown(self.files.own_shown_s)

    def _open_journal(self, tx: Transaction) -> int:
        """In the committer's thread, which alone uses the journal. How long it was when it was written anew."""
        merge.prepare(tx)
        writer = self._membership.writer
        positions = merge.positions(tx.db)
        merge.read_again(tx.db, READER, writer)
        self.following.problems.spoiled.update(merge.passed_over(tx.db))
        generation, position = positions.get(writer, (0, 0))
        self._clock.go_on_behind(merge.last_stamp(tx.db), (self.files.shown_s(each) for each in positions))
        coming = merge.coming(tx.db)
        self._journal.open(generation, position, coming)
        self.catch_up(tx)
        return coming[1] if coming[0] == self._journal.generation else 0

    def check(self, tx: Transaction, touched: Sequence[Touched], caller: str) -> int:
        """Refuse a change that names files of others while the journals were not all read lately, and one of a caller
        that has written so much that other servers would soon read this journal late. Raises ServerError; the change
        alone is undone.
        """
        if not touched:
            return 0
        if not self._are_read_lately():
            self._require_read_journals(self._others(file_ids(merge.collected(tx.db, touched, 0))))
        rows, nbytes = merge.written_rows(tx.db, touched)
        removes_only = rows <= len(set(touched))
        now_s = time.monotonic()
        if caller and not removes_only and not self._written.may_write(caller, now_s):
            problem = "this access key writes more than the other servers of the shared directory can read"
            raise ServerError(ErrorCode.SLOW_DOWN, problem, retryable=True)
        self._written.spend(caller, rows, nbytes, now_s)
        return rows

    def append_to_journal(self, tx: Transaction) -> None:
        """Write what the transaction changes into the journal, before it is committed here. Raises ServerError."""
        if not tx.touched:
            return
        if not self.files.is_beating():  # others may soon delete files of this server that they find unnamed
            problem = "the shared directory takes no sign of life of this server"
            raise ServerError(ErrorCode.SLOW_DOWN, problem, retryable=True)
        try:
            records = merge.collected(tx.db, tx.touched, self._clock.stamp())
        except ClockError as error:
            raise ServerError(ErrorCode.INTERNAL_ERROR, f"the shared directory: {error}", retryable=True) from error
        named, began_s = file_ids(records), time.monotonic()
        others = self._others(named)
        self._require_read_journals(others)
        missing = self.files.missing(named - others)
        if missing:
            self.segments.note_gone(missing)
            problem = "the shared directory has not the file that was written: is its file system mounted?"
            refused = RefusedChangesError if self.files.is_there() else ServerError  # others may have their files
            raise refused(ErrorCode.INTERNAL_ERROR, problem, retryable=True)
        try:
            self._append([*framed(records)], frees=all(record.row is None for record in records))
        except BadRecordError as error:
            raise RefusedChangesError(ErrorCode.INTERNAL_ERROR, str(error)) from error
        except OSError as error:
            _log.warning("the journal of the shared directory: %s", error)
            raise disk_error(error, "writing the journal") from error
        self._rewriting.note(records)
        merge.note_own(tx.db, self._membership.writer, self._journal.generation, records, time.time())
        merge.note_position(tx.db, self._membership.writer, self._journal.generation, self._journal.end)
        if time.monotonic() - began_s > GRACE_S / 2:  # others may take this server for a silent one
            self._require_there(named, records)
        elif not self._has_read_journals_lately(others):
            self._require_there(others, records)

    def _append(self, frames: Sequence[bytes], *, frees: bool) -> None:
        """On a full disk the reserve is given up for a change that `frees` space. Raises OSError."""
        try:
            self._journal.append(frames)
        except OSError as error:
            is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            if not (is_full and frees and self._reserve.give_up()):
                raise
            self._journal.append(frames)

    def catch_up(self, tx: Transaction) -> None:
        """Carry out what the journal has and the index has not: a change that ended between the two."""
        writer, journal = self._membership.writer, self._journal
        if not journal.generation:
            return
        try:
            journal.find_end_again()
        except OSError as error:
            raise disk_error(error, "reading the journal") from error
        generation, position = merge.positions(tx.db).get(writer, (0, 0))
        if (generation, position) == (journal.generation, journal.end):
            return
        try:
            read_to = position if generation == journal.generation else self._rewriting.caught_up(tx)
            for found in journal.read(read_to):
                self.following.problems.note_passed_over(writer, found.passed_over)
                if found.passed_over.count:
                    merge.note_passed_over(tx.db, writer)
                for _, records in found.pieces:
                    self._clock.observe(max((record.stamp for record in records), default=0))
                    self._rewriting.note(records)
                    merge.apply(tx, writer, journal.generation, records, time.time())
        except OSError as error:
            raise disk_error(error, "reading the journal") from error
        merge.note_position(tx.db, writer, journal.generation, journal.end)

    def _has_read_journals_lately(self, others: set[str]) -> bool:
        """Whether a record may name these files of other servers. Another server deletes its file GRACE_S after its
        last row went, unless it has read a record that names the file. So the rows that this record is made from must
        come from a whole read of all journals in the last half of that time.
        """
        return not others or self._are_read_lately()

    def _are_read_lately(self) -> bool:
        return time.monotonic() - self.following.whole_s <= GRACE_S / 2

    def _others(self, file_ids: set[str]) -> set[str]:
        return {file_id for file_id in file_ids if writer_of(file_id) != self._membership.writer}

    def _require_read_journals(self, others: set[str]) -> None:
        if not self._has_read_journals_lately(others):
            raise RefusedChangesError(ErrorCode.SLOW_DOWN, _SLOW, retryable=True)

    def _require_there(self, named: set[str], records: Sequence[Record]) -> None:
        """Take the transaction's records back, where their writing took so long that a file that one of them names was
        deleted meanwhile: behind them come records of what the index had before. Raises RefusedChangesError then.
        """
        if not self.files.missing(named):
            return
        with closing(connect_current(self._index)) as committed:
            before = merge.collected_before(committed, records)
        self._rewriting.note(before)
        with suppress(OSError):
            self._append([*framed(before)], frees=True)
        raise RefusedChangesError(ErrorCode.SLOW_DOWN, _SLOW, retryable=True)

    def _dispose(self, file_id: str) -> None:
        self.segments.retire(file_id)
        if not self.segments.is_written(file_id):
            self.files.note_dead(file_id)
