"""Objects as an S3 service describes them in headers, and requests as it wants them. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from email.utils import formatdate, parsedate_to_datetime
from urllib.parse import quote, urlencode

from descriptors.chunk_flags import KEPT, is_kept
from descriptors.conditions import ANY, ReadCondition, WriteCondition
from descriptors.errors import CallerError, ErrorCode, ServerError
from descriptors.objects import (
    STANDARD,
    TIME_S_MAX,
    Attributes,
    ByteRange,
    Checksum,
    ChecksumAlgorithm,
    ChecksumType,
    ObjectInfo,
    RangeSpec,
    ReadHead,
    ReadRequest,
    is_header_text,
)
from storage_server.home.rules.proof import HEADER as PROOF_HEADER
from storage_server.home.rules.proof import Proof, proof_within

CONTENT_HEADERS = (
    "content-type",
    "cache-control",
    "content-disposition",
    "content-encoding",
    "content-language",
    "expires",
)
METADATA_PREFIX = "x-amz-meta-"
TAGGING_COUNT = "x-amz-tagging-count"
DEFAULT_CONTENT_TYPES = ("binary/octet-stream", "application/octet-stream")
"""Content types that services give objects that were stored without one."""
METADATA_BYTES_MAX = 2 << 10
"""S3 takes no more metadata of an object. Some services count the names with their prefix."""
KEPT_BYTES_MAX = 1 << 14
"""All that a cached object keeps of its head: each row has it. S3 allows 2 KiB of metadata."""
ETAG_CHARACTERS_MAX = 256
NUMBER_DIGITS_MAX = 18
"""A number of bytes has no more digits. Python reads no number of more than 4,300."""
_FLAGS_HERE = {name: METADATA_PREFIX + name.removeprefix("x-amz-") for name in KEPT}
"""Other services keep no header that they do not know, but all metadata."""
_FLAGS_THERE = {there: here for here, there in _FLAGS_HERE.items()}
_MD5 = re.compile("[0-9a-f]{32}")
_CONTENT_RANGE = re.compile(r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18})", re.ASCII)
_EXPIRY = re.compile(r'expiry-date="([^"]+)", *rule-id="([^"]*)"')


def read_head(key: str, status: int, headers: Mapping[str, str], tags: dict[str, str]) -> ReadHead:
    """The answer to a GET or HEAD; `headers` have lower-case names. Raises ServerError(InternalError) for an answer
    that contradicts itself.
    """
    length = _number(headers, "content-length")
    if status != 206:
        found = ByteRange(0, length)
        return ReadHead(object_info(key, length, headers, tags), found, expiry(headers))
    match = _CONTENT_RANGE.fullmatch(headers.get("content-range", ""))
    if match is None:
        raise _nonsense("a range came without a Content-Range")
    first, last, nbytes = map(int, match.groups())
    if last - first + 1 != length or last >= nbytes:
        raise _nonsense(f"a range of {length} bytes came as {headers['content-range']}")
    return ReadHead(object_info(key, nbytes, headers, tags), ByteRange(first, length), expiry(headers))


def object_info(key: str, nbytes: int, headers: Mapping[str, str], tags: dict[str, str]) -> ObjectInfo:
    """The object that the headers describe."""
    etag = etag_of(headers.get("etag"))
    kept = {name: headers[name] for name in CONTENT_HEADERS if name in headers}
    if kept.get("content-type") in DEFAULT_CONTENT_TYPES:
        del kept["content-type"]
    for name, value in headers.items():
        if name in _FLAGS_THERE:
            if is_kept(_FLAGS_THERE[name], value):  # anybody may have written there
                kept[_FLAGS_THERE[name]] = value
        elif name.startswith(METADATA_PREFIX) and name != PROOF_HEADER:
            kept[name] = value
    named = checksum(headers)
    storage_class = headers.get("x-amz-storage-class", STANDARD)
    texts = (etag, storage_class, *kept.values(), *(() if named is None else (named.value,)))
    if sum(map(len, texts)) + sum(map(len, kept)) > KEPT_BYTES_MAX or not all(map(is_header_text, texts)):
        raise _nonsense("an object came with a header that no answer can have")
    count = headers.get(TAGGING_COUNT, "")
    attributes = Attributes(
        kept,
        tags,
        storage_class,
        int(count) if count.isdecimal() and len(count) < 4 else None,
    )
    return ObjectInfo(
        key=key,
        nbytes=nbytes,
        etag=etag,
        modified_at=http_time(headers.get("last-modified")),
        attributes=attributes,
        checksum=named,
        part_count=part_count(etag),
    )


def etag_of(text: str | None) -> str:
    """The bare ETag of an answer. Raises ServerError(InternalError) for what no answer of ours could have."""
    etag = (text or "").strip('"')
    if not etag or len(etag) > ETAG_CHARACTERS_MAX or not etag.isascii() or not etag.isprintable():
        raise _nonsense("an object came without an ETag that is one")
    return etag


def is_md5(etag: str) -> bool:
    """Whether the ETag may be the MD5 of the object's bytes, as it is for objects that were stored whole."""
    return _MD5.fullmatch(etag) is not None


