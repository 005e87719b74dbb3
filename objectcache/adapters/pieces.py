"""Bytes of connections are parsed in small pieces, and in turns: whoever is at the other end decides what they cost.

aiohttp parses whatever one read brought at once: a quarter of a megabyte of one-byte chunks, interim answers or garbage
keeps the event loop for tens of milliseconds, and makes thousands of objects before anybody can refuse them. Here all
connections of one `ParsingTurns` together have TURN_S of each turn of the loop; what is left waits, and its connection
is not read meanwhile. Bytes of a body whose length is known cost nothing to parse, and pass at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import struct
import time
from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import Any, Final, Protocol

import aiohttp
from aiohttp.base_protocol import BaseProtocol
from aiohttp.client_proto import ResponseHandler
from aiohttp.http_exceptions import HttpProcessingError

PIECE_BYTES: Final = 16 << 10
TURN_S: Final = 0.005
ANSWERS_MAX: Final = 16
"""To one request, interim ones included."""
NOT_WELL_FORMED: Final = "the answer is not well-formed"
_RESETS: Final = struct.pack("ii", 1, 0)
"""struct linger: closing the connection resets it, and nothing that waits is sent."""
_log = logging.getLogger(__name__)


class Piecewise(Protocol):
    """A connection whose bytes are parsed piece by piece. Connections of one group have one turn together."""

    @property
    def group(self) -> object: ...

    @property
    def transport(self) -> asyncio.Transport | None: ...

    def parse_piece(self) -> bool:
        """Parse the next piece of what waits; whether there is more that may be parsed."""
        ...


class ParsingTurns:
    """The connections of one event loop that wait to have bytes parsed."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._waiting: OrderedDict[object, deque[Piecewise]] = OrderedDict()
        """By whom a connection is to, or by connection: each has a turn after the other."""
        self._spent_s = 0.0
        self._is_called = False

    def has_time(self) -> bool:
        """Whether bytes that come now may be parsed at once."""
        return not self._waiting and self._spent_s < TURN_S

    def spend(self, began_s: float) -> None:
        """Count the time since `began_s` of time.perf_counter."""
        self._spent_s += time.perf_counter() - began_s
        self._call()

    def add(self, connection: Piecewise) -> None:
        """Have a connection parse what waits there, when it is its turn."""
        self._append(connection)
        self._call()

    def _append(self, connection: Piecewise) -> None:
        self._waiting.setdefault(connection.group, deque()).append(connection)

    def _call(self) -> None:
        if not self._is_called:
            self._is_called = True
            self._loop.call_soon(self._run)

    def _run(self) -> None:
        self._is_called = False
        began_s = time.perf_counter()
        while self._waiting and time.perf_counter() - began_s < TURN_S:
            group, connections = self._waiting.popitem(last=False)
            connection = connections.popleft()
            if connections:
                self._waiting[group] = connections
            try:
                if connection.parse_piece():
                    self._append(connection)
            except Exception:  # others wait, too
                _log.exception("a connection cannot go on")
                if connection.transport is not None:
                    connection.transport.abort()
        self._spent_s = 0.0
        if self._waiting:
            self._call()


@dataclass(slots=True, eq=False)
class WaitingBytes:
    """The bytes of a connection that wait to be parsed, whether aiohttp's parser has more of before (`has_rest`), and
    whether the connection is among those of `turns`.
    """

    turns: ParsingTurns
    data: bytes = b""
    has_rest: bool = False
    is_queued: bool = False


class InPieces(BaseProtocol):
    """A protocol of aiohttp, whose class has `_parse`, `group` and the attribute `_waiting`."""

    __slots__ = ()
    _waiting: WaitingBytes

    @property
    def group(self) -> object:
        """The peer: all connections to one peer have one turn together."""
        raise NotImplementedError

    def _parse(self, data: bytes) -> None:
        """The protocol's own `data_received`."""
        raise NotImplementedError

    def _plain_bytes(self) -> int:
        """How many of the next bytes are those of a body whose length is known."""
        return 0

    def data_received(self, data: bytes) -> None:
        waiting = self._waiting
        if not data:  # aiohttp goes on with what its parser has: up to a piece
            if waiting.turns.has_time():
                began_s = time.perf_counter()
                self._parse(data)
                waiting.turns.spend(began_s)
            else:
                waiting.has_rest = True
                self._queue()
            return
        if not waiting.data:
            plain = min(self._plain_bytes(), len(data))
            if plain:
                self._parse(data[:plain] if plain < len(data) else data)
                data = data[plain:]
                if not data:
                    return
            if len(data) <= PIECE_BYTES and waiting.turns.has_time():
                began_s = time.perf_counter()
                self._parse(data)
                waiting.turns.spend(began_s)
                return
        waiting.data += data
        self._pause_transport_reading()
        self._queue()

    def parse_piece(self) -> bool:
        """Parse the next piece of what waits; whether there is more that may be parsed."""
        waiting = self._waiting
        waiting.is_queued = False
        if self.transport is None:
            waiting.data = b""
        if waiting.has_rest:
            waiting.has_rest = False
            if self.transport is not None:
                self._parse(b"")
        elif waiting.data and not self._is_held():
            size = max(PIECE_BYTES, self._plain_bytes())
            piece, waiting.data = waiting.data[:size], waiting.data[size:]
            self._parse(piece)
        if self.transport is None or self._is_held():
            return False  # `_resume_transport_reading` goes on
        waiting.is_queued = bool(waiting.data)
        if not waiting.data:
            self._resume_transport_reading()
        return waiting.is_queued

    def _is_held(self) -> bool:
        """Whether aiohttp takes nothing more now."""
        return self._reading_paused or self._buffer_paused

    def _resume_transport_reading(self) -> None:
        """The bytes that wait come first."""
        if self._waiting.data or self._waiting.has_rest:
            self._queue()
        else:
            super()._resume_transport_reading()

    def _queue(self) -> None:
        if not self._waiting.is_queued:
            self._waiting.is_queued = True
            self._waiting.turns.add(self)


