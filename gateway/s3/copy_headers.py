"""Headers of CopyObject and UploadPartCopy, parsed into values."""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import Enum
from urllib.parse import unquote_to_bytes

from descriptors.errors import CallerError, ErrorCode
from descriptors.objects import ByteRange, ReadRequest
from gateway.s3.conditions import COPY_SOURCE, read_condition
from gateway.s3.parameters import NULL_VERSION
from gateway.s3.request import check_bucket_name, check_key

COPY_SOURCE_HEADER = "x-amz-copy-source"
COPY_RANGE_HEADER = "x-amz-copy-source-range"
_VERSION = "?versionId="
_RANGE = re.compile(r"bytes=(\d{1,18})-(\d{1,18})\Z")


class Directive(Enum):
    """Whether something is copied with an object, or replaced."""

    COPY = "COPY"
    REPLACE = "REPLACE"


def parse_copy_source(headers: Mapping[str, str]) -> ReadRequest:
    """The source object and its conditions. Raises CallerError: InvalidArgument, NoSuchVersion, and what the checks of
    bucket and key raise.
    """
    text, _, version = headers[COPY_SOURCE_HEADER].partition(_VERSION)
    if version not in ("", NULL_VERSION):
        raise CallerError(ErrorCode.NO_SUCH_VERSION, "the only version is null", field=COPY_SOURCE_HEADER)
    try:
        # the header is form-encoded: a plus is a space, and %2B a plus
        path = unquote_to_bytes(text.replace("+", " ").encode(errors="surrogateescape")).decode()
    except UnicodeError:
        raise _invalid("is not UTF-8, percent-encoded", COPY_SOURCE_HEADER) from None
    bucket, slash, key = path.removeprefix("/").partition("/")
    if not slash or not bucket or not key:
        raise _invalid("must be bucket/key", COPY_SOURCE_HEADER)
    check_bucket_name(bucket)
    check_key(key)
    return ReadRequest(bucket, key, condition=read_condition(headers, COPY_SOURCE))


def parse_copy_range(headers: Mapping[str, str]) -> ByteRange | None:
    """A range `bytes=first-last`; both must be given. Raises CallerError(InvalidArgument)."""
    text = headers.get(COPY_RANGE_HEADER)
    if text is None:
        return None
    match = _RANGE.match(text)
    if match is None:
        raise _invalid("must be bytes=first-last", COPY_RANGE_HEADER)
    first, last = map(int, match.groups())
    if last < first:
        raise _invalid("ends before it begins", COPY_RANGE_HEADER)
    return ByteRange(first, last - first + 1)


def directive(headers: Mapping[str, str], name: str) -> Directive:
    """The directive in a header. Raises CallerError(InvalidArgument)."""
    try:
        return Directive(headers.get(name, Directive.COPY.value))
    except ValueError:
        raise _invalid("must be COPY or REPLACE", name) from None


def _invalid(problem: str, name: str) -> CallerError:
    return CallerError(ErrorCode.INVALID_ARGUMENT, f"{name} {problem}", field=name)
