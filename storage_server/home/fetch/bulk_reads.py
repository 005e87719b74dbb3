"""Bulk reads: each request has a thread, and its body goes from the socket straight into memory that the caller gives.

On an event loop the bytes would pass through two more buffers, and its one thread would be the bottleneck: 64 chunks of
2 MiB took twice as long.
"""

from __future__ import annotations

import asyncio
import http.client
import io
import select
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from urllib.parse import urlsplit

from descriptors.errors import ErrorCode, ServerError
from descriptors.units import KIB
from objectcache.adapters.name_lookups import NameForThreads
from objectcache.adapters.threads import finished
from objectcache.adapters.trust import client_context
from storage_server.home.rules.least_rate import LeastRate
from storage_server.home.rules.refusals import NoConnectionError, unreachable
from storage_server.settings import UpstreamSettings

HEAD_BYTES_MAX = 1 << 15
ERROR_BYTES_MAX = 64 << 10
PIECE_BYTES = 128 * KIB
"""Read in one call, which returns when all of it has come: the rate of a body is watched between calls."""
HEAD_LINES_MAX = 512
"""The head of an answer has no more lines, with its interim answers, which http.client passes over for as long as they
come.
"""
IDLE_S_MAX = 15.0
"""Services close connections that are idle for longer."""


@dataclass(frozen=True, slots=True)
class Into:
    """Where a body goes, which must have the length of `view`. `on_step` is called in the reading thread with the bytes
    so far: at `first_bytes`, after each further `step_bytes`, and at the end.
    """

    view: memoryview
    first_bytes: int
    step_bytes: int
    on_step: Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Head:
    """An answer's status and headers, with lower-case names, and the body of an error."""

    status: int
    headers: Mapping[str, str]
    document: bytes = b""


class BulkReads:
    """Connections to one service, each used by one thread at a time. `read` is called on an event loop."""

    def __init__(self, settings: UpstreamSettings) -> None:
        parts = urlsplit(settings.endpoint)
        self._settings = settings
        self._host = parts.hostname or ""
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._name = NameForThreads(self._host, self._port)
        self._context = client_context() if parts.scheme == "https" else None
        self._idle: deque[tuple[float, http.client.HTTPConnection]] = deque(maxlen=settings.fetches_max)
        self._threads = ThreadPoolExecutor(settings.fetches_max, "upstream-read")

    def read(self, target: str, headers: Mapping[str, str], into: Into) -> BulkRead:
        """Begin a GET with these signed headers."""
        return BulkRead(
            reads=self,
            target=target,
            headers=headers,
            into=into,
            threads=self._threads,
            window_s=self._settings.read_timeout_s,
        )

    def close(self) -> None:
        """Wait for the threads, and close the idle connections."""
        self._name.close()
        self._threads.shutdown()
        while self._idle:
            self._idle.pop()[1].close()

    def _idle_one(self) -> http.client.HTTPConnection | None:
        """A connection that was used before. One on which something came since is closed: it is the service's end of
        the connection, or the answer to no request of ours.
        """
        with suppress(IndexError):
            while True:
                since_s, idle = self._idle.pop()
                if time.monotonic() - since_s < IDLE_S_MAX and not _has_input(idle.sock):
                    return idle
                idle.close()
        return None

    def _connected(self) -> http.client.HTTPConnection:
        timeout_s = self._settings.connect_timeout_s
        if self._context is None:
            made = http.client.HTTPConnection(self._host, self._port, timeout=timeout_s)
        else:
            made = http.client.HTTPSConnection(self._host, self._port, timeout=timeout_s, context=self._context)
        made.response_class = _ShortHead
        made._create_connection = self._socket_to  # type: ignore[attr-defined]
        made.connect()
        made.sock.settimeout(self._settings.read_timeout_s)
        return made

    def _socket_to(self, _: object, timeout_s: float, *__: object) -> socket.socket:
        """As `socket.create_connection` makes it, which waits for a name server for as long as that likes."""
        failure = OSError(f"{self._host} has no address")
        for family, kind, protocol, _name, address in self._name.addresses():
            made = None
            try:
                made = socket.socket(family, kind, protocol)
                made.settimeout(timeout_s)
                made.connect(address)
            except OSError as error:
                failure = error
                if made is not None:
                    made.close()
            else:
                return made
        raise failure

    def _give_back(self, connection: http.client.HTTPConnection) -> None:
        now_s = time.monotonic()
        self._idle.append((now_s, connection))
        with suppress(IndexError):
            while now_s - self._idle[0][0] > IDLE_S_MAX:
                self._idle.popleft()[1].close()


