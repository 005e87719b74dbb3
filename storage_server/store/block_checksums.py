"""CRC-32C of every block of an extent: what makes a flipped bit on disk an error instead of a wrong answer.

Blocks of 16 KiB, counted from the extent's first byte; the last may be shorter. Kept in the index as little-endian
32-bit words, 0.024 % of the data. A block is what must be read to prove any byte of it.
"""

from __future__ import annotations

import sys
from array import array

from awscrt.checksums import crc32c

from descriptors.storage_api import Piece

BLOCK_BYTES = 16_384


class BlockChecksums:
    """Checksums of bytes that arrive in pieces of any size."""

    def __init__(self) -> None:
        self._done = array("I")
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
        words = self._done + array("I", [self._crc] if self._filled else [])
        if sys.byteorder == "big":
            words.byteswap()
        return words.tobytes()


def first_bad_block(view: memoryview, packed: bytes, first_block: int) -> int | None:
    """The index of the first block of `view` whose checksum is not the one in `packed`; None when all are right.

    `view` starts at block `first_block` and ends at a block's end or the extent's.
    """
    words = array("I", packed[4 * first_block : 4 * (first_block + -(-len(view) // BLOCK_BYTES))])
    if sys.byteorder == "big":
        words.byteswap()
    at = 0
    for index, expected in enumerate(words):
        if crc32c(view[at : at + BLOCK_BYTES]) != expected:
            return first_block + index
        at += BLOCK_BYTES
    return None if at >= len(view) else first_block + len(words)
