"""The shm transfer: payloads are gathered straight into the client's memory, and notices say when a layer is
complete.

There is nothing to send: what is gathered is there. Gathers end in order, so layers complete in order.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from descriptors.errors import ErrorCode, ServerError
from descriptors.notices import Done, Failed, LayerReady, Mode, encode_notice
from descriptors.storage_api import DeliveryStart, Spans
from storage_server.gather.plan import DeliveryPlan, Payload
from storage_server.transport.shm_door import ShmClient
from storage_server.transport.transfer import Room, admitted

AHEAD_MAX = 4


@dataclass(frozen=True, slots=True)
class _Place:
    """Some of the client's memory; `permits` bounds how many gathers are under way."""

    address: int
    permits: asyncio.Semaphore

    def release(self) -> None:
        self.permits.release()


class ShmTransfer:
    """Fills `address` and on of a client's shared memory."""

    def __init__(self, client: ShmClient, address: int, plan: DeliveryPlan) -> None:
        self._client = client
        self._address = address
        self._plan = plan
        self._permits = asyncio.Semaphore(AHEAD_MAX)
        self._request_id = ""
        self._sent_bytes = 0

    async def start(self, start: DeliveryStart) -> None:
        self._request_id = start.request_id
        self._require_client()
        self._client.notify(encode_notice(admitted(start)))

    async def room(self, payload: Payload, *, is_resident: bool) -> Room | None:
        await self._permits.acquire()
        return _Place(self._address + payload.target_offset, self._permits)

    async def send(self, payload: Payload, spans: Spans, room: Room | None) -> None:
        if room is not None:
            room.release()
        self._require_client()
        self._sent_bytes += payload.nbytes
        if payload.ends_group and self._plan.mode is Mode.LAYER_MAJOR:
            nbytes = self._plan.group_bytes
            ready = LayerReady(self._request_id, payload.group_index, payload.group_index * nbytes, nbytes)
            self._client.notify(encode_notice(ready))

    async def finish(self) -> int:
        self._client.notify(encode_notice(Done(self._request_id, self._sent_bytes)))
        return self._sent_bytes

    async def fail(self, layer_index: int, chunk_index: int) -> None:
        self._client.notify(encode_notice(Failed(self._request_id, layer_index, chunk_index)))

    async def close(self) -> None:
        """The pipeline has waited for every gather."""

    def _require_client(self) -> None:
        if self._client.is_gone:
            raise ServerError(ErrorCode.TARGET_UNREACHABLE, "the client is gone", field="rdma_target")
