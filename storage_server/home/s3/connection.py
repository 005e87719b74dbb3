"""Signed requests to an upstream S3 service: aiohttp carries them, botocore signs them."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any, TypeVar
from urllib.parse import quote, urlsplit

import aiohttp
from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials
from yarl import URL

from descriptors.errors import ErrorCode, ObjectCacheError, ServerError
from descriptors.objects import ChecksumAlgorithm
from descriptors.storage_api import Body
from objectcache.adapters.caller import CALLER
from objectcache.adapters.careful_session import careful_session
from objectcache.adapters.threads import computed
from objectcache.adapters.trust import client_context
from storage_server.home.fetch.bulk_reads import BulkRead, BulkReads, Head, Into
from storage_server.home.rules.attempts import ATTEMPTS_MAX, pause_before_next_s
from storage_server.home.rules.documents import HERE_BYTES_MAX, call_of, has_many_entries, prepare, result_of
from storage_server.home.rules.headers import etag_of, has_digest, is_md5, require_plain
from storage_server.home.rules.health import Scope, ServiceHealth, scope_of
from storage_server.home.rules.refusals import NoConnectionError, is_about, refusal, unreachable
from storage_server.home.s3.answers import BROKEN_OFF, document_of, error_document_of, head_in_time
from storage_server.home.s3.places import REQUESTS_IN_TURN, RequestPlaces
from storage_server.home.s3.sent_body import SentBody, checked_if_small
from storage_server.settings import UpstreamSettings

PAYLOAD_HASH = "payload_hash"
FAILURES_MAX = 5
HEAD_LINES_MAX, HEAD_LINE_BYTES_MAX = 512, 32 << 10
"""The head of an answer has no more: any object that was put here needs less."""
PAUSE_S_MIN, PAUSE_S_MAX = 1.0, 30.0
"""After so many failures in a row the service is left alone for so long."""
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class ServiceAnswer:
    """An answer's head, with lower-case names, and its body while the request is open."""

    status: int
    headers: Mapping[str, str]
    content: aiohttp.StreamReader


@dataclass(frozen=True, slots=True)
class _Signed:
    """A request whose body is a document, or none."""

    method: str
    target: str
    headers: Mapping[str, str]
    body: bytes


