"""Kept-alive HTTP connections to one server, shared by threads, and answers whose bodies are read from them.

http.client is used directly because its `readinto` puts body bytes straight into the caller's buffer; higher-level
clients copy them first.
"""

from __future__ import annotations

import contextlib
import http.client
import io
import ipaddress
import os
import select
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from descriptors.errors import ErrorCode, ServerError
from descriptors.units import KIB, MIB
from objectcache.adapters.trust import CA_BUNDLE, client_context

IDLE_CONNECTIONS_MAX = 64
"""As many as one client runs fetches at a time; a connection beyond is closed when its request is over."""


HEAD_LINES_MAX = 512
"""The head of an answer has no more lines, with its interim answers."""
HEAD_BYTES_MAX = MIB
PIECE_BYTES = 64 * KIB
_SPEAKS_HTTP = ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "HTTP_REQUEST")
NUMBER_DIGITS_MAX = 18


class UnansweredError(ServerError):
    """The connection broke before an answer came: whether the request took effect is unknown, unless it was
    `never_sent`.
    """

    def __init__(self, problem: str, *, never_sent: bool = False, retryable: bool = True) -> None:
        super().__init__(ErrorCode.INTERNAL_ERROR, problem, retryable=retryable)
        self.never_sent = never_sent


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """Where a server listens, and whether it speaks TLS there. `netloc` is host and port as the user wrote them."""

    netloc: str
    host: str
    port: int
    is_tls: bool

    @classmethod
    def parse(cls, endpoint: str) -> ServerAddress:
        """Raises ValueError for what is no http(s)://HOST[:PORT]."""
        parts = urlsplit(endpoint)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"the endpoint must be http(s)://HOST[:PORT], not {endpoint!r}")
        if parts.path.strip("/") or parts.query or parts.fragment:
            raise ValueError(f"a server has no path: write {parts.scheme}://{parts.netloc}, not {endpoint!r}")
        is_tls = parts.scheme == "https"
        return cls(parts.netloc, parts.hostname, parts.port or (443 if is_tls else 80), is_tls)

    @property
    def url(self) -> str:
        """The scheme, the host and the port, without a path."""
        return f"{'https' if self.is_tls else 'http'}://{self.netloc}"

    @property
    def is_unseen(self) -> bool:
        """Whether nobody between here and the server can see or change bytes: over TLS, and within this host."""
        if self.is_tls or self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False


def reason_of(error: Exception, address: ServerAddress) -> str:
    """Why a server did not answer, and what may help, for people."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not trusted here ({error.verify_message}): {CA_BUNDLE} names its CA's PEM file"
    if isinstance(error, ssl.SSLError) and error.reason in _SPEAKS_HTTP:
        return f"it speaks http: write http://{address.netloc}"
    if isinstance(error, http.client.RemoteDisconnected) and not address.is_tls:
        return f"{error}; if it speaks TLS, write https://{address.netloc}"
    if isinstance(error, OSError) and error.strerror is not None:
        return error.strerror
    return str(error) or type(error).__name__


class ConnectionPool:
    """Connections to one server. At most IDLE_CONNECTIONS_MAX wait for their next request; how many are busy is the
    callers' choice. Safe from any thread, and after a fork: a child process makes connections of its own.
    """

    def __init__(self, address: ServerAddress) -> None:
        self._address = address
        self._tls = client_context() if address.is_tls else None
        self._is_closed = False
        self._process_id = os.getpid()
        self._lock = threading.Lock()
        self._idle: deque[http.client.HTTPConnection] = deque()

    def take(self, timeout_s: float) -> http.client.HTTPConnection:
        """A kept connection that is still open, or a new one; each wait on it lasts at most `timeout_s`."""
        connection = self._idle_connection() or self._new_connection()
        connection.timeout = timeout_s
        if connection.sock is not None:
            connection.sock.settimeout(timeout_s)
        return connection

    def give_back(self, connection: http.client.HTTPConnection) -> None:
        """The connection's answer has been read to its end."""
        self._check_process()
        with self._lock:
            if not self._is_closed and len(self._idle) < IDLE_CONNECTIONS_MAX:
                self._idle.append(connection)
                return
        connection.close()

    def close(self) -> None:
        """Close idle connections. A busy connection closes when it comes back."""
        self._check_process()
        with self._lock:
            self._is_closed = True
            idle, self._idle = self._idle, deque()
        for connection in idle:
            connection.close()

    def _idle_connection(self) -> http.client.HTTPConnection | None:
        self._check_process()
        while True:
            with self._lock:
                connection = self._idle.pop() if self._idle else None
            if connection is None:
                return None
            if connection.sock is not None and not select.select([connection.sock], [], [], 0)[0]:
                return connection
            connection.close()

    def _new_connection(self) -> http.client.HTTPConnection:
        connection = http.client.HTTPConnection(self._address.host, self._address.port)
        if self._tls is not None:
            connection = http.client.HTTPSConnection(self._address.host, self._address.port, context=self._tls)
        connection.response_class = BoundedAnswer
        return connection

    def _check_process(self) -> None:
        """In a child process the idle connections are the parent's: let go of them, since both would read answers."""
        if self._process_id != os.getpid():
            inherited = self._idle
            self._process_id, self._lock, self._idle = os.getpid(), threading.Lock(), deque()
            for connection in inherited:
                connection.close()


