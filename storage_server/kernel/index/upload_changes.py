"""Changes to multipart uploads: functions of an open transaction, as in storage_server.kernel.index.transaction."""

from __future__ import annotations

import sqlite3
from itertools import pairwise

from descriptors.conditions import check_write
from descriptors.errors import CallerError, ErrorCode
from descriptors.objects import (
    Checksum,
    ChecksumAlgorithm,
    ChecksumType,
    ClaimedPart,
    CompleteRequest,
    ObjectInfo,
    PartInfo,
    UploadInfo,
    UploadRef,
    UploadRequest,
)
from descriptors.units import MIB
from storage_server.kernel.index.transaction import Transaction, find_object, require_bucket
from storage_server.kernel.rules.body_hashes import multipart_checksum, multipart_etag
from storage_server.kernel.rules.rows import (
    PART_COLUMNS,
    UPLOAD_COLUMNS,
    StoredPart,
    StoredUpload,
    part_info,
    stored_upload,
    upload_attributes,
)

PART_BYTES_MIN = 5 * MIB


def require_upload(db: sqlite3.Connection, ref: UploadRef) -> StoredUpload:
    """The upload's row. Raises CallerError(NoSuchBucket, NoSuchUpload)."""
    sql = f"SELECT {UPLOAD_COLUMNS} FROM uploads WHERE upload_id = ? AND bucket = ? AND key = ?"
    row = db.execute(sql, (ref.upload_id, ref.bucket, ref.key)).fetchone()
    if row is None:
        require_bucket(db, ref.bucket)
        raise CallerError(
            ErrorCode.NO_SUCH_UPLOAD, "there is no such upload: it may have been completed or aborted", field="uploadId"
        )
    return stored_upload(row)


def create_upload(tx: Transaction, request: UploadRequest, upload_id: str, now_s: float) -> None:
    """Add an upload. Raises CallerError(NoSuchBucket)."""
    require_bucket(tx.db, request.bucket)
    tx.db.execute(
        "INSERT INTO uploads VALUES (?, ?, ?, ?, ?, ?, ?)",
        (
            upload_id,
            request.bucket,
            request.key,
            tx.new_version(),
            request.access_key,
            now_s,
            upload_attributes(request.attributes, request.checksum, request.checksum_type),
        ),
    )
    tx.touch("upload", upload_id)


def add_part(tx: Transaction, ref: UploadRef, part_number: int, part: StoredPart, now_s: float) -> PartInfo:
    """Add a part; a part of the same number is replaced. Raises CallerError(NoSuchUpload)."""
    upload = require_upload(tx.db, ref)
    tx.part_bytes[ref.bucket] += part.nbytes - tx.drop_extents(upload.version, [part_number])
    tx.add_extent(upload.version, part_number, part, now_s)
    tx.touch("part", ref.upload_id, str(part_number))
    return PartInfo(part_number, part.nbytes, part.etag, now_s, part.checksum)


def abort_upload(tx: Transaction, ref: UploadRef) -> None:
    """Delete an upload and its parts. Raises CallerError(NoSuchUpload)."""
    upload = require_upload(tx.db, ref)
    tx.part_bytes[ref.bucket] -= tx.drop_extents(upload.version)
    tx.db.execute("DELETE FROM uploads WHERE upload_id = ?", (ref.upload_id,))
    tx.touch("upload", ref.upload_id)


def complete_upload(
    tx: Transaction, request: CompleteRequest, now_s: float, whole_bytes_max: int | None = None
) -> ObjectInfo:
    """Publish the claimed parts as one object, of at most `whole_bytes_max`; the other parts are deleted.

    Raises CallerError: NoSuchUpload, InvalidPart, InvalidPartOrder, EntityTooSmall, EntityTooLarge, BadDigest,
    InvalidRequest, PreconditionFailed.
    """
    ref = request.upload
    again = _completed_before(tx.db, request)
    if again is not None:
        return again
    upload = require_upload(tx.db, ref)
    rows = tx.db.execute(f"SELECT {PART_COLUMNS} FROM extents WHERE version = ?", (upload.version,)).fetchall()
    stored = {part.part_number: part for part in (part_info(row, upload.info.checksum) for row in rows)}
    parts = claimed_parts(request.parts, stored)
    nbytes = sum(part.nbytes for part in parts)
    if request.nbytes is not None and request.nbytes != nbytes:
        raise CallerError(
            ErrorCode.INVALID_REQUEST,
            f"the parts have {nbytes} bytes, x-amz-mp-object-size says {request.nbytes}",
            field="x-amz-mp-object-size",
        )
    if whole_bytes_max is not None and nbytes > whole_bytes_max:
        problem = f"the parts have {nbytes} bytes, and an object has at most {whole_bytes_max} here"
        raise CallerError(ErrorCode.ENTITY_TOO_LARGE, problem, field="body")
    before = find_object(tx.db, ref.bucket, ref.key)
    check_write(request.condition, before.info.etag if before else None)
    info = ObjectInfo(
        key=ref.key,
        nbytes=nbytes,
        etag=multipart_etag([part.etag for part in parts]),
        modified_at=now_s,
        attributes=upload.attributes,
        checksum=object_checksum(request, upload.info, parts),
        part_count=len(parts),
    )
    version = tx.new_version()
    tx.put_row(ref.bucket, info, version, ref.upload_id)
    offset = 0
    for part in parts:
        tx.db.execute(
            "UPDATE extents SET version = ?, object_offset = ? WHERE version = ? AND part_number = ?",
            (version, offset, upload.version, part.part_number),
        )
        offset += part.nbytes
    tx.part_bytes[ref.bucket] -= nbytes + tx.drop_extents(upload.version)
    tx.db.execute("DELETE FROM uploads WHERE upload_id = ?", (ref.upload_id,))
    tx.touch("upload", ref.upload_id)
    return info


