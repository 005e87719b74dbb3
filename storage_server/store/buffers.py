"""How much of a body is held in memory: less the more of them there are. Nobody waits, and the sum stays bounded."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from contextlib import contextmanager

from descriptors.units import MIB
from storage_server.store.block_checksums import BLOCK_BYTES

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
        """One more body, until the block ends."""
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
        """How large a piece may be now: whole blocks, from PIECE_BYTES_MIN to PIECE_BYTES_MAX."""
        return piece_bytes(self._total_bytes, self._active)


class BufferPool:
    """Buffers of PIECE_BYTES_MAX, used again: fresh memory costs a page fault every 4 KiB. What was never written to
    takes none. Used from one event loop.
    """

    def __init__(self) -> None:
        self._spare: list[memoryview] = []

    def take(self) -> memoryview:
        """A buffer, its content as somebody left it."""
        return (
            self._spare.pop()
            if self._spare
            else memoryview(mmap.mmap(-1, PIECE_BYTES_MAX, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
        )

    def give_back(self, buffer: memoryview) -> None:
        """Nobody uses it any more; a few are kept for the next."""
        if len(self._spare) < SPARE_BUFFERS_MAX:
            self._spare.append(buffer)

    @contextmanager
    def lent(self, count: int) -> Iterator[list[memoryview]]:
        """`count` buffers until the block ends."""
        taken = [self.take() for _ in range(count)]
        try:
            yield taken
        finally:
            for buffer in taken:
                self.give_back(buffer)


def piece_bytes(total_bytes: int, active: int) -> int:
    """Pure: each body holds two pieces, one on its way and one being made ready."""
    share = total_bytes // (2 * max(active, 1)) // BLOCK_BYTES * BLOCK_BYTES
    return max(PIECE_BYTES_MIN, min(PIECE_BYTES_MAX, share))
