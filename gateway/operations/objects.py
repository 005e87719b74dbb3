"""Objects: put, get, head. With one of our RDMA tokens the bytes do not travel over HTTP (`rdma_objects`)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import replace
from functools import partial

from aiohttp import web

from descriptors.errors import CallerError, ErrorCode
from descriptors.headers import CODEC_HEADER, DECODE_HEADER
from descriptors.objects import PutRequest, ReadHead, ReadRequest
from descriptors.rdma_token import RdmaToken, is_declined
from descriptors.storage_api import ObjectRead, Patience, Piece
from descriptors.tracing import TIMING_HEADER, Phase, timing_header
from descriptors.units import KIB
from gateway.call import Call
from gateway.operations.answers import stored_headers_of
from gateway.operations.decoded import DecodedBody, wants_decoded
from gateway.operations.rdma_objects import answer_past, get_into, own_token, put_from
from gateway.s3 import xml
from gateway.s3.conditions import bare_etag, parse_http_date, read_condition, write_condition
from gateway.s3.object_headers import (
    checksum_headers,
    expiration_header,
    http_date,
    new_attributes,
    object_headers,
    overriding_headers,
    refuse_encryption,
    refuse_unsupported,
)
from gateway.s3.parameters import check_version, part_number
from gateway.s3.request import check_key, parse_range
from objectcache.adapters.pump_socket import send_by_pump, takes_pump
from objectcache.adapters.reading_pace import ReadingPace
from objectcache.adapters.response_sink import begin_answer

CHECKSUM_MODE = "x-amz-checksum-mode"
STEP_BYTES = 128 * KIB
LEAST_BYTES_PER_S = 64 * KIB
"""A client takes an object's bytes at least so fast while it is waited for: what it reads takes room on the disk until
it has it.
"""


async def put_object(call: Call) -> web.StreamResponse:
    """Store an object. A request with a foreign RDMA token is refused before its (empty) body could
    become an object.
    """
    request = call.request
    token = own_token(call)
    if token is not None:
        return await put_from(call, token)
    check_key(request.key)
    refuse_unsupported(request.headers)
    attributes = new_attributes(request.headers)
    condition = write_condition(request.headers)
    upload = call.upload()
    put = PutRequest(
        bucket=request.bucket,
        key=request.key,
        nbytes=upload.nbytes,
        attributes=attributes,
        checksum=upload.checksum,
        condition=condition,
    )
    info = await call.storage.objects.put_object(call.access_key, put, upload.body)
    return web.Response(headers=await stored_headers_of(call, request.bucket, info))


async def get_object(call: Call) -> web.StreamResponse:
    token = own_token(call)
    if token is not None and DECODE_HEADER in call.request.headers:
        problem = "decoded bytes come in the body, not into memory"
        raise CallerError(ErrorCode.NOT_IMPLEMENTED, problem, field=DECODE_HEADER)
    return await _answer(call, _get if token is None else partial(_get_into, token))


async def head_object(call: Call) -> web.StreamResponse:
    """Answer with the headers of a GET."""
    return await _answer(call, _head)


def read_request(call: Call) -> ReadRequest:
    """The object and range that a GET or HEAD asks for. Raises CallerError: NoSuchVersion, InvalidRequest,
    InvalidArgument, NotImplemented.
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
    head = await call.storage.objects.head_object(call.access_key, request)
    return _head_of_answer(call, request, head, overrides)


async def _get(call: Call, request: ReadRequest, overrides: dict[str, str]) -> web.StreamResponse:
    trace, phases = call.trace, call.trace.phases
    is_to_decode = wants_decoded(call, request)
    phases.enter(Phase.STORAGE)
    async with call.storage.objects.open_object(call.access_key, request) as read:
        phases.enter(Phase.GATEWAY)
        if is_to_decode and CODEC_HEADER in read.head.info.attributes.headers:
            return await _send_decoded(call, request, read, overrides)
        response = _head_of_answer(call, request, read.head, overrides)
        pace = ReadingPace(Patience(call.settings.send_idle_timeout_s, LEAST_BYTES_PER_S))
        if read.pump is not None and takes_pump(call.http):
            with phases.during(Phase.STORAGE):
                await read.pump.prime()
            response.headers[TIMING_HEADER] = timing_header(trace.timing())
            await begin_answer(call.http, response)
            with phases.during(Phase.TRANSFER):
                await send_by_pump(call.http, read.pump, pace, trace.add_bytes)
        else:
            with phases.during(Phase.STORAGE):
                piece = await anext(read.body, b"")
            if not piece:
                read.require_whole(0)
            response.headers[TIMING_HEADER] = timing_header(trace.timing())
            await begin_answer(call.http, response)
            call.bound_write_queue()
            read_bytes = 0
            while piece:
                read_bytes += len(piece)
                with phases.during(Phase.TRANSFER):
                    await _write(response, piece, pace)
                trace.add_bytes(len(piece))
                with phases.during(Phase.STORAGE):
                    piece = await anext(read.body, b"")
            read.require_whole(read_bytes)
        await response.write_eof()
        return response


