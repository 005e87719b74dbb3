"""Buckets: list, create, head; and what is in them."""

from __future__ import annotations

import base64
import binascii

from aiohttp import web

from descriptors.errors import CallerError, ErrorCode
from descriptors.storage_api import ListRequest
from descriptors.units import MIB
from gateway import xml
from gateway.call import Call
from gateway.request import check_bucket_name

MAX_KEYS = 1000


async def list_buckets(call: Call) -> web.StreamResponse:
    buckets = await call.storage.list_buckets()
    return _xml(xml.buckets_document(call.claim.access_key, buckets))


async def create_bucket(call: Call) -> web.StreamResponse:
    """A CreateBucketConfiguration body is accepted and says nothing we need."""
    check_bucket_name(call.request.bucket)
    if call.claim.body_sha256 is not None:
        await call.body(MIB)
    await call.storage.create_bucket(call.claim.access_key, call.request.bucket)
    return web.Response(headers={"Location": f"/{call.request.bucket}"})


async def head_bucket(call: Call) -> web.StreamResponse:
    await call.storage.head_bucket(call.request.bucket)
    return web.Response(headers={"x-amz-bucket-region": call.claim.scope.split("/")[1]})


async def list_objects_v2(call: Call) -> web.StreamResponse:
    parameters = call.request.parameters
    if parameters.get("encoding-type", "url") != "url":
        raise CallerError(ErrorCode.INVALID_ARGUMENT, "encoding-type can only be url", field="encoding-type")
    request = ListRequest(
        bucket=call.request.bucket,
        prefix=parameters.get("prefix", ""),
        delimiter=parameters.get("delimiter", ""),
        after=_after(parameters),
        max_keys=min(_max_keys(parameters.get("max-keys")), MAX_KEYS),
    )
    page = await call.storage.list_objects(request)
    owner = call.claim.access_key if parameters.get("fetch-owner") == "true" else None
    return _xml(xml.objects_document(request, page, owner, parameters))


def _after(parameters: dict[str, str]) -> str:
    token = parameters.get("continuation-token")
    if token is None:
        return parameters.get("start-after", "")
    try:
        return base64.b64decode(token, altchars=b"-_", validate=True).decode()
    except (binascii.Error, ValueError):
        raise CallerError(
            ErrorCode.INVALID_ARGUMENT, "the continuation token is not one of ours", field="continuation-token"
        ) from None


def _max_keys(text: str | None) -> int:
    if text is None:
        return MAX_KEYS
    if not text.isascii() or not text.isdigit() or len(text) > 10 or int(text) > 2**31 - 1:
        raise CallerError(ErrorCode.INVALID_ARGUMENT, "max-keys must be 0 to 2147483647", field="max-keys")
    return int(text)


def _xml(body: bytes) -> web.Response:
    return web.Response(body=body, content_type="application/xml")
