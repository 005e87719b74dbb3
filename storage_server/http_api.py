"""A StorageApi behind HTTP, for gateways in other processes. Every call carries an HMAC (descriptors.peer_auth)."""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import json
import logging
import time
from collections.abc import Awaitable, Callable
from functools import cache
from typing import Any

from aiohttp import web
from pydantic import TypeAdapter

from adapters.leave_to_send import is_held_back
from adapters.limited_server import ConnectionLimits, LimitedServer
from adapters.request_log import CLIENT_GONE, RequestLine, Stopwatch, log_request, logs_requests
from adapters.response_sink import ResponseSink, abort_if_begun, begin_answer, begun_status, cutting
from descriptors.descriptor import DESCRIPTOR_BYTES_MAX, is_request_id
from descriptors.descriptor_codec import decode_descriptor
from descriptors.errors import CallerError, ErrorCode, ObjectCacheError, ServerError
from descriptors.messages import AgentLease, lookup_answer_body, parse_lookup, parse_registration, parse_renewal
from descriptors.objects import ObjectInfo, PartInfo, PartRequest, PutRequest, ReadHead, ReadRequest
from descriptors.peer_auth import AUTH_HEADER, CALL_HEADER, STREAMED_BODY, check_call
from descriptors.peer_calls import CALL_BYTES_MAX, PLAIN_CALLS, RESULT_HEADER, PlainCall
from descriptors.storage_api import (
    ChunksPut,
    DeliveryOutcome,
    DeliveryStart,
    ObjectDelivery,
    ObjectStored,
    StorageApi,
)
from descriptors.tracing import PEER_REQUEST_ID_HEADER, ServerTiming
from storage_server.peer_body import PeerBody, arriving

_PUT = TypeAdapter(PutRequest)
_PART = TypeAdapter(PartRequest)
_READ = TypeAdapter(ReadRequest)
_BODY_SHA256 = web.RequestKey("body sha256", str)
PEER_LIMITS = ConnectionLimits(header_bytes_max=CALL_BYTES_MAX, connections_max=4096)
"""Gateways keep their connections; a stranger's is given up when its request's head does not come."""
_log = logging.getLogger(__name__)


class _Trace:
    """One call: whose id it has, and where its time goes."""

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id if is_request_id(request_id) else ""
        self.operation = "-"
        self.nbytes = 0
        self.transfer = Stopwatch()
        self._began_s = time.perf_counter()

    def moved(self, nbytes: int, transfer_s: float) -> None:
        """What a call that moved payload says of it."""
        self.nbytes = nbytes
        self.transfer.add(transfer_s)

    def line(self, status: int, code: str) -> RequestLine:
        """What is logged when the call is over."""
        transfer_s = self.transfer.total_s
        timing = ServerTiming(0.0, max(0.0, time.perf_counter() - self._began_s - transfer_s), transfer_s)
        nbytes = self.nbytes if status < 400 else 0
        return RequestLine("storage", self.request_id, self.operation, status, nbytes, timing, code=code)


_TRACE = web.RequestKey("trace", _Trace)


