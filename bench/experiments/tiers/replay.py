"""Streams played through policies: the share of tokens that a cache of a given size serves. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum

from bench.experiments.tiers.optimum import Optimum
from bench.experiments.tiers.traces import Stream
from storage_server.eviction.choice import POLICIES
from storage_server.eviction.policy import EvictionPolicy


class Contender(Enum):
    """By their names on the command line."""

    LRU = "lru"
    LFU = "lfu"
    S3_FIFO = "s3-fifo"
    ARC = "arc"
    CASCADE = "cascade"
    REUSE_VALUE = "reuse-value"
    OPTIMUM = "optimum"


ONLINE: Mapping[Contender, Callable[[int], EvictionPolicy]] = {
    Contender(eviction.value): made for eviction, made in POLICIES.items()
}
"""Policies that know the past only, by the capacity in bytes."""


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
    if contender is Contender.OPTIMUM:
        return Optimum(capacity_bytes, stream.requests)
    return ONLINE[contender](capacity_bytes)


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
