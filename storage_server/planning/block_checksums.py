"""CRC-32C of every block of an extent. With it a flipped bit on disk becomes an error instead of a wrong answer.

Blocks have 16 KiB, counted from the extent's first byte; the last one may be shorter. The index keeps the checksums as
little-endian 32-bit words, 0.024 % of the data. To prove one byte, its whole block must be read.
"""

from __future__ import annotations

from descriptors.storage_api import Piece
from objectcache.adapters.native import block_words, crc32c, first_bad_block

__all__ = ["BLOCK_BYTES", "BlockChecksums", "first_bad_block"]

BLOCK_BYTES = 16_384
WORD_BYTES = 4


def checksum_bytes(nbytes: int) -> int:
    """The bytes of the checksums of all blocks of `nbytes`."""
    return -(-nbytes // BLOCK_BYTES) * WORD_BYTES


class BlockChecksums:
    """Computes the block checksums of bytes that arrive in pieces of any size."""

    def __init__(self) -> None:
        self._words = bytearray()
        self._crc = 0
        self._filled = 0

    def update(self, piece: Piece) -> None:
        """Add the next bytes."""
        left = memoryview(piece)
        if self._filled:
            taken, left = left[: BLOCK_BYTES - self._filled], left[BLOCK_BYTES - self._filled :]
            self._begin(taken)
            if self._filled == BLOCK_BYTES:
                self._words += self._crc.to_bytes(WORD_BYTES, "little")
                self._crc = self._filled = 0
        whole = len(left) - len(left) % BLOCK_BYTES
        self._words += block_words(left[:whole])
        self._begin(left[whole:])

    def _begin(self, part: memoryview) -> None:
        """Add the next bytes of a block that is not whole."""
        self._crc = crc32c(part, self._crc)
        self._filled += len(part)

    def packed(self) -> bytes:
        """The checksums of all blocks so far, including a shorter last block."""
        return bytes(self._words) + (self._crc.to_bytes(WORD_BYTES, "little") if self._filled else b"")
