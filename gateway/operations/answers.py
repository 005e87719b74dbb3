"""What answers of several verb families have in common."""

from __future__ import annotations

from aiohttp import web

from descriptors.errors import CallerError, ErrorCode
from descriptors.lifecycle import expiry
from descriptors.objects import ObjectInfo
from gateway.call import Call
from gateway.object_headers import checksum_headers, expiration_header

EXPECTED_OWNER = "x-amz-expected-bucket-owner"
EXPECTED_SOURCE_OWNER = "x-amz-source-expected-bucket-owner"


def xml_answer(body: bytes, headers: dict[str, str] | None = None) -> web.Response:
    """An XML document."""
    return web.Response(body=body, content_type="application/xml", headers=headers)


async def stored_headers_of(call: Call, bucket: str, info: ObjectInfo) -> dict[str, str]:
    """What an answer to a write says of the object it made."""
    return {"ETag": f'"{info.etag}"', **checksum_headers(info.checksum), **await expiration_of(call, bucket, info)}


async def expiration_of(call: Call, bucket: str, info: ObjectInfo) -> dict[str, str]:
    """x-amz-expiration, where a rule covers the object."""
    rules = await call.storage.get_lifecycle(bucket)
    return expiration_header(expiry(rules, info)) if rules else {}


async def owner_of(call: Call, bucket: str) -> str:
    """The access key that made the bucket."""
    return (await call.storage.head_bucket(bucket)).owner


async def check_expected_owner(call: Call, header: str, bucket: str) -> None:
    """Raises CallerError(AccessDenied) when the caller expects the bucket to be another's."""
    expected = call.request.headers.get(header)
    if expected is not None and expected != await owner_of(call, bucket):
        raise CallerError(ErrorCode.ACCESS_DENIED, "the bucket has another owner than expected", field=header)