class StorageHttp:
    """Serves one StorageApi."""

    def __init__(self, storage: StorageApi, secret: bytes) -> None:
        self._storage = storage
        self._secret = secret
        self._streamed: dict[str, Callable[[dict[str, Any], web.BaseRequest], Awaitable[web.StreamResponse]]] = {
            "put_object": self._put_object,
            "put_part": self._put_part,
            "open_object": self._open_object,
            "lookup": self._lookup,
            "register_agent": self._register_agent,
            "renew_agent": self._renew_agent,
            "deliver": self._deliver,
            "put_chunks_from": self._put_chunks_from,
        }
        self._plain = {name: PlainCall(storage, name) for name in PLAIN_CALLS}

    def server(self) -> web.Server:
        """The aiohttp server, with the same limits on connections as a gateway's."""
        return LimitedServer(cutting(self.handle), _refusal, PEER_LIMITS)

    async def handle(self, http: web.BaseRequest) -> web.StreamResponse:
        """Answer one call; errors travel as JSON and become the same errors on the other side."""
        trace = http[_TRACE] = _Trace(http.headers.get(PEER_REQUEST_ID_HEADER, ""))
        status, code = 0, ""
        try:
            try:
                response = await self._answer(http, trace)
            except ObjectCacheError as error:
                code = error.code.value
                abort_if_begun(http)
                response = _refusal(error)
                if is_held_back(http):
                    response.force_close()  # the body may or may not come: nothing after it could be told apart
            except (ConnectionError, asyncio.CancelledError):
                code = CLIENT_GONE
                raise
            except Exception:
                code = ErrorCode.INTERNAL_ERROR.value
                _log.exception("%s failed, request %s", http.path, trace.request_id or "-")
                abort_if_begun(http)
                response = _refusal(ServerError(ErrorCode.INTERNAL_ERROR, "the storage server failed", retryable=True))
            status = response.status
            return response
        finally:
            if logs_requests():
                log_request(trace.line(status or begun_status(http), code))

    async def _answer(self, http: web.BaseRequest, trace: _Trace) -> web.StreamResponse:
        if http.method == "GET" and http.path == "/health":
            return _json_bytes(b'{"status":"ok"}')
        operation, call = self._authenticated(http)
        trace.operation = operation
        plain = self._plain.get(operation)
        if plain is None:
            return await self._streamed[operation](call, http)
        result = await plain.make(await self._arguments(call, http))
        if isinstance(result, ObjectDelivery):
            trace.moved(result.transferred_bytes, result.transfer_s)
        elif isinstance(result, ObjectStored):
            trace.moved(result.info.nbytes, result.transfer_s)
        return _json_bytes(plain.encode(result))

    def _authenticated(self, http: web.BaseRequest) -> tuple[str, dict[str, Any]]:
        operation = http.path.removeprefix("/v1/")
        text = http.headers.get(CALL_HEADER, "")
        vouched = check_call(self._secret, http.headers.get(AUTH_HEADER, ""), operation, text, time.time())
        if http.method != "POST" or vouched is None or operation not in (*self._plain, *self._streamed):
            raise CallerError(ErrorCode.ACCESS_DENIED, "not a call of a gateway of this cluster", field=AUTH_HEADER)
        try:
            call: dict[str, Any] = json.loads(base64.urlsafe_b64decode(text))
        except (binascii.Error, ValueError) as error:
            raise CallerError(ErrorCode.INVALID_REQUEST, "the call is not base64url JSON", field=CALL_HEADER) from error
        http[_BODY_SHA256] = vouched
        return operation, call

    async def _arguments(self, call: dict[str, Any], http: web.BaseRequest) -> dict[str, Any]:
        """A plain call's arguments: in the header, or in the body where they are long."""
        if call or not http.can_read_body:
            return call
        arguments: dict[str, Any] = json.loads(await _checked_body(http))
        return arguments

    async def _put_object(self, call: dict[str, Any], http: web.BaseRequest) -> web.StreamResponse:
        request = _PUT.validate_python(call["request"])
        body = _body(call, http, request.nbytes)
        return _json(ObjectInfo, await self._storage.put_object(request, body))

    async def _put_part(self, call: dict[str, Any], http: web.BaseRequest) -> web.StreamResponse:
        request = _PART.validate_python(call["request"])
        body = _body(call, http, request.nbytes)
        return _json(PartInfo, await self._storage.put_part(request, body))

    async def _open_object(self, call: dict[str, Any], http: web.BaseRequest) -> web.StreamResponse:
        async with self._storage.open_object(_READ.validate_python(call["request"])) as read:
            first = await anext(read.body, b"")
            response = web.StreamResponse(headers=_result(ReadHead, read.head))
            response.content_length = read.head.range.length
            await begin_answer(http, response)
            trace, piece = http[_TRACE], first
            while piece:
                with trace.transfer:
                    await response.write(bytes(piece))
                trace.nbytes += len(piece)
                piece = await anext(read.body, b"")
            await response.write_eof()
            return response

    async def _lookup(self, call: dict[str, Any], http: web.BaseRequest) -> web.StreamResponse:
        request = parse_lookup(await _checked_body(http))
        answer = await self._storage.lookup(call["access_key"], call["bucket"], request)
        return _json_bytes(lookup_answer_body(answer))

    async def _register_agent(self, call: dict[str, Any], http: web.BaseRequest) -> web.StreamResponse:
        registration = parse_registration(await _checked_body(http))
        return _json(AgentLease, await self._storage.register_agent(call["access_key"], registration))

    async def _renew_agent(self, call: dict[str, Any], http: web.BaseRequest) -> web.StreamResponse:
        renewal = parse_renewal(await _checked_body(http))
        lease = await self._storage.renew_agent(call["access_key"], call["agent_id"], renewal)
        return _json(AgentLease, lease)

    async def _deliver(self, call: dict[str, Any], http: web.BaseRequest) -> web.StreamResponse:
        descriptor = decode_descriptor(await _checked_body(http))
        sink = ResponseSink(http, lambda start: _result(DeliveryStart, start))
        outcome = await self._storage.deliver(call["access_key"], call["bucket"], descriptor, sink)
        http[_TRACE].request_id = outcome.start.request_id
        http[_TRACE].moved(outcome.transferred_bytes, outcome.timing.transfer_s)
        if sink.response is None:
            return _json(DeliveryOutcome, outcome)
        await sink.response.write_eof()
        return sink.response

    async def _put_chunks_from(self, call: dict[str, Any], http: web.BaseRequest) -> web.StreamResponse:
        descriptor = decode_descriptor(await _checked_body(http))
        puts = await self._storage.put_chunks_from(call["access_key"], call["bucket"], descriptor)
        stored_count = sum(put.etag is not None for put in puts.puts)
        http[_TRACE].moved(stored_count * descriptor.layout.chunk_bytes, puts.transfer_s)
        return _json(ChunksPut, puts)


