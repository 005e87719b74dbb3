"""Objects that do not travel over HTTP: GET and PUT with one of our tokens in x-amz-rdma-token, and puts of chunks."""

from __future__ import annotations

import hashlib
import json

from aiohttp import web

from descriptors.descriptor import DESCRIPTOR_BYTES_MAX
from descriptors.descriptor_codec import decode_descriptor
from descriptors.errors import CallerError, ErrorCode
from descriptors.headers import RDMA_BYTES_HEADER, RDMA_REPLY_HEADER
from descriptors.objects import PutRequest, ReadRequest
from descriptors.rdma_token import TOKEN_HEADER, RdmaToken, parse_token
from descriptors.storage_api import ChunkPut, ObjectDelivery
from gateway.call import Call
from gateway.operations.answers import stored_headers_of
from gateway.s3.conditions import write_condition
from gateway.s3.object_headers import RDMA_TOKEN_HEADERS, new_attributes, refuse_not_kept
from gateway.s3.request import check_key
from gateway.s3.upload import plan_body

_EMPTY_SHA256 = hashlib.sha256(b"").hexdigest()


def own_token(call: Call) -> RdmaToken | None:
    """The request's token; None where there is none, or one of another kind. Raises CallerError: InvalidArgument;
    AccessDenied for a presigned request, which could be replayed for days.
    """
    headers = call.request.headers
    text = headers.get(TOKEN_HEADER)
    if text is None or any(name in headers for name in RDMA_TOKEN_HEADERS if name != TOKEN_HEADER):
        return None
    token = parse_token(text)
    if token is not None and call.claim.presigned_s is not None:
        problem = "a request with a token must be signed in its headers: a presigned one could be replayed for days"
        raise CallerError(ErrorCode.ACCESS_DENIED, problem, field="X-Amz-Signature")
    if token is not None:
        call.trace.name(token.request_id)
    return token


async def get_into(call: Call, request: ReadRequest, token: RdmaToken) -> ObjectDelivery:
    """Write the object, or the requested range, into the client's memory. The condition of If-Range is checked before,
    because a failed condition needs a second read, and a token is used only once.
    """
    if "if-range" in call.request.headers:
        await call.storage.objects.head_object(call.access_key, request)
    delivery = await call.storage.prefixes.get_object_into(call.access_key, request, token)
    call.trace.moved(delivery.moved)
    return delivery


def answer_past(head: web.StreamResponse, delivery: ObjectDelivery) -> web.Response:
    """The answer to a request whose bytes went to the client's memory. `head` is the answer as it would be with a body.
    Its status goes into the header x-amz-rdma-reply, because a 206 without a body is not valid HTTP.
    """
    headers = head.headers.copy()
    headers.pop("Content-Length", None)
    headers[RDMA_REPLY_HEADER] = str(head.status)
    headers[RDMA_BYTES_HEADER] = str(delivery.transferred_bytes)
    return web.Response(headers=headers)


async def put_from(call: Call, token: RdmaToken) -> web.StreamResponse:
    """Store an object out of the client's memory. Content-MD5 and checksum headers describe the object, not the
    request's empty body.
    """
    request = call.request
    check_key(request.key)
    refuse_not_kept(request.headers)
    attributes = new_attributes(request.headers)
    condition = write_condition(request.headers)
    plan = plan_body(request, call.claim.form, None)
    if call.http.body_exists or plan.nbytes or plan.form.is_chunked:
        problem = "a PUT with a token has no body: its bytes are in the memory that the token names"
        raise CallerError(ErrorCode.INVALID_REQUEST, problem, field=TOKEN_HEADER)
    if call.claim.body_sha256 not in (None, _EMPTY_SHA256):
        problem = "x-amz-content-sha256 must be UNSIGNED-PAYLOAD or the SHA-256 of nothing"
        raise CallerError(ErrorCode.X_AMZ_CONTENT_SHA256_MISMATCH, problem, field="x-amz-content-sha256")
    put = PutRequest(
        bucket=request.bucket,
        key=request.key,
        nbytes=token.length,
        attributes=attributes,
        checksum=plan.checksum,
        condition=condition,
    )
    stored = await call.storage.prefixes.put_object_from(call.access_key, put, token, plan.digests)
    call.trace.moved(stored.moved)
    headers = await stored_headers_of(call, request.bucket, stored.info)
    headers[RDMA_REPLY_HEADER] = "200"
    return web.Response(headers=headers)


async def put_chunks(call: Call) -> web.StreamResponse:
    """PUT /{bucket}?layerwise: store every chunk of the descriptor in the body out of its rdma_target."""
    descriptor = await call.document(decode_descriptor, DESCRIPTOR_BYTES_MAX)
    call.trace.name(descriptor.request_id)
    chunks = await call.storage.prefixes.put_chunks_from(call.access_key, call.request.bucket, descriptor)
    stored_count = sum(put.etag is not None for put in chunks.puts)
    call.trace.moved(chunks.moved)
    body = json.dumps({"stored": stored_count, "chunks": [_fields(put) for put in chunks.puts]}).encode()
    headers = {RDMA_REPLY_HEADER: "200"}
    return web.Response(body=body, content_type="application/json", headers=headers)


def _fields(put: ChunkPut) -> dict[str, str]:
    if put.etag is not None:
        return {"key": put.key, "etag": put.etag}
    code = put.code or ErrorCode.INTERNAL_ERROR
    return {"key": put.key, "code": code.value, "message": put.message}
