"""Objects: put, get, head, delete."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from email.utils import formatdate

from aiohttp import web

from adapters.response_sink import begin_answer
from descriptors.errors import CallerError, ErrorCode
from descriptors.storage_api import ObjectInfo, PutRequest
from gateway.call import Call
from gateway.request import check_key, parse_range

USER_METADATA_BYTES_MAX = 2048
CONTENT_HEADERS_BYTES_MAX = 8192
RDMA_TOKEN_HEADERS = ("x-amz-rdma-token", "x-rdma-info", "x-scal-rdma")
_STORED_HEADERS = (
    "content-type",
    "cache-control",
    "content-disposition",
    "content-encoding",
    "content-language",
    "expires",
)
_DEFAULT_CONTENT_TYPE = "binary/octet-stream"


async def put_object(call: Call) -> web.StreamResponse:
    request = call.request
    check_key(request.key)
    nbytes = request.content_length
    if nbytes is None:
        raise CallerError(ErrorCode.MISSING_CONTENT_LENGTH, "Content-Length is required", field="content-length")
    if any(name in request.headers for name in RDMA_TOKEN_HEADERS):
        raise CallerError(
            ErrorCode.NOT_IMPLEMENTED, "RDMA tokens are not executed here; send the body", field="x-amz-rdma-token"
        )
    put = PutRequest(
        bucket=request.bucket,
        key=request.key,
        nbytes=nbytes,
        headers=stored_headers(request.headers),
        sha256=call.claim.body_sha256,
        md5=_content_md5(request.headers.get("content-md5")),
    )
    info = await call.storage.put_object(put, call.pieces())
    return web.Response(headers={"ETag": f'"{info.etag}"'})


async def get_object(call: Call) -> web.StreamResponse:
    check_key(call.request.key)
    spec = parse_range(call.request.headers.get("range"))
    async with call.storage.open_object(call.request.bucket, call.request.key, spec) as read:
        headers = object_headers(read.info)
        response = web.StreamResponse(headers=headers)
        if spec is not None:
            last = read.range.start + read.range.length - 1
            response.set_status(206)
            response.headers["Content-Range"] = f"bytes {read.range.start}-{last}/{read.info.nbytes}"
        response.content_length = read.range.length
        response.headers["x-amz-request-id"] = call.trace_id
        await begin_answer(call.http, response)
        async for piece in read.body:
            await response.write(piece)
        await response.write_eof()
        return response


async def head_object(call: Call) -> web.StreamResponse:
    check_key(call.request.key)
    info = await call.storage.head_object(call.request.bucket, call.request.key)
    response = web.StreamResponse(headers=object_headers(info))
    response.content_length = info.nbytes
    return response


async def delete_object(call: Call) -> web.StreamResponse:
    check_key(call.request.key)
    await call.storage.delete_object(call.request.bucket, call.request.key)
    return web.Response(status=204)


def stored_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """Content headers and user metadata to keep with an object. Raises CallerError(MetadataTooLarge)."""
    if sum(len(headers.get(name, "").encode()) for name in _STORED_HEADERS) > CONTENT_HEADERS_BYTES_MAX:
        raise CallerError(
            ErrorCode.METADATA_TOO_LARGE,
            f"content headers may have {CONTENT_HEADERS_BYTES_MAX} bytes together",
            field="content-disposition",
        )
    kept = {name: headers[name] for name in _STORED_HEADERS if name in headers}
    metadata = {name: value for name, value in headers.items() if name.startswith("x-amz-meta-")}
    nbytes = sum(len(name) - len("x-amz-meta-") + len(value.encode()) for name, value in metadata.items())
    if nbytes > USER_METADATA_BYTES_MAX:
        raise CallerError(
            ErrorCode.METADATA_TOO_LARGE,
            f"user metadata has {nbytes} bytes, at most {USER_METADATA_BYTES_MAX}",
            field="x-amz-meta-",
        )
    return kept | metadata


def object_headers(info: ObjectInfo) -> dict[str, str]:
    """The headers GET and HEAD answer with, besides length and range."""
    return {
        "Content-Type": _DEFAULT_CONTENT_TYPE,
        **{name.title() if not name.startswith("x-amz-") else name: value for name, value in info.headers.items()},
        "ETag": f'"{info.etag}"',
        "Last-Modified": formatdate(info.modified_at, usegmt=True),
        "Accept-Ranges": "bytes",
    }


def _content_md5(header: str | None) -> str | None:
    if header is None:
        return None
    try:
        digest = base64.b64decode(header, validate=True)
    except (binascii.Error, ValueError):
        digest = b""
    if len(digest) != 16:
        raise CallerError(ErrorCode.INVALID_DIGEST, "Content-MD5 is no base64 MD5", field="content-md5")
    return digest.hex()
