"""Objects into and out of registered memory of clients: S3RDMA Direct and Buffer, and puts of many chunks.

The same rules as for descriptors: agents and regions are the caller's own, a request id is used once and can be
cancelled, and a request is over only when nothing of it is in flight.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from descriptors.descriptor import Delivery, Descriptor, invalid
from descriptors.errors import CallerError, ErrorCode
from descriptors.messages import Region
from descriptors.notices import Mode
from descriptors.objects import BodyDigests, PutRequest, ReadRequest
from descriptors.rdma_token import TOKEN_HEADER, ObjectPath, RdmaToken, bad_token, declined
from descriptors.storage_api import ChunksPut, ObjectDelivery, ObjectStored
from storage_server.agents import AgentTable, RegisteredAgent, region_span, target_region
from storage_server.gather.staging import StagingPool
from storage_server.object_moves import ObjectMoves, OpenOneSided
from storage_server.requests import ActiveRequest, RequestTable
from storage_server.settings import StorageSettings
from storage_server.store.embedded import EmbeddedStore, check_size
from storage_server.transport.one_sided import OneSided
from storage_server.transport.ucx_process import UcxProcess

_MODES = {Delivery.LAYER_MAJOR: Mode.LAYER_MAJOR, Delivery.CHUNK_MAJOR: Mode.CHUNK_MAJOR}
_T = TypeVar("_T")


class ObjectTransfers:
    """Checks such requests, keeps them cancellable, and has `ObjectMoves` carry them out."""

    def __init__(
        self,
        settings: StorageSettings,
        store: EmbeddedStore,
        staging: StagingPool,
        whole: StagingPool | None,
        agents: AgentTable,
        requests: RequestTable,
        engine: Callable[[], UcxProcess | None],
    ) -> None:
        self._settings = settings
        self._store = store
        self._agents = agents
        self._requests = requests
        self._engine = engine
        self._moves = ObjectMoves(settings, store, staging, whole)
        self._running: set[asyncio.Task[Any]] = set()

    async def close(self) -> None:
        """Stop what runs and let it drain."""
        for task in list(self._running):
            task.cancel()
        if self._running:
            await asyncio.wait(self._running, timeout=self._settings.stall_timeout_s)
        self._moves.close()

    async def get_into(self, access_key: str, request: ReadRequest, token: RdmaToken) -> ObjectDelivery:
        """An object, or the range asked for, into the client's memory."""
        engine, agent, region = self._of_token(access_key, token)
        move = self._moves.get_direct
        if token.path is ObjectPath.BUFFER:
            move = self._moves.get_staged
            self._moves.require_buffer((await self._store.reads.head_object(request)).range.length)
        active = self._begin(access_key, token.request_id, agent, region)
        one_sided = self._opening(agent, region, token.offset)
        return await self._run(active, move(access_key, engine, one_sided, request, token.length))

    async def put_from(self, access_key: str, request: PutRequest, token: RdmaToken, said: BodyDigests) -> ObjectStored:
        """Store an object out of the client's memory; `said` is what its bytes must hash to."""
        engine, agent, region = self._of_token(access_key, token)
        if request.nbytes != token.length:
            raise bad_token(f"length is {token.length}, the object has {request.nbytes} bytes")
        check_size(request.nbytes, self._settings.object_bytes_max)
        move = self._moves.put_direct
        if token.path is ObjectPath.BUFFER:
            move = self._moves.put_staged
            self._moves.require_buffer(request.nbytes)
        active = self._begin(access_key, token.request_id, agent, region)
        one_sided = self._opening(agent, region, token.offset)
        return await self._run(active, move(access_key, engine, one_sided, request, said))

    async def put_chunks(self, access_key: str, bucket: str, descriptor: Descriptor) -> ChunksPut:
        """Store every chunk of a descriptor out of its target."""
        target, mode = descriptor.rdma_target, _MODES.get(descriptor.delivery)
        if target is None:
            raise invalid("rdma_target", "is required to put chunks")
        if mode is None:
            raise invalid("delivery", "must say how the chunks lie in the buffer: layer-major or chunk-major")
        engine = self._engine()
        if engine is None:
            problem = "this storage server has no ucx transport; put the chunks one by one"
            raise CallerError(ErrorCode.NOT_IMPLEMENTED, problem, field="rdma_target")
        agent = self._agents.owned(access_key, target.agent_id, time.monotonic(), "rdma_target.agent_id")
        if agent.is_shm:
            problem = "the agent's memory is shared, not registered with NIXL; put the chunks one by one"
            raise CallerError(ErrorCode.NOT_IMPLEMENTED, problem, field="rdma_target")
        region = target_region(agent, target)
        check_size(descriptor.layout.chunk_bytes, self._settings.object_bytes_max)
        await self._store.reads.head_bucket(bucket)
        active = self._begin(access_key, descriptor.request_id, agent, region)
        one_sided = self._opening(agent, region, target.offset)
        return await self._run(active, self._moves.put_chunks(access_key, engine, one_sided, bucket, descriptor, mode))

    def _of_token(self, access_key: str, token: RdmaToken) -> tuple[UcxProcess, RegisteredAgent, Region]:
        """Engine, agent and region, once the token has been found to name memory of the caller's."""
        engine = self._engine()
        if engine is None:
            raise declined("this storage server has no ucx transport")
        agent = self._agents.owned(access_key, token.agent_id, time.monotonic(), TOKEN_HEADER)
        if agent.is_shm:
            raise declined("the agent's memory is shared, not registered with NIXL")
        return engine, agent, region_span(agent, token.region_id, token.offset, token.length, TOKEN_HEADER)

    def _begin(self, access_key: str, request_id: str | None, agent: RegisteredAgent, region: Region) -> ActiveRequest:
        active = self._requests.begin(access_key, request_id, time.monotonic())
        active.agent_id, active.region = agent.agent_id, region
        return active

    def _opening(self, agent: RegisteredAgent, region: Region, offset: int) -> OpenOneSided:
        def lost() -> None:
            self._agents.expire(agent.agent_id)

        return lambda engine: OneSided(engine, agent.peer, region, offset, self._settings.stall_timeout_s, lost)

    async def _run(self, active: ActiveRequest, work: Coroutine[Any, Any, _T]) -> _T:
        """Carry the work out. A cancelled request is answered with CallerError(RequestCancelled); when the caller goes
        away instead, the work stops at once and drains on its own.
        """
        task = asyncio.create_task(work)
        active.task = task
        self._running.add(task)

        def ended(_: asyncio.Task[_T]) -> None:
            self._running.discard(task)
            self._requests.end(active)
            if not task.cancelled():
                task.exception()

        task.add_done_callback(ended)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if active.cancelled_by_caller:
                raise CallerError(ErrorCode.CANCELLED, "the request was cancelled", field="request_id") from None
            task.cancel()
            raise
