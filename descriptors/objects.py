"""Objects and their parts, and requests about them: the values that gateway and storage server exchange."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import Enum

from descriptors.conditions import NO_READ_CONDITION, NO_WRITE_CONDITION, ReadCondition, WriteCondition
from descriptors.units import MIB, parse_bytes

STANDARD = "STANDARD"
AUTO = "auto"
CACHE_BYTES_MIN = MIB
CACHE_BYTES_MAX = 1 << 60
PART_NUMBER_MAX = 10_000
TIME_S_MAX = 253_402_300_799.0
"""The last second of the year 9999: later times have no text."""
_NOT_IN_HEADERS = re.compile("[\0-\x08\x0a-\x1f\x7f\ud800-\udfff]")


def is_header_text(value: str) -> bool:
    """Whether a header of an answer can have this value."""
    return _NOT_IN_HEADERS.search(value) is None


class ChecksumAlgorithm(Enum):
    """The checksums that S3 knows; the value is the name on the wire."""

    CRC32 = "CRC32"
    CRC32C = "CRC32C"
    CRC64NVME = "CRC64NVME"
    SHA1 = "SHA1"
    SHA256 = "SHA256"

    @property
    def header(self) -> str:
        """The header that carries the checksum, in lower case."""
        return f"x-amz-checksum-{self.value.lower()}"


class ChecksumType(Enum):
    """Whether a checksum covers all bytes of the object, or the checksums of its parts."""

    FULL_OBJECT = "FULL_OBJECT"
    COMPOSITE = "COMPOSITE"


@dataclass(frozen=True, slots=True)
class Checksum:
    """`value` is base64 of the big-endian checksum. A composite one ends in `-N`, where N is the number of parts."""

    algorithm: ChecksumAlgorithm
    value: str
    type: ChecksumType = ChecksumType.FULL_OBJECT


@dataclass(frozen=True, slots=True)
class BodyDigests:
    """The digests that the caller states for its body; None for a digest that it does not state.

    `sha256` and `md5` are hex; `checksum` is base64, of the algorithm the request names.
    """

    sha256: str | None = None
    md5: str | None = None
    checksum: str | None = None


@dataclass(frozen=True, slots=True)
class BucketCache:
    """The declaration of a bucket that is a cache: the bytes of its objects, at most; None: as its directory allows."""

    capacity_bytes: int | None = None

    def text(self) -> str:
        """As headers and the index have it."""
        return AUTO if self.capacity_bytes is None else str(self.capacity_bytes)

    @classmethod
    def of_text(cls, text: str) -> BucketCache:
        """The inverse; sizes may have units. Raises ValueError."""
        if text.strip().lower() == AUTO:
            return cls()
        capacity_bytes = parse_bytes(text)
        if not CACHE_BYTES_MIN <= capacity_bytes <= CACHE_BYTES_MAX:
            raise ValueError(f"a cache has from {CACHE_BYTES_MIN} to {CACHE_BYTES_MAX} bytes, not {text}")
        return cls(capacity_bytes)


BUCKETS_LISTED_MAX = 10_000
"""A list of buckets has no more: nobody bounds how many an access key makes, and all of them would take memory for
each list that is made at once.
"""


@dataclass(frozen=True, slots=True)
class BucketInfo:
    """A bucket, when it was made (Unix seconds), and the access key that made it; `cache` where it is one."""

    name: str
    created_at: float
    owner: str
    cache: BucketCache | None = None


@dataclass(frozen=True, slots=True)
class Attributes:
    """The attributes kept with an object. `headers` are content and user-metadata headers, in lower case. A read of
    another service may know how many tags there are (`known_tag_count`) and not which.
    """

    headers: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    storage_class: str = STANDARD
    known_tag_count: int | None = field(default=None, compare=False)

    @property
    def tag_count(self) -> int:
        """How many tags the object has."""
        return len(self.tags) if self.known_tag_count is None else self.known_tag_count


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """A stored object, without its bytes. `etag` is bare: the MD5 in hex, for a multipart object `<hex>-<parts>`.
    `modified_at` is Unix seconds. `part_count` is None for an object that was stored in one request.
    """

    key: str
    nbytes: int
    etag: str
    modified_at: float
    attributes: Attributes = field(default_factory=Attributes)
    checksum: Checksum | None = None
    part_count: int | None = None


@dataclass(frozen=True, slots=True)
class PutRequest:
    """A whole object to store: `nbytes` of body, and the `checksum` algorithm to compute and keep."""

    bucket: str
    key: str
    nbytes: int
    attributes: Attributes = field(default_factory=Attributes)
    checksum: ChecksumAlgorithm | None = None
    condition: WriteCondition = NO_WRITE_CONDITION


@dataclass(frozen=True, slots=True)
class ByteRange:
    """Bytes [start, start + length) of an object."""

    start: int
    length: int


@dataclass(frozen=True, slots=True)
class RangeSpec:
    """The one range of a Range header: first and last byte (inclusive), or the last `suffix` bytes."""

    first: int | None = None
    last: int | None = None
    suffix: int | None = None


@dataclass(frozen=True, slots=True)
class ReadRequest:
    """An object, or a range or one part (from 1) of it; both at once is the caller's error. With `only_if_cached` the
    object counts as absent where the server would have to ask the home of objects for it.
    """

    bucket: str
    key: str
    range: RangeSpec | None = None
    part_number: int | None = None
    condition: ReadCondition = NO_READ_CONDITION
    only_if_cached: bool = False


@dataclass(frozen=True, slots=True)
class ReadHead:
    """The answer to a read before its first byte: the object, the range of bytes, and the time (Unix seconds) and rule
    of the object's expiry.
    """

    info: ObjectInfo
    range: ByteRange
    expiry: tuple[float, str] | None = None


@dataclass(frozen=True, slots=True)
class CopyRequest:
    """Copy source to target. `attributes` None keeps the source's; `tags` None keeps the source's tags.

    `checksum` asks for one of that algorithm on the copy; None keeps the source's.
    """

    source: ReadRequest
    bucket: str
    key: str
    attributes: Attributes | None = None
    tags: dict[str, str] | None = None
    storage_class: str = STANDARD
    checksum: ChecksumAlgorithm | None = None
    condition: WriteCondition = NO_WRITE_CONDITION


@dataclass(frozen=True, slots=True)
class ListRequest:
    """Keys after `after` (exclusive) that start with `prefix`, rolled up at `delimiter`, at most `max_keys` entries."""

    bucket: str
    prefix: str = ""
    delimiter: str = ""
    after: str = ""
    max_keys: int = 1000


@dataclass(frozen=True, slots=True)
class NotDeleted:
    """The reason why one of many keys was not deleted: S3's code, or another service's own, and its words."""

    key: str
    code: str
    message: str


@dataclass(frozen=True, slots=True)
class ListPage:
    """One page of a listing. `next_after` continues it; None at the end."""

    objects: list[ObjectInfo]
    common_prefixes: list[str]
    next_after: str | None


@dataclass(frozen=True, slots=True)
class UploadRequest:
    """A multipart upload to begin. `checksum_type` is given exactly when `checksum` is."""

    access_key: str
    bucket: str
    key: str
    attributes: Attributes = field(default_factory=Attributes)
    checksum: ChecksumAlgorithm | None = None
    checksum_type: ChecksumType | None = None


@dataclass(frozen=True, slots=True)
class UploadInfo:
    """A multipart upload under way."""

    upload_id: str
    key: str
    initiated_at: float
    owner: str
    storage_class: str = STANDARD
    checksum: ChecksumAlgorithm | None = None
    checksum_type: ChecksumType | None = None


@dataclass(frozen=True, slots=True)
class UploadRef:
    """Names an upload; bucket, key and id must belong together."""

    bucket: str
    key: str
    upload_id: str


@dataclass(frozen=True, slots=True)
class PartRequest:
    """One part to store: `nbytes` of body."""

    upload: UploadRef
    part_number: int
    nbytes: int
    checksum: ChecksumAlgorithm | None = None


@dataclass(frozen=True, slots=True)
class PartInfo:
    """A stored part. `checksum` is base64 of the upload's algorithm, where it has one."""

    part_number: int
    nbytes: int
    etag: str
    modified_at: float
    checksum: Checksum | None = None


