"""Multipart uploads: create, upload a part, complete, abort, list."""

from __future__ import annotations

import re
from urllib.parse import quote

from aiohttp import web

from descriptors.errors import CallerError, ErrorCode
from descriptors.objects import (
    PART_NUMBER_MAX,
    Checksum,
    ChecksumAlgorithm,
    ChecksumType,
    CompleteRequest,
    PartRequest,
    UploadListRequest,
    UploadRef,
    UploadRequest,
)
from descriptors.units import MIB
from gateway.call import Call
from gateway.operations.answers import expiration_of, xml_answer, xml_pages
from gateway.s3 import xml_uploads
from gateway.s3.conditions import write_condition
from gateway.s3.object_headers import (
    checksum_headers,
    new_attributes,
    new_checksum,
    refuse_rdma_token,
    refuse_unsupported,
)
from gateway.s3.parameters import integer, part_number, wants_url_encoding
from gateway.s3.request import check_key
from gateway.s3.upload import decode_checksum
from gateway.s3.xml import Names
from gateway.s3.xml_in import parse_complete

DOCUMENT_BYTES_MAX = 8 * MIB
PAGE_MAX = 1000
UPLOAD_ID_CHARACTERS_MAX = 256
_TYPE = "x-amz-checksum-type"
_SIZE = "x-amz-mp-object-size"
_COMPOSITE = re.compile(r"(.+)-([1-9][0-9]{0,4})\Z")


async def create_upload(call: Call) -> web.StreamResponse:
    request = call.request
    check_key(request.key)
    refuse_unsupported(request.headers)
    algorithm, covers = new_checksum(request.headers)
    upload_id = await call.storage.uploads.create_upload(
        call.access_key,
        UploadRequest(
            access_key=call.access_key,
            bucket=request.bucket,
            key=request.key,
            attributes=new_attributes(request.headers),
            checksum=algorithm,
            checksum_type=covers,
        ),
    )
    headers = {}
    if algorithm is not None and covers is not None:
        headers = {"x-amz-checksum-algorithm": algorithm.value, _TYPE: covers.value}
    return xml_answer(xml_uploads.created_document(UploadRef(request.bucket, request.key, upload_id)), headers)


async def upload_part(call: Call) -> web.StreamResponse:
    """Store a part. The empty body of a request with an RDMA token must not become a part."""
    refuse_unsupported(call.request.headers)
    ref = upload_ref(call)
    number = part_number(call.request.parameters)
    upload = call.upload()
    part = await call.storage.uploads.put_part(
        call.access_key, PartRequest(ref, number, upload.nbytes, upload.checksum), upload.body
    )
    headers = checksum_headers(part.checksum)
    headers.pop(_TYPE, None)
    return web.Response(headers={"ETag": f'"{part.etag}"', **headers})


async def complete_upload(call: Call) -> web.StreamResponse:
    request, headers = call.request, call.request.headers
    refuse_rdma_token(headers)
    ref = upload_ref(call)
    condition = write_condition(headers)
    checksum = await _claimed_checksum(call, ref)
    nbytes = request.number(_SIZE)
    parts = await call.document(parse_complete, DOCUMENT_BYTES_MAX)
    info = await call.storage.uploads.complete_upload(
        call.access_key, CompleteRequest(ref, parts, checksum, nbytes, condition)
    )
    location = f"{call.http.scheme}://{headers.get('host', '')}{quote(request.path, safe='/-_.~')}"
    document = xml_uploads.completed_document(location, request.bucket, info)
    return xml_answer(document, await expiration_of(call, request.bucket, info))


async def abort_upload(call: Call) -> web.StreamResponse:
    await call.storage.uploads.abort_upload(call.access_key, upload_ref(call))
    return web.Response(status=204)


async def list_parts(call: Call) -> web.StreamResponse:
    parameters = call.request.parameters
    ref = upload_ref(call)
    marker = integer(parameters, "part-number-marker", 0)
    most = min(integer(parameters, "max-parts", PAGE_MAX), PAGE_MAX)
    page = await call.storage.uploads.list_parts(call.access_key, ref, min(marker, PART_NUMBER_MAX), most)
    return await xml_pages(lambda: xml_uploads.parts_document(ref, page, marker, most), len(page.parts))


async def list_uploads(call: Call) -> web.StreamResponse:
    parameters = call.request.parameters
    names = Names(wants_url_encoding(parameters))
    key_marker = parameters.get("key-marker", "")
    request = UploadListRequest(
        bucket=call.request.bucket,
        prefix=parameters.get("prefix", ""),
        delimiter=parameters.get("delimiter", ""),
        key_marker=key_marker,
        upload_id_marker=parameters.get("upload-id-marker", "") if key_marker else "",
        max_uploads=min(integer(parameters, "max-uploads", PAGE_MAX), PAGE_MAX),
    )
    page = await call.storage.uploads.list_uploads(call.access_key, request)
    return await xml_pages(
        lambda: xml_uploads.uploads_document(request, page, names), len(page.uploads) + len(page.common_prefixes)
    )


def upload_ref(call: Call) -> UploadRef:
    """The upload that a request names. Raises CallerError: NoSuchUpload for a malformed id, and what
    key checks raise.
    """
    check_key(call.request.key)
    upload_id = call.request.parameters.get("uploadId", "")
    if not upload_id or len(upload_id) > UPLOAD_ID_CHARACTERS_MAX or "\0" in upload_id:
        raise CallerError(ErrorCode.NO_SUCH_UPLOAD, "there is no such upload", field="uploadId")
    return UploadRef(call.request.bucket, call.request.key, upload_id)


async def _claimed_checksum(call: Call, ref: UploadRef) -> Checksum | None:
    """The whole object's checksum as the caller states it. A type without a value is compared with the
    upload's type.
    """
    headers = call.request.headers
    kind = headers.get(_TYPE)
    if kind is not None and kind.upper() not in ChecksumType.__members__:
        raise CallerError(ErrorCode.INVALID_REQUEST, "the checksum types are COMPOSITE and FULL_OBJECT", field=_TYPE)
    given = [algorithm for algorithm in ChecksumAlgorithm if algorithm.header in headers]
    if len(given) > 1:
        raise CallerError(ErrorCode.INVALID_REQUEST, "only one checksum can be given", field=given[1].header)
    if given:
        return _checksum(given[0], headers[given[0].header], kind)
    if kind is not None:
        await _check_upload_type(call, ref, ChecksumType[kind.upper()])
    return None


def _checksum(algorithm: ChecksumAlgorithm, text: str, kind: str | None) -> Checksum:
    composite = _COMPOSITE.match(text)
    wanted = ChecksumType[kind.upper()] if kind is not None else None
    if composite is not None and wanted is not ChecksumType.FULL_OBJECT:
        value = f"{decode_checksum(algorithm, composite.group(1))}-{composite.group(2)}"
        return Checksum(algorithm, value, ChecksumType.COMPOSITE)
    return Checksum(algorithm, decode_checksum(algorithm, text), wanted or ChecksumType.FULL_OBJECT)


async def _check_upload_type(call: Call, ref: UploadRef, wanted: ChecksumType) -> None:
    try:
        page = await call.storage.uploads.list_parts(call.access_key, ref, 0, 1)
    except CallerError as error:
        if error.code is ErrorCode.NO_SUCH_UPLOAD:
            return  # may be complete already: the storage side knows
        raise
    if page.upload.checksum_type is not wanted:
        problem = f"the upload was not created with checksum type {wanted.value}"
        raise CallerError(ErrorCode.INVALID_REQUEST, problem, field=_TYPE)
