"""Agents on this host, whose memory is mapped into this process: registering, renewing, removing."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import NoReturn

from descriptors.errors import CallerError, ErrorCode
from descriptors.messages import AgentRegistration, AgentRenewal, Region
from storage_server.delivery.transport.endpoint import StopOutside
from storage_server.delivery.transport.shared_region import OfferError
from storage_server.delivery.transport.shm import ShmDestination
from storage_server.delivery.transport.shm_door import ShmClient, ShmDoor

_log = logging.getLogger(__name__)


class ShmAgents:
    """The AgentTransport over a ShmDoor. `payload_bytes` is the size of payloads. `on_gone` is called with the ticket
    of a client whose connection has ended, and returns whether an agent is registered for it. If so, the client's
    memory is unmapped when that agent ends.
    """

    def __init__(self, payload_bytes: int, on_gone: Callable[[str], bool], users: Iterable[int] = ()) -> None:
        self.door = ShmDoor(self._client_gone, users)
        self.payload_bytes = payload_bytes
        self._on_gone = on_gone

    def start(self) -> bool:
        """Open the door. Returns False, and logs the reason, where memory cannot be mapped safely on this host."""
        try:
            self.door.start()
        except OSError as error:
            _log.warning("the shm transport is off: %s (it needs userfaultfd; containers must be given it)", error)
            return False
        return True

    async def close(self) -> None:
        """Close every connection. Deliveries must have ended."""
        await self.door.close()

    def peer_of(self, registration: AgentRegistration) -> str:
        """The ticket that the client got on its connection."""
        return registration.shm_ticket or ""

    def check_replacing(self) -> None:
        """Raises CallerError(AgentConflict), because a ticket is used once."""
        raise CallerError(ErrorCode.AGENT_CONFLICT, "the ticket is registered already", field="shm_ticket")

    async def connect(self, peer: str, registration: AgentRegistration) -> ShmEndpoint:
        """Map the regions that the client has handed in."""
        client = self.connected(peer, "shm_ticket")
        check_handed_in(client, registration.regions)
        await self.map(client, registration.regions)
        client.is_registered = True
        return ShmEndpoint(self, peer)

    def _client_gone(self, ticket: str) -> None:
        if not self._on_gone(ticket):
            self.door.dismiss(ticket)

    def connected(self, ticket: str, field: str) -> ShmClient:
        """The connection of a ticket. Raises CallerError(NoSuchAgent) when the connection has ended."""
        client = self.door.client(ticket)
        if client is None:
            raise CallerError(ErrorCode.NO_SUCH_AGENT, "no such connection to this storage server", field=field)
        return client

    async def map(self, client: ShmClient, regions: Sequence[Region]) -> None:
        """Map regions. Raises CallerError: InvalidArgument for memory that cannot be mapped, NoSuchAgent when the
        client is gone.
        """
        try:
            await self.door.map(client, regions)
        except ConnectionError as error:
            raise CallerError(ErrorCode.NO_SUCH_AGENT, "the connection has ended", field="shm_ticket") from error
        except (OfferError, OSError) as error:
            problem = f"the memory cannot be used: {error}"
            raise CallerError(ErrorCode.INVALID_ARGUMENT, problem, field="regions") from error


class ShmEndpoint:
    """One client's connection and its mapped memory."""

    def __init__(self, agents: ShmAgents, ticket: str) -> None:
        self._agents = agents
        self._ticket = ticket

    def destination(self, access_key: str, region: Region, offset: int) -> ShmDestination:
        """The place of the region in this process's memory."""
        client = self._agents.connected(self._ticket, "rdma_target.agent_id")
        address = client.regions[region.region_id].address + offset
        return ShmDestination(client, address, self._agents.payload_bytes)

    def require_one_sided(self) -> None:
        """Raises CallerError(NotImplemented), because shm has no one-sided transfers."""
        problem = "the agent's memory is shared, not registered with NIXL: move the objects one by one"
        raise CallerError(ErrorCode.NOT_IMPLEMENTED, problem, field="rdma_target")

    def open_one_sided(self, region: Region, offset: int) -> NoReturn:
        """Raises CallerError(NotImplemented), because shm has no one-sided transfers."""
        self.require_one_sided()
        raise AssertionError

    def check_renewal(self, renewal: AgentRenewal) -> None:
        """Raises CallerError(InvalidArgument) where more than the regions would change."""
        if renewal.metadata is not None:
            raise CallerError(ErrorCode.INVALID_ARGUMENT, "the agent is not a NIXL agent", field="metadata")

    async def renew(self, renewal: AgentRenewal, stop_outside: StopOutside) -> None:
        """Map the new regions; unmap regions that are not offered any more, once nothing is written there."""
        client = self._agents.connected(self._ticket, "agent_id")
        check_handed_in(client, renewal.regions)
        await self._agents.map(client, renewal.regions)
        await stop_outside(renewal.regions)
        offered = {region.region_id for region in renewal.regions}
        for region_id in [region_id for region_id in client.regions if region_id not in offered]:
            client.forget(region_id)

    async def close(self) -> None:
        """Unmap every region and close the connection."""
        self._agents.door.dismiss(self._ticket)


def check_handed_in(client: ShmClient, regions: Sequence[Region]) -> None:
    """Raises CallerError(InvalidArgument) for a region that was not handed in, or was handed in with another length."""
    for index, region in enumerate(regions):
        if not client.knows(region):
            raise CallerError(
                ErrorCode.INVALID_ARGUMENT,
                f"regions[{index}] differs from the region handed in over the socket",
                field=f"regions[{index}].region_id",
            )
