"""Objects past HTTP: GET and PUT with a token of ours in x-amz-rdma-token, and puts of many chunks."""

from __future__ import annotations

import hashlib
import json

from aiohttp import web

from descriptors.descriptor import DESCRIPTOR_BYTES_MAX
from descriptors.descriptor_codec import decode_descriptor
from descriptors.errors import CallerError, ErrorCode
from descriptors.objects import PutRequest, ReadRequest
from descriptors.rdma_token import TOKEN_HEADER, RdmaToken, parse_token
from descriptors.storage_api import ChunkPut, ObjectDelivery
from gateway.call import Call
from gateway.conditions import write_condition
from gateway.object_headers import RDMA_TOKEN_HEADERS, new_attributes, refuse_not_kept
from gateway.operations.answers import stored_headers_of
from gateway.operations.layerwise import RDMA_BYTES_HEADER, RDMA_REPLY_HEADER
from gateway.request import check_key
from gateway.upload import plan_body

_EMPTY_SHA256 = hashlib.sha256(b"").hexdigest()


def own_token(call: Call) -> RdmaToken | None:
    """The request's token, where it has one of ours and nothing of another dialect. Raises CallerError:
    InvalidArgument, AccessDenied for a presigned request, which could be replayed for days.
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
    """The object, or the range asked for, in the client's memory. A condition of If-Range is looked at first: where it
    fails the object is asked for again, and a token is used once.
    """
    if "if-range" in call.request.headers:
        await call.storage.head_object(request)
    delivery = await call.storage.get_object_into(call.claim.access_key, request, token)
    call.trace.moved(delivery.transferred_bytes, delivery.transfer_s)
    return delivery


def answer_past(head: web.StreamResponse, delivery: ObjectDelivery) -> web.Response:
    """The answer whose bytes have gone past it: `head` is what it would be with them. Its status is in the reply's
    header, since a 206 without a body is not HTTP.
    """
    headers = head.headers.copy()
    headers.pop("Content-Length", None)
    headers[RDMA_REPLY_HEADER] = str(head.status)
    headers[RDMA_BYTES_HEADER] = str(delivery.transferred_bytes)
    return web.Response(headers=headers)


async def put_from(call: Call, token: RdmaToken) -> web.StreamResponse:
    """Store what lies in the client's memory. Content-MD5 and checksum headers speak of the object, not of the
    request's empty body.
    """
    request = call.request
    check_key(request.key)
    refuse_not_kept(request.headers)
    attributes = new_attributes(request.headers)
    condition = write_condition(request.headers)
    plan = plan_body(request, call.claim.form, None)
    if call.http.body_exists or plan.nbytes or plan.form.is_chunked:
        problem = "a PUT with a token has no body: its bytes are where the token says"
        raise CallerError(ErrorCode.INVALID_REQUEST, problem, field=TOKEN_HEADER)
    if call.claim.body_sha256 not in (None, _EMPTY_SHA256):
        problem = "x-amz-content-sha256 must be UNSIGNED-PAYLOAD or the SHA-256 of nothing"
        raise CallerError(ErrorCode.X_AMZ_CONTENT_SHA256_MISMATCH, problem, field="x-amz-content-sha256")
    put = PutRequest(request.bucket, request.key, token.length, attributes, plan.checksum, condition)
    stored = await call.storage.put_object_from(call.claim.access_key, put, token, plan.digests)
    call.trace.moved(stored.info.nbytes, stored.transfer_s)
    headers = await stored_headers_of(call, request.bucket, stored.info)
    headers[RDMA_REPLY_HEADER] = "200"
    return web.Response(headers=headers)


async def put_chunks(call: Call) -> web.StreamResponse:
    """PUT /{bucket}?layerwise: store every chunk of the descriptor in the body out of its rdma_target."""
    descriptor = await call.document(decode_descriptor, DESCRIPTOR_BYTES_MAX)
    call.trace.name(descriptor.request_id)
    chunks = await call.storage.put_chunks_from(call.claim.access_key, call.request.bucket, descriptor)
    stored_count = sum(put.etag is not None for put in chunks.puts)
    call.trace.moved(stored_count * descriptor.layout.chunk_bytes, chunks.transfer_s)
    body = json.dumps({"stored": stored_count, "chunks": [_fields(put) for put in chunks.puts]}).encode()
    headers = {RDMA_REPLY_HEADER: "200"}
    return web.Response(body=body, content_type="application/json", headers=headers)


def _fields(put: ChunkPut) -> dict[str, str]:
    if put.etag is not None:
        return {"key": put.key, "etag": put.etag}
    code = put.code or ErrorCode.INTERNAL_ERROR
    return {"key": put.key, "code": code.value, "message": put.message}