class Upstream:
    """One service. Every method raises ObjectCacheError: what upstream refuses, in its words; ServerError(SlowDown)
    where it cannot be reached or breaks off.
    """

    def __init__(self, settings: UpstreamSettings) -> None:
        self.settings = settings
        self._credentials = Credentials(settings.access_key, settings.secret_key)
        self._base = settings.endpoint.rstrip("/")
        self._host = urlsplit(self._base).netloc
        self._session: aiohttp.ClientSession | None = None
        self.health = ServiceHealth(FAILURES_MAX, PAUSE_S_MIN, PAUSE_S_MAX)
        self._bulk = BulkReads(settings)
        self._takes_trailers = True
        self._places = RequestPlaces(settings.connections_max, settings.uploads_max, settings.read_timeout_s)
        self.failed_count = 0
        """How many requests the service did not answer, or was too busy for."""

    async def start(self) -> None:
        """Make the pool of connections; none is opened yet."""
        await asyncio.to_thread(prepare)
        settings = self.settings
        timeout = aiohttp.ClientTimeout(
            total=None, sock_connect=settings.connect_timeout_s, sock_read=settings.read_timeout_s
        )
        is_tls = settings.endpoint.startswith("https:")
        trusted = await asyncio.to_thread(client_context) if is_tls else True
        # no request waits here: one that tries whether the service is well needs no place, nor do those of fetches
        most = settings.connections_max + 1 + REQUESTS_IN_TURN * settings.fetches_max
        connector = aiohttp.TCPConnector(limit=most, ssl=trusted)
        self._session = careful_session(
            connector,
            timeout=timeout,
            middlewares=(_once,),
            max_line_size=HEAD_LINE_BYTES_MAX,
            max_field_size=HEAD_LINE_BYTES_MAX,
            max_headers=HEAD_LINES_MAX,
        )

    async def close(self) -> None:
        """Close every connection."""
        if self._session is not None:
            await self._session.close()
        await asyncio.to_thread(self._bulk.close)

    async def call(self, operation: str, headers: Mapping[str, str] | None = None, **parameters: Any) -> dict[str, Any]:
        """An operation of the S3 API whose request and answer are documents, by the names of botocore's model;
        `headers` are added.
        """
        return await self.ask(dict, operation, headers, **parameters)

    async def ask(
        self,
        read: Callable[[dict[str, Any]], _T],
        operation: str,
        headers: Mapping[str, str] | None = None,
        **parameters: Any,
    ) -> _T:
        """`call`, and what `read` makes of the answer. It runs in a thread where the answer is long."""
        sent = await computed(
            lambda: self._written(operation, headers or {}, parameters), is_long=has_many_entries(parameters)
        )
        async with self._answer(sent.method, sent.target, sent.headers, sent.body) as answer:
            body = await document_of(answer.content)
            return await computed(
                lambda: result_of(operation, answer.status, answer.headers, body, read),
                is_long=len(body) > HERE_BYTES_MAX,
            )

    def _written(self, operation: str, headers: Mapping[str, str], parameters: Mapping[str, Any]) -> _Signed:
        call = call_of(operation, parameters)
        wanted = {**call.headers, **headers}
        if call.body:
            wanted["Content-MD5"] = base64.b64encode(hashlib.md5(call.body, usedforsecurity=False).digest()).decode()
        return _Signed(call.method, call.target, self._signed(call.method, call.target, wanted, call.body), call.body)

    def open(
        self,
        method: str,
        bucket: str,
        key: str,
        headers: Mapping[str, str],
        query: str = "",
        body: SentBody | None = None,
    ) -> Any:
        """A request about one object, as a context that gives the Answer; the body of the answer is read in it."""
        target, sent = _target(bucket, key, query), b"" if body is None else body
        signed = self._signed(method, target, headers, sent)
        return self._answer(method, target, signed, sent, has_body=method != "HEAD")

    @asynccontextmanager
    async def open_into(
        self, bucket: str, key: str, headers: Mapping[str, str], into: Into
    ) -> AsyncIterator[tuple[Head, asyncio.Future[None]]]:
        """A GET whose body goes straight into memory, as a context that gives the answer's head, and when the body is
        there.
        """
        target = _target(bucket, key, "")
        signed = self._signed("GET", target, headers, b"")

        async def begun() -> BulkRead:
            reading = self._bulk.read(target, signed, into)
            try:
                head = await asyncio.shield(reading.head)
            except BaseException:
                await reading.end()
                raise
            if head.status >= 300:
                await reading.end()
                raise refusal(head.status, head.document, head.headers.get("retry-after"))
            return reading

        reading = await self._tried("GET", target, None, begun)
        try:
            yield reading.head.result(), reading.body
        finally:
            await reading.end()

    def require_addressable(self, bucket: str, key: str) -> None:
        """Raises CallerError(InvalidArgument) for an object that no request could name."""
        require_plain(_target(bucket, key, ""))

    async def prepared(self, body: Body, nbytes: int, algorithm: ChecksumAlgorithm | None) -> SentBody:
        """A caller's body for `put`. Raises the body's own error where it is small and not what its sender says."""
        held = await checked_if_small(body, nbytes, algorithm)
        return SentBody(held, nbytes, algorithm, with_trailer=self._takes_trailers)

    async def put(
        self, bucket: str, key: str, headers: Mapping[str, str], query: str, sent: SentBody
    ) -> Mapping[str, str]:
        """Store a body; the headers of the answer. Raises the body's own error where that ended it, and
        ServerError(InternalError) where upstream's ETag is another MD5 than that of the bytes sent, and should be it.
        """
        known = {**headers, **sent.headers}
        if "content-encoding" in headers:  # the object's own stays with it
            known["Content-Encoding"] = ",".join(
                filter(None, (sent.headers.get("Content-Encoding"), headers["content-encoding"]))
            )
            del known["content-encoding"]
        try:
            async with self.open("PUT", bucket, key=key, headers=known, query=query, body=sent) as answer:
                await document_of(answer.content)
                headers_back: Mapping[str, str] = answer.headers
        except ObjectCacheError as error:
            if sent.failure is not None:
                raise sent.failure from None
            if sent.has_trailer and is_about(error, *_NO_TRAILERS):
                self._takes_trailers = False
                problem = "the upstream store knows no checksum trailers, and gets none from now on"
                raise ServerError(ErrorCode.SLOW_DOWN, problem, retryable=True) from None
            raise
        etag = etag_of(headers_back.get("etag"))
        if is_md5(etag) and has_digest(headers_back) and etag != sent.hashes.etag:
            problem = "the upstream store keeps other bytes than were sent"
            raise ServerError(ErrorCode.INTERNAL_ERROR, problem, retryable=True)
        return headers_back

    @asynccontextmanager
    async def _answer(
        self, method: str, target: str, signed: Mapping[str, str], body: bytes | SentBody, *, has_body: bool = False
    ) -> AsyncIterator[ServiceAnswer]:
        """`has_body` says that the bytes of an object go there, or come back."""
        sent = body if isinstance(body, SentBody) else None
        async with (
            self._places.place(has_body=has_body),
            await self._tried(method, target, sent, lambda: self._request(method, target, signed, body)) as response,
        ):
            lower = {name.lower(): value for name, value in response.headers.items()}
            yield ServiceAnswer(response.status, lower, response.content)

    async def _tried(self, method: str, target: str, body: SentBody | None, send: Callable[[], Awaitable[_T]]) -> _T:
        """A good answer's head. A read that fails is tried again, a few times; other requests are not, since they may
        have been carried out. `health` is told of every end of a try; so a request that is refused here is refused
        before this. A body that was cut off tells it nothing: services refuse one before it has come and hang up, and
        hang up on a sender who lets it wait, which any tenant can bring about.
        """
        scope = scope_of(CALLER.get(), target)
        for attempt in count(1):
            await self._require_not_failing(scope, has_body=body is not None)
            try:
                answered = await send()
            except ObjectCacheError as error:
                if body is not None and body.failure is not None:
                    self.health.gave_up(scope)
                    raise
                is_passing = isinstance(error, ServerError) and error.retryable
                self.failed_count += is_passing
                if is_passing and body is not None and body.was_cut:
                    self.health.gave_up(scope)
                else:
                    self.health.failed(scope, error, time.monotonic())
                if not is_passing or method not in _READS or attempt == ATTEMPTS_MAX:
                    raise
                await asyncio.sleep(pause_before_next_s(attempt))
                continue
            except BaseException:
                self.health.gave_up(scope)
                raise
            self.health.answered(scope)
            return answered
        raise AssertionError("the loop ends by itself")

    async def _require_not_failing(self, scope: Scope, *, has_body: bool) -> None:
        """After a pause one request tries whether the service is well, and others wait. A sender decides how long a
        body takes, and an object how long its answer does: so a request of the server's own tries before them.
        """
        wait_s = self.health.wait_s(scope, time.monotonic())
        if wait_s:
            problem = "the upstream store fails, and is asked again in a while"
            raise ServerError(ErrorCode.SLOW_DOWN, problem, retryable=True, retry_after_s=math.ceil(wait_s))
        if self.health.has_to_connect:
            try:
                await self._connect()
            except BaseException:
                self.health.gave_up(scope)
                raise
        if has_body and self.health.is_trying(scope):
            await self._look(scope)

    async def _connect(self) -> None:
        """Try whether the service can be connected to. Raises NoConnectionError."""
        try:
            await self._head("/")
        except NoConnectionError as error:
            self.health.failed(_OURS, error, time.monotonic())
            raise
        except ObjectCacheError:
            self.health.connected()
        except BaseException:
            self.health.gave_up_connecting()
            raise
        else:
            self.health.connected()

    async def _look(self, scope: Scope) -> None:
        """Try whether the service answers for a bucket. Raises ServerError."""
        try:
            await self._head(f"/{scope[1]}")
        except ObjectCacheError as error:
            self.health.failed(scope, error, time.monotonic())
            if isinstance(error, ServerError) and error.retryable:
                raise
        except BaseException:
            self.health.gave_up(scope)
            raise
        else:
            self.health.answered(scope)

    async def _head(self, target: str) -> None:
        async with await self._request("HEAD", target, self._signed("HEAD", target, {}, b""), b""):
            pass

    async def _request(
        self, method: str, target: str, signed: Mapping[str, str], body: bytes | SentBody
    ) -> aiohttp.ClientResponse:
        assert self._session is not None, "start comes first"
        sent = body if isinstance(body, SentBody) else None
        settings = self.settings
        try:
            async with head_in_time(settings.connect_timeout_s + 2 * settings.read_timeout_s, sent):
                response = await self._session.request(
                    method,
                    URL(self._base + target, encoded=True),
                    headers=signed,
                    data=aiter(sent) if sent is not None else body or None,
                    allow_redirects=False,
                    skip_auto_headers=_AUTOMATIC,
                )
        except aiohttp.ClientResponseError as error:  # of a head that is none, or too large
            problem = f"the upstream store's answer makes no sense: {error.message}"
            raise ServerError(ErrorCode.INTERNAL_ERROR, problem, retryable=True) from error
        except _NOT_CONNECTED as error:
            raise NoConnectionError(str(error) or type(error).__name__) from error
        except (*BROKEN_OFF, _NoAnswerError) as error:
            if sent is not None and sent.is_under_way:
                sent.was_cut = True
            raise unreachable(str(error) or type(error).__name__) from error
        if response.status < 300:
            return response
        async with response:
            document = await error_document_of(response.content, settings.read_timeout_s)
        raise refusal(response.status, document, response.headers.get("Retry-After"))

    def _signed(self, method: str, target: str, headers: Mapping[str, str], body: bytes | SentBody) -> dict[str, str]:
        require_plain(target)
        known = body if isinstance(body, bytes) else b""
        request = AWSRequest(method=method, url=self._base + target, data=known, headers=dict(headers))
        if isinstance(body, SentBody):
            request.context[PAYLOAD_HASH] = body.payload_hash
        _Signer(self._credentials, "s3", self.settings.region).add_auth(request)
        signed = dict(request.headers.items())
        if isinstance(body, bytes):
            signed["Content-Length"] = str(len(body))
        return signed


