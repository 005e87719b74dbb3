"""The objects of `bench s3`: seeded bytes that name their key, so that any object can be checked without keeping it.

Object number i of n bytes is the window of n bytes at 16*i of one random array. Windows overlap, so what is expected is
a view and costs no memory; two windows differ in every stretch of a few bytes.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import NDArray

STEP_BYTES = 16
NUMBER_MAX = 1 << 20
Bytes = NDArray[np.uint8]

_memcmp = ctypes.CDLL(None).memcmp
_memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_memcmp.restype = ctypes.c_int


class Group(Enum):
    """First part of a key: what the objects under it are for."""

    GET = "get"
    PUT = "put"
    LIST = "list"


@dataclass(frozen=True, slots=True)
class ObjectContent:
    """`base` is uint8, long enough for the largest object at the highest number."""

    base: Bytes

    def window(self, number: int, nbytes: int) -> Bytes:
        """The bytes of an object, read-only."""
        start = number % NUMBER_MAX * STEP_BYTES
        return self.base[start : start + nbytes]

    def holds(self, body: Bytes, number: int, nbytes: int) -> bool:
        """Whether `body` is exactly that object."""
        expected = self.window(number, nbytes)
        return body.nbytes == nbytes and _memcmp(body.ctypes.data, expected.ctypes.data, nbytes) == 0


def make_object_content(nbytes_max: int, seed: int) -> ObjectContent:
    """Content for objects of up to `nbytes_max`."""
    length = nbytes_max + STEP_BYTES * (NUMBER_MAX - 1)
    base = np.random.default_rng(seed).integers(0, 256, length, dtype=np.uint8)
    base.flags.writeable = False
    return ObjectContent(base)


def object_key(group: Group, nbytes: int, number: int) -> str:
    """Keys sort as their numbers do. `parse_key` is the inverse."""
    return f"{group.value}/{nbytes}/{number:09d}"


def parse_key(key: str) -> tuple[int, int]:
    """(nbytes, number) of a key. Raises ValueError for another's key."""
    _, nbytes, number = key.split("/")
    return int(nbytes), int(number)
