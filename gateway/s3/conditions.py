"""Conditional headers of requests, parsed into values (RFC 9110, section 13; the S3 API's conditional writes)."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC
from email.utils import parsedate_to_datetime

from descriptors.conditions import ANY, NO_WRITE_CONDITION, ReadCondition, WriteCondition
from descriptors.errors import CallerError, ErrorCode

COPY_SOURCE = "x-amz-copy-source-"
_UNKNOWN_ON_WRITES = (
    "if-modified-since",
    "if-unmodified-since",
    "x-amz-if-match-last-modified-time",
    "x-amz-if-match-size",
    "x-amz-if-match-initiated-time",
)


def bare_etag(text: str) -> str:
    """An ETag without its quotes. Bytes that are not UTF-8 become `?`; no ETag of ours has such bytes."""
    text = text.strip().encode(errors="replace").decode()
    return text[1:-1] if len(text) >= 2 and text[0] == text[-1] == '"' else text


def read_condition(headers: Mapping[str, str], before: str = "") -> ReadCondition:
    """The conditions of a read; `before` is COPY_SOURCE for a copy's source. An invalid date is no condition."""
    return ReadCondition(
        if_match=_etags(headers.get(f"{before}if-match")),
        if_none_match=_etags(headers.get(f"{before}if-none-match"), weak=True),
        if_modified_since=parse_http_date(headers.get(f"{before}if-modified-since")),
        if_unmodified_since=parse_http_date(headers.get(f"{before}if-unmodified-since")),
    )


def write_condition(headers: Mapping[str, str]) -> WriteCondition:
    """The condition of a put, copy or completion. Raises CallerError: NotImplemented for conditions that S3 lacks, too,
    InvalidArgument for an empty one. A write must never succeed because its condition was not understood.
    """
    _refuse_unknown(headers)
    if_match, if_none_match = headers.get("if-match"), headers.get("if-none-match")
    if if_match is None and if_none_match is None:
        return NO_WRITE_CONDITION
    if if_match is not None and if_none_match is not None:
        raise _not_implemented("If-Match and If-None-Match together", "if-none-match")
    if if_none_match is not None:
        if bare_etag(if_none_match) != ANY:
            raise _not_implemented("If-None-Match on a write with anything but *", "if-none-match")
        return WriteCondition(if_absent=True)
    return WriteCondition(if_match=_one_etag(if_match or ""))


def delete_condition(headers: Mapping[str, str]) -> WriteCondition:
    """The condition of a delete: If-Match alone. Raises what `write_condition` raises."""
    if "if-none-match" in headers:
        raise _not_implemented("If-None-Match on a delete", "if-none-match")
    return write_condition(headers)


def parse_http_date(text: str | None) -> float | None:
    """Unix seconds of an HTTP date; None for no date or an invalid one, which RFC 9110 says to ignore."""
    if text is None:
        return None
    try:
        when = parsedate_to_datetime(text.strip())
        return (when if when.tzinfo is not None else when.replace(tzinfo=UTC)).timestamp()
    except (ValueError, TypeError, OverflowError, IndexError):
        return None


def _etags(header: str | None, *, weak: bool = False) -> tuple[str, ...]:
    """The ETags of a list, bare. Under strong comparison a weak tag keeps its W/, so that it matches nothing."""
    if header is None:
        return ()
    tags = []
    for part in header.split(","):
        text = part.strip()
        if weak:
            text = text.removeprefix("W/")
        if text:
            tags.append(bare_etag(text))
    return tuple(tags) or ("",)


def _one_etag(header: str) -> str:
    etag = bare_etag(header)
    if not etag or "," in etag:
        raise CallerError(ErrorCode.INVALID_ARGUMENT, "If-Match takes one ETag or *", field="if-match")
    return etag


def _refuse_unknown(headers: Mapping[str, str]) -> None:
    for name in _UNKNOWN_ON_WRITES:
        if name in headers:
            raise _not_implemented(f"{name} on a write", name)


def _not_implemented(what: str, name: str) -> CallerError:
    return CallerError(ErrorCode.NOT_IMPLEMENTED, f"{what} is not implemented", field=name)