def has_digest(headers: Mapping[str, str]) -> bool:
    """Whether an ETag that looks like an MD5 is that of the bytes. Of objects that are encrypted with keys of a key
    service, or of the customer, it is not (S3 User Guide, "Checking object integrity").
    """
    return not headers.get("x-amz-server-side-encryption", "").startswith("aws:kms") and (
        "x-amz-server-side-encryption-customer-algorithm" not in headers
    )


def part_count(etag: str) -> int | None:
    """How many parts the object was stored in; None where it was stored whole."""
    count = etag.rpartition("-")[2]
    return int(count) if "-" in etag and count.isdecimal() and len(count) <= NUMBER_DIGITS_MAX else None


def checksum(headers: Mapping[str, str]) -> Checksum | None:
    """The object's checksum, where the service keeps one that we know."""
    kind = ChecksumType.COMPOSITE if headers.get("x-amz-checksum-type") == "COMPOSITE" else ChecksumType.FULL_OBJECT
    for algorithm in ChecksumAlgorithm:
        value = headers.get(algorithm.header)
        if value is not None:
            return Checksum(algorithm, value, ChecksumType.COMPOSITE if "-" in value else kind)
    return None


def expiry(headers: Mapping[str, str]) -> tuple[float, str] | None:
    """When the object expires (Unix seconds), and by which rule."""
    match = _EXPIRY.search(headers.get("x-amz-expiration", ""))
    return None if match is None else (http_time(match[1]), match[2])


def put_time(headers: Mapping[str, str]) -> float:
    """When an object was modified, from the answer to its PUT: Unix seconds. S3 tells only its clock's time at the
    answer, which may be a little later; another ObjectCache tells what a HEAD tells.
    """
    return http_time(headers.get("last-modified") or headers.get("date"))


def http_time(text: str | None) -> float:
    """Unix seconds; 0 for no date."""
    if not text:
        return 0.0
    try:
        unix_s = parsedate_to_datetime(text).timestamp()
    except (ValueError, TypeError, OverflowError, IndexError):  # each for dates of other kinds
        return 0.0
    return unix_s if 0 <= unix_s <= TIME_S_MAX else 0.0


def attribute_headers(attributes: Attributes, *, with_tags: bool = True) -> dict[str, str]:
    """The headers that give a new object its attributes."""
    headers = {_FLAGS_HERE.get(name, name): value for name, value in attributes.headers.items()}
    if with_tags and attributes.tags:
        headers["x-amz-tagging"] = urlencode(attributes.tags)
    if attributes.storage_class != STANDARD:
        headers["x-amz-storage-class"] = attributes.storage_class
    return headers


