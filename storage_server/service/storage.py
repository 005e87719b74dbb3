"""EmbeddedStorage: the StorageApi on one machine. It joins store, transports, agents and pipeline."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from functools import partial
from itertools import chain
from typing import Protocol

from descriptors.errors import ObjectCacheError
from descriptors.messages import SchedulerStatus, Transports
from descriptors.status import StorageStatus
from descriptors.storage_api import ObjectsApi, UploadsApi
from descriptors.version import __version__
from objectcache.adapters.memory_area import Area, PrivateArea
from objectcache.adapters.metrics import text_of
from storage_server.agents.request_id_log import RequestIdLog
from storage_server.agents.requests import REMEMBER_S, RequestTable
from storage_server.agents.rules.agents import AgentTable
from storage_server.cache.dram import DramTier
from storage_server.cache.encoding_keeper import EncodingKeeper
from storage_server.cache.exact_keeper import ExactKeeper
from storage_server.cache.policies.threshold import told
from storage_server.delivery.downlinks import DownlinkKeepers, Downlinks
from storage_server.delivery.gather.staging import StagingPool
from storage_server.delivery.pipeline import Pipeline
from storage_server.delivery.registrar import Registrar
from storage_server.delivery.transport.destination import Destination
from storage_server.delivery.transport.shm_agents import ShmAgents
from storage_server.delivery.transport.ucx_agents import UcxAgents
from storage_server.home.claim import claim
from storage_server.home.directory.store import SharedDirectory
from storage_server.home.embedded import EmbeddedStore
from storage_server.home.former_keepers import PeerCopies
from storage_server.home.own_keys import OwnKeys
from storage_server.home.s3.s3_service import S3Service
from storage_server.home.service import Service
from storage_server.home.upstream import UpstreamHome
from storage_server.kernel.data.disk import Disk
from storage_server.moves.object_transfers import ObjectTransfers
from storage_server.planning.source import ChunkSource
from storage_server.service.metrics import (
    agent_readings,
    cache_readings,
    downlink_readings,
    link_readings,
    memory_readings,
    store_readings,
    upstream_readings,
)
from storage_server.service.prefixes import Prefixes
from storage_server.settings import ColdReads, StorageSettings, Write

_log = logging.getLogger(__name__)
WrapSource = Callable[[ChunkSource], ChunkSource]
WrapDestination = Callable[[Destination], Destination]


def unwrapped_source(source: ChunkSource) -> ChunkSource:
    """The source unchanged: the store's own ChunkSource."""
    return source


def unwrapped_destination(destination: Destination) -> Destination:
    """The destination unchanged, as the transport made it."""
    return destination


class Peers(PeerCopies, DownlinkKeepers, Protocol):
    """The other members of a cluster, as this server calls them."""


