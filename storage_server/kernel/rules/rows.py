"""Index rows as values, and the JSON in the `attributes` columns of objects and uploads."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal, NamedTuple

from pydantic import TypeAdapter

from descriptors.lifecycle import LifecycleRule
from descriptors.objects import (
    STANDARD,
    Attributes,
    BucketCache,
    BucketInfo,
    Checksum,
    ChecksumAlgorithm,
    ChecksumType,
    ObjectInfo,
    PartInfo,
    UploadInfo,
)
from storage_server.planning.extent import Extent

BUCKET_COLUMNS = "name, created_at, owner, cache"
OBJECT_COLUMNS = "key, version, nbytes, etag, modified_at, attributes"
EXTENT_COLUMNS = "file_id, file_offset, nbytes, blocks, object_offset"
LOCATION_COLUMNS = "file_id, file_offset, nbytes, x'' AS blocks, object_offset"
"""Those of an extent without its checksums."""
PART_COLUMNS = "part_number, nbytes, etag, modified_at, checksum"
UPLOAD_COLUMNS = "upload_id, key, version, owner, initiated_at, attributes"


KEPT_TEXT_MAX = 1024
RULES_KEPT = 16
"""Rules of a bucket may take a megabyte."""
RULES = TypeAdapter(list[LifecycleRule])
TouchedKind = Literal["bucket", "object", "upload", "part"]


class Touched(NamedTuple):
    """The thing that a change is about: a bucket, an object by bucket and key, an upload, or a part by upload and
    number.
    """

    kind: TouchedKind
    name: str
    key: str = ""


@dataclass(frozen=True, slots=True)
class StoredObject:
    """An object's row. `upload_id` names the multipart upload that made the object, if one did. Of a copy of another
    service's object that `has_doubtful_tags` the tags there may be others.
    """

    info: ObjectInfo
    version: int
    upload_id: str | None = None
    has_doubtful_tags: bool = False


@dataclass(frozen=True, slots=True)
class KeyChange:
    """The state of a key after a change of the index: an object of `nbytes`, or nothing (`version` is None). An object
    that `is_dirty` must not leave the cache: nobody else has it yet. One that is an encoded form of the version before
    has that one as `replaced_version`.
    """

    bucket: str
    key: str
    version: int | None
    nbytes: int = 0
    modified_at: float = 0.0
    attributes: Attributes = field(default_factory=Attributes)
    is_dirty: bool = False
    replaced_version: int | None = None


@dataclass(frozen=True, slots=True)
class Committed:
    """The changes of a transaction that is committed: what keys show now; what the parts of open uploads take more, by
    buckets; the buckets that were created or deleted, with the cache that each is from now on; and the `files` of which
    rows have come or gone.
    """

    keys: Sequence[KeyChange]
    part_bytes: Mapping[str, int]
    caches: Mapping[str, BucketCache | None]
    files: Set[str]


@dataclass(frozen=True, slots=True)
class KeyUse:
    """When an object was last used, how often, the chunk that it was asked for behind, None for none, and the end of
    its lease. Times are Unix seconds.
    """

    bucket: str
    key: str
    used_at: float
    use_count: int
    parent: str | None
    leased_until: float | None = None


class CachedRow(NamedTuple):
    """An object and its use, None where it was never used, as the index has them. `attributes` is JSON."""

    bucket: str
    key: str
    version: int
    nbytes: int
    modified_at: float
    attributes: str
    used_at: float | None
    use_count: int | None
    parent: str | None
    leased_until: float | None
    is_dirty: int


@dataclass(frozen=True, slots=True)
class StoredUpload:
    """An upload's row."""

    info: UploadInfo
    version: int
    attributes: Attributes


@dataclass(frozen=True, slots=True)
class StoredPart:
    """One body on disk that is not published yet: its hashes and its extent. An empty body has the extent None."""

    etag: str
    nbytes: int
    checksum: Checksum | None
    extent: Extent | None


def object_attributes(info: ObjectInfo, upload_id: str | None, *, has_doubtful_tags: bool = False) -> str:
    """The JSON that is kept with an object; `stored_object` reads it."""
    fields = _attribute_fields(info.attributes)
    if info.checksum is not None:
        fields["checksum"] = [info.checksum.algorithm.value, info.checksum.value, info.checksum.type.value]
    if info.part_count is not None:
        fields["part_count"] = info.part_count
    if upload_id is not None:
        fields["upload_id"] = upload_id
    if has_doubtful_tags:
        fields["has_doubtful_tags"] = True
    return json.dumps(fields, separators=(",", ":"))


