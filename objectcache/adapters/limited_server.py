"""aiohttp's low-level server, with limits on a connection's time and header bytes, and on the number of connections.

Built on the asyncio protocol's own methods and `RequestHandler.handle_error`. aiohttp itself closes idle keep-alive
connections.
"""

from __future__ import annotations

import asyncio
import logging
import resource
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any, cast

from aiohttp import HttpVersion11, StreamReader, web
from aiohttp.http_exceptions import BadHttpMessage, LineTooLong
from aiohttp.web_protocol import _ErrInfo

from descriptors.errors import CallerError, ErrorCode, ObjectCacheError, ServerError
from objectcache.adapters.caller import ByCaller, caller_of
from objectcache.adapters.deadlines import (
    HEAD_BYTES_MAX,
    ConnectionLimits,
    ConnectionVerdict,
    ConnectionWatch,
    Deadlines,
)
from objectcache.adapters.leave_to_send import is_held_back
from objectcache.adapters.pieces import InPieces, ParsingTurns, WaitingBytes
from objectcache.adapters.rare_warnings import RareWarnings
from objectcache.adapters.response_sink import cut
from objectcache.adapters.slow_bodies import LEAST_BODY_BYTES_PER_S, BodyWatch, SlowBodies

HEADER_COUNT_MAX = 256
PIECES_MAX = 64
"""A body has no more pieces in memory."""
FILES_FRACTION = 0.5
"""Connections take no more than this fraction of the open files that the host allows; the rest is for stored files,
engines and peers.
"""
FEW_FRACTION = 1 / 64
"""A caller with fewer bodies under way than this fraction of the places has few."""
FRESH_S = 1.0
"""A client that has just connected sends its request within this time."""
LOOKED_AT_MAX = 64
"""The slowest one of so many bodies ends for a caller that has few places."""
MOMENT_S = 0.001
"""A rate is measured over at least so long."""
LINGER_S = 3.0
"""The seconds for which the rest of a refused body is read and dropped. Without this many clients miss the refusal."""
ENDING_S = 1.0
"""The seconds in which a request whose body comes too slowly is answered."""
_log = logging.getLogger(__name__)

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]
Refuse = Callable[[ObjectCacheError], web.Response]


class LimitedServer(web.Server):
    """`refuse` makes the answer to bytes that cannot be parsed as a request. A client that disconnects cancels its
    handler. Bodies arrive as they were sent.
    """

    def __init__(self, handler: Handler, refuse: Refuse, limits: ConnectionLimits) -> None:
        super().__init__(_watched(handler), handler_cancellation=True)
        self.refuse = refuse
        self.warnings = RareWarnings(_log)
        files_max, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self.connections_max = max(1, min(limits.connections_max, int(FILES_FRACTION * files_max)))
        if self.connections_max < limits.connections_max:
            problem = "at most %d connections, not %d: this host allows %d open files (ulimit -n)"
            _log.warning(problem, self.connections_max, limits.connections_max, files_max)
        self.limits = limits
        self.idle: OrderedDict[Connection, float] = OrderedDict()
        """The connections without a request, the longest idle one first, each with the time since when it is."""
        self.slow: SlowBodies[Connection] = SlowBodies(self.connections_max)
        self.awaited: ByCaller[Connection] = ByCaller()
        """The connections with a request whose body is not here whole."""
        self.deadlines = Deadlines(limits.header_timeout_s, limits.send_idle_timeout_s)
        self.open_count = 0
        self.turns = ParsingTurns()

    def take_at_most(self, connections_max: int) -> None:
        """Take no more connections than these: the host has no memory for more."""
        if connections_max < self.connections_max:
            _log.warning("at most %d connections: this host has memory for so many with TLS", connections_max)
            self.connections_max = max(1, connections_max)

    def __call__(self) -> web.RequestHandler:
        return Connection(self, asyncio.get_running_loop())

    def makes_place(self, now_s: float, caller: object) -> bool:
        """Whether another connection gives its place up to one of this caller: the longest idle one, or those whose
        bodies come slowest. Where there are none, a caller with few bodies under way may have a place of the caller
        with most, and one without any that of somebody who has just connected.
        """
        if self._idle_makes_place(now_s - FRESH_S) or self._slowest_make_place(now_s):
            return True
        count = self.awaited.count(caller)
        has_few = count < max(1, int(FEW_FRACTION * self.connections_max))
        return (has_few and self._crowd_makes_place(now_s, count)) or (not count and self._idle_makes_place(now_s))

    def _idle_makes_place(self, until_s: float) -> bool:
        """The longest idle connection gives its place up, if it is idle since then or longer."""
        longest, since_s = next(iter(self.idle.items()), (None, 0.0))
        if longest is None or since_s > until_s:
            return False
        del self.idle[longest]
        longest.give_place_up()
        return True

    def _slowest_make_place(self, now_s: float) -> bool:
        slowest = self.slow.slowest(now_s, lambda connection: connection.slow_rate(now_s))
        for connection in slowest:
            connection.end_slow_body()
        if slowest:
            problem = "%d connections have requests: ended %d whose bodies come at less than %d bytes/s"
            self.warnings.warn(problem, self.open_count - 1, len(slowest), LEAST_BODY_BYTES_PER_S)
        return bool(slowest)

    def _crowd_makes_place(self, now_s: float, count: int) -> bool:
        """The caller with most bodies under way gives the place of a slow one to a caller that has `count`, and fewer.
        A body counts as slow by itself only after a while, and until then a place costs its client nothing.
        """
        crowd = self.awaited.most()
        if count + 1 >= len(crowd):
            return False
        slowest = min(islice(crowd, LOOKED_AT_MAX), key=lambda each: each.body_rate(now_s))
        self.warnings.warn("%d connections have requests: ended one, of %d of a caller", self.open_count, len(crowd))
        slowest.give_place_up()
        return True


