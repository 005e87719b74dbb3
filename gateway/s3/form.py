"""An HTML form with a file, as a browser sends it (RFC 7578): its fields, and where its file begins and ends. Pure."""

from __future__ import annotations

import logging
from collections.abc import Iterator

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from descriptors.errors import CallerError, ErrorCode
from descriptors.header_bytes import header_bytes

FORM_TYPE = "multipart/form-data"
FILE_FIELD = "file"
BEFORE_FILE_BYTES_MAX = 32 << 10
"""Of the fields before the file, with their headers. S3 allows 20 KB of fields."""
_BOUNDARY_BYTES_MAX = 256
_SILENT = logging.Logger("forms", logging.CRITICAL)


class FormReader:
    """Feed it a body. `fields` are those before the file, by their names in small letters: as in S3, what follows the
    file is ignored.
    """

    def __init__(self, content_type: str) -> None:
        """Raises CallerError(MalformedPOSTRequest)."""
        kind, options = parse_options_header(header_bytes(content_type))
        boundary = options.get(b"boundary", b"")
        if kind != FORM_TYPE.encode() or not 0 < len(boundary) <= _BOUNDARY_BYTES_MAX:
            raise _malformed("Content-Type must be multipart/form-data with a boundary", "content-type")
        self.end_bytes = len(b"\r\n--") + len(boundary) + len(b"--\r\n")
        """Of what follows the last part."""
        self.fields: dict[str, str] = {}
        self.file_name = ""
        """The name that the browser gives the file."""
        self.offset_bytes: int | None = None
        """How many bytes of the body lie before the file; None until the file has begun."""
        self.has_file_ended = False
        """Whether the file's last byte has been fed."""
        self._fed_bytes = 0
        self._pieces: list[bytes] = []
        self._header_name = self._header_value = b""
        self._disposition = b""
        self._field: str | None = None
        self._value = bytearray()
        self._parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._begin_part,
                "on_header_field": self._add_header_name,
                "on_header_value": self._add_header_value,
                "on_header_end": self._end_header,
                "on_headers_finished": self._end_headers,
                "on_part_data": self._add_data,
                "on_part_end": self._end_part,
            },
        )
        self._parser.logger = _SILENT  # strangers must not fill the log

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yields the bytes of the file among `data`. Raises CallerError: MalformedPOSTRequest, InvalidArgument,
        MaxPostPreDataLengthExceededError.
        """
        start = 0
        while start < len(data) and self.offset_bytes is None:  # line by line: the headers of a part end with a line
            end = data.find(b"\n", start) + 1 or len(data)
            self._fed_bytes += end - start
            if self._fed_bytes > BEFORE_FILE_BYTES_MAX:
                problem = "Your POST request fields preceding the upload file were too large."
                raise CallerError(ErrorCode.MAX_POST_PRE_DATA_LENGTH, problem, field=FILE_FIELD)
            self._parse(data[start:end])
            start = end
        if start < len(data) and not self.has_file_ended:
            self._parse(data[start:])
        pieces, self._pieces = self._pieces, []
        yield from pieces

    def _parse(self, data: bytes) -> None:
        try:
            self._parser.write(data)
        except FormParserError as error:
            raise _malformed(str(error), "body") from None

    def _begin_part(self) -> None:
        self._disposition, self._field = b"", None
        self._value.clear()

    def _add_header_name(self, data: bytes, start: int, end: int) -> None:
        self._header_name += data[start:end]

    def _add_header_value(self, data: bytes, start: int, end: int) -> None:
        self._header_value += data[start:end]

    def _end_header(self) -> None:
        if self._header_name.lower() == b"content-disposition":
            self._disposition = self._header_value
        self._header_name = self._header_value = b""

    def _end_headers(self) -> None:
        if self.offset_bytes is not None:
            return
        kind, options = parse_options_header(self._disposition)
        if kind != b"form-data" or b"name" not in options:
            raise _malformed("every part needs Content-Disposition: form-data with a name", "content-disposition")
        self._field = _text(options[b"name"], "content-disposition").lower()
        if self._field == FILE_FIELD:
            self.file_name = _text(options.get(b"filename", b""), "content-disposition")
            self.offset_bytes = self._fed_bytes

    def _add_data(self, data: bytes, start: int, end: int) -> None:
        if self.offset_bytes is None:
            self._value += data[start:end]
        elif not self.has_file_ended:
            self._pieces.append(data[start:end])

    def _end_part(self) -> None:
        if self.offset_bytes is not None:
            self.has_file_ended = True
        elif self._field is not None:
            if self._field in self.fields:
                problem = f"POST requires exactly one field named {self._field[:100]!r}"
                raise CallerError(ErrorCode.INVALID_ARGUMENT, problem, field=self._field[:100])
            self.fields[self._field] = _text(bytes(self._value), self._field[:100])


def _text(data: bytes, field: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise _malformed("fields must be UTF-8", field) from None


def _malformed(problem: str, field: str) -> CallerError:
    text = f"The body of your POST request is not well-formed multipart/form-data: {problem}"
    return CallerError(ErrorCode.MALFORMED_POST_REQUEST, text, field=field)
