"""RemoteStorage: the StorageApi of a storage server in another process, over HTTP with an HMAC on every call."""

from __future__ import annotations

import base64
import hashlib
import json
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, cast

import aiohttp
from pydantic import TypeAdapter

from adapters.request_log import Stopwatch
from descriptors.conditions import NO_WRITE_CONDITION, WriteCondition
from descriptors.descriptor import Descriptor
from descriptors.descriptor_codec import encode_binary
from descriptors.errors import ErrorCode, ObjectCacheError, ServerError, error_from_fields
from descriptors.lifecycle import LifecycleRule
from descriptors.messages import (
    AgentLease,
    AgentRegistration,
    AgentRenewal,
    LookupAnswer,
    LookupRequest,
    SchedulerStatus,
    Transports,
    lookup_body,
    parse_lookup_answer,
    registration_body,
    renewal_body,
)
from descriptors.objects import (
    BodyDigests,
    BucketInfo,
    CompleteRequest,
    CopyRequest,
    ListPage,
    ListRequest,
    ObjectInfo,
    ObjectPart,
    PartCopyRequest,
    PartInfo,
    PartPage,
    PartRequest,
    PutRequest,
    ReadHead,
    ReadRequest,
    UploadListRequest,
    UploadPage,
    UploadRef,
    UploadRequest,
)
from descriptors.peer_auth import AUTH_HEADER, CALL_HEADER, STREAMED_BODY, sign_call
from descriptors.peer_calls import ARGUMENT_BYTES_MAX, PLAIN_CALLS, RESULT_HEADER, CallTypes
from descriptors.rdma_token import ObjectPath, RdmaToken, declined
from descriptors.storage_api import (
    Body,
    BodySink,
    ChunksPut,
    DeliveryOutcome,
    DeliveryStart,
    DeliveryTiming,
    ObjectDelivery,
    ObjectRead,
    ObjectStored,
    Piece,
)
from descriptors.tracing import PEER_REQUEST_ID_HEADER
from gateway.trace import current_request_id

