"""The shm transport: payloads are gathered straight into the client's memory, and notices say when a layer is complete.

Nothing is sent: a gathered payload is in its final place. Gathers end in order, so layers complete in order.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from descriptors.errors import ErrorCode, ServerError
from descriptors.notices import Done, Failed, LayerReady, Mode, encode_notice
from descriptors.storage_api import DeliveryStart, Spans
from storage_server.delivery.transport.destination import Room, admitted
from storage_server.delivery.transport.shm_door import ShmClient
from storage_server.planning.plan import DeliveryPlan, Payload, TargetWithGaps

AHEAD_MAX = 4


@dataclass(frozen=True, slots=True)
class ShmDestination:
    """A client's shared memory from `address` on. The memory is mapped into this process."""

    client: ShmClient
    address: int
    payload_bytes: int

    @property
    def transport(self) -> str:
        return "shm"

    @property
    def past_cache(self) -> bool:
        """True, because only the client reads the gathered bytes."""
        return True

    def payload_bytes_max(self, *, is_resident: bool) -> int:
        """`payload_bytes`: there is no slot that bounds a payload."""
        return self.payload_bytes

    def uses_staging(self, *, is_resident: bool) -> bool:
        """False, because payloads are gathered into the client's own memory."""
        return False

    @property
    def landing(self) -> TargetWithGaps:
        """Slices that lie apart are gathered at once."""
        return TargetWithGaps(is_packed=False, is_scattered=True)

    def open(self, plan: DeliveryPlan) -> ShmTransfer:
        """The transfer into this memory. It takes the size of a layer from the plan."""
        return ShmTransfer(self.client, self.address, plan)


@dataclass(frozen=True, slots=True)
class _ClientRoom:
    """A place in the client's memory. `permits` bounds how many gathers are under way."""

    address: int
    permits: asyncio.Semaphore

    def release(self) -> None:
        self.permits.release()


class ShmTransfer:
    """Fills a client's shared memory from `address` on."""

    def __init__(self, client: ShmClient, address: int, plan: DeliveryPlan) -> None:
        self._client = client
        self._address = address
        self._plan = plan
        self._permits = asyncio.Semaphore(AHEAD_MAX)
        self._request_id = ""
        self._portion = (0, 1)
        self._sent_bytes = 0

    async def start(self, start: DeliveryStart) -> None:
        self._request_id, self._portion = start.request_id, (start.portion, start.portions)
        self._require_client()
        for notice in admitted(start):
            self._client.notify(encode_notice(notice))

    async def room(self, payload: Payload, *, is_resident: bool) -> Room | None:
        await self._permits.acquire()
        return _ClientRoom(self._address + payload.target_offset, self._permits)

    async def send(self, payload: Payload, spans: Spans, room: Room | None) -> None:
        if room is not None:
            room.release()
        self._require_client()
        self._sent_bytes += payload.nbytes
        if payload.ends_group and self._plan.mode is Mode.LAYER_MAJOR:
            layer = payload.group
            ready = LayerReady(self._request_id, layer.index, layer.target_offset, layer.nbytes, *self._portion)
            self._client.notify(encode_notice(ready))

    async def finish(self) -> int:
        self._client.notify(encode_notice(Done(self._request_id, self._sent_bytes, *self._portion)))
        return self._sent_bytes

    async def fail(self, layer_index: int, chunk_index: int, *, tells_client: bool) -> None:
        if tells_client:
            self._client.notify(encode_notice(Failed(self._request_id, layer_index, chunk_index, *self._portion)))

    async def close(self) -> None:
        """Do nothing: the pipeline has waited for every gather."""

    def _require_client(self) -> None:
        if self._client.is_gone:
            raise ServerError(ErrorCode.TARGET_UNREACHABLE, "the client is gone", field="rdma_target")
