"""An engine's answer on its way to the client: whole, or piece by piece, with an honest error where it breaks off."""

from __future__ import annotations

import asyncio
import time

import aiohttp
from aiohttp import web

from objectcache.adapters.response_sink import abort_connection
from objectcache.orchestrator.answers import AttemptFailed, Refusal
from objectcache.orchestrator.engine import Engine
from objectcache.orchestrator.exchange import ENGINE_HEADER, REQUEST_HEADER, Exchange
from objectcache.orchestrator.relay import Relay, SlowReaderError
from objectcache.orchestrator.rules.media_type import media_type_of
from objectcache.orchestrator.rules.openai_requests import is_encodable
from objectcache.orchestrator.under_way import stopping

WHOLE_BYTES_MAX = 1 << 20
"""An answer that is read to its end before it goes on has no more bytes."""
EVENT_STREAM = "text/event-stream"
_PASSED_ON = frozenset(
    {
        "content-type", "content-encoding", "content-disposition", "content-language", "cache-control", "retry-after",
        "x-request-id",
    }
)  # fmt: skip
_PASSED_ON_PREFIXES = ("openai-", "x-ratelimit-")
"""Clients get headers of an answer that begin so. Engines have no others to send to a client of ours, cookies for
example.
"""


class PassingOn:
    """One engine's answer. `late` says why the engine's answer is waited for no more, where that is so."""

    def __init__(self, exchange: Exchange, engine: Engine, answer: aiohttp.ClientResponse, late: list[str]) -> None:
        self._exchange = exchange
        self._engine = engine
        self._answer = answer
        self._late = late

    async def beginning(self, first: bytes) -> tuple[bytes, bool]:
        """The beginning of an answer that is no stream, and whether that is all of it. A small one is read to its end
        before the client sees any of it, so that another engine may still answer; of a larger one, or where answers
        that clients have not taken use all the memory they may have, no more is held here. Raises AttemptFailed.
        """
        exchange, engine, late = self._exchange, self._engine, self._late
        body = bytearray(first)
        has_room = exchange.held.take(len(first))
        try:
            while has_room and len(body) <= WHOLE_BYTES_MAX:
                piece = await self._answer.content.readany()
                if not piece:
                    return bytes(body), True
                body += piece
                exchange.progress.at_s = time.monotonic()
                has_room = exchange.held.take(len(piece))
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            if not late:
                engine.failed(f"{exchange.path}: {type(error).__name__} {error}")
            raise AttemptFailed(late[0] if late else f"{engine.name}: {type(error).__name__} {error}") from error
        return bytes(body), False

    def whole(self, body: bytes) -> web.Response:
        """The answer with all of its body."""
        return web.Response(body=body, status=self._answer.status, headers=self._headers())

    async def stream(self, first: bytes) -> web.StreamResponse:
        """Pass the pieces on as they come."""
        exchange, engine, answer = self._exchange, self._engine, self._answer
        response = web.StreamResponse(status=answer.status, headers=self._headers())
        exchange.begin()
        await response.prepare(exchange.http)
        relay = Relay(response, exchange.http, exchange.held)
        piece = first
        received_bytes = 0
        try:
            try:
                while piece:
                    received_bytes += len(piece)
                    if received_bytes == answer.content_length:  # the last piece may wait for its client
                        exchange.computed(engine, answer.status)
                    exchange.keep(piece)
                    exchange.note_response(piece)
                    await relay.write(piece)
                    piece = await answer.content.readany()
                exchange.computed(engine, answer.status)
                await relay.flush()
            except (aiohttp.ClientConnectionResetError, ConnectionResetError) as error:
                if self._late or (exchange.http.transport is not None and not exchange.http.transport.is_closing()):
                    await self._broken(response, relay, error)
                else:
                    raise
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                await self._broken(response, relay, error)
            else:
                engine.succeeded()
        except SlowReaderError as error:
            exchange.break_off()
            exchange.receipt.note = f"cut off: {error}"
            abort_connection(exchange.http)
            raise ConnectionResetError(str(error)) from None
        except asyncio.CancelledError:
            if not exchange.under_way.caught():
                raise
            exchange.break_off()
            exchange.receipt.note = "cut off: the orchestrator was told to stop"
            await relay.stop()
            if media_type_of(response.headers) == EVENT_STREAM:
                await response.write(b"\n\n" + stopping().event())
            else:
                _cut_off(exchange.http)
        finally:
            await relay.stop()
        if exchange.http.transport is not None and not exchange.http.transport.is_closing():
            await response.write_eof()
        return response

    async def _broken(self, response: web.StreamResponse, relay: Relay, error: Exception) -> None:
        """The engine's stream has broken off: say so in the stream, since its status is out already."""
        exchange, engine, late = self._exchange, self._engine, self._late
        exchange.break_off()
        why = late[0] if late else f"{type(error).__name__} {error}"
        if not late:
            engine.failed(f"{exchange.path}: the stream broke off: {why}")
        exchange.receipt.note = f"the stream broke off: {why}"
        exchange.computed(engine, 0)
        if media_type_of(response.headers) != EVENT_STREAM:
            _cut_off(exchange.http)
            return
        await relay.flush()
        message = "the engine ended before its answer did; the answer is not complete"
        await response.write(b"\n\n" + Refusal(502, message, code="engine_lost").event())  # a line may be cut

    def _headers(self) -> dict[str, str]:
        kept = {
            name: value
            for name, value in self._answer.headers.items()
            if _is_passed_on(name.lower()) and _is_writable(value)
        }
        kept[ENGINE_HEADER], kept[REQUEST_HEADER] = self._engine.name, self._exchange.receipt.request_id
        return {**kept, **self._exchange.cors}


def _is_writable(value: str) -> bool:
    return is_encodable(value) and not any((each < " " and each != "\t") or each == "\x7f" for each in value)


def _is_passed_on(name: str) -> bool:
    return name in _PASSED_ON or name.startswith(_PASSED_ON_PREFIXES)


def _cut_off(http: web.BaseRequest) -> None:
    """End an answer that cannot say in its body that it is not complete."""
    if http.transport is not None:
        http.transport.close()