class BulkRead:
    """One request under way. `head` comes first, then `body`, when all of it lies there; both may raise
    ServerError(SlowDown), also where fewer bytes come than `LeastRate` wants in `window_s`, and NoConnectionError.
    `end` it before its memory is used for anything else.
    """

    def __init__(
        self,
        reads: BulkReads,
        target: str,
        headers: Mapping[str, str],
        into: Into,
        threads: ThreadPoolExecutor,
        window_s: float,
    ) -> None:
        self._reads = reads
        self._target = target
        self._headers = headers
        self._into = into
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._is_ended = False
        self._refusal: Head | None = None
        self._problem = "the request was broken off"
        self._received_bytes = 0
        self._seen_bytes: int | None = None
        self._window_s = window_s
        self._rate = LeastRate(window_s)
        self._watch = self._loop.call_later(window_s, self._check_rate)
        self.head: asyncio.Future[Head] = self._loop.create_future()
        self.body: asyncio.Future[None] = self._loop.create_future()
        self._thread = self._loop.run_in_executor(threads, self._run)
        self._thread.add_done_callback(self._note_end)

    async def end(self) -> None:
        """Break the request off where it has not ended. On return no thread writes into its memory."""
        if self._broken_off():
            await finished(self._thread)

    def _broken_off(self) -> bool:
        """Have the thread end; False where it has not begun, and will not."""
        with self._lock:
            self._is_ended = True
            if self._socket is None:
                return False
            with suppress(OSError):
                socket.socket.shutdown(self._socket, socket.SHUT_RDWR)
        return True

    def _check_rate(self) -> None:
        """Break off what comes too slowly, its head included, from the first check on that finds it begun."""
        received_bytes = self._received_bytes
        if self._seen_bytes is not None and self._rate.is_too_slow(self._window_s, received_bytes - self._seen_bytes):
            self._problem = "the answer comes too slowly"
            self._broken_off()
            return
        if self._socket is not None:
            self._seen_bytes = received_bytes
        self._watch = self._loop.call_later(self._window_s, self._check_rate)

    def _note_end(self, thread: asyncio.Future[None]) -> None:
        self._watch.cancel()
        error = None if thread.cancelled() else thread.exception()
        if thread.cancelled():
            error = unreachable(self._problem)
        for future in (self.head, self.body):
            if future.done():
                continue
            if error is not None:
                future.set_exception(error)
                future.exception()  # it may be that nobody asks any more
            elif future is self.body:
                self.body.set_result(None)

    def _run(self) -> None:
        try:
            connection, response = self._answered()
            is_reusable = False
            try:
                is_reusable = self._received(response)
            finally:
                with self._lock:
                    self._socket = None
                if is_reusable:
                    self._reads._give_back(connection)
                else:
                    response.close()
                    connection.close()
            if self._refusal is not None:  # only now: whoever is told of it ends the read, and with it the connection
                self._tell(self._refusal)
        except http.client.IncompleteRead as error:
            raise unreachable(self._problem if self._is_ended else "the answer ended early") from error
        except (OSError, http.client.HTTPException) as error:
            if self._is_ended:
                raise unreachable(self._problem) from error
            if type(error) in _OF_ONE_OBJECT:
                problem = f"the upstream store: {error}"
                raise ServerError(ErrorCode.INTERNAL_ERROR, problem, retryable=False) from error
            raise unreachable(str(error) or type(error).__name__) from error

    def _answered(self) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        """The answer's head. A connection that was idle may have been closed by the service: then on a new one."""
        while (idle := self._reads._idle_one()) is not None:
            with suppress(ConnectionError, ssl.SSLError, http.client.BadStatusLine):
                return idle, self._asked(idle)
            self._require_wanted()
        self._require_wanted()
        try:
            made = self._reads._connected()
        except OSError as error:
            raise NoConnectionError(str(error) or type(error).__name__) from error
        return made, self._asked(made)

    def _asked(self, connection: http.client.HTTPConnection) -> http.client.HTTPResponse:
        try:
            with self._lock:
                self._require_wanted()
                self._socket = connection.sock
            connection.request("GET", self._target, headers=dict(self._headers))
            return connection.getresponse()
        except BaseException:
            with self._lock:
                self._socket = None
            connection.close()
            raise

    def _require_wanted(self) -> None:
        if self._is_ended:
            raise ConnectionAbortedError(self._problem)

    def _received(self, response: http.client.HTTPResponse) -> bool:
        """Receive the body; whether the connection can be used again."""
        headers = {name.lower(): _text(value) for name, value in response.getheaders()}
        if sum(map(len, headers.values())) > HEAD_BYTES_MAX:
            raise http.client.LineTooLong(f"a head of over {HEAD_BYTES_MAX} bytes, which")
        view = self._into.view
        if response.status >= 300:
            is_whole, document = _error_document(response)
            self._refusal = Head(response.status, headers, document)
            return is_whole and response.isclosed() and not response.will_close
        self._tell(Head(response.status, headers))
        if response.length != len(view):
            raise ConnectionAbortedError(f"{response.length} bytes come of {len(view)}")
        at, until = 0, self._into.first_bytes
        while at < len(view):
            count = response.readinto(view[at : min(until, len(view), at + PIECE_BYTES)])
            if not count:
                raise http.client.IncompleteRead(b"", len(view) - at)
            at += count
            self._received_bytes = at
            if at >= min(until, len(view)):
                self._into.on_step(at)
                until = at + self._into.step_bytes
        return response.isclosed() and not response.will_close

    def _tell(self, head: Head) -> None:
        def tell() -> None:
            if not self.head.done():
                self.head.set_result(head)

        with suppress(RuntimeError):  # the loop is closed, so nobody waits any more
            self._loop.call_soon_threadsafe(tell)


