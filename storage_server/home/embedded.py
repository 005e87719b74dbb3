"""The embedded store: objects in, objects out, in one directory.

    DIR/index.sqlite3   the bytes that make up each object; a commit here publishes
    DIR/extents/        the bytes

Until its commit, and after any failure, a key shows the object that it showed before. docs/guides/durability.md lists
the promises.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from functools import partial
from typing import TypeVar

from descriptors.errors import ServerError
from descriptors.objects import ByteRange
from descriptors.storage_api import Piece
from objectcache.adapters.beneath import Beneath
from objectcache.adapters.threads import to_end
from storage_server.cache.evictor import Evictor
from storage_server.cache.replacer import Replacer, ladders_of
from storage_server.delivery.scheduler.profiles import growth_of
from storage_server.kernel.chunks import EmbeddedChunks
from storage_server.kernel.data.bodies import BodyReader, BodyWriter
from storage_server.kernel.data.bound import Bound
from storage_server.kernel.data.buffers import BufferShare
from storage_server.kernel.data.disk import Disk
from storage_server.kernel.data.extents import FOLDER, ExtentFiles
from storage_server.kernel.data.file_threads import FileThreads
from storage_server.kernel.data.io_threads import IoThreads
from storage_server.kernel.data.replaceable_threads import SPARE_THREADS
from storage_server.kernel.data.segments import Pending, Segments
from storage_server.kernel.data.space import Space
from storage_server.kernel.index import queries
from storage_server.kernel.index.committer import Committer
from storage_server.kernel.index.identity import IndexMismatchError, Mark, mismatch, read_identity
from storage_server.kernel.index.reader import IndexReader
from storage_server.kernel.index.resolved import ResolvedKeys
from storage_server.kernel.index.transaction import Transaction
from storage_server.kernel.objects import Objects
from storage_server.kernel.rules.rows import Committed, StoredPart
from storage_server.kernel.slow_readers import SlowReaders
from storage_server.kernel.upkeep.compaction import Compactor
from storage_server.kernel.upkeep.dedup import Deduplicator
from storage_server.kernel.upkeep.lifecycle import Lifecycle
from storage_server.kernel.upkeep.recovery import drop_unsynced
from storage_server.kernel.uploads import Uploads
from storage_server.settings import CacheSettings, ColdReads, Dedup, StorageSettings

IO_THREADS = 4
FULL_REMEDY = "delete objects, raise disk_bytes, or make buckets caches, whose objects leave by themselves"
WHAT_TO_DO = (
    "Put the right index.sqlite3 back; or start with --adopt-index to go on with this one: files it does not know are"
    " then moved to the directory set-aside, and nothing is deleted"
)
_T = TypeVar("_T")


class EmbeddedStore:
    """Objects in one directory, which `objects` and `uploads` read and change; `chunks` are for descriptors."""

    def __init__(self, settings: StorageSettings, disk: Disk | None = None) -> None:
        self.settings = settings
        self.disk = disk = disk or Disk()
        settings.data_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        disk.sync_directory(Beneath(settings.data_dir.parent))
        self._lock = _lock_directory(settings)
        index = settings.data_dir / "index.sqlite3"
        self._index_is_new = not index.exists() or index.stat().st_size == 0
        self.space = Space(settings.data_dir, settings.disk_bytes, disk.free_bytes)
        self.bound = Bound(
            "the data directory", lambda: self.space.extent_bytes_max, lambda: self.space.extent_bytes, FULL_REMEDY
        )
        self.space.freed = self.bound.notify
        direct_threads = settings.gather_threads if settings.cold_reads is ColdReads.DIRECT else 0
        self.files = ExtentFiles(settings.data_dir, settings.open_files_max, disk, self.space, direct_threads)
        self.files.start()
        self.slow_readers = SlowReaders(
            lambda: self.space.extent_bytes_max, self.bound.lacks_room, self.files.withheld_bytes
        )
        resolved = ResolvedKeys(settings.resolved_keys_max, settings.resolved_bytes_max)
        mark = Mark(settings.data_dir, FOLDER)
        self._marked = mark.read()
        self.committer = Committer(
            path=index,
            durability=settings.durability,
            disk=disk,
            dispose=self._dispose,
            punch=self.files.punch,
            punch_delay_s=settings.punch_delay_s,
            resolved=resolved,
            mark=mark,
            space=self.space,
            on_changes=self._note_changes,
        )
        self.segments = Segments(self.files, disk, settings.packed_bytes_max, self.space, self.committer.consider)
        self.reader = IndexReader(index)
        whole = () if settings.upstream is None else (CacheSettings(None, eviction=settings.eviction),)
        self.evictor = Evictor(
            caches=(*settings.caches, *whole),
            space=self.space,
            bound=self.bound,
            reader=self.reader,
            change=partial(self.change, frees=True),
            sync_soon=self.committer.sync_soon,
            growth=growth_of(settings.scheduler.profiles),
            free_bytes=partial(disk.free_bytes, settings.data_dir),
            readers_withhold=self.slow_readers.keep_others_out,
            ladder_of=None
            if settings.compression is None
            else ladders_of(settings.compression, settings.losses, settings.scheduler.profiles),
        )
        self._io = IoThreads(IO_THREADS, SPARE_THREADS)
        self._body_reads = FileThreads(IO_THREADS, IO_THREADS)
        self._share = share = BufferShare(settings.buffer_bytes)
        self.bodies = BodyWriter(
            segments=self.segments,
            disk=disk,
            durability=settings.durability,
            share=share,
            io=self._io,
            bound=self.bound,
        )
        self._body_reader = BodyReader(self.files.open, share, self._body_reads)
        self.objects = Objects(
            index=self.reader,
            files=self.files,
            reader=self._body_reader,
            resolved=resolved,
            committer=self.committer,
            writer=self.bodies,
            io=self._io,
            object_bytes_max=settings.object_bytes_max,
            watcher=self.evictor,
            readers=self.slow_readers,
        )
        self.chunks = EmbeddedChunks(self.objects, self.files)
        self.replacer: Replacer | None = None
        if settings.compression is not None and any(cache.replaces for cache in settings.caches):
            self.replacer = Replacer(
                settings=settings.compression,
                losses=settings.losses,
                reads=self.objects,
                files=self.files,
                writer=self.bodies,
                committer=self.committer,
            )
            self.evictor.replace_with(self.replacer, settings.caches)
        self.uploads = Uploads(
            reader=self.reader,
            committer=self.committer,
            bodies=self.bodies,
            part_bytes_max=settings.object_bytes_max,
            objects=self.objects,
            watcher=self.evictor,
        )
        self.compactor = Compactor(
            directory=settings.data_dir,
            reader=self.reader,
            committer=self.committer,
            segments=self.segments,
            files=self.files,
            disk=disk,
            io=self._io,
            bound=self.bound,
            live_fraction_max=settings.compact_live_fraction_max,
            is_busy=self._is_busy,
        )
        # workers read locations for longer than they can be kept for them; what nobody deletes must not go under them
        dedup = Dedup.OFF if settings.punch_delay_s else settings.dedup
        self.deduplicator = Deduplicator(dedup, self.reader, self.committer, self.files, self._is_busy)
        self.lifecycle = Lifecycle(self.objects, self.uploads, self.reader, partial(self.change, frees=True))

    async def start(self) -> int:
        """Remove the leftovers of a crash: files that no row names, and rows whose bytes never reached the disk.

        Returns how many files and rows were removed. Raises IndexMismatchError, and changes nothing, where the index
        lacks files that it should name; with `adopt_index` such files are set aside instead.
        """
        file_count = await self._io.run(self.files.count)
        set_aside = self._marked is None or self.settings.adopt_index
        if not self.settings.adopt_index:
            identity = await self.reader.threaded(read_identity)
            problem = mismatch(identity, self._marked, index_is_new=self._index_is_new, file_count=file_count)
            if problem is not None:
                raise IndexMismatchError(f"{self.settings.data_dir}: {problem}. {WHAT_TO_DO}")
        suspects = await self.reader.threaded(queries.unsynced)
        dropped = await drop_unsynced(suspects, self.files, self.committer, self._io)
        live = await self.reader.threaded(queries.file_ids)
        removed = await self._io.run(lambda: self.files.sweep(live, set_aside=set_aside))
        with contextlib.suppress(ServerError):  # on a full disk the mark stays as it was
            await self.change(lambda tx: None, frees=True)  # writes a mark of this index
        if self.settings.upstream is not None:
            self.space.derive_bound()
        await self.evictor.load()
        return dropped + removed

    def close(self) -> None:
        """Finish running work and close every file."""
        self._io.close()
        self._body_reads.close()
        self.deduplicator.close()
        if self.replacer is not None:
            self.replacer.close()
        self.evictor.close()
        self.segments.close()
        self.committer.close()
        self.reader.close()
        self.files.close()
        os.close(self._lock)

    def _dispose(self, file_id: str) -> None:
        """Delete a file that no row names. A file that is still written to is looked at again when it closes."""
        self.segments.retire(file_id)
        if not self.segments.is_written(file_id):
            self.files.dispose(file_id)

    def _note_changes(self, committed: Committed) -> None:
        self.evictor.note_changes(committed)
        self.deduplicator.note_changes(committed)
        self.compactor.note_files(committed.files)

    def _is_busy(self, own_pinned_count: int) -> bool:
        """Whether anyone but the caller, who has so many files pinned, reads or writes."""
        return self.files.pinned_count > own_pinned_count or self._share.is_used or self.committer.is_used

    async def received_pieces(self, part: StoredPart, pending: Pending | None) -> AsyncIterator[Piece]:
        """The bytes of a body that was received and is not published yet. Iterate while it is held."""
        if pending is not None and len(pending.data):
            yield bytes(pending.data)
        elif part.extent is not None:
            async with aclosing(self._body_reader.pieces([part.extent], ByteRange(0, part.nbytes))) as pieces:
                async for piece in pieces:
                    yield bytes(piece)

    async def change(self, change: Callable[[Transaction], _T], *, frees: bool = False) -> _T:
        """Carry out a change of the index to its end, even when the caller is cancelled."""
        return await to_end(asyncio.ensure_future(self.committer.commit(change, frees=frees)))


def _lock_directory(settings: StorageSettings) -> int:
    """Lock the directory, because a second server would take our unfinished files for leftovers. Raises OSError
    (EWOULDBLOCK) where another server has it.
    """
    fd = Beneath(settings.data_dir, "lock").open(os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(fd)
        raise BlockingIOError(error.errno, "is in use by another server", str(settings.data_dir)) from None
    return fd
