"""The storage server's counters, and the values it reads off its parts on request (descriptors.metrics lists both)."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence

from descriptors import metrics
from descriptors.messages import SchedulerStatus
from descriptors.notices import Mode
from descriptors.status import CacheStatus
from objectcache.adapters.metrics import Reading
from storage_server.agents.requests import RequestTable
from storage_server.agents.rules.agents import AgentTable
from storage_server.cache.dram import DramTier
from storage_server.delivery.downlinks import Downlinks
from storage_server.delivery.gather.staging import StagingPool
from storage_server.delivery.link import Link
from storage_server.delivery.transport.ucx_process import UcxProcess
from storage_server.home.embedded import EmbeddedStore
from storage_server.home.upstream import UpstreamHome
from storage_server.home.write_back import WriteBackStatus


def link_readings(link: Link) -> Iterator[Reading]:
    """The link's deliveries and backlog."""
    status: SchedulerStatus = link.status()
    yield metrics.LINK_RATE, _one(status.link_bytes_per_s or 0.0)
    yield metrics.LINK_QUEUED, _one(status.queued_bytes)
    layerwise, chunkwise = (Mode.LAYER_MAJOR.value,), (Mode.CHUNK_MAJOR.value,)
    yield metrics.FLOWS_ACTIVE, {layerwise: status.layerwise_active, chunkwise: status.chunkwise_active}
    yield metrics.FLOWS_WAITING, {layerwise: status.layerwise_waiting, chunkwise: status.chunkwise_waiting}
    yield metrics.EPOCHS, _one(status.epoch)


def memory_readings(dram: DramTier, staging: StagingPool) -> Iterator[Reading]:
    """The memory of the DRAM tier and of the staging pool."""
    yield metrics.STAGING_USED, _one((staging.slot_count - staging.free_count) * staging.slot_bytes)
    yield metrics.STAGING_SIZE, _one(staging.slot_count * staging.slot_bytes)
    yield metrics.DRAM_SIZE, _one(dram.nbytes)
    yield metrics.DRAM_RESIDENT, _one(dram.residency.used_bytes)
    yield metrics.DRAM_EXTENTS, _one(dram.residency.resident_count)
    yield metrics.DRAM_HITS, _one(dram.residency.hit_count)
    yield metrics.DRAM_MISSES, _one(dram.residency.missed_count)
    yield metrics.DRAM_EVICTED, _one(dram.residency.evicted_count)
    yield metrics.DRAM_FORMS, {(codec,): float(count) for codec, count in dram.residency.form_counts.items()}
    yield metrics.DRAM_ENCODED, _one(dram.keeper.encoded_bytes)
    yield metrics.DRAM_ENCODING, _one(dram.keeper.encoding_s)


def store_readings(store: EmbeddedStore) -> Iterator[Reading]:
    """The store's free space, files, commits, compaction, deduplication and damage. Raises OSError where the disk does
    not answer.
    """
    found = os.statvfs(store.settings.data_dir)
    yield metrics.STORE_FREE, _one(found.f_bavail * found.f_frsize)
    store.space.measure()
    yield metrics.STORE_USED, _one(store.space.used_bytes)
    yield metrics.STORE_BOUND, _one(store.space.bound_bytes or 0)
    yield metrics.STORE_EVICTED, _one(store.evictor.evictions.evicted_count)
    yield metrics.STORE_EVICTED_BYTES, _one(store.evictor.evictions.evicted_bytes)
    replacer = store.replacer
    yield metrics.STORE_REPLACED, _one(0 if replacer is None else replacer.replaced_count)
    yield metrics.STORE_REPLACED_BYTES, _one(0 if replacer is None else replacer.freed_bytes)
    yield metrics.STORE_REPLACING, _one(0 if replacer is None else replacer.encoding_s)
    yield metrics.STORE_UNHELD, _one(store.evictor.caches.refused_count)
    yield metrics.STORE_OPEN_FILES, _one(store.files.open.count)
    yield metrics.STORE_PINNED_FILES, _one(store.files.pinned_count)
    yield metrics.STORE_COMMITS, _one(store.committer.transaction_count)
    yield metrics.STORE_CHANGES, _one(store.committer.change_count)
    yield metrics.STORE_COMPACTED, _one(store.compactor.rewritten_bytes)
    yield metrics.STORE_NAMED, _one(store.deduplicator.stored.named_bytes)
    yield metrics.STORE_STORED, _one(store.deduplicator.stored.stored_bytes)
    yield metrics.STORE_SHARED, _one(store.deduplicator.shared_bytes)
    yield metrics.STORE_DAMAGED, _one(store.objects.damaged.count)