_OF_ONE_OBJECT = (http.client.HTTPException, http.client.LineTooLong)
"""Raised by http.client for more than 100 headers, or for a long one: it is about one object, not about the service."""


def _error_document(response: http.client.HTTPResponse) -> tuple[bool, bytes]:
    """Whether the document of an error could be read, and the document; the status says the rest."""
    try:
        return True, response.read(ERROR_BYTES_MAX)
    except http.client.HTTPException:
        return False, b""


class _ShortHead(http.client.HTTPResponse):
    """An answer whose head has few lines. Raises http.client.BadStatusLine for more, which is about the service and not
    about one object. A body in chunks, which only an error may have, has as few lines for sizes and trailers: each is a
    step of Python that takes the interpreter's lock.
    """

    def begin(self) -> None:
        file = self.fp
        self.fp = _Lines(file)  # type: ignore[assignment]
        try:
            super().begin()
        finally:
            if self.fp is not None:
                self.fp = _Lines(file) if self.chunked else file  # type: ignore[assignment]


class _Lines:
    def __init__(self, file: io.BufferedReader) -> None:
        self._file = file
        self._left = HEAD_LINES_MAX
        self.close = file.close
        self.flush = file.flush
        self.read = file.read
        self.readinto = file.readinto

    def readline(self, limit: int = -1) -> bytes:
        self._left -= 1
        if self._left < 0:
            raise http.client.BadStatusLine(f"a head of more than {HEAD_LINES_MAX} lines")
        return self._file.readline(limit)


def _has_input(connected: socket.socket) -> bool:
    poll = select.poll()
    poll.register(connected, select.POLLIN)
    return bool(poll.poll(0))


def _text(value: str) -> str:
    """A header's value, which http.client reads as Latin-1, as aiohttp reads it."""
    return value.encode("latin-1").decode("utf-8", "surrogateescape")
