"""Reading and sending a large object in one thread: each piece is sent while it is still in the processor's cache, and
no thread waits for another between two pieces.
"""

from __future__ import annotations

import select
import time
from collections.abc import Callable
from enum import Enum, auto
from functools import partial

from descriptors.objects import ByteRange
from descriptors.storage_api import SendSome
from descriptors.units import MIB
from storage_server.kernel.data.buffers import BufferPool, BufferShare
from storage_server.kernel.data.file_threads import FileThreads
from storage_server.kernel.data.replaceable_threads import CallProgress

TURN_BYTES = 16 * MIB
PATIENCE_S = 0.03


class Turn(Enum):
    """Why a thread's turn ended: everything is sent, others wait for the thread, or the connection is full for now."""

    DONE = auto()
    MORE = auto()
    BLOCKED = auto()


class ExtentPump:
    """Implements descriptors.storage_api.Pump. `read(start, view)` fills a view with proved bytes of one file:
    `in_one_file(start, nbytes)` says of which, and how many of the bytes it has.

    A turn sends at most TURN_BYTES, all of one file. It waits for a full connection only within its first PATIENCE_S,
    and only while nobody else waits for the thread.
    """

    def __init__(
        self,
        read: Callable[[int, memoryview], None],
        in_one_file: Callable[[int, int], tuple[str, int]],
        span: ByteRange,
        share: BufferShare,
        buffers: BufferPool,
        threads: FileThreads,
    ) -> None:
        self._read = read
        self._in_one_file = in_one_file
        self._at = span.start
        self._end = span.start + span.length
        self._share = share
        self._buffers = buffers
        self._buffer: memoryview | None = None
        self._threads = threads
        self._progress = CallProgress()
        self._unsent = memoryview(b"")

    async def prime(self) -> None:
        """Read the first piece. Raises ServerError(InternalError)."""
        self._buffer = self._buffers.take()
        await self._threads.run_on((self._next_file,), partial(self._read_next, self._buffer), self._progress)

    def close(self) -> None:
        """Give the buffer back."""
        buffer, self._buffer, self._unsent = self._buffer, None, memoryview(b"")
        if buffer is not None:
            self._buffers.give_back(buffer)

    async def send(self, send_some: SendSome, fd: int) -> bool:
        """See descriptors.storage_api.Pump."""
        if self._buffer is None:
            raise RuntimeError("prime() was not called")
        turn = Turn.MORE
        while turn is Turn.MORE:
            file_id = self._next_file
            sending = partial(self._turn, file_id, self._buffer, send_some, fd)
            turn = await self._threads.run_on((file_id,), sending, self._progress)
        return turn is Turn.DONE

    @property
    def _next_file(self) -> str:
        return self._in_one_file(self._at, 1)[0]

    def _turn(self, file_id: str, buffer: memoryview, send_some: SendSome, fd: int) -> Turn:
        stop_at = self._at + TURN_BYTES
        patient_until_s = time.monotonic() + PATIENCE_S
        while True:
            while self._unsent:
                try:
                    self._unsent = self._unsent[send_some(self._unsent) :]
                except BlockingIOError:
                    if self._threads.has_queue or not _writable(fd, patient_until_s):
                        return Turn.BLOCKED
            if self._at == self._end:
                return Turn.DONE
            if self._at >= stop_at or self._next_file != file_id:
                return Turn.MORE
            self._read_next(buffer)

    def _read_next(self, buffer: memoryview) -> None:
        self._progress.note()
        _, nbytes = self._in_one_file(self._at, min(self._share.piece_bytes, self._end - self._at))
        view = buffer[:nbytes]
        self._read(self._at, view)
        self._at += len(view)
        self._unsent = view


def _writable(fd: int, until_s: float) -> bool:
    left_ms = 1000 * (until_s - time.monotonic())
    if left_ms <= 0:
        return False
    poll = select.poll()
    poll.register(fd, select.POLLOUT)
    return bool(poll.poll(left_ms))
