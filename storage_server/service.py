"""EmbeddedStorage: the StorageApi on one machine. Store, agents, requests and pipeline come together here."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from contextlib import AbstractAsyncContextManager

from adapters.interfaces import ucx_devices
from descriptors.conditions import NO_WRITE_CONDITION, WriteCondition
from descriptors.descriptor import Descriptor, require_request_id
from descriptors.errors import CallerError, ErrorCode
from descriptors.lifecycle import LifecycleRule
from descriptors.messages import (
    AgentLease,
    AgentRegistration,
    AgentRenewal,
    LookupAnswer,
    LookupRequest,
    Region,
    SchedulerStatus,
    Transports,
)
from descriptors.objects import (
    BodyDigests,
    BucketInfo,
    CompleteRequest,
    CopyRequest,
    ListPage,
    ListRequest,
    ObjectInfo,
    ObjectPart,
    PartCopyRequest,
    PartInfo,
    PartPage,
    PartRequest,
    PutRequest,
    ReadHead,
    ReadRequest,
    UploadListRequest,
    UploadPage,
    UploadRef,
    UploadRequest,
)
from descriptors.rdma_token import RdmaToken
from descriptors.recompute import advise
from descriptors.storage_api import (
    Body,
    BodySink,
    ChunksPut,
    DeliveryOutcome,
    ObjectDelivery,
    ObjectRead,
    ObjectStored,
    Patience,
)
from storage_server.agents import AgentTable, target_region
from storage_server.gather.plan import DeliveryPlan
from storage_server.gather.staging import StagingPool
from storage_server.lifecycle import sweep_lifecycle
from storage_server.memory_area import PrivateArea
from storage_server.object_transfers import ObjectTransfers
from storage_server.pipeline import Pipeline
from storage_server.registrar import Registrar, require_engine
from storage_server.request_id_log import RequestIdLog, UsedId
from storage_server.requests import REMEMBER_S, ActiveRequest, RequestTable
from storage_server.settings import StorageSettings
from storage_server.store.disk import Disk
from storage_server.store.embedded import EmbeddedStore
from storage_server.tiers.dram import DramTier
from storage_server.transport.http import HttpTransfer
from storage_server.transport.metadata_probe import MetadataProbe
from storage_server.transport.shm import ShmTransfer
from storage_server.transport.shm_door import ShmDoor
from storage_server.transport.transfer import Route
from storage_server.transport.ucx import UcxTransfer
from storage_server.transport.ucx_memory import UcxMemory
from storage_server.transport.ucx_process import UcxProcess, child_environment

_log = logging.getLogger(__name__)


class EmbeddedStorage:
    """Implements descriptors.storage_api.StorageApi. `start` before use, `close` after."""

    def __init__(self, settings: StorageSettings, disk: Disk | None = None) -> None:
        self.settings = settings
        self.store = EmbeddedStore(settings, disk)
        slot_count = settings.staging_bytes // settings.aggregation_bytes
        self.staging = StagingPool(settings.aggregation_bytes, slot_count)
        self._ucx = UcxMemory(settings) if settings.ucx else None
        make_area = self._ucx.dram_area if self._ucx is not None and settings.ucx_maps_dram else PrivateArea
        self.dram = DramTier(settings.dram_bytes, self.store.files, make_area)
        self.pipeline = Pipeline(settings, self.store, self.dram)
        self.agents = AgentTable(settings.agents_max)
        self._id_log = RequestIdLog(settings.data_dir, REMEMBER_S)
        self.requests = RequestTable(
            settings.request_ids_max,
            lambda access_key, request_id: self._id_log.append(UsedId(access_key, request_id, time.time())),
        )
        self.registrar = Registrar(self.agents, self.requests)
        self._objects = ObjectTransfers(
            settings,
            self.store,
            self.staging if self._ucx is None else self._ucx.staging,
            None if self._ucx is None else self._ucx.whole,
            self.agents,
            self.requests,
            lambda: self.registrar.engine,
        )
        self._running: set[asyncio.Task[DeliveryOutcome]] = set()
        self._sweepers: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Sweep the store, start the transports that can run."""
        removed = await self.store.start()
        if removed:
            _log.warning("%d files and rows that a crash left behind are removed, or set aside", removed)
        unix_s, now_s = time.time(), time.monotonic()
        for used in sorted(self._id_log.load(unix_s), key=lambda used: used.unix_s):
            self.requests.restore(used.access_key, used.request_id, now_s - max(0.0, unix_s - used.unix_s))
        await self._start_ucx()
        lifecycle = sweep_lifecycle(self.store, self.settings.lifecycle_interval_s, self.settings.lifecycle_day_s)
        self._sweepers = [asyncio.create_task(self.registrar.sweep()), asyncio.create_task(lifecycle)]
        if self.settings.compact_interval_s > 0:
            compaction = self.store.compactor.run(self.settings.compact_interval_s, self.settings.compact_bytes_per_s)
            self._sweepers.append(asyncio.create_task(compaction))

    async def close(self) -> None:
        """Stop deliveries, let their writes drain, close everything."""
        for sweeper in self._sweepers:
            sweeper.cancel()
        if self._sweepers:
            await asyncio.wait(self._sweepers)
        for task in list(self._running):
            task.cancel()
        if self._running:
            await asyncio.wait(self._running, timeout=self.settings.stall_timeout_s)
        await self._objects.close()
        await self.registrar.close()
        if self.registrar.engine is not None:
            await self.registrar.engine.stop()
        if self._ucx is not None:
            self._ucx.close()
        self.pipeline.close()
        if self.registrar.door is not None:
            await self.registrar.door.close()
        await self.dram.close()
        self._id_log.close()
        self.store.close()

    async def _start_ucx(self) -> None:
        """Raises NixlFailure, UnknownInterfaceError where the ucx transport was asked for and cannot run."""
        engine, probe = None, None
        if self._ucx is not None:
            devices = ucx_devices(self.settings.ucx)
            engine = UcxProcess(self._ucx.areas, devices, self.registrar.engine_gone)
            await engine.start()
            probe = MetadataProbe(child_environment(os.environ, devices))
        self.registrar.maps_dram = self.settings.ucx_maps_dram
        self.registrar.start(engine, probe, self._start_shm())

    def _start_shm(self) -> ShmDoor | None:
        if not self.settings.shm:
            return None
        door = ShmDoor(self.registrar.client_gone)
        try:
            door.start()
        except OSError as error:
            _log.warning("the shm transport is off: %s (it needs userfaultfd; containers must be given it)", error)
            return None
        return door

    async def create_bucket(self, access_key: str, bucket: str) -> None:
        await self.store.create_bucket(access_key, bucket)

    async def head_bucket(self, bucket: str) -> BucketInfo:
        return await self.store.reads.head_bucket(bucket)

    async def list_buckets(self) -> list[BucketInfo]:
        return await self.store.reads.list_buckets()

    async def delete_bucket(self, bucket: str) -> None:
        await self.store.delete_bucket(bucket)

    async def get_lifecycle(self, bucket: str) -> list[LifecycleRule]:
        return await self.store.reads.get_lifecycle(bucket)

    async def set_lifecycle(self, bucket: str, rules: list[LifecycleRule]) -> None:
        await self.store.set_lifecycle(bucket, rules)

    async def put_object(self, request: PutRequest, body: Body) -> ObjectInfo:
        return await self.store.put_object(request, body)

    async def head_object(self, request: ReadRequest) -> ReadHead:
        return await self.store.reads.head_object(request)

    def open_object(self, request: ReadRequest) -> AbstractAsyncContextManager[ObjectRead]:
        return self.store.reads.open_object(request)

    async def object_parts(self, bucket: str, key: str) -> list[ObjectPart]:
        return await self.store.reads.object_parts(bucket, key)

    async def copy_object(self, request: CopyRequest) -> ObjectInfo:
        return await self.store.copy_object(request)

    async def delete_object(self, bucket: str, key: str, condition: WriteCondition = NO_WRITE_CONDITION) -> None:
        await self.store.delete_object(bucket, key, condition)

    async def delete_objects(self, bucket: str, keys: list[str]) -> None:
        await self.store.delete_objects(bucket, keys)

    async def set_tags(self, bucket: str, key: str, tags: dict[str, str]) -> None:
        await self.store.set_tags(bucket, key, tags)

    async def list_objects(self, request: ListRequest) -> ListPage:
        return await self.store.reads.list_objects(request)

    async def create_upload(self, request: UploadRequest) -> str:
        return await self.store.uploads.create_upload(request)

    async def put_part(self, request: PartRequest, body: Body) -> PartInfo:
        return await self.store.uploads.put_part(request, body)

    async def copy_part(self, request: PartCopyRequest) -> PartInfo:
        return await self.store.uploads.copy_part(request)

    async def complete_upload(self, request: CompleteRequest) -> ObjectInfo:
        return await self.store.uploads.complete_upload(request)

    async def abort_upload(self, upload: UploadRef) -> None:
        await self.store.uploads.abort_upload(upload)

    async def list_parts(self, upload: UploadRef, part_number_marker: int, max_parts: int) -> PartPage:
        return await self.store.uploads.list_parts(upload, part_number_marker, max_parts)

    async def list_uploads(self, request: UploadListRequest) -> UploadPage:
        return await self.store.uploads.list_uploads(request)

    async def lookup(self, access_key: str, bucket: str, request: LookupRequest) -> LookupAnswer:
        matched = await self.store.reads.matched(bucket, request.chunk_keys)
        if request.compute is None:
            return LookupAnswer(matched)
        offered = self.pipeline.link.offered_rate_bytes_per_s(access_key)
        return LookupAnswer(matched, advise(matched, request.compute, offered))

    async def scheduler(self) -> SchedulerStatus:
        return self.pipeline.link.status()

    async def transports(self) -> Transports:
        door = self.registrar.door
        engine = self.registrar.engine
        return Transports(engine is not None and engine.is_running, None if door is None else door.address)

    async def register_agent(self, access_key: str, registration: AgentRegistration) -> AgentLease:
        return await self.registrar.register(access_key, registration)

    async def renew_agent(self, access_key: str, agent_id: str, renewal: AgentRenewal) -> AgentLease:
        return await self.registrar.renew(access_key, agent_id, renewal)

    async def delete_agent(self, access_key: str, agent_id: str) -> None:
        await self.registrar.delete(access_key, agent_id)

    async def deliver(self, access_key: str, bucket: str, descriptor: Descriptor, sink: BodySink) -> DeliveryOutcome:
        """One descriptor GET; into the sink, or over UCX when it names a target.

        A cancelled request is answered with CallerError(RequestCancelled). When the caller goes away instead, the
        delivery stops at once and drains on its own.
        """
        route, region = self._route(access_key, descriptor, sink)
        request = self.requests.begin(access_key, descriptor.request_id, time.monotonic())
        if descriptor.rdma_target is not None:
            request.agent_id, request.region = descriptor.rdma_target.agent_id, region
        task = asyncio.create_task(self.pipeline.run(access_key, bucket, descriptor, request.request_id, route))
        request.task = task
        self._running.add(task)
        task.add_done_callback(lambda _: self._ended(request, task))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if request.cancelled_by_caller:
                raise CallerError(ErrorCode.CANCELLED, "the request was cancelled", field="request_id") from None
            task.cancel()
            raise

    async def get_object_into(self, access_key: str, request: ReadRequest, token: RdmaToken) -> ObjectDelivery:
        return await self._objects.get_into(access_key, request, token)

    async def put_object_from(
        self, access_key: str, request: PutRequest, token: RdmaToken, said: BodyDigests
    ) -> ObjectStored:
        return await self._objects.put_from(access_key, request, token, said)

    async def put_chunks_from(self, access_key: str, bucket: str, descriptor: Descriptor) -> ChunksPut:
        return await self._objects.put_chunks(access_key, bucket, descriptor)

    async def cancel(self, access_key: str, request_id: str) -> None:
        await self.requests.cancel(access_key, require_request_id(request_id), time.monotonic())

    def _ended(self, request: ActiveRequest, task: asyncio.Task[DeliveryOutcome]) -> None:
        self._running.discard(task)
        self.requests.end(request)
        if not task.cancelled():
            task.exception()

    def _route(self, access_key: str, descriptor: Descriptor, sink: BodySink) -> tuple[Route, Region | None]:
        """Which transport the descriptor asks for; its target is checked here, before anything is planned."""
        settings = self.settings
        target = descriptor.rdma_target
        window_slots = settings.window_bytes // settings.aggregation_bytes
        if target is None:
            window = self.staging.window(access_key, window_slots)
            http = HttpTransfer(sink, window, Patience(settings.stall_timeout_s, settings.least_bytes_per_s))
            return Route(lambda _: http, settings.aggregation_bytes, settings.direct_payload_bytes), None
        agent = self.agents.owned(access_key, target.agent_id, time.monotonic(), "rdma_target.agent_id")
        region = target_region(agent, target)
        if agent.is_shm:
            client = self.registrar.shm_client(agent)
            address = client.regions[region.region_id].address + target.offset
            direct = settings.direct_payload_bytes
            route = Route(
                lambda plan: ShmTransfer(client, address, plan), direct, direct, past_cache=True, stages=False
            )
            return route, region
        engine = require_engine(self.registrar.engine)
        pool = self.staging if self._ucx is None else self._ucx.staging
        window = pool.window(access_key, window_slots)

        def make_transfer(plan: DeliveryPlan) -> UcxTransfer:
            return UcxTransfer(
                engine,
                agent.peer,
                region,
                target,
                plan,
                window,
                settings.stall_timeout_s,
                lambda: self.agents.expire(agent.agent_id),
                from_resident=agent.takes_pieces,
            )

        direct = settings.direct_payload_bytes if agent.takes_pieces else settings.aggregation_bytes
        route = Route(make_transfer, settings.aggregation_bytes, direct, stages_resident=not agent.takes_pieces)
        return route, region
