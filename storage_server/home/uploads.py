"""UploadsApi over an upstream S3 service."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any
from urllib.parse import urlencode

from descriptors.errors import CallerError, ErrorCode
from descriptors.objects import (
    STANDARD,
    ChecksumAlgorithm,
    ChecksumType,
    CompleteRequest,
    ObjectInfo,
    PartCopyRequest,
    PartInfo,
    PartPage,
    PartRequest,
    ReadRequest,
    UploadInfo,
    UploadListRequest,
    UploadPage,
    UploadRef,
    UploadRequest,
)
from descriptors.storage_api import Body
from storage_server.home.objects import UpstreamObjects, checksum_of, decoding, made_by
from storage_server.home.rules.documents import entries_of, size_of
from storage_server.home.rules.headers import attribute_headers, etag_of, put_time, source_headers, write_headers
from storage_server.home.s3.connection import Upstream
from storage_server.kernel.uploads import check_part


class UpstreamUploads:
    """Implements descriptors.storage_api.UploadsApi. Uploads and their parts lie upstream alone."""

    def __init__(self, upstream: Upstream, objects: UpstreamObjects, part_bytes_max: int) -> None:
        self._upstream = upstream
        self._objects = objects
        self._part_bytes_max = part_bytes_max

    async def create_upload(self, access_key: str, request: UploadRequest) -> str:
        headers = attribute_headers(request.attributes)
        if request.checksum is not None:
            headers["x-amz-checksum-algorithm"] = request.checksum.value
        if request.checksum_type is not None:
            headers["x-amz-checksum-type"] = request.checksum_type.value
        made = await self._upstream.call("CreateMultipartUpload", headers, Bucket=request.bucket, Key=request.key)
        return str(made["UploadId"])

    async def put_part(self, access_key: str, request: PartRequest, body: Body) -> PartInfo:
        check_part(request.part_number, request.nbytes, self._part_bytes_max)
        sent = await self._upstream.prepared(body, request.nbytes, request.checksum)
        upload = request.upload
        query = urlencode({"partNumber": request.part_number, "uploadId": upload.upload_id})
        answer = await self._upstream.put(upload.bucket, upload.key, {}, query, sent)
        etag = answer.get("etag", "").strip('"')
        return PartInfo(request.part_number, request.nbytes, etag, put_time(answer), sent.hashes.checksum)

    async def copy_part(self, access_key: str, request: PartCopyRequest) -> PartInfo:
        upload, source = request.upload, request.source
        head = await self._objects.head_object(access_key, ReadRequest(source.bucket, source.key, source.range))
        check_part(request.part_number, head.range.length, self._part_bytes_max)
        made = await self._upstream.call(
            "UploadPartCopy",
            source_headers(source),
            **_named(upload),
            PartNumber=request.part_number,
            CopySource=f"{source.bucket}/{source.key}",
        )
        copied = made["CopyPartResult"]
        modified_at = copied["LastModified"].timestamp() if "LastModified" in copied else 0.0
        etag = etag_of(copied["ETag"])
        return PartInfo(request.part_number, head.range.length, etag, modified_at, checksum_of(copied))

    async def complete_upload(self, access_key: str, request: CompleteRequest) -> ObjectInfo:
        upload = request.upload
        parts = [
            {
                "PartNumber": part.part_number,
                "ETag": f'"{part.etag}"',
                **({} if part.checksum is None else {f"Checksum{part.checksum.algorithm.value}": part.checksum.value}),
            }
            for part in request.parts
        ]
        headers = write_headers(request.condition)
        if request.checksum is not None:
            headers[request.checksum.algorithm.header] = request.checksum.value
            headers["x-amz-checksum-type"] = request.checksum.type.value
        if request.nbytes is not None:
            headers["x-amz-mp-object-size"] = str(request.nbytes)
        completed = await self._upstream.call(
            "CompleteMultipartUpload", headers, **_named(upload), MultipartUpload={"Parts": parts}
        )
        made = made_by(upload.key, completed, request.nbytes or 0)
        return await self._objects.shown(upload.bucket, made) or made

    async def abort_upload(self, access_key: str, upload: UploadRef) -> None:
        await self._upstream.call("AbortMultipartUpload", **_named(upload))

    async def list_parts(self, access_key: str, upload: UploadRef, part_number_marker: int, max_parts: int) -> PartPage:
        return await self._upstream.ask(
            partial(_part_page, upload),
            "ListParts",
            **_named(upload),
            PartNumberMarker=part_number_marker,
            MaxParts=max_parts,
        )

    async def list_uploads(self, access_key: str, request: UploadListRequest) -> UploadPage:
        return await self._upstream.ask(
            _upload_page,
            "ListMultipartUploads",
            Bucket=request.bucket,
            Prefix=request.prefix,
            Delimiter=request.delimiter,
            KeyMarker=request.key_marker,
            UploadIdMarker=request.upload_id_marker,
            MaxUploads=request.max_uploads,
            EncodingType="url",
        )


def _part_page(upload: UploadRef, found: dict[str, Any]) -> PartPage:
    parts = [
        PartInfo(
            each["PartNumber"],
            size_of(each),
            each["ETag"].strip('"'),
            each["LastModified"].timestamp(),
            checksum_of(each),
        )
        for each in entries_of(found, "Parts")
    ]
    next_marker = parts[-1].part_number if found.get("IsTruncated") else None
    return PartPage(_upload_info(upload.upload_id, upload.key, found), parts, next_marker)


def _upload_page(found: dict[str, Any]) -> UploadPage:
    """A page of ListMultipartUploads."""
    name_of = decoding(found)
    uploads = [_upload_info(each["UploadId"], name_of(each["Key"]), each) for each in entries_of(found, "Uploads")]
    prefixes = [name_of(each["Prefix"]) for each in entries_of(found, "CommonPrefixes")]
    if not found.get("IsTruncated"):
        return UploadPage(uploads, prefixes, None, None)
    next_key = name_of(found.get("NextKeyMarker", ""))
    if not next_key:
        raise ValueError("a page that is not the last one, and does not say where the next one begins")
    return UploadPage(uploads, prefixes, next_key, found.get("NextUploadIdMarker") or None)


def _named(upload: UploadRef) -> dict[str, Any]:
    if not upload.upload_id:
        raise CallerError(ErrorCode.NO_SUCH_UPLOAD, "an upload has an id", field="uploadId")
    return {"Bucket": upload.bucket, "Key": upload.key, "UploadId": upload.upload_id}


def _upload_info(upload_id: str, key: str, found: Mapping[str, Any]) -> UploadInfo:
    algorithm, kind = found.get("ChecksumAlgorithm"), found.get("ChecksumType")
    initiated = found.get("Initiated")
    return UploadInfo(
        upload_id=upload_id,
        key=key,
        initiated_at=0.0 if initiated is None else initiated.timestamp(),
        owner=found.get("Owner", {}).get("ID", ""),
        storage_class=found.get("StorageClass", STANDARD),
        checksum=None if not algorithm else ChecksumAlgorithm(algorithm),
        checksum_type=None if not kind else ChecksumType(kind),
    )