def _completed_before(db: sqlite3.Connection, request: CompleteRequest) -> ObjectInfo | None:
    """The object that this upload made of these parts, if the key still shows it. A client that lost the answer repeats
    its request, and that must not fail. With other parts it would not be the same request.
    """
    ref = request.upload
    found = find_object(db, ref.bucket, ref.key)
    if found is None or found.upload_id != ref.upload_id:
        return None
    try:
        etag = multipart_etag([part.etag for part in request.parts])
    except ValueError:
        return None  # an ETag that is not hexadecimal is none of ours
    return found.info if etag == found.info.etag else None


def claimed_parts(claimed: list[ClaimedPart], stored: dict[int, PartInfo]) -> list[PartInfo]:
    """The stored parts that a completion names, in its order. Pure. Raises what `complete_upload` raises."""
    if not claimed:
        raise CallerError(ErrorCode.MALFORMED_XML, "an object is made of at least one part", field="Part")
    if any(after.part_number <= before.part_number for before, after in pairwise(claimed)):
        raise CallerError(ErrorCode.INVALID_PART_ORDER, "part numbers must rise from part to part", field="PartNumber")
    parts: list[PartInfo] = []
    for claim in claimed:
        part = stored.get(claim.part_number)
        if part is None or part.etag != claim.etag or not _same(claim.checksum, part.checksum):
            raise CallerError(
                ErrorCode.INVALID_PART,
                "One or more of the specified parts could not be found. The part may not have been uploaded, or the"
                f" specified entity tag may not match the part's entity tag: part {claim.part_number}",
                field="PartNumber",
            )
        parts.append(part)
    for part in parts[:-1]:
        if part.nbytes < PART_BYTES_MIN:
            raise CallerError(
                ErrorCode.ENTITY_TOO_SMALL,
                f"part {part.part_number} has {part.nbytes} bytes; only the last may have fewer than {PART_BYTES_MIN}",
                field="PartNumber",
            )
    return parts


def object_checksum(request: CompleteRequest, upload: UploadInfo, parts: list[PartInfo]) -> Checksum | None:
    """The whole object's checksum, compared with the one that the caller states. Pure."""
    if upload.checksum is None:
        return None
    said = request.checksum
    if said is not None and said.algorithm is not upload.checksum:
        raise CallerError(
            ErrorCode.INVALID_REQUEST,
            f"the upload was begun with {upload.checksum.value}, not {said.algorithm.value}",
            field=said.algorithm.header,
        )
    unsaid = next((claim.part_number for claim in request.parts if claim.checksum is None), None)
    if unsaid is not None and upload.checksum in (ChecksumAlgorithm.SHA1, ChecksumAlgorithm.SHA256):
        problem = (
            f"The upload was created using a {upload.checksum.value.lower()} checksum. The complete request must"
            f" include the checksum for each part. It was missing for part {unsaid} in the request."
        )
        raise CallerError(ErrorCode.INVALID_REQUEST, problem, field="Part")
    values = [(part.checksum.value, part.nbytes) for part in parts if part.checksum is not None]
    if len(values) < len(parts):
        raise CallerError(ErrorCode.INVALID_PART, "a part has no checksum of the upload's algorithm", field="Part")
    whole = multipart_checksum(upload.checksum, upload.checksum_type or ChecksumType.COMPOSITE, values)
    if said is not None and said.value.partition("-")[0] != whole.value.partition("-")[0]:
        raise CallerError(
            ErrorCode.BAD_DIGEST,
            f"The {said.algorithm.value} you specified did not match the calculated checksum.",
            field=said.algorithm.header,
        )
    return whole


def _same(claimed: Checksum | None, stored: Checksum | None) -> bool:
    return (
        claimed is None or stored is None or (claimed.algorithm is stored.algorithm and claimed.value == stored.value)
    )
