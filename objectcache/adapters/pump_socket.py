"""Sending an answer's body from a thread straight into the connection. The event loop waits only when that is full."""

from __future__ import annotations

import asyncio
import fcntl
import os
import socket
import termios
from collections.abc import Callable
from typing import cast

from aiohttp import web

from descriptors.storage_api import Pump, Spans
from descriptors.units import KIB
from objectcache.adapters import native
from objectcache.adapters.reading_pace import ReadingPace
from objectcache.adapters.threads import to_end

SENT_HERE_BYTES_MAX = 256 * KIB
PATIENCE_MS = 20
"""The seconds that a thread waits in all for a full connection. After that the event loop waits."""


def takes_pump(http: web.BaseRequest) -> bool:
    """Whether bytes can go into the connection unchanged; with TLS they cannot, because they must be encrypted."""
    transport = http.transport
    return (
        transport is not None
        and transport.get_extra_info("sslcontext") is None
        and transport.get_extra_info("socket") is not None
    )


async def send_by_pump(http: web.BaseRequest, pump: Pump, pace: ReadingPace, on_sent: Callable[[int], None]) -> None:
    """Send the body of an answer that has begun. `on_sent` is called, in any thread, with the bytes that the connection
    took. Raises ConnectionError, also for a client that reads too slowly.
    """
    with await _drained(http) as own:

        def send_some(view: memoryview) -> int:
            count = own.send(view)
            on_sent(count)
            return count

        while not await pump.send(send_some, own.fileno()):
            await _writable(own, pace)


async def send_spans(http: web.BaseRequest, spans: Spans, pace: ReadingPace) -> None:
    """Send memory as the next bytes of an answer that has begun. On return the memory is not read any more. Raises
    ConnectionError, also for a client that reads too slowly.
    """
    loop = asyncio.get_running_loop()
    nbytes = int(spans[:, 1].sum())
    with await _drained(http) as own:
        # few bytes are sent here, because a hand-over to a thread would cost more
        sent = native.send_spans(own.fileno(), spans, 0, 0) if nbytes <= SENT_HERE_BYTES_MAX else 0
        while sent < nbytes:
            sending = loop.run_in_executor(None, native.send_spans, own.fileno(), spans, sent, PATIENCE_MS)
            sent += await to_end(sending)
            if sent < nbytes:
                await _writable(own, pace)


async def _drained(http: web.BaseRequest) -> socket.socket:
    """Wait until everything written so far is on its way; returns a second descriptor of the connection, because the
    event loop watches the first itself.
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


async def _writable(own: socket.socket, pace: ReadingPace) -> None:
    """Wait until the connection takes more. The kernel reports that only when a third of its buffer is free, which may
    take minutes with a slow reader. Meanwhile the acknowledged bytes show whether the client reads.
    """
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()
    loop.add_writer(own.fileno(), _set, ready)
    try:
        began_s, unsent_bytes = loop.time(), _unacknowledged(own)
        while True:
            done, _ = await asyncio.wait([ready], timeout=pace.check_s)
            now_s, left_bytes = loop.time(), _unacknowledged(own)
            if pace.is_too_slow(now_s - began_s, unsent_bytes - left_bytes):
                raise ConnectionResetError("the client takes too little")
            if done:
                return
            began_s, unsent_bytes = now_s, left_bytes
    finally:
        loop.remove_writer(own.fileno())


def _unacknowledged(own: socket.socket) -> int:
    """Bytes in the connection's send queue."""
    return int.from_bytes(fcntl.ioctl(own.fileno(), termios.TIOCOUTQ, bytes(4)), "little")


def _set(ready: asyncio.Future[None]) -> None:
    if not ready.done():
        ready.set_result(None)
