"""Whole numbers of 8, 4, 3 or 2 bits in bytes. The first number has the lowest bits.

Numbers of 3 bits lie as 8 in 3 bytes; a last group that is not full is filled with zeros.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.uint8]


def packed_bytes(count: int, bits: int) -> int:
    """The bytes that so many numbers take."""
    if bits == 3:
        return -(-count // 8) * 3
    return -(-count * bits // 8)


def pack(numbers: Numbers, bits: int) -> Numbers:
    """The bytes of these numbers, each below 2^bits."""
    flat = numbers.reshape(-1)
    if bits == 8:
        return flat.copy()
    if bits == 3:
        return _pack3(flat)
    each = 8 // bits
    padded = np.zeros(-(-len(flat) // each) * each, dtype=np.uint8)
    padded[: len(flat)] = flat
    lanes = padded.reshape(-1, each)
    result = np.zeros(len(lanes), dtype=np.uint8)
    for lane in range(each):
        result |= lanes[:, lane] << (bits * lane)
    return result


def unpack(data: Numbers, count: int, bits: int) -> Numbers:
    """The first `count` numbers of these bytes."""
    if bits == 8:
        return data[:count].copy()
    if bits == 3:
        return _unpack3(data, count)
    each, mask = 8 // bits, (1 << bits) - 1
    result = np.empty((len(data), each), dtype=np.uint8)
    for lane in range(each):
        result[:, lane] = data >> (bits * lane) & mask
    return result.reshape(-1)[:count]


def _pack3(flat: Numbers) -> Numbers:
    padded = np.zeros(-(-len(flat) // 8) * 8, dtype=np.uint32)
    padded[: len(flat)] = flat
    lanes = padded.reshape(-1, 8)
    words = np.zeros(len(lanes), dtype=np.uint32)
    for lane in range(8):
        words |= lanes[:, lane] << np.uint32(3 * lane)
    return np.ascontiguousarray(words.astype("<u4").view(np.uint8).reshape(-1, 4)[:, :3]).reshape(-1)


def _unpack3(data: Numbers, count: int) -> Numbers:
    triples = data.reshape(-1, 3).astype(np.uint32)
    words = triples[:, 0] | triples[:, 1] << np.uint32(8) | triples[:, 2] << np.uint32(16)
    result = np.empty((len(words), 8), dtype=np.uint8)
    for lane in range(8):
        result[:, lane] = words >> np.uint32(3 * lane) & np.uint32(7)
    return result.reshape(-1)[:count]
