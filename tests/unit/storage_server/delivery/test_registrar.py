"""Agents of a cluster have ids that its gateways give; everywhere else the server makes them."""

from __future__ import annotations

from typing import Any

import pytest

from descriptors.errors import CallerError, ErrorCode
from descriptors.messages import AgentRegistration, Region
from storage_server.agents.requests import RequestTable
from storage_server.agents.rules.agents import AgentTable
from storage_server.delivery.registrar import Registrar

REGIONS = (Region("region", 0, 4096),)


class PlayedTransport:
    """Counts connections. An agent's peer is its ticket."""

    def __init__(self) -> None:
        self.open: list[str] = []

    def peer_of(self, registration: AgentRegistration) -> str:
        return registration.shm_ticket or ""

    def check_replacing(self) -> None: ...

    async def connect(self, peer: str, registration: AgentRegistration) -> Any:
        self.open.append(peer)
        transport = self

        class Endpoint:
            async def close(self) -> None:
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
