"""A thread sends an answer's body straight into the connection; the event loop waits only when that is full."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable
from typing import cast

from aiohttp import web

from adapters import native
from adapters.threads import to_end
from descriptors.storage_api import Pump, Spans
from descriptors.units import KIB

HERE_BYTES_MAX = 256 * KIB
PATIENCE_MS = 20
"""How long a thread waits for a connection that is full, in all, before the event loop does."""


def takes_pump(http: web.BaseRequest) -> bool:
    """Whether bytes can go into the connection as they are: not where TLS has to encrypt them first."""
    transport = http.transport
    return (
        transport is not None
        and transport.get_extra_info("sslcontext") is None
        and transport.get_extra_info("socket") is not None
    )


async def send_by_pump(
    http: web.BaseRequest, pump: Pump, idle_timeout_s: float, on_sent: Callable[[int], None]
) -> None:
    """Send the body of an answer that has begun, telling `on_sent`, in any thread, what the connection has taken.
    Raises ConnectionError; a client that takes nothing for `idle_timeout_s` is one.
    """
    with await _drained(http) as own:

        def send_some(view: memoryview) -> int:
            count = own.send(view)
            on_sent(count)
            return count

        while not await pump.send(send_some, own.fileno()):
            await _writable(own, idle_timeout_s)


async def send_spans(http: web.BaseRequest, spans: Spans, idle_timeout_s: float) -> None:
    """Send memory as the next bytes of an answer that has begun; it is not read any more on return. Raises
    ConnectionError; a client that takes nothing for `idle_timeout_s` is one.
    """
    loop = asyncio.get_running_loop()
    nbytes = int(spans[:, 1].sum())
    with await _drained(http) as own:
        # a little is sent here: handing it to a thread would cost more
        sent = native.send_spans(own.fileno(), spans, 0, 0) if nbytes <= HERE_BYTES_MAX else 0
        while sent < nbytes:
            sending = loop.run_in_executor(None, native.send_spans, own.fileno(), spans, sent, PATIENCE_MS)
            sent += await to_end(sending)
            if sent < nbytes:
                await _writable(own, idle_timeout_s)


async def _drained(http: web.BaseRequest) -> socket.socket:
    """A second descriptor of the connection, everything written so far being on its way: the event loop watches the
    first itself.
    """
    transport = http.transport
    if transport is None:
        raise ConnectionResetError("the client is gone")
    cast(asyncio.WriteTransport, transport).set_write_buffer_limits(high=0)
    http.writer.send_headers()
    await http.writer.drain()
    if transport.is_closing():
        raise ConnectionResetError("the client is gone")
    return socket.socket(fileno=os.dup(transport.get_extra_info("socket").fileno()))


async def _writable(own: socket.socket, idle_timeout_s: float) -> None:
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()
    loop.add_writer(own.fileno(), _set, ready)
    try:
        async with asyncio.timeout(idle_timeout_s):
            await ready
    except TimeoutError as error:
        raise ConnectionResetError("the client takes nothing") from error
    finally:
        loop.remove_writer(own.fileno())


def _set(ready: asyncio.Future[None]) -> None:
    if not ready.done():
        ready.set_result(None)
