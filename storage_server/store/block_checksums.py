"""CRC-32C of every block of an extent: what makes a flipped bit on disk an error instead of a wrong answer.

Blocks of 16 KiB, counted from the extent's first byte; the last may be shorter. Kept in the index as little-endian
32-bit words, 0.024 % of the data. A block is what must be read to prove any byte of it.
"""

from __future__ import annotations

import numpy as np

from adapters.native import crc32c, first_bad_block
from descriptors.storage_api import Piece

__all__ = ["BLOCK_BYTES", "BlockChecksums", "first_bad_block"]

BLOCK_BYTES = 16_384
_WORD = np.dtype("<u4")


class BlockChecksums:
    """Checksums of bytes that arrive in pieces of any size."""

    def __init__(self) -> None:
        self._done: list[int] = []
        self._crc = 0
        self._filled = 0

    def update(self, piece: Piece) -> None:
        """The next bytes."""
        left = memoryview(piece)
        while left:
            taken = left[: BLOCK_BYTES - self._filled]
            self._crc = crc32c(taken, self._crc)
            self._filled += len(taken)
            left = left[len(taken) :]
            if self._filled == BLOCK_BYTES:
                self._done.append(self._crc)
                self._crc = self._filled = 0

    def packed(self) -> bytes:
        """All checksums so far, a shorter last block included."""
        return np.array(self._done + ([self._crc] if self._filled else []), dtype=_WORD).tobytes()
