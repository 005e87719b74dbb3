"""Agents of a cluster: one registration of a client's memory, which every member that may write there knows."""

from __future__ import annotations

import secrets
from dataclasses import replace
from typing import TypeVar

from descriptors.cluster import Member
from descriptors.errors import CallerError, ErrorCode, ServerError
from descriptors.messages import AgentLease, AgentRegistration, AgentRenewal
from gateway.cluster.asking import Told, asked_at_once
from gateway.cluster.members import Members, nobody
from gateway.storage_client import RemoteStorage

WAIT_S = 1.0
"""A member that hangs delays a registration by this much, and gets no portions until it knows the agent."""
UNKNOWN = frozenset({ErrorCode.NO_SUCH_AGENT, ErrorCode.EXPIRED_TOKEN})
_T = TypeVar("_T")


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
        named = tuple(registration.shm_tickets or registration.members)
        if registration.agent_id is not None and not named:
            problem = "needs members, or shm_tickets, to make the agent known to"
            raise CallerError(ErrorCode.INVALID_ARGUMENT, f"agent_id {problem}", field="agent_id")
        agent_id = registration.agent_id or secrets.token_hex(16)
        tickets = registration.shm_tickets

        async def ask(storage: RemoteStorage, member: Member) -> AgentLease:
            own = replace(
                registration, agent_id=agent_id, shm_ticket=tickets.get(member.id), shm_tickets={}, members=()
            )
            try:
                return await storage.agents.register_agent(access_key, own)
            except CallerError as error:
                if error.field != "downlink_bytes_per_s":
                    raise
                # a member of the release before knows no downlinks, and writes as fast as it can
                return await storage.agents.register_agent(access_key, replace(own, downlink_bytes_per_s=None))

        asked = [member for member in self._members.view.members if not named or member.id in named]
        told = await asked_at_once(self._members, asked, ask, WAIT_S)
        refused = {name: error for name, error in told.refused.items() if error.code is not ErrorCode.AGENT_CONFLICT}
        if refused:
            if registration.agent_id is None:
                good = [member for member in asked if member.id in told.good]
                await asked_at_once(
                    self._members, good, lambda storage, _: storage.agents.delete_agent(access_key, agent_id), WAIT_S
                )
            raise next(iter(refused.values()))
        return self._lease(agent_id, told)

    async def renew_agent(self, access_key: str, agent_id: str, renewal: AgentRenewal) -> AgentLease:
        """Renew with every member that knows the agent."""
        everybody = self._members.view.members
        told = await asked_at_once(
            self._members,
            everybody,
            lambda storage, _: storage.agents.renew_agent(access_key, agent_id, renewal),
            WAIT_S,
        )
        for error in told.refused.values():
            if error.code not in UNKNOWN:
                raise error
        return self._lease(agent_id, told)

    async def delete_agent(self, access_key: str, agent_id: str, writers: tuple[str, ...] = ()) -> None:
        """Returns when no member moves bytes of the agent's memory any more. Raises ServerError(SlowDown) where one of
        `writers` could not be asked.
        """
        gone = [member_id for member_id in writers if self._members.view.by_id(member_id) is None]
        if gone:
            raise may_still_write(gone[0])
        everybody = self._members.view.members
        told = await asked_at_once(
            self._members, everybody, lambda storage, _: storage.agents.delete_agent(access_key, agent_id), None
        )
        for error in told.refused.values():
            if error.code not in UNKNOWN:
                raise error
        unreached = [member_id for member_id in told.unreached if member_id in writers]
        if unreached:
            raise may_still_write(unreached[0])
        if not told.good and not told.unreached:
            raise next(iter(told.refused.values()), _no_such_agent(agent_id))

    async def downlink_share(
        self, access_key: str, agent_id: str, writer: str, left_bytes: int, whole_bytes: int
    ) -> float:
        """Raises CallerError(NotImplemented): storage servers ask each other."""
        raise CallerError(ErrorCode.NOT_IMPLEMENTED, "a gateway has no shares of downlinks", field="agent_id")

    def _lease(self, agent_id: str, told: Told[AgentLease]) -> AgentLease:
        """The lease of the whole. Raises where no member knows the agent."""
        if not told.good:
            if told.refused:
                raise next(iter(told.refused.values()))
            raise nobody()
        expires_at = min(lease.expires_at for lease in told.good.values())
        unknown = tuple(member_id for member_id, error in told.refused.items() if error.code in UNKNOWN)
        return AgentLease(agent_id, expires_at, tuple(told.good), unknown, told.unreached)


def may_still_write(member_id: str) -> ServerError:
    """The error where a storage server cannot be asked that may be writing into a client's memory."""
    problem = f"the storage server {member_id} cannot be asked, and may still write"
    return ServerError(ErrorCode.SLOW_DOWN, problem, retryable=True, retry_after_s=1)


def _no_such_agent(agent_id: str) -> CallerError:
    return CallerError(ErrorCode.NO_SUCH_AGENT, f"no agent {agent_id} is registered", field="agent_id")
