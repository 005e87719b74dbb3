"""Headers about an object, in requests and answers: metadata, storage class, checksums, overrides."""

from __future__ import annotations

import base64
import math
import re
from collections.abc import Mapping
from email.utils import formatdate
from urllib.parse import quote

from descriptors.chunk_flags import flags
from descriptors.errors import CallerError, ErrorCode
from descriptors.objects import (
    STANDARD,
    Attributes,
    Checksum,
    ChecksumAlgorithm,
    ChecksumType,
    ObjectInfo,
    is_header_text,
)
from descriptors.rdma_token import TOKEN_HEADER
from gateway.s3.tags import parse_tagging_header

USER_METADATA = "x-amz-meta-"
USER_METADATA_BYTES_MAX = 2048
METADATA_ENTRIES_MAX = 64
"""Clients of several languages take no more than 100 headers in an answer."""
CONTENT_HEADERS_BYTES_MAX = 8192
RDMA_TOKEN_HEADERS = (TOKEN_HEADER, "x-rdma-info", "x-scal-rdma")
STORAGE_CLASSES = frozenset(
    {
        STANDARD, "REDUCED_REDUNDANCY", "STANDARD_IA", "ONEZONE_IA", "INTELLIGENT_TIERING", "GLACIER", "DEEP_ARCHIVE",
        "GLACIER_IR", "OUTPOSTS", "SNOW", "EXPRESS_ONEZONE", "FSX_OPENZFS",
    }
)  # fmt: skip
_STORED = {
    "content-type": "Content-Type",
    "cache-control": "Cache-Control",
    "content-disposition": "Content-Disposition",
    "content-encoding": "Content-Encoding",
    "content-language": "Content-Language",
    "expires": "Expires",
}
_DEFAULT_CONTENT_TYPE = "binary/octet-stream"
_PRIVATE_ACLS = frozenset({"private", "bucket-owner-full-control", "bucket-owner-read"})
_OTHER_ACLS = frozenset(
    {"public-read", "public-read-write", "authenticated-read", "aws-exec-read", "log-delivery-write"}
)
_REFUSED = ("x-amz-website-redirect-location", "x-amz-write-offset-bytes", "x-amz-object-lock-")
_REFUSED_EVERYWHERE = ("x-amz-server-side-encryption", "x-amz-copy-source-server-side-encryption")
_UNPACK = "x-amz-meta-snowball-auto-extract"
_TOKEN = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+\Z")


def refuse_rdma_token(headers: Mapping[str, str]) -> None:
    """Raises CallerError(NotImplemented) for a token that is not executed: success would mean that the
    object is lost.
    """
    for name in RDMA_TOKEN_HEADERS:
        if name in headers:
            raise _not_implemented("this RDMA token is not executed here; send the body", TOKEN_HEADER)


def refuse_encryption(headers: Mapping[str, str]) -> None:
    """Raises CallerError(NotImplemented) for server-side encryption, with the server's key or the caller's."""
    for name in headers:
        if name.startswith(_REFUSED_EVERYWHERE):
            raise _not_implemented("server-side encryption is not implemented", name)


def refuse_unsupported(headers: Mapping[str, str]) -> None:
    """Raises CallerError(NotImplemented) for headers that S3 keeps with a new object and we do not, and for tokens."""
    refuse_rdma_token(headers)
    refuse_not_kept(headers)


def refuse_not_kept(headers: Mapping[str, str]) -> None:
    """Raises CallerError(NotImplemented) for headers that S3 keeps with a new object and we do not."""
    refuse_encryption(headers)
    for name in headers:
        if name.startswith(_REFUSED):
            raise _not_implemented(f"{name} is not implemented", name)
    if headers.get(_UNPACK, "").lower() == "true":
        raise _not_implemented("an archive is not unpacked here", _UNPACK)
    check_acl(headers)


