"""One registration of a client's memory that several members take, be they of the release before."""

from __future__ import annotations

from descriptors.errors import CallerError, ErrorCode
from descriptors.messages import AgentLease, AgentRegistration, Region
from gateway.cluster.agents import ClusterAgents
from gateway.cluster.members import Members
from tests.unit.gateway.cluster.test_hedging import A, B, PlayedMembership


class PlayedMember:
    """Keeps what it was asked to register; `knows_downlinks` is whether it takes the field."""

    def __init__(self) -> None:
        self.agents = self
        self.knows_downlinks = True
        self.registered: list[AgentRegistration] = []

    async def start(self) -> None: ...

    async def register_agent(self, access_key: str, registration: AgentRegistration) -> AgentLease:
        if registration.downlink_bytes_per_s is not None and not self.knows_downlinks:
            field = "downlink_bytes_per_s"
            raise CallerError(ErrorCode.INVALID_ARGUMENT, f"{field} is not a field of version 1", field=field)
        self.registered.append(registration)
        return AgentLease(registration.agent_id or "", 1.0)


async def test_a_member_of_the_release_before_registers_an_agent_without_its_downlink() -> None:
    storages = {A.endpoint: PlayedMember(), B.endpoint: PlayedMember()}
    storages[B.endpoint].knows_downlinks = False
    members = Members(PlayedMembership(A, B), storages.__getitem__)  # type: ignore[arg-type]
    registration = AgentRegistration(b"m", (Region("r", 0, 1),), 60.0, downlink_bytes_per_s=1e9)
    lease = await ClusterAgents(members).register_agent("key", registration)
    assert set(lease.members) == {A.id, B.id}
    told = [storages[member.endpoint].registered[0].downlink_bytes_per_s for member in (A, B)]
    assert told == [1e9, None]
