"""The state of a storage side, as `GET /_objectcache/status` tells it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from descriptors.messages import SchedulerStatus

CACHES_MAX = 256
"""Of a status; a client may make more, and the largest are told."""


@dataclass(frozen=True, slots=True)
class CacheStatus:
    """One bucket that is a cache; the bucket "" is all of them, in front of another service. `capacity_bytes` is None
    where the directory's bound is the cache's. `eviction_age_s` is how long ago the object that left last had been used
    then; None where none has left.
    """

    bucket: str
    capacity_bytes: int | None
    used_bytes: int
    object_count: int
    evicted_count: int
    evicted_bytes: int
    eviction_age_s: float | None


@dataclass(frozen=True, slots=True)
class StorageStatus:
    """One storage server. `name` is its own in a cluster. Times are in seconds; counts are since its start.
    `sent_bytes` are those of deliveries, by transport; extents count as missed that were read from files.
    """

    name: str
    version: str
    uptime_s: float
    upstream: str
    used_bytes: int
    bound_bytes: int | None
    free_bytes: int
    dram_bytes: int
    dram_used_bytes: int
    dram_hit_count: int
    dram_missed_count: int
    lookup_count: int
    asked_chunk_count: int
    matched_chunk_count: int
    has_shm: bool
    has_ucx: bool
    scheduler: SchedulerStatus
    sent_bytes: Mapping[str, int] = field(default_factory=dict)
    caches: tuple[CacheStatus, ...] = ()
