"""Buckets: list, create, head, delete, and their location, versioning, ACL and lifecycle."""

from __future__ import annotations

from collections.abc import Mapping

from aiohttp import web

from descriptors.errors import CallerError, ErrorCode
from descriptors.headers import CACHE_HEADER
from descriptors.objects import BUCKETS_LISTED_MAX, BucketCache, BucketInfo
from descriptors.units import MIB
from gateway.call import Call
from gateway.operations.answers import owner_of, xml_answer, xml_pages
from gateway.s3 import xml
from gateway.s3.object_headers import check_acl
from gateway.s3.parameters import after_token, integer
from gateway.s3.request import check_bucket_name
from gateway.s3.xml_in import parse_acl, parse_create_bucket, parse_lifecycle
from objectcache.adapters.threads import in_parts, let_others_run

BUCKETS_MAX = 10_000
BUCKET_BYTES = 512
"""A bucket in a list takes about so much memory, with its part of the document."""
LOOKED_AT_MIN = 1_000
DOCUMENT_BYTES_MAX = MIB
US_EAST_1 = "us-east-1"
_OWNERSHIP = "x-amz-object-ownership"
_OBJECT_LOCK = "x-amz-bucket-object-lock-enabled"


async def list_buckets(call: Call) -> web.StreamResponse:
    """Answer with the buckets that the key may see, by name."""
    parameters = call.request.parameters
    prefix = parameters.get("prefix", "")
    most = integer(parameters, "max-buckets", BUCKETS_MAX, least=1, most=BUCKETS_MAX)
    after = after_token(parameters.get("continuation-token", ""))
    seen: list[BucketInfo] = []
    try:
        if parameters.get("bucket-region", call.settings.region) == call.settings.region:
            await _see(call, seen, prefix, after, most + 1)
        token = xml.continuation_token(seen[most - 1].name) if len(seen) > most else None
        return await xml_pages(lambda: xml.buckets_document(call.access_key, seen[:most], prefix, token), len(seen))
    finally:
        call.documents.give_back(call.access_key, BUCKET_BYTES * len(seen))


async def _see(call: Call, seen: list[BucketInfo], prefix: str, after: str, most: int) -> None:
    """Add buckets that the key may see, in order, until they are `most`, or some more. There may be any number of
    others, which are looked at and let go, a list at a time. Those that are seen count among the caller's documents.
    """
    start, asked_count = max(after, prefix[:-1]), min(max(most, LOOKED_AT_MIN), BUCKETS_LISTED_MAX)
    while len(seen) < most:
        found = await call.storage.objects.list_buckets(call.access_key, start, asked_count)
        found = [bucket for bucket in found if bucket.name > start]  # a server of the release before gives all
        for at, some in in_parts(found):
            await let_others_run(at)
            allowed = [
                bucket
                for bucket in some
                if bucket.name.startswith(prefix) and call.credential.allows("ListAllMyBuckets", bucket.name)
            ]
            call.documents.take(call.access_key, BUCKET_BYTES * len(allowed))
            seen += allowed
        if len(found) < asked_count or found[-1].name[: len(prefix)] > prefix:
            return
        start = found[-1].name


async def create_bucket(call: Call) -> web.StreamResponse:
    """Create a bucket in this region, private. Refuse features that this server lacks."""
    headers = call.request.headers
    check_bucket_name(call.request.bucket)
    check_acl(headers)
    if headers.get(_OBJECT_LOCK, "false").lower() != "false":
        raise CallerError(ErrorCode.NOT_IMPLEMENTED, "object lock is not implemented", field=_OBJECT_LOCK)
    if headers.get(_OWNERSHIP, "BucketOwnerEnforced") != "BucketOwnerEnforced":
        problem = "objects belong to the bucket's owner (BucketOwnerEnforced)"
        raise CallerError(ErrorCode.NOT_IMPLEMENTED, problem, field=_OWNERSHIP)
    location = await call.document(parse_create_bucket, DOCUMENT_BYTES_MAX)
    if location not in ("", call.settings.region):
        problem = f"buckets here are in {call.settings.region}"
        raise CallerError(ErrorCode.ILLEGAL_LOCATION, problem, field="LocationConstraint")
    try:
        await call.storage.objects.create_bucket(call.access_key, call.request.bucket, _cache_of(headers))
    except CallerError as error:  # in us-east-1 S3 answers the owner as if the bucket were new
        if error.code is not ErrorCode.BUCKET_ALREADY_OWNED or call.settings.region != US_EAST_1:
            raise
    return web.Response(headers={"Location": f"/{call.request.bucket}"})


