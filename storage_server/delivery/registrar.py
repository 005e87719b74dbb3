"""Registering agents. The registrar checks what a client offers and makes it known to the transport. It forgets an
agent only when nothing is in flight to or from the agent's memory.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from descriptors.descriptor import RdmaTarget
from descriptors.errors import CallerError, ErrorCode, ObjectCacheError, ServerError
from descriptors.messages import AgentLease, AgentRegistration, AgentRenewal, Region
from objectcache.adapters.threads import to_end
from storage_server.agents.requests import ActiveRequest, RequestTable
from storage_server.agents.rules.agents import AgentTable, RegisteredAgent, target_region
from storage_server.delivery.scheduler.downlink_shares import DownlinkShares
from storage_server.delivery.transport.endpoint import AgentTransport, Endpoint

SWEEP_INTERVAL_S = 1.0


class Registrar:
    """Implements descriptors.storage_api.AgentsApi: keeps the table of agents in step with the transports."""

    def __init__(self, table: AgentTable, requests: RequestTable, *, takes_ids: bool = False) -> None:
        """With `takes_ids` gateways of a cluster give agents their ids."""
        self.table = table
        self.shares = DownlinkShares()
        self._takes_ids = takes_ids
        self._requests = requests
        self._ucx: AgentTransport | None = None
        self._shm: AgentTransport | None = None
        self._endpoints: dict[str, Endpoint] = {}
        self._names = _NameLocks()

    def start(self, ucx: AgentTransport | None, shm: AgentTransport | None) -> None:
        """Use these transports from now on; None for a transport that is off."""
        self._ucx, self._shm = ucx, shm

    async def register_agent(self, access_key: str, registration: AgentRegistration) -> AgentLease:
        """Register an agent. On return the transport knows the agent, and its connection is open. An earlier
        registration of the same peer is stopped and drained first.
        """
        if registration.shm_tickets or registration.members or (registration.agent_id and not self._takes_ids):
            problem = "is for clusters, and this service is none"
            raise CallerError(ErrorCode.INVALID_ARGUMENT, f"agent_id {problem}", field="agent_id")
        transport = self._transport(registration)
        peer = transport.peer_of(registration)
        async with self._names.locked(peer):
            self.table.check_name(access_key, peer, time.monotonic())
            self.table.check_id(registration.agent_id)
            holder = self.table.holder(peer)
            with self.table.reserved(access_key, len(registration.regions), holder):
                if holder is not None:
                    transport.check_replacing()
                    await self._drain_and_forget(holder, _cancelled("the agent was registered again"))
                endpoint = await transport.connect(peer, registration)
                try:
                    added = self.table.add(access_key, peer, registration, time.monotonic())
                except BaseException:
                    await to_end(asyncio.ensure_future(endpoint.close()))
                    raise
                self._endpoints[added.agent_id] = endpoint
                return added.lease(time.monotonic(), time.time())

    async def renew_agent(self, access_key: str, agent_id: str, renewal: AgentRenewal) -> AgentLease:
        """Extend a lease and replace its regions. Deliveries into regions that are not offered any more are stopped and
        drained first. A renewal that has begun is carried out even when its caller is cancelled: in between, the table
        has other regions than the transport.
        """
        peer = self.table.owned(access_key, agent_id, time.monotonic(), "agent_id").peer
        async with self._names.locked(peer):
            agent = self.table.owned(access_key, agent_id, time.monotonic(), "agent_id")
            endpoint = self.endpoint(agent)
            endpoint.check_renewal(renewal)
            return await to_end(asyncio.ensure_future(self._renew(agent, endpoint, renewal)))

    async def _renew(self, agent: RegisteredAgent, endpoint: Endpoint, renewal: AgentRenewal) -> AgentLease:
        if not renewal.regions and renewal.metadata is None:
            return self.table.renew(agent, renewal, time.monotonic()).lease(time.monotonic(), time.time())
        with self.table.reserved(agent.access_key, len(renewal.regions), agent):
            await endpoint.renew(renewal, lambda regions: self._stop_outside(agent, regions))
            # it may have ended meanwhile
            agent = self.table.owned(agent.access_key, agent.agent_id, time.monotonic(), "agent_id")
            return self.table.renew(agent, renewal, time.monotonic()).lease(time.monotonic(), time.time())

    async def delete_agent(self, access_key: str, agent_id: str, writers: tuple[str, ...] = ()) -> None:
        """Delete an agent. Returns when nothing writes into its memory any more."""
        peer = self.table.owned(access_key, agent_id, time.monotonic(), "agent_id").peer
        async with self._names.locked(peer):
            agent = self.table.owned(access_key, agent_id, time.monotonic(), "agent_id")
            await self._drain_and_forget(agent, _cancelled("the agent was deleted"))

    async def downlink_share(
        self, access_key: str, agent_id: str, writer: str, left_bytes: int, whole_bytes: int
    ) -> float:
        """The keeper's answer. Raises CallerError(InvalidArgument) for an agent without a downlink."""
        agent = self.table.owned(access_key, agent_id, time.monotonic(), "agent_id")
        if agent.downlink_bytes_per_s is None:
            raise CallerError(ErrorCode.INVALID_ARGUMENT, "the agent's downlink is not limited", field="agent_id")
        return self.shares.share(
            agent_id,
            agent.downlink_bytes_per_s,
            writer=writer,
            left_bytes=left_bytes,
            whole_bytes=whole_bytes,
            now_s=time.monotonic(),
        )

    def target(self, access_key: str, target: RdmaTarget) -> tuple[RegisteredAgent, Region]:
        """The caller's agent and region that a descriptor's target names. Raises CallerError: NoSuchAgent,
        AccessDenied, ExpiredToken, InvalidDescriptor.
        """
        agent = self.table.owned(access_key, target.agent_id, time.monotonic(), "rdma_target.agent_id")
        return agent, target_region(agent, target)

    def endpoint(self, agent: RegisteredAgent) -> Endpoint:
        """How the agent's transport reaches it. Raises CallerError(NoSuchAgent) where the agent has been deleted
        meanwhile.
        """
        endpoint = self._endpoints.get(agent.agent_id)
        if endpoint is None:
            problem = f"no agent {agent.agent_id} is registered"
            raise CallerError(ErrorCode.NO_SUCH_AGENT, problem, field="agent_id")
        return endpoint

    def peer_lost(self, peer: str) -> None:
        """Expire a peer that cannot be reached any more: it must register again."""
        holder = self.table.holder(peer)
        if holder is not None:
            self.table.expire(holder.agent_id)

    def client_gone(self, peer: str) -> bool:
        """Stop the requests of a peer that has hung up, because nobody reads what is written for it. Returns False
        where no agent is registered for the peer.
        """
        holder = self.table.holder(peer)
        if holder is None:
            return False
        self.table.expire(holder.agent_id)
        for request in self._requests.active_for_agent(holder.agent_id):
            request.stop(_unreachable())
        return True

    async def sweep(self) -> None:
        """Forget expired agents, for ever. Each has a task of its own, so that a slow drain does not
        delay the others.
        """
        sweeps: dict[str, asyncio.Task[None]] = {}
        try:
            while True:
                await asyncio.sleep(SWEEP_INTERVAL_S)
                sweeps = {agent_id: task for agent_id, task in sweeps.items() if not task.done()}
                for agent in self.table.expired(time.monotonic()):
                    if agent.agent_id not in sweeps:
                        sweeps[agent.agent_id] = asyncio.create_task(self._forget_expired(agent))
        finally:
            for task in sweeps.values():
                task.cancel()

    def _transport(self, registration: AgentRegistration) -> AgentTransport:
        """The transport of a registration. Raises CallerError: NotImplemented where ucx is off, NoSuchAgent where shm
        is off.
        """
        if registration.shm_ticket is not None:
            if self._shm is None:
                problem = "no such connection to this storage server"
                raise CallerError(ErrorCode.NO_SUCH_AGENT, problem, field="shm_ticket")
            return self._shm
        if self._ucx is None:
            problem = "this storage server has no ucx transport; ask for the body instead"
            raise CallerError(ErrorCode.NOT_IMPLEMENTED, problem, field="rdma_target")
        return self._ucx

    async def _stop_outside(self, agent: RegisteredAgent, regions: Sequence[Region]) -> None:
        """Stop the agent's requests in memory outside these regions. No new request may begin there."""
        self.table.restrict(agent, regions)
        active = self._requests.active_for_agent(agent.agent_id)
        outside = [request for request in active if request.region not in regions]
        await _stop(outside, _cancelled("the region is no longer offered"))

    async def _drain_and_forget(self, agent: RegisteredAgent, error: ObjectCacheError) -> None:
        """Refuse new deliveries to the agent, stop those under way with this error, drain them, disconnect: to the end
        even when the caller is cancelled, because nobody else would unmap the agent's memory.
        """
        self.shares.forget(agent.agent_id)
        with self.table.ending(agent):
            await to_end(asyncio.ensure_future(self._drain(agent, error)))

    async def _drain(self, agent: RegisteredAgent, error: ObjectCacheError) -> None:
        await _stop(self._requests.active_for_agent(agent.agent_id), error)
        endpoint = self._endpoints.pop(agent.agent_id, None)
        if endpoint is not None:
            await endpoint.close()

    async def _forget_expired(self, agent: RegisteredAgent) -> None:
        async with self._names.locked(agent.peer):
            if agent in self.table.expired(time.monotonic()):
                await self._drain_and_forget(agent, _unreachable() if agent.is_lost else _expired())


class _NameLocks:
    """A lock for each agent's name. A lock is dropped when no task holds or awaits it."""

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


def _cancelled(problem: str) -> CallerError:
    return CallerError(ErrorCode.CANCELLED, problem, field="rdma_target")


def _expired() -> CallerError:
    return CallerError(ErrorCode.EXPIRED_TOKEN, "the agent's registration has expired", field="rdma_target")


def _unreachable() -> ServerError:
    problem = "the client's memory cannot be reached: the client is gone"
    return ServerError(ErrorCode.TARGET_UNREACHABLE, problem, field="rdma_target")


async def _stop(active: Sequence[ActiveRequest], error: ObjectCacheError) -> None:
    """End requests with this error and wait until nothing of them is in flight."""
    for request in active:
        request.stop(error)
    for request in active:
        await request.drained.wait()
