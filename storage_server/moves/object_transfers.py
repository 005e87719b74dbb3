"""Objects into and out of registered memory of clients: S3RDMA Direct and Buffer, and puts of many chunks.

The same rules as for descriptors: agents and regions are the caller's own, a request id is used once and can be
cancelled, and a request is over only when nothing of it is in flight.
"""

from __future__ import annotations

import time

from descriptors.descriptor import Delivery, Descriptor, invalid
from descriptors.errors import CallerError, ErrorCode
from descriptors.messages import Region
from descriptors.notices import Mode
from descriptors.objects import BodyDigests, PutRequest, ReadRequest
from descriptors.rdma_token import TOKEN_HEADER, ObjectPath, RdmaToken, bad_token, declined
from descriptors.storage_api import ChunksPut, ObjectDelivery, ObjectStored
from storage_server.agents.requests import ActiveRequest, RequestTable
from storage_server.agents.rules.agents import RegisteredAgent, region_span
from storage_server.delivery.registrar import Registrar
from storage_server.delivery.transport.one_sided import OneSided
from storage_server.delivery.transport.ucx_memory import UcxMemory
from storage_server.home.embedded import EmbeddedStore
from storage_server.kernel.objects import check_size
from storage_server.moves.object_moves import ObjectMoves
from storage_server.settings import StorageSettings

_MODES = {Delivery.LAYER_MAJOR: Mode.LAYER_MAJOR, Delivery.CHUNK_MAJOR: Mode.CHUNK_MAJOR}


class ObjectTransfers:
    """Checks such requests, keeps them cancellable, and has `ObjectMoves` carry them out. `memory` is the memory that
    the ucx process maps; None where ucx is off, and then every request is declined.
    """

    def __init__(
        self,
        settings: StorageSettings,
        store: EmbeddedStore,
        memory: UcxMemory | None,
        registrar: Registrar,
        requests: RequestTable,
    ) -> None:
        self._settings = settings
        self._store = store
        self._registrar = registrar
        self._requests = requests
        self._moves = None if memory is None else ObjectMoves(settings, store, memory.staging, memory.whole)

    @property
    def active_count(self) -> int:
        """How many requests move objects by one-sided reads and writes now."""
        return 0 if self._moves is None else self._moves.active_count

    def close(self) -> None:
        """Wait for running reads. Requests must have ended."""
        if self._moves is not None:
            self._moves.close()

    async def get_into(self, access_key: str, request: ReadRequest, token: RdmaToken) -> ObjectDelivery:
        """Write an object, or the requested range of it, into the client's memory."""
        moves, agent, region = self._of_token(access_key, token)
        move = moves.get_direct
        if token.path is ObjectPath.BUFFER:
            move = moves.get_staged
            moves.require_buffer((await self._store.objects.head_object(access_key, request)).range.length)
        active = self._begin(access_key, token.request_id, agent, region)
        work = move(access_key, lambda: self._open(agent, region, token.offset), request, token.length)
        return await self._requests.run(active, work)

    async def put_from(self, access_key: str, request: PutRequest, token: RdmaToken, said: BodyDigests) -> ObjectStored:
        """Store an object out of the client's memory. Its bytes must have the digests in `said`."""
        moves, agent, region = self._of_token(access_key, token)
        if request.nbytes != token.length:
            raise bad_token(f"length is {token.length}, the object has {request.nbytes} bytes")
        check_size(request.nbytes, self._settings.object_bytes_max)
        move = moves.put_direct
        if token.path is ObjectPath.BUFFER:
            move = moves.put_staged
            moves.require_buffer(request.nbytes)
        active = self._begin(access_key, token.request_id, agent, region)
        work = move(access_key, lambda: self._open(agent, region, token.offset), request, said)
        return await self._requests.run(active, work)

    async def put_chunks(self, access_key: str, bucket: str, descriptor: Descriptor) -> ChunksPut:
        """Store every chunk of a descriptor, read from the descriptor's target."""
        target, mode = descriptor.rdma_target, _MODES.get(descriptor.delivery)
        if target is None:
            raise invalid("rdma_target", "is required to put chunks")
        if mode is None:
            raise invalid("delivery", "must say how the chunks lie in the buffer: layer-major or chunk-major")
        if self._moves is None:
            problem = "this storage server has no ucx transport; put the chunks one by one"
            raise CallerError(ErrorCode.NOT_IMPLEMENTED, problem, field="rdma_target")
        agent, region = self._registrar.target(access_key, target)
        self._registrar.endpoint(agent).require_one_sided()
        check_size(descriptor.layout.chunk_bytes, self._settings.object_bytes_max)
        await self._store.objects.head_bucket(access_key, bucket)
        active = self._begin(access_key, descriptor.request_id, agent, region)
        work = self._moves.put_chunks(
            access_key,
            lambda: self._open(agent, region, target.offset),
            bucket=bucket,
            descriptor=descriptor,
            mode=mode,
            active=active,
        )
        return await self._requests.run(active, work)

    def _of_token(self, access_key: str, token: RdmaToken) -> tuple[ObjectMoves, RegisteredAgent, Region]:
        """The moves, and the agent and region of a token that names memory of the caller's own."""
        if self._moves is None:
            raise declined("this storage server has no ucx transport")
        agent = self._registrar.table.owned(access_key, token.agent_id, time.monotonic(), TOKEN_HEADER)
        try:
            self._registrar.endpoint(agent).require_one_sided()
        except CallerError as error:
            raise declined(error.message) from None
        return self._moves, agent, region_span(agent, token.region_id, token.offset, token.length, TOKEN_HEADER)

    def _begin(self, access_key: str, request_id: str | None, agent: RegisteredAgent, region: Region) -> ActiveRequest:
        return self._requests.begin(access_key, request_id, time.monotonic(), agent.agent_id, region)

    def _open(self, agent: RegisteredAgent, region: Region, offset: int) -> OneSided:
        return self._registrar.endpoint(agent).open_one_sided(region, offset)
