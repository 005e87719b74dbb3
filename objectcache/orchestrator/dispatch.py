"""Sending a routed request to its engine, and its answer back: again elsewhere while no byte has been answered, with an
honest error after that.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from aiohttp import web

from nixl_client.connectors.vllm.published import ADVICE, HELD_TOKENS, LOAD_CHUNKS
from objectcache.adapters.response_sink import abort_connection
from objectcache.adapters.whole_answers import read_whole
from objectcache.orchestrator.answers import Refusal
from objectcache.orchestrator.body_pieces import body_in_pieces
from objectcache.orchestrator.engine import Engine
from objectcache.orchestrator.gate import Place
from objectcache.orchestrator.readers import Readers, ReadingError
from objectcache.orchestrator.receipts import Receipt
from objectcache.orchestrator.relay import Held, Relay, SlowReaderError, send_whole
from objectcache.orchestrator.response_cache import Collected
from objectcache.orchestrator.router import Routed
from objectcache.orchestrator.rules.kept_responses import response_id
from objectcache.orchestrator.rules.media_type import media_type_of
from objectcache.orchestrator.rules.openai_requests import Asked, RequestKind, WrongRequestError, is_encodable
from objectcache.orchestrator.rules.reading import document_of
from objectcache.orchestrator.under_way import UnderWay, stopping

WHOLE_BYTES_MAX = 1 << 20
"""An answer that is read to its end before it goes on has no more bytes."""
ASKED_BYTES_MAX = 1 << 17
"""An answer for the orchestrator itself has no more bytes: one token, and where its KV is, which takes vLLM about seven
bytes for each block. The event loop parses it, which takes 11 ms at worst.
"""
ATTEMPTS_MAX = 3
THREAD_BYTES = 1 << 18
STALLED_S = 30.0
ENGINE_HEADER, REQUEST_HEADER = "x-objectcache-engine", "x-objectcache-request-id"
EVENT_STREAM = "text/event-stream"
_RETRIED = frozenset({401, 403, 404, 405, 429, 500, 502, 503, 504})
"""Statuses of an engine that another engine may not give. By itself none ejects it: a request of one client may have
any engine answer 500, and its probes say whether it is well. Where another engine then answers a request with 200 that
this one has refused (`_REFUSALS`), this one was to blame.
"""
_NAMING = frozenset({"traceparent", "tracestate", "user-agent", "x-request-id"})
_REFUSALS = frozenset({404, 405})
_SENT_ON = frozenset(
    {
        "accept", "accept-language", "anthropic-beta", "anthropic-version", "content-type", "openai-beta",
        "openai-organization", "openai-project", "traceparent", "tracestate", "user-agent",
    }
)  # fmt: skip
"""Engines get these headers of a request. They obey headers of their own: one gives a request a priority, another a
place in the engine.
"""
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


class AttemptFailed(Exception):
    """An engine has not answered, and nothing has been sent to the client. `answer` is the engine's refusal, where it
    gave one.
    """

    def __init__(self, message: str, answer: web.Response | None = None) -> None:
        super().__init__(message)
        self.answer = answer


def is_refusal(failure: AttemptFailed, asked: Asked) -> bool:
    """Whether an engine refuses what every engine of the model should answer. Other paths exist at some engines only,
    an earlier response at one, and a client's own key may be one of some engines.
    """
    is_for_all = asked.kind in (RequestKind.COMPLETIONS, RequestKind.CHAT) and not asked.previous
    return is_for_all and failure.answer is not None and failure.answer.status in _REFUSALS


@dataclass(slots=True)
class Progress:
    """When the last piece of an answer came, by the steady clock."""

    at_s: float = field(default_factory=time.monotonic)


@dataclass(slots=True)
class Exchange:
    """One client's request on its way: the body as it is sent on, and the headers."""

    http: web.BaseRequest
    path: str
    asked: Asked
    raw: bytes
    """The body as it goes on."""
    tenant: str
    headers: Mapping[str, str]
    receipt: Receipt
    began_s: float
    under_way: UnderWay
    cors: Mapping[str, str]
    """Headers for the browser that the answer goes to."""
    held: Held
    """The bytes of the answer that the client has not taken. The maker of the exchange drops them at its end."""
    place: Place | None = None
    """Its place among the running requests, until an engine has done its work."""
    transfer_params: Mapping[str, Any] = field(default_factory=dict)
    """The answer of a prefill engine, for the engine that goes on."""
    kept: Collected | None = None
    """The pieces of the answer, where they may be kept."""
    is_begun: bool = False
    """Whether the client has some of the answer, so that its status is out."""
    is_broken: bool = False
    progress: Progress = field(default_factory=Progress)

    response_id: str = ""
    """The id of the response that was answered, where the engine keeps it."""

    def note_response(self, beginning: bytes) -> None:
        """Note the id of a response, at the beginning of its answer."""
        if self.asked.kind is RequestKind.RESPONSES:
            self.response_id = response_id(beginning)

    @property
    def is_worth_keeping(self) -> bool:
        """Whether the answer came whole: a stream to its end mark, without an error in it."""
        if self.kept is None or not self.kept.pieces or self.is_broken:
            return False
        pieces = self.kept.pieces
        if not self.asked.is_stream:
            return True
        whole = b"".join(pieces)
        return whole.rstrip().endswith(b"data: [DONE]") and b'data: {"error"' not in whole

    def keep(self, piece: bytes) -> None:
        """Note a piece of the answer; an answer that is too large is not kept at all."""
        self.progress.at_s = time.monotonic()
        if self.kept is not None:
            self.kept.add(piece)

    def computed(self, engine: Engine, status: int) -> None:
        """The engine has done its work: others may have the place, however slowly the client reads."""
        engine.books.end(self.receipt.request_id, time.monotonic(), is_complete=status == 200)
        if self.place is not None:
            self.place.give_back()

    def break_off(self) -> None:
        """The answer is not whole, and is not kept."""
        self.is_broken = True
        if self.kept is not None:
            self.kept.drop()