CONNECT_TIMEOUT_S = 5.0
_TYPES = {name: CallTypes(name) for name in PLAIN_CALLS}
_DIGESTS = TypeAdapter(BodyDigests)
_PUT = TypeAdapter(PutRequest)
_PART_REQUEST = TypeAdapter(PartRequest)
_READ_REQUEST = TypeAdapter(ReadRequest)
_OBJECT = TypeAdapter(ObjectInfo)
_PART = TypeAdapter(PartInfo)
_LEASE = TypeAdapter(AgentLease)
_READ = TypeAdapter(ReadHead)
_START = TypeAdapter(DeliveryStart)
_OUTCOME = TypeAdapter(DeliveryOutcome)
_CHUNKS_PUT = TypeAdapter(ChunksPut)


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
        """Open the connection pool. The gateway bounds its own connections, and with them these."""
        connector: aiohttp.BaseConnector
        if self._socket_path is not None:
            connector = aiohttp.UnixConnector(self._socket_path, limit=0)
        else:
            connector = aiohttp.TCPConnector(limit=0)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S)
        self._session = aiohttp.ClientSession(
            connector=connector, timeout=timeout, auto_decompress=False, max_field_size=65_536
        )

    async def close(self) -> None:
        """Close the connection pool."""
        if self._session is not None:
            await self._session.close()

    async def create_bucket(self, access_key: str, bucket: str) -> None:
        await self._plain("create_bucket", access_key, bucket)

    async def head_bucket(self, bucket: str) -> BucketInfo:
        return cast(BucketInfo, await self._plain("head_bucket", bucket))

    async def list_buckets(self) -> list[BucketInfo]:
        return cast(list[BucketInfo], await self._plain("list_buckets"))

    async def delete_bucket(self, bucket: str) -> None:
        await self._plain("delete_bucket", bucket)

    async def get_lifecycle(self, bucket: str) -> list[LifecycleRule]:
        return cast(list[LifecycleRule], await self._plain("get_lifecycle", bucket))

    async def set_lifecycle(self, bucket: str, rules: list[LifecycleRule]) -> None:
        await self._plain("set_lifecycle", bucket, rules)

    async def put_object(self, request: PutRequest, body: Body) -> ObjectInfo:
        return _OBJECT.validate_json(await self._send("put_object", _PUT.dump_python(request, mode="json"), body))

    async def head_object(self, request: ReadRequest) -> ReadHead:
        return cast(ReadHead, await self._plain("head_object", request))

    @asynccontextmanager
    async def open_object(self, request: ReadRequest) -> AsyncIterator[ObjectRead]:
        async with self._open("open_object", {"request": _READ_REQUEST.dump_python(request, mode="json")}) as response:
            yield ObjectRead(_READ.validate_json(_result(response)), _body(response))

    async def object_parts(self, bucket: str, key: str) -> list[ObjectPart]:
        return cast(list[ObjectPart], await self._plain("object_parts", bucket, key))

    async def copy_object(self, request: CopyRequest) -> ObjectInfo:
        return cast(ObjectInfo, await self._plain("copy_object", request))

    async def delete_object(self, bucket: str, key: str, condition: WriteCondition = NO_WRITE_CONDITION) -> None:
        await self._plain("delete_object", bucket, key, condition)

    async def delete_objects(self, bucket: str, keys: list[str]) -> None:
        await self._plain("delete_objects", bucket, keys)

    async def set_tags(self, bucket: str, key: str, tags: dict[str, str]) -> None:
        await self._plain("set_tags", bucket, key, tags)

    async def list_objects(self, request: ListRequest) -> ListPage:
        return cast(ListPage, await self._plain("list_objects", request))

    async def create_upload(self, request: UploadRequest) -> str:
        return cast(str, await self._plain("create_upload", request))

    async def put_part(self, request: PartRequest, body: Body) -> PartInfo:
        return _PART.validate_json(await self._send("put_part", _PART_REQUEST.dump_python(request, mode="json"), body))

    async def copy_part(self, request: PartCopyRequest) -> PartInfo:
        return cast(PartInfo, await self._plain("copy_part", request))

    async def complete_upload(self, request: CompleteRequest) -> ObjectInfo:
        return cast(ObjectInfo, await self._plain("complete_upload", request))

    async def abort_upload(self, upload: UploadRef) -> None:
        await self._plain("abort_upload", upload)

    async def list_parts(self, upload: UploadRef, part_number_marker: int, max_parts: int) -> PartPage:
        return cast(PartPage, await self._plain("list_parts", upload, part_number_marker, max_parts))

    async def list_uploads(self, request: UploadListRequest) -> UploadPage:
        return cast(UploadPage, await self._plain("list_uploads", request))

    async def lookup(self, access_key: str, bucket: str, request: LookupRequest) -> LookupAnswer:
        call = {"access_key": access_key, "bucket": bucket}
        return parse_lookup_answer(await self._call("lookup", call, lookup_body(request)))

    async def register_agent(self, access_key: str, registration: AgentRegistration) -> AgentLease:
        body = registration_body(registration)
        return _LEASE.validate_json(await self._call("register_agent", {"access_key": access_key}, body))

    async def renew_agent(self, access_key: str, agent_id: str, renewal: AgentRenewal) -> AgentLease:
        call = {"access_key": access_key, "agent_id": agent_id}
        return _LEASE.validate_json(await self._call("renew_agent", call, renewal_body(renewal)))

    async def scheduler(self) -> SchedulerStatus:
        return cast(SchedulerStatus, await self._plain("scheduler"))

    async def transports(self) -> Transports:
        return cast(Transports, await self._plain("transports"))

    async def delete_agent(self, access_key: str, agent_id: str) -> None:
        await self._plain("delete_agent", access_key, agent_id)

    async def deliver(self, access_key: str, bucket: str, descriptor: Descriptor, sink: BodySink) -> DeliveryOutcome:
        call = {"access_key": access_key, "bucket": bucket}
        if descriptor.rdma_target is not None:
            return await self._deliver_past(access_key, call, descriptor)
        began_s, sending = time.perf_counter(), Stopwatch()
        async with self._open("deliver", call, encode_binary(descriptor)) as response:
            start = _START.validate_json(_result(response))
            plan_s = time.perf_counter() - began_s
            await sink.begin(start)
            relayed_bytes = 0
            try:
                async for piece in _body(response):
                    with sending:
                        await sink.write(memoryview(piece))
                    relayed_bytes += len(piece)
            except BaseException:
                sink.abort()
                raise
            gather_s = time.perf_counter() - began_s - plan_s - sending.total_s
            return DeliveryOutcome(start, relayed_bytes, DeliveryTiming(plan_s, gather_s, sending.total_s))

    async def _deliver_past(self, access_key: str, call: dict[str, str], descriptor: Descriptor) -> DeliveryOutcome:
        """A delivery whose bytes do not pass here."""
        async with self._past(access_key, descriptor.request_id or ""):
            return _OUTCOME.validate_json(await self._call("deliver", call, encode_binary(descriptor)))

    async def get_object_into(self, access_key: str, request: ReadRequest, token: RdmaToken) -> ObjectDelivery:
        _refuse_staging(token)
        async with self._past(access_key, token.request_id):
            return cast(ObjectDelivery, await self._plain("get_object_into", access_key, request, token))

    async def put_object_from(
        self, access_key: str, request: PutRequest, token: RdmaToken, said: BodyDigests
    ) -> ObjectStored:
        _refuse_staging(token)
        async with self._past(access_key, token.request_id):
            return cast(ObjectStored, await self._plain("put_object_from", access_key, request, token, said))

    async def put_chunks_from(self, access_key: str, bucket: str, descriptor: Descriptor) -> ChunksPut:
        call = {"access_key": access_key, "bucket": bucket}
        async with self._past(access_key, descriptor.request_id or ""):
            return _CHUNKS_PUT.validate_json(await self._call("put_chunks_from", call, encode_binary(descriptor)))

    @asynccontextmanager
    async def _past(self, access_key: str, request_id: str) -> AsyncIterator[None]:
        """A call whose bytes do not pass here. An answer tells the client that its buffer is free, so when the storage
        server's own answer is lost there must be none until the request is known to have drained.

        Raises ConnectionResetError, which drops the client's connection unanswered, when that cannot be known.
        """
        try:
            yield
        except StorageUnreachableError as lost:
            try:
                await self.cancel(access_key, request_id)
            except ObjectCacheError as error:
                raise ConnectionResetError("the storage server may still be moving bytes") from error
            raise lost

    async def cancel(self, access_key: str, request_id: str) -> None:
        await self._plain("cancel", access_key, request_id)

    async def _plain(self, name: str, *values: object) -> object:
        """A call of plain values; long arguments travel in the body."""
        types = _TYPES[name]
        arguments = types.encode(*values)
        encoded = json.dumps(arguments).encode()
        if len(encoded) <= ARGUMENT_BYTES_MAX:
            return types.result.validate_json(await self._call(name, arguments))
        return types.result.validate_json(await self._call(name, {}, encoded))

    async def _send(self, name: str, request: object, body: Body) -> bytes:
        """A call with object bytes. What goes wrong with the body is raised as it was, not as the peer saw it."""
        failures: list[BaseException] = []

        async def pieces() -> AsyncIterator[Piece]:
            try:
                async for piece in body:
                    yield piece
                yield _DIGESTS.dump_json(body.digests())
            except Exception as error:  # not the cancellation of a body the peer has refused
                failures.append(error)
                raise

        try:
            arguments = {"request": request, "has_sha256": body.has_sha256}
            return await self._call(name, arguments, pieces(), waits_for_leave=body.is_held_back)
        except ObjectCacheError:
            if failures:
                raise failures[0] from None
            raise

    async def _call(
        self,
        operation: str,
        call: Mapping[str, Any],
        body: bytes | AsyncIterator[Piece] = b"",
        *,
        waits_for_leave: bool = False,
    ) -> bytes:
        async with self._open(operation, call, body, waits_for_leave=waits_for_leave) as response:
            return await response.read()

    @asynccontextmanager
    async def _open(
        self,
        operation: str,
        call: Mapping[str, Any],
        body: bytes | AsyncIterator[Piece] = b"",
        *,
        waits_for_leave: bool = False,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """POST one call; errors the storage server names are raised as they were there. A body that waits for leave is
        sent when the storage server has found the request worth it.
        """
        if self._session is None:
            raise RuntimeError("start() was not called")
        text = base64.urlsafe_b64encode(json.dumps(call).encode()).decode()
        body_sha256 = hashlib.sha256(body).hexdigest() if isinstance(body, bytes) else STREAMED_BODY
        headers = {
            CALL_HEADER: text,
            AUTH_HEADER: sign_call(self._secret, operation, text, body_sha256, time.time()),
        }
        request_id = current_request_id()
        if request_id is not None:
            headers[PEER_REQUEST_ID_HEADER] = request_id
        try:
            url = f"{self._base}/v1/{operation}"
            async with self._session.post(url, data=body, headers=headers, expect100=waits_for_leave) as response:
                if response.status != 200:
                    raise error_from_fields(await response.json())
                yield response
        except (aiohttp.ClientError, TimeoutError) as error:
            raise StorageUnreachableError(error) from error


def _refuse_staging(token: RdmaToken) -> None:
    """A gateway apart from the storage server has no UCX of its own. Raises CallerError(NotImplemented)."""
    if token.path is ObjectPath.BUFFER:
        raise declined("this gateway has no ucx transport to send from its own memory")


def _result(response: aiohttp.ClientResponse) -> bytes:
    return base64.urlsafe_b64decode(response.headers[RESULT_HEADER])


async def _body(response: aiohttp.ClientResponse) -> AsyncIterator[Piece]:
    async for piece in response.content.iter_any():
        yield piece