def check_acl(headers: Mapping[str, str]) -> None:
    """Raises CallerError for a canned ACL or grant that gives rights to others: NotImplemented, InvalidArgument."""
    acl = headers.get("x-amz-acl")
    if acl in _OTHER_ACLS:
        raise _not_implemented("only private ACLs are implemented", "x-amz-acl")
    if acl is not None and acl not in _PRIVATE_ACLS:
        raise CallerError(ErrorCode.INVALID_ARGUMENT, "there is no such canned ACL", field="x-amz-acl")
    for name in headers:
        if name.startswith("x-amz-grant-"):
            raise _not_implemented("grants are not implemented", name)


def new_attributes(headers: Mapping[str, str]) -> Attributes:
    """The attributes to keep with a new object. Raises CallerError: MetadataTooLarge, InvalidArgument, InvalidTag,
    InvalidStorageClass.
    """
    tags = parse_tagging_header(headers.get("x-amz-tagging"))
    return Attributes(stored_headers(headers), tags, storage_class(headers) or STANDARD)


def storage_class(headers: Mapping[str, str]) -> str | None:
    """The storage class asked for. Raises CallerError(InvalidStorageClass)."""
    wanted = headers.get("x-amz-storage-class")
    if wanted is not None and wanted not in STORAGE_CLASSES:
        raise CallerError(
            ErrorCode.INVALID_STORAGE_CLASS, "there is no such storage class", field="x-amz-storage-class"
        )
    return wanted


def stored_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """Content headers, user metadata and flags to keep, as they were sent. Raises CallerError: MetadataTooLarge;
    InvalidArgument for bytes that are not UTF-8, because an answer could not repeat them, or unknown flags.
    """
    kept = {name: headers[name] for name in _STORED if name in headers}
    metadata = {name: value for name, value in headers.items() if name.startswith(USER_METADATA)}
    for name, value in (kept | metadata).items():
        if not name.isascii():
            problem = "names of user metadata must be ASCII: no answer could have another"
            raise CallerError(ErrorCode.INVALID_ARGUMENT, problem, field=_legible(name))
        if not _TOKEN.match(name):
            problem = "names of user metadata are tokens (RFC 9110): other bytes would end a name in an answer"
            raise CallerError(ErrorCode.INVALID_ARGUMENT, problem, field=_legible(name))
        if not is_header_text(value):
            raise CallerError(ErrorCode.INVALID_ARGUMENT, "header values must be UTF-8", field=_legible(name))
    if sum(len(value.encode()) for value in kept.values()) > CONTENT_HEADERS_BYTES_MAX:
        problem = f"content headers may have {CONTENT_HEADERS_BYTES_MAX} bytes together"
        raise CallerError(ErrorCode.METADATA_TOO_LARGE, problem, field="content-disposition")
    if len(metadata) > METADATA_ENTRIES_MAX:
        problem = (
            f"user metadata has {len(metadata)} entries, at most {METADATA_ENTRIES_MAX}, of which clients can read all"
        )
        raise CallerError(ErrorCode.METADATA_TOO_LARGE, problem, field=USER_METADATA)
    nbytes = sum(len(name.encode()) - len(USER_METADATA) + len(value.encode()) for name, value in metadata.items())
    if nbytes > USER_METADATA_BYTES_MAX:
        problem = f"user metadata has {nbytes} bytes, at most {USER_METADATA_BYTES_MAX}"
        raise CallerError(ErrorCode.METADATA_TOO_LARGE, problem, field=USER_METADATA)
    return kept | metadata | flags(headers)


def new_checksum(headers: Mapping[str, str]) -> tuple[ChecksumAlgorithm | None, ChecksumType | None]:
    """The checksum algorithm and type of a new upload or copy. Raises CallerError(InvalidRequest) for names and pairs
    that S3 does not know.
    """
    name, kind = headers.get("x-amz-checksum-algorithm"), headers.get("x-amz-checksum-type")
    if name is None:
        if kind is not None:
            problem = "x-amz-checksum-type needs x-amz-checksum-algorithm"
            raise CallerError(ErrorCode.INVALID_REQUEST, problem, field="x-amz-checksum-type")
        return None, None
    try:
        algorithm = ChecksumAlgorithm(name.upper())
    except ValueError:
        problem = "the checksum algorithms are CRC32, CRC32C, CRC64NVME, SHA1 and SHA256"
        raise CallerError(ErrorCode.INVALID_REQUEST, problem, field="x-amz-checksum-algorithm") from None
    return algorithm, _checksum_type(algorithm, kind)