def forwarded_headers(headers: Mapping[str, str], request_id: str, authorization: str | None) -> dict[str, str]:
    """The headers that an engine gets: those of a client that mean the same everywhere, and our own."""
    kept = {name: value for name, value in headers.items() if name.lower() in _SENT_ON and is_encodable(value)}
    kept["X-Request-Id"] = request_id
    if authorization is not None:
        kept["Authorization"] = authorization
    return kept


def scope_of(forwarded: Mapping[str, str]) -> str:
    """The headers that an engine may answer by: all that it gets, but those that only name a request or a client."""
    deciding = sorted((name.lower(), value) for name, value in forwarded.items() if name.lower() not in _NAMING)
    return json.dumps(deciding)


def transfer_params(exchange: Exchange, routed: Routed) -> dict[str, Any]:
    """The `kv_transfer_params` for an engine: one with our connector is told how many chunks to use, as the decision
    had it, and how many tokens it was taken to hold."""
    prediction, known = routed.decision.prediction, dict(exchange.transfer_params)
    if routed.engine.published is None or not prediction.stored_tokens:
        return known
    block_tokens = routed.engine.block_tokens or 1
    held_tokens = prediction.held_tokens // block_tokens * block_tokens  # an engine finds whole blocks
    return {**known, ADVICE: {LOAD_CHUNKS: prediction.load_chunks, HELD_TOKENS: held_tokens}}


