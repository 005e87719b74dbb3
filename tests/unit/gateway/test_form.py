"""HTML forms are read the same however their bytes are split, and where the file begins is known exactly."""

from __future__ import annotations

from contextlib import suppress
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from descriptors.errors import CallerError, ErrorCode
from gateway.s3.form import BEFORE_FILE_BYTES_MAX, FormReader

BOUNDARY = "-x1"
TYPE = f"multipart/form-data; boundary={BOUNDARY}"


def part(name: str, value: bytes, more: str = "") -> bytes:
    head = f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="{name}"{more}\r\n\r\n'
    return head.encode() + value + b"\r\n"


def read(body: bytes, cuts: list[int]) -> tuple[FormReader, bytes]:
    reader, found = FormReader(TYPE), b""
    edges = [0, *sorted(cut % (len(body) + 1) for cut in cuts), len(body)]
    for start, end in pairwise(edges):
        found += b"".join(reader.feed(body[start:end]))
    return reader, found


pieces = st.sampled_from([b"\r\n", b"--", b"-x1", b"\r\n---x1", b"-", b"a", b"\n", b"\r", b"\0"])


@given(st.lists(pieces).map(b"".join), st.lists(pieces, max_size=4).map(b"".join), st.lists(st.integers(0), max_size=9))
def test_a_form_is_the_same_however_it_is_split(file: bytes, value: bytes, cuts: list[int]) -> None:
    if b"\r\n---x1" in b"\r\n" + file or b"\r\n---x1" in b"\r\n" + value:
        return
    before = part("Key", value)
    body = before + part("file", file, '; filename="f"') + part("after", b"x") + f"--{BOUNDARY}--\r\n".encode()
    reader, found = read(body, cuts)
    assert (found, reader.has_file_ended, reader.file_name) == (file, True, "f")
    assert {name: text.encode() for name, text in reader.fields.items()} == {"key": value}
    assert reader.offset_bytes == len(before) + len(part("file", b"", '; filename="f"')) - 2
    assert body[reader.offset_bytes :].startswith(file + b"\r\n--")


@given(st.binary(max_size=300), st.lists(st.integers(0), max_size=5))
def test_garbage_is_refused_or_read(body: bytes, cuts: list[int]) -> None:
    with suppress(CallerError):
        reader, found = read(body, cuts)
        assert not found or reader.offset_bytes is not None


@pytest.mark.parametrize(
    "filler",
    [b"\n", b"\r\n", b"a: b\r\n", b"a:\r\n", part("x", b""), b"Content-Disposition: form-data; name=a\r\n\r\n"],
)
def test_fields_before_the_file_are_bounded(filler: bytes) -> None:
    """Strangers may send them."""
    body = (part("x", b"")[:-2] if filler in (b"\n", b"\r\n") else f"--{BOUNDARY}\r\n".encode()) + filler * 40_000
    reader = FormReader(TYPE)
    with pytest.raises(CallerError) as refused:
        list(reader.feed(body[: BEFORE_FILE_BYTES_MAX + 100]))
    assert refused.value.code in (
        ErrorCode.MAX_POST_PRE_DATA_LENGTH, ErrorCode.MALFORMED_POST_REQUEST, ErrorCode.INVALID_ARGUMENT,
    )  # fmt: skip
