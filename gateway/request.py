"""An S3 request as one value, taken from the raw request line: nothing is normalised away that a signature covers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import unquote, unquote_to_bytes, urlsplit

from descriptors.descriptor import OBJECT_KEY_BYTES_MAX
from descriptors.errors import CallerError, ErrorCode
from descriptors.storage_api import RangeSpec

SERVICE_PREFIX = "_objectcache"
_BUCKET = re.compile(r"(?!xn--|\d+\.\d+\.\d+\.\d+\Z)[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]\Z")
_RANGE = re.compile(r"bytes=(\d{0,18})-(\d{0,18})\Z")


@dataclass(frozen=True, slots=True)
class S3Request:
    """Method, path and query as sent; `path` is decoded, `query` keeps order and blanks, header names are lower-case.

    Repeated headers are joined with a comma, as SigV4 wants them.
    """

    method: str
    path: str
    query: tuple[tuple[str, str], ...]
    headers: Mapping[str, str]

    @property
    def parameters(self) -> dict[str, str]:
        """Query parameters by name; of a repeated one the first."""
        found: dict[str, str] = {}
        for name, value in self.query:
            found.setdefault(name, value)
        return found

    @property
    def bucket(self) -> str:
        """The path's first segment; "" for the service itself."""
        return self.path[1:].partition("/")[0]

    @property
    def key(self) -> str:
        """Everything after the bucket; "" for the bucket itself."""
        return self.path[1:].partition("/")[2]

    @property
    def content_length(self) -> int | None:
        """The announced body length in bytes. Raises CallerError(InvalidArgument) when it is no number."""
        text = self.headers.get("content-length")
        if text is None:
            return None
        if not text.isascii() or not text.isdigit() or len(text) > 18:
            raise CallerError(ErrorCode.INVALID_ARGUMENT, "Content-Length is not a number", field="content-length")
        return int(text)


def parse_target(method: str, target: str, headers: Mapping[str, str]) -> S3Request:
    """Raises CallerError(InvalidURI) where path or query do not decode to UTF-8."""
    if not target.startswith("/"):
        parts = urlsplit(target)
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    raw_path, _, raw_query = target.partition("?")
    query = []
    for part in raw_query.split("&") if raw_query else []:
        name, _, value = part.partition("=")
        query.append((_decode(name), _decode(value)))
    return S3Request(method, _decode(raw_path), tuple(query), headers)


def check_bucket_name(bucket: str) -> None:
    """S3's naming rules. Raises CallerError(InvalidBucketName)."""
    if not _BUCKET.match(bucket) or ".." in bucket or ".-" in bucket or "-." in bucket:
        raise CallerError(
            ErrorCode.INVALID_BUCKET_NAME,
            "3 to 63 of a-z 0-9 . -, starting and ending with a letter or digit",
            field="bucket",
        )


def check_key(key: str) -> None:
    """Raises CallerError(KeyTooLongError)."""
    if "\0" in key:
        raise CallerError(ErrorCode.INVALID_ARGUMENT, "an object key may not contain NUL", field="key")
    if len(key.encode()) > OBJECT_KEY_BYTES_MAX:
        raise CallerError(ErrorCode.KEY_TOO_LONG, f"an object key may have {OBJECT_KEY_BYTES_MAX} bytes", field="key")


def parse_range(header: str | None) -> RangeSpec | None:
    """A Range header with one byte range; None when absent or not understood, which RFC 9110 says to ignore."""
    match = _RANGE.match(header.strip()) if header else None
    if match is None:
        return None
    first, last = match.groups()
    if not first:
        return RangeSpec(suffix=int(last)) if last else None
    if last and int(last) < int(first):
        return None
    return RangeSpec(first=int(first), last=int(last) if last else None)


def _decode(text: str) -> str:
    try:
        return unquote_to_bytes(text).decode() if "%" in text or not text.isascii() else unquote(text)
    except UnicodeError:
        raise CallerError(ErrorCode.INVALID_URI, "the request target is not UTF-8", field="uri") from None
