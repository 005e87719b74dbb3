"""Conditional requests (RFC 9110, section 13; the S3 API's conditional reads and writes). Pure decisions."""

from __future__ import annotations

from dataclasses import dataclass

from descriptors.errors import CallerError, ErrorCode

ANY = "*"


@dataclass(frozen=True, slots=True)
class ReadCondition:
    """The condition of a read. ETags are bare, or ANY; an empty tuple means no condition. Times are Unix seconds."""

    if_match: tuple[str, ...] = ()
    if_none_match: tuple[str, ...] = ()
    if_modified_since: float | None = None
    if_unmodified_since: float | None = None


@dataclass(frozen=True, slots=True)
class WriteCondition:
    """The condition of a write. `if_match` is the bare ETag that the object must have now, or ANY. `if_absent`
    (If-None-Match: *) demands that there is no object.
    """

    if_match: str | None = None
    if_absent: bool = False


NO_READ_CONDITION = ReadCondition()
NO_WRITE_CONDITION = WriteCondition()


def check_read(condition: ReadCondition, etag: str, modified_at: float, *, copying: bool = False) -> None:
    """Evaluate in RFC 9110's order (13.2.2). Dates compare in whole seconds, as headers carry them.

    Raises CallerError(PreconditionFailed), or NotModified where the caller's copy is still valid. A copy operation has
    no copy of its own to use, so it gets PreconditionFailed.
    """
    modified_s = int(modified_at)
    unchanged = ErrorCode.PRECONDITION_FAILED if copying else ErrorCode.NOT_MODIFIED
    if condition.if_match:
        if not _names(condition.if_match, etag):
            raise _failed(ErrorCode.PRECONDITION_FAILED, "if-match")
    elif condition.if_unmodified_since is not None and modified_s > condition.if_unmodified_since:
        raise _failed(ErrorCode.PRECONDITION_FAILED, "if-unmodified-since")
    if condition.if_none_match:
        if _names(condition.if_none_match, etag):
            raise _failed(unchanged, "if-none-match")
    elif condition.if_modified_since is not None and modified_s <= condition.if_modified_since:
        raise _failed(unchanged, "if-modified-since")


def check_write(condition: WriteCondition, etag_now: str | None) -> None:
    """Raises CallerError: PreconditionFailed; NoSuchKey for If-Match on an absent key, as in S3."""
    if condition.if_absent and etag_now is not None:
        raise _failed(ErrorCode.PRECONDITION_FAILED, "if-none-match")
    if condition.if_match is None:
        return
    if etag_now is None:
        raise CallerError(ErrorCode.NO_SUCH_KEY, "If-Match was given and there is no such object", field="if-match")
    if condition.if_match not in (ANY, etag_now):
        raise _failed(ErrorCode.PRECONDITION_FAILED, "if-match")


def _names(tags: tuple[str, ...], etag: str) -> bool:
    return any(tag in (ANY, etag) for tag in tags)


def _failed(code: ErrorCode, header: str) -> CallerError:
    return CallerError(code, f"the {header} condition does not hold", field=header)