class _BoundedSocket(io.RawIOBase):
    """The input of a connection, until a time and up to a number of bytes; None for no bound."""

    def __init__(self, sock: socket.socket, raw: io.RawIOBase) -> None:
        self._sock = sock
        self._raw = raw
        self.until_s: float | None = None
        self.bytes_left: int | None = None

    def readable(self) -> bool:
        return True

    def readinto(self, view: Any, /) -> int | None:
        """Raises TimeoutError, and http.client.HTTPException for too many bytes."""
        if self.until_s is not None:
            left_s = self.until_s - time.monotonic()
            if left_s <= 0:
                raise TimeoutError("the answer was not whole in time")
            self._sock.settimeout(left_s)
        count = self._raw.readinto(view)
        if self.bytes_left is not None and count:
            self.bytes_left -= count
            if self.bytes_left < 0:
                raise http.client.HTTPException("the answer has too many bytes besides its body")
        return count

    def close(self) -> None:
        self._raw.close()
        super().close()


class BoundedAnswer(http.client.HTTPResponse):
    """An answer whose head must be whole, and which may have to be whole by a time. http.client takes a connection that
    ends within the head for the head's end, so that `HTTP/1.1 200 O` would be a success; and it reads trailers, pieces
    of chunks and lines of the head for as long as they come.
    """

    def __init__(self, sock: socket.socket, *arguments: Any, **named: Any) -> None:
        super().__init__(sock, *arguments, **named)
        self._coming = _BoundedSocket(sock, self.fp.detach())
        self.fp = io.BufferedReader(self._coming)

    def bound(self, until_s: float | None, bytes_max: int | None) -> None:
        """From now on all reads end at `until_s` (of the steady clock), and bring that many bytes at most."""
        self._coming.until_s, self._coming.bytes_left = until_s, bytes_max

    def begin(self) -> None:
        """Raises http.client.RemoteDisconnected where the head breaks off, HTTPException where it has no end, and for
        interim answers but `100 Continue`: the real answer would be taken for the next request's.
        """
        file = self.fp
        self.fp = _WholeLines(file)  # type: ignore[assignment]
        try:
            super().begin()
        finally:
            if self.fp is not None:
                self.fp = file
        if self.status < 200:
            raise http.client.HTTPException(f"the answer has the interim status {self.status}")


