"""The interface between the pipeline and a transport: a Destination for one delivery, and the Transfer that carries it.

A `Destination` is made for one request, before anything is planned: by `HttpDestination` for the body of an answer, by
an agent's `Endpoint` for memory that a client registered. Its `Transfer` then carries the planned payloads. `http`,
`shm` and `ucx` implement both; tests/contract/test_transfer.py runs the same tests against each.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from descriptors.notices import Admitted, Forms, Notice
from descriptors.storage_api import DeliveryStart, Spans
from storage_server.planning.plan import DeliveryPlan, Payload, TargetWithGaps


class Room(Protocol):
    """Memory that one payload is gathered into."""

    @property
    def address(self) -> int: ...

    def release(self) -> None:
        """Say that nobody uses the memory any more. Later calls do nothing."""


class Transfer(Protocol):
    """Carries the payloads of one delivery. Calls come in this order: `start`, then `room` and `send` for every payload
    of the plan, then `finish` or `fail`, and `close` always last. Rooms may be asked for ahead of the sends.

    Every method may raise ServerError(TargetUnreachable) once the client is gone.
    """

    async def start(self, start: DeliveryStart) -> None:
        """Tell the client what the delivery will bring."""

    async def room(self, payload: Payload, *, is_resident: bool) -> Room | None:
        """The memory to gather the payload into. None, which only a resident payload can get, means: do not gather the
        payload, because it is sent from the DRAM tier.
        """

    async def send(self, payload: Payload, spans: Spans, room: Room | None) -> None:
        """Carry the payload, which lies in `spans`. The room is released when its memory may be used again."""

    async def finish(self) -> int:
        """Wait until every byte has arrived, and tell the client. Returns the bytes that the transport
        itself counted.
        """

    async def fail(self, layer_index: int, chunk_index: int, *, tells_client: bool) -> None:
        """Wait until nothing is in flight, then tell the client that nothing from this layer on will come, unless
        others may bring it.
        """

    async def close(self) -> None:
        """Return when nothing is in flight and every room is released. After `finish` it has nothing to do."""


class Destination(Protocol):
    """The goal of one delivery. `is_resident` says that every chunk of the delivery lies in the DRAM tier."""

    @property
    def transport(self) -> str:
        """`http`, `shm` or `ucx`."""

    @property
    def past_cache(self) -> bool:
        """Whether gathers write past the processor's caches, since no thread of this process reads the bytes again."""

    def payload_bytes_max(self, *, is_resident: bool) -> int:
        """The size of the largest payload that the transfer takes."""

    def uses_staging(self, *, is_resident: bool) -> bool:
        """Whether a payload occupies staging memory, which is shared with other deliveries, until it has been sent."""

    @property
    def landing(self) -> TargetWithGaps:
        """How it takes slices between which there are gaps in the target."""

    def open(self, plan: DeliveryPlan) -> Transfer:
        """The transfer that carries the payloads of this plan."""


@dataclass(frozen=True, slots=True)
class PayloadLimits:
    """The sizes of the largest payloads: `staged_bytes` for one that goes through a staging slot, `direct_bytes` for
    one that does not and so may be larger.
    """

    staged_bytes: int
    direct_bytes: int


def admitted(start: DeliveryStart) -> list[Notice]:
    """The notices that a client's agent gets before the first layer."""
    grant = start.grant
    forms = [] if start.forms is None else [Forms(start.request_id, start.forms, start.portion, start.portions)]
    return [
        *forms,
        Admitted(
            request_id=start.request_id,
            mode=start.mode,
            chunk_count=start.chunk_count,
            rate_bytes_per_s=grant.rate_bytes_per_s,
            epoch=grant.epoch,
            part=start.portion,
            parts=start.portions,
        ),
    ]
