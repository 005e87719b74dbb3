"""S3's XML answers about multipart uploads and the parts of objects."""

from __future__ import annotations

from collections.abc import Iterable

from descriptors.objects import (
    ChecksumAlgorithm,
    ChecksumType,
    ObjectInfo,
    ObjectPart,
    PartInfo,
    PartPage,
    UploadInfo,
    UploadListRequest,
    UploadPage,
    UploadRef,
)
from gateway.s3.markup import bare_document, branch, document, flag, leaf, legible_leaf, timestamp
from gateway.s3.xml import Names, checksum_elements, owner_element


def created_document(upload: UploadRef) -> bytes:
    """InitiateMultipartUploadResult."""
    return document("InitiateMultipartUploadResult", _named(upload))


def completed_document(location: str, bucket: str, info: ObjectInfo) -> bytes:
    """CompleteMultipartUploadResult."""
    parts = [leaf("Location", location), leaf("Bucket", bucket), legible_leaf("Key", info.key)]
    parts += [leaf("ETag", f'"{info.etag}"'), *checksum_elements(info.checksum)]
    return document("CompleteMultipartUploadResult", parts)


def posted_document(location: str, bucket: str, info: ObjectInfo) -> bytes:
    """PostResponse."""
    parts = [leaf("Location", location), leaf("Bucket", bucket), legible_leaf("Key", info.key)]
    return bare_document("PostResponse", [*parts, leaf("ETag", f'"{info.etag}"')])


def parts_document(upload: UploadRef, page: PartPage, marker: int, max_parts: int) -> bytes:
    """ListPartsResult."""
    parts = [*_named(upload), leaf("PartNumberMarker", marker)]
    parts.append(leaf("NextPartNumberMarker", page.parts[-1].part_number if page.parts else marker))
    parts += [leaf("MaxParts", max_parts), flag("IsTruncated", page.next_marker is not None)]
    parts += [branch("Part", _part(part)) for part in page.parts]
    parts += [owner_element("Initiator", page.upload.owner), owner_element("Owner", page.upload.owner)]
    parts += [leaf("StorageClass", page.upload.storage_class), *_kept(page.upload)]
    return document("ListPartsResult", parts)


def uploads_document(request: UploadListRequest, page: UploadPage, names: Names) -> bytes:
    """ListMultipartUploadsResult."""
    parts = [leaf("Bucket", request.bucket), names.leaf("KeyMarker", request.key_marker)]
    parts += [leaf("UploadIdMarker", request.upload_id_marker), names.leaf("Prefix", request.prefix)]
    parts += names.delimiter(request.delimiter)
    if page.next_key_marker is not None:
        parts.append(names.leaf("NextKeyMarker", page.next_key_marker))
        parts.append(leaf("NextUploadIdMarker", page.next_upload_id_marker or ""))
    parts += [leaf("MaxUploads", request.max_uploads), flag("IsTruncated", page.next_key_marker is not None)]
    parts += names.encoding()
    parts += [branch("Upload", _upload(upload, names)) for upload in page.uploads]
    return document("ListMultipartUploadsResult", [*parts, *names.common(page.common_prefixes)])


def attributes_document(elements: Iterable[str]) -> bytes:
    """GetObjectAttributesResponse of the elements that were asked for."""
    return document("GetObjectAttributesResponse", elements)


def object_parts_element(parts: list[ObjectPart], marker: int, max_parts: int) -> str:
    """ObjectParts: the page after `marker`."""
    after = [part for part in parts if part.part_number > marker]
    page = after[:max_parts]
    elements = [leaf("PartsCount", len(parts)), leaf("PartNumberMarker", marker)]
    elements.append(leaf("NextPartNumberMarker", page[-1].part_number if page else marker))
    elements += [leaf("MaxParts", max_parts), flag("IsTruncated", len(page) < len(after))]
    for part in page:
        described = [leaf("PartNumber", part.part_number), leaf("Size", part.nbytes)]
        if part.checksum is not None:
            described.append(leaf(f"Checksum{part.checksum.algorithm.value}", part.checksum.value))
        elements.append(branch("Part", described))
    return branch("ObjectParts", elements)


def _named(upload: UploadRef) -> list[str]:
    """The bucket and key of an upload. These answers have no encoding-type, so odd characters of the
    key are replaced.
    """
    return [leaf("Bucket", upload.bucket), legible_leaf("Key", upload.key), leaf("UploadId", upload.upload_id)]


def _part(part: PartInfo) -> list[str]:
    described = [leaf("PartNumber", part.part_number), leaf("LastModified", timestamp(part.modified_at))]
    described += [leaf("ETag", f'"{part.etag}"'), leaf("Size", part.nbytes)]
    if part.checksum is not None:
        described.append(leaf(f"Checksum{part.checksum.algorithm.value}", part.checksum.value))
    return described


def _upload(upload: UploadInfo, names: Names) -> list[str]:
    return [
        names.leaf("Key", upload.key),
        leaf("UploadId", upload.upload_id),
        owner_element("Initiator", upload.owner),
        owner_element("Owner", upload.owner),
        leaf("StorageClass", upload.storage_class),
        leaf("Initiated", timestamp(upload.initiated_at)),
        *_kept(upload),
    ]


def _kept(upload: UploadInfo) -> list[str]:
    algorithm: ChecksumAlgorithm | None = upload.checksum
    covers: ChecksumType | None = upload.checksum_type
    kept = [leaf("ChecksumAlgorithm", algorithm.value)] if algorithm is not None else []
    return kept + ([leaf("ChecksumType", covers.value)] if covers is not None else [])
