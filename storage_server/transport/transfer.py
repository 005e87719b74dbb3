"""The interface between the pipeline and a transport: one Transfer carries one delivery to one client."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from descriptors.notices import Admitted
from descriptors.storage_api import DeliveryStart, Spans
from storage_server.gather.plan import DeliveryPlan, Payload


class Room(Protocol):
    """Memory a payload is gathered into."""

    @property
    def address(self) -> int: ...

    def release(self) -> None:
        """Nobody uses it any more; later calls do nothing."""


class Transfer(Protocol):
    """Calls come in this order: `start`, then `room` and `send` for every payload of the plan, `finish` or `fail`;
    `close` always. Rooms may be asked for ahead of the sends.

    Every method may raise ServerError(TargetUnreachable) once the client is gone.
    """

    async def start(self, start: DeliveryStart) -> None:
        """Say what is coming."""

    async def room(self, payload: Payload, *, is_resident: bool) -> Room | None:
        """Where to gather the payload; None, possible only where all of it is resident, to send it from where it is."""

    async def send(self, payload: Payload, spans: Spans, room: Room | None) -> None:
        """Carry the payload, which lies in `spans`; the room is released when its memory may be used again."""

    async def finish(self) -> int:
        """Wait until every byte is there and say so; how many the transport itself counted."""

    async def fail(self, layer_index: int, chunk_index: int) -> None:
        """Say that nothing from this layer on will come, once nothing is in flight."""

    async def close(self) -> None:
        """Return when nothing is in flight and every room is back; after `finish` there is nothing to do."""


def admitted(start: DeliveryStart) -> Admitted:
    """What a client's agent is told before the first layer."""
    grant = start.grant
    return Admitted(start.request_id, start.mode, start.chunk_count, grant.rate_bytes_per_s, grant.epoch)


@dataclass(frozen=True, slots=True)
class Route:
    """How a delivery will go: in payloads of up to `staged_bytes_max`, or `direct_bytes_max` where every chunk is in
    memory and nothing need be staged; `past_cache` where nobody here reads what was gathered. `stages` and
    `stages_resident` say whether payloads lie in our own memory until they have gone.
    """

    make_transfer: Callable[[DeliveryPlan], Transfer]
    staged_bytes_max: int
    direct_bytes_max: int
    past_cache: bool = False
    stages: bool = True
    stages_resident: bool = False

    def payload_bytes_max(self, *, is_resident: bool) -> int:
        """How large payloads may be."""
        return self.direct_bytes_max if is_resident else self.staged_bytes_max

    def is_staged(self, *, is_resident: bool) -> bool:
        """Whether payloads take memory that others need."""
        return self.stages_resident if is_resident else self.stages
