"""Agents of a cluster: one registration of a client's memory, which every member that may write there knows."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Collection, Coroutine, Mapping
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from descriptors.cluster import Member
from descriptors.errors import CallerError, ErrorCode, ObjectCacheError, ServerError
from descriptors.messages import AgentLease, AgentRegistration, AgentRenewal
from descriptors.storage_api import AgentsApi
from gateway.cluster.members import Members
from gateway.storage_client import StaleViewError, StorageUnreachableError

WAIT_S = 1.0
"""A member that hangs delays a registration by this much, and gets no portions until it knows the agent."""
UNKNOWN = frozenset({ErrorCode.NO_SUCH_AGENT, ErrorCode.EXPIRED_TOKEN})
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Told(Generic[_T]):
    """The answers of members, by name: of those that carried a call out, those that refused it, and those that could
    not be reached.
    """

    good: Mapping[str, _T]
    refused: Mapping[str, ObjectCacheError]
    unreached: tuple[str, ...]


class ClusterAgents:
    """Implements descriptors.storage_api.AgentsApi over the members of a cluster. Which member knows an agent is not
    remembered here: one that does not refuses its portion, and another member brings that.
    """

    def __init__(self, members: Members) -> None:
        self._members = members

    async def register_agent(self, access_key: str, registration: AgentRegistration) -> AgentLease:
        """Register with every member, or make an agent known to those that the registration names. One that refuses, as
        it has no such transport, ends the registration.
        """
        agent_id = registration.agent_id or secrets.token_hex(16)
        tickets = registration.shm_tickets

        def ask(agents: AgentsApi, member: Member) -> Coroutine[Any, Any, AgentLease]:
            own = replace(
                registration, agent_id=agent_id, shm_ticket=tickets.get(member.name), shm_tickets={}, members=()
            )
            return agents.register_agent(access_key, own)

        told = await self._tell(ask, set(tickets or registration.members) or None, WAIT_S)
        refused = {name: error for name, error in told.refused.items() if error.code is not ErrorCode.AGENT_CONFLICT}
        if refused:
            if registration.agent_id is None:
                await self._tell(lambda agents, _: agents.delete_agent(access_key, agent_id), set(told.good), WAIT_S)
            raise next(iter(refused.values()))
        return self._lease(agent_id, told)

    async def renew_agent(self, access_key: str, agent_id: str, renewal: AgentRenewal) -> AgentLease:
        """Renew with every member that knows the agent."""
        told = await self._tell(lambda agents, _: agents.renew_agent(access_key, agent_id, renewal), None, WAIT_S)
        for error in told.refused.values():
            if error.code not in UNKNOWN:
                raise error
        return self._lease(agent_id, told)

    async def delete_agent(self, access_key: str, agent_id: str, ended: tuple[str, ...] = ()) -> None:
        """Returns when no member moves bytes of the agent's memory any more. Raises ServerError(SlowDown) where one
        could not be asked that has not ended.
        """
        told = await self._tell(lambda agents, _: agents.delete_agent(access_key, agent_id), None, None)
        for error in told.refused.values():
            if error.code not in UNKNOWN:
                raise error
        unreached = [name for name in told.unreached if name not in ended]
        if unreached:
            problem = f"the storage server {unreached[0]} could not be asked, and may still write"
            raise ServerError(ErrorCode.SLOW_DOWN, problem, retryable=True)
        if not told.good and not ended:
            raise next(iter(told.refused.values()), _no_such_agent(agent_id))

    def _lease(self, agent_id: str, told: Told[AgentLease]) -> AgentLease:
        """The lease of the whole. Raises where no member knows the agent."""
        if not told.good:
            if told.refused:
                raise next(iter(told.refused.values()))
            raise ServerError(ErrorCode.SLOW_DOWN, "no storage server can be reached", retryable=True)
        expires_at = min(lease.expires_at for lease in told.good.values())
        unknown = tuple(name for name, error in told.refused.items() if error.code in UNKNOWN)
        return AgentLease(agent_id, expires_at, unknown, told.unreached)

    async def _tell(
        self,
        ask: Callable[[AgentsApi, Member], Coroutine[Any, Any, _T]],
        names: Collection[str] | None,
        wait_s: float | None,
    ) -> Told[_T]:
        """Ask all members, or those named, at once. One that takes longer than `wait_s` counts as not reached; with
        None, one that is not there.
        """
        asked = [member for member in self._members.view.members if names is None or member.name in names]

        async def tell(member: Member) -> _T:
            storage = await self._members.storage(member)
            if wait_s is None:
                return await self._members.watched(member, ask(storage.agents, member))
            async with asyncio.timeout(wait_s):
                return await ask(storage.agents, member)

        answers = await asyncio.gather(*map(tell, asked), return_exceptions=True)
        good: dict[str, _T] = {}
        refused: dict[str, ObjectCacheError] = {}
        unreached: list[str] = []
        for member, answer in zip(asked, answers, strict=True):
            if isinstance(answer, StorageUnreachableError | StaleViewError | TimeoutError | ConnectionError):
                unreached.append(member.name)
            elif isinstance(answer, ObjectCacheError):
                refused[member.name] = answer
            elif isinstance(answer, BaseException):
                raise answer
            else:
                good[member.name] = answer
        return Told(good, refused, tuple(unreached))


def _no_such_agent(agent_id: str) -> CallerError:
    return CallerError(ErrorCode.NO_SUCH_AGENT, f"no agent {agent_id} is registered", field="agent_id")
