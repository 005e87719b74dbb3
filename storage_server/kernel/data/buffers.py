"""Memory for bodies: the more bodies are under way, the smaller each one's buffers. Nobody waits, and the sum is
bounded.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from contextlib import contextmanager

from descriptors.units import MIB
from storage_server.planning.block_checksums import BLOCK_BYTES

PIECE_BYTES_MAX = MIB
PIECE_BYTES_MIN = 4 * BLOCK_BYTES
SPARE_BUFFERS_MAX = 64


class BufferShare:
    """Divides `total_bytes` among the bodies under way. Used from one event loop."""

    def __init__(self, total_bytes: int) -> None:
        self._total_bytes = total_bytes
        self._active = 0

    @contextmanager
    def joined(self) -> Iterator[None]:
        """Count one more body until the block ends."""
        self._active += 1
        try:
            yield
        finally:
            self._active -= 1

    @property
    def is_used(self) -> bool:
        """Whether any body is under way."""
        return self._active > 0

    @property
    def piece_bytes(self) -> int:
        """The largest piece allowed now: whole blocks, from PIECE_BYTES_MIN to PIECE_BYTES_MAX."""
        return piece_bytes(self._total_bytes, self._active)


class BufferPool:
    """Buffers of PIECE_BYTES_MAX that are used again, because fresh memory costs a page fault every 4 KiB. Pages of a
    buffer that were never written to take no memory. Used from one event loop.
    """

    def __init__(self) -> None:
        self._spare: list[memoryview] = []

    def take(self) -> memoryview:
        """A buffer. It holds whatever its last user left in it."""
        return (
            self._spare.pop()
            if self._spare
            else memoryview(mmap.mmap(-1, PIECE_BYTES_MAX, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
        )

    def give_back(self, buffer: memoryview) -> None:
        """Give a buffer back; a few are kept for later use."""
        if len(self._spare) < SPARE_BUFFERS_MAX:
            self._spare.append(buffer)

    @contextmanager
    def lent(self, count: int) -> Iterator[list[memoryview]]:
        """Lend `count` buffers until the block ends."""
        taken = [self.take() for _ in range(count)]
        try:
            yield taken
        finally:
            for buffer in taken:
                self.give_back(buffer)


def piece_bytes(total_bytes: int, active: int) -> int:
    """The size of a piece when `active` bodies share `total_bytes`. Each holds two: one in use, one
    being made ready.
    """
    share = total_bytes // (2 * max(active, 1)) // BLOCK_BYTES * BLOCK_BYTES
    return max(PIECE_BYTES_MIN, min(PIECE_BYTES_MAX, share))
