"""Reading and sending a large object in one thread: a piece is sent while it is still in the processor's cache, and no
thread waits for another between two pieces.
"""

from __future__ import annotations

import select
from collections.abc import Callable
from enum import Enum, auto

from descriptors.objects import ByteRange
from descriptors.storage_api import SendSome
from descriptors.units import MIB
from storage_server.store.buffers import BufferShare
from storage_server.store.io_threads import IoThreads

TURN_BYTES = 16 * MIB
PATIENCE_MS = 20


class Turn(Enum):
    """How a thread's turn ended: all is sent, others should have theirs, or the connection takes no more for now."""

    DONE = auto()
    MORE = auto()
    BLOCKED = auto()


class ExtentPump:
    """Implements descriptors.storage_api.Pump. `read(start, view)` fills a view with proved bytes.

    A turn sends at most TURN_BYTES, and waits PATIENCE_MS at a time for a connection that is full.
    """

    def __init__(
        self,
        read: Callable[[int, memoryview], None],
        span: ByteRange,
        share: BufferShare,
        buffer: memoryview,
        io: IoThreads,
    ) -> None:
        self._read = read
        self._at = span.start
        self._end = span.start + span.length
        self._share = share
        self._buffer = buffer
        self._io = io
        self._unsent = buffer[:0]

    async def prime(self) -> None:
        """Have the first piece ready. Raises ServerError(InternalError)."""
        await self._io.run(self._fill)

    async def send(self, send_some: SendSome, fd: int) -> bool:
        """See descriptors.storage_api.Pump."""
        turn = Turn.MORE
        while turn is Turn.MORE:
            turn = await self._io.run(lambda: self._turn(send_some, fd))
        return turn is Turn.DONE

    def _turn(self, send_some: SendSome, fd: int) -> Turn:
        stop_at = self._at + TURN_BYTES
        while True:
            while self._unsent:
                try:
                    self._unsent = self._unsent[send_some(self._unsent) :]
                except BlockingIOError:
                    if not _writable(fd):
                        return Turn.BLOCKED
            if self._at == self._end:
                return Turn.DONE
            if self._at >= stop_at:
                return Turn.MORE
            self._fill()

    def _fill(self) -> None:
        view = self._buffer[: min(self._share.piece_bytes, self._end - self._at)]
        self._read(self._at, view)
        self._at += len(view)
        self._unsent = view


def _writable(fd: int) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLOUT)
    return bool(poll.poll(PATIENCE_MS))
