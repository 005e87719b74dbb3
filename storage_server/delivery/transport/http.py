"""The http transport: payloads are sent in order as the body of the answer. A body of full length means success."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from descriptors.errors import ErrorCode, ServerError
from descriptors.storage_api import BodySink, DeliveryStart, Patience, Spans
from descriptors.units import MIB
from storage_server.delivery.gather.staging import SlotWindow
from storage_server.delivery.transport.destination import PayloadLimits, Room
from storage_server.planning.plan import DeliveryPlan, Payload, TargetWithGaps

STAGED_BYTES_MAX = 2 * MIB


@dataclass(frozen=True, slots=True)
class HttpDestination:
    """The body of one answer. Resident payloads are sent from the DRAM tier, all others through the window's slots."""

    sink: BodySink
    window: SlotWindow
    patience: Patience
    limits: PayloadLimits

    @property
    def transport(self) -> str:
        return "http"

    @property
    def past_cache(self) -> bool:
        """False, because the kernel reads every byte when it is sent."""
        return False

    def payload_bytes_max(self, *, is_resident: bool) -> int:
        """Staged payloads are small enough to be sent while they are in the processor's caches. A resident payload
        needs no slot, so it may be larger.
        """
        return self.limits.direct_bytes if is_resident else min(self.limits.staged_bytes, STAGED_BYTES_MAX)

    def uses_staging(self, *, is_resident: bool) -> bool:
        """Whether the payload is read from files: only then is it staged."""
        return not is_resident

    @property
    def landing(self) -> TargetWithGaps:
        """The body has the slices only: whoever reads it puts them into their places."""
        return TargetWithGaps(is_packed=True, is_scattered=False)

    def open(self, plan: DeliveryPlan) -> HttpTransfer:
        """The transfer into this body. It does not need the plan."""
        return HttpTransfer(self.sink, self.window, self.patience)


class HttpTransfer:
    """Writes into a BodySink. The answer's head is sent with the first payload, so that an early failure becomes an
    ordinary error answer.
    """

    def __init__(self, sink: BodySink, window: SlotWindow, patience: Patience) -> None:
        self._sink = sink
        self._window = window
        self._patience = patience
        self._start: DeliveryStart | None = None
        self._begun = False
        self._finished = False
        self._sent_bytes = 0

    async def start(self, start: DeliveryStart) -> None:
        self._start = start

    async def room(self, payload: Payload, *, is_resident: bool) -> Room | None:
        return None if is_resident else await self._window.take()

    async def send(self, payload: Payload, spans: Spans, room: Room | None) -> None:
        try:
            if not self._begun and self._start is not None:
                self._begun = True
                async with asyncio.timeout(self._patience.window_s):
                    await self._sink.begin(self._start)
            await self._sink.send(spans, self._patience)
            self._sent_bytes += payload.nbytes
        except (ConnectionError, TimeoutError) as error:
            self._sink.abort()
            problem = "stopped reading" if isinstance(error, TimeoutError) else f"is gone, or was too slow: {error}"
            raise ServerError(ErrorCode.TARGET_UNREACHABLE, f"the client {problem}") from error
        except BaseException:
            self._sink.abort()
            raise
        finally:
            if room is not None:
                room.release()

    async def finish(self) -> int:
        self._finished = True
        return self._sent_bytes

    async def fail(self, layer_index: int, chunk_index: int, *, tells_client: bool) -> None:
        if self._begun:
            self._sink.abort()

    async def close(self) -> None:
        if self._begun and not self._finished:
            self._sink.abort()
