"""Listings of a bucket: ListObjects, ListObjectsV2, ListObjectVersions."""

from __future__ import annotations

from aiohttp import web

from descriptors.errors import CallerError, ErrorCode
from descriptors.objects import ListPage, ListRequest
from gateway.call import Call
from gateway.operations.answers import owner_of, xml_pages
from gateway.s3 import xml
from gateway.s3.parameters import NULL_VERSION, after_token, integer, wants_url_encoding

MAX_KEYS = 1000


async def list_objects(call: Call) -> web.StreamResponse:
    parameters = call.request.parameters
    names = xml.Names(wants_url_encoding(parameters))
    request = _request(call, parameters.get("marker", ""))
    owner = await owner_of(call, request.bucket)
    page = await call.storage.objects.list_objects(call.access_key, request)
    return await xml_pages(lambda: xml.objects_v1_document(request, page, owner, names), _entries(page))


async def list_objects_v2(call: Call) -> web.StreamResponse:
    parameters = call.request.parameters
    names = xml.Names(wants_url_encoding(parameters))
    token = parameters.get("continuation-token")
    request = _request(call, after_token(token) if token else parameters.get("start-after", ""))
    owner = await owner_of(call, request.bucket) if parameters.get("fetch-owner", "").lower() == "true" else None
    page = await call.storage.objects.list_objects(call.access_key, request)
    return await xml_pages(lambda: xml.objects_v2_document(request, page, owner, parameters, names), _entries(page))


async def list_object_versions(call: Call) -> web.StreamResponse:
    """List every object with its one version, since clean-up tools ask for versions before they delete."""
    parameters = call.request.parameters
    names = xml.Names(wants_url_encoding(parameters))
    key_marker, version_marker = parameters.get("key-marker", ""), parameters.get("version-id-marker", "")
    if version_marker and not key_marker:
        problem = "version-id-marker needs key-marker"
        raise CallerError(ErrorCode.INVALID_ARGUMENT, problem, field="version-id-marker")
    if version_marker not in ("", NULL_VERSION):
        raise CallerError(ErrorCode.INVALID_ARGUMENT, "there is no such version", field="version-id-marker")
    request = _request(call, key_marker)
    owner = await owner_of(call, request.bucket)
    page = await call.storage.objects.list_objects(call.access_key, request)
    return await xml_pages(
        lambda: xml.versions_document(
            request, page, owner=owner, key_marker=key_marker, version_marker=version_marker, names=names
        ),
        _entries(page),
    )


def _entries(page: ListPage) -> int:
    return len(page.objects) + len(page.common_prefixes)


def _request(call: Call, after: str) -> ListRequest:
    parameters = call.request.parameters
    return ListRequest(
        bucket=call.request.bucket,
        prefix=parameters.get("prefix", ""),
        delimiter=parameters.get("delimiter", ""),
        after=after,
        max_keys=min(integer(parameters, "max-keys", MAX_KEYS), MAX_KEYS),
    )