class Dispatch:
    """Carries requests. The session is shared by all of them."""

    def __init__(self, session: aiohttp.ClientSession, readers: Readers, first_byte_s: float, idle_s: float) -> None:
        self._session = session
        self._readers = readers
        self._first_byte_s = first_byte_s
        self._timeout = aiohttp.ClientTimeout(total=None, sock_connect=5.0, sock_read=idle_s)

    async def send(self, exchange: Exchange, routed: Routed) -> web.StreamResponse:
        """One attempt. Raises AttemptFailed where nothing was sent to the client."""
        engine, headers = routed.engine, dict(exchange.headers)
        if routed.rank is not None:
            headers["X-data-parallel-rank"] = str(routed.rank)
        body, params = exchange.raw, transfer_params(exchange, routed)
        if params:
            body = await self.edited(exchange, (), {"kv_transfer_params": params})
        opened = self._opened(
            engine, exchange.path, headers, body, exchange.progress, is_stream=exchange.asked.is_stream
        )
        async with opened as (answer, first, late):
            note: dict[str, Any] = {"engine": engine.name, "status": answer.status}
            exchange.receipt.attempts.append(note)
            if answer.status in _RETRIED:
                body, is_all = await self._beginning(answer, first, exchange, engine, late)
                refusal = self._whole(body, answer, exchange, engine) if is_all else None
                raise AttemptFailed(f"{engine.name} answers {answer.status}", refusal)
            if not 200 <= answer.status < 600:
                raise AttemptFailed(f"{engine.name} answers with the status {answer.status}")
            if answer.status == 200:  # a refusal comes at once, and says nothing of the time of a prefill
                self._noted_first_byte(exchange, routed, first)
            if media_type_of(answer.headers) != EVENT_STREAM:
                first, is_all = await self._beginning(answer, first, exchange, engine, late)
                if not is_all:
                    return await self._stream(answer, first, exchange, engine, late)
                exchange.note_response(first)
                exchange.keep(first)
                exchange.computed(engine, answer.status)
                engine.succeeded()
                exchange.is_begun = True
                return await send_whole(exchange.http, self._whole(first, answer, exchange, engine))
            return await self._stream(answer, first, exchange, engine, late)

    async def edited(self, exchange: Exchange, drop: Sequence[str], put: Mapping[str, Any]) -> bytes:
        """The body without some fields, and with others. Raises AttemptFailed."""
        try:
            return await self._readers.edited(exchange.tenant, exchange.raw, drop, put)
        except (ReadingError, WrongRequestError) as error:
            raise AttemptFailed(f"the body cannot be changed: {error}") from None

    async def ask(self, engine: Engine, path: str, headers: Mapping[str, str], body: bytes) -> dict[str, Any]:
        """A request whose answer is for the orchestrator. Raises AttemptFailed."""
        async with self._opened(engine, path, headers, body, Progress(), is_stream=True) as (answer, first, _):
            try:
                document = document_of(first + await read_whole(answer, ASKED_BYTES_MAX))
            except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
                raise AttemptFailed(f"{engine.name}: {error}") from error
            if answer.status != 200:
                raise AttemptFailed(f"{engine.name} answers {answer.status}")
            return document

    @asynccontextmanager
    async def _opened(
        self, engine: Engine, path: str, headers: Mapping[str, str], body: bytes, progress: Progress, *, is_stream: bool
    ) -> AsyncIterator[tuple[aiohttp.ClientResponse, bytes, list[str]]]:
        """The answer's head and its first piece. When the engine is ejected meanwhile, the wait for them ends, and the
        list says so. A stream that has begun may go on, unless nothing comes for STALLED_S. An answer that is no stream
        has its first byte when all of it is computed: one that takes too long says nothing about the engine, and would
        take as long elsewhere. Raises AttemptFailed; Refusal for such an answer.
        """
        late: list[str] = []
        checks: list[asyncio.TimerHandle] = []
        opened: list[aiohttp.ClientResponse] = []
        task = asyncio.current_task()
        assert task is not None

        async def first_piece() -> bytes:
            async with asyncio.timeout(self._first_byte_s):
                opened.append(
                    await self._session.post(
                        f"{engine.url}{path}",
                        data=body_in_pieces(body),
                        headers={**headers, "Content-Length": str(len(body))},
                        timeout=self._timeout,
                        allow_redirects=False,
                    )
                )
                return await opened[0].content.readany()

        getting = asyncio.ensure_future(first_piece())

        def on_gone() -> None:
            if not getting.done():
                late.append(f"{engine.name} is gone: {engine.liveness.last_error}")
                getting.cancel()
            else:
                checks.append(asyncio.get_running_loop().call_later(STALLED_S, break_off))

        def break_off() -> None:
            if time.monotonic() - progress.at_s >= STALLED_S:
                late.append(f"{engine.name} sends nothing more: {engine.liveness.last_error}")
                for answer in opened:
                    answer.close()

        with engine.watched(on_gone):
            try:
                try:
                    first = await getting
                except asyncio.CancelledError:
                    if late and not task.cancelling():
                        raise AttemptFailed(late[0]) from None
                    raise
                except aiohttp.ClientConnectorError as error:
                    engine.failed(str(error), is_certain=isinstance(error.os_error, ConnectionRefusedError))
                    raise AttemptFailed(f"{engine.name}: {error}") from error
                except TimeoutError as error:
                    if not is_stream:
                        problem = f"{engine.name} has not answered within {self._first_byte_s:g} s; ask for a stream"
                        raise Refusal(504, problem, code="timeout") from None
                    engine.failed(f"{path}: no first byte in time")
                    raise AttemptFailed(f"{engine.name} has not answered in time") from error
                except (aiohttp.ClientError, OSError) as error:
                    engine.failed(f"{path}: {type(error).__name__} {error}")
                    raise AttemptFailed(f"{engine.name}: {type(error).__name__} {error}") from error
                yield opened[0], first, late
            finally:
                getting.cancel()
                for check in checks:
                    check.cancel()
                for answer in opened:
                    answer.close()

    def _noted_first_byte(self, exchange: Exchange, routed: Routed, first: bytes) -> None:
        now_s = time.monotonic()
        exchange.receipt.ttft_s = now_s - exchange.began_s
        prediction, books, is_stream = routed.decision.prediction, routed.engine.books, exchange.asked.is_stream
        ttft_s = books.first_byte(exchange.receipt.request_id, now_s, is_stream=is_stream)
        if ttft_s is not None and first and prediction.queue_s == 0:
            computed = (exchange.receipt.prompt_tokens or 0) - prediction.held_tokens - prediction.load_tokens
            routed.engine.observed.note(computed, ttft_s)

    async def _beginning(
        self, answer: aiohttp.ClientResponse, first: bytes, exchange: Exchange, engine: Engine, late: list[str]
    ) -> tuple[bytes, bool]:
        """An answer that is no stream, and whether that is all of it. A small one is read to its end before the client
        sees any of it, so that another engine may still answer; of a larger one, or where answers that clients have not
        taken use all the memory they may have, no more is held here.
        """
        body = bytearray(first)
        has_room = exchange.held.take(len(first))
        try:
            while has_room and len(body) <= WHOLE_BYTES_MAX:
                piece = await answer.content.readany()
                if not piece:
                    return bytes(body), True
                body += piece
                has_room = exchange.held.take(len(piece))
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            if not late:
                engine.failed(f"{exchange.path}: {type(error).__name__} {error}")
            raise AttemptFailed(late[0] if late else f"{engine.name}: {type(error).__name__} {error}") from error
        return bytes(body), False

    def _whole(self, body: bytes, answer: aiohttp.ClientResponse, exchange: Exchange, engine: Engine) -> web.Response:
        return web.Response(body=body, status=answer.status, headers=self._headers(answer, exchange, engine))

    async def _stream(
        self, answer: aiohttp.ClientResponse, first: bytes, exchange: Exchange, engine: Engine, late: list[str]
    ) -> web.StreamResponse:
        """Pass the pieces on as they come."""
        response = web.StreamResponse(status=answer.status, headers=self._headers(answer, exchange, engine))
        exchange.is_begun = True
        if answer.content_length is not None:  # whoever says its length has computed it
            exchange.computed(engine, answer.status)
        await response.prepare(exchange.http)
        relay = Relay(response, exchange.http, exchange.held)
        write = relay.write if answer.content_length is None else response.write
        piece = first
        exchange.note_response(first)
        try:
            try:
                while piece:
                    exchange.keep(piece)
                    await write(piece)
                    piece = await answer.content.readany()
                exchange.computed(engine, answer.status)
                await relay.flush()
            except (aiohttp.ClientConnectionResetError, ConnectionResetError) as error:
                if late or (exchange.http.transport is not None and not exchange.http.transport.is_closing()):
                    await self._broken(response, relay, exchange, engine, late, error)
                else:
                    raise
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                await self._broken(response, relay, exchange, engine, late, error)
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

    async def _broken(
        self,
        response: web.StreamResponse,
        relay: Relay,
        exchange: Exchange,
        engine: Engine,
        late: list[str],
        error: Exception,
    ) -> None:
        """The engine's stream has broken off: say so in the stream, since its status is out already."""
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

    def _headers(self, answer: aiohttp.ClientResponse, exchange: Exchange, engine: Engine) -> dict[str, str]:
        kept = {name: value for name, value in answer.headers.items() if _is_passed_on(name.lower())}
        kept[ENGINE_HEADER], kept[REQUEST_HEADER] = engine.name, exchange.receipt.request_id
        return {**kept, **exchange.cors}


def _is_passed_on(name: str) -> bool:
    return name in _PASSED_ON or name.startswith(_PASSED_ON_PREFIXES)


def _cut_off(http: web.BaseRequest) -> None:
    """End an answer that cannot say in its body that it is not complete."""
    if http.transport is not None:
        http.transport.close()
