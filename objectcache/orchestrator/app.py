"""The orchestrator's HTTP surface: OpenAI's paths, health, metrics, and `/_orchestrator`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from functools import partial

from aiohttp import web
from aiohttp.http import StreamWriter

from descriptors.errors import ObjectCacheError
from objectcache.adapters.deadlines import ConnectionLimits
from objectcache.adapters.limited_server import LimitedServer
from objectcache.adapters.metrics import CONTENT_TYPE
from objectcache.orchestrator.administration import administer
from objectcache.orchestrator.answering import Answering
from objectcache.orchestrator.answers import Refusal
from objectcache.orchestrator.pages import status_pages
from objectcache.orchestrator.relay import HeldBytes, send_whole
from objectcache.orchestrator.rules.cross_origin import answer_headers, preflight_headers
from objectcache.orchestrator.rules.openai_requests import PASSED_ON, RequestKind
from objectcache.orchestrator.service import Orchestrator

ADMINISTRATION = "/_orchestrator/"
JSON_TYPE = "application/json; charset=utf-8"
_log = logging.getLogger(__name__)


class App:
    """Answers requests. `server` makes the aiohttp server on the running event loop."""

    def __init__(self, orchestrator: Orchestrator) -> None:
        self._orchestrator = orchestrator
        self._pages = status_pages()

    def server(self) -> LimitedServer:
        """The aiohttp server."""
        settings = self._orchestrator.settings
        limits = ConnectionLimits(
            settings.header_timeout_s,
            settings.keepalive_timeout_s,
            settings.send_idle_timeout_s,
            settings.connections_max,
        )
        return LimitedServer(self.handle, _refuse_unparsed, limits)

    async def handle(self, http: web.BaseRequest) -> web.StreamResponse:
        """Answer one request. Pages of other origins have no access to `/_orchestrator`."""
        is_ours = http.path.startswith(ADMINISTRATION.rstrip("/"))
        origins = () if is_ours else self._orchestrator.settings.cors_origins
        preflight = preflight_headers(origins, http.method, http.headers)
        if preflight is not None:
            return web.Response(status=204, headers=preflight)
        response = await self._refused_or_routed(http)
        if not response.prepared:
            response.headers.update(answer_headers(origins, http.headers))
        return response

    async def _refused_or_routed(self, http: web.BaseRequest) -> web.StreamResponse:
        try:
            return await self._route(http)
        except Refusal as refusal:
            return refusal.response()
        except (asyncio.CancelledError, ConnectionResetError):
            raise
        except Exception:
            _log.exception("%s %.300r", http.method, http.path)
            is_begun = (
                isinstance(http.writer, StreamWriter) and http.writer.chunked
            )  # a refusal would be framed so, too
            if http.writer.output_size or is_begun:  # within an answer, a refusal would be taken for a part of it
                if http.transport is not None:
                    http.transport.abort()
                raise ConnectionResetError("the answer could not be finished") from None
            return Refusal(500, "the orchestrator failed").response()

    async def _route(self, http: web.BaseRequest) -> web.StreamResponse:
        path, method = http.path, http.method
        if path.startswith(ADMINISTRATION):
            name = path.removeprefix(ADMINISTRATION)
            page = self._pages.find(method, name)
            return page if page is not None else await administer(self._orchestrator, http, name)
        if path not in HANDLERS:
            raise Refusal(404, f"there is no {path}")
        wanted, handler = HANDLERS[path]
        if method != wanted and (method, wanted) != ("HEAD", "GET"):  # health checks ask with HEAD
            raise Refusal(405, f"{method} is not possible here; use {wanted}")
        return await handler(self._orchestrator, http)


async def answer(kind: RequestKind, parts: Orchestrator, http: web.BaseRequest) -> web.StreamResponse:
    """One of OpenAI's requests."""
    return await Answering(parts, http, kind).answer()


async def models(parts: Orchestrator, http: web.BaseRequest) -> web.StreamResponse:
    """The models of all engines."""
    held = HeldBytes(parts.answers, parts.access.caller(http))
    body = parts.roster.models_body()
    if not held.take(len(body)):
        problem = "answers that clients have not read use all the memory they may have"
        raise Refusal(503, problem, code="too_busy", retry_after_s=1)
    headers = {"Content-Type": JSON_TYPE, **answer_headers(parts.settings.cors_origins, http.headers)}
    try:
        return await send_whole(http, web.Response(body=body, headers=headers))
    finally:
        held.drop()


async def health(parts: Orchestrator, _: web.BaseRequest) -> web.Response:
    """Whether requests are taken, and an engine takes them."""
    status = "ok" if parts.roster.is_serving() else "no engine"
    if parts.under_way.is_stopping:
        status = "stopping"
    return web.json_response({"status": status}, status=200 if status == "ok" else 503)


async def metrics(parts: Orchestrator, _: web.BaseRequest) -> web.Response:
    """Prometheus' text."""
    return web.Response(body=await parts.metrics.get(), headers={"Content-Type": CONTENT_TYPE})


Handler = Callable[[Orchestrator, web.BaseRequest], Awaitable[web.StreamResponse]]
_OF_KINDS = {kind.value: kind for kind in RequestKind if kind is not RequestKind.OTHER}
HANDLERS: Mapping[str, tuple[str, Handler]] = {
    **{path: ("POST", partial(answer, kind)) for path, kind in _OF_KINDS.items()},
    **{path: ("POST", partial(answer, RequestKind.OTHER)) for path in PASSED_ON},
    "/v1/models": ("GET", models),
    "/health": ("GET", health),
    "/metrics": ("GET", metrics),
    "/_objectcache/metrics": ("GET", metrics),
}
"""The method and the function of every path but those of `/_orchestrator`."""


def _refuse_unparsed(error: ObjectCacheError) -> web.Response:
    return Refusal(400, error.message).response()
