"""An HTML form with a file, as a browser sends it (RFC 7578): its fields, and where its file begins and ends. Pure."""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from descriptors.errors import CallerError, ErrorCode
from descriptors.header_bytes import header_bytes

FORM_TYPE = "multipart/form-data"
FILE_FIELD = "file"
HEAD_BYTES_MAX = 20 << 10
"""Of the fields before the file, with their headers, and the file's own headers, as in S3."""
PARTS_MAX = 100
TRIES_MAX = 3
"""Places in the head that look like the file's headers; the others are values of fields."""
_BOUNDARY_BYTES_MAX = 70
_FILE_HEADER = re.compile(rb'name="?file"?[^\r\n]*\r\n', re.IGNORECASE)
_HEADERS_END = b"\r\n\r\n"
_SILENT = logging.Logger("forms", logging.CRITICAL)


@dataclass(frozen=True, slots=True)
class FormHead:
    """The part of a form before the bytes of its file: `fields` by their names in small letters, the name that the
    browser gives the file, and the length in bytes. As in S3, fields behind the file do not count.
    """

    fields: dict[str, str]
    file_name: str
    nbytes: int


def boundary_of(content_type: str) -> bytes:
    """The boundary between the parts of a form. Raises CallerError(MalformedPOSTRequest)."""
    kind, options = parse_options_header(header_bytes(content_type))
    boundary = options.get(b"boundary", b"")
    if kind != FORM_TYPE.encode() or not 0 < len(boundary) <= _BOUNDARY_BYTES_MAX:
        raise _malformed("Content-Type must be multipart/form-data with a boundary", "content-type")
    return boundary


class HeadReader:
    """Finds the head of a form. `add` takes the body as it comes; `rest` has what came behind the head."""

    def __init__(self, boundary: bytes) -> None:
        self._boundary = boundary
        self._buffer = bytearray()
        self._looked_at = 0
        self._try_count = 0
        self.rest = b""

    def add(self, data: bytes) -> FormHead | None:
        """The head, when it is there. Raises CallerError: MalformedPOSTRequest, InvalidArgument,
        MaxPostPreDataLengthExceededError.
        """
        taken = HEAD_BYTES_MAX + 1 - len(self._buffer)
        self._buffer += data[:taken]
        beginning, opening = self._buffer[: len(self._boundary) + 4].lstrip(b"\r\n"), b"--" + self._boundary
        if not opening.startswith(beginning[: len(opening)]):
            raise _malformed("it does not begin with the boundary", "body")
        while (found := _FILE_HEADER.search(self._buffer, self._looked_at)) is not None:
            end = self._buffer.find(_HEADERS_END, found.end() - 2)
            if end < 0:
                break
            self._looked_at = end + len(_HEADERS_END)
            head = _head_of(bytes(self._buffer[: self._looked_at]), self._boundary)
            if head is not None:
                self.rest = bytes(self._buffer[head.nbytes :]) + data[taken:]
                return head
            self._try_count += 1
            if self._try_count == TRIES_MAX:
                raise _malformed("too many fields look like the file", FILE_FIELD)
        if len(self._buffer) > HEAD_BYTES_MAX:
            problem = "Your POST request fields preceding the upload file were too large."
            raise CallerError(ErrorCode.MAX_POST_PRE_DATA_LENGTH, problem, field=FILE_FIELD)
        return None


class FileReader:
    """Takes the body behind the head, and gives the bytes of the file. The parts behind the file are not looked at."""

    def __init__(self, boundary: bytes) -> None:
        self._end = re.compile(re.escape(b"\r\n--" + boundary) + rb"(?:--|\r\n|[ \t])")
        self._held_bytes = len(boundary) + 5
        self._tail = b""
        self.end_bytes = len(b"\r\n--") + len(boundary) + len(b"--\r\n")
        """Of what follows the file where it is the last field."""
        self.has_ended = False

    def feed(self, data: bytes) -> bytes:
        """The bytes of the file that are certain by now."""
        if self.has_ended:
            return b""
        known = self._tail + data
        found = self._end.search(known)
        if found is not None:
            self.has_ended, self._tail = True, b""
            return known[: found.start()]
        cut = max(0, len(known) - self._held_bytes)
        self._tail = known[cut:]
        return known[:cut]


class _Parts:
    """The fields of a form's head, by the library's callbacks."""

    def __init__(self) -> None:
        self.fields: dict[str, str] = {}
        self.file_name: str | None = None
        """None until the headers of the file have ended."""
        self._header_name = self._header_value = self._disposition = b""
        self._field: str | None = None
        self._value = bytearray()
        self._count = 0

    def begin(self) -> None:
        self._count += 1
        if self._count > PARTS_MAX:
            raise _malformed(f"more than {PARTS_MAX} fields", "body")
        self._disposition, self._field = b"", None
        self._value.clear()

    def add_header_name(self, data: bytes, start: int, end: int) -> None:
        self._header_name += data[start:end]

    def add_header_value(self, data: bytes, start: int, end: int) -> None:
        self._header_value += data[start:end]

    def end_header(self) -> None:
        if self._header_name.lower() == b"content-disposition":
            self._disposition = self._header_value
        self._header_name = self._header_value = b""

    def end_headers(self) -> None:
        kind, options = parse_options_header(self._disposition)
        if kind != b"form-data" or b"name" not in options:
            raise _malformed("every part needs Content-Disposition: form-data with a name", "content-disposition")
        self._field = _text(options[b"name"], "content-disposition").lower()
        if self._field == FILE_FIELD:
            self.file_name = _text(options.get(b"filename", b""), "content-disposition")

    def add_data(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def end(self) -> None:
        if self._field is None:
            return
        if self._field in self.fields:
            problem = f"POST requires exactly one field named {self._field[:100]!r}"
            raise CallerError(ErrorCode.INVALID_ARGUMENT, problem, field=self._field[:100])
        self.fields[self._field] = _text(bytes(self._value), self._field[:100])


def _head_of(data: bytes, boundary: bytes) -> FormHead | None:
    """The head that these bytes are; None where they end within the value of a field."""
    parts = _Parts()
    parser = MultipartParser(
        boundary,
        {
            "on_part_begin": parts.begin,
            "on_header_field": parts.add_header_name,
            "on_header_value": parts.add_header_value,
            "on_header_end": parts.end_header,
            "on_headers_finished": parts.end_headers,
            "on_part_data": parts.add_data,
            "on_part_end": parts.end,
        },
    )
    parser.logger = _SILENT  # strangers must not fill the log
    try:
        parser.write(data)
    except FormParserError as error:
        raise _malformed(str(error), "body") from None
    return None if parts.file_name is None else FormHead(parts.fields, parts.file_name, len(data))


def _text(data: bytes, field: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise _malformed("fields must be UTF-8", field) from None


def _malformed(problem: str, field: str) -> CallerError:
    text = f"The body of your POST request is not well-formed multipart/form-data: {problem}"
    return CallerError(ErrorCode.MALFORMED_POST_REQUEST, text, field=field)
