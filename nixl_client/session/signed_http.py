"""Signed S3 requests to one server, blocking, for use from many threads. Signing is botocore's.

Every client of a process that talks to the same server with the same credentials uses the same connections.
"""

from __future__ import annotations

import http.client
import json
import ssl
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urlencode

from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.config import Config
from botocore.credentials import Credentials

from descriptors.errors import ObjectCacheError, error_from_fields
from descriptors.units import MIB
from descriptors.xml_body import element_of
from nixl_client.session import retries
from nixl_client.session.retries import Retries
from nixl_client.session.shared import Shared
from nixl_client.transports.http import ConnectionPool, ServerAddress, Stream, UnansweredError, bounded, reason_of
from objectcache.adapters.native import crc32c

ANSWER_BYTES_MAX = 16 * MIB
"""An answer that is read as a whole has no more bytes: the documents of the protocol have no more."""
ERROR_BODY_BYTES_MAX = 65_536
ERROR_ELEMENTS_MAX = 256
SUMMED_BYTES_MIN = 64 << 10
CHECKSUM_HEADER = "x-amz-checksum-crc32c"
_SUMMED = Config(s3={"payload_signing_enabled": False})
RETRY_AFTER_DIGITS = 6
NUMBER_DIGITS = 12
RETRYABLE_STATUSES = frozenset({500, 502, 503, 504})
"""Those of a server or a proxy that may answer the same request later, also where it says no more."""


@dataclass(frozen=True, slots=True)
class Account:
    """Which server is asked, and as whom."""

    address: ServerAddress
    access_key: str
    secret_key: str
    region: str


_pools: Shared[Account, ConnectionPool] = Shared()


@dataclass(frozen=True, slots=True)
class SignedAnswer:
    """A whole answer: headers with lower-case names, body."""

    headers: Mapping[str, str]
    body: bytes

    def json(self) -> dict[str, Any]:
        """The body's JSON object. Raises UnansweredError where it is none."""
        with understood():
            found = json.loads(self.body)
            if not isinstance(found, dict):
                raise TypeError("the answer is no object")
            return found


class NonsenseError(UnansweredError):
    """Somebody answered, and not as our servers do."""


