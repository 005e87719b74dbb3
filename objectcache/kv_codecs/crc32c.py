"""CRC-32C as the linear map that it is, for those who compute it in parts: what zero bytes behind a message make of its
remainder. Pure.

    remainder(a ‖ b) = shift(remainder(a), bytes of b) ^ remainder(b)
"""

from __future__ import annotations

from functools import cache

import numpy as np
import numpy.typing as npt

from objectcache.adapters import native

POLYNOMIAL = 0x82F63B78
Words = npt.NDArray[np.uint32]


@cache
def tables(nbytes: int) -> Words:
    """The shift by so many zero bytes, a power of two, for each of a remainder's four bytes: of shape (4, 256)."""
    if nbytes == 1:
        table = np.arange(256, dtype=np.uint32)
        for _ in range(8):
            table = np.where(table & 1, table >> 1 ^ np.uint32(POLYNOMIAL), table >> 1).astype(np.uint32)
        numbers = np.arange(256, dtype=np.uint32)
        found: Words = np.stack([table, numbers, numbers << np.uint32(8), numbers << np.uint32(16)])
        return found
    half = nbytes // 2
    return looked_up(looked_up(_identity(), half), half)


def looked_up(values: Words, nbytes: int) -> Words:
    """The remainders with so many zero bytes behind, a power of two."""
    found: Words = tables(nbytes)[0][values & 255]
    for place in (1, 2, 3):
        found = found ^ tables(nbytes)[place][values >> np.uint32(8 * place) & 255]
    return found


def shifted(values: Words, nbytes: int) -> Words:
    """The remainders with any number of zero bytes behind."""
    for bit in range(nbytes.bit_length()):
        if nbytes >> bit & 1:
            values = looked_up(values, 1 << bit)
    return values


@cache
def checksum_rest(begun: bytes, nbytes: int) -> int:
    """The part of the CRC-32C of `begun` and a message of so many bytes that does not depend on the message: the
    checksum is this, and the message's remainder.
    """
    remainder = np.array([native.crc32c(begun) ^ 0xFFFFFFFF], dtype=np.uint32)
    return int(shifted(remainder, nbytes)[0]) ^ 0xFFFFFFFF


def _identity() -> Words:
    numbers = np.arange(256, dtype=np.uint32)
    return np.stack([numbers << np.uint32(8 * place) for place in range(4)])
