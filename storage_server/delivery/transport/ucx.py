"""The ucx transport: one-sided writes into the client's registered memory, and a notice when a layer is complete.

The client gets the notice of a layer only after NIXL has reported every payload of that layer done, so no notice can
overtake its bytes; the ucx process ensures this. `done` and `failed` are sent only when nothing is in flight. After
either notice the client may use its memory again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from descriptors.messages import Region
from descriptors.notices import Done, Failed, LayerReady, Mode, Notice, encode_notice
from descriptors.storage_api import DeliveryStart, Spans
from objectcache.adapters.nixl_agent import NixlFailure
from objectcache.adapters.nixl_memory import Memory
from storage_server.delivery.gather.staging import SlotWindow
from storage_server.delivery.transport.destination import PayloadLimits, Room, admitted
from storage_server.delivery.transport.flight import Flight
from storage_server.delivery.transport.rules.ucx_commands import WriteGroup
from storage_server.delivery.transport.ucx_process import UcxProcess
from storage_server.planning.plan import DeliveryPlan, Payload, TargetWithGaps

DIRECT_WRITES_MAX = 4


@dataclass(frozen=True, slots=True)
class UcxDestination:
    """The memory from `offset` of a peer's `region` on. With `is_direct` resident chunks are written from the DRAM
    tier; all others go through the window's slots.
    """

    engine: UcxProcess
    peer: str
    region: Region
    offset: int
    window: SlotWindow
    limits: PayloadLimits
    is_direct: bool
    open_flight: Callable[[], Flight]

    @property
    def transport(self) -> str:
        return "ucx"

    @property
    def past_cache(self) -> bool:
        """False, because the ucx process reads every byte when it writes the byte to the client."""
        return False

    def payload_bytes_max(self, *, is_resident: bool) -> int:
        """The size of a slot; a payload written straight from the DRAM tier needs no slot, so it may be larger."""
        return self.limits.direct_bytes if is_resident and self.is_direct else self.limits.staged_bytes

    def uses_staging(self, *, is_resident: bool) -> bool:
        """Whether the payload is staged: every payload is, except one written straight from the DRAM tier."""
        return not (is_resident and self.is_direct)

    @property
    def landing(self) -> TargetWithGaps:
        """Slices that lie apart are gathered one after the other, and written by one transfer of many pieces."""
        return TargetWithGaps(is_packed=False, is_scattered=True, gathers_packed=True)

    def open(self, plan: DeliveryPlan) -> UcxTransfer:
        """The transfer into this memory. It takes the size of a layer from the plan."""
        return UcxTransfer(self, plan, self.open_flight())


class UcxTransfer:
    """Writes to a UcxDestination, with up to DIRECT_WRITES_MAX payloads at once straight from the DRAM tier. Used on
    one event loop.
    """

    def __init__(self, destination: UcxDestination, plan: DeliveryPlan, flight: Flight) -> None:
        self._to = destination
        self._engine = destination.engine
        self._plan = plan
        self._flight = flight
        self._base_address = destination.region.address + destination.offset
        self._permits = asyncio.Semaphore(DIRECT_WRITES_MAX)
        self._request_id = ""
        self._portion = (0, 1)
        self._flight_number = self._engine.begin_flight()

    async def start(self, start: DeliveryStart) -> None:
        self._request_id, self._portion = start.request_id, (start.portion, start.portions)
        for notice in admitted(start):
            self._notify(notice)

    async def room(self, payload: Payload, *, is_resident: bool) -> Room | None:
        if is_resident and self._to.is_direct:
            return None
        return await self._to.window.take()

    async def send(self, payload: Payload, spans: Spans, room: Room | None) -> None:
        try:
            self._flight.require_reachable()
        except BaseException:
            if room is not None:
                room.release()
            raise
        device = self._to.region.device
        targets = [Memory(self._base_address + offset, nbytes, device) for offset, nbytes in payload.written_runs()]
        if room is None:
            await self._permits.acquire()
        release = self._permits.release if room is None else room.release
        group = WriteGroup(self._flight_number, payload.group.index, payload.ends_group, self._ready_notice(payload))

        def on_written(counted: int, failure: NixlFailure | None) -> None:
            release()
            self._flight.ended(counted, failure)

        self._flight.began()
        self._engine.write(self._to.peer, spans, targets, group, on_written)

    async def finish(self) -> int:
        moved_bytes = await self._flight.finish()
        self._notify(Done(self._request_id, moved_bytes, *self._portion))
        return moved_bytes

    async def fail(self, layer_index: int, chunk_index: int, *, tells_client: bool) -> None:
        await self._flight.landed()
        if self._flight.failure is None and tells_client:
            self._notify(Failed(self._request_id, layer_index, chunk_index, *self._portion))

    async def close(self) -> None:
        try:
            await self._flight.close()
        finally:
            self._engine.end_flight(self._flight_number)

    def _ready_notice(self, payload: Payload) -> bytes:
        """The notice for the client when the payload's layer is complete; empty in chunk-major mode."""
        if self._plan.mode is not Mode.LAYER_MAJOR:
            return b""
        layer = payload.group
        return encode_notice(
            LayerReady(self._request_id, layer.index, layer.target_offset, layer.nbytes, *self._portion)
        )

    def _notify(self, notice: Notice) -> None:
        self._engine.notify(self._to.peer, encode_notice(notice))