@contextmanager
def understood() -> Iterator[None]:
    """Within the block an answer is read: whatever is missing or wrong in it, UnansweredError says so."""
    try:
        yield
    except (LookupError, ValueError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        raise NonsenseError("the server's answer makes no sense", retryable=False) from error


class SignedHttp:
    """Requests of one account. Each wait while a request is sent lasts at most `timeout_s`, and so do all waits for its
    answer together; of a stream, for the answer's head. Raises ObjectCacheError for refusals, UnansweredError for
    broken connections and for answers without end.
    """

    def __init__(
        self,
        endpoint: str,
        access_key: str,
        secret_key: str,
        region: str,
        timeout_s: float,
        retries: Retries | None = None,
    ) -> None:
        self.account = Account(ServerAddress.parse(endpoint), access_key, secret_key, region)
        self.timeout_s = timeout_s
        self.retries = retries or Retries()
        """How calls are made again, for calls of several requests too."""
        self._credentials = Credentials(access_key, secret_key)
        self._pool = _pools.take(self.account, lambda: ConnectionPool(self.account.address))
        self._is_closed = False

    def request(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None = None,
        body: bytes | memoryview = b"",
        timeout_s: float | None = None,
        headers: Mapping[str, str] | None = None,
        may_repeat: Callable[[ObjectCacheError], bool] = retries.always,
        bytes_max: int = ANSWER_BYTES_MAX,
    ) -> SignedAnswer:
        """`request_once`, and again where that fails in a way that may pass (`nixl_client.session.retries`): the
        request must change nothing when it is carried out twice, or `may_repeat` must say when it may be. `timeout_s`
        bounds all tries together, too.
        """
        return self.retries.run(
            lambda left_s: self.request_once(
                method, path, query=query, body=body, timeout_s=left_s, headers=headers, bytes_max=bytes_max
            ),
            timeout_s or self.timeout_s,
            may_repeat,
        )

    def request_once(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None = None,
        body: bytes | memoryview = b"",
        timeout_s: float | None = None,
        headers: Mapping[str, str] | None = None,
        bytes_max: int = ANSWER_BYTES_MAX,
    ) -> SignedAnswer:
        """Send and read the whole answer. `path` is not yet percent-encoded; `headers` are signed with the rest. Raises
        UnansweredError for a body of more than `bytes_max`.
        """
        stream = self.sent(
            method,
            path,
            query=query,
            body=body,
            timeout_s=timeout_s or self.timeout_s,
            headers=headers,
            bytes_max=bytes_max,
        )
        try:
            return SignedAnswer(stream.headers, stream.read(bytes_max))
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
        """Send, once, and read the answer's head."""
        timeout_s = timeout_s or self.timeout_s
        stream = self.sent(
            method, path, query=query, body=body, timeout_s=timeout_s, headers=headers, bytes_max=ERROR_BODY_BYTES_MAX
        )
        stream.unbounded(timeout_s)
        return stream

    def sent(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None,
        body: bytes | memoryview,
        timeout_s: float,
        headers: Mapping[str, str] | None,
        bytes_max: int,
    ) -> Stream:
        """Send, once, and read the answer's head. Of a refusal the rest is read, too."""
        target = quote(path, safe="/-_.~") + (f"?{urlencode(query, quote_via=quote)}" if query else "")
        signed = self._sign(method, target, body, headers or {})
        connection = self._pool.take(timeout_s)
        is_connected, is_sent = connection.sock is not None, True
        try:
            if not is_connected:
                connection.connect()
            is_connected = True
            try:
                connection.request(method, target, body=body or None, headers=signed)
            except (BrokenPipeError, ConnectionResetError):  # a server that refuses a body may answer and hang up
                is_sent = False
            response = bounded(connection, timeout_s, max(bytes_max, ERROR_BODY_BYTES_MAX))
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            address = self.account.address
            what = f"{method} {path}" if is_connected else f"no ObjectCache at {address.url}"
            raise UnansweredError(
                f"{what}: {reason_of(error, address)}",
                never_sent=not is_connected,
                retryable=not isinstance(error, ssl.SSLCertVerificationError),
            ) from error
        except BaseException:
            connection.close()
            raise
        stream = Stream(self._pool, connection, response, keeps=is_sent)
        if response.status >= 300:
            raise _refusal(stream, response.status)
        if not stream.has_known_end:
            stream.close()
            raise UnansweredError(f"{method} {path}: the answer does not say where it ends")
        return stream

    def copy(self) -> SignedHttp:
        """Requests of the same account, to be closed by themselves, with a budget of their own for retries."""
        account, retries = self.account, self.retries.copy()
        return SignedHttp(
            endpoint=account.address.url,
            access_key=account.access_key,
            secret_key=account.secret_key,
            region=account.region,
            timeout_s=self.timeout_s,
            retries=retries,
        )

    def close(self) -> None:
        """Make no further request. The connections close with the last client that uses them."""
        is_closed, self._is_closed = self._is_closed, True
        if not is_closed and _pools.give_back(self.account, self._pool):
            self._pool.close()

    def _sign(self, method: str, target: str, body: bytes | memoryview, extra: Mapping[str, str]) -> dict[str, str]:
        """The headers of a signed request. The signature is over the SHA-256 of the body. Where nobody can change the
        body on its way, a large one has a CRC-32C instead: hashing took half of the time of a put.
        """
        signed = dict(extra)
        is_summed = method == "PUT" and len(body) >= SUMMED_BYTES_MIN and self.account.address.is_unseen
        if is_summed:
            signed[CHECKSUM_HEADER] = b64encode(crc32c(body).to_bytes(4, "big")).decode()
        data = b"" if is_summed else bytes(body)
        request = AWSRequest(method=method, url=self.account.address.url + target, data=data, headers=signed)
        if is_summed:
            request.context["client_config"] = _SUMMED
        S3SigV4Auth(self._credentials, "s3", self.account.region).add_auth(request)
        headers = dict(request.headers.items())
        headers["Content-Length"] = str(len(body))
        return headers


def _refusal(stream: Stream, status: int) -> ObjectCacheError:
    """The error that the answer's body describes."""
    try:
        body = stream.read(ERROR_BODY_BYTES_MAX) if stream.has_known_end else b""
    except UnansweredError:
        body = b""
    stream.close()
    return parse_error(status, body, stream.headers.get("retry-after"))


def _seconds(retry_after: str | None) -> int | None:
    """The seconds of a `Retry-After`; None for a date, or for more digits than anybody means."""
    if retry_after is None or not retry_after.isdecimal() or len(retry_after) > RETRY_AFTER_DIGITS:
        return None
    return int(retry_after)


def parse_error(status: int, body: bytes, retry_after: str | None = None) -> ObjectCacheError:
    """The error an S3 Error document describes. Another body comes from somebody between us and the server, who does
    not know what has become of the request: UnansweredError. `retry_after` says in seconds when to ask again.
    """
    retry_after_s = _seconds(retry_after)
    try:
        root = element_of(body, ERROR_ELEMENTS_MAX)
    except ValueError:
        root = None
    if root is None or root.tag != "Error" or root.findtext("Code") is None:
        unanswered = UnansweredError(f"HTTP {status} without an error document", retryable=status in RETRYABLE_STATUSES)
        unanswered.retry_after_s = retry_after_s
        return unanswered

    def number(name: str) -> int | None:
        text = root.findtext(name) or ""
        return int(text) if text.isascii() and text.isdecimal() and len(text) <= NUMBER_DIGITS else None

    return error_from_fields(
        {
            "code": root.findtext("Code"),
            "message": root.findtext("Message") or "",
            "field": root.findtext("ArgumentName"),
            "index": number("ChunkIndex"),
            "layer": number("LayerIndex"),
            "retry_after_s": retry_after_s,
        }
    )
