"""A StorageApi behind HTTP, for gateways in other processes. Every call carries an HMAC (descriptors.peer_auth)."""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from aiohttp import web
from pydantic import TypeAdapter

from adapters.response_sink import ResponseSink, abort_if_begun, begin_answer, cutting
from descriptors.descriptor import DESCRIPTOR_BYTES_MAX
from descriptors.descriptor_codec import decode_descriptor
from descriptors.errors import CallerError, ErrorCode, ObjectCacheError, ServerError
from descriptors.messages import AgentLease, parse_lookup, parse_registration, parse_renewal
from descriptors.peer_auth import AUTH_HEADER, CALL_HEADER, STREAMED_BODY, check_call
from descriptors.peer_calls import CALL_BYTES_MAX, RESULT_HEADER, ReadHead
from descriptors.storage_api import (
    BucketInfo,
    DeliveryOutcome,
    DeliveryStart,
    ListPage,
    ListRequest,
    ObjectInfo,
    Piece,
    PutRequest,
    RangeSpec,
    StorageApi,
)

_BODY_SHA256 = web.RequestKey("body sha256", str)
_log = logging.getLogger(__name__)


class StorageHttp:
    """Serves one StorageApi."""

    def __init__(self, storage: StorageApi, secret: bytes) -> None:
        self._storage = storage
        self._secret = secret
        self._operations: dict[str, Callable[[dict[str, Any], web.BaseRequest], Awaitable[web.StreamResponse]]] = {
            "create_bucket": self._create_bucket,
            "head_bucket": self._head_bucket,
            "list_buckets": self._list_buckets,
            "put_object": self._put_object,
            "head_object": self._head_object,
            "open_object": self._open_object,
            "delete_object": self._delete_object,
            "list_objects": self._list_objects,
            "lookup": self._lookup,
            "register_agent": self._register_agent,
            "renew_agent": self._renew_agent,
            "delete_agent": self._delete_agent,
            "deliver": self._deliver,
            "cancel": self._cancel,
        }

    def server(self) -> web.Server:
        """The aiohttp server."""
        return web.Server(
            cutting(self.handle),
            handler_cancellation=True,
            auto_decompress=False,
            max_field_size=CALL_BYTES_MAX,
            access_log=None,
        )

    async def handle(self, http: web.BaseRequest) -> web.StreamResponse:
        """Answer one call; errors travel as JSON and become the same errors on the other side."""
        try:
            if http.method == "GET" and http.path == "/health":
                return _json_bytes(b'{"status":"ok"}')
            operation, call = self._authenticated(http)
            return await self._operations[operation](call, http)
        except ObjectCacheError as error:
            abort_if_begun(http)
            return _refusal(error)
        except ConnectionError:
            raise
        except Exception:
            _log.exception("%s failed", http.path)
            abort_if_begun(http)
            return _refusal(ServerError(ErrorCode.INTERNAL_ERROR, "the storage server failed", retryable=True))

    def _authenticated(self, http: web.BaseRequest) -> tuple[str, dict[str, Any]]:
        operation = http.path.removeprefix("/v1/")
        text = http.headers.get(CALL_HEADER, "")
        vouched = check_call(self._secret, http.headers.get(AUTH_HEADER, ""), operation, text, time.time())
        if http.method != "POST" or operation not in self._operations or vouched is None:
            raise CallerError(ErrorCode.ACCESS_DENIED, "not a call of a gateway of this cluster", field=AUTH_HEADER)
        try:
            call: dict[str, Any] = json.loads(base64.urlsafe_b64decode(text))
        except (binascii.Error, ValueError) as error:
            raise CallerError(ErrorCode.INVALID_REQUEST, "the call is not base64url JSON", field=CALL_HEADER) from error
        http[_BODY_SHA256] = vouched
        return operation, call

    async def _create_bucket(self, call: dict[str, Any], _: web.BaseRequest) -> web.StreamResponse:
        await self._storage.create_bucket(call["access_key"], call["bucket"])
        return _json_bytes(b"{}")

    async def _head_bucket(self, call: dict[str, Any], _: web.BaseRequest) -> web.StreamResponse:
        return _json(BucketInfo, await self._storage.head_bucket(call["bucket"]))

    async def _list_buckets(self, _: dict[str, Any], __: web.BaseRequest) -> web.StreamResponse:
        return _json(list[BucketInfo], await self._storage.list_buckets())

    async def _put_object(self, call: dict[str, Any], http: web.BaseRequest) -> web.StreamResponse:
        request = TypeAdapter(PutRequest).validate_python(call)
        return _json(ObjectInfo, await self._storage.put_object(request, _pieces(http)))

    async def _head_object(self, call: dict[str, Any], _: web.BaseRequest) -> web.StreamResponse:
        return _json(ObjectInfo, await self._storage.head_object(call["bucket"], call["key"]))

    async def _open_object(self, call: dict[str, Any], http: web.BaseRequest) -> web.StreamResponse:
        span = TypeAdapter(RangeSpec | None).validate_python(call["range"])
        async with self._storage.open_object(call["bucket"], call["key"], span) as read:
            response = web.StreamResponse(headers=_result(ReadHead, ReadHead(read.info, read.range)))
            response.content_length = read.range.length
            await begin_answer(http, response)
            async for piece in read.body:
                await response.write(piece)
            await response.write_eof()
            return response

    async def _delete_object(self, call: dict[str, Any], _: web.BaseRequest) -> web.StreamResponse:
        await self._storage.delete_object(call["bucket"], call["key"])
        return _json_bytes(b"{}")

    async def _list_objects(self, call: dict[str, Any], _: web.BaseRequest) -> web.StreamResponse:
        request = TypeAdapter(ListRequest).validate_python(call)
        return _json(ListPage, await self._storage.list_objects(request))

    async def _lookup(self, call: dict[str, Any], http: web.BaseRequest) -> web.StreamResponse:
        request = parse_lookup(await _checked_body(http))
        return _json(int, await self._storage.lookup(call["bucket"], request))

    async def _register_agent(self, call: dict[str, Any], http: web.BaseRequest) -> web.StreamResponse:
        registration = parse_registration(await _checked_body(http))
        return _json(AgentLease, await self._storage.register_agent(call["access_key"], registration))

    async def _renew_agent(self, call: dict[str, Any], http: web.BaseRequest) -> web.StreamResponse:
        renewal = parse_renewal(await _checked_body(http))
        lease = await self._storage.renew_agent(call["access_key"], call["agent_id"], renewal)
        return _json(AgentLease, lease)

    async def _delete_agent(self, call: dict[str, Any], _: web.BaseRequest) -> web.StreamResponse:
        await self._storage.delete_agent(call["access_key"], call["agent_id"])
        return _json_bytes(b"{}")

    async def _deliver(self, call: dict[str, Any], http: web.BaseRequest) -> web.StreamResponse:
        descriptor = decode_descriptor(await _checked_body(http))
        sink = ResponseSink(http, lambda start: _result(DeliveryStart, start))
        outcome = await self._storage.deliver(call["access_key"], call["bucket"], descriptor, sink)
        if sink.response is None:
            return _json(DeliveryOutcome, outcome)
        await sink.response.write_eof()
        return sink.response

    async def _cancel(self, call: dict[str, Any], _: web.BaseRequest) -> web.StreamResponse:
        await self._storage.cancel(call["access_key"], call["request_id"])
        return _json_bytes(b"{}")