def _body(call: dict[str, Any], http: web.BaseRequest, nbytes: int) -> PeerBody:
    trace = http[_TRACE]
    trace.nbytes = nbytes
    return PeerBody(http, nbytes, trace.transfer, has_sha256=call["has_sha256"])


async def _checked_body(http: web.BaseRequest) -> bytes:
    """A bounded body with the hash its gateway vouched for."""
    data = bytearray()
    async for piece in arriving(http, http[_TRACE].transfer):
        data += piece
        if len(data) > DESCRIPTOR_BYTES_MAX:
            raise CallerError(
                ErrorCode.ENTITY_TOO_LARGE, f"the body may have {DESCRIPTOR_BYTES_MAX} bytes", field="body"
            )
    if http[_BODY_SHA256] == STREAMED_BODY or hashlib.sha256(data).hexdigest() != http[_BODY_SHA256]:
        raise CallerError(ErrorCode.ACCESS_DENIED, "the body is not the one that was signed", field=AUTH_HEADER)
    return bytes(data)


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    """Made once: making one costs more than a small request."""
    return TypeAdapter(kind)


def _result(kind: Any, value: object) -> dict[str, str]:
    return {RESULT_HEADER: base64.urlsafe_b64encode(_adapter(kind).dump_json(value)).decode()}


def _json(kind: Any, value: object) -> web.Response:
    return _json_bytes(_adapter(kind).dump_json(value))


def _json_bytes(body: bytes) -> web.Response:
    return web.Response(body=body, content_type="application/json")


def _refusal(error: ObjectCacheError) -> web.Response:
    body = json.dumps(error.to_fields()).encode()
    status = max(error.http_status, 400)  # a 304 would lose its body
    return web.Response(status=status, body=body, content_type="application/json")
