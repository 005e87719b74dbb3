"""The details of an object beside its bytes: tags, ACL, attributes."""

from __future__ import annotations

from aiohttp import web

from descriptors.errors import CallerError, ErrorCode
from descriptors.objects import ObjectInfo, ReadRequest
from descriptors.units import MIB
from gateway.call import Call
from gateway.operations.answers import owner_of, xml_answer
from gateway.operations.buckets import check_new_acl
from gateway.s3 import xml
from gateway.s3.conditions import read_condition
from gateway.s3.markup import branch, leaf
from gateway.s3.object_headers import http_date, refuse_encryption
from gateway.s3.parameters import check_version, integer
from gateway.s3.request import check_key
from gateway.s3.xml_in import parse_tagging
from gateway.s3.xml_uploads import attributes_document, object_parts_element

DOCUMENT_BYTES_MAX = MIB
ATTRIBUTES = "x-amz-object-attributes"
PARTS_MAX = 1000
_KNOWN_ATTRIBUTES = ("ETag", "Checksum", "ObjectParts", "StorageClass", "ObjectSize")


async def get_tagging(call: Call) -> web.StreamResponse:
    return xml_answer(xml.tagging_document((await _info(call)).attributes.tags))


async def put_tagging(call: Call) -> web.StreamResponse:
    check_key(call.request.key)
    check_version(call.request)
    tags = await call.document(parse_tagging, DOCUMENT_BYTES_MAX)
    await call.storage.objects.set_tags(call.access_key, call.request.bucket, call.request.key, tags)
    return web.Response()


async def delete_tagging(call: Call) -> web.StreamResponse:
    check_key(call.request.key)
    check_version(call.request)
    await call.storage.objects.set_tags(call.access_key, call.request.bucket, call.request.key, {})
    return web.Response(status=204)


async def get_acl(call: Call) -> web.StreamResponse:
    """Answer with the bucket owner's full control, because objects belong to the bucket's owner."""
    await _info(call)
    return xml_answer(xml.acl_document(await owner_of(call, call.request.bucket)))


async def put_acl(call: Call) -> web.StreamResponse:
    """Accept an ACL that says what holds already: the owner has full control, and nobody else has any."""
    await _info(call)
    await check_new_acl(call, await owner_of(call, call.request.bucket))
    return web.Response()


async def get_attributes(call: Call) -> web.StreamResponse:
    """Answer with the attributes that x-amz-object-attributes names, in S3's order."""
    headers = call.request.headers
    refuse_encryption(headers)
    wanted = wanted_attributes(headers.get(ATTRIBUTES))
    marker = integer(headers, "x-amz-part-number-marker", 0)
    most = min(integer(headers, "x-amz-max-parts", PARTS_MAX), PARTS_MAX)
    info = await _info(call)
    elements = []
    if "ETag" in wanted:
        elements.append(leaf("ETag", info.etag))
    if "Checksum" in wanted and info.checksum is not None:
        elements.append(branch("Checksum", xml.checksum_elements(info.checksum)))
    if "ObjectParts" in wanted and info.part_count is not None:
        parts = await call.storage.objects.object_parts(call.access_key, call.request.bucket, call.request.key)
        elements.append(object_parts_element(parts, marker, most))
    if "StorageClass" in wanted:
        elements.append(leaf("StorageClass", info.attributes.storage_class))
    if "ObjectSize" in wanted:
        elements.append(leaf("ObjectSize", info.nbytes))
    return xml_answer(attributes_document(elements), {"Last-Modified": http_date(info.modified_at)})


def wanted_attributes(header: str | None) -> set[str]:
    """The attributes that the header names. Raises CallerError(InvalidArgument) for none or an unknown attribute."""
    names = {name.strip() for name in (header or "").split(",")}
    if not names <= set(_KNOWN_ATTRIBUTES):
        problem = f"the header must name some of {', '.join(_KNOWN_ATTRIBUTES)}"
        raise CallerError(ErrorCode.INVALID_ARGUMENT, problem, field=ATTRIBUTES)
    return names


async def _info(call: Call) -> ObjectInfo:
    request = call.request
    check_key(request.key)
    check_version(request)
    read = ReadRequest(request.bucket, request.key, condition=read_condition(request.headers))
    return (await call.storage.objects.head_object(call.access_key, read)).info