class Answers(InPieces, ResponseHandler):
    """A client's connection to somebody who may be hostile. More answers than ANSWERS_MAX to one request end it, and so
    does an answer that nobody has asked for: the next request on the connection would take it for its own.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, turns: ParsingTurns) -> None:
        ResponseHandler.__init__(self, loop)
        self._waiting = WaitingBytes(turns)
        self._answer_count = 0
        self._is_answered = True
        self._length: int | None = None
        self._peer: object = None

    @property
    def group(self) -> object:
        """The peer's address: an engine with a hundred streams has one turn."""
        return self if self._peer is None else self._peer

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._peer = transport.get_extra_info("peername")
        super().connection_made(transport)

    def _parse(self, data: bytes) -> None:
        """Nothing tells aiohttp's reader of a body that what follows is no HTTP: its request would never end."""
        if self._answer_count > ANSWERS_MAX:
            return
        body = self._payload
        ResponseHandler.data_received(self, data)
        if isinstance(self._exception, HttpProcessingError) and body is not None and not body.is_eof():
            body.set_exception(aiohttp.ClientPayloadError(NOT_WELL_FORMED))

    def set_exception(self, exc: BaseException, exc_cause: BaseException | None = None) -> None:
        """End the answer that is waited for. aiohttp's errors quote the bytes that are no HTTP, which may be of another
        request: nobody is told them.
        """
        if isinstance(exc, HttpProcessingError):
            super().set_exception(HttpProcessingError(code=exc.code, message=NOT_WELL_FORMED))
        elif exc_cause is None:
            super().set_exception(exc)
        else:
            super().set_exception(exc, exc_cause)

    def _plain_bytes(self) -> int:
        payload = self._payload
        if self._length is None or payload is None or payload.is_eof():
            return 0
        return max(0, self._length - payload.total_bytes)

    def set_response_params(self, **params: Any) -> None:
        self._answer_count, self._length, self._is_answered = 0, None, False
        if self._waiting.data or self._buffer:
            self._end_unasked()
        super().set_response_params(**params)

    def _end_unasked(self) -> None:
        self._waiting.data = b""
        if self.transport is not None:
            self.transport.abort()
        self.set_exception(aiohttp.ServerDisconnectedError("an answer to no request"))

    def feed_data(self, data: Any, size: int = 0) -> None:
        """Take an answer's head."""
        self._answer_count += 1
        if self._answer_count > ANSWERS_MAX + 1:
            return
        if self._answer_count > ANSWERS_MAX:
            self._waiting.data = b""
            if self.transport is not None:
                self.transport.abort()
            self.set_exception(aiohttp.ServerDisconnectedError("more answers than requests"))
            return
        message = data[0]
        if self._is_answered:
            self._end_unasked()
            return
        self._is_answered = message.code >= 200
        length = message.headers.get("Content-Length", "")
        is_plain = "Content-Encoding" not in message.headers and not message.chunked
        self._length = int(length) if is_plain and length.isascii() and length.isdecimal() else None
        super().feed_data(data, size)

    def close(self) -> None:
        """An exchange that is broken off resets its connection. Behind an orderly end the port would be taken for a
        minute. Clients decide how many exchanges are broken off, and this host has 28,232 ports towards a peer. So does
        one whose peer has answered and not read all of the request: an orderly end would wait for it, for ever.
        """
        transport, payload = self.transport, self._payload
        is_over = self._is_answered and (payload is None or payload.is_eof())
        if transport is None or (is_over and not transport.get_write_buffer_size()):
            super().close()
            return
        wire = transport.get_extra_info("socket")
        if wire is not None:
            with contextlib.suppress(OSError):  # it may have ended by itself
                wire.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESETS)
        self.abort()

    def connection_lost(self, exc: BaseException | None) -> None:
        """A peer that hangs up has sent what waits. An answer without a length is whole only where its connection ended
        in order: aiohttp takes any end for that of the answer.
        """
        waiting = self._waiting
        while waiting.data and not self._is_held():
            piece, waiting.data = waiting.data[:PIECE_BYTES], waiting.data[PIECE_BYTES:]
            self._parse(piece)
        waiting.data = b""
        payload = self._payload
        if exc is not None and payload is not None and not payload.is_eof():
            payload.set_exception(aiohttp.ClientPayloadError(f"the connection broke off: {type(exc).__name__}"), exc)
        super().connection_lost(exc)


def careful(connector: aiohttp.BaseConnector) -> aiohttp.BaseConnector:
    """The connector, whose connections parse answers in pieces and bound their number. Called on its event loop."""
    loop, turns = asyncio.get_running_loop(), ParsingTurns()
    connector._factory = lambda: Answers(loop, turns)  # type: ignore[assignment]
    return connector
