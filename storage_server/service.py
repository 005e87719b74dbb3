"""EmbeddedStorage: the StorageApi on one machine. Store, agents, requests and pipeline come together here."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from adapters.nixl_agent import Memory, NixlFailure
from adapters.nixl_metadata import agent_name
from descriptors.conditions import NO_WRITE_CONDITION, WriteCondition
from descriptors.descriptor import Descriptor, require_request_id
from descriptors.errors import CallerError, ErrorCode
from descriptors.lifecycle import LifecycleRule
from descriptors.messages import AgentLease, AgentRegistration, AgentRenewal, LookupRequest, Region
from descriptors.objects import (
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
from descriptors.storage_api import Body, BodySink, DeliveryOutcome, ObjectRead
from storage_server.agents import AgentTable, RegisteredAgent, target_region
from storage_server.gather.plan import DeliveryPlan
from storage_server.gather.staging import StagingPool
from storage_server.leases import LeaseTable
from storage_server.lifecycle import sweep_lifecycle
from storage_server.pipeline import MakeTransfer, Pipeline
from storage_server.requests import ActiveRequest, RequestTable
from storage_server.settings import StorageSettings
from storage_server.store.disk import Disk
from storage_server.store.embedded import EmbeddedStore
from storage_server.threads import to_end
from storage_server.transport.http import HttpTransfer
from storage_server.transport.metadata_probe import MetadataProbe
from storage_server.transport.ucx import UcxTransfer
from storage_server.transport.write_engine import WriteEngine

AGENT_SWEEP_INTERVAL_S = 1.0
_log = logging.getLogger(__name__)


class EmbeddedStorage:
    """Implements descriptors.storage_api.StorageApi. `start` before use, `close` after."""

    def __init__(self, settings: StorageSettings, disk: Disk | None = None) -> None:
        self.settings = settings
        self.store = EmbeddedStore(settings, disk)
        self.staging = StagingPool(settings.aggregation_bytes, settings.staging_bytes // settings.aggregation_bytes)
        self.pipeline = Pipeline(settings, self.store, self.staging)
        self.agents = AgentTable(settings.agents_max)
        self.requests = RequestTable(settings.request_ids_max)
        self.leases = LeaseTable()
        self.engine: WriteEngine | None = None
        self._probe = MetadataProbe()
        self._running: set[asyncio.Task[DeliveryOutcome]] = set()
        self._names = _NameLocks()
        self._sweepers: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Sweep the store, start UCX where it can run."""
        removed = await self.store.start()
        if removed:
            _log.info("removed %d files and rows that a crash left behind", removed)
        if self.settings.ucx:
            staging = Memory(self.staging.address, self.staging.nbytes)
            try:
                self.engine = await asyncio.to_thread(WriteEngine, staging)
                self._probe.start()
            except (ImportError, NixlFailure) as error:
                _log.warning("the ucx transport is off: %s", error)
        lifecycle = sweep_lifecycle(self.store, self.settings.lifecycle_interval_s, self.settings.lifecycle_day_s)
        self._sweepers = [asyncio.create_task(self._sweep_agents()), asyncio.create_task(lifecycle)]

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
        await self._probe.close()
        if self.engine is not None:
            await asyncio.to_thread(self.engine.stop)
        self.pipeline.close()
        self.store.close()

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

    async def lookup(self, bucket: str, request: LookupRequest) -> int:
        matched = await self.store.reads.matched(bucket, request.chunk_keys)
        if request.lease_s > 0:
            self.leases.grant(bucket, request.chunk_keys[:matched], time.monotonic(), request.lease_s)
        return matched

    async def register_agent(self, access_key: str, registration: AgentRegistration) -> AgentLease:
        """Known to this server, connection open, when it returns. What the name was registered as before is stopped
        and drained first.
        """
        engine = self._require_engine()
        peer = _peer_name(registration.metadata)
        async with self._names.locked(peer):
            self.agents.check_name(access_key, peer, time.time())
            holder = self.agents.holder(peer)
            if holder is not None:
                await self._forget(holder)
            await self._load_metadata(engine, peer, registration.metadata, registration.regions)
            return self.agents.add(access_key, peer, registration, time.time()).lease()

    async def renew_agent(self, access_key: str, agent_id: str, renewal: AgentRenewal) -> AgentLease:
        """Deliveries into memory that is no longer offered are stopped and drained first."""
        engine = self._require_engine()
        peer = self.agents.owned(access_key, agent_id, time.time(), "agent_id").peer
        async with self._names.locked(peer):
            agent = self.agents.owned(access_key, agent_id, time.time(), "agent_id")
            if renewal.metadata is not None:
                if _peer_name(renewal.metadata) != peer:
                    raise CallerError(ErrorCode.INVALID_ARGUMENT, "metadata is of another NIXL agent", field="metadata")
                active = self.requests.active_for_agent(agent_id)
                await _stop([request for request in active if request.region not in renewal.regions])
                await self._load_metadata(engine, peer, renewal.metadata, renewal.regions)
            return self.agents.renew(agent, renewal, time.time()).lease()

    async def delete_agent(self, access_key: str, agent_id: str) -> None:
        peer = self.agents.owned(access_key, agent_id, time.time(), "agent_id").peer
        async with self._names.locked(peer):
            await self._forget(self.agents.owned(access_key, agent_id, time.time(), "agent_id"))

    async def deliver(self, access_key: str, bucket: str, descriptor: Descriptor, sink: BodySink) -> DeliveryOutcome:
        """One descriptor GET; into the sink, or over UCX when it names a target.

        A cancelled request is answered with CallerError(RequestCancelled). When the caller goes away instead, the
        delivery stops at once and drains on its own.
        """
        make_transfer, region = self._route(access_key, descriptor, sink)
        request = self.requests.begin(access_key, descriptor.request_id, time.monotonic())
        if descriptor.rdma_target is not None:
            request.agent_id, request.region = descriptor.rdma_target.agent_id, region
        task = asyncio.create_task(self.pipeline.run(bucket, descriptor, request.request_id, make_transfer))
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

    async def cancel(self, access_key: str, request_id: str) -> None:
        await self.requests.cancel(access_key, require_request_id(request_id), time.monotonic())

    def _ended(self, request: ActiveRequest, task: asyncio.Task[DeliveryOutcome]) -> None:
        self._running.discard(task)
        self.requests.end(request)
        if not task.cancelled():
            task.exception()

    def _route(self, access_key: str, descriptor: Descriptor, sink: BodySink) -> tuple[MakeTransfer, Region | None]:
        """Which transport the descriptor asks for; its target is checked here, before anything is planned."""
        target = descriptor.rdma_target
        if target is None:
            return lambda _: HttpTransfer(sink, self.settings.stall_timeout_s), None
        engine = self._require_engine()
        agent = self.agents.owned(access_key, target.agent_id, time.time(), "rdma_target.agent_id")
        region = target_region(agent, target)

        def make_transfer(plan: DeliveryPlan) -> UcxTransfer:
            return UcxTransfer(
                engine,
                agent.peer,
                region,
                target,
                plan,
                self.settings.stall_timeout_s,
                lambda: self.agents.expire(agent.agent_id),
            )

        return make_transfer, region

    async def _load_metadata(self, engine: WriteEngine, peer: str, metadata: bytes, regions: Sequence[Region]) -> None:
        """Make the peer known to the engine. Raises CallerError(InvalidArgument) when that cannot be done."""
        offered = [Memory(region.address, region.length, region.device) for region in regions]
        try:
            await self._probe.check(metadata, offered)
            await to_end(asyncio.wrap_future(engine.add_peer(peer, metadata, offered)))
        except NixlFailure as failure:
            raise CallerError(
                ErrorCode.INVALID_ARGUMENT, f"metadata cannot be used for these regions: {failure}", field="metadata"
            ) from failure

    def _require_engine(self) -> WriteEngine:
        if self.engine is None:
            raise CallerError(
                ErrorCode.NOT_IMPLEMENTED,
                "this storage server has no ucx transport; ask for the body instead",
                field="rdma_target",
            )
        return self.engine

    async def _forget(self, agent: RegisteredAgent) -> None:
        """Refuse new deliveries to the agent, stop and drain those under way, disconnect."""
        self.agents.remove(agent.agent_id)
        await _stop(self.requests.active_for_agent(agent.agent_id))
        if self.engine is not None:
            await to_end(asyncio.wrap_future(self.engine.remove_peer(agent.peer)))

    async def _sweep_agents(self) -> None:
        """Forget expired agents, each on its own: one that takes long to drain holds nobody up."""
        sweeps: dict[str, asyncio.Task[None]] = {}
        try:
            while True:
                await asyncio.sleep(AGENT_SWEEP_INTERVAL_S)
                sweeps = {agent_id: task for agent_id, task in sweeps.items() if not task.done()}
                for agent in self.agents.expired(time.time()):
                    if agent.agent_id not in sweeps:
                        sweeps[agent.agent_id] = asyncio.create_task(self._forget_expired(agent))
        finally:
            for task in sweeps.values():
                task.cancel()

    async def _forget_expired(self, agent: RegisteredAgent) -> None:
        async with self._names.locked(agent.peer):
            if agent in self.agents.expired(time.time()):
                await self._forget(agent)


class _NameLocks:
    """A lock per NIXL name, kept while somebody holds or awaits it."""

    def __init__(self) -> None:
        self._locks: dict[str, tuple[asyncio.Lock, int]] = {}

    @asynccontextmanager
    async def locked(self, name: str) -> AsyncIterator[None]:
        lock, users = self._locks.get(name, (asyncio.Lock(), 0))
        self._locks[name] = (lock, users + 1)
        try:
            async with lock:
                yield
        finally:
            users = self._locks[name][1] - 1
            if users:
                self._locks[name] = (lock, users)
            else:
                del self._locks[name]


async def _stop(active: Sequence[ActiveRequest]) -> None:
    """Cancel deliveries and wait until none of their writes is in flight."""
    for request in active:
        request.cancel()
    for request in active:
        await request.drained.wait()


def _peer_name(metadata: bytes) -> str:
    try:
        return agent_name(metadata)
    except ValueError as error:
        raise CallerError(ErrorCode.INVALID_ARGUMENT, f"metadata: {error}", field="metadata") from None
