"""The two ways in which the bytes of one chunk come from upstream: into landing memory, from which a file is written
later, or straight into the file.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from descriptors.errors import ErrorCode, ServerError
from descriptors.objects import ReadHead, ReadRequest
from descriptors.storage_api import Piece
from descriptors.units import MIB
from objectcache.adapters.threads import HERE_BYTES_MAX
from storage_server.delivery.gather.landing import Landed
from storage_server.home.fetch.bulk_reads import Into
from storage_server.home.rules.proof import Proof
from storage_server.home.service import HomeObjects
from storage_server.kernel.data.disk import Disk
from storage_server.kernel.data.io_threads import IoThreads
from storage_server.kernel.data.segments import ExtentWriter
from storage_server.planning.block_checksums import BLOCK_BYTES, BlockChecksums

STEP_BYTES = MIB
OnStep = Callable[[bytes, int], None]
"""Called on the event loop with the packed checksums of all blocks so far, and the bytes of the chunk so far."""


@dataclass(frozen=True, slots=True)
class Opened:
    """An answer's head, and the proof of the whole object. `receive` brings all bytes of the answer, for a chunk that
    has its place in a file by now.
    """

    head: ReadHead
    proof: Proof | None
    receive: Callable[[ExtentWriter], Awaitable[None]]


class ChunkReceiver(Protocol):
    """The bytes of one chunk on their way."""

    received_bytes: int
    """How much of the chunk, from its beginning, has come and is counted in its checksums."""

    @property
    def landed(self) -> Landed | None:
        """The memory that the chunk comes into."""

    def open(self, request: ReadRequest, start: int, end: int | None) -> AbstractAsyncContextManager[Opened]:
        """A request for the bytes [start, end) of the chunk; without `end` for all the rest."""

    def words(self, writer: ExtentWriter) -> bytes:
        """The packed checksums of all blocks that have come."""

    async def etag(self, writer: ExtentWriter) -> str:
        """The MD5 of all bytes, in hex."""

    def close(self) -> None:
        """Give back what the chunk has of memory."""


class IntoMemory:
    """Implements Receiver. Threads of `objects` receive, at first one layer of `layer_bytes`."""

    def __init__(self, objects: HomeObjects, io: IoThreads, landed: Landed, layer_bytes: int, on_step: OnStep) -> None:
        self.landed = landed
        self.blocks = BlockChecksums()
        self.received_bytes = 0
        self._objects = objects
        self._io = io
        self._view = landed.view
        self._first_bytes = -(-layer_bytes // BLOCK_BYTES) * BLOCK_BYTES
        self._on_step = on_step
        self._loop = asyncio.get_running_loop()

    @asynccontextmanager
    async def open(self, request: ReadRequest, start: int, end: int | None) -> AsyncIterator[Opened]:
        view = self._view[start:end]

        def on_step(received_bytes: int) -> None:  # in the reading thread
            self.blocks.update(self._view[self.received_bytes : start + received_bytes])
            self.received_bytes = start + received_bytes
            with suppress(RuntimeError):  # the loop is closed, so nobody waits any more
                self._loop.call_soon_threadsafe(self._on_step, self.blocks.packed(), self.received_bytes)

        into = Into(view, self._first_bytes, max(STEP_BYTES, self._first_bytes), on_step)
        async with self._objects.open_into(request, into) as opened:
            head, proof, received = opened
            yield Opened(head, proof, lambda _: received)

    def words(self, writer: ExtentWriter) -> bytes:
        return self.blocks.packed()

    async def etag(self, writer: ExtentWriter) -> str:
        return await self._io.run(lambda: hashlib.md5(self._view, usedforsecurity=False).hexdigest())

    def close(self) -> None:
        self.landed.release()


class IntoFile:
    """Implements Receiver."""

    def __init__(self, objects: HomeObjects, io: IoThreads, disk: Disk, on_step: OnStep) -> None:
        self.landed: Landed | None = None
        self.received_bytes = 0
        self._objects = objects
        self._io = io
        self._disk = disk
        self._on_step = on_step

    @asynccontextmanager
    async def open(self, request: ReadRequest, start: int, end: int | None) -> AsyncIterator[Opened]:
        async with self._objects.open_range(request) as (head, proof, coming):
            yield Opened(head, proof, partial(self._receive, coming, start, head.range.length))

    async def _receive(self, coming: AsyncIterator[Piece], start: int, nbytes: int, writer: ExtentWriter) -> None:
        pieces: list[Piece] = []
        held_bytes, arrived_bytes = 0, start
        async for piece in coming:
            pieces.append(piece)
            held_bytes += len(piece)
            if arrived_bytes + held_bytes > start + nbytes:
                raise wrong("more bytes came than were asked for")
            if held_bytes >= STEP_BYTES:
                await self._write(writer, pieces, arrived_bytes + held_bytes)
                arrived_bytes += held_bytes
                pieces, held_bytes = [], 0
        await self._write(writer, pieces, arrived_bytes + held_bytes)
        if arrived_bytes + held_bytes != start + nbytes:
            raise wrong(f"{arrived_bytes + held_bytes - start} bytes of {nbytes} came")

    async def _write(self, writer: ExtentWriter, pieces: Sequence[Piece], arrived_bytes: int) -> None:
        if sum(map(len, pieces)) <= HERE_BYTES_MAX:
            writer.write(pieces, self._disk)  # in less time than a hand-over to a thread takes
        else:
            await self._io.run(partial(writer.write, pieces, self._disk))
        self.received_bytes = arrived_bytes
        self._on_step(writer.words(), arrived_bytes)

    def words(self, writer: ExtentWriter) -> bytes:
        return writer.words()

    async def etag(self, writer: ExtentWriter) -> str:
        return writer.hashes.etag

    def close(self) -> None:
        """It has no memory."""


def wrong(problem: str) -> ServerError:
    """The error where upstream sends something else than was asked for."""
    return ServerError(ErrorCode.INTERNAL_ERROR, f"the upstream store: {problem}", retryable=True)
