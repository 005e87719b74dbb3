"""Agents of a cluster have ids that its gateways give; everywhere else the server makes them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from descriptors.errors import CallerError, ErrorCode, ServerError
from descriptors.messages import AgentRegistration, AgentRenewal, Region
from storage_server.agents.requests import RequestTable
from storage_server.agents.rules import agents
from storage_server.agents.rules.agents import AgentTable
from storage_server.delivery.registrar import Registrar
from storage_server.delivery.transport.endpoint import StopOutside
from tests.support.waiting import settled

REGIONS = (Region("region", 0, 4096),)


class PlayedTransport:
    """Counts connections. An agent's peer is its ticket."""

    def __init__(self) -> None:
        self.open: list[str] = []
        self.regions: dict[str, tuple[Region, ...]] = {}
        self.may_go_on = asyncio.Event()
        self.may_go_on.set()

    def peer_of(self, registration: AgentRegistration) -> str:
        return registration.shm_ticket or ""

    def check_replacing(self) -> None: ...

    async def connect(self, peer: str, registration: AgentRegistration) -> Any:
        transport = self
        await transport.may_go_on.wait()
        self.open.append(peer)
        self.regions[peer] = registration.regions

        class Endpoint:
            def check_renewal(self, renewal: AgentRenewal) -> None: ...

            async def renew(self, renewal: AgentRenewal, stop_outside: StopOutside) -> None:
                await stop_outside(renewal.regions)
                await transport.may_go_on.wait()
                transport.regions[peer] = renewal.regions

            async def close(self) -> None:
                await transport.may_go_on.wait()
                transport.open.remove(peer)

        return Endpoint()


def made(*, takes_ids: bool) -> tuple[Registrar, PlayedTransport]:
    registrar, transport = Registrar(AgentTable(2), RequestTable(), takes_ids=takes_ids), PlayedTransport()
    registrar.start(None, transport)  # type: ignore[arg-type]
    return registrar, transport


def registration(ticket: str, **options: Any) -> AgentRegistration:
    return AgentRegistration(b"", REGIONS, 60.0, ticket, **options)


@pytest.mark.parametrize(
    "options", [{"agent_id": "chosen"}, {"members": ("a.1",)}, {"shm_tickets": {"a.1": "ticket"}}], ids=str
)
async def test_a_service_that_is_no_cluster_takes_no_ids_from_outside(options: dict[str, Any]) -> None:
    registrar, transport = made(takes_ids=False)
    with pytest.raises(CallerError) as refused:
        await registrar.register_agent("key", registration("ticket", **options))
    assert (refused.value.code, refused.value.field) == (ErrorCode.INVALID_ARGUMENT, "agent_id")
    assert transport.open == []


async def test_an_id_that_is_in_use_costs_no_connection() -> None:
    """Otherwise one key could map memory without end, of which no table knows."""
    registrar, transport = made(takes_ids=True)
    lease = await registrar.register_agent("key", registration("first", agent_id="chosen"))
    assert lease.agent_id == "chosen"
    for access_key in ("key", "other"):
        with pytest.raises(CallerError) as refused:
            await registrar.register_agent(access_key, registration("second", agent_id="chosen"))
        assert refused.value.code is ErrorCode.AGENT_CONFLICT
    assert transport.open == ["first"]
    assert len(registrar.table) == 1


def regions(count: int) -> tuple[Region, ...]:
    return tuple(Region(f"region{index}", 0, 4096) for index in range(count))


async def test_a_renewal_whose_caller_is_gone_is_carried_out() -> None:
    """Between its steps the table has other regions than the transport: a renewal that ends there leaves memory mapped
    that nobody counts.
    """
    registrar, transport = made(takes_ids=False)
    lease = await registrar.register_agent("key", registration("ticket"))
    transport.may_go_on.clear()
    renewing = asyncio.ensure_future(registrar.renew_agent("key", lease.agent_id, AgentRenewal(60.0, None, regions(3))))
    await settled()
    renewing.cancel()
    await settled()
    transport.may_go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await renewing
    (agent,) = registrar.table.agents
    assert agent.regions == transport.regions["ticket"] == regions(3)


async def test_an_agent_whose_deleting_caller_is_gone_is_forgotten_whole() -> None:
    """Its memory would stay mapped, and count for nobody, as long as its connection stays."""
    registrar, transport = made(takes_ids=False)
    lease = await registrar.register_agent("key", registration("ticket"))
    transport.may_go_on.clear()
    deleting = asyncio.ensure_future(registrar.delete_agent("key", lease.agent_id))
    await settled()
    deleting.cancel()
    transport.may_go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await deleting
    assert transport.open == []


async def test_renewals_at_once_count_before_they_are_carried_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them alone is within the bound."""
    monkeypatch.setattr(agents, "KEY_REGIONS_MAX", 6)
    registrar, transport = made(takes_ids=False)
    first, second = [await registrar.register_agent("key", registration(ticket)) for ticket in ("first", "second")]
    transport.may_go_on.clear()
    renewing = asyncio.ensure_future(registrar.renew_agent("key", first.agent_id, AgentRenewal(60.0, None, regions(4))))
    await settled()
    with pytest.raises(ServerError) as refused:
        await registrar.renew_agent("key", second.agent_id, AgentRenewal(60.0, None, regions(3)))
    assert refused.value.code is ErrorCode.SLOW_DOWN
    transport.may_go_on.set()
    await renewing
    await registrar.renew_agent("key", second.agent_id, AgentRenewal(60.0, None, regions(2)))
    assert registrar.table.region_count == 6


async def test_regions_count_until_they_are_unmapped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise deleting and registering again would map more than the bound while requests drain."""
    monkeypatch.setattr(agents, "KEY_REGIONS_MAX", 1)
    registrar, transport = made(takes_ids=False)
    lease = await registrar.register_agent("key", registration("first"))
    transport.may_go_on.clear()
    deleting = asyncio.ensure_future(registrar.delete_agent("key", lease.agent_id))
    await settled()
    with pytest.raises(ServerError):
        await registrar.register_agent("key", registration("second"))
    transport.may_go_on.set()
    await deleting
    await registrar.register_agent("key", registration("second"))


async def test_a_client_that_goes_while_its_memory_is_mapped_stays_expired() -> None:
    """Nobody would unmap the regions of a client that is gone before the lease that it once had has ended."""
    registrar, _ = made(takes_ids=False)
    lease = await registrar.register_agent("key", registration("ticket"))
    agent = registrar.table.owned("key", lease.agent_id, 0.0, "agent_id")
    assert registrar.client_gone("ticket")
    registrar.table.restrict(agent, REGIONS)
    assert [each.agent_id for each in registrar.table.expired(0.0)] == [lease.agent_id]
