"""The embedded store: objects in, objects out, in one directory.

    DIR/index.sqlite3   which bytes make which object; a commit here is what publishes
    DIR/extents/        the bytes

Until its commit, and after any failure, a key shows what it showed before. docs/durability.md says what is promised.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import sqlite3
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from adapters.threads import to_end
from descriptors.conditions import NO_WRITE_CONDITION, WriteCondition, check_read, check_write
from descriptors.errors import CallerError, ErrorCode, ServerError
from descriptors.lifecycle import LifecycleRule
from descriptors.objects import (
    Attributes,
    CopyRequest,
    ObjectInfo,
    PutRequest,
    ReadRequest,
)
from descriptors.storage_api import Body
from storage_server.settings import StorageSettings
from storage_server.store import queries, transaction
from storage_server.store.bodies import BodyReader, BodyWriter
from storage_server.store.body_hashes import BodyHashes
from storage_server.store.buffers import BufferShare
from storage_server.store.committer import Committer
from storage_server.store.compaction import Compactor
from storage_server.store.disk import Disk
from storage_server.store.extents import ExtentFiles
from storage_server.store.identity import IndexMismatchError, Mark, mismatch, read_identity
from storage_server.store.io_threads import IoThreads
from storage_server.store.reader import IndexReader
from storage_server.store.reads import Reads
from storage_server.store.recovery import drop_unsynced
from storage_server.store.resolved import ResolvedKeys
from storage_server.store.rows import StoredObject
from storage_server.store.segments import Segments
from storage_server.store.transaction import Transaction
from storage_server.store.uploads import Uploads

IO_THREADS = 4
COPY_ATTEMPTS_MAX = 8
WHAT_TO_DO = (
    "Put the right index.sqlite3 back; or start with --adopt-index to go on with this one: files it does not know are"
    " then moved to the directory set-aside, and nothing is deleted"
)
_T = TypeVar("_T")


class EmbeddedStore:
    """Buckets and objects in one directory. Every method raises ObjectCacheError for what goes wrong."""

    def __init__(self, settings: StorageSettings, disk: Disk | None = None) -> None:
        self._settings = settings
        disk = disk or Disk()
        settings.data_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        disk.sync_directory(settings.data_dir.parent)
        self._lock = _lock_directory(settings)
        index = settings.data_dir / "index.sqlite3"
        self._index_is_new = not index.exists() or index.stat().st_size == 0
        self.files = ExtentFiles(settings.data_dir, settings.open_files_max, disk)
        self.files.start()
        resolved = ResolvedKeys(settings.resolved_keys_max, settings.resolved_bytes_max)
        mark = Mark(settings.data_dir)
        self._marked = mark.read()
        self._committer = Committer(
            index, settings.durability, disk, self._dispose, self.files.punch, settings.punch_delay_s, resolved, mark
        )
        self._segments = Segments(
            settings.data_dir, self.files, disk, settings.packed_bytes_max, self._committer.consider
        )
        self.reader = IndexReader(index)
        self._io = IoThreads(IO_THREADS)
        self._share = share = BufferShare(settings.buffer_bytes)
        self._bodies = BodyWriter(self._segments, disk, settings.durability, share, self._io)
        self.reads = Reads(self.reader, self.files, BodyReader(self.files, share, self._io), resolved)
        self.uploads = Uploads(self.reader, self._committer, self._bodies, settings.object_bytes_max, self.reads)
        self.compactor = Compactor(
            settings.data_dir,
            self.reader,
            self._committer,
            self._segments,
            self.files,
            disk,
            self._io,
            settings.compact_live_fraction_max,
            self._is_busy,
        )

    async def start(self) -> int:
        """Remove what a crash left behind: files no row names, and rows whose bytes never reached the disk.

        Returns how many files and rows that was. Raises IndexMismatchError, and touches nothing, where the index does
        not know of files it should; with `adopt_index` such files are set aside instead.
        """
        file_count = await self._io.run(self.files.count)
        set_aside = self._marked is None or self._settings.adopt_index
        if not self._settings.adopt_index:
            identity = await self.reader.threaded(read_identity)
            problem = mismatch(identity, self._marked, index_is_new=self._index_is_new, file_count=file_count)
            if problem is not None:
                raise IndexMismatchError(f"{self._settings.data_dir}: {problem}. {WHAT_TO_DO}")
        suspects = await self.reader.threaded(queries.unsynced)
        dropped = await drop_unsynced(suspects, self.files, self._committer, self._io)
        live = await self.reader.threaded(queries.file_ids)
        removed = await self._io.run(lambda: self.files.sweep(live, set_aside=set_aside))
        with contextlib.suppress(ServerError):  # on a full disk the mark stays as it was
            await self.change(lambda tx: None, frees=True)  # from now on the mark is this index's
        return dropped + removed

    def close(self) -> None:
        """Finish running work and close every file."""
        self._io.close()
        self._segments.close()
        self._committer.close()
        self.reader.close()
        self.files.close()
        os.close(self._lock)

    def _dispose(self, file_id: str) -> None:
        """A file no row names. One that is still written is asked about again when it closes."""
        self._segments.retire(file_id)
        if not self._segments.is_written(file_id):
            self.files.dispose(file_id)

    def _is_busy(self, pinned_by_compaction: int) -> bool:
        """Whether somebody reads or writes."""
        return self.files.pinned_count > pinned_by_compaction or self._share.is_used or self._committer.is_used

    async def change(self, change: Callable[[Transaction], _T], *, frees: bool = False) -> _T:
        """Carry out a change of the index to its end, whatever becomes of the caller."""
        return await to_end(asyncio.ensure_future(self._committer.commit(change, frees=frees)))

    async def create_bucket(self, access_key: str, bucket: str) -> None:
        await self.change(lambda tx: transaction.create_bucket(tx, bucket, access_key, time.time()))

    async def delete_bucket(self, bucket: str) -> None:
        await self.change(lambda tx: transaction.delete_bucket(tx, bucket), frees=True)

    async def set_lifecycle(self, bucket: str, rules: list[LifecycleRule]) -> None:
        await self.change(lambda tx: transaction.set_lifecycle(tx, bucket, rules))

    async def put_object(self, request: PutRequest, body: Body) -> ObjectInfo:
        """Store a whole object; visible and durable when this returns, and not visible at all when it raises."""
        check_size(request.nbytes, self._settings.object_bytes_max)
        self._committer.require_room()
        self.reader.here(lambda db: _check_before_body(db, request))
        async with self._bodies.received(request.nbytes, request.checksum, body) as (part, pending):
            info = ObjectInfo(request.key, request.nbytes, part.etag, time.time(), request.attributes, part.checksum)

            def publish(tx: Transaction) -> None:
                transaction.publish(tx, request.bucket, info, part, request.condition)

            await to_end(asyncio.ensure_future(self._committer.commit(publish, pending)))
        return info

    async def copy_object(self, request: CopyRequest) -> ObjectInfo:
        """The copy shares the source's bytes; a checksum the source does not have is computed by reading them."""
        for _ in range(COPY_ATTEMPTS_MAX):
            source = self.reader.here(lambda db: _find_source(db, request.source))
            check_size(source.info.nbytes, self._settings.object_bytes_max)
            copied = await self._described_copy(request, source)

            def publish(tx: Transaction, seen: StoredObject = source, made: ObjectInfo = copied) -> ObjectInfo:
                return transaction.copy(tx, request, seen, made, time.time())

            try:
                return await self.change(publish)
            except CallerError as error:
                if error.code is not ErrorCode.CONDITIONAL_CONFLICT:
                    raise
        raise CallerError(ErrorCode.CONDITIONAL_CONFLICT, "the source keeps changing", field="x-amz-copy-source")

    async def _described_copy(self, request: CopyRequest, source: StoredObject) -> ObjectInfo:
        kept = request.attributes or source.info.attributes
        tags = source.info.attributes.tags if request.tags is None else request.tags
        info = replace(source.info, attributes=Attributes(kept.headers, tags, request.storage_class))
        wanted = request.checksum
        if wanted is None or (info.checksum is not None and info.checksum.algorithm is wanted):
            return info
        hashes = BodyHashes(wanted, sha256=False)
        whole = replace(request.source, range=None, part_number=None)
        async with self.reads.open_object(whole) as read:
            async for piece in read.body:
                await self._io.run(lambda data=piece: hashes.update(data))  # type: ignore[misc]
        return replace(info, checksum=hashes.checksum)

    async def delete_object(self, bucket: str, key: str, condition: WriteCondition = NO_WRITE_CONDITION) -> None:
        await self.change(lambda tx: transaction.remove(tx, bucket, key, condition), frees=True)

    async def delete_objects(self, bucket: str, keys: list[str]) -> None:
        await self.change(lambda tx: transaction.remove_many(tx, bucket, keys), frees=True)

    async def set_tags(self, bucket: str, key: str, tags: dict[str, str]) -> None:
        await self.change(lambda tx: transaction.set_tags(tx, bucket, key, tags))


def check_size(nbytes: int, nbytes_max: int) -> None:
    """Raises CallerError(EntityTooLarge)."""
    if nbytes > nbytes_max:
        raise CallerError(
            ErrorCode.ENTITY_TOO_LARGE,
            f"one request may store {nbytes_max} bytes, not {nbytes}",
            field="content-length",
        )


def _check_before_body(db: sqlite3.Connection, request: PutRequest) -> None:
    """Refuse now what would be refused after the body; the commit checks again."""
    transaction.require_bucket(db, request.bucket)
    if request.condition != NO_WRITE_CONDITION:
        found = transaction.find_object(db, request.bucket, request.key)
        check_write(request.condition, found.info.etag if found else None)


def _find_source(db: sqlite3.Connection, source: ReadRequest) -> StoredObject:
    found = transaction.require_object(db, source.bucket, source.key)
    check_read(source.condition, found.info.etag, found.info.modified_at, copying=True)
    return found


def _lock_directory(settings: StorageSettings) -> int:
    """One server per directory: another's unfinished files would look like leftovers. Raises OSError (EWOULDBLOCK)."""
    fd = os.open(settings.data_dir / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(fd)
        raise BlockingIOError(error.errno, "is in use by another server", str(settings.data_dir)) from None
    return fd
