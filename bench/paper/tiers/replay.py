"""Recorded request streams played through policies: the share of tokens that a cache of a given size serves. Beside the
online policies is the best that knowledge of the future allows: Belady's rule, with the right not to admit a chunk.

Streams are in a compact form. A line is one request: `t` is its arrival in milliseconds, `n` its length in tokens, and
`r` its chunks as runs of numbers: [first, count, first, count, …]. A chunk is 512 tokens; the last chunk of a request
may be shorter.
"""

from __future__ import annotations

import json
import lzma
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from heapq import heappop, heappush
from itertools import pairwise
from pathlib import Path

from storage_server.cache.policies.choice import ORDERS
from storage_server.cache.policies.order import EvictionOrder, Key, Request, Resident
from storage_server.cache.policies.policy import EvictionPolicy

CHUNK_TOKENS = 512
FOLDER = Path(__file__).with_name("traces")


class Trace(Enum):
    """By the names of their files."""

    CONVERSATION = "conversation"
    SYNTHETIC = "synthetic"


@dataclass(frozen=True, slots=True)
class Stream:
    """Requests in the order of their arrival. `unique_bytes` has each chunk once. Bytes stand for tokens: a cache of KV
    takes the same number of bytes for each token, so the unit does not matter.
    """

    requests: Sequence[Request]
    unique_bytes: int


def read(trace: Trace, count_max: int | None = None) -> Stream:
    """The first `count_max` requests of a trace. Raises ValueError for a file that is not in the compact form."""
    return parsed(lzma.decompress((FOLDER / f"{trace.value}.jsonl.xz").read_bytes()).decode().splitlines()[:count_max])


def parsed(lines: Sequence[str]) -> Stream:
    """The requests of such lines. A chunk has as many bytes as tokens. Raises ValueError as `read` does."""
    requests: list[Request] = []
    sizes: dict[int, int] = {}
    for line in lines:
        entry = json.loads(line)
        firsts, counts = entry["r"][::2], entry["r"][1::2]
        keys = [key for first, count in zip(firsts, counts, strict=True) for key in range(first, first + count)]
        tokens = [CHUNK_TOKENS] * (len(keys) - 1) + [entry["n"] - CHUNK_TOKENS * (len(keys) - 1)]
        requests.append(Request(entry["t"] / 1000, tuple(keys), tuple(tokens)))
        sizes.update(zip(keys, tokens, strict=True))
    if any(before.now_s > after.now_s for before, after in pairwise(requests)):
        raise ValueError("requests are in the order of their arrival")
    return Stream(requests, sum(sizes.values()))


NEVER = 1 << 60


class Optimum(EvictionOrder):
    """The chunk whose next use is furthest away leaves first. `requests` are all that will come, in order. For chunks
    of one size no policy has more hits; with sizes that differ it is a good bound, not an exact one.
    """

    def __init__(self, requests: Sequence[Request]) -> None:
        self._next_uses = _next_uses(requests)
        self._number = -1
        self._queue: list[tuple[int, int, Key]] = []
        self._current: dict[Key, tuple[int, int]] = {}
        self._residents: dict[Key, Resident] = {}

    def note(self, request: Request) -> None:
        self._number += 1

    def admit(self, resident: Resident, position: int) -> None:
        self._residents[resident.key] = resident
        self.use(resident, position)

    def use(self, resident: Resident, position: int) -> None:
        self._current[resident.key] = -self._next_uses[self._number][position], -position
        self.put_back(resident)

    def take_next(self) -> Resident:
        while True:
            next_use, depth, key = heappop(self._queue)
            if self._current.get(key) == (next_use, depth):
                return self._residents[key]

    def take(self, resident: Resident) -> None:
        """Nothing: `take_next` passes over chunks that have left."""

    def put_back(self, resident: Resident) -> None:
        heappush(self._queue, (*self._current[resident.key], resident.key))

    def put_behind(self, resident: Resident) -> None:
        self.put_back(resident)

    def left(self, resident: Resident) -> None:
        del self._current[resident.key], self._residents[resident.key]


def _next_uses(requests: Sequence[Request]) -> list[list[int]]:
    """For each chunk of each request the number of the next request that names the chunk."""
    upcoming: dict[Key, int] = {}
    found = []
    for number in range(len(requests) - 1, -1, -1):
        keys = requests[number].keys
        found.append([upcoming.get(key, NEVER) for key in keys])
        upcoming.update(dict.fromkeys(keys, number))
    return found[::-1]


class Contender(Enum):
    """By their names on the command line."""

    LRU = "lru"
    LFU = "lfu"
    S3_FIFO = "s3-fifo"
    ARC = "arc"
    CASCADE = "cascade"
    REUSE_VALUE = "reuse-value"
    OPTIMUM = "optimum"


ONLINE: Mapping[Contender, Callable[[], EvictionOrder]] = {
    Contender(eviction.value): made for eviction, made in ORDERS.items()
}
"""Those that know the past only."""


class CapacityExceeded(Exception):
    """A policy kept more than its capacity: no hit of the policy counts."""


@dataclass(frozen=True, slots=True)
class Served:
    """Tokens of the leading runs that were resident, and tokens that were asked for, in the scored requests."""

    hit_tokens: int
    asked_tokens: int

    @property
    def hit_rate(self) -> float:
        """The share of the tokens that was served."""
        return self.hit_tokens / self.asked_tokens


def policy_of(contender: Contender, capacity_bytes: int, stream: Stream) -> EvictionPolicy:
    """An empty cache; only the optimum looks at the stream."""
    order = Optimum(stream.requests) if contender is Contender.OPTIMUM else ONLINE[contender]()
    return EvictionPolicy(capacity_bytes, order)


def replay(stream: Stream, policy: EvictionPolicy, advance: Callable[[int], None]) -> Served:
    """Play all requests and score the second half of them; the first half fills the cache. `advance` is told of each
    step. Raises CapacityExceeded.
    """
    scored = range(len(stream.requests) // 2, len(stream.requests))
    hit_tokens = asked_tokens = 0
    for number, tokens in _hits(stream, policy):
        if number in scored:
            hit_tokens += tokens
            asked_tokens += sum(stream.requests[number].sizes_bytes)
        advance(1)
    return Served(hit_tokens, asked_tokens)


def _hits(stream: Stream, policy: EvictionPolicy) -> Iterator[tuple[int, int]]:
    for number, request in enumerate(stream.requests):
        yield number, sum(request.sizes_bytes[: policy.hit_count(request.keys)])
        policy.request(request)
        if policy.used_bytes > policy.capacity_bytes:
            raise CapacityExceeded(f"{policy.used_bytes} bytes of {policy.capacity_bytes}")