def _cache_of(headers: Mapping[str, str]) -> BucketCache | None:
    """Whether the new bucket is to be a cache. Raises CallerError."""
    text = headers.get(CACHE_HEADER)
    try:
        return None if text is None else BucketCache.of_text(text)
    except ValueError as error:
        raise CallerError(ErrorCode.INVALID_ARGUMENT, f"{CACHE_HEADER}: {error}", field=CACHE_HEADER) from None


async def head_bucket(call: Call) -> web.StreamResponse:
    info = await call.storage.objects.head_bucket(call.access_key, call.request.bucket)
    cache = {} if info.cache is None else {CACHE_HEADER: info.cache.text()}
    headers = {"x-amz-bucket-region": call.settings.region, **cache}
    return web.Response(content_type="application/xml", headers=headers)


async def delete_bucket(call: Call) -> web.StreamResponse:
    await call.storage.objects.delete_bucket(call.access_key, call.request.bucket)
    return web.Response(status=204)


async def get_location(call: Call) -> web.StreamResponse:
    await call.storage.objects.head_bucket(call.access_key, call.request.bucket)
    return xml_answer(xml.location_document(call.settings.region))


async def get_versioning(call: Call) -> web.StreamResponse:
    """Answer with an empty document, which says that versioning was never switched on."""
    await call.storage.objects.head_bucket(call.access_key, call.request.bucket)
    return xml_answer(xml.versioning_document())


async def get_acl(call: Call) -> web.StreamResponse:
    return xml_answer(xml.acl_document(await owner_of(call, call.request.bucket)))


async def put_acl(call: Call) -> web.StreamResponse:
    """Accept an ACL that says what holds already: the owner has full control, and nobody else has any."""
    owner = await owner_of(call, call.request.bucket)
    await check_new_acl(call, owner)
    return web.Response()


async def check_new_acl(call: Call, owner: str) -> None:
    """Check that the ACL in headers or body gives rights to the owner alone. Raises CallerError."""
    check_acl(call.request.headers)
    has_header = "x-amz-acl" in call.request.headers

    def check(body: bytes) -> None:
        if has_header and body:
            raise CallerError(ErrorCode.INVALID_REQUEST, "an ACL goes into a header or the body", field="x-amz-acl")
        if not has_header and not body:
            raise CallerError(ErrorCode.MISSING_REQUEST_BODY, "an ACL is needed, in a header or the body", field="body")
        if not has_header:
            parse_acl(body, owner)

    await call.document(check, DOCUMENT_BYTES_MAX)


async def get_lifecycle(call: Call) -> web.StreamResponse:
    rules = await call.storage.objects.get_lifecycle(call.access_key, call.request.bucket)
    if not rules:
        raise CallerError(ErrorCode.NO_SUCH_LIFECYCLE, "the bucket has no lifecycle configuration", field="bucket")
    return await xml_pages(lambda: xml.lifecycle_document(rules), len(rules))


async def put_lifecycle(call: Call) -> web.StreamResponse:
    rules = await call.document(parse_lifecycle, DOCUMENT_BYTES_MAX)
    await call.storage.objects.set_lifecycle(call.access_key, call.request.bucket, rules)
    return web.Response()


async def delete_lifecycle(call: Call) -> web.StreamResponse:
    await call.storage.objects.set_lifecycle(call.access_key, call.request.bucket, [])
    return web.Response(status=204)
