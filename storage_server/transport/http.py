"""The http transfer: payloads in order as the body of the answer. A body of full length is the proof of success."""

from __future__ import annotations

import asyncio

from descriptors.errors import ErrorCode, ServerError
from descriptors.storage_api import BodySink, DeliveryStart, Patience, Spans
from storage_server.gather.plan import Payload
from storage_server.gather.staging import Window
from storage_server.transport.transfer import Room


class HttpTransfer:
    """Writes into a BodySink, from the window's slots or straight from resident memory. The answer's head waits for the
    first payload, so an early failure is a clean error.
    """

    def __init__(self, sink: BodySink, window: Window, patience: Patience) -> None:
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

    async def fail(self, layer_index: int, chunk_index: int) -> None:
        if self._begun:
            self._sink.abort()

    async def close(self) -> None:
        if self._begun and not self._finished:
            self._sink.abort()
