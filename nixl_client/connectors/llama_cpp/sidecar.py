"""A proxy in front of llama.cpp's server: every request goes through as it came, and prompts of texts get a slot that
holds what the bucket has of them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

import aiohttp
from aiohttp import web

from descriptors.errors import ObjectCacheError, ServerError
from descriptors.headers import LOADED_HEADER
from descriptors.storage_api import Patience
from nixl_client.client import Client
from nixl_client.connectors.llama_cpp.llama_server import LlamaServer
from nixl_client.connectors.llama_cpp.rules.prompts import (
    PATHS,
    in_slot,
    may_change_adapters,
    may_use_slots,
    prompt_of,
    without_reuse,
)
from nixl_client.connectors.llama_cpp.slot_cache import FAILURES, GOES_ON, SlotCache, SlotTurn
from nixl_client.connectors.startup import say
from objectcache.adapters.caller import CALLER, caller_of
from objectcache.adapters.deadlines import ConnectionLimits
from objectcache.adapters.document_budget import DocumentBudget
from objectcache.adapters.leave_to_send import give_leave
from objectcache.adapters.limited_server import LimitedServer
from objectcache.adapters.loop_share import LoopShare
from objectcache.adapters.reading_pace import ReadingPace
from objectcache.adapters.response_sink import abort_connection

BODY_BYTES_MAX = 64 << 20
BODIES_BYTES_MAX = 256 << 20
"""The bodies of all requests take no more, and those of one host a quarter; others are told to come again."""
BODY_S, BODY_BYTES_PER_S = 30.0, 1 << 20
"""A body may take so long, and longer by what has come of it."""
PATIENCE = Patience(30.0, 4096.0)
"""Clients that read more slowly are cut off where their requests have slots."""
CONNECTIONS_MAX = 1024
_HOP = frozenset(
    {
        "connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer", "transfer-encoding",
        "upgrade", "host", "content-length", "expect", "date", "server",
    }
)  # fmt: skip
"""Headers of one connection, and those that each side writes itself."""
Listening = Callable[[LimitedServer], Awaitable[tuple[web.ServerRunner, str]]]
_log = logging.getLogger(__name__)


class LlamaSidecar:
    """Answers for the llama.cpp server at `engine`, whose `--slot-save-path` is `folder`."""

    def __init__(self, engine: str, folder: Path, client: Client, listen: Listening) -> None:
        self._engine = engine
        self._folder = folder
        self._client = client
        self._listen = listen
        self._bodies = DocumentBudget(BODIES_BYTES_MAX, BODIES_BYTES_MAX // 4)
        self._share = LoopShare()
        """Bodies are read in turns: hundreds that end in one pass of the loop would stop it."""
        self._closers: list[Callable[[], Awaitable[None]]] = []
        self.url = ""

    async def start(self) -> None:
        """Say whether the store is there, and listen. Raises OSError."""
        await asyncio.to_thread(say, self._client)
        server = LlamaServer(self._engine, self._share)
        cache = SlotCache(server, self._client, self._folder, self._share)
        self._closers += [server.close, cache.close]
        limits = ConnectionLimits(connections_max=CONNECTIONS_MAX)
        runner, self.url = await self._listen(
            LimitedServer(lambda http: self._handle(http, server, cache), _refused, limits)
        )
        self._closers.append(runner.cleanup)

    async def close(self) -> None:
        """Let requests end, and store what waits for it."""
        while self._closers:
            await self._closers.pop()()

    async def _handle(self, http: web.BaseRequest, server: LlamaServer, cache: SlotCache) -> web.StreamResponse:
        held = [0]
        CALLER.set(caller_of(http.remote or ""))
        try:
            await give_leave(http)
            body = await self._body(http, held)
            if isinstance(body, web.Response):
                return body
            return await self._answered(http, body, server, cache)
        except (aiohttp.ClientConnectionResetError, ConnectionResetError):
            raise
        except (aiohttp.ClientError, TimeoutError) as error:
            return _error(502, f"llama-server at {self._engine} does not answer: {type(error).__name__} {error}")
        finally:
            self._bodies.give_back(caller_of(http.remote or ""), held[0])

    async def _body(self, http: web.BaseRequest, held: list[int]) -> bytes | web.Response:
        """The body, which counts in `held`; or the refusal of a body that is too large."""
        body, caller = bytearray(), caller_of(http.remote or "")
        began_s = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(BODY_S) as patience:
                async for piece in http.content.iter_any():
                    if len(body) + len(piece) > BODY_BYTES_MAX:
                        return _error(413, f"a body of more than {BODY_BYTES_MAX >> 20} MiB")
                    self._bodies.take(caller, len(piece))
                    held[0] += len(piece)
                    body += piece
                    patience.reschedule(began_s + BODY_S + len(body) / BODY_BYTES_PER_S)
        except ServerError:
            return _error(503, "too many requests wait; come again", {"Retry-After": "1"})
        except TimeoutError:
            return _error(408, "the body did not come in time")
        return bytes(body)

    async def _answered(
        self, http: web.BaseRequest, body: bytes, server: LlamaServer, cache: SlotCache
    ) -> web.StreamResponse:
        if not http.rel_url.raw_path.startswith("/"):
            return _error(400, "the path of a request begins with /")
        if may_use_slots(http.method, http.path):
            return _error(403, "slots are saved and restored by this proxy alone")
        body = without_reuse(body)
        asked = None
        if http.method == "POST" and http.path in PATHS:
            async with self._share.turn(CALLER.get()):
                asked = prompt_of(http.path, body)
        headers = {name: value for name, value in http.headers.items() if name.lower() not in _HOP}
        key = {name: value for name, value in headers.items() if name.lower() in ("authorization", "x-api-key")}
        turn: SlotTurn | None = None
        if asked is not None:
            try:
                turn = await cache.begin(asked, body, key)
            except FAILURES as error:
                cache.failed(GOES_ON, error)
        if turn is None:
            if http.method == "POST" and http.path in PATHS:
                cache.forget()
            changes = may_change_adapters(http.method, http.path, body)
            try:
                if changes:
                    cache.adapters_change()
                return await _passed_on(http, server, body, headers, None)
            finally:
                if changes:
                    cache.adapters_change()
        try:
            return await _passed_on(http, server, in_slot(body, turn.index), headers, turn)
        finally:
            cache.end(turn, key)


async def _passed_on(
    http: web.BaseRequest, server: LlamaServer, body: bytes, headers: Mapping[str, str], turn: SlotTurn | None
) -> web.StreamResponse:
    """The server's answer, piece by piece. With the first one the turn's prompt is computed."""
    async with server.passed_on(http.method, http.rel_url.raw_path_qs, headers, body) as answer:
        kept = {name: value for name, value in answer.headers.items() if name.lower() not in _HOP}
        if turn is not None:
            kept[LOADED_HEADER] = str(turn.loaded_tokens)
        response = web.StreamResponse(status=answer.status, headers=kept)
        if answer.content_length is not None and http.method != "HEAD":
            response.content_length = answer.content_length
        await response.prepare(http)
        pace = None if turn is None else ReadingPace(PATIENCE)
        try:
            async for piece in answer.content.iter_any():
                if turn is not None and answer.status == 200:
                    turn.is_computed = True
                await _taken(http, response.write(piece), len(piece), pace)
        except (aiohttp.ClientError, TimeoutError) as error:
            if isinstance(error, ConnectionResetError):  # the client has gone
                raise
            _log.warning("%s: llama-server ended before its answer did", http.path)
            if http.transport is not None:
                http.transport.close()
            return response
        await _taken(http, response.write_eof(), 0, pace)
        return response


async def _taken(http: web.BaseRequest, writing: Awaitable[None], nbytes: int, pace: ReadingPace | None) -> None:
    """Write bytes of an answer. Raises ConnectionResetError where the client reads too slowly."""
    if pace is None:
        await writing
        return
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    try:
        async with asyncio.timeout(PATIENCE.window_s):
            await writing
        is_slow = pace.is_too_slow(loop.time() - began_s, nbytes)
    except TimeoutError:
        is_slow = True
    if is_slow:
        abort_connection(http)
        raise ConnectionResetError("the client reads too slowly")


def _error(status: int, message: str, headers: Mapping[str, str] | None = None) -> web.Response:
    """An error in the form of llama.cpp's."""
    return web.json_response(
        {"error": {"code": status, "message": message, "type": "objectcache_error"}}, status=status, headers=headers
    )


def _refused(error: ObjectCacheError) -> web.Response:
    return _error(error.http_status, error.message)
