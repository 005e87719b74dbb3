"""Registering agents: what a client offers is checked, made known to the transport that will write to it, and forgotten
only when nothing is in flight.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from adapters.nixl_agent import Memory, NixlFailure, writes_pieces_well
from adapters.nixl_metadata import agent_name
from adapters.threads import to_end
from descriptors.errors import CallerError, ErrorCode, ServerError
from descriptors.messages import AgentLease, AgentRegistration, AgentRenewal, Region
from storage_server.agents import AgentTable, RegisteredAgent
from storage_server.requests import ActiveRequest, RequestTable
from storage_server.transport.metadata_probe import MetadataProbe
from storage_server.transport.shared_region import OfferError
from storage_server.transport.shm_door import ShmClient, ShmDoor
from storage_server.transport.ucx_process import UcxProcess

SWEEP_INTERVAL_S = 1.0


class Registrar:
    """Keeps the agent table, the ucx engine and the shm door in step. `engine` and `door` are None where off."""

    def __init__(self, agents: AgentTable, requests: RequestTable) -> None:
        self.agents = agents
        self.engine: UcxProcess | None = None
        self.door: ShmDoor | None = None
        self.maps_dram = False
        """Whether the engine can send from the DRAM tier."""
        self._requests = requests
        self._probe: MetadataProbe | None = None
        self._names = _NameLocks()

    def start(self, engine: UcxProcess | None, probe: MetadataProbe | None, door: ShmDoor | None) -> None:
        """Serve these transports; `probe` looks at metadata before the engine does."""
        self.engine, self._probe, self.door = engine, probe, door
        if probe is not None:
            probe.start()

    async def close(self) -> None:
        """End the child that probes metadata."""
        if self._probe is not None:
            await self._probe.close()

    async def register(self, access_key: str, registration: AgentRegistration) -> AgentLease:
        """Known to its transport, connection open, when it returns. What the name was registered as before is stopped
        and drained first.
        """
        peer = self._peer(registration)
        async with self._names.locked(peer):
            self.agents.check_name(access_key, peer, time.monotonic())
            self.agents.check_room(access_key, len(registration.regions), self.agents.holder(peer))
            holder = self.agents.holder(peer)
            if registration.shm_ticket is not None:
                client = self._connected(peer, "shm_ticket")
                if holder is not None:
                    raise CallerError(ErrorCode.AGENT_CONFLICT, "the ticket is registered already", field="shm_ticket")
                _check_handed_in(client, registration.regions)
                await self._map(client, registration.regions)
                client.is_registered = True
            else:
                if holder is not None:
                    await self._forget(holder)
                await self._load_metadata(peer, registration.metadata, registration.regions)
            takes_pieces = self.maps_dram and writes_pieces_well(registration.host_id)
            added = self.agents.add(access_key, peer, registration, time.monotonic(), takes_pieces=takes_pieces)
            return added.lease(time.monotonic(), time.time())

    async def renew(self, access_key: str, agent_id: str, renewal: AgentRenewal) -> AgentLease:
        """Deliveries into memory that is no longer offered are stopped and drained first."""
        peer = self.agents.owned(access_key, agent_id, time.monotonic(), "agent_id").peer
        async with self._names.locked(peer):
            agent = self.agents.owned(access_key, agent_id, time.monotonic(), "agent_id")
            if agent.is_shm:
                await self._renew_shm(agent, renewal)
            elif renewal.metadata is not None:
                if _nixl_name(renewal.metadata) != peer:
                    raise CallerError(ErrorCode.INVALID_ARGUMENT, "metadata is of another NIXL agent", field="metadata")
                self.agents.check_room(access_key, len(renewal.regions), agent)
                await self._stop_outside(agent, renewal.regions)
                await self._load_metadata(peer, renewal.metadata, renewal.regions)
            elif renewal.regions:
                raise CallerError(
                    ErrorCode.INVALID_ARGUMENT, "regions and metadata are renewed together", field="regions"
                )
            agent = self.agents.owned(access_key, agent_id, time.monotonic(), "agent_id")  # it may have gone meanwhile
            return self.agents.renew(agent, renewal, time.monotonic()).lease(time.monotonic(), time.time())

    async def delete(self, access_key: str, agent_id: str) -> None:
        """Returns when nothing writes into the agent's memory any more."""
        peer = self.agents.owned(access_key, agent_id, time.monotonic(), "agent_id").peer
        async with self._names.locked(peer):
            await self._forget(self.agents.owned(access_key, agent_id, time.monotonic(), "agent_id"))

    def client_gone(self, ticket: str) -> None:
        """A shm client has hung up: nobody reads what is written for it."""
        holder = self.agents.holder(ticket)
        if holder is not None:
            self.agents.expire(holder.agent_id)
            for request in self._requests.active_for_agent(holder.agent_id):
                request.cancel()
        elif self.door is not None:
            self.door.dismiss(ticket)

    def engine_gone(self) -> None:
        """The ucx process has ended, and with it every connection of a NIXL agent: they must register anew."""
        for agent in self.agents.all():
            if not agent.is_shm:
                self.agents.expire(agent.agent_id)

    def shm_client(self, agent: RegisteredAgent) -> ShmClient:
        """The connection of a shm agent. Raises CallerError(NoSuchAgent) when it is gone."""
        return self._connected(agent.peer, "rdma_target.agent_id")

    async def sweep(self) -> None:
        """Forget expired agents for ever, each on its own: one that takes long to drain holds nobody up."""
        sweeps: dict[str, asyncio.Task[None]] = {}
        try:
            while True:
                await asyncio.sleep(SWEEP_INTERVAL_S)
                sweeps = {agent_id: task for agent_id, task in sweeps.items() if not task.done()}
                for agent in self.agents.expired(time.monotonic()):
                    if agent.agent_id not in sweeps:
                        sweeps[agent.agent_id] = asyncio.create_task(self._forget_expired(agent))
        finally:
            for task in sweeps.values():
                task.cancel()

    def _peer(self, registration: AgentRegistration) -> str:
        if registration.shm_ticket is not None:
            return registration.shm_ticket
        self._require_engine()
        return _nixl_name(registration.metadata)

    def _connected(self, ticket: str, field: str) -> ShmClient:
        client = self.door.client(ticket) if self.door is not None else None
        if client is None:
            raise CallerError(ErrorCode.NO_SUCH_AGENT, "no such connection to this storage server", field=field)
        return client

    async def _map(self, client: ShmClient, regions: Sequence[Region]) -> None:
        """Raises CallerError: InvalidArgument for memory that cannot be mapped, NoSuchAgent when the client is gone."""
        try:
            if self.door is not None:
                await self.door.map(client, regions)
        except ConnectionError as error:
            raise CallerError(ErrorCode.NO_SUCH_AGENT, "the connection has ended", field="shm_ticket") from error
        except (OfferError, OSError) as error:
            problem = f"the memory cannot be used: {error}"
            raise CallerError(ErrorCode.INVALID_ARGUMENT, problem, field="regions") from error

    async def _renew_shm(self, agent: RegisteredAgent, renewal: AgentRenewal) -> None:
        if renewal.metadata is not None:
            raise CallerError(ErrorCode.INVALID_ARGUMENT, "the agent is not a NIXL agent", field="metadata")
        if not renewal.regions:
            return
        client = self._connected(agent.peer, "agent_id")
        _check_handed_in(client, renewal.regions)
        self.agents.check_room(agent.access_key, len(renewal.regions), agent)
        await self._map(client, renewal.regions)
        await self._stop_outside(agent, renewal.regions)
        offered = {region.region_id for region in renewal.regions}
        for region in agent.regions:
            if region.region_id not in offered:
                client.forget(region.region_id)

    async def _stop_outside(self, agent: RegisteredAgent, regions: Sequence[Region]) -> None:
        """Nothing begins into other memory of the agent any more, and what has begun ends."""
        self.agents.restrict(agent, regions)
        active = self._requests.active_for_agent(agent.agent_id)
        await _stop([request for request in active if request.region not in regions])

    async def _load_metadata(self, peer: str, metadata: bytes, regions: Sequence[Region]) -> None:
        """Make the peer known to the engine. Raises CallerError(InvalidArgument) when that cannot be done."""
        offered = [Memory(region.address, region.length, region.device) for region in regions]
        try:
            if self._probe is not None:
                await self._probe.check(metadata, offered)
            await self._require_engine().add_peer(peer, metadata, offered)
        except NixlFailure as failure:
            raise CallerError(
                ErrorCode.INVALID_ARGUMENT, f"metadata cannot be used for these regions: {failure}", field="metadata"
            ) from failure

    def _require_engine(self) -> UcxProcess:
        return require_engine(self.engine)

    async def _forget(self, agent: RegisteredAgent) -> None:
        """Refuse new deliveries to the agent, stop and drain those under way, disconnect."""
        self.agents.remove(agent.agent_id)
        await _stop(self._requests.active_for_agent(agent.agent_id))
        if agent.is_shm:
            if self.door is not None:
                self.door.dismiss(agent.peer)
        elif self.engine is not None:
            with contextlib.suppress(NixlFailure):  # a process that has ended knows no peers
                await to_end(asyncio.ensure_future(self.engine.remove_peer(agent.peer)))

    async def _forget_expired(self, agent: RegisteredAgent) -> None:
        async with self._names.locked(agent.peer):
            if agent in self.agents.expired(time.monotonic()):
                await self._forget(agent)


def require_engine(engine: UcxProcess | None) -> UcxProcess:
    """Raises CallerError(NotImplemented) where ucx is off, ServerError(SlowDown) where its process is starting."""
    if engine is None:
        raise CallerError(
            ErrorCode.NOT_IMPLEMENTED,
            "this storage server has no ucx transport; ask for the body instead",
            field="rdma_target",
        )
    if not engine.is_running:
        raise ServerError(ErrorCode.SLOW_DOWN, "the ucx process is being started again", retryable=True)
    return engine


class _NameLocks:
    """A lock per agent's name, kept while somebody holds or awaits it."""

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


def _check_handed_in(client: ShmClient, regions: Sequence[Region]) -> None:
    """Raises CallerError(InvalidArgument) for a region that was not, or not as large."""
    for index, region in enumerate(regions):
        if not client.knows(region):
            raise CallerError(
                ErrorCode.INVALID_ARGUMENT,
                f"regions[{index}] is not as it was handed in over the socket",
                field=f"regions[{index}].region_id",
            )


def _nixl_name(metadata: bytes) -> str:
    try:
        return agent_name(metadata)
    except ValueError as error:
        raise CallerError(ErrorCode.INVALID_ARGUMENT, f"metadata: {error}", field="metadata") from None