@contextmanager
def gives_place_up(http: web.BaseRequest) -> Iterator[None]:
    """While the block runs, the request's connection is closed where its place is wanted, as one without a request."""
    connection = http.protocol
    if not isinstance(connection, Connection):
        yield
        return
    connection.may_give_place_up(is_so=True)
    try:
        yield
    finally:
        connection.may_give_place_up(is_so=False)


class Connection(InPieces, web.RequestHandler):
    """One client's connection."""

    __slots__ = (
        "_body", "_body_since_s", "_body_watch", "_caller", "_check", "_clock", "_http", "_is_broken", "_length",
        "_limited", "_waiting", "_watch", "_wire",
    )  # fmt: skip

    def __init__(self, server: LimitedServer, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(
            server,
            loop=loop,
            keepalive_timeout=server.limits.keepalive_timeout_s,
            auto_decompress=False,
            max_line_size=server.limits.header_bytes_max,
            max_field_size=server.limits.header_bytes_max,
            max_headers=HEADER_COUNT_MAX,
            lingering_time=LINGER_S,
            access_log=cast(Any, None),
        )
        self._limited = server
        self._clock = loop
        self._watch = ConnectionWatch(server.deadlines)
        self._wire: asyncio.Transport | None = None
        self._caller: object = self
        self._check: asyncio.TimerHandle | None = None
        self._body: StreamReader | None = None
        self._body_watch = BodyWatch()
        self._body_since_s = 0.0
        self._http: web.BaseRequest | None = None
        self._length = 0
        self._waiting = WaitingBytes(server.turns)
        self._is_broken = False

    @property
    def group(self) -> object:
        """The caller: a client with a thousand connections has one turn. A peer at a Unix socket has no address, and is
        a caller of its own.
        """
        return self._caller

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        wire = cast(asyncio.Transport, transport)
        peer = wire.get_extra_info("peername")
        self._caller = caller_of(str(peer[0])) if isinstance(peer, tuple) else self
        server = self._limited
        server.open_count += 1
        self._wire = wire
        is_full = server.open_count - server.slow.ending_count > server.connections_max
        if is_full and not server.makes_place(self._clock.time(), self._caller):
            server.warnings.warn("%d connections have requests: refused one more", server.open_count - 1)
            wire.abort()
            return
        super().connection_made(transport)
        server.idle[self] = self._clock.time()
        self._schedule()

    def give_place_up(self) -> None:
        """Another client wants to come, and this one asks for nothing, or its caller has more than others."""
        self._limited.awaited.remove(self._caller, self)
        if self._wire is not None:
            self._wire.abort()

    def may_give_place_up(self, *, is_so: bool) -> None:
        """Whether another client may have this one's place, although it has a request."""
        if is_so and self._wire is not None:
            self._limited.idle[self] = self._clock.time() - FRESH_S
        else:
            self._limited.idle.pop(self, None)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._limited.open_count -= 1
        self._limited.idle.pop(self, None)
        self._limited.slow.closed(self)
        self._limited.awaited.remove(self._caller, self)
        self._wire = None
        if self._check is not None:
            self._check.cancel()
        super().connection_lost(exc)

    def slow_rate(self, now_s: float) -> float | None:
        """The rate in bytes/s at which the body of the request comes, where the server waits for it and it is too slow;
        else None.
        """
        body, http = self._body, self._http
        if body is None or http is None or body.is_eof():
            return self._body_watch.slow_rate(0, now_s, is_awaited=False)
        is_awaited = not self._is_held() and not self._waiting.data and not is_held_back(http)
        return self._body_watch.slow_rate(body.total_bytes, now_s, is_awaited=is_awaited)

    def body_rate(self, now_s: float) -> float:
        """The bytes/s at which the body has come since the request began, whoever was waited for: a client may send
        what waits here to be parsed for long.
        """
        return 0.0 if self._body is None else self._body.total_bytes / max(now_s - self._body_since_s, MOMENT_S)

    def end_slow_body(self) -> None:
        """Another client wants to come: the request is answered, and its connection closed."""
        problem = f"the body comes at less than {LEAST_BODY_BYTES_PER_S} bytes/s, and no other connection is free"
        if self._body is not None:
            self._body.set_exception(CallerError(ErrorCode.REQUEST_TIMEOUT, problem, field="body"))
        self._lingering_time = 0.0  # no more of the body is read
        self._clock.call_later(ENDING_S, self.give_place_up)

    @property
    def held_bytes(self) -> int:
        """The bytes that wait to be parsed."""
        return len(self._waiting.data)

    @property
    def unanswered_count(self) -> int:
        """Requests, and refusals of what is none, that nobody has begun to answer."""
        return len(self._messages)

    def _plain_bytes(self) -> int:
        body = self._body
        return 0 if body is None or body.is_eof() else max(0, self._length - body.total_bytes)

    def _parse(self, data: bytes) -> None:
        """Nothing is parsed behind bytes that are no request: aiohttp would keep an error for each piece of them."""
        if self._is_broken:
            return
        body = self._body
        if body is None or body.is_eof():
            body = self._body = None
            if not self._watch.received(data, self._clock.time()):
                self._refuse(f"the headers have more than {HEAD_BYTES_MAX} bytes")
                return
        web.RequestHandler.data_received(self, data)
        self._is_broken = bool(self._messages) and isinstance(self._messages[-1][0], _ErrInfo)
        if self._upgraded:  # nobody here speaks another protocol, and aiohttp would parse what follows at once
            self._is_broken, self._message_tail = True, b""
            self.close()
        for each in (body, self._messages[-1][1] if self._messages else None):
            if data and type(each) is StreamReader:  # without data a reader may be at work on its pieces
                _join(each)
        if self._http is None and body is not None:
            self._clock.call_soon(_drop_unread, body)  # to read has aiohttp parse on
        if self._is_broken and body is not None and not body.is_eof():
            if self._http is None:
                self._leave_body(body)
            else:  # nobody else tells its reader
                body.set_exception(web.RequestPayloadError("the body is not well-formed"))
        if body is not None and body.is_eof():
            self._limited.awaited.remove(self._caller, self)
        if self._messages or (body is not None and body.is_eof()):
            self._watch.request_begun()  # what comes next is a body, or may be the rest of a head that has begun

    def request_begun(self, http: web.BaseRequest) -> None:
        self._body, self._length, self._http = http.content, http.content_length or 0, http
        self._body_since_s = self._clock.time()
        self._body_watch.begun(self._body_since_s)
        if not http.content.is_eof():
            self._limited.awaited.add(self._caller, self)
        if _head_bytes(http) > self._limited.limits.header_bytes_max:
            http._message = http._message._replace(should_close=True)  # before its answer says that it goes on
        self._limited.idle.pop(self, None)
        self._watch.request_begun()

    def request_ended(self) -> None:
        if not self._messages:  # else a head has come, and its body may come before its handler runs
            self._watch.request_ended()
        self._http = None
        self._limited.awaited.remove(self._caller, self)
        if self._body is not None:
            self._clock.call_soon(_drop_unread, self._body)
            if self._is_broken:
                self._leave_body(self._body)
        self._limited.slow.note(self, None)
        if self._wire is not None:
            self._limited.idle[self] = self._clock.time()

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Send the answer, and let go of its body: aiohttp keeps an answer until the connection's next one."""
        try:
            return await super().finish_response(request, resp, start_time)
        finally:
            if isinstance(resp, web.Response):
                resp.body = None

    def _leave_body(self, body: StreamReader) -> None:
        """Only aiohttp still reads a body that is not well-formed. It would write the error into the log."""
        body.feed_eof()
        self.close()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answer bytes that aiohttp could not parse with S3's XML, where aiohttp would answer with plain text."""
        if request.writer.output_size > 0:
            raise ConnectionError("an answer has begun")
        response = self._limited.refuse(_as_error(status, exc, self._limited.limits.header_bytes_max))
        response.force_close()
        return response

    def _schedule(self) -> None:
        self._check = self._clock.call_later(self._limited.deadlines.check_s, self._on_check)

    def _on_check(self) -> None:
        wire = self._wire
        if wire is None:
            return
        now_s = self._clock.time()
        self._limited.slow.note(self, self.slow_rate(now_s))
        verdict = self._watch.verdict(wire.get_write_buffer_size(), now_s)
        if verdict is ConnectionVerdict.KEEP:
            self._schedule()
            return
        _log.info("a connection is cut: %s", verdict.name)
        cut(wire)  # `close` would wait for the client once more, on a TLS connection

    def _refuse(self, problem: str) -> None:
        """Write the answer directly, outside any request, and close the connection."""
        wire = self._wire
        if wire is None or wire.is_closing():
            return
        answer = self._limited.refuse(CallerError(ErrorCode.REQUEST_HEADERS_TOO_LARGE, problem, field="headers"))
        body = cast(bytes, answer.body)
        names = "".join(f"{name}: {value}\r\n" for name, value in answer.headers.items() if name != "Content-Length")
        head = (
            f"HTTP/1.1 {answer.status} {answer.reason}\r\n{names}Content-Length: {len(body)}\r\nConnection: close\r\n"
        )
        wire.write(head.encode() + b"\r\n" + body)
        self.force_close()


def _join(body: StreamReader) -> None:
    """Small chunks of a body lie together: the loop stands still while a reader collects tens of thousands of them."""
    pieces = body._buffer
    if len(pieces) > PIECES_MAX:
        joined = b"".join(pieces)  # what was read of the first one is still at its beginning
        pieces.clear()
        pieces.append(joined)


def _head_bytes(http: web.BaseRequest) -> int:
    """About how many bytes the head of a request has. aiohttp keeps it until the connection's next request, in two to
    four times as many bytes, so a connection ends behind a large one.
    """
    return len(http.raw_path) + sum(len(name) + len(value) for name, value in http.raw_headers)


def _drop_unread(body: StreamReader) -> None:
    """Let go of what is here of a body that nobody reads any more: aiohttp keeps it until the connection's next
    request, and reads on only where the end of the body has not come.
    """
    if type(body) is StreamReader and body._buffer and body.exception() is None:  # an empty one has no buffer
        body.read_nowait()


def _watched(handler: Handler) -> Handler:
    async def handle(http: web.BaseRequest) -> web.StreamResponse:
        connection = http.protocol
        if not isinstance(connection, Connection):
            return await handler(http)
        connection.request_begun(http)
        try:
            response = await handler(http)
        finally:
            connection.request_ended()
        if http.version < HttpVersion11 and response.content_length is None:
            response.force_close()  # only the end of the connection ends such an answer, and aiohttp would keep it
        return response

    return handle


def _as_error(status: int, exc: BaseException | None, header_bytes_max: int) -> ObjectCacheError:
    if isinstance(exc, LineTooLong):
        return CallerError(
            ErrorCode.REQUEST_HEADERS_TOO_LARGE,
            f"the request line or a header has more than {header_bytes_max} bytes",
            field="headers",
        )
    if isinstance(exc, BadHttpMessage) or status < 500:
        return CallerError(ErrorCode.INVALID_REQUEST, "this is not a well-formed HTTP request", field="headers")
    _log.error("a request failed outside its handler", exc_info=exc)
    return ServerError(ErrorCode.INTERNAL_ERROR, "we failed; quote the request id", retryable=True)
