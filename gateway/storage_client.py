"""RemoteStorage: the StorageApi of a storage server in another process, over HTTP with an HMAC on every call."""

from __future__ import annotations

import base64
import hashlib
import json
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
from pydantic import TypeAdapter

from descriptors.descriptor import Descriptor
from descriptors.descriptor_codec import encode_binary
from descriptors.errors import ErrorCode, ObjectCacheError, ServerError, error_from_fields
from descriptors.messages import (
    AgentLease,
    AgentRegistration,
    AgentRenewal,
    LookupRequest,
    lookup_body,
    registration_body,
    renewal_body,
)
from descriptors.peer_auth import AUTH_HEADER, CALL_HEADER, STREAMED_BODY, sign_call
from descriptors.peer_calls import RESULT_HEADER, ReadHead
from descriptors.storage_api import (
    BodySink,
    BucketInfo,
    DeliveryOutcome,
    DeliveryStart,
    ListPage,
    ListRequest,
    ObjectInfo,
    ObjectRead,
    Piece,
    PutRequest,
    RangeSpec,
)

CONNECT_TIMEOUT_S = 5.0
CONNECTIONS_MAX = 512
_BUCKET = TypeAdapter(BucketInfo)
_BUCKETS = TypeAdapter(list[BucketInfo])
_OBJECT = TypeAdapter(ObjectInfo)
_PAGE = TypeAdapter(ListPage)
_LEASE = TypeAdapter(AgentLease)
_READ = TypeAdapter(ReadHead)
_START = TypeAdapter(DeliveryStart)
_OUTCOME = TypeAdapter(DeliveryOutcome)


class StorageUnreachableError(ServerError):
    """The storage server did not answer; whether the call took effect is unknown unless it never connected."""

    def __init__(self, cause: BaseException) -> None:
        never_connected = isinstance(cause, aiohttp.ClientConnectorError)
        code = ErrorCode.SLOW_DOWN if never_connected else ErrorCode.INTERNAL_ERROR
        super().__init__(code, "the storage server cannot be reached", retryable=True)