def bucket_info(row: Sequence[Any]) -> BucketInfo:
    """The bucket of a row of BUCKET_COLUMNS."""
    name, created_at, owner, cache = row
    return BucketInfo(name, created_at, owner, None if cache is None else BucketCache.of_text(cache))


def stored_object(row: tuple[Any, ...]) -> StoredObject:
    """The object of a row of OBJECT_COLUMNS."""
    key, version, nbytes, etag, modified_at, text = row
    fields = _kept_fields(text) if len(text) <= KEPT_TEXT_MAX else _object_fields(text)
    attributes, checksum, part_count, upload_id, has_doubtful_tags = fields
    info = ObjectInfo(
        key=key,
        nbytes=nbytes,
        etag=etag,
        modified_at=modified_at,
        attributes=attributes,
        checksum=checksum,
        part_count=part_count,
    )
    return StoredObject(info, version, upload_id, has_doubtful_tags)


def _object_fields(text: str) -> tuple[Attributes, Checksum | None, int | None, str | None, bool]:
    """The fields of an object's JSON."""
    fields = json.loads(text)
    checksum = None
    if "checksum" in fields:
        algorithm, value, kind = fields["checksum"]
        checksum = Checksum(ChecksumAlgorithm(algorithm), value, ChecksumType(kind))
    found = _attributes(fields), checksum, fields.get("part_count"), fields.get("upload_id")
    return *found, "has_doubtful_tags" in fields


_kept_fields = lru_cache(1024)(_object_fields)
"""Most objects of a bucket have the same few attributes."""


def rules_of(text: str) -> tuple[LifecycleRule, ...]:
    """The lifecycle rules in the text of the `lifecycle` column."""
    return () if text == "[]" else _rules_of(text)


@lru_cache(RULES_KEPT)
def _rules_of(text: str) -> tuple[LifecycleRule, ...]:
    """Each read of an object of the bucket needs them, and a thousand take milliseconds to check."""
    return tuple(RULES.validate_python(json.loads(text)))


def upload_attributes(attributes: Attributes, algorithm: ChecksumAlgorithm | None, kind: ChecksumType | None) -> str:
    """The JSON that is kept with an upload; `stored_upload` reads it."""
    fields = _attribute_fields(attributes)
    if algorithm is not None and kind is not None:
        fields["checksum"] = [algorithm.value, kind.value]
    return json.dumps(fields, separators=(",", ":"))


def stored_upload(row: tuple[Any, ...]) -> StoredUpload:
    """The upload of a row of UPLOAD_COLUMNS."""
    upload_id, key, version, owner, initiated_at, text = row
    fields = json.loads(text)
    attributes = _attributes(fields)
    algorithm, kind = fields.get("checksum", (None, None))
    info = UploadInfo(
        upload_id=upload_id,
        key=key,
        initiated_at=initiated_at,
        owner=owner,
        storage_class=attributes.storage_class,
        checksum=ChecksumAlgorithm(algorithm) if algorithm else None,
        checksum_type=ChecksumType(kind) if kind else None,
    )
    return StoredUpload(info, version, attributes)


def part_info(row: tuple[Any, ...], algorithm: ChecksumAlgorithm | None) -> PartInfo:
    """The part of a row of PART_COLUMNS."""
    number, nbytes, etag, modified_at, value = row
    checksum = Checksum(algorithm, value) if algorithm is not None and value is not None else None
    return PartInfo(number, nbytes, etag, modified_at, checksum)


def extents(rows: Iterable[tuple[Any, ...]]) -> list[Extent]:
    """The extents of rows of EXTENT_COLUMNS or LOCATION_COLUMNS. An empty part has a row but no extent."""
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


def attributes_of(text: str) -> Attributes:
    """The attributes in the JSON of an object."""
    return _attributes(json.loads(text))


def _attributes(fields: dict[str, Any]) -> Attributes:
    return Attributes(fields.get("headers", {}), fields.get("tags", {}), fields.get("storage_class", STANDARD))
