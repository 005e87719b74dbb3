"""The head of an answer counts only when it is whole, wherever the connection breaks; and answers have bounds."""

from __future__ import annotations

import http.client
import io
from typing import Any, cast

import pytest

from nixl_client.transports import http as transport
from nixl_client.transports.http import (
    BoundedAnswer,
    ConnectionPool,
    ServerAddress,
    Stream,
    UnansweredError,
    bounded,
    number_in,
)

HEAD = b'HTTP/1.1 200 OK\r\nETag: "e"\r\nContent-Length: 3\r\n\r\n'
CONTINUE = b"HTTP/1.1 100 Continue\r\nx: y\r\n\r\n"


class Wire:
    """A socket on which these bytes come, and then its end."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def makefile(self, *_: object) -> io.BufferedReader:
        return io.BufferedReader(cast(Any, io.BytesIO(self._data)))


def read(data: bytes, method: str = "GET") -> http.client.HTTPResponse:
    """The answer as a client's connection reads it."""
    connection = ConnectionPool(ServerAddress.parse("http://127.0.0.1:1")).take(1.0)
    response = connection.response_class(cast(Any, Wire(data)), method=method)
    response.begin()
    return response


def test_a_whole_answer_is_read() -> None:
    response = read(HEAD + b"abc")
    assert (response.status, response.headers["ETag"], response.read()) == (200, '"e"', b"abc")


@pytest.mark.parametrize("interim", [b"", CONTINUE], ids=["at once", "after a 100"])
def test_a_head_that_breaks_off_anywhere_is_no_answer(interim: bytes) -> None:
    """http.client itself takes `HTTP/1.1 200 O` for a success."""
    whole = interim + HEAD
    for length in range(len(whole)):
        with pytest.raises(http.client.RemoteDisconnected):
            read(whole[:length])


def test_a_body_that_breaks_off_anywhere_is_no_answer() -> None:
    for length in range(3):
        with pytest.raises(http.client.IncompleteRead):
            read(HEAD + b"abc"[:length]).read()


@pytest.mark.parametrize(
    ("head", "is_known"),
    [
        (HEAD, True),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", True),
        (b"HTTP/1.1 204 No Content\r\n\r\n", True),
        (b"HTTP/1.1 200 OK\r\n\r\n", False),
        (b"HTTP/1.1 200 OK\r\nContent-Length: many\r\n\r\n", False),
    ],
)
def test_an_answer_that_ends_with_its_connection_has_no_known_end(head: bytes, is_known: bool) -> None:
    response = read(head)
    assert (response.chunked or response.length is not None) is is_known


@pytest.mark.parametrize("status", [b"103 Early Hints", b"101 Switching Protocols"])
def test_an_interim_answer_is_no_answer(status: bytes) -> None:
    """The real one would be taken for that to the next request."""
    with pytest.raises(http.client.HTTPException, match="interim"):
        read(b"HTTP/1.1 " + status + b"\r\n\r\n" + HEAD)


def test_interim_answers_have_an_end() -> None:
    with pytest.raises(http.client.HTTPException, match="lines"):
        read(b"HTTP/1.1 100 Continue\r\n\r\n" * 10_000)


def test_long_lines_and_many_are_refused_as_before() -> None:
    with pytest.raises(http.client.LineTooLong):
        read(b"HTTP/1.1 200 OK\r\nx: " + b"y" * 70_000 + b"\r\n\r\n")
    with pytest.raises(http.client.HTTPException, match="more than 100 headers"):
        read(b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 200 + b"\r\n")


class TimedWire(Wire):
    """A wire that notes how long each wait may last, and brings its bytes in pieces."""

    def __init__(self, data: bytes, piece_bytes: int = 1 << 20) -> None:
        self._pieces = Pieces(io.BytesIO(data), piece_bytes)
        self.waits: list[float] = []

    def settimeout(self, wait_s: float) -> None:
        self.waits.append(wait_s)

    def makefile(self, *_: object) -> io.BufferedReader:
        return io.BufferedReader(self._pieces)


class Pieces(io.RawIOBase):
    def __init__(self, source: io.BytesIO, piece_bytes: int) -> None:
        self._source = source
        self._piece_bytes = piece_bytes

    def readable(self) -> bool:
        return True

    def readinto(self, view: Any, /) -> int:
        data = self._source.read(min(self._piece_bytes, len(view)))
        view[: len(data)] = data
        return len(data)


class Connected:
    """A connection that has sent its request."""

    def __init__(self, sock: TimedWire) -> None:
        self.sock = sock
        self.response_class: Any = None

    def getresponse(self) -> BoundedAnswer:
        answer: BoundedAnswer = self.response_class(self.sock, method="GET")
        answer.begin()
        return answer


def body_of(wire: TimedWire, bytes_max: int) -> bytes:
    connection = cast(Any, Connected(wire))
    pool = ConnectionPool(ServerAddress.parse("http://127.0.0.1:1"))
    return Stream(pool, connection, bounded(connection, 1.0, bytes_max)).read(bytes_max)


def told(nbytes: int) -> bytes:
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % nbytes


CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize("data", [told(7) + b"x" * 7, CHUNKED + b"3\r\nxxx\r\n4\r\nxxxx\r\n0\r\na: b\r\n\r\n"])
def test_a_body_within_its_bound_is_whole(data: bytes) -> None:
    assert body_of(TimedWire(data), 7) == b"x" * 7
    with pytest.raises(UnansweredError, match="more than 6") as refused:
        body_of(TimedWire(data), 6)
    assert not refused.value.retryable


@pytest.mark.parametrize(
    "data",
    [
        told(1 << 40),
        told(10**4_000),
        CHUNKED + b"ffffffffff\r\n" + b"x" * 200_000,
        CHUNKED + b"1;" + b"x" * 60_000 + b"\r\nx\r\n" + b"1\r\nx\r\n" * 500_000,
        CHUNKED + (b"1;" + b"x" * 60_000 + b"\r\nx\r\n") * 40,
        CHUNKED + b"0\r\n" + b"a: b\r\n" * 400_000,
        CHUNKED + b"9" * 5_000 + b"\r\n",
    ],
    ids=["a terabyte", "more digits", "a giant chunk", "many chunks", "long chunk lines", "trailers", "a size"],
)
def test_an_answer_without_end_is_given_up(data: bytes) -> None:
    with pytest.raises(UnansweredError):
        body_of(TimedWire(data), 100_000)


@pytest.mark.parametrize("data", [told(7) + b"x" * 6, CHUNKED + b"3\r\nxxx\r\n4\r\nxxx"])
def test_a_whole_body_that_breaks_off_is_no_answer(data: bytes) -> None:
    with pytest.raises(UnansweredError, match="broke off"):
        body_of(TimedWire(data), 7)


def test_all_waits_for_an_answer_have_one_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = iter(range(100))
    monkeypatch.setattr(transport.time, "monotonic", lambda: next(now_s) / 4)
    wire = TimedWire(told(100) + b"x" * 100, piece_bytes=40)
    with pytest.raises(UnansweredError, match="in time"):
        body_of(wire, 100)
    assert wire.waits == [0.75, 0.5, 0.25]


def test_a_number_in_a_header_is_one() -> None:
    assert number_in({"a": "12"}, "a") == 12
    for headers in ({}, {"a": ""}, {"a": "-1"}, {"a": "x"}, {"a": "9" * 5_000}):
        with pytest.raises(UnansweredError):
            number_in(headers, "a")
