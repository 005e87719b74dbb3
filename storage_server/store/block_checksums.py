"""CRC-32C of every block of an extent: what makes a flipped bit on disk an error instead of a wrong answer.

Blocks of 16 KiB, counted from the extent's first byte; the last may be shorter. Kept in the index as little-endian
32-bit words, 0.024 % of the data. A block is what must be read to prove any byte of it.

A CRC of bytes one after the other follows from the CRCs of each: crc(a || b) = shift(crc(a), len(b)) ^ crc(b), where
shift is linear over bits. So many blocks are proved by one CRC over all their bytes and a few table lookups.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import numpy.typing as npt
from awscrt.checksums import combine_crc32c
from crc32c import crc32c

from descriptors.storage_api import Piece

BLOCK_BYTES = 16_384
HOLD_GIL = 0
"""A block takes a microsecond; giving the interpreter away for it costs up to a switch interval to get it back."""
BLOCKS_PROVED_AT_ONCE = 64
LOOP_BYTES_MAX = 8 * BLOCK_BYTES
"""Up to this, a loop over blocks costs less than combining their checksums."""
_WORD = np.dtype("<u4")
_BYTES = np.arange(4)


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
            self._crc = crc32c(taken, self._crc, HOLD_GIL)
            self._filled += len(taken)
            left = left[len(taken) :]
            if self._filled == BLOCK_BYTES:
                self._done.append(self._crc)
                self._crc = self._filled = 0

    def packed(self) -> bytes:
        """All checksums so far, a shorter last block included."""
        return np.array(self._done + ([self._crc] if self._filled else []), dtype=_WORD).tobytes()


def first_bad_block(view: memoryview, packed: bytes, first_block: int) -> int | None:
    """The index of the first block of `view` whose checksum is not the one in `packed`; None when all are right.

    `view` starts at block `first_block` and ends at a block's end or the extent's.
    """
    if len(view) <= LOOP_BYTES_MAX:
        return _first_bad(view, packed, first_block)
    words = np.frombuffer(packed, dtype=_WORD)[first_block : first_block + -(-len(view) // BLOCK_BYTES)]
    if len(words) * BLOCK_BYTES < len(view):
        return first_block + len(words)
    step = BLOCKS_PROVED_AT_ONCE
    for first in range(0, len(words), step):
        span = view[first * BLOCK_BYTES : (first + step) * BLOCK_BYTES]
        if crc32c(span, 0, HOLD_GIL) != _expected(words[first : first + step], len(span)):
            return _first_bad(span, packed, first_block + first)
    return None


def _expected(words: npt.NDArray[np.uint32], nbytes: int) -> int:
    """The CRC of blocks one after the other, of `nbytes` in all, from the CRC of each."""
    tail_bytes = nbytes % BLOCK_BYTES
    whole = words[:-1] if tail_bytes else words
    if len(whole) == 0:
        return int(words[0])
    powers = np.arange(len(whole) - 1, -1, -1)[:, None]
    parts = _shift_tables()[powers, _BYTES, whole.astype(_WORD).view(np.uint8).reshape(-1, 4)]
    crc = int(np.bitwise_xor.reduce(parts, axis=None))
    return int(combine_crc32c(crc, int(words[-1]), tail_bytes)) if tail_bytes else crc


def _first_bad(view: memoryview, packed: bytes, first_block: int) -> int | None:
    """As `first_bad_block`, block by block."""
    at = 4 * first_block
    for start in range(0, len(view), BLOCK_BYTES):
        expected = int.from_bytes(packed[at : at + 4], "little")
        if at >= len(packed) or crc32c(view[start : start + BLOCK_BYTES], 0, HOLD_GIL) != expected:
            return at // 4
        at += 4
    return None


@cache
def _shift_tables() -> npt.NDArray[np.uint32]:
    """[k, j, b]: what byte value b at place j (0 the lowest) of a CRC becomes when k whole blocks follow."""
    tables = np.zeros((BLOCKS_PROVED_AT_ONCE, 4, 256), dtype=np.uint32)
    tables[0] = np.arange(256, dtype=np.uint32) << (8 * _BYTES[:, None]).astype(np.uint32)
    one = np.array([[combine_crc32c(int(value), 0, BLOCK_BYTES) for value in row] for row in tables[0]], np.uint32)
    for power in range(1, BLOCKS_PROVED_AT_ONCE):
        before = tables[power - 1]
        places = [(before >> np.uint32(8 * place)) & np.uint32(0xFF) for place in range(4)]
        tables[power] = np.bitwise_xor.reduce([one[place][places[place]] for place in range(4)])
    return tables
