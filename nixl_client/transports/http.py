"""Kept-alive HTTP connections to one server, shared by threads, and answers whose bodies are read from them.

http.client is used directly because its `readinto` puts body bytes straight into the caller's buffer; higher-level
clients copy them first.
"""

from __future__ import annotations

import contextlib
import http.client
import io
import os
import select
import socket
import ssl
import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from descriptors.errors import ErrorCode, ServerError

IDLE_CONNECTIONS_MAX = 64
"""As many as one client runs fetches at a time; a connection beyond is closed when its request is over."""


HEAD_LINES_MAX = 512
"""Of an answer, with its interim answers."""


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
        is_tls = parts.scheme == "https"
        return cls(parts.netloc, parts.hostname, parts.port or (443 if is_tls else 80), is_tls)

    @property
    def url(self) -> str:
        """The scheme, the host and the port, without a path."""
        return f"{'https' if self.is_tls else 'http'}://{self.netloc}"


class ConnectionPool:
    """Connections to one server. At most IDLE_CONNECTIONS_MAX wait for their next request; how many are busy is the
    callers' choice. Safe from any thread, and after a fork: a child process makes connections of its own.
    """

    def __init__(self, address: ServerAddress) -> None:
        self._address = address
        self._tls = ssl.create_default_context() if address.is_tls else None
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
        connection.response_class = _WholeHead
        return connection

    def _check_process(self) -> None:
        """In a child process the idle connections are the parent's: let go of them, since both would read answers."""
        if self._process_id != os.getpid():
            inherited = self._idle
            self._process_id, self._lock, self._idle = os.getpid(), threading.Lock(), deque()
            for connection in inherited:
                connection.close()


class _WholeHead(http.client.HTTPResponse):
    """An answer whose head must be whole. http.client takes a connection that ends within the head for the head's end,
    so that `HTTP/1.1 200 O` would be a success.
    """

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


class Stream:
    """An answer whose body is still coming. `close` gives the connection back if the body was read to its end, and the
    request was sent to its end (`keeps`).
    """

    def __init__(
        self,
        pool: ConnectionPool,
        connection: http.client.HTTPConnection,
        response: http.client.HTTPResponse,
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

    def read(self, bytes_max: int | None = None) -> bytes:
        """The rest of the body, or its first `bytes_max` bytes. Raises UnansweredError when it breaks off."""
        try:
            return self._response.read() if bytes_max is None else self._response.read(bytes_max)
        except (OSError, http.client.HTTPException) as error:
            raise UnansweredError(f"the answer broke off: {error}") from error

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
