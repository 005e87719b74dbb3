"""The orders by the names that they have in the configuration and in results."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum

from storage_server.cache.policies.adaptive import AdaptiveReplacement, S3Fifo
from storage_server.cache.policies.order import EvictionOrder
from storage_server.cache.policies.policy import EvictionPolicy
from storage_server.cache.policies.recency import Cascade, LeastFrequentlyUsed, LeastRecentlyUsed
from storage_server.cache.policies.reuse_value import GHOST_COUNT_MAX, ReuseValue


class Eviction(Enum):
    """Which chunks leave a full cache first."""

    REUSE_VALUE = "reuse-value"
    LRU = "lru"
    LFU = "lfu"
    S3_FIFO = "s3-fifo"
    ARC = "arc"
    CASCADE = "cascade"


ORDERS: Mapping[Eviction, Callable[[], EvictionOrder]] = {
    Eviction.REUSE_VALUE: ReuseValue,
    Eviction.LRU: LeastRecentlyUsed,
    Eviction.LFU: LeastFrequentlyUsed,
    Eviction.S3_FIFO: S3Fifo,
    Eviction.ARC: AdaptiveReplacement,
    Eviction.CASCADE: Cascade,
}


def policy_of(
    eviction: Eviction, capacity_bytes: int, growth: float = 0.0, ghost_count_max: int = GHOST_COUNT_MAX
) -> EvictionPolicy:
    """A policy for one cache. Where missing chunks are computed again, a byte costs more the deeper it is in its
    prefix, by `growth` (storage_server.cache.policies.use_worth). Only REUSE_VALUE looks at that, and at the number of
    chunks to remember that are not resident.
    """
    is_ours = eviction is Eviction.REUSE_VALUE
    order = ReuseValue(ghost_count_max, growth) if is_ours else ORDERS[eviction]()
    return EvictionPolicy(capacity_bytes, order)
