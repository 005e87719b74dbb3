"""The head of an answer counts only when it is whole, wherever the connection breaks."""

from __future__ import annotations

import http.client
import io
from typing import Any, cast

import pytest

from nixl_client.transports.http import ConnectionPool, ServerAddress

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
