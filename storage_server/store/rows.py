"""Index rows as values: what is kept of an object or an upload in its `attributes` column, and of extents in theirs."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from descriptors.objects import (
    STANDARD,
    Attributes,
    Checksum,
    ChecksumAlgorithm,
    ChecksumType,
    ObjectInfo,
    PartInfo,
    UploadInfo,
)
from storage_server.store.extents import Extent

OBJECT_COLUMNS = "key, version, nbytes, etag, modified_at, attributes"
EXTENT_COLUMNS = "file_id, file_offset, nbytes, blocks, object_offset"
PART_COLUMNS = "part_number, nbytes, etag, modified_at, checksum"
UPLOAD_COLUMNS = "upload_id, key, version, owner, initiated_at, attributes"


@dataclass(frozen=True, slots=True)
class StoredObject:
    """An object's row. `upload_id` is the multipart upload it was made from, where it was."""

    info: ObjectInfo
    version: int
    upload_id: str | None = None


@dataclass(frozen=True, slots=True)
class StoredUpload:
    """An upload's row."""

    info: UploadInfo
    version: int
    attributes: Attributes


@dataclass(frozen=True, slots=True)
class StoredPart:
    """One body on disk, not yet published: its hashes, and its extent, None for an empty one."""

    etag: str
    nbytes: int
    checksum: Checksum | None
    extent: Extent | None


def object_attributes(info: ObjectInfo, upload_id: str | None) -> str:
    """The JSON kept with an object; `stored_object` reads it."""
    fields = _attribute_fields(info.attributes)
    if info.checksum is not None:
        fields["checksum"] = [info.checksum.algorithm.value, info.checksum.value, info.checksum.type.value]
    if info.part_count is not None:
        fields["part_count"] = info.part_count
    if upload_id is not None:
        fields["upload_id"] = upload_id
    return json.dumps(fields, separators=(",", ":"))


def stored_object(row: tuple[Any, ...]) -> StoredObject:
    """From OBJECT_COLUMNS."""
    key, version, nbytes, etag, modified_at, text = row
    attributes, checksum, part_count, upload_id = _object_fields(text)
    return StoredObject(
        ObjectInfo(key, nbytes, etag, modified_at, attributes, checksum, part_count), version, upload_id
    )


@lru_cache(1024)
def _object_fields(text: str) -> tuple[Attributes, Checksum | None, int | None, str | None]:
    """Most objects of a bucket have the same few attributes."""
    fields = json.loads(text)
    checksum = None
    if "checksum" in fields:
        algorithm, value, kind = fields["checksum"]
        checksum = Checksum(ChecksumAlgorithm(algorithm), value, ChecksumType(kind))
    return _attributes(fields), checksum, fields.get("part_count"), fields.get("upload_id")


def upload_attributes(attributes: Attributes, algorithm: ChecksumAlgorithm | None, kind: ChecksumType | None) -> str:
    """The JSON kept with an upload; `stored_upload` reads it."""
    fields = _attribute_fields(attributes)
    if algorithm is not None and kind is not None:
        fields["checksum"] = [algorithm.value, kind.value]
    return json.dumps(fields, separators=(",", ":"))


def stored_upload(row: tuple[Any, ...]) -> StoredUpload:
    """From UPLOAD_COLUMNS."""
    upload_id, key, version, owner, initiated_at, text = row
    fields = json.loads(text)
    attributes = _attributes(fields)
    algorithm, kind = fields.get("checksum", (None, None))
    info = UploadInfo(
        upload_id,
        key,
        initiated_at,
        owner,
        attributes.storage_class,
        ChecksumAlgorithm(algorithm) if algorithm else None,
        ChecksumType(kind) if kind else None,
    )
    return StoredUpload(info, version, attributes)


def part_info(row: tuple[Any, ...], algorithm: ChecksumAlgorithm | None) -> PartInfo:
    """From PART_COLUMNS."""
    number, nbytes, etag, modified_at, value = row
    checksum = Checksum(algorithm, value) if algorithm is not None and value is not None else None
    return PartInfo(number, nbytes, etag, modified_at, checksum)


def extents(rows: Iterable[tuple[Any, ...]]) -> list[Extent]:
    """From EXTENT_COLUMNS; rows of no bytes have no extent."""
    return [Extent(*row) for row in rows if row[0]]


def _attribute_fields(attributes: Attributes) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if attributes.headers:
        fields["headers"] = attributes.headers
    if attributes.tags:
        fields["tags"] = attributes.tags
    if attributes.storage_class != STANDARD:
        fields["storage_class"] = attributes.storage_class
    return fields


def _attributes(fields: dict[str, Any]) -> Attributes:
    return Attributes(fields.get("headers", {}), fields.get("tags", {}), fields.get("storage_class", STANDARD))