async def _send_decoded(
    call: Call, request: ReadRequest, read: ObjectRead, overrides: dict[str, str]
) -> web.StreamResponse:
    """The ETag and the checksum of the stored bytes are not those of the decoded ones, and are left out."""
    body = DecodedBody(call, read)
    pace = ReadingPace(Patience(call.settings.send_idle_timeout_s, LEAST_BYTES_PER_S))
    async with aclosing(body.layers()) as layers:
        with call.trace.phases.during(Phase.STORAGE):
            layer = await anext(layers, None)
        response = _head_of_answer(call, request, read.head, overrides)
        for name in ("ETag", "Accept-Ranges", *checksum_headers(read.head.info.checksum)):
            response.headers.popall(name, None)
        response.headers[DECODE_HEADER] = "true"
        response.content_length = body.nbytes
        await begin_answer(call.http, response)
        call.bound_write_queue()
        while layer is not None:
            with call.trace.phases.during(Phase.TRANSFER):
                await _write(response, layer, pace)
            call.trace.add_bytes(len(layer))
            with call.trace.phases.during(Phase.STORAGE):
                layer = await anext(layers, None)
    await response.write_eof()
    return response


async def _get_into(
    token: RdmaToken, call: Call, request: ReadRequest, overrides: dict[str, str]
) -> web.StreamResponse:
    """Write the object into the client's memory. If that is declined, send it in the body, without the RDMA header."""
    try:
        delivery = await get_into(call, request, token)
    except CallerError as error:
        if is_declined(error):
            return await _get(call, request, overrides)
        raise
    return answer_past(_head_of_answer(call, request, delivery.head, overrides), delivery)


async def _write(response: web.StreamResponse, piece: Piece, pace: ReadingPace) -> None:
    """Write in small steps, because a TLS connection holds two copies of the bytes until the client takes them. Raises
    ConnectionError for a client that reads too slowly: what it reads stays on the disk meanwhile.
    """
    view, clock = memoryview(piece), asyncio.get_running_loop()
    for start in range(0, len(view), STEP_BYTES):
        step, began_s = bytes(view[start : start + STEP_BYTES]), clock.time()
        await response.write(step)
        if pace.is_too_slow(clock.time() - began_s, len(step)):
            raise ConnectionResetError("the client takes too little")


def _head_of_answer(call: Call, request: ReadRequest, head: ReadHead, overrides: dict[str, str]) -> web.StreamResponse:
    """Status and headers. With a range they never give the whole object's checksum, because clients would compare it
    with the range.
    """
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
    """304 with the headers by which a cache recognises its copy (RFC 9110, 15.4.5)."""
    head = await call.storage.objects.head_object(call.access_key, ReadRequest(request.bucket, request.key))
    headers = {"ETag": f'"{head.info.etag}"', "Last-Modified": http_date(head.info.modified_at)}
    stored = object_headers(head.info)
    headers |= {name: stored[name] for name in ("Cache-Control", "Expires", "Accept-Ranges") if name in stored}
    return web.Response(status=304, headers=headers)


async def _unsatisfiable(call: Call, request: ReadRequest, error: CallerError) -> web.StreamResponse:
    """416 with the object's size (RFC 9110, 15.5.17)."""
    info = (await call.storage.objects.head_object(call.access_key, ReadRequest(request.bucket, request.key))).info
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
    """Whether If-Range decides between the range and the whole object. If-Match, where given, takes precedence."""
    headers = call.request.headers
    return "if-range" in headers and "range" in headers and "if-match" not in headers


def _conditional_range(call: Call, request: ReadRequest) -> ReadRequest:
    """The request for the range, on condition that the ETag is the one in If-Range. If that fails, the caller asks for
    the whole object.
    """
    text = call.request.headers["if-range"].strip()
    since = parse_http_date(text)
    if since is not None:
        return replace(request, condition=replace(request.condition, if_unmodified_since=since))
    return replace(request, condition=replace(request.condition, if_match=(bare_etag(text),)))
