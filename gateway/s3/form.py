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
"""The fields before the file, with their headers and the file's own headers, have no more bytes, as in S3."""
PARTS_MAX = 100
EMPTY_LINES_MAX = 1000
CONTENT_TYPE_CHARACTERS_MAX = 512
_BOUNDARY_BYTES_MAX = 70
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
    if len(content_type) > CONTENT_TYPE_CHARACTERS_MAX:
        raise _malformed(f"Content-Type has more than {CONTENT_TYPE_CHARACTERS_MAX} characters", "content-type")
    kind, options = parse_options_header(header_bytes(content_type))
    boundary = options.get(b"boundary", b"")
    if kind != FORM_TYPE.encode() or not 0 < len(boundary) <= _BOUNDARY_BYTES_MAX:
        raise _malformed("Content-Type must be multipart/form-data with a boundary", "content-type")
    return boundary


class HeadReader:
    """Finds the head of a form. `add` takes the body as it comes, and looks at each byte once; `rest` has what came
    behind the head.
    """

    def __init__(self, boundary: bytes) -> None:
        self._opening = b"--" + boundary
        self._beginning = b""
        self._nbytes = 0
        self._empty_line_count = 0
        self._tail = b""
        """The last bytes that the parser has got: an empty line may begin with them."""
        self._parts = _Parts()
        self._parser = _parser_for(self._parts, boundary)
        self.rest = b""

    def add(self, data: bytes) -> FormHead | None:
        """The head, when it is there. Raises CallerError: MalformedPOSTRequest, InvalidArgument,
        MaxPostPreDataLengthExceededError.
        """
        room = HEAD_BYTES_MAX - self._nbytes
        self._require_boundary(data)
        # a part's headers end with an empty line, so the parser gets no byte of the file
        known = self._tail + data[:room]
        given, looked_at = len(self._tail), 0
        while given < len(known):
            found = known.find(_HEADERS_END, looked_at)
            end = len(known) if found < 0 else found + len(_HEADERS_END)
            self._empty_line_count += found >= 0
            if self._empty_line_count > EMPTY_LINES_MAX:
                raise _malformed(f"more than {EMPTY_LINES_MAX} empty lines before the file", "body")
            self._write(known[given:end])
            given, looked_at = end, found + len(_HEADERS_END) // 2
            if self._parts.file_name is not None:
                self.rest = known[end:] + data[room:]
                return FormHead(self._parts.fields, self._parts.file_name, self._nbytes)
        self._tail = known[-len(_HEADERS_END) + 1 :]
        if len(data) > room:
            problem = "Your POST request fields preceding the upload file were too large."
            raise CallerError(ErrorCode.MAX_POST_PRE_DATA_LENGTH, problem, field=FILE_FIELD)
        return None

    def _require_boundary(self, data: bytes) -> None:
        """The parser takes anything for a preamble."""
        lacking = len(self._opening) + 2 - len(self._beginning)
        if lacking > 0:
            self._beginning += data[:lacking]
            seen = self._beginning.lstrip(b"\r\n")[: len(self._opening)]
            if not self._opening.startswith(seen):
                raise _malformed("it does not begin with the boundary", "body")

    def _write(self, data: bytes) -> None:
        self._nbytes += len(data)
        try:
            self._parser.write(data)
        except FormParserError as error:
            raise _malformed(str(error), "body") from None


class FileReader:
    """Takes the body behind the head, and gives the bytes of the file. The parts behind the file are not looked at."""

    def __init__(self, boundary: bytes) -> None:
        self._end = re.compile(re.escape(b"\r\n--" + boundary) + rb"(?:--|\r\n|[ \t])")
        self._held_bytes = len(boundary) + 5
        self._tail = b""
        self.end_bytes = len(b"\r\n--") + len(boundary) + len(b"--\r\n")
        """The bytes that follow the file where it is the last field."""
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


def _parser_for(parts: _Parts, boundary: bytes) -> MultipartParser:
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
    return parser


def _text(data: bytes, field: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise _malformed("fields must be UTF-8", field) from None


def _malformed(problem: str, field: str) -> CallerError:
    text = f"The body of your POST request is not well-formed multipart/form-data: {problem}"
    return CallerError(ErrorCode.MALFORMED_POST_REQUEST, text, field=field)
