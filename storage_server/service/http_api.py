"""A StorageApi behind HTTP, for gateways in other processes. Every call carries an HMAC (descriptors.peer_auth)."""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import json
import logging
import time
from collections.abc import Callable
from typing import Any

from aiohttp import web
from pydantic import TypeAdapter

from descriptors.cluster import VIEW_HEADER
from descriptors.descriptor import DESCRIPTOR_BYTES_MAX, is_request_id
from descriptors.errors import CallerError, ErrorCode, ObjectCacheError, ServerError
from descriptors.peer_auth import AUTH_HEADER, CALL_HEADER, PeerSecrets, check_call
from descriptors.peer_calls import CALL_BYTES_MAX, CALLS, RESULT_HEADER, CallForm, PeerCall
from descriptors.storage_api import DeliveryStart, Moved, StorageApi
from descriptors.tracing import PEER_REQUEST_ID_HEADER, Phase, ServerTiming
from objectcache.adapters.caller import CALLER
from objectcache.adapters.deadlines import ConnectionLimits
from objectcache.adapters.leave_to_send import is_held_back
from objectcache.adapters.limited_server import LimitedServer
from objectcache.adapters.phases import Phases
from objectcache.adapters.request_log import CLIENT_GONE, RequestLine, log_request, logs_requests
from objectcache.adapters.response_sink import ResponseSink, abort_if_begun, begin_answer, begun_status, cutting
from objectcache.adapters.threads import HERE_BYTES_MAX, computed
from storage_server.service.peer_body import PeerBody, arriving

_START = TypeAdapter(DeliveryStart)
_BODY_SHA256 = web.RequestKey("body sha256", str)
PEER_LIMITS = ConnectionLimits(header_bytes_max=CALL_BYTES_MAX, connections_max=4096)
"""Gateways keep their connections open. A stranger's connection is closed when it does not send the head of a request
in time.
"""
Method = Callable[..., Any]
RequireCurrent = Callable[[str, str], None]
_log = logging.getLogger(__name__)


class _Trace:
    """The record of one call: its request id, and the time spent in the phases STORAGE and TRANSFER."""

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id if is_request_id(request_id) else ""
        self.operation = "-"
        self.nbytes = 0
        self.phases = Phases(Phase.STORAGE)

    def moved(self, moved: Moved) -> None:
        """Take the byte count and phases from the result of a call that moved payload."""
        self.nbytes = moved.nbytes
        self.phases.move(moved.transfer_s, Phase.STORAGE, Phase.TRANSFER)

    def line(self, status: int, code: str) -> RequestLine:
        """The log line of the finished call."""
        timing = ServerTiming(0.0, self.phases.seconds(Phase.STORAGE), self.phases.seconds(Phase.TRANSFER))
        nbytes = self.nbytes if status < 400 else 0
        return RequestLine(
            by="storage",
            request_id=self.request_id,
            operation=self.operation,
            status=status,
            nbytes=nbytes,
            timing=timing,
            code=code,
        )


_TRACE = web.RequestKey("trace", _Trace)


