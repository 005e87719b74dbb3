"""Streaming answers. Payload memory is sent without a copy, and is not reused before it has been sent. After an answer
has begun, no second answer is sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import os
import socket
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, cast

from aiohttp import web

from descriptors.storage_api import DeliveryStart, Patience, Spans
from descriptors.units import KIB
from objectcache.adapters.pump_socket import send_spans, takes_pump
from objectcache.adapters.reading_pace import ReadingPace

DRAIN_BYTES = 64 * KIB
STEP_BYTES = 256 * KIB
"""A client that takes none of this many bytes for a while is idle."""
_log = logging.getLogger(__name__)
_BEGUN = web.RequestKey("status of the answer begun", int)
_STANDING = web.RequestKey("headers of every answer", dict[str, str])


def promise_headers(http: web.BaseRequest, headers: dict[str, str]) -> None:
    """Set the headers that every answer to this request shall have; see `fulfil_headers`."""
    http[_STANDING] = headers


def fulfil_headers(http: web.BaseRequest, response: web.StreamResponse) -> None:
    """Add the promised headers to a response whose head is not sent yet."""
    response.headers.update(http.get(_STANDING, {}))


async def begin_answer(http: web.BaseRequest, response: web.StreamResponse) -> None:
    """Send the head of an answer whose body is streamed."""
    http[_BEGUN] = response.status
    fulfil_headers(http, response)
    await response.prepare(http)


def begun_status(http: web.BaseRequest) -> int:
    """The status of an answer whose body has begun to be streamed; 0 before."""
    status: int = http.get(_BEGUN, 0)
    return status


def abort_if_begun(http: web.BaseRequest) -> None:
    """After a failure, raise ConnectionResetError if the answer has begun, because it can then only be cut short."""
    if _BEGUN in http:
        abort_connection(http)
        raise ConnectionResetError("the answer was cut short")


def cutting(handler: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]) -> Any:
    """The handler, changed so that a ConnectionError closes the connection unanswered; aiohttp would answer 500."""

    async def handle(http: web.BaseRequest) -> web.StreamResponse:
        try:
            return await handler(http)
        except ConnectionError as error:
            _log.debug("%s %s ends unanswered: %s", http.method, http.path, error)
            abort_connection(http)
            return web.Response(status=500)  # is not sent, because the connection is gone

    return handle


def abort_connection(http: web.BaseRequest) -> None:
    """Cut a request's connection; see `cut`."""
    if http.transport is not None:
        cut(http.transport)


def cut(transport: asyncio.Transport) -> None:
    """Cut the connection so that no byte still queued is sent after this returns.

    An event loop may carry out `abort` a turn later and send from its queue before. A socket that is shut down takes no
    more bytes.
    """
    pseudo = transport.get_extra_info("socket")
    if pseudo is not None and pseudo.fileno() >= 0:
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(pseudo.fileno())) as same:
            same.shutdown(socket.SHUT_RDWR)
    transport.abort()


class ResponseSink:
    """A BodySink over one HTTP request. The transport's write buffer is set to zero: a write returns when the kernel
    has every byte, so the memory may be used again.
    """

    def __init__(self, http: web.BaseRequest, headers: Callable[[DeliveryStart], Mapping[str, str]]) -> None:
        self._http = http
        self._headers = headers
        self.response: web.StreamResponse | None = None
        self._pace: ReadingPace | None = None

    async def begin(self, start: DeliveryStart) -> None:
        transport = self._http.transport
        if transport is None:
            raise ConnectionResetError("the client is gone")
        cast(asyncio.WriteTransport, transport).set_write_buffer_limits(high=0)
        self.response = web.StreamResponse(headers=self._headers(start))
        self.response.content_type = "application/octet-stream"
        self.response.content_length = start.delivery_bytes
        await begin_answer(self._http, self.response)

    async def write(self, view: memoryview) -> None:
        if self.response is None:
            raise ConnectionResetError("write before begin")
        # aiohttp waits for the transport only past 64 KiB, so anything smaller is copied
        await self.response.write(view if len(view) > DRAIN_BYTES else bytes(view))

    async def send(self, spans: Spans, patience: Patience) -> None:
        """Send from a thread straight into the connection; with TLS, by way of the event loop, which encrypts."""
        if self.response is None:
            raise ConnectionResetError("send before begin")
        if self._pace is None:
            self._pace = ReadingPace(patience)
        if takes_pump(self._http):
            await send_spans(self._http, spans, self._pace)
            return
        loop = asyncio.get_running_loop()
        for address, nbytes in spans:
            view = memoryview((ctypes.c_char * int(nbytes)).from_address(int(address))).cast("B")
            for start in range(0, len(view), STEP_BYTES):
                step, began_s = view[start : start + STEP_BYTES], loop.time()
                async with asyncio.timeout(patience.window_s):
                    await self.write(step)
                if self._pace.is_too_slow(loop.time() - began_s, len(step)):
                    raise ConnectionResetError("the client takes too little")

    def abort(self) -> None:
        abort_connection(self._http)
