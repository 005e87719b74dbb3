"""A body from the network onto the disk, and bytes from the disk for one: the store's data path for plain S3."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, closing, contextmanager
from functools import partial

from adapters.threads import finished
from descriptors.errors import CallerError, ErrorCode, ServerError
from descriptors.objects import BodyDigests, ByteRange, ChecksumAlgorithm
from descriptors.storage_api import Body, Piece, Pump
from descriptors.units import KIB, MIB
from storage_server.store.body_hashes import BodyHashes
from storage_server.store.buffers import BufferPool, BufferShare
from storage_server.store.disk import Disk
from storage_server.store.durability import Durability
from storage_server.store.extents import CorruptExtentError, Extent, ExtentFiles, read_object
from storage_server.store.io_threads import IoThreads
from storage_server.store.pump import ExtentPump
from storage_server.store.rows import StoredPart
from storage_server.store.segments import ExtentWriter, Pending, Segments

SYNC_ALONE_BYTES_MIN = MIB
AT_ONCE_BYTES_MAX = 64 * KIB
PUMP_BYTES_MIN = 256 * KIB


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
    ) -> AsyncIterator[tuple[StoredPart, Pending | None]]:
        """The body received and checked: commit its row, and with it what is pending on disk, inside the block.

        Raises CallerError (IncompleteBody, BadDigest, XAmzContentSHA256Mismatch), ServerError (InsufficientStorage,
        InternalError). Bytes no row names when the block ends are nobody's.
        """
        if nbytes == 0:
            yield await _empty(algorithm, body), None
            return
        hashes = BodyHashes(algorithm, sha256=body.has_sha256)
        if nbytes <= AT_ONCE_BYTES_MAX:
            whole = await _whole(body, nbytes)
            writer = self._segments.writer_at_once(nbytes, hashes)
            if writer is not None:
                with closing(writer):
                    pending = writer.keep(whole)
                    writer.check(body.digests())
                    yield _stored(writer, nbytes), pending
                return
            pieces = _once(whole)
        else:
            pieces = aiter(body)
        make_writer = partial(self._segments.writer, nbytes, hashes)
        with closing(await self._io.run(make_writer, undo=ExtentWriter.close)) as writer:
            await self._copy(pieces, writer, body, nbytes)
            yield _stored(writer, nbytes), writer.pending()

    async def _copy(self, pieces: AsyncIterator[Piece], writer: ExtentWriter, body: Body, nbytes: int) -> None:
        batch: list[Piece] = []
        batch_bytes = 0
        with self._share.joined():
            async for piece in pieces:
                batch.append(piece)
                batch_bytes += len(piece)
                if batch_bytes >= self._share.piece_bytes:
                    await self._io.run(partial(writer.write, batch, self._disk))
                    batch, batch_bytes = [], 0
            await self._io.run(lambda: self._finish(writer, batch, body.digests(), nbytes))

    def _finish(self, writer: ExtentWriter, rest: list[Piece], said: BodyDigests, nbytes: int) -> None:
        """Write the rest and check; and sync here what would keep the committer, and everyone with it, waiting."""
        writer.write(rest, self._disk)
        writer.check(said)
        if nbytes >= SYNC_ALONE_BYTES_MIN and self._durability is Durability.STRICT:
            writer.file.sync()


def _stored(writer: ExtentWriter, nbytes: int) -> StoredPart:
    return StoredPart(writer.hashes.etag, nbytes, writer.hashes.checksum, writer.extent())


async def _whole(body: Body, nbytes: int) -> bytearray:
    """A small body. Raises CallerError(IncompleteBody) when it is longer than announced."""
    whole = bytearray()
    async for piece in body:
        whole += piece
        if len(whole) > nbytes:
            raise CallerError(ErrorCode.INCOMPLETE_BODY, "the body is longer than announced", field="body")
    return whole


async def _once(piece: Piece) -> AsyncIterator[Piece]:
    yield piece


class BodyReader:
    """Bytes from the disk, each piece read while the one before is sent."""

    def __init__(self, files: ExtentFiles, share: BufferShare, io: IoThreads) -> None:
        self._files = files
        self._share = share
        self._io = io
        self._buffers = BufferPool()

    async def pieces(self, extents: Sequence[Extent], span: ByteRange) -> AsyncGenerator[Piece, None]:
        """The bytes of a span. A piece is good until the next is asked for. Close it before unpinning the extents.

        Raises ServerError(InternalError) where stored bytes fail their checksum.
        """
        if span.length <= AT_ONCE_BYTES_MAX:
            small = self._cached(extents, span)
            if small is not None:
                yield small
                return
        async with aclosing(self._ahead(extents, span)) as pieces:
            async for piece in pieces:
                yield piece

    async def _ahead(self, extents: Sequence[Extent], span: ByteRange) -> AsyncGenerator[Piece, None]:
        """Two buffers take turns: one is filled by a thread while the other is in use."""
        with self._share.joined(), self._buffers.lent(2) as buffers:
            ahead: asyncio.Future[Piece] | None = None
            try:
                start, end = span.start, span.start + span.length
                while start < end or ahead is not None:
                    done = [await ahead] if ahead is not None else []
                    ahead = None
                    if start < end:
                        buffers.reverse()
                        view = buffers[0][: min(self._share.piece_bytes, end - start)]
                        ahead = asyncio.ensure_future(self._io.run(partial(self._read, extents, start, view)))
                        start += len(view)
                    for piece in done:
                        yield piece
            finally:
                if ahead is not None:
                    await finished(ahead)  # a thread fills a buffer until then

    @contextmanager
    def pump(self, extents: Sequence[Extent], span: ByteRange) -> Iterator[Pump | None]:
        """The bytes of a span, to be sent by a thread of ours; None for so few that it would not pay."""
        if span.length < PUMP_BYTES_MIN:
            yield None
            return

        def read(start: int, view: memoryview) -> None:
            with corrupt_is_internal():
                read_object(self._files.read_into, extents, start, view)

        with self._share.joined(), closing(ExtentPump(read, span, self._share, self._buffers, self._io)) as pump:
            yield pump

    def _cached(self, extents: Sequence[Extent], span: ByteRange) -> Piece | None:
        """A span that is in memory, at once; None where the disk has to be waited for."""
        piece = memoryview(bytearray(span.length))
        with corrupt_is_internal():
            try:
                read_object(self._files.read_cached_into, extents, span.start, piece)
            except BlockingIOError:
                return None
        return piece

    def _read(self, extents: Sequence[Extent], start: int, view: memoryview) -> Piece:
        with corrupt_is_internal():
            read_object(self._files.read_into, extents, start, view)
        return view


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
