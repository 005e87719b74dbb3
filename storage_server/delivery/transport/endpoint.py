"""The interface between the registrar and the transports that write to clients' memory: `shm` and `ucx`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from descriptors.messages import AgentRegistration, AgentRenewal, Region
from storage_server.delivery.transport.destination import Destination
from storage_server.delivery.transport.one_sided import OneSided

StopOutside = Callable[[Sequence[Region]], Awaitable[None]]
"""Stops and drains every request in memory of the agent outside these regions."""


class Endpoint(Protocol):
    """One registered agent, as its transport reaches it."""

    def destination(self, access_key: str, region: Region, offset: int) -> Destination:
        """The destination of a delivery to `offset` of the region. Raises CallerError(NoSuchAgent) and
        ServerError(SlowDown) where the agent cannot be reached now.
        """

    def require_one_sided(self) -> None:
        """Raises CallerError(NotImplemented) where the transport has no one-sided writes and reads."""

    def open_one_sided(self, region: Region, offset: int) -> OneSided:
        """Open one-sided writes and reads from `offset` of the region on. Raises what `require_one_sided` raises, and
        ServerError(SlowDown) where the agent cannot be reached now.
        """

    def check_renewal(self, renewal: AgentRenewal) -> None:
        """Raises CallerError(InvalidArgument) for a renewal that this agent's transport does not allow."""

    async def renew(self, renewal: AgentRenewal, stop_outside: StopOutside) -> None:
        """Replace the agent's regions by those of the renewal. Raises CallerError."""

    async def close(self) -> None:
        """Disconnect the agent. Nothing may be in flight."""


class AgentTransport(Protocol):
    """Makes endpoints. An agent's *peer* is its name at its transport: its NIXL name, or its connection's ticket."""

    def peer_of(self, registration: AgentRegistration) -> str:
        """The peer of a registration. Raises CallerError(InvalidArgument) where the registration names none."""

    def check_replacing(self) -> None:
        """Raises CallerError(AgentConflict) where a peer can be registered only once."""

    async def connect(self, peer: str, registration: AgentRegistration) -> Endpoint:
        """Connect the agent. Raises CallerError where that cannot be done."""
