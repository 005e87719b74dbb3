"""Jobs and answers of the S3 load, and the objects that it moves. Pure.

Object number i of n bytes is the window of n bytes at 16*i of one random array. Windows overlap, so what is expected is
a view and costs no memory; two windows differ in every stretch of a few bytes. A key names its object, so that any
object can be checked without keeping it.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, replace
from enum import Enum

import numpy as np

from bench.beds.kv_peers.work import S3Target
from bench.beds.processes import shares
from objectcache.calibration.content import Bytes

STEP_BYTES = 16
NUMBER_MAX = 1 << 20
UNLIMITED_S = 1e9
LIST_NBYTES = 16
"""Size of the objects that are listed."""
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


class Kind(Enum):
    """One piece of work. CHECK reads back what was put, compares and deletes it. RECEIVE is a GET whose body is
    received into memory of ours; RAW is no HTTP at all.
    """

    PUT = "put"
    GET = "get"
    LIST = "list"
    CHECK = "check"
    RECEIVE = "receive"
    RAW = "raw"


@dataclass(frozen=True, slots=True)
class Job:
    """Requests `first`, `first + stride`, … until `count_max` of them are done or `seconds` have passed, but no fewer
    than one for each in flight. Reads cycle through `population` objects; writes never name a key twice. For RAW the
    target's URL is `tcp://HOST:PORT`.
    """

    kind: Kind
    target: S3Target
    group: Group
    nbytes: int
    in_flight: int
    count_max: int
    seconds: float = UNLIMITED_S
    first: int = 0
    stride: int = 1
    population: int | None = None
    is_signed: bool = True

    def number(self, index: int) -> int:
        """The object of request `index` of this job."""
        number = self.first + index * self.stride
        return number if self.population is None else number % self.population

    def key(self, number: int) -> str:
        """The key of an object."""
        return object_key(self.group, self.nbytes, number)

    def divided(self, parts: int) -> list[Job]:
        """The same work for several processes, none of which gets nothing to do; lists and checks are for one."""
        if self.kind in (Kind.LIST, Kind.CHECK):
            return [self]
        parts = min(parts, self.in_flight, self.count_max)
        each = zip(shares(self.in_flight, parts), shares(self.count_max, parts), strict=True)
        stride = self.stride * parts
        return [
            replace(self, in_flight=in_flight, count_max=count, first=self.first + part * self.stride, stride=stride)
            for part, (in_flight, count) in enumerate(each)
        ]


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a job: `count` requests (for a list, pages) and `items` objects between two monotonic times.

    `problem` is the first failed request or wrong body; figures beside a problem are worth nothing.
    """

    started_s: float
    ended_s: float
    count: int
    items: int
    latencies_s: tuple[float, ...]
    cpu_s: float
    problem: str | None = None
