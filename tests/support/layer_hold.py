"""A Destination wrapper that holds the payloads of later layers back until a test releases them.

The wrapper waits where a transfer is asked for room, because waiting there is asynchronous: a cancelled delivery stops
to wait at once, as it does while staging memory is full. A ChunkSource that blocks in `read_rows` could not be
cancelled, because a delivery must not end while a thread still writes into its memory. Waiting for room also covers
payloads that are resident in the DRAM tier and are never read.
"""

from __future__ import annotations

import asyncio
import threading

from descriptors.storage_api import DeliveryStart, Spans
from storage_server.delivery.transport.destination import Destination, Room, Transfer
from storage_server.planning.plan import DeliveryPlan, Payload, TargetWithGaps

POLL_S = 0.002


class LayerHold:
    """Which layers are held back now, for every delivery of one server. Used from the test's thread and the server's
    event loop.
    """

    def __init__(self) -> None:
        self._held: tuple[int, threading.Event] | None = None

    def hold_from(self, layer_index: int) -> threading.Event:
        """Hold every payload of this and later layers back until the event that is returned is set. A hold that was
        set before is replaced.
        """
        released = threading.Event()
        self._held = layer_index, released
        return released

    def wrap(self, destination: Destination) -> Destination:
        """The destination, whose transfers wait while their payload is held back."""
        return _HeldDestination(destination, self)

    async def passed(self, payload: Payload) -> None:
        """Wait until the payload is not held back any more."""
        while self._holds(payload):  # noqa: ASYNC110 - the event is set by another thread
            await asyncio.sleep(POLL_S)

    def _holds(self, payload: Payload) -> bool:
        if self._held is None:
            return False
        layer_index, released = self._held
        return payload.group.index >= layer_index and not released.is_set()


class _HeldDestination:
    def __init__(self, destination: Destination, hold: LayerHold) -> None:
        self._destination = destination
        self._hold = hold

    @property
    def transport(self) -> str:
        return self._destination.transport

    @property
    def past_cache(self) -> bool:
        return self._destination.past_cache

    def payload_bytes_max(self, *, is_resident: bool) -> int:
        return self._destination.payload_bytes_max(is_resident=is_resident)

    def uses_staging(self, *, is_resident: bool) -> bool:
        return self._destination.uses_staging(is_resident=is_resident)

    @property
    def landing(self) -> TargetWithGaps:
        return self._destination.landing

    def open(self, plan: DeliveryPlan) -> Transfer:
        return _HeldTransfer(self._destination.open(plan), self._hold)


class _HeldTransfer:
    def __init__(self, transfer: Transfer, hold: LayerHold) -> None:
        self._transfer = transfer
        self._hold = hold

    async def start(self, start: DeliveryStart) -> None:
        await self._transfer.start(start)

    async def room(self, payload: Payload, *, is_resident: bool) -> Room | None:
        await self._hold.passed(payload)
        return await self._transfer.room(payload, is_resident=is_resident)

    async def send(self, payload: Payload, spans: Spans, room: Room | None) -> None:
        await self._transfer.send(payload, spans, room)

    async def finish(self) -> int:
        return await self._transfer.finish()

    async def fail(self, layer_index: int, chunk_index: int, *, tells_client: bool) -> None:
        await self._transfer.fail(layer_index, chunk_index, tells_client=tells_client)

    async def close(self) -> None:
        await self._transfer.close()
