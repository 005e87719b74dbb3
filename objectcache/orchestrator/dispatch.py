"""Sending a routed request to its engine, and its answer back: again elsewhere while no byte has been answered, with an
honest error after that.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import aiohttp
from aiohttp import web

from nixl_client.connectors.vllm.naming import Deployment
from nixl_client.connectors.vllm.published import ADVICE, HELD_TOKENS, LOAD_CHUNKS
from objectcache.adapters.whole_answers import read_whole
from objectcache.orchestrator.answers import AttemptFailed, Refusal
from objectcache.orchestrator.body_pieces import body_in_pieces
from objectcache.orchestrator.engine import Engine
from objectcache.orchestrator.exchange import AnswerProgress, Exchange
from objectcache.orchestrator.passing_on import EVENT_STREAM, PassingOn
from objectcache.orchestrator.readers import Readers, ReadingError
from objectcache.orchestrator.relay import send_whole
from objectcache.orchestrator.router import Routed
from objectcache.orchestrator.rules.media_type import media_type_of
from objectcache.orchestrator.rules.openai_requests import Asked, RequestKind, WrongRequestError
from objectcache.orchestrator.rules.reading import TRANSFER_PARAMS

ASKED_BYTES_MAX = 1 << 17
"""An answer for the orchestrator itself has no more bytes: one token, and where its KV is, which takes vLLM about seven
bytes for each block.
"""
ASKED_S = 20.0
"""The whole of such an answer comes so soon after its beginning."""
CONNECT_S = 5.0
STALLED_S = 30.0
LOOK_S = 0.05
BLAMED_BYTES_MAX = 64 << 10
"""An engine that ends the connection of a larger request may have refused it early: its probes say whether it is well.
"""
_RETRIED = frozenset({401, 403, 404, 405, 429, 500, 502, 503, 504})
"""Statuses of an engine that another engine may not give. By itself none ejects it: a request of one client may have
any engine answer 500, and its probes say whether it is well. Where another engine then answers a request with 200 that
this one has refused (`_REFUSALS`), this one was to blame.
"""
_REFUSALS = frozenset({404, 405})


def is_refusal(failure: AttemptFailed, asked: Asked) -> bool:
    """Whether an engine refuses what every engine of the model should answer. Other paths exist at some engines only,
    an earlier response at one, and a client's own key may be one of some engines.
    """
    is_for_all = asked.kind in (RequestKind.COMPLETIONS, RequestKind.CHAT) and not asked.previous
    return is_for_all and failure.answer is not None and failure.answer.status in _REFUSALS


def transfer_advice(routed: Routed) -> dict[str, Any]:
    """Our own TRANSFER_PARAMS for an engine: one with our connector is told how many chunks to use, as the decision
    had it, and how many tokens it was taken to hold. A tier loads what vLLM asks it for."""
    prediction, published = routed.decision.prediction, routed.engine.published
    if published is None or not isinstance(published.names, Deployment) or not prediction.stored_tokens:
        return {}
    block_tokens = routed.engine.block_tokens or 1
    held_tokens = prediction.held_tokens // block_tokens * block_tokens  # an engine finds whole blocks
    return {ADVICE: {LOAD_CHUNKS: prediction.load_chunks, HELD_TOKENS: held_tokens}}


def note_costs(routed: Routed, prompt_tokens: int, ttft_s: float | None) -> None:
    """Learn the costs of an engine from a TTFT that is known, where the prompt did not wait for others there."""
    prediction = routed.decision.prediction
    if ttft_s is not None and prediction.queue_s == 0:
        routed.engine.observed.note(prompt_tokens - prediction.held_tokens - prediction.load_tokens, ttft_s)


async def _has_request(sent: asyncio.Event, answer: aiohttp.StreamReader) -> None:
    """Return when an engine was sent the whole request, or its answer is here, whole or broken off. An engine that
    begins to answer without reading the request would keep the body here as long as it answers, and nobody counts the
    bytes then. No event tells of an answer's end and of its errors, so it is looked at now and then.
    """
    while not (sent.is_set() or answer.is_eof() or answer.exception() is not None):
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LOOK_S):
                await sent.wait()


class Dispatch:
    """Carries requests. The session is shared by all of them."""

    def __init__(self, session: aiohttp.ClientSession, readers: Readers, first_byte_s: float, idle_s: float) -> None:
        self._session = session
        self._readers = readers
        self._first_byte_s = first_byte_s
        self._timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=idle_s)

    async def send(self, exchange: Exchange, routed: Routed) -> web.StreamResponse:
        """One attempt. Raises AttemptFailed where nothing was sent to the client."""
        engine, headers = routed.engine, dict(exchange.headers)
        if routed.rank is not None:
            headers["X-data-parallel-rank"] = str(routed.rank)
        async with AsyncExitStack() as stack:
            async with AsyncExitStack() as copies:  # an engine that answers has its request
                body, advice, handed_over = exchange.body.raw, transfer_advice(routed), exchange.handed_over
                exchange.handed_over = b""  # the blocks that it names may be another prompt's after one read
                if advice or handed_over:
                    changed = self.changed(exchange, (), {TRANSFER_PARAMS: advice}, handed_over)
                    body = await copies.enter_async_context(changed)
                opened = self._opened(
                    engine, exchange.path, headers, body, exchange.progress, is_stream=exchange.asked.is_stream
                )
                answer, first, late = await stack.enter_async_context(opened)
                del body
            exchange.receipt.attempts.append({"engine": engine.name, "status": answer.status})
            passing = PassingOn(exchange, engine, answer, late)
            if answer.status in _RETRIED:
                said, is_all = await passing.beginning(first)
                raise AttemptFailed(f"{engine.name} answers {answer.status}", passing.whole(said) if is_all else None)
            if not 200 <= answer.status < 600:
                raise AttemptFailed(f"{engine.name} answers with the status {answer.status}")
            if answer.content_length is None and "Transfer-Encoding" not in answer.headers:
                exchange.keep_not()  # its end looks like that of an engine that was killed
            if answer.status == 200:  # a refusal comes at once and says nothing of the time of a prefill
                self._noted_first_byte(exchange, routed, first)
            if media_type_of(answer.headers) == EVENT_STREAM:
                return await passing.stream(first)
            said, is_all = await passing.beginning(first)
            if not is_all:
                return await passing.stream(said)
            exchange.note_response(said)
            exchange.keep(said)
            exchange.computed(engine, answer.status)
            engine.succeeded()
            exchange.begin()
            return await send_whole(exchange.http, passing.whole(said))

    @asynccontextmanager
    async def changed(
        self, exchange: Exchange, drop: Sequence[str], put: Mapping[str, Any], handed_over: bytes = b""
    ) -> AsyncIterator[bytes]:
        """The body without some fields, and with others, whose bytes count within the block. Raises AttemptFailed;
        Refusal where there is no memory for it.
        """
        try:
            body = await self._readers.edited(exchange.body.caller, exchange.body.raw, drop, put, handed_over)
        except (ReadingError, WrongRequestError) as error:
            raise AttemptFailed(f"the body cannot be changed: {error}") from None
        with exchange.body.holding(len(body)):
            yield body

    async def ask(self, engine: Engine, path: str, headers: Mapping[str, str], body: bytes) -> bytes:
        """Have an engine compute for another one. Returns the parameters in its answer for that one, as JSON. The
        answer comes whole within ASKED_S of its beginning. Raises AttemptFailed.
        """
        async with self._opened(engine, path, headers, body, AnswerProgress(), is_stream=True) as (answer, first, _):
            try:
                async with asyncio.timeout(ASKED_S):
                    said = first + await read_whole(answer, ASKED_BYTES_MAX)
                if answer.status != 200:
                    raise AttemptFailed(f"{engine.name} answers {answer.status}")
                return await self._readers.handed_over(engine.name, said)
            except (aiohttp.ClientError, TimeoutError, OSError, ReadingError, WrongRequestError) as error:
                raise AttemptFailed(f"{engine.name}: {error}") from error

    @asynccontextmanager
    async def _opened(
        self,
        engine: Engine,
        path: str,
        headers: Mapping[str, str],
        body: bytes,
        progress: AnswerProgress,
        *,
        is_stream: bool,
    ) -> AsyncIterator[tuple[aiohttp.ClientResponse, bytes, list[str]]]:
        """The answer's head and its first piece. When the engine is ejected meanwhile, the wait for them ends, and the
        list says so. A stream that has begun may go on, unless nothing comes for STALLED_S. An answer that is no stream
        has its first byte when all of it is computed: one that takes too long says nothing about the engine, and would
        take as long elsewhere. Raises AttemptFailed; Refusal for such an answer.
        """
        late: list[str] = []
        nbytes = len(body)
        checks: list[asyncio.TimerHandle] = []
        opened: list[aiohttp.ClientResponse] = []
        task = asyncio.current_task()
        assert task is not None
        sent = asyncio.Event()

        async def first_piece() -> bytes:
            async with asyncio.timeout(self._first_byte_s):
                opened.append(
                    await self._session.post(
                        f"{engine.url}{path}",
                        data=body_in_pieces(body, sent.set),
                        headers={**headers, "Content-Length": str(len(body))},
                        timeout=self._timeout,
                        allow_redirects=False,
                    )
                )
                first = await opened[0].content.readany()
                await _has_request(sent, opened[0].content)
                return first

        getting = asyncio.ensure_future(first_piece())

        def on_gone() -> None:
            if not getting.done():
                late.append(f"{engine.name} is gone")
                getting.cancel()
            else:
                checks.append(asyncio.get_running_loop().call_later(STALLED_S, break_off))

        def break_off() -> None:
            if time.monotonic() - progress.at_s >= STALLED_S:
                late.append(f"{engine.name} sends nothing more")
                for answer in opened:
                    answer.close()

        with engine.watchers.watched(on_gone):
            try:
                try:
                    first = await getting
                    body = b""  # a client that reads slowly must not keep it here
                except asyncio.CancelledError:
                    if late and not task.cancelling():
                        raise AttemptFailed(late[0]) from None
                    raise
                except aiohttp.ClientConnectorError as error:
                    engine.failed(str(error), is_certain=isinstance(error.os_error, ConnectionRefusedError))
                    raise AttemptFailed(f"{engine.name}: {error}") from error
                except aiohttp.ConnectionTimeoutError as error:
                    engine.failed(f"{path}: no connection within {CONNECT_S:g} s")
                    raise AttemptFailed(f"{engine.name} cannot be reached") from error
                except TimeoutError as error:
                    if not is_stream:
                        problem = f"{engine.name} has not answered within {self._first_byte_s:g} s; ask for a stream"
                        raise Refusal(504, problem, code="timeout") from None
                    engine.failed(f"{path}: no first byte in time")
                    raise AttemptFailed(f"{engine.name} has not answered in time") from error
                except (aiohttp.ClientError, OSError) as error:
                    if nbytes <= BLAMED_BYTES_MAX:
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
        """Have the books know of every answer that has begun: without it the engine would count as silent. Only answers
        of tokens have a TTFT.
        """
        now_s, asked = time.monotonic(), exchange.asked
        ttft_s = routed.engine.books.first_byte(exchange.receipt.request_id, now_s, is_stream=asked.is_stream)
        if not asked.is_generating:
            return
        exchange.receipt.ttft_s = now_s - exchange.began_s
        if first:
            note_costs(routed, exchange.receipt.prompt_tokens or 0, ttft_s)
