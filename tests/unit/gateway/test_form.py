"""HTML forms are read the same however their bytes are split, and where the file begins is known exactly."""

from __future__ import annotations

from contextlib import suppress
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from descriptors.errors import CallerError, ErrorCode
from gateway.s3.form import HEAD_BYTES_MAX, FileReader, FormHead, HeadReader, boundary_of

BOUNDARY = "-x1"
TYPE = f"multipart/form-data; boundary={BOUNDARY}"


def part(name: str, value: bytes, more: str = "") -> bytes:
    head = f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="{name}"{more}\r\n\r\n'
    return head.encode() + value + b"\r\n"


def read(body: bytes, cuts: list[int]) -> tuple[FormHead | None, bytes, bool]:
    """The head, the bytes of the file, and whether it has ended."""
    heads, files, head, found = HeadReader(boundary_of(TYPE)), FileReader(boundary_of(TYPE)), None, b""
    edges = [0, *sorted(cut % (len(body) + 1) for cut in cuts), len(body)]
    for start, end in pairwise(edges):
        data = body[start:end]
        if head is None:
            head = heads.add(data)
            data = heads.rest
        if head is not None:
            found += files.feed(data)
    return head, found, files.has_ended


pieces = st.sampled_from([b"\r\n", b"--", b"-x1", b"\r\n---x1", b"-", b"a", b"\n", b"\r", b"\0"])


@given(st.lists(pieces).map(b"".join), st.lists(pieces, max_size=4).map(b"".join), st.lists(st.integers(0), max_size=9))
def test_a_form_is_the_same_however_it_is_split(file: bytes, value: bytes, cuts: list[int]) -> None:
    if b"\r\n---x1" in b"\r\n" + file + b"\r" or b"\r\n---x1" in b"\r\n" + value:
        return
    before = part("Key", value) + part("other", b'name="file"\r\n\r\n')
    body = before + part("file", file, '; filename="f"') + part("after", b"x") + f"--{BOUNDARY}--\r\n".encode()
    head, found, has_ended = read(body, cuts)
    assert head is not None
    assert (found, has_ended, head.file_name) == (file, True, "f")
    assert {name: text.encode() for name, text in head.fields.items()} == {
        "key": value, "other": b'name="file"\r\n\r\n',
    }  # fmt: skip
    assert head.nbytes == len(before) + len(part("file", b"", '; filename="f"')) - 2
    assert body[head.nbytes :].startswith(file + b"\r\n--")


@given(st.binary(max_size=300), st.lists(st.integers(0), max_size=5))
def test_garbage_is_refused_or_read(body: bytes, cuts: list[int]) -> None:
    with suppress(CallerError):
        head, found, _ = read(body, cuts)
        assert not found or head is not None


def test_what_looks_like_the_end_is_the_file() -> None:
    """The boundary of another form, or a line that only begins with this one's."""
    file = b"\r\n---x" * 5000 + b"\r\n---x1and more\r\n---x1-"
    for cuts in ([], list(range(0, 40_000, 7))):
        head, found, has_ended = read(part("file", file) + f"--{BOUNDARY}--\r\n".encode(), cuts)
        assert head is not None
        assert (found, has_ended) == (file, True)


@pytest.mark.parametrize(
    "filler",
    [b"\n", b"\r\n", b"a: b\r\n", b"a:\r\n", part("x", b""), b'name="file"\r\n\r\n', b'name="file"\r\n'],
)
def test_what_strangers_send_before_the_file_is_bounded(filler: bytes) -> None:
    reader = HeadReader(boundary_of(TYPE))
    reader.add(part("x", b"")[:-2])

    def add_all() -> None:
        for _ in range(40_000):
            reader.add(filler)

    with pytest.raises(CallerError) as refused:
        add_all()
    assert refused.value.code in (
        ErrorCode.MAX_POST_PRE_DATA_LENGTH, ErrorCode.MALFORMED_POST_REQUEST, ErrorCode.INVALID_ARGUMENT,
    )  # fmt: skip
    assert reader._nbytes <= HEAD_BYTES_MAX
    assert len(reader._beginning) + len(reader._tail) < 100


def test_every_byte_of_the_head_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """20 KiB that look like the file's headers, and then single bytes, stopped the event loop for seconds."""
    body = part("x", b"name=file" * 2200)[:HEAD_BYTES_MAX]
    reader = HeadReader(boundary_of(TYPE))
    lengths: list[int] = []
    write = reader._parser.write

    def counted(data: bytes) -> int:
        lengths.append(len(data))
        return write(data)

    monkeypatch.setattr(reader._parser, "write", counted)
    assert reader.add(body[:-500]) is None
    for place in range(len(body) - 500, len(body)):
        assert reader.add(body[place : place + 1]) is None
    assert sum(lengths) == len(body)


def test_the_file_begins_where_the_parser_says() -> None:
    """The library knew `name = "file"`, and a search beside it did not: the file lost its beginning."""
    file = b'<html>name="file"\r\nmiddle\r\n\r\nEND'
    body = f'--{BOUNDARY}\r\nContent-Disposition: form-data; name = "file"\r\n\r\n'.encode() + file
    for cuts in ([], list(range(200))):
        head, found, has_ended = read(body + f"\r\n--{BOUNDARY}--\r\n".encode(), cuts)
        assert head is not None
        assert (found, has_ended) == (file, True)


def test_a_long_content_type_is_refused_unread() -> None:
    with pytest.raises(CallerError, match="more than 512 characters"):
        boundary_of(TYPE + '; a="' * 4000)