class RemoteStorage:
    """Implements descriptors.storage_api.StorageApi over `endpoint`: http://HOST:PORT or unix:/PATH."""

    def __init__(self, endpoint: str, secret: bytes) -> None:
        self._secret = secret
        self._base = endpoint
        self._socket_path: str | None = None
        if endpoint.startswith("unix:"):
            self._base, self._socket_path = "http://storage-server", endpoint.removeprefix("unix:")
        self._session: aiohttp.ClientSession | None = None

    async def start(self) -> None:
        """Open the connection pool."""
        connector: aiohttp.BaseConnector
        if self._socket_path is not None:
            connector = aiohttp.UnixConnector(self._socket_path, limit=CONNECTIONS_MAX)
        else:
            connector = aiohttp.TCPConnector(limit=CONNECTIONS_MAX)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S)
        self._session = aiohttp.ClientSession(
            connector=connector, timeout=timeout, auto_decompress=False, max_field_size=65_536
        )

    async def close(self) -> None:
        """Close the connection pool."""
        if self._session is not None:
            await self._session.close()

    async def create_bucket(self, access_key: str, bucket: str) -> None:
        await self._call("create_bucket", {"access_key": access_key, "bucket": bucket})

    async def head_bucket(self, bucket: str) -> BucketInfo:
        return _BUCKET.validate_json(await self._call("head_bucket", {"bucket": bucket}))

    async def list_buckets(self) -> list[BucketInfo]:
        return _BUCKETS.validate_json(await self._call("list_buckets", {}))

    async def put_object(self, request: PutRequest, body: AsyncIterator[Piece]) -> ObjectInfo:
        call = TypeAdapter(PutRequest).dump_python(request, mode="json")
        failures: list[BaseException] = []

        async def pieces() -> AsyncIterator[Piece]:
            try:
                async for piece in body:
                    yield piece
            except BaseException as error:
                failures.append(error)
                raise

        try:
            return _OBJECT.validate_json(await self._call("put_object", call, pieces(), request.nbytes))
        except ObjectCacheError:
            if failures:
                raise failures[0] from None
            raise

    async def head_object(self, bucket: str, key: str) -> ObjectInfo:
        return _OBJECT.validate_json(await self._call("head_object", {"bucket": bucket, "key": key}))

    @asynccontextmanager
    async def open_object(self, bucket: str, key: str, range_spec: RangeSpec | None) -> AsyncIterator[ObjectRead]:
        span = TypeAdapter(RangeSpec | None).dump_python(range_spec, mode="json")
        async with self._open("open_object", {"bucket": bucket, "key": key, "range": span}) as response:
            head = _READ.validate_json(_result(response))
            yield ObjectRead(head.info, head.range, _body(response))

    async def delete_object(self, bucket: str, key: str) -> None:
        await self._call("delete_object", {"bucket": bucket, "key": key})

    async def list_objects(self, request: ListRequest) -> ListPage:
        call = TypeAdapter(ListRequest).dump_python(request, mode="json")
        return _PAGE.validate_json(await self._call("list_objects", call))

    async def lookup(self, bucket: str, request: LookupRequest) -> int:
        return int(await self._call("lookup", {"bucket": bucket}, lookup_body(request)))

    async def register_agent(self, access_key: str, registration: AgentRegistration) -> AgentLease:
        body = registration_body(registration)
        return _LEASE.validate_json(await self._call("register_agent", {"access_key": access_key}, body))

    async def renew_agent(self, access_key: str, agent_id: str, renewal: AgentRenewal) -> AgentLease:
        call = {"access_key": access_key, "agent_id": agent_id}
        return _LEASE.validate_json(await self._call("renew_agent", call, renewal_body(renewal)))

    async def delete_agent(self, access_key: str, agent_id: str) -> None:
        await self._call("delete_agent", {"access_key": access_key, "agent_id": agent_id})

    async def deliver(self, access_key: str, bucket: str, descriptor: Descriptor, sink: BodySink) -> DeliveryOutcome:
        call = {"access_key": access_key, "bucket": bucket}
        if descriptor.rdma_target is not None:
            return await self._deliver_past(access_key, call, descriptor)
        async with self._open("deliver", call, encode_binary(descriptor)) as response:
            start = _START.validate_json(_result(response))
            await sink.begin(start)
            relayed_bytes = 0
            try:
                async for piece in _body(response):
                    await sink.write(memoryview(piece))
                    relayed_bytes += len(piece)
            except BaseException:
                sink.abort()
                raise
            return DeliveryOutcome(start, relayed_bytes)

    async def _deliver_past(self, access_key: str, call: dict[str, str], descriptor: Descriptor) -> DeliveryOutcome:
        """A delivery whose bytes do not pass here. An answer tells the client that its buffer is free, so when the
        storage server's own answer is lost there must be none until it is known to have drained.

        Raises ConnectionResetError, which drops the client's connection unanswered, when that cannot be known.
        """
        try:
            async with self._open("deliver", call, encode_binary(descriptor)) as response:
                return _OUTCOME.validate_json(await response.read())
        except StorageUnreachableError as lost:
            try:
                await self.cancel(access_key, descriptor.request_id or "")
            except ObjectCacheError as error:
                raise ConnectionResetError("the storage server may still be writing") from error
            raise lost

    async def cancel(self, access_key: str, request_id: str) -> None:
        await self._call("cancel", {"access_key": access_key, "request_id": request_id})

    async def _call(
        self,
        operation: str,
        call: Mapping[str, Any],
        body: bytes | AsyncIterator[Piece] = b"",
        nbytes: int | None = None,
    ) -> bytes:
        async with self._open(operation, call, body, nbytes) as response:
            return await response.read()

    @asynccontextmanager
    async def _open(
        self,
        operation: str,
        call: Mapping[str, Any],
        body: bytes | AsyncIterator[Piece] = b"",
        nbytes: int | None = None,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """POST one call; errors the storage server names are raised as they were there."""
        if self._session is None:
            raise RuntimeError("start() was not called")
        text = base64.urlsafe_b64encode(json.dumps(call, ensure_ascii=False).encode()).decode()
        body_sha256 = hashlib.sha256(body).hexdigest() if isinstance(body, bytes) else STREAMED_BODY
        headers = {
            CALL_HEADER: text,
            AUTH_HEADER: sign_call(self._secret, operation, text, body_sha256, time.time()),
        }
        if nbytes is not None:
            headers["Content-Length"] = str(nbytes)
        try:
            async with self._session.post(f"{self._base}/v1/{operation}", data=body, headers=headers) as response:
                if response.status != 200:
                    raise error_from_fields(await response.json())
                yield response
        except (aiohttp.ClientError, TimeoutError) as error:
            raise StorageUnreachableError(error) from error


def _result(response: aiohttp.ClientResponse) -> bytes:
    return base64.urlsafe_b64decode(response.headers[RESULT_HEADER])


async def _body(response: aiohttp.ClientResponse) -> AsyncIterator[Piece]:
    async for piece in response.content.iter_any():
        yield piece
