"""The embedded store: objects in, objects out, extents pinned while they are read.

An object is published by one index commit after its extent file is complete and synced; until then, and after any
failure, the key shows what it showed before.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar

from descriptors.errors import CallerError, ChunkUnavailable, ErrorCode, ServerError
from descriptors.storage_api import (
    BucketInfo,
    ByteRange,
    ListPage,
    ListRequest,
    ObjectInfo,
    ObjectRead,
    Piece,
    PutRequest,
    RangeSpec,
)
from descriptors.units import MIB
from storage_server.settings import StorageSettings
from storage_server.store.extents import Extent, ExtentFiles, ExtentWriter, PinSet, disk_error
from storage_server.store.index import Index, IndexedObject
from storage_server.store.listing import list_page
from storage_server.threads import to_end

IO_THREADS = 4
WRITE_BATCH_BYTES = MIB
READ_PIECE_BYTES = MIB

_T = TypeVar("_T")


class EmbeddedStore:
    """Buckets and objects in one directory. Every method raises ObjectCacheError for what goes wrong."""

    def __init__(self, settings: StorageSettings) -> None:
        self._settings = settings
        settings.data_dir.mkdir(parents=True, exist_ok=True)
        self._lock = _lock_directory(settings.data_dir)
        self.files = ExtentFiles(settings.data_dir, settings.open_files_max)
        self._index = Index(settings.data_dir / "index.sqlite3")
        self._io = ThreadPoolExecutor(IO_THREADS, "store-io")

    async def start(self) -> int:
        """Remove what a crash left behind; how many files that was."""
        live = await self._index.file_ids()
        return await self._in_thread(lambda: self.files.sweep(live))

    def close(self) -> None:
        """Finish running work and close every file."""
        self._io.shutdown()
        self._index.close()
        self.files.close()
        os.close(self._lock)

    async def create_bucket(self, access_key: str, bucket: str) -> None:
        await self._index.create_bucket(bucket, access_key, time.time())

    async def head_bucket(self, bucket: str) -> BucketInfo:
        return await self._index.bucket(bucket)

    async def list_buckets(self) -> list[BucketInfo]:
        return await self._index.buckets()

    async def head_object(self, bucket: str, key: str) -> ObjectInfo:
        return (await self._index.find(bucket, key)).info

    async def list_objects(self, request: ListRequest) -> ListPage:
        await self._index.bucket(request.bucket)
        return await list_page(
            request,
            lambda start, inclusive, limit: self._index.page(request.bucket, start, inclusive, request.prefix, limit),
        )

    async def put_object(self, request: PutRequest, body: AsyncIterator[Piece]) -> ObjectInfo:
        """Store a whole object; visible and durable when this returns, and not visible at all when it raises."""
        if request.nbytes > self._settings.object_bytes_max:
            raise CallerError(
                ErrorCode.ENTITY_TOO_LARGE,
                f"an object may have {self._settings.object_bytes_max} bytes, not {request.nbytes}",
                field="content-length",
            )
        await self._index.bucket(request.bucket)
        writer = ExtentWriter(self._settings.data_dir, request.nbytes)
        try:
            await self._in_thread(writer.open)
            await self._copy(request, body, writer)
            etag = await self._in_thread(lambda: writer.finish(request.sha256, request.md5))
            info = ObjectInfo(request.key, request.nbytes, etag, time.time(), request.headers)
            entry = IndexedObject(info, Extent(writer.file_id, 0, request.nbytes))
        except BaseException:
            await self._in_thread(writer.discard)
            raise
        await to_end(asyncio.create_task(self._publish(request.bucket, entry, writer)))
        return info

    async def _publish(self, bucket: str, entry: IndexedObject, writer: ExtentWriter) -> None:
        """Commit, then let go of what the commit replaced; without a commit, of what it would have published."""
        try:
            replaced = await self._index.publish(bucket, entry)
        except BaseException:
            await self._in_thread(writer.discard)
            raise
        if replaced is not None:
            await self._in_thread(lambda: self.files.dispose(replaced.file_id))

    async def _copy(self, request: PutRequest, body: AsyncIterator[Piece], writer: ExtentWriter) -> None:
        batch: list[Piece] = []
        batch_bytes = 0

        async def flush() -> None:
            nonlocal batch, batch_bytes
            pieces, batch, batch_bytes = batch, [], 0
            await self._in_thread(lambda: writer.write(pieces, hash_sha256=request.sha256 is not None))

        async for piece in body:
            batch.append(piece)
            batch_bytes += len(piece)
            if batch_bytes >= WRITE_BATCH_BYTES:
                await flush()
        if batch:
            await flush()

    async def delete_object(self, bucket: str, key: str) -> None:
        await to_end(asyncio.create_task(self._delete(bucket, key)))

    async def _delete(self, bucket: str, key: str) -> None:
        removed = await self._index.remove(bucket, key)
        if removed is not None:
            await self._in_thread(lambda: self.files.dispose(removed.file_id))

    @asynccontextmanager
    async def open_object(self, bucket: str, key: str, range_spec: RangeSpec | None) -> AsyncIterator[ObjectRead]:
        """The object as it is now; its bytes stay readable until the context ends."""
        pins = PinSet(self.files)
        try:
            found = await to_end(asyncio.ensure_future(self._index.find(bucket, key, pins)))
            span = resolve_range(range_spec, found.info.nbytes)
            yield ObjectRead(found.info, span, self._pieces(found.extent, span))
        finally:
            await self._in_thread(pins.release)

    async def _pieces(self, extent: Extent, span: ByteRange) -> AsyncIterator[Piece]:
        for start in range(span.start, span.start + span.length, READ_PIECE_BYTES):
            piece = bytearray(min(READ_PIECE_BYTES, span.start + span.length - start))
            await self._in_thread(lambda: self._read(extent, start, memoryview(piece)))  # noqa: B023 - awaited here
            yield piece

    def _read(self, extent: Extent, start: int, view: memoryview) -> None:
        try:
            self.files.read_into(extent.file_id, extent.offset + start, view)
        except EOFError as error:
            raise ServerError(ErrorCode.INTERNAL_ERROR, "the stored object is shorter than its index says") from error

    @asynccontextmanager
    async def open_prefix(
        self, bucket: str, keys: Sequence[str], chunk_bytes: int, *, prefix_only: bool
    ) -> AsyncIterator[list[Extent]]:
        """Resolve and pin the chunks of a descriptor, in order, until the context ends.

        Raises ChunkUnavailable (NoSuchChunk, ChunkSizeMismatch) with the index of the first chunk that is absent or
        not `chunk_bytes` long; with `prefix_only` that happens at index 0 alone and the chunks before it are served.
        """
        pins = PinSet(self.files)
        try:
            found = await to_end(asyncio.ensure_future(self._index.find_prefix(bucket, keys, pins)))
            yield usable_prefix(found, chunk_bytes, prefix_only=prefix_only)
        finally:
            await self._in_thread(pins.release)

    async def matched(self, bucket: str, keys: Sequence[str]) -> int:
        """How many of `keys`, from the first, are stored without a gap."""
        found = await self._index.find_prefix(bucket, keys)
        return next((index for index, extent in enumerate(found) if extent is None), len(found))

    async def _in_thread(self, action: Callable[[], _T]) -> _T:
        """Run in the I/O pool, to its end even when the caller is cancelled; disk errors become ours."""
        try:
            return await to_end(asyncio.get_running_loop().run_in_executor(self._io, action))
        except OSError as error:
            raise disk_error(error, "serving the request") from error


def _lock_directory(directory: Path) -> int:
    """One server per directory: another's unfinished files would look like leftovers. Raises OSError (EWOULDBLOCK)."""
    fd = os.open(directory / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(fd)
        raise BlockingIOError(error.errno, "is in use by another server", str(directory)) from None
    return fd


def usable_prefix(found: Sequence[Extent | None], chunk_bytes: int, *, prefix_only: bool) -> list[Extent]:
    """The leading extents that exist and have the right size. Pure; errors as in `EmbeddedStore.open_prefix`."""
    usable: list[Extent] = []
    for index, extent in enumerate(found):
        if extent is not None and extent.nbytes == chunk_bytes:
            usable.append(extent)
            continue
        if prefix_only and index > 0:
            break
        field = f"chunk_keys[{index}]"
        if extent is None:
            raise ChunkUnavailable(ErrorCode.NO_SUCH_CHUNK, f"{field} is not stored", field=field, index=index)
        raise ChunkUnavailable(
            ErrorCode.CHUNK_SIZE_MISMATCH,
            f"{field} has {extent.nbytes} bytes, the descriptor says {chunk_bytes} (L*S)",
            field=field,
            index=index,
        )
    return usable


def resolve_range(spec: RangeSpec | None, nbytes: int) -> ByteRange:
    """A Range header against an object's size (RFC 9110, 14.1.2). Raises CallerError(InvalidRange)."""
    if spec is None:
        return ByteRange(0, nbytes)
    if spec.suffix is not None:
        length = min(spec.suffix, nbytes)
        if length == 0:
            raise _unsatisfiable(nbytes)
        return ByteRange(nbytes - length, length)
    first = spec.first or 0
    if first >= nbytes:
        raise _unsatisfiable(nbytes)
    last = nbytes - 1 if spec.last is None else min(spec.last, nbytes - 1)
    return ByteRange(first, last - first + 1)


def _unsatisfiable(nbytes: int) -> CallerError:
    return CallerError(ErrorCode.INVALID_RANGE, f"the object has {nbytes} bytes", field="range")
