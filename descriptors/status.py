"""The state of a storage side, as `GET /_objectcache/status` tells it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from descriptors.messages import SchedulerStatus

CACHES_MAX = 256
"""A status has no more caches; a client may make more, and the largest are told."""

MODELS_MAX = 64
"""A status has no more models of a cache; a client may name as many as it has objects."""


@dataclass(frozen=True, slots=True)
class CacheStatus:
    """One bucket that is a cache; the bucket "" is all of them, in front of another service. `capacity_bytes` is None
    where the directory's bound is the cache's. `eviction_age_s` is how long ago the object that left last had been used
    then; None where none has left. `read_bytes` are those of objects that were read. `models` has the count and the
    bytes of the objects of the largest models, by their labels, and of all other objects under "".
    """

    bucket: str
    capacity_bytes: int | None
    used_bytes: int
    object_count: int
    evicted_count: int
    evicted_bytes: int
    eviction_age_s: float | None
    read_bytes: int = 0
    models: Mapping[str, tuple[int, int]] = field(default_factory=dict)


DELIVERIES_MAX = 64
"""A status has no more deliveries."""
ENDED_MAX = 32
"""Deliveries that have ended are told with those under way: most last some milliseconds."""


@dataclass(frozen=True, slots=True)
class DeliveryStatus:
    """One delivery, or one portion of it. `mode` is empty before its plan. `groups` has a letter for each layer, or
    chunk, that was sent: r where it was ready when the client needed it, l where the client waited for it.
    `stalled_s` is how long it has waited in all, None where nobody knows how long it computes. `rate_bytes_per_s` is 0
    where nothing limits it. `outcome` is empty while it is under way, and "done" or an error code after that.
    """

    request_id: str
    bucket: str
    transport: str
    mode: str
    began_at: float
    elapsed_s: float
    nbytes: int
    sent_bytes: int
    group_count: int
    groups: str
    rate_bytes_per_s: int
    stalled_s: float | None
    outcome: str


@dataclass(frozen=True, slots=True)
class StorageStatus:
    """One storage server. `name` is its own in a cluster. Times are in seconds; counts are since its start.
    `compression` says which chunks are encoded. `sent_bytes` are those of deliveries, by transport; extents count as
    missed that were read from files.
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
    compression: str = ""
    sent_bytes: Mapping[str, int] = field(default_factory=dict)
    caches: tuple[CacheStatus, ...] = ()
    deliveries: tuple[DeliveryStatus, ...] = ()
