"""CopyObject and UploadPartCopy."""

from __future__ import annotations

from dataclasses import replace

from aiohttp import web

from descriptors.errors import CallerError, ErrorCode
from descriptors.objects import STANDARD, Attributes, ByteRange, CopyRequest, PartCopyRequest, RangeSpec, ReadRequest
from gateway.call import Call
from gateway.operations.answers import EXPECTED_SOURCE_OWNER, check_expected_owner, expiration_of, xml_answer
from gateway.operations.uploads import upload_ref
from gateway.s3 import xml
from gateway.s3.conditions import write_condition
from gateway.s3.copy_headers import COPY_RANGE_HEADER, Directive, directive, parse_copy_range, parse_copy_source
from gateway.s3.credentials import authorize
from gateway.s3.object_headers import new_checksum, refuse_unsupported, storage_class, stored_headers
from gateway.s3.parameters import part_number
from gateway.s3.request import check_key
from gateway.s3.routing import Operation
from gateway.s3.tags import parse_tagging_header


async def copy_object(call: Call) -> web.StreamResponse:
    """Copy an object. Metadata and tags come from the source unless the request replaces them."""
    request, headers = call.request, call.request.headers
    check_key(request.key)
    refuse_unsupported(headers)
    source = await _source(call)
    metadata = directive(headers, "x-amz-metadata-directive")
    tagging = directive(headers, "x-amz-tagging-directive")
    checksum, _ = new_checksum(headers)
    wanted_class = storage_class(headers)
    is_change = Directive.REPLACE in (metadata, tagging) or wanted_class is not None or checksum is not None
    if (source.bucket, source.key) == (request.bucket, request.key) and not is_change:
        problem = "a copy of an object to itself must change its metadata, tags, storage class or checksum"
        raise CallerError(ErrorCode.INVALID_REQUEST, problem, field="x-amz-copy-source")
    copy = CopyRequest(
        source=source,
        bucket=request.bucket,
        key=request.key,
        attributes=Attributes(stored_headers(headers)) if metadata is Directive.REPLACE else None,
        tags=parse_tagging_header(headers.get("x-amz-tagging")) if tagging is Directive.REPLACE else None,
        storage_class=wanted_class or STANDARD,
        checksum=checksum,
        condition=write_condition(headers),
    )
    info = await call.storage.objects.copy_object(call.access_key, copy)
    document = xml.copy_document("CopyObjectResult", info.etag, info.modified_at, info.checksum)
    return xml_answer(document, await expiration_of(call, request.bucket, info))


async def copy_part(call: Call) -> web.StreamResponse:
    """Copy a range into a part. The range must lie inside the version of the source that is then copied."""
    refuse_unsupported(call.request.headers)
    upload = upload_ref(call)
    number = part_number(call.request.parameters)
    wanted = parse_copy_range(call.request.headers)
    source = await _source(call)
    if wanted is not None:
        source = await _range_of(call, source, wanted)
    part = await call.storage.uploads.copy_part(call.access_key, PartCopyRequest(upload, number, source))
    return xml_answer(xml.copy_document("CopyPartResult", part.etag, part.modified_at, part.checksum))


async def _source(call: Call) -> ReadRequest:
    source = parse_copy_source(call.request.headers)
    authorize(call.credential, Operation.GET_OBJECT.action, source.bucket)
    await check_expected_owner(call, EXPECTED_SOURCE_OWNER, source.bucket)
    return source


async def _range_of(call: Call, source: ReadRequest, wanted: ByteRange) -> ReadRequest:
    info = (await call.storage.objects.head_object(call.access_key, replace(source, range=None))).info
    if wanted.start + wanted.length > info.nbytes:
        problem = f"the range is not inside the source, which has {info.nbytes} bytes"
        raise CallerError(ErrorCode.INVALID_ARGUMENT, problem, field=COPY_RANGE_HEADER)
    same = replace(source.condition, if_match=source.condition.if_match or (info.etag,))
    spec = RangeSpec(first=wanted.start, last=wanted.start + wanted.length - 1)
    return replace(source, range=spec, condition=same)
