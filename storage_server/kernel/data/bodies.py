"""The data path for plain S3 bodies: from the network to the disk, and from the disk to the network."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, aclosing, asynccontextmanager, closing, contextmanager
from functools import partial

from descriptors.errors import CallerError, ErrorCode, ServerError
from descriptors.objects import BodyDigests, ByteRange, ChecksumAlgorithm
from descriptors.storage_api import Body, Piece, Pump
from descriptors.units import KIB, MIB
from objectcache.adapters.caller import CALLER
from objectcache.adapters.threads import finished
from storage_server.kernel.data.arriving_bodies import ArrivingBody
from storage_server.kernel.data.bound import PATIENCE_S, Bound
from storage_server.kernel.data.buffers import BufferPool, BufferShare
from storage_server.kernel.data.disk import Disk, disk_error
from storage_server.kernel.data.file_threads import FileThreads
from storage_server.kernel.data.io_threads import IoThreads
from storage_server.kernel.data.open_files import OpenFiles
from storage_server.kernel.data.pump import ExtentPump
from storage_server.kernel.data.segments import ExtentWriter, Pending, Segments
from storage_server.kernel.rules.body_hashes import BodyHashes
from storage_server.kernel.rules.rows import StoredPart
from storage_server.planning.durability import Durability
from storage_server.planning.extent import CorruptExtentError, Extent, aligned, in_one_file, read_object

SYNC_ALONE_BYTES_MIN = MIB
AT_ONCE_BYTES_MAX = 64 * KIB
PUMP_BYTES_MIN = 256 * KIB


class BodyWriter:
    """Writes bodies to the disk."""

    def __init__(
        self, segments: Segments, disk: Disk, durability: Durability, share: BufferShare, io: IoThreads, bound: Bound
    ) -> None:
        self._segments = segments
        self._bound = bound
        self._disk = disk
        self._durability = durability
        self._share = share
        self._io = io

    @asynccontextmanager
    async def received(
        self, nbytes: int, algorithm: ChecksumAlgorithm | None, body: Body, of_bucket: Sequence[Bound] = ()
    ) -> AsyncIterator[tuple[StoredPart, Pending | None]]:
        """Receive a body and check it. Inside the block, commit the body's row and, with it, what is pending on disk.
        `of_bucket` are the bounds of its bucket in which it has room already.

        Raises CallerError (IncompleteBody, BadDigest, XAmzContentSHA256Mismatch), ServerError (InsufficientStorage,
        InternalError). A body for which there is no room is not read, but where others take its room meanwhile. If no
        row names the bytes when the block ends, their space is given back.
        """
        if nbytes == 0:
            yield await _empty(algorithm, body), None
            return
        hashes = BodyHashes(algorithm, sha256=body.has_sha256)
        pieces: AsyncIterable[Piece] = body
        if nbytes <= AT_ONCE_BYTES_MAX and self._bound.has_room(aligned(nbytes)):
            whole = await _small(body, nbytes, of_bucket)
            has_room = self._bound.has_room(aligned(nbytes))
            at_once = self._segments.writer_at_once(nbytes, hashes) if has_room else None
            if at_once is not None:
                with closing(at_once):
                    pending = at_once.keep(whole)
                    at_once.check(body.digests())
                    yield _stored(at_once, nbytes), pending
                return
            pieces = _once(whole)
        writer = await self.writer(nbytes, hashes, self._io)
        with self._bound.arriving(), closing(writer):  # nobody is refused room that a slow body is about to give up
            await self._copy(pieces, writer, body, nbytes, of_bucket)
            yield _stored(writer, nbytes), writer.pending()

    async def writer(
        self, nbytes: int, hashes: BodyHashes, io: IoThreads, patience_s: float = PATIENCE_S
    ) -> ExtentWriter:
        """A writer for a body of `nbytes` (more than 0). Raises ServerError: InsufficientStorage, also where the bound
        has no room for `patience_s`; InternalError.
        """
        if self._bound.has_room(aligned(nbytes)):
            writer = self._segments.writer_at_once(nbytes, hashes)
            if writer is not None:
                return writer
        async with self._bound.reserved(aligned(nbytes), patience_s):
            return await io.run(partial(self._segments.writer, nbytes, hashes), undo=ExtentWriter.close)

    async def _copy(
        self, pieces: AsyncIterable[Piece], writer: ExtentWriter, body: Body, nbytes: int, of_bucket: Sequence[Bound]
    ) -> None:
        with _slow_ends(nbytes, self._bound, *of_bucket) as (arriving, limit):
            async with limit:
                await self._take(pieces, writer, body, nbytes, arriving)

    async def _take(
        self, pieces: AsyncIterable[Piece], writer: ExtentWriter, body: Body, nbytes: int, arriving: ArrivingBody
    ) -> None:
        batch: list[Piece] = []
        batch_bytes = 0
        now_s = asyncio.get_running_loop().time
        with self._share.joined():
            async for piece in pieces:
                arriving.came(len(piece), now_s())
                batch.append(piece)
                batch_bytes += len(piece)
                if batch_bytes >= self._share.piece_bytes:
                    with arriving.busy():
                        await self._io.run(partial(writer.write, batch, self._disk))
                    batch, batch_bytes = [], 0
            with arriving.busy():
                await self._io.run(lambda: self._finish(writer, batch, body.digests(), nbytes))

    def _finish(self, writer: ExtentWriter, rest: list[Piece], said: BodyDigests, nbytes: int) -> None:
        """Write the rest and check the hashes. Large bodies are synced here, since they would delay every commit."""
        writer.write(rest, self._disk)
        writer.check(said)
        if nbytes >= SYNC_ALONE_BYTES_MIN and self._durability is Durability.STRICT:
            writer.file.sync()


def _stored(writer: ExtentWriter, nbytes: int) -> StoredPart:
    return StoredPart(writer.hashes.etag, nbytes, writer.hashes.checksum, writer.extent())


@contextmanager
def _slow_ends(nbytes: int, *bounds: Bound) -> Iterator[tuple[ArrivingBody, asyncio.Timeout]]:
    """A body of `nbytes` arrives into room that it got in these bounds: where others lack it, one that comes too slowly
    is ended. Enter the time limit around its arrival. Raises ServerError(SlowDown) where it was ended.
    """
    limit = asyncio.timeout(None)
    arriving = ArrivingBody(asyncio.get_running_loop().time(), limit, nbytes, by=CALLER.get())
    try:
        with ExitStack() as stack:
            for bound in bounds:
                stack.enter_context(bound.bodies.taken_by(arriving))
            yield arriving, limit
    except TimeoutError:
        if not limit.expired():
            raise
        problem = "the body comes too slowly, and others wait for the room that it has taken"
        raise ServerError(ErrorCode.SLOW_DOWN, problem, field="body", retryable=True) from None


async def _small(body: Body, nbytes: int, of_bucket: Sequence[Bound]) -> bytearray:
    """A small body in memory. In the directory it takes no room yet. Raises CallerError(IncompleteBody) when it is
    longer than announced, ServerError(SlowDown) where it comes too slowly and others lack the room of its bucket.
    """
    whole = bytearray()
    if not of_bucket:
        await _gather(body, nbytes, whole)
        return whole
    with _slow_ends(nbytes, *of_bucket) as (arriving, limit):
        async with limit:
            await _gather(body, nbytes, whole, arriving)
    return whole


async def _gather(body: Body, nbytes: int, whole: bytearray, arriving: ArrivingBody | None = None) -> None:
    async for piece in body:
        whole += piece
        if arriving is not None:
            arriving.came(len(piece), asyncio.get_running_loop().time())
        if len(whole) > nbytes:
            raise CallerError(ErrorCode.INCOMPLETE_BODY, "the body is longer than announced", field="body")


async def _once(piece: Piece) -> AsyncIterator[Piece]:
    yield piece


class BodyReader:
    """Reads bytes from the disk: the next piece is read while the piece before is sent."""

    def __init__(self, files: OpenFiles, share: BufferShare, threads: FileThreads) -> None:
        self._files = files
        self._share = share
        self._threads = threads
        self._buffers = BufferPool()

    async def pieces(self, extents: Sequence[Extent], span: ByteRange) -> AsyncGenerator[Piece, None]:
        """The bytes of a span. A piece is valid until the next one is asked for. Close it before unpinning the extents.

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
        """The pieces of a span. Two buffers take turns: a thread fills one while the other is in use."""
        with self._share.joined(), self._buffers.lent(2) as buffers:
            ahead: asyncio.Future[Piece] | None = None
            try:
                start, end = span.start, span.start + span.length
                while start < end or ahead is not None:
                    done = [await ahead] if ahead is not None else []
                    ahead = None
                    if start < end:
                        buffers.reverse()
                        file_id, nbytes = in_one_file(extents, start, min(self._share.piece_bytes, end - start))
                        view = buffers[0][:nbytes]
                        read = partial(self._read, extents, start, view)
                        ahead = asyncio.ensure_future(self._threads.run_on((file_id,), read))
                        start += len(view)
                    for piece in done:
                        yield piece
            finally:
                if ahead is not None:
                    ahead.cancel()  # it may wait for its turn
                    await finished(ahead)  # until then a thread writes to a buffer

    @contextmanager
    def pump(self, extents: Sequence[Extent], span: ByteRange) -> Iterator[Pump | None]:
        """A pump that sends the bytes of a span from a thread; None for a span too small to be worth a thread."""
        if span.length < PUMP_BYTES_MIN:
            yield None
            return

        def read(start: int, view: memoryview) -> None:
            with corrupt_is_internal():
                read_object(self._files.read_into, extents, start, view)

        pump = ExtentPump(
            read=read,
            in_one_file=partial(in_one_file, extents),
            span=span,
            share=self._share,
            buffers=self._buffers,
            threads=self._threads,
        )
        with self._share.joined(), closing(pump):
            yield pump

    def _cached(self, extents: Sequence[Extent], span: ByteRange) -> Piece | None:
        """A small span that the page cache holds; None where the disk must be waited for."""
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
    """Turn a failed checksum into ServerError(InternalError), which is not retryable: another read would fail, too.
    The error for a read that the system fails is retryable.
    """
    try:
        yield
    except BlockingIOError:
        raise
    except OSError as error:
        raise disk_error(error, "reading") from error
    except CorruptExtentError as error:
        raise ServerError(ErrorCode.INTERNAL_ERROR, "the stored bytes fail their checksum") from error


async def _empty(algorithm: ChecksumAlgorithm | None, body: Body) -> StoredPart:
    async for piece in body:
        if piece:
            raise CallerError(ErrorCode.INCOMPLETE_BODY, "the body is longer than announced", field="body")
    hashes = BodyHashes(algorithm, sha256=body.has_sha256)
    hashes.check(body.digests())
    return StoredPart(hashes.etag, 0, hashes.checksum, None)