def object_headers(info: ObjectInfo) -> dict[str, str]:
    """The headers of a GET or HEAD answer, except length and range."""
    kept = info.attributes.headers
    unsendable = sum(not _TOKEN.match(name) for name in kept)
    headers = {
        "Content-Type": _DEFAULT_CONTENT_TYPE,
        **{_STORED.get(name, name): _ascii(value) for name, value in kept.items() if _TOKEN.match(name)},
        **({"x-amz-missing-meta": str(unsendable)} if unsendable else {}),
        "ETag": f'"{info.etag}"',
        "Last-Modified": http_date(info.modified_at),
        "Accept-Ranges": "bytes",
    }
    if info.attributes.storage_class != STANDARD:
        headers["x-amz-storage-class"] = info.attributes.storage_class
    if info.attributes.tag_count:
        headers["x-amz-tagging-count"] = str(info.attributes.tag_count)
    return headers


def _ascii(value: str) -> str:
    """A value that every client can read: text beyond ASCII is an encoded word (RFC 2047), as AWS answers it."""
    if value.isascii():
        return value
    return f"=?UTF-8?B?{base64.b64encode(value.encode()).decode()}?="


def checksum_headers(checksum: Checksum | None) -> dict[str, str]:
    """The headers with the checksum of a stored object."""
    if checksum is None:
        return {}
    return {checksum.algorithm.header: checksum.value, "x-amz-checksum-type": checksum.type.value}


def overriding_headers(parameters: Mapping[str, str]) -> dict[str, str]:
    """The response-* parameters, as headers. Raises CallerError(InvalidArgument) for a value that no
    header can hold.
    """
    headers = {}
    for name, header in _STORED.items():
        value = parameters.get(f"response-{name}")
        if value is None:
            continue
        if not is_header_text(value):
            raise CallerError(ErrorCode.INVALID_ARGUMENT, "no header can hold this", field=f"response-{name}")
        headers[header] = value
    return headers


def expiration_header(expiry: tuple[float, str] | None) -> dict[str, str]:
    """The header x-amz-expiration: when an object expires, and by which rule."""
    if expiry is None:
        return {}
    when, rule_id = expiry
    rule = quote(rule_id, safe="", errors="replace")  # a service upstream may have named it with bytes that are no text
    return {"x-amz-expiration": f'expiry-date="{http_date(when)}", rule-id="{rule}"'}


def http_date(unix_s: float) -> str:
    """A time in the format of HTTP headers: the second of `markup.timestamp`, so that a list and a HEAD agree."""
    return formatdate(math.ceil(unix_s * 1000) // 1000, usegmt=True)


def _checksum_type(algorithm: ChecksumAlgorithm, kind: str | None) -> ChecksumType:
    only_full = algorithm is ChecksumAlgorithm.CRC64NVME
    if kind is None:
        return ChecksumType.FULL_OBJECT if only_full else ChecksumType.COMPOSITE
    try:
        wanted = ChecksumType(kind.upper())
    except ValueError:
        problem = "the checksum types are COMPOSITE and FULL_OBJECT"
        raise CallerError(ErrorCode.INVALID_REQUEST, problem, field="x-amz-checksum-type") from None
    only_composite = algorithm in (ChecksumAlgorithm.SHA1, ChecksumAlgorithm.SHA256)
    if (only_full and wanted is ChecksumType.COMPOSITE) or (only_composite and wanted is ChecksumType.FULL_OBJECT):
        problem = f"{algorithm.value} cannot be {wanted.value}"
        raise CallerError(ErrorCode.INVALID_REQUEST, problem, field="x-amz-checksum-type")
    return wanted


def _legible(name: str) -> str:
    return name.encode(errors="replace").decode()


def _not_implemented(problem: str, name: str) -> CallerError:
    return CallerError(ErrorCode.NOT_IMPLEMENTED, problem, field=name)