class StorageHttp:
    """Serves one StorageApi."""

    def __init__(
        self, storage: StorageApi, secrets: PeerSecrets, require_current: RequireCurrent | None = None
    ) -> None:
        """`require_current` is given the view of each call, as its header has it, and its method; it raises where the
        call must not be carried out here.
        """
        self._storage = storage
        self._secrets = secrets
        self._require_current = require_current
        self._answers = {
            CallForm.VALUES: self._values,
            CallForm.BODY: self._body,
            CallForm.READ: self._read,
            CallForm.SINK: self._deliver,
        }

    def server(self) -> LimitedServer:
        """The aiohttp server, with the same limits on connections as a gateway's."""
        return LimitedServer(cutting(self.handle), _refusal, PEER_LIMITS)

    async def handle(self, http: web.BaseRequest) -> web.StreamResponse:
        """Answer one call. An error travels as JSON, and the gateway raises the same error again."""
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
                    response.force_close()  # body bytes may still arrive; they would be read as the next request
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
        if http.method in ("GET", "HEAD") and http.path == "/health":
            return _json_bytes(b'{"status":"ok"}')
        call, fields = self._authenticated(http)
        trace.operation = call.method
        if self._require_current is not None:
            self._require_current(http.headers.get(VIEW_HEADER, ""), call.method)
        method = getattr(getattr(self._storage, call.role), call.method)
        CALLER.set(str(fields.get("access_key", "")))  # it stands in the body where arguments are long
        return await self._answers[call.form](call, method, fields, http)

    def _authenticated(self, http: web.BaseRequest) -> tuple[PeerCall, dict[str, Any]]:
        operation = http.path.removeprefix("/v1/")
        text = http.headers.get(CALL_HEADER, "")
        vouched = check_call(self._secrets, http.headers.get(AUTH_HEADER, ""), operation, text, time.time())
        call = CALLS.get(operation)
        if http.method != "POST" or vouched is None or call is None:
            raise CallerError(ErrorCode.ACCESS_DENIED, "not a call of a gateway of this cluster", field=AUTH_HEADER)
        try:
            fields: dict[str, Any] = json.loads(base64.urlsafe_b64decode(text))
        except (binascii.Error, ValueError) as error:
            raise CallerError(ErrorCode.INVALID_REQUEST, "the call is not base64url JSON", field=CALL_HEADER) from error
        http[_BODY_SHA256] = vouched
        return call, fields

    async def _values(
        self, call: PeerCall, method: Method, fields: dict[str, Any], http: web.BaseRequest
    ) -> web.StreamResponse:
        """Answer a call whose arguments are values: they come in the header, or in the body where they are long."""
        arguments = await _arguments(call, fields, http)
        result = await method(**arguments)
        _note_moved(http[_TRACE], result)
        return _json_bytes(call.encode_result(result))

    async def _body(
        self, call: PeerCall, method: Method, fields: dict[str, Any], http: web.BaseRequest
    ) -> web.StreamResponse:
        trace, arguments = http[_TRACE], call.decode(fields, b"")
        trace.nbytes = arguments["request"].nbytes
        body = PeerBody(http, trace.nbytes, trace.phases, has_sha256=fields["has_sha256"])
        return _json_bytes(call.encode_result(await method(**arguments, body=body)))

    async def _read(
        self, call: PeerCall, method: Method, fields: dict[str, Any], http: web.BaseRequest
    ) -> web.StreamResponse:
        async with method(**call.decode(fields, b"")) as read:
            piece = await anext(read.body, b"")
            if not piece:
                read.require_whole(0)
            response = web.StreamResponse(headers=_result(call.encode_result(read.head)))
            response.content_length = read.head.range.length
            await begin_answer(http, response)
            trace, read_bytes = http[_TRACE], 0
            while piece:
                read_bytes += len(piece)
                with trace.phases.during(Phase.TRANSFER):
                    await response.write(bytes(piece))
                trace.nbytes += len(piece)
                piece = await anext(read.body, b"")
            read.require_whole(read_bytes)
            await response.write_eof()
            return response

    async def _deliver(
        self, call: PeerCall, method: Method, fields: dict[str, Any], http: web.BaseRequest
    ) -> web.StreamResponse:
        sink = ResponseSink(http, lambda start: _result(_START.dump_json(start)))
        outcome = await method(**await _arguments(call, fields, http), sink=sink)
        http[_TRACE].request_id = outcome.start.request_id
        _note_moved(http[_TRACE], outcome)
        if sink.response is None:
            return _json_bytes(call.encode_result(outcome))
        await sink.response.write_eof()
        return sink.response


def _note_moved(trace: _Trace, result: object) -> None:
    moved = getattr(result, "moved", None)
    if isinstance(moved, Moved):
        trace.moved(moved)


async def _arguments(call: PeerCall, fields: dict[str, Any], http: web.BaseRequest) -> dict[str, Any]:
    """The arguments of a call, from its header and its body, in the turn of their caller: a prefix of 65,536 keys is
    parsed for a third of a second. Raises CallerError: EntityTooLarge, AccessDenied when the body has another hash than
    the gateway signed, and what parsers raise.
    """
    body = await _body_of(http) if http.can_read_body or call.form is CallForm.SINK else b""
    vouched = http[_BODY_SHA256]

    def decoded() -> dict[str, Any]:
        if (body or call.form is CallForm.SINK) and hashlib.sha256(body).hexdigest() != vouched:
            raise CallerError(ErrorCode.ACCESS_DENIED, "the body is not the one that was signed", field=AUTH_HEADER)
        if call.document is None and body:
            return call.decode(json.loads(body), b"")
        return call.decode(fields, body)

    arguments = await computed(decoded, is_long=len(body) > HERE_BYTES_MAX)
    CALLER.set(str(arguments.get("access_key", "")))
    return arguments


async def _body_of(http: web.BaseRequest) -> bytes:
    """The bounded body of a call. Raises CallerError(EntityTooLarge)."""
    data = bytearray()
    async for piece in arriving(http, http[_TRACE].phases):
        data += piece
        if len(data) > DESCRIPTOR_BYTES_MAX:
            raise CallerError(
                ErrorCode.ENTITY_TOO_LARGE, f"the body may have {DESCRIPTOR_BYTES_MAX} bytes", field="body"
            )
    return bytes(data)


def _result(data: bytes) -> dict[str, str]:
    return {RESULT_HEADER: base64.urlsafe_b64encode(data).decode()}


def _json_bytes(body: bytes) -> web.Response:
    return web.Response(body=body, content_type="application/json")


def _refusal(error: ObjectCacheError) -> web.Response:
    body = json.dumps(error.to_fields()).encode()
    status = max(error.http_status, 400)  # a 304 would lose its body
    return web.Response(status=status, body=body, content_type="application/json")
