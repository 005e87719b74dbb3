"""Signed S3 requests over kept-alive connections, blocking, for use from many threads.

http.client is used directly because its `readinto` puts body bytes straight into the caller's buffer; higher-level
clients copy them first. Signing is botocore's.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import select
import socket
import ssl
import threading
import xml.etree.ElementTree as ElementTree
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

from descriptors.errors import ErrorCode, ObjectCacheError, ServerError, error_from_fields

IDLE_CONNECTIONS_MAX = 32
ERROR_BODY_BYTES_MAX = 65_536


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer: headers with lower-case names, body."""

    headers: Mapping[str, str]
    body: bytes

    def json(self) -> Any:
        """The body as JSON."""
        return json.loads(self.body)


class UnansweredError(ServerError):
    """The connection broke before an answer came: whether the request took effect is unknown."""

    def __init__(self, problem: str) -> None:
        super().__init__(ErrorCode.INTERNAL_ERROR, problem, retryable=True)


class Stream:
    """An answer whose body is still coming. `close` gives the connection back if the body was read to its end."""

    def __init__(self, pool: SignedHttp, connection: http.client.HTTPConnection, response: Any) -> None:
        self._pool = pool
        self._connection = connection
        self._response = response
        self.headers = {name.lower(): value for name, value in response.getheaders()}

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

    def abort(self) -> None:
        """Break the connection, waking a thread that reads from it."""
        sock = self._connection.sock
        if sock is not None:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Keep or drop the connection."""
        if self._response.isclosed() or self._response.length == 0:
            self._response.close()
            self._pool._keep(self._connection)
        else:
            self._connection.close()


class SignedHttp:
    """One endpoint, one key pair. Raises ObjectCacheError for refusals, UnansweredError for broken connections."""

    def __init__(self, endpoint: str, access_key: str, secret_key: str, region: str, timeout_s: float) -> None:
        parts = urlsplit(endpoint)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"the endpoint must be http(s)://HOST[:PORT], not {endpoint!r}")
        self._endpoint = f"{parts.scheme}://{parts.netloc}"
        self._host = parts.hostname
        self._port = parts.port
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._credentials = Credentials(access_key, secret_key)
        self._region = region
        self._timeout_s = timeout_s
        self._idle: deque[http.client.HTTPConnection] = deque()
        self._lock = threading.Lock()
        self._closed = False

    @property
    def address(self) -> tuple[str, int]:
        """Host and port of the endpoint."""
        return self._host, self._port or (443 if self._tls else 80)

    def request(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None = None,
        body: bytes | memoryview = b"",
        timeout_s: float | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Answer:
        """Send and read the whole answer. `path` is not yet percent-encoded; `headers` are signed with the rest."""
        stream = self.stream(method, path, query, body, timeout_s, headers)
        try:
            return Answer(stream.headers, stream._response.read())
        except (OSError, http.client.HTTPException) as error:
            raise UnansweredError(f"the answer broke off: {error}") from error
        finally:
            stream.close()

    def stream(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None = None,
        body: bytes | memoryview = b"",
        timeout_s: float | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Stream:
        """Send and read the answer's head."""
        target = quote(path, safe="/-_.~") + (f"?{urlencode(query, quote_via=quote)}" if query else "")
        signed = self._sign(method, target, body, headers or {})
        connection = self._connection()
        connection.timeout = timeout_s or self._timeout_s
        if connection.sock is not None:
            connection.sock.settimeout(connection.timeout)
        try:
            connection.request(method, target, body=body or None, headers=signed)
            response = connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise UnansweredError(f"{method} {path}: {error or type(error).__name__}") from error
        if response.status >= 300:
            raise self._refusal(connection, response)
        return Stream(self, connection, response)

    def close(self) -> None:
        """Close idle connections; busy ones close when they come back."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, deque()
        for connection in idle:
            connection.close()

    def _sign(self, method: str, target: str, body: bytes | memoryview, extra: Mapping[str, str]) -> dict[str, str]:
        data = bytes(body) if isinstance(body, memoryview) else body
        request = AWSRequest(method=method, url=self._endpoint + target, data=data, headers=dict(extra))
        S3SigV4Auth(self._credentials, "s3", self._region).add_auth(request)
        headers = dict(request.headers.items())
        headers.setdefault("Content-Length", str(len(data)))
        return headers

    def _connection(self) -> http.client.HTTPConnection:
        """A kept connection that is still open, or a new one."""
        while True:
            with self._lock:
                connection = self._idle.pop() if self._idle else None
            if connection is None:
                break
            if connection.sock is not None and not select.select([connection.sock], [], [], 0)[0]:
                return connection
            connection.close()
        if self._tls is not None:
            return http.client.HTTPSConnection(self._host, self._port, timeout=self._timeout_s, context=self._tls)
        return http.client.HTTPConnection(self._host, self._port, timeout=self._timeout_s)

    def _keep(self, connection: http.client.HTTPConnection) -> None:
        with self._lock:
            if not self._closed and len(self._idle) < IDLE_CONNECTIONS_MAX:
                self._idle.append(connection)
                return
        connection.close()

    def _refusal(self, connection: http.client.HTTPConnection, response: http.client.HTTPResponse) -> ObjectCacheError:
        try:
            body = response.read(ERROR_BODY_BYTES_MAX)
        except (OSError, http.client.HTTPException):
            body = b""
        if response.isclosed() or response.length == 0:
            self._keep(connection)
        else:
            connection.close()
        return parse_error(response.status, body, response.getheader("Retry-After"))


def parse_error(status: int, body: bytes, retry_after: str | None = None) -> ObjectCacheError:
    """The error an S3 Error document describes; what is no such document becomes InternalError with the status. In
    seconds, `retry_after` is when to ask again.
    """
    try:
        root = ElementTree.fromstring(body)
    except ElementTree.ParseError:
        return ServerError(ErrorCode.INTERNAL_ERROR, f"HTTP {status} without an error document")

    def number(name: str) -> int | None:
        text = root.findtext(name)
        return int(text) if text is not None and text.isdigit() else None

    return error_from_fields(
        {
            "code": root.findtext("Code"),
            "message": root.findtext("Message") or "",
            "field": root.findtext("ArgumentName"),
            "index": number("ChunkIndex"),
            "layer": number("LayerIndex"),
            "retry_after_s": int(retry_after) if retry_after is not None and retry_after.isdecimal() else None,
        }
    )
