"""A body from the network onto the disk, and bytes from the disk for one: the store's data path for plain S3."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from typing import TypeVar

from descriptors.errors import CallerError, ErrorCode, ServerError
from descriptors.objects import BodyDigests, ByteRange, ChecksumAlgorithm
from descriptors.storage_api import Body, Piece
from descriptors.units import MIB
from storage_server.store.body_hashes import BodyHashes
from storage_server.store.buffers import BufferShare
from storage_server.store.disk import Disk, disk_error
from storage_server.store.durability import Durability
from storage_server.store.extents import CorruptExtentError, Extent, ExtentFiles, read_object
from storage_server.store.rows import StoredPart
from storage_server.store.segments import ExtentWriter, Segments, WriteFile
from storage_server.threads import to_end

SYNC_ALONE_BYTES_MIN = MIB
_T = TypeVar("_T")


class IoThreads:
    """A pool of threads for what may wait for the disk, or is long enough to hold the event loop up."""

    def __init__(self, count: int) -> None:
        self._pool = ThreadPoolExecutor(count, "store-io")

    def close(self) -> None:
        """Finish running work."""
        self._pool.shutdown()

    async def run(self, action: Callable[[], _T]) -> _T:
        """Run to its end even when the caller is cancelled; disk errors become ours."""
        try:
            return await to_end(asyncio.get_running_loop().run_in_executor(self._pool, action))
        except OSError as error:
            raise disk_error(error, "serving the request") from error


class BodyWriter:
    """Bodies onto the disk."""

    def __init__(
        self, segments: Segments, disk: Disk, durability: Durability, share: BufferShare, io: IoThreads
    ) -> None:
        self._segments = segments
        self._disk = disk
        self._durability = durability
        self._share = share
        self._io = io

    @asynccontextmanager
    async def received(
        self, nbytes: int, algorithm: ChecksumAlgorithm | None, body: Body
    ) -> AsyncIterator[tuple[StoredPart, WriteFile | None]]:
        """The body on disk, its digests checked: commit its row, with the file to sync before, inside the block.

        Raises CallerError (IncompleteBody, BadDigest, XAmzContentSHA256Mismatch), ServerError (InsufficientStorage,
        InternalError). Bytes no row names when the block ends are nobody's.
        """
        if nbytes == 0:
            yield await _empty(algorithm, body), None
            return
        hashes = BodyHashes(algorithm, sha256=body.has_sha256)
        writer = await self._io.run(lambda: self._segments.writer(nbytes, hashes))
        try:
            with self._share.joined():
                await self._copy(body, writer)
            part = await self._io.run(lambda: self._finish(writer, nbytes, body.digests()))
            yield part, writer.file
        finally:
            writer.release()

    async def _copy(self, body: Body, writer: ExtentWriter) -> None:
        batch: list[Piece] = []
        batch_bytes = 0
        async for piece in body:
            batch.append(piece)
            batch_bytes += len(piece)
            if batch_bytes >= self._share.piece_bytes:
                await self._write(writer, batch)
                batch, batch_bytes = [], 0
        if batch:
            await self._write(writer, batch)

    async def _write(self, writer: ExtentWriter, batch: list[Piece]) -> None:
        await self._io.run(lambda: writer.write(batch, self._disk))

    def _finish(self, writer: ExtentWriter, nbytes: int, said: BodyDigests) -> StoredPart:
        """Check; and sync here what would keep the committer, and everyone with it, waiting."""
        writer.check(said)
        if nbytes >= SYNC_ALONE_BYTES_MIN and self._durability is Durability.STRICT:
            writer.file.sync()
        return StoredPart(writer.hashes.etag, nbytes, writer.hashes.checksum, writer.extent())


class BodyReader:
    """Bytes from the disk, each piece read while the one before is sent."""

    def __init__(self, files: ExtentFiles, share: BufferShare, io: IoThreads) -> None:
        self._files = files
        self._share = share
        self._io = io

    async def pieces(self, extents: Sequence[Extent], span: ByteRange) -> AsyncGenerator[Piece, None]:
        """The bytes of a span, each piece read while the one before is sent. Close it before unpinning the extents.

        Raises ServerError(InternalError) where stored bytes fail their checksum.
        """
        with self._share.joined():
            ahead: asyncio.Future[Piece] | None = None
            try:
                start, end = span.start, span.start + span.length
                while start < end or ahead is not None:
                    piece = await ahead if ahead is not None else None
                    ahead = None
                    if start < end:
                        length = min(self._share.piece_bytes, end - start)
                        ahead = asyncio.ensure_future(self._io.run(self._reader(extents, start, length)))
                        start += length
                    if piece is not None:
                        yield piece
            finally:
                if ahead is not None:
                    await asyncio.wait([ahead])
                    if not ahead.cancelled():
                        ahead.exception()

    def _reader(self, extents: Sequence[Extent], start: int, length: int) -> Callable[[], Piece]:
        def read() -> Piece:
            piece = bytearray(length)
            with corrupt_is_internal():
                read_object(self._files, extents, start, memoryview(piece))
            return piece

        return read


@contextmanager
def corrupt_is_internal() -> Iterator[None]:
    """A stored object that fails its checksum is our failure, and repeating the request does not help."""
    try:
        yield
    except CorruptExtentError as error:
        raise ServerError(ErrorCode.INTERNAL_ERROR, "the stored bytes fail their checksum") from error


async def _empty(algorithm: ChecksumAlgorithm | None, body: Body) -> StoredPart:
    async for piece in body:
        if piece:
            raise CallerError(ErrorCode.INCOMPLETE_BODY, "the body is longer than announced", field="body")
    hashes = BodyHashes(algorithm, sha256=body.has_sha256)
    hashes.check(body.digests())
    return StoredPart(hashes.etag, 0, hashes.checksum, None)