def cache_readings(caches: Sequence[CacheStatus]) -> Iterator[Reading]:
    """The buckets that are caches. In front of another service all of them are one, with an empty name."""

    def each(value: Callable[[CacheStatus], float]) -> dict[tuple[str, ...], float]:
        return {(cache.bucket,): float(value(cache)) for cache in caches}

    yield metrics.CACHE_USED, each(lambda cache: cache.used_bytes)
    yield metrics.CACHE_BOUND, each(lambda cache: cache.capacity_bytes or 0)
    yield metrics.CACHE_OBJECTS, each(lambda cache: cache.object_count)
    yield metrics.CACHE_READ, each(lambda cache: cache.read_bytes)
    yield metrics.CACHE_EVICTED, each(lambda cache: cache.evicted_count)
    yield metrics.CACHE_EVICTED_BYTES, each(lambda cache: cache.evicted_bytes)
    left = [cache for cache in caches if cache.eviction_age_s is not None]
    yield metrics.CACHE_AGE, {(cache.bucket,): cache.eviction_age_s or 0.0 for cache in left}


def upstream_readings(home: UpstreamHome | None) -> Iterator[Reading]:
    """The way to the service upstream. `home` is None without one."""
    yield metrics.UPSTREAM_FETCHING, _one(0 if home is None else home.fetches.running_count)
    yield metrics.UPSTREAM_LANDED, _one(0 if home is None else home.fetches.landed_bytes)
    yield metrics.UPSTREAM_FETCHED, _one(0 if home is None else home.fetches.fetched_bytes)
    yield metrics.UPSTREAM_PASSED, _one(0 if home is None else home.fetches.passed_bytes)
    yield metrics.UPSTREAM_STALE, _one(0 if home is None else home.revalidation.stale_count)
    yield metrics.UPSTREAM_FAILED, _one(0 if home is None else home.failed_count)
    yield metrics.UPSTREAM_UNREAD, _one(0 if home is None else home.service.unread_count)
    yield metrics.UPSTREAM_BAD_RECORDS, _one(0 if home is None else home.service.bad_record_count)
    remote = None if home is None else home.remote
    yield metrics.REMOTE_JOINED, _one(int(remote is not None and remote.store.is_joined))
    yield metrics.REMOTE_HITS, _one(0 if remote is None else remote.hit_count)
    yield metrics.REMOTE_MISSES, _one(0 if remote is None else remote.miss_count)
    yield metrics.REMOTE_READ, _one(0 if remote is None else remote.read_bytes)
    yield metrics.REMOTE_ADMITTED, _one(0 if remote is None else remote.admitted_bytes)
    yield metrics.REMOTE_FAILED, _one(0 if remote is None else remote.store.failed_count)
    former = None if home is None else home.former
    yield metrics.FORMER_HITS, _one(0 if former is None else former.hit_count)
    yield metrics.FORMER_MISSES, _one(0 if former is None else former.miss_count)
    yield metrics.FORMER_READ, _one(0 if former is None else former.read_bytes)
    dirty = WriteBackStatus() if home is None else home.write_back.status
    yield metrics.UPSTREAM_DIRTY, _one(dirty.dirty_chunks)
    yield metrics.UPSTREAM_DIRTY_BYTES, _one(dirty.dirty_bytes)
    yield metrics.UPSTREAM_DIRTY_AGE, _one(dirty.oldest_s)
    yield metrics.UPSTREAM_REFUSED, _one(dirty.refused_chunks)


def agent_readings(agents: AgentTable, requests: RequestTable, engine: UcxProcess | None) -> Iterator[Reading]:
    """The agents, their running requests and the UCX process. `engine` is None where ucx is off."""
    yield metrics.DELIVERIES_ACTIVE, _one(requests.active_count)
    yield metrics.AGENTS, _one(len(agents))
    yield metrics.AGENT_REGIONS, _one(agents.region_count)
    yield metrics.UCX_IN_FLIGHT, _one(0 if engine is None else engine.in_flight_count)
    yield metrics.UCX_STARTS, _one(0 if engine is None else engine.child.start_count)


def downlink_readings(downlinks: Downlinks) -> Iterator[Reading]:
    """The shares of clients' downlinks."""
    yield metrics.DOWNLINK_ASKED, _one(downlinks.asked_count)
    yield metrics.DOWNLINK_FAILED, _one(downlinks.failed_count)


def _one(value: float) -> dict[tuple[str, ...], float]:
    """The sample of a metric without labels."""
    return {(): value}