class EmbeddedStorage:
    """Implements descriptors.storage_api.StorageApi. `start` before use, `close` after.

    Three parts can be replaced, to measure them or to make them slow or faulty: the `disk` beneath the store; the
    ChunkSource, which is `wrap_source` of the store's own; and the Destination of each delivery, which is
    `wrap_destination` of the one that its transport made.
    """

    def __init__(
        self,
        settings: StorageSettings,
        disk: Disk | None = None,
        wrap_source: WrapSource = unwrapped_source,
        wrap_destination: WrapDestination = unwrapped_destination,
        own: OwnKeys | None = None,
        peers: Peers | None = None,
    ) -> None:
        """In a cluster `own` says which keys this server is the keeper of, and `peers` are the other members. Raises
        ValueError without an upstream service, which all members share.
        """
        if own is not None and settings.upstream is None:
            raise ValueError("a cluster needs an upstream service, in front of which all its members stand")
        if own is not None and settings.upstream is not None and settings.upstream.write is Write.BACK:
            raise ValueError("a cluster writes through: what is dirty here, the other members would not know")
        self.settings = settings
        self.own = own
        claim(settings.data_dir, settings.upstream)
        self.store = EmbeddedStore(settings, disk)
        self.upstream = _home_before(settings, self.store, own, peers)
        home = self.upstream or self.store
        self.objects: ObjectsApi = home.objects
        self.uploads: UploadsApi = home.uploads
        slot_count = settings.staging_bytes // settings.aggregation_bytes
        self.staging = StagingPool(settings.aggregation_bytes, slot_count)
        self._id_log = RequestIdLog(settings.data_dir, REMEMBER_S)
        self.requests = RequestTable(
            lambda fingerprint: self._id_log.append(fingerprint, time.time(), time.monotonic())
        )
        self.agents = Registrar(AgentTable(settings.agents_max), self.requests, takes_ids=own is not None)
        self.ucx = UcxAgents(settings, self.agents.peer_lost) if settings.ucx else None
        self.shm: ShmAgents | None = None
        source = wrap_source(home.chunks)
        make_area = self.ucx.memory.dram_area if self.ucx is not None and settings.ucx_maps_dram else PrivateArea
        self.dram = _tier_of(settings, source, make_area)
        self.downlinks = Downlinks(self.agents.shares, own, peers)
        self.pipeline = Pipeline(settings, source, self.dram, self.downlinks, self.store.slow_readers)
        self._transfers = ObjectTransfers(
            settings,
            self.store,
            None if self.ucx is None or self.upstream is not None else self.ucx.memory,
            self.agents,
            self.requests,
        )
        self.prefixes = Prefixes(
            settings=settings,
            source=source,
            pipeline=self.pipeline,
            staging=self.staging,
            registrar=self.agents,
            requests=self.requests,
            transfers=self._transfers,
            wrap_destination=wrap_destination,
        )
        self._started_s = time.monotonic()
        self._sweepers: list[asyncio.Task[None]] = []

    @property
    def status(self) -> EmbeddedStorage:
        """The StatusApi."""
        return self

    @property
    def object_requests_active_count(self) -> int:
        """Requests under way that move objects past HTTP."""
        return self._transfers.active_count

    async def start(self) -> None:
        """Sweep the store and start the transports. Raises NixlFailure, UnknownInterfaceError where ucx was asked for
        and cannot run.
        """
        removed = await self.store.start()
        if removed:
            _log.warning("%d files and rows that a crash left behind are removed, or set aside", removed)
        unix_s, now_s = time.time(), time.monotonic()
        secret, used = self._id_log.load(unix_s, now_s)
        self.requests.restore(secret, ((each, now_s - max(0.0, unix_s - used_at_s)) for each, used_at_s in used))
        if self.upstream is not None:
            await self.upstream.start()
        if self.ucx is not None:
            await self.ucx.start()
        if self.settings.shm:
            shm = ShmAgents(self.settings.direct_payload_bytes, self.agents.client_gone, self.settings.shm_users)
            self.shm = shm if shm.start() else None
        self.agents.start(self.ucx, self.shm)
        lifecycle = self.store.lifecycle.run(self.settings.lifecycle_interval_s, self.settings.lifecycle_day_s)
        dedup = self.store.deduplicator.run(self.settings.dedup_bytes_per_s)
        works = (self.agents.sweep(), lifecycle, self.store.evictor.run(), dedup)
        self._sweepers = [asyncio.create_task(work) for work in works]
        if self.settings.compact_interval_s > 0:
            compaction = self.store.compactor.run(self.settings.compact_interval_s, self.settings.compact_bytes_per_s)
            self._sweepers.append(asyncio.create_task(compaction))

    async def join(self, endpoint: str) -> None:
        """Be a member of the cluster, whom gateways reach at `endpoint`: call it when that is so. Raises
        MembershipError.
        """
        if self.own is not None and self.upstream is not None:
            await self.own.start(self.upstream.revalidation.compare_all, endpoint)

    async def close(self) -> None:
        """Stop deliveries, let their writes drain, close everything."""
        for sweeper in self._sweepers:
            sweeper.cancel()
        if self._sweepers:
            await asyncio.wait(self._sweepers)
        await self.requests.close(self.settings.stall_timeout_s)
        self._transfers.close()
        await self.downlinks.close()
        if self.ucx is not None:
            await self.ucx.close()
        self.pipeline.close()
        if self.shm is not None:
            await self.shm.close()
        await self.dram.close()
        self._id_log.close()
        if self.own is not None:
            await self.own.close()
        if self.upstream is not None:
            await self.upstream.close()
        try:
            await self.store.evictor.written.save()
        except ObjectCacheError as error:
            _log.warning("the last uses of cached objects are not written down: %s", error)
        self.store.close()

    async def transports(self, access_key: str) -> Transports:
        """The transports that run now, and what they need of a client."""
        has_ucx = self.ucx is not None and self.ucx.is_running
        return Transports(has_ucx, None if self.shm is None else self.shm.door.address)

    async def scheduler(self, access_key: str) -> SchedulerStatus:
        """The settings of the scheduler, and the deliveries under way."""
        return self.pipeline.link.status()

    async def servers(self, access_key: str) -> list[StorageStatus]:
        """This one."""
        meter, dram, space = self.pipeline.meter, self.dram, self.store.space
        free_bytes = self.store.disk.free_bytes(self.settings.data_dir)
        status = StorageStatus(
            name="",
            version=__version__,
            uptime_s=time.monotonic() - self._started_s,
            upstream="" if self.settings.upstream is None else self.settings.upstream.endpoint,
            used_bytes=space.used_bytes,
            bound_bytes=space.bound_bytes,
            free_bytes=free_bytes,
            dram_bytes=dram.nbytes,
            dram_used_bytes=dram.residency.used_bytes,
            dram_hit_count=dram.residency.hit_count,
            dram_missed_count=dram.residency.missed_count,
            lookup_count=meter.lookup_count,
            asked_chunk_count=meter.asked_chunk_count,
            matched_chunk_count=meter.matched_chunk_count,
            has_shm=self.shm is not None,
            has_ucx=self.ucx is not None and self.ucx.is_running,
            scheduler=self.pipeline.link.status(),
            compression=told(self.settings.compression),
            sent_bytes={transport: int(nbytes) for (transport,), nbytes in meter.payload_bytes.samples.items()},
            caches=tuple(self.store.evictor.caches.status()),
            deliveries=self.pipeline.deliveries.status(time.monotonic()),
        )
        return [status]

    async def metrics(self, access_key: str) -> str:
        """The metrics, read now, in Prometheus' text format."""
        engine = None if self.ucx is None else self.ucx.engine
        readings = chain(
            self.pipeline.meter.readings(),
            link_readings(self.pipeline.link),
            memory_readings(self.dram, self.staging),
            store_readings(self.store),
            cache_readings(self.store.evictor.caches.status()),
            upstream_readings(self.upstream),
            agent_readings(self.agents.table, self.requests, engine),
            downlink_readings(self.downlinks),
        )
        return text_of(readings).decode()


def _tier_of(settings: StorageSettings, source: ChunkSource, make_area: Callable[[int], Area]) -> DramTier:
    """Where chunks are encoded no landings are taken: a chunk may come in another form than it is read in."""
    if settings.compression is not None:
        keep = partial(EncodingKeeper, settings=settings.compression, eviction=settings.eviction)
        return DramTier(settings.dram_bytes, source, keep, make_area)
    takes_landings = settings.cold_reads is ColdReads.DIRECT
    exact = partial(ExactKeeper, eviction=settings.eviction)
    return DramTier(settings.dram_bytes, source, exact, make_area, takes_landings=takes_landings)


def _home_before(
    settings: StorageSettings, store: EmbeddedStore, own: OwnKeys | None, copies: PeerCopies | None
) -> UpstreamHome | None:
    """The home of which the store is a cache; None where the store is the home itself."""
    upstream = settings.upstream
    if upstream is None:
        return None
    service: Service
    if upstream.directory is None:
        service = S3Service(upstream, settings.object_bytes_max)
    else:
        local = settings.data_dir / "shared"
        store.space.count_too(local)
        service = SharedDirectory(upstream, settings, local)
    return UpstreamHome(upstream, service, store, own, copies)