async def _checked_body(http: web.BaseRequest) -> bytes:
    """A bounded body with the hash its gateway vouched for."""
    data = bytearray()
    async for piece in _pieces(http):
        data += piece
        if len(data) > DESCRIPTOR_BYTES_MAX:
            raise CallerError(
                ErrorCode.ENTITY_TOO_LARGE, f"the body may have {DESCRIPTOR_BYTES_MAX} bytes", field="body"
            )
    if http[_BODY_SHA256] == STREAMED_BODY or hashlib.sha256(data).hexdigest() != http[_BODY_SHA256]:
        raise CallerError(ErrorCode.ACCESS_DENIED, "the body is not the one that was signed", field=AUTH_HEADER)
    return bytes(data)


async def _pieces(http: web.BaseRequest) -> AsyncIterator[Piece]:
    try:
        async for piece in http.content.iter_any():
            yield piece
    except (web.RequestPayloadError, ConnectionError) as error:
        raise CallerError(ErrorCode.INCOMPLETE_BODY, "the body ended early", field="body") from error


def _result(kind: Any, value: object) -> dict[str, str]:
    return {RESULT_HEADER: base64.urlsafe_b64encode(TypeAdapter(kind).dump_json(value)).decode()}


def _json(kind: Any, value: object) -> web.Response:
    return _json_bytes(TypeAdapter(kind).dump_json(value))


def _json_bytes(body: bytes) -> web.Response:
    return web.Response(body=body, content_type="application/json")


def _refusal(error: ObjectCacheError) -> web.Response:
    body = json.dumps(error.to_fields()).encode()
    return web.Response(status=error.http_status, body=body, content_type="application/json")
