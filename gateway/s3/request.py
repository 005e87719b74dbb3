"""S3Request: a request as one value, parsed from the raw request line, because a signature covers the raw form."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import unquote_to_bytes

from descriptors.descriptor import OBJECT_KEY_BYTES_MAX
from descriptors.errors import CallerError, ErrorCode
from descriptors.objects import RangeSpec
from gateway.s3.addressing import bucket_from_host

_BUCKET = re.compile(r"(?!xn--|\d+\.\d+\.\d+\.\d+\Z)[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]\Z")
_RANGE = re.compile(r"bytes=([0-9]{0,18})-([0-9]{0,18})\Z")
_ABSOLUTE = re.compile(r"[a-z][a-z0-9+.-]*://[^/?]*", re.IGNORECASE)
_AWS_CHUNKED = "aws-chunked"


@dataclass(frozen=True, slots=True)
class S3Request:
    """Method, path and query as sent; `path` is decoded, `query` keeps order and blanks, header names are lower-case.

    Repeated headers are joined with a comma, as SigV4 requires. `raw_path` is the path before decoding. `host_bucket`
    is the bucket when the Host header names it; the whole path is then the key.
    """

    method: str
    path: str
    query: tuple[tuple[str, str], ...]
    headers: Mapping[str, str]
    raw_path: str = ""
    host_bucket: str | None = None

    @property
    def parameters(self) -> dict[str, str]:
        """Query parameters by name; for a repeated name the first value."""
        found: dict[str, str] = {}
        for name, value in self.query:
            found.setdefault(name, value)
        return found

    @property
    def bucket(self) -> str:
        """The bucket that Host names, or the path's first segment; "" for the service itself."""
        return self.host_bucket if self.host_bucket is not None else self.path[1:].partition("/")[0]

    @property
    def key(self) -> str:
        """Everything after the bucket; "" for the bucket itself."""
        return self.path[1:] if self.host_bucket is not None else self.path[1:].partition("/")[2]

    @property
    def content_length(self) -> int | None:
        """The announced length of the body as sent. Raises CallerError(InvalidArgument) when it is not a number."""
        return self.number("content-length")

    def number(self, name: str) -> int | None:
        """A byte count in a header; None when the header is absent. Raises CallerError(InvalidArgument)."""
        text = self.headers.get(name)
        if text is None:
            return None
        if not text.isascii() or not text.isdigit() or len(text) > 18:
            raise CallerError(ErrorCode.INVALID_ARGUMENT, f"{name} is not a number", field=name)
        return int(text)


def parse_target(method: str, target: str, headers: Mapping[str, str], domains: tuple[str, ...] = ()) -> S3Request:
    """The request. Raises CallerError: InvalidURI where path or query are not UTF-8, InvalidRequest for a bad Host."""
    if not target.startswith("/"):
        absolute = _ABSOLUTE.match(target)
        if absolute is None:
            raise CallerError(ErrorCode.INVALID_URI, "the request target is not a path", field="uri")
        target = target[absolute.end() :]
        target = target if target.startswith("/") else f"/{target}"
    raw_path, _, raw_query = target.partition("?")
    query = []
    for part in raw_query.split("&") if raw_query else []:
        name, _, value = part.partition("=")
        query.append((_decode(name), _decode(value)))
    host_bucket = bucket_from_host(headers.get("host"), domains)
    return S3Request(
        method=method,
        path=_decode(raw_path),
        query=tuple(query),
        headers=headers,
        raw_path=raw_path,
        host_bucket=host_bucket,
    )


def without_chunk_coding(headers: Mapping[str, str]) -> dict[str, str]:
    """The headers without aws-chunked in Content-Encoding, which codes the transfer and does not belong
    to the object.
    """
    codings = headers.get("content-encoding", "").split(",")
    kept = [coding for coding in codings if coding.strip().lower() != _AWS_CHUNKED]
    if len(kept) == len(codings):
        return dict(headers)
    rest = {name: value for name, value in headers.items() if name != "content-encoding"}
    encoding = ",".join(kept).strip()
    return {**rest, "content-encoding": encoding} if encoding else rest


def check_bucket_name(bucket: str) -> None:
    """S3's naming rules. Raises CallerError(InvalidBucketName)."""
    if not _BUCKET.match(bucket) or ".." in bucket or ".-" in bucket or "-." in bucket:
        raise CallerError(
            ErrorCode.INVALID_BUCKET_NAME,
            "a bucket's name has 3 to 63 of a-z 0-9 . -, starting and ending with a letter or digit",
            field="bucket",
        )


def check_key(key: str) -> None:
    """Raises CallerError(KeyTooLongError)."""
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
        return unquote_to_bytes(text).decode()
    except UnicodeError:
        raise CallerError(ErrorCode.INVALID_URI, "the request target is not UTF-8", field="uri") from None
