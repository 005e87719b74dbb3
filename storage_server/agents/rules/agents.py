"""Registered agents: whose memory may be written, which regions of it, and for how long. Pure state; the caller
supplies the time, in seconds of a monotonic clock. (The time of day may be set, and a jump would expire every agent at
once.)
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from descriptors.descriptor import RdmaTarget
from descriptors.errors import CallerError, ErrorCode, ServerError
from descriptors.messages import AgentLease, AgentRegistration, AgentRenewal, Region

REGIONS_MAX = 16_384
"""The most regions of all agents together. The reason: a process may have some 65,000 mappings."""
KEY_REGIONS_MAX = REGIONS_MAX // 8
"""The most regions of the agents of one access key."""


@dataclass(frozen=True, slots=True)
class RegisteredAgent:
    """One registration: `peer` is the agent's name at its transport, `access_key` is the agent's owner."""

    agent_id: str
    access_key: str
    peer: str
    regions: tuple[Region, ...]
    expires_s: float
    downlink_bytes_per_s: float | None = None
    """All servers that write into its memory share this rate; None: it is not limited."""

    @property
    def is_lost(self) -> bool:
        """Whether the client process is gone, so that its memory cannot be reached."""
        return self.expires_s == -math.inf

    def lease(self, now_s: float, unix_s: float) -> AgentLease:
        """The answer to the owner: agent id and expiry. `unix_s` is the time of day now."""
        return AgentLease(self.agent_id, unix_s + self.expires_s - now_s)


@dataclass(frozen=True, slots=True)
class _RegionCount:
    """Regions of an access key that are being registered, renewed or unmapped. `agent_id` is the agent that has the
    new regions in place of its own; None where no agent of the table has these regions.
    """

    access_key: str
    agent_id: str | None
    region_count: int


class AgentTable:
    """The registrations in force. An access key may have `agents_max` agents. A NIXL name has one agent, bound to the
    key that registered it. One key may have KEY_REGIONS_MAX regions, all keys together REGIONS_MAX.
    """

    def __init__(self, agents_max: int) -> None:
        self._agents_max = agents_max
        self._by_id: dict[str, RegisteredAgent] = {}
        self._under_way: list[_RegionCount] = []

    def __len__(self) -> int:
        return len(self._by_id)

    @property
    def region_count(self) -> int:
        """The regions of all agents together."""
        return sum(len(agent.regions) for agent in self._by_id.values())

    def check_name(self, access_key: str, peer: str, now_s: float) -> None:
        """Raises CallerError(AgentConflict) when another key holds the name, ServerError(SlowDown) when the key has
        `agents_max` agents already.
        """
        holder = self.holder(peer)
        if holder is not None and holder.access_key != access_key and holder.expires_s > now_s:
            raise CallerError(
                ErrorCode.AGENT_CONFLICT, "the NIXL agent name is registered by another access key", field="metadata"
            )
        owned_count = sum(agent.access_key == access_key for agent in self._by_id.values())
        if holder is None and owned_count >= self._agents_max:
            problem = f"{self._agents_max} agents of this access key are registered already"
            raise ServerError(ErrorCode.SLOW_DOWN, problem, retryable=True)

    def check_id(self, agent_id: str | None) -> None:
        """Raises CallerError(AgentConflict) for an id that is in use."""
        if agent_id in self._by_id:
            raise CallerError(ErrorCode.AGENT_CONFLICT, "the agent is registered already", field="agent_id")

    @contextmanager
    def reserved(self, access_key: str, region_count: int, but: RegisteredAgent | None) -> Iterator[None]:
        """Count the regions of a registration or renewal while it is under way, so that many at once exceed no bound.
        The regions of `but` do not count beside them, because the new regions replace them. Raises
        ServerError(SlowDown) where `region_count` more regions exceed a bound.
        """
        others = [each for each in self._counted() if but is None or each.agent_id != but.agent_id]
        of_key = sum(each.region_count for each in others if each.access_key == access_key)
        of_all = sum(each.region_count for each in others)
        if of_key + region_count > KEY_REGIONS_MAX:
            problem = f"this access key has {of_key} regions registered, and may have {KEY_REGIONS_MAX}"
        elif of_all + region_count > REGIONS_MAX:
            problem = f"{of_all} regions are registered, and at most {REGIONS_MAX} may be"
        else:
            with self._counting(_RegionCount(access_key, None if but is None else but.agent_id, region_count)):
                yield
            return
        raise ServerError(ErrorCode.SLOW_DOWN, problem, field="regions", retryable=True)

    @contextmanager
    def ending(self, agent: RegisteredAgent) -> Iterator[None]:
        """Forget an agent. Its regions count until the block ends, because they stay mapped while requests drain."""
        self._by_id.pop(agent.agent_id, None)
        with self._counting(_RegionCount(agent.access_key, None, len(agent.regions))):
            yield

    @contextmanager
    def _counting(self, regions: _RegionCount) -> Iterator[None]:
        self._under_way.append(regions)
        try:
            yield
        finally:
            self._under_way.remove(regions)

    def _counted(self) -> Iterator[_RegionCount]:
        """The regions of each agent, and of each change under way. An agent that is renewed counts with the larger of
        its two numbers.
        """
        renewed = {each.agent_id: each.region_count for each in self._under_way if each.agent_id in self._by_id}
        for agent in self._by_id.values():
            region_count = max(len(agent.regions), renewed.get(agent.agent_id, 0))
            yield _RegionCount(agent.access_key, agent.agent_id, region_count)
        yield from (each for each in self._under_way if each.agent_id not in renewed)

    def add(self, access_key: str, peer: str, registration: AgentRegistration, now_s: float) -> RegisteredAgent:
        """Register an agent whose name nobody holds, under the id that the gateway of a cluster has given it, or a new
        one. Raises what `check_name` raises, and CallerError(AgentConflict) where the id is another agent's.
        """
        self.check_name(access_key, peer, now_s)
        self.check_id(registration.agent_id)
        expires_s = now_s + registration.lifetime_s
        agent_id = registration.agent_id or secrets.token_hex(16)
        agent = RegisteredAgent(
            agent_id=agent_id,
            access_key=access_key,
            peer=peer,
            regions=registration.regions,
            expires_s=expires_s,
            downlink_bytes_per_s=registration.downlink_bytes_per_s,
        )
        self._by_id[agent.agent_id] = agent
        return agent

    def renew(self, agent: RegisteredAgent, renewal: AgentRenewal, now_s: float) -> RegisteredAgent:
        """Extend a live agent; new regions replace the old ones."""
        renewed = replace(agent, expires_s=now_s + renewal.lifetime_s, regions=renewal.regions or agent.regions)
        self._by_id[agent.agent_id] = renewed
        return renewed

    def restrict(self, agent: RegisteredAgent, regions: Collection[Region]) -> None:
        """Keep only these regions: no new delivery may begin into any other. An agent whose lease was ended meanwhile
        stays ended, and one that was removed stays removed.
        """
        now = self._by_id.get(agent.agent_id)
        if now is not None:
            kept = tuple(region for region in now.regions if region in regions)
            self._by_id[agent.agent_id] = replace(now, regions=kept)

    def owned(self, access_key: str, agent_id: str, now_s: float, field: str) -> RegisteredAgent:
        """The live agent, which the caller owns. Raises CallerError: NoSuchAgent, AccessDenied (another key owns it),
        ExpiredToken.
        """
        agent = self._by_id.get(agent_id)
        if agent is None:
            raise CallerError(ErrorCode.NO_SUCH_AGENT, f"no agent {agent_id} is registered", field=field)
        if agent.access_key != access_key:
            raise CallerError(ErrorCode.ACCESS_DENIED, "the agent was registered by another access key", field=field)
        if agent.expires_s <= now_s:
            raise CallerError(ErrorCode.EXPIRED_TOKEN, "the agent's registration has expired", field=field)
        return agent

    def expire(self, agent_id: str) -> None:
        """End the lease now, because the client process is gone."""
        agent = self._by_id.get(agent_id)
        if agent is not None:
            self._by_id[agent_id] = replace(agent, expires_s=-math.inf)

    @property
    def agents(self) -> tuple[RegisteredAgent, ...]:
        """Every agent, live or expired."""
        return tuple(self._by_id.values())

    def expired(self, now_s: float) -> list[RegisteredAgent]:
        """Agents whose lease has ended."""
        return [agent for agent in self._by_id.values() if agent.expires_s <= now_s]

    def holder(self, peer: str) -> RegisteredAgent | None:
        """The agent that holds a NIXL name, live or expired; None when the name is free."""
        return next((agent for agent in self._by_id.values() if agent.peer == peer), None)


def target_region(agent: RegisteredAgent, target: RdmaTarget) -> Region:
    """The region a target names. Raises CallerError(InvalidDescriptor) when the target is not inside a region."""
    return region_span(agent, target.region_id, target.offset, target.length, "rdma_target")


def region_span(agent: RegisteredAgent, region_id: str, offset: int, length: int, field: str) -> Region:
    """The region that holds `length` bytes from `offset`. Raises CallerError(InvalidDescriptor) when no region does."""
    region = next((region for region in agent.regions if region.region_id == region_id), None)
    if region is None:
        raise CallerError(
            ErrorCode.INVALID_DESCRIPTOR,
            f"{field}.region_id: the agent has no region {region_id}",
            field=f"{field}.region_id",
        )
    if offset + length > region.length:
        raise CallerError(
            ErrorCode.INVALID_DESCRIPTOR,
            f"{field}: offset + length is {offset + length}, the region has {region.length} bytes",
            field=f"{field}.length",
        )
    return region