@dataclass(frozen=True, slots=True)
class ObjectPart:
    """One part of a complete multipart object, for GetObjectAttributes."""

    part_number: int
    nbytes: int
    checksum: Checksum | None = None


@dataclass(frozen=True, slots=True)
class PartCopyRequest:
    """One part to copy from (a range of) a stored object."""

    upload: UploadRef
    part_number: int
    source: ReadRequest


@dataclass(frozen=True, slots=True)
class ClaimedPart:
    """An entry of CompleteMultipartUpload: a part, by number and bare ETag."""

    part_number: int
    etag: str
    checksum: Checksum | None = None


@dataclass(frozen=True, slots=True)
class CompleteRequest:
    """Make an object of these parts. `checksum` and `nbytes` are those of the object, where the caller gave them."""

    upload: UploadRef
    parts: list[ClaimedPart]
    checksum: Checksum | None = None
    nbytes: int | None = None
    condition: WriteCondition = NO_WRITE_CONDITION


@dataclass(frozen=True, slots=True)
class PartPage:
    """Some of an upload's parts, after `part_number_marker`; `next_marker` continues, None at the end."""

    upload: UploadInfo
    parts: list[PartInfo]
    next_marker: int | None


@dataclass(frozen=True, slots=True)
class UploadListRequest:
    """Uploads after (`key_marker`, `upload_id_marker`) by key and then start, as S3 orders them."""

    bucket: str
    prefix: str = ""
    delimiter: str = ""
    key_marker: str = ""
    upload_id_marker: str = ""
    max_uploads: int = 1000


@dataclass(frozen=True, slots=True)
class UploadPage:
    """Some of a bucket's uploads; `next_*` continue the listing, None at the end."""

    uploads: list[UploadInfo]
    common_prefixes: list[str]
    next_key_marker: str | None
    next_upload_id_marker: str | None
