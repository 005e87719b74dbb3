"""NIXL agents, which are reached through the ucx process: registering, renewing, removing."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Sequence

from descriptors.errors import CallerError, ErrorCode, ServerError
from descriptors.messages import AgentRegistration, AgentRenewal, Region
from objectcache.adapters.interfaces import ucx_devices
from objectcache.adapters.nixl_agent import NixlFailure, writes_pieces_well
from objectcache.adapters.nixl_memory import Memory
from objectcache.adapters.nixl_metadata import agent_name
from objectcache.adapters.threads import to_end
from storage_server.delivery.gather.staging import SlotWindow
from storage_server.delivery.transport.destination import PayloadLimits
from storage_server.delivery.transport.endpoint import StopOutside
from storage_server.delivery.transport.flight import Flight
from storage_server.delivery.transport.metadata_probe import MetadataProbe
from storage_server.delivery.transport.one_sided import OneSided
from storage_server.delivery.transport.ucx import UcxDestination
from storage_server.delivery.transport.ucx_child import ucx_environment
from storage_server.delivery.transport.ucx_memory import UcxMemory
from storage_server.delivery.transport.ucx_process import UcxProcess
from storage_server.settings import StorageSettings


class UcxAgents:
    """The AgentTransport over the ucx process. `on_gone` is called with each peer that cannot be reached any more."""

    def __init__(self, settings: StorageSettings, on_gone: Callable[[str], None]) -> None:
        self._settings = settings
        self._on_gone = on_gone
        self._peers: set[str] = set()
        self._window_slots = settings.window_bytes // settings.aggregation_bytes
        self.memory = UcxMemory(settings)
        self.engine: UcxProcess | None = None
        self._probe: MetadataProbe | None = None

    async def start(self) -> None:
        """Start the ucx process and the probe. Raises NixlFailure, UnknownInterfaceError where UCX cannot run here."""
        devices = ucx_devices(self._settings.ucx)
        self.engine = UcxProcess(self.memory.areas, devices, self._engine_gone)
        await self.engine.start()
        self._probe = MetadataProbe(ucx_environment(os.environ, devices))
        self._probe.start()

    async def close(self) -> None:
        """End both processes. The memory stays as long as anything maps it."""
        if self._probe is not None:
            await self._probe.close()
        if self.engine is not None:
            await self.engine.stop()
        self.memory.close()

    @property
    def is_running(self) -> bool:
        """Whether agents can be reached now."""
        return self.engine is not None and self.engine.is_running

    def peer_of(self, registration: AgentRegistration) -> str:
        """The NIXL agent's name, read from its metadata."""
        self.require_engine()
        return _nixl_name(registration.metadata)

    def check_replacing(self) -> None:
        """Allow it: an agent registers again under its name when it has more memory to offer."""

    async def connect(self, peer: str, registration: AgentRegistration) -> UcxEndpoint:
        """Make the agent known to the ucx process, by its metadata."""
        await self.load(peer, registration.metadata, registration.regions)
        self._peers.add(peer)
        is_direct = self._settings.ucx_maps_dram and writes_pieces_well(registration.host_id)
        return UcxEndpoint(self, peer, is_direct=is_direct)

    async def load(self, peer: str, metadata: bytes, regions: Sequence[Region]) -> None:
        """Check metadata and load it. Raises CallerError(InvalidArgument) for metadata that does not
        fit these regions.
        """
        offered = [Memory(region.address, region.length, region.device) for region in regions]
        try:
            if self._probe is not None:
                await self._probe.check(metadata, offered)
            await self.require_engine().add_peer(peer, metadata, offered)
        except NixlFailure as failure:
            raise CallerError(
                ErrorCode.INVALID_ARGUMENT, f"metadata cannot be used for these regions: {failure}", field="metadata"
            ) from failure

    async def forget(self, peer: str) -> None:
        """Disconnect a peer. Nothing may be in flight."""
        self._peers.discard(peer)
        if self.engine is not None:
            with contextlib.suppress(NixlFailure):  # a process that has ended has no peers
                await to_end(asyncio.ensure_future(self.engine.remove_peer(peer)))

    def require_engine(self) -> UcxProcess:
        """The running ucx process. Raises ServerError(SlowDown) while the process is being started."""
        if self.engine is None or not self.engine.is_running:
            raise ServerError(ErrorCode.SLOW_DOWN, "the ucx process is being started again", retryable=True)
        return self.engine

    def open_flight(self, peer: str) -> Flight:
        """A flight for one request's transfers with the peer."""
        return Flight(self.require_engine(), peer, self._settings.stall_timeout_s, lambda: self._on_gone(peer))

    @property
    def limits(self) -> PayloadLimits:
        """The sizes of the largest payloads."""
        return PayloadLimits(self._settings.aggregation_bytes, self._settings.direct_payload_bytes)

    def window(self, access_key: str) -> SlotWindow:
        """The slots that a new delivery of the access key may hold."""
        return self.memory.staging.window(access_key, self._window_slots)

    def _engine_gone(self) -> None:
        """Report every peer as gone: all connections ended with the process, so agents must register anew."""
        peers, self._peers = self._peers, set()
        for peer in peers:
            self._on_gone(peer)


class UcxEndpoint:
    """One NIXL agent. With `is_direct` resident chunks are written to it straight from the DRAM tier."""

    def __init__(self, agents: UcxAgents, peer: str, *, is_direct: bool) -> None:
        self._agents = agents
        self._peer = peer
        self._is_direct = is_direct

    def destination(self, access_key: str, region: Region, offset: int) -> UcxDestination:
        """A place in the agent's registered memory."""
        agents = self._agents
        return UcxDestination(
            engine=agents.require_engine(),
            peer=self._peer,
            region=region,
            offset=offset,
            window=agents.window(access_key),
            limits=agents.limits,
            is_direct=self._is_direct,
            open_flight=lambda: agents.open_flight(self._peer),
        )

    def require_one_sided(self) -> None:
        """Allow it: NIXL has one-sided transfers."""

    def open_one_sided(self, region: Region, offset: int) -> OneSided:
        """Open one-sided writes and reads, which the ucx process carries out."""
        flight = self._agents.open_flight(self._peer)
        return OneSided(self._agents.require_engine(), self._peer, region, offset, flight)

    def check_renewal(self, renewal: AgentRenewal) -> None:
        """Raises CallerError(InvalidArgument) unless regions and metadata come together, from the same NIXL agent."""
        if renewal.metadata is None:
            if renewal.regions:
                problem = "regions and metadata are renewed together"
                raise CallerError(ErrorCode.INVALID_ARGUMENT, problem, field="regions")
        elif _nixl_name(renewal.metadata) != self._peer:
            raise CallerError(
                ErrorCode.INVALID_ARGUMENT, "the metadata is that of another NIXL agent", field="metadata"
            )

    async def renew(self, renewal: AgentRenewal, stop_outside: StopOutside) -> None:
        """Load the new metadata, once nothing is written outside the new regions."""
        await stop_outside(renewal.regions)
        if renewal.metadata is not None:
            await self._agents.load(self._peer, renewal.metadata, renewal.regions)

    async def close(self) -> None:
        """Disconnect the agent."""
        await self._agents.forget(self._peer)


def _nixl_name(metadata: bytes) -> str:
    try:
        return agent_name(metadata)
    except ValueError as error:
        raise CallerError(ErrorCode.INVALID_ARGUMENT, f"metadata: {error}", field="metadata") from None