class _WholeLines:
    """The lines of a head, each of which must have its end."""

    def __init__(self, file: io.BufferedReader) -> None:
        self._file = file
        self._left = HEAD_LINES_MAX

    def readline(self, limit: int = -1) -> bytes:
        if not self._left:
            raise http.client.HTTPException(f"the answer's head has more than {HEAD_LINES_MAX} lines")
        self._left -= 1
        line = self._file.readline(limit)
        if not line.endswith(b"\n") and not 0 <= limit <= len(line):
            raise http.client.RemoteDisconnected("the answer broke off within its head")
        return line

    def close(self) -> None:
        self._file.close()


def bounded(connection: http.client.HTTPConnection, timeout_s: float, bytes_max: int) -> BoundedAnswer:
    """The head of the answer to the request that was sent. It and a body of up to `bytes_max` must come in `timeout_s`;
    the lines between and behind a body's pieces may be as long as the body.
    """

    def made(*arguments: Any, **named: Any) -> BoundedAnswer:
        answer = BoundedAnswer(*arguments, **named)
        answer.bound(time.monotonic() + timeout_s, HEAD_BYTES_MAX + 2 * bytes_max)
        return answer

    connection.response_class = made  # type: ignore[assignment]
    response = connection.getresponse()
    assert isinstance(response, BoundedAnswer)
    return response


def number_in(headers: Mapping[str, str], name: str) -> int:
    """The number in a header. Raises UnansweredError where the answer has none, or an absurd one."""
    text = headers.get(name, "")
    if not text.isdecimal() or len(text) > NUMBER_DIGITS_MAX:
        raise UnansweredError(f"the answer's {name} is no number", retryable=False)
    return int(text)


class Stream:
    """An answer whose body is still coming. `close` gives the connection back if the body was read to its end, and the
    request was sent to its end (`keeps`).
    """

    def __init__(
        self,
        pool: ConnectionPool,
        connection: http.client.HTTPConnection,
        response: BoundedAnswer,
        *,
        keeps: bool = True,
    ) -> None:
        self._pool = pool
        self._keeps = keeps
        self._connection = connection
        self._response = response
        self._lock = threading.Lock()
        self._is_closed = False
        self.headers: Mapping[str, str] = {name.lower(): value for name, value in response.getheaders()}

    @property
    def has_known_end(self) -> bool:
        """Whether the head says where the body ends. If only the end of the connection does, a body that breaks off
        looks whole.
        """
        return self._response.chunked or self._response.length is not None

    def read_into(self, view: memoryview) -> None:
        """Fill `view` from the body. Raises UnansweredError when it ends early."""
        while view:
            try:
                count = self._response.readinto(view)
            except (OSError, http.client.HTTPException) as error:
                raise UnansweredError(f"the body broke off: {error}") from error
            if not count:
                raise UnansweredError("the body ended early")
            view = view[count:]

    def read(self, bytes_max: int) -> bytes:
        """The rest of the body. Raises UnansweredError when it breaks off, or has more than `bytes_max` bytes."""
        body = bytearray()
        try:
            while (self._response.length or 0) + len(body) <= bytes_max:
                piece = self._response.read(PIECE_BYTES)
                body += piece
                if not piece:
                    break
            else:
                raise UnansweredError(f"the answer has more than {bytes_max} bytes", retryable=False)
        except (OSError, http.client.HTTPException) as error:
            raise UnansweredError(f"the answer broke off: {error}") from error
        if self._response.length:
            raise UnansweredError("the answer broke off: it ended early")
        return bytes(body)

    def unbounded(self, timeout_s: float) -> None:
        """From now on each wait for the body lasts at most `timeout_s`, in place of all of them together."""
        self._response.bound(None, None)
        if self._connection.sock is not None:
            self._connection.sock.settimeout(timeout_s)

    def abort(self) -> None:
        """Break the connection, waking a thread that reads from it. Does nothing after `close`: the connection may
        serve another request by then.
        """
        with self._lock:
            sock = None if self._is_closed else self._connection.sock
            if sock is not None:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Keep the connection for another request, or drop it."""
        with self._lock:
            self._is_closed = True
        if self._keeps and (self._response.isclosed() or self._response.length == 0):
            self._response.close()
            self._pool.give_back(self._connection)
        else:
            self._connection.close()