def metadata_bytes(headers: Mapping[str, str]) -> int:
    """How much of METADATA_BYTES_MAX these headers of a new object take."""
    named = (f"{name}{value}" for name, value in headers.items() if name.startswith(METADATA_PREFIX))
    return sum(len(each.encode("utf-8", "surrogateescape")) for each in named)


def proof_header(proof: Proof | None, headers: Mapping[str, str]) -> dict[str, str]:
    """The header with a proof, as fine as these other headers leave room for."""
    room_bytes = METADATA_BYTES_MAX - metadata_bytes(headers) - len(PROOF_HEADER)
    fitting = None if proof is None else proof_within(proof, room_bytes)
    return {} if fitting is None else {PROOF_HEADER: fitting.header()}


def read_headers(request: ReadRequest) -> dict[str, str]:
    """Range and condition of a read, and the wish for checksums. Lists of ETags, which few services understand, are
    compared with the answer instead.
    """
    headers = {**_conditions(request.condition, ""), "x-amz-checksum-mode": "ENABLED"}
    if request.range is not None:
        headers["range"] = range_text(request.range)
    return headers


def require_plain(path: str) -> None:
    """Raises CallerError(InvalidArgument) for a path that a service, or a proxy before it, might resolve to another
    bucket's or key's.
    """
    if not {".", ".."}.isdisjoint(path.partition("?")[0].split("/")):
        problem = "a key with a part '.' or '..' is not passed on to the service, which might resolve it"
        raise CallerError(ErrorCode.INVALID_ARGUMENT, problem, field="key")


def source_headers(source: ReadRequest) -> dict[str, str]:
    """The source of a copy, and the condition on it. Raises CallerError(InvalidArgument)."""
    path = quote(f"{source.bucket}/{source.key}", safe="/-_.~")
    require_plain(path)
    headers = {"x-amz-copy-source": path, **_conditions(source.condition, "x-amz-copy-source-")}
    if source.range is not None:
        headers["x-amz-copy-source-range"] = range_text(source.range)
    return headers


def write_headers(condition: WriteCondition) -> dict[str, str]:
    """The condition of a write."""
    headers = {}
    if condition.if_match is not None:
        headers["if-match"] = _etags((condition.if_match,))
    if condition.if_absent:
        headers["if-none-match"] = ANY
    return headers


def range_text(spec: RangeSpec) -> str:
    """The value of a Range header."""
    if spec.suffix is not None:
        return f"bytes=-{spec.suffix}"
    return f"bytes={spec.first}-{'' if spec.last is None else spec.last}"


def _conditions(condition: ReadCondition, prefix: str) -> dict[str, str]:
    headers = {}
    if len(condition.if_match) == 1:
        headers[f"{prefix}if-match"] = _etags(condition.if_match)
    if len(condition.if_none_match) == 1:
        headers[f"{prefix}if-none-match"] = _etags(condition.if_none_match)
    if condition.if_modified_since is not None and not condition.if_none_match:
        headers[f"{prefix}if-modified-since"] = formatdate(condition.if_modified_since, usegmt=True)
    if condition.if_unmodified_since is not None and not condition.if_match:
        headers[f"{prefix}if-unmodified-since"] = formatdate(condition.if_unmodified_since, usegmt=True)
    return headers


def _etags(etags: tuple[str, ...]) -> str:
    return ", ".join(etag if etag == ANY else f'"{etag}"' for etag in etags)


def _number(headers: Mapping[str, str], name: str) -> int:
    value = headers.get(name, "")
    if not value.isdecimal() or len(value) > NUMBER_DIGITS_MAX:
        raise _nonsense(f"an object came without its {name}")
    return int(value)


def _nonsense(problem: str) -> ServerError:
    return ServerError(ErrorCode.INTERNAL_ERROR, f"the upstream store's answer makes no sense: {problem}")
