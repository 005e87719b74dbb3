"""Parts of answers that several verb families share."""

from __future__ import annotations

from collections.abc import Callable

from aiohttp import web

from descriptors.errors import CallerError, ErrorCode
from descriptors.lifecycle import expiry
from descriptors.objects import ObjectInfo
from gateway.call import Call
from gateway.s3.object_headers import checksum_headers, expiration_header, http_date
from objectcache.adapters.threads import computed

ENTRIES_HERE = 32
RULES_HERE = 128
"""More rules of a bucket are compared with an object in a thread: a thousand take a millisecond."""
EXPECTED_OWNER = "x-amz-expected-bucket-owner"
EXPECTED_SOURCE_OWNER = "x-amz-source-expected-bucket-owner"


def xml_answer(body: bytes, headers: dict[str, str] | None = None) -> web.Response:
    """An answer with an XML document."""
    return web.Response(body=body, content_type="application/xml", headers=headers)


async def xml_pages(write: Callable[[], bytes], entry_count: int) -> web.Response:
    """An answer with an XML document of so many entries, written in a thread where they are many: names of a kilobyte,
    percent-encoded, take a tenth of a millisecond each.
    """
    return xml_answer(await computed(write, is_long=entry_count > ENTRIES_HERE))


async def stored_headers_of(call: Call, bucket: str, info: ObjectInfo) -> dict[str, str]:
    """The headers that describe a new object, in the answer to its write."""
    return {
        "ETag": f'"{info.etag}"',
        "Last-Modified": http_date(info.modified_at),
        **checksum_headers(info.checksum),
        **await expiration_of(call, bucket, info),
    }


async def expiration_of(call: Call, bucket: str, info: ObjectInfo) -> dict[str, str]:
    """The x-amz-expiration header, where a lifecycle rule of our own covers the object."""
    rules = await call.storage.objects.own_lifecycle(call.access_key, bucket)
    return expiration_header(await computed(lambda: expiry(rules, info), is_long=len(rules) > RULES_HERE))


async def owner_of(call: Call, bucket: str) -> str:
    """The access key that made the bucket."""
    return (await call.storage.objects.head_bucket(call.access_key, bucket)).owner


async def check_expected_owner(call: Call, header: str, bucket: str) -> None:
    """Raises CallerError(AccessDenied) when the bucket's owner is not the one the caller expects."""
    expected = call.request.headers.get(header)
    if expected is not None and expected != await owner_of(call, bucket):
        raise CallerError(ErrorCode.ACCESS_DENIED, "the bucket has another owner than expected", field=header)