class _NoAnswerError(Exception):
    """The connection ended without an answer. aiohttp does not know it, and sends nothing again."""


async def _once(request: aiohttp.ClientRequest, send: aiohttp.ClientHandlerType) -> aiohttp.ClientResponse:
    """A change is sent once. aiohttp sends a PUT or DELETE again by itself where a connection that was kept alive ends
    without an answer; a condition that the first one has met and changed would then refuse the second.
    """
    try:
        return await send(request)
    except (aiohttp.ClientOSError, aiohttp.ServerDisconnectedError) as error:
        if request.method in _READS or isinstance(error, aiohttp.ClientConnectorError):
            raise
        raise _NoAnswerError(str(error) or type(error).__name__) from error


def _target(bucket: str, key: str, query: str) -> str:
    path = f"/{quote(bucket, safe='')}/{quote(key, safe='/-_.~')}"
    return f"{path}?{query}" if query else path


class _Signer(S3SigV4Auth):  # type: ignore[misc]
    """Botocore's signer. The body of a stream is not signed: its hash is not known before its last byte."""

    def payload(self, request: Any) -> str:
        return str(request.context.get(PAYLOAD_HASH) or super().payload(request))


_AUTOMATIC = ("Content-Type", "User-Agent", "Accept", "Accept-Encoding")
"""Headers that aiohttp would add, which are not signed and of which Content-Type would be kept with an object."""


_NO_TRAILERS = (ErrorCode.X_AMZ_CONTENT_SHA256_MISMATCH, ErrorCode.NOT_IMPLEMENTED)
"""Answers of services to a trailer that they do not know. Our requests have no hash of the body that could be wrong."""
_READS = frozenset({"GET", "HEAD"})
_OURS = scope_of("", "/")
_NOT_CONNECTED = (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)
