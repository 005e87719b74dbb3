"""A storage thread sends an answer's body straight into the connection; the event loop waits only when that is full."""

from __future__ import annotations

import asyncio
import os
import socket
from typing import cast

from aiohttp import web

from descriptors.storage_api import Pump


def takes_pump(http: web.BaseRequest) -> bool:
    """Whether bytes can go into the connection as they are: not where TLS has to encrypt them first."""
    transport = http.transport
    return (
        transport is not None
        and transport.get_extra_info("sslcontext") is None
        and transport.get_extra_info("socket") is not None
    )


async def send_by_pump(http: web.BaseRequest, pump: Pump, idle_timeout_s: float) -> None:
    """Send the body of an answer that has begun. Raises ConnectionError; a client that takes nothing for
    `idle_timeout_s` is one.
    """
    transport = http.transport
    if transport is None:
        raise ConnectionResetError("the client is gone")
    cast(asyncio.WriteTransport, transport).set_write_buffer_limits(high=0)
    http.writer.send_headers()
    await http.writer.drain()
    if transport.is_closing():
        raise ConnectionResetError("the client is gone")
    # a second descriptor of the connection: the event loop watches the first itself
    with socket.socket(fileno=os.dup(transport.get_extra_info("socket").fileno())) as own:
        while not await pump.send(own.send, own.fileno()):
            await _writable(own, idle_timeout_s)


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
