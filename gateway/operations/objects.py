"""Objects: put, get, head. With a token of ours their bytes go past HTTP (`rdma_objects`)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial

from aiohttp import web

from adapters.pump_socket import send_by_pump, takes_pump
from adapters.reading_pace import ReadingPace
from adapters.response_sink import begin_answer
from descriptors.errors import CallerError, ErrorCode
from descriptors.objects import PutRequest, ReadHead, ReadRequest
from descriptors.rdma_token import RdmaToken, is_declined
from descriptors.storage_api import Patience, Piece
from descriptors.tracing import TIMING_HEADER, timing_header
from descriptors.units import KIB
from gateway import xml
from gateway.call import Call
from gateway.conditions import bare_etag, parse_http_date, read_condition, write_condition
from gateway.object_headers import (
    checksum_headers,
    expiration_header,
    http_date,
    new_attributes,
    object_headers,
    overriding_headers,
    refuse_encryption,
    refuse_unsupported,
)
from gateway.operations.answers import stored_headers_of
from gateway.operations.rdma_objects import answer_past, get_into, own_token, put_from
from gateway.parameters import check_version, part_number
from gateway.request import check_key, parse_range

CHECKSUM_MODE = "x-amz-checksum-mode"
STEP_BYTES = 128 * KIB


async def put_object(call: Call) -> web.StreamResponse:
    """A foreign token's empty body creates nothing: such tokens are refused before the body is looked at."""
    request = call.request
    token = own_token(call)
    if token is not None:
        return await put_from(call, token)
    check_key(request.key)
    refuse_unsupported(request.headers)
    attributes = new_attributes(request.headers)
    condition = write_condition(request.headers)
    upload = call.upload()
    put = PutRequest(request.bucket, request.key, upload.nbytes, attributes, upload.checksum, condition)
    info = await call.storage.put_object(put, upload.body)
    return web.Response(headers=await stored_headers_of(call, request.bucket, info))


async def get_object(call: Call) -> web.StreamResponse:
    token = own_token(call)
    return await _answer(call, _get if token is None else partial(_get_into, token))


async def head_object(call: Call) -> web.StreamResponse:
    """As GET, without the bytes."""
    return await _answer(call, _head)


def read_request(call: Call) -> ReadRequest:
    """What a GET or HEAD asks for. Raises CallerError: NoSuchVersion, InvalidRequest, InvalidArgument,
    NotImplemented.
    """
    request = call.request
    check_key(request.key)
    check_version(request)
    refuse_encryption(request.headers)
    spec = parse_range(request.headers.get("range"))
    condition = read_condition(request.headers)
    if "partNumber" in request.parameters:
        if spec is not None:
            problem = "Cannot specify both Range header and partNumber query parameter"
            raise CallerError(ErrorCode.INVALID_REQUEST, problem, field="range")
        number = part_number(request.parameters)
        return ReadRequest(request.bucket, request.key, part_number=number, condition=condition)
    if spec is not None and _is_conditional_range(call):
        return _conditional_range(call, ReadRequest(request.bucket, request.key, spec, condition=condition))
    return ReadRequest(request.bucket, request.key, spec, condition=condition)


