"""The interface between the pipeline and a transport: one Transfer carries one delivery to one client."""

from __future__ import annotations

from typing import Protocol

from descriptors.storage_api import DeliveryStart
from storage_server.gather.plan import Payload
from storage_server.gather.staging import Slot
from storage_server.scheduler.admission import Grant


class Transfer(Protocol):
    """Calls come in this order: `start`, `send` for every payload of the plan, `finish` or `fail`; `close` always.

    Every method may raise ServerError(TargetUnreachable) once the client is gone.
    """

    async def start(self, start: DeliveryStart, grant: Grant) -> None:
        """Say what is coming."""

    async def send(self, payload: Payload, slot: Slot) -> None:
        """Carry the payload in `slot`; the transfer releases the slot when its memory may be used again."""

    async def finish(self) -> int:
        """Wait until every byte is there and say so; how many the transport itself counted."""

    async def fail(self, layer_index: int, chunk_index: int) -> None:
        """Say that nothing from this layer on will come, once nothing is in flight."""

    async def close(self) -> None:
        """Return when nothing is in flight and every slot is back; after `finish` there is nothing to do."""