async def _answer(
    call: Call, read: Callable[[Call, ReadRequest, dict[str, str]], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    request = read_request(call)
    overrides = overriding_headers(call.request.parameters)
    try:
        return await read(call, request, overrides)
    except CallerError as error:
        if error.code is ErrorCode.PRECONDITION_FAILED and request.range is not None and _is_conditional_range(call):
            whole = replace(request, range=None, condition=read_condition(call.request.headers))
            return await read(call, whole, overrides)
        if error.code is ErrorCode.NOT_MODIFIED:
            return await _not_modified(call, request)
        if error.code is ErrorCode.INVALID_RANGE:
            return await _unsatisfiable(call, request, error)
        raise


async def _head(call: Call, request: ReadRequest, overrides: dict[str, str]) -> web.StreamResponse:
    head = await call.storage.head_object(request)
    return _head_of_answer(call, request, head, overrides)


async def _get(call: Call, request: ReadRequest, overrides: dict[str, str]) -> web.StreamResponse:
    trace = call.trace
    trace.wait_for_storage()
    async with call.storage.open_object(request) as read:
        trace.work()
        response = _head_of_answer(call, request, read.head, overrides)
        if read.pump is not None and takes_pump(call.http):
            trace.wait_for_storage()
            await read.pump.prime()
            trace.work()
            response.headers[TIMING_HEADER] = timing_header(trace.timing())
            await begin_answer(call.http, response)
            trace.wait_for_client()
            await send_by_pump(
                call.http, read.pump, ReadingPace(Patience(call.settings.send_idle_timeout_s)), trace.add_bytes
            )
        else:
            trace.wait_for_storage()
            piece = await anext(read.body, b"")
            trace.work()
            response.headers[TIMING_HEADER] = timing_header(trace.timing())
            await begin_answer(call.http, response)
            call.bound_write_queue()
            while piece:
                trace.wait_for_client()
                await _write(response, piece)
                trace.add_bytes(len(piece))
                trace.wait_for_storage()
                piece = await anext(read.body, b"")
        trace.work()
        await response.write_eof()
        return response


async def _get_into(
    token: RdmaToken, call: Call, request: ReadRequest, overrides: dict[str, str]
) -> web.StreamResponse:
    """Into the client's memory; where that is declined, in the body, without the header that says so."""
    try:
        delivery = await get_into(call, request, token)
    except CallerError as error:
        if is_declined(error):
            return await _get(call, request, overrides)
        raise
    return answer_past(_head_of_answer(call, request, delivery.head, overrides), delivery)


async def _write(response: web.StreamResponse, piece: Piece) -> None:
    """Copied in small steps: a TLS connection holds what it was given twice until the client takes it."""
    view = memoryview(piece)
    for start in range(0, len(view), STEP_BYTES):
        await response.write(bytes(view[start : start + STEP_BYTES]))


def _head_of_answer(call: Call, request: ReadRequest, head: ReadHead, overrides: dict[str, str]) -> web.StreamResponse:
    """Status and headers. A checksum of the whole object never goes with a part of it: clients would compare."""
    info = head.info
    response = web.StreamResponse(headers={**object_headers(info), **expiration_header(head.expiry), **overrides})
    is_part = request.range is not None or request.part_number is not None
    if is_part and head.range.length:
        last = head.range.start + head.range.length - 1
        response.set_status(206)
        response.headers["Content-Range"] = f"bytes {head.range.start}-{last}/{info.nbytes}"
    if request.part_number is not None and info.part_count is not None:
        response.headers["x-amz-mp-parts-count"] = str(info.part_count)
    if not is_part and call.request.headers.get(CHECKSUM_MODE, "").upper() == "ENABLED":
        response.headers.update(checksum_headers(info.checksum))
    response.content_length = head.range.length
    return response


async def _not_modified(call: Call, request: ReadRequest) -> web.StreamResponse:
    """304 with the headers that tell a cache what it has (RFC 9110, 15.4.5)."""
    head = await call.storage.head_object(ReadRequest(request.bucket, request.key))
    headers = {"ETag": f'"{head.info.etag}"', "Last-Modified": http_date(head.info.modified_at)}
    stored = object_headers(head.info)
    headers |= {name: stored[name] for name in ("Cache-Control", "Expires", "Accept-Ranges") if name in stored}
    return web.Response(status=304, headers=headers)


async def _unsatisfiable(call: Call, request: ReadRequest, error: CallerError) -> web.StreamResponse:
    """416 with the size there is (RFC 9110, 15.5.17)."""
    info = (await call.storage.head_object(ReadRequest(request.bucket, request.key))).info
    body = (
        b""
        if call.request.method == "HEAD"
        else xml.range_error_document(
            error, call.request.path, call.trace.trace_id, call.request.headers.get("range", ""), info.nbytes
        )
    )
    headers = {"Content-Range": f"bytes */{info.nbytes}"}
    return web.Response(status=error.http_status, body=body, content_type="application/xml", headers=headers)


def _is_conditional_range(call: Call) -> bool:
    """Whether If-Range decides between a range and the whole; If-Match, where given, has decided more already."""
    headers = call.request.headers
    return "if-range" in headers and "range" in headers and "if-match" not in headers


def _conditional_range(call: Call, request: ReadRequest) -> ReadRequest:
    """The range on condition that the object is the one If-Range names; what fails is asked for whole."""
    text = call.request.headers["if-range"].strip()
    since = parse_http_date(text)
    if since is not None:
        return replace(request, condition=replace(request.condition, if_unmodified_since=since))
    return replace(request, condition=replace(request.condition, if_match=(bare_etag(text),)))
