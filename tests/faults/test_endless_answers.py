"""A server whose answers have no end, or no sense: the client's calls end, with an error of the client's."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import closing, suppress

import numpy as np
import pytest

from descriptors.errors import ObjectCacheError
from nixl_client.client import Client
from nixl_client.session.retries import Retries
from nixl_client.session.signed_http import parse_error
from nixl_client.transports.http import UnansweredError

OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"


class Endless:
    """Answers each request with `first`, and then with `more` for as long as the client stays."""

    def __init__(self) -> None:
        self.first, self.more = b"", b""
        self.is_dripping = False
        self.has_left = threading.Event()
        """Set when the client has hung up."""
        self._bound = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._bound.getsockname()[1]}"
        threading.Thread(target=self._serve, daemon=True).start()

    def close(self) -> None:
        with suppress(OSError):
            self._bound.shutdown(socket.SHUT_RDWR)
        self._bound.close()

    def _serve(self) -> None:
        with suppress(OSError):
            while True:
                connected, _ = self._bound.accept()
                threading.Thread(target=self._converse, args=(connected,), daemon=True).start()

    def _converse(self, connected: socket.socket) -> None:
        with connected, suppress(OSError):
            connected.settimeout(0.02 if self.is_dripping else None)
            connected.recv(65536)
            connected.sendall(self.first)
            while self.more:
                if self.is_dripping:
                    with suppress(TimeoutError):
                        if not connected.recv(1):
                            break
                connected.sendall(self.more)
        self.has_left.set()


@pytest.fixture
def server() -> Iterator[Endless]:
    with closing(Endless()) as running:
        yield running


@pytest.fixture
def client(server: Endless) -> Iterator[Client]:
    with Client(
        server.url, "bucket", access_key="key", secret_key="secret", timeout_s=0.3, retries=Retries(1), transport="http"
    ) as made:
        yield made


ENDLESS = {
    "a head": (OK, b"a: b\r\n"),
    "chunks": (CHUNKED, b"1\r\n \r\n"),
    "trailers": (CHUNKED + b"2\r\n{}\r\n0\r\n", b"a: b\r\n"),
}
LONG = {
    "a body": (OK + b"Content-Length: 1000\r\n\r\n", b" "),
    "an error": (b"HTTP/1.1 404 x\r\nContent-Length: 1000\r\n\r\n", b" "),
}


@pytest.mark.parametrize("answer", [*ENDLESS, *LONG])
def test_a_call_ends_in_its_time_whatever_drips(server: Endless, client: Client, answer: str) -> None:
    server.first, server.more = {**ENDLESS, **LONG}[answer]
    server.is_dripping = True
    with pytest.raises(ObjectCacheError):
        client.lookup(["k"])
    assert server.has_left.wait(30)


@pytest.mark.parametrize("answer", ENDLESS)
def test_a_call_ends_in_its_time_whatever_comes_at_once(server: Endless, client: Client, answer: str) -> None:
    server.first, more = ENDLESS[answer]
    server.more = more * 10_000
    with pytest.raises(ObjectCacheError):
        client.lookup(["k"])
    assert server.has_left.wait(30)


@pytest.mark.parametrize("nbytes", [b"8589934592", b"1099511627776", b"9" * 4_000])
def test_an_answer_that_is_announced_to_be_giant_is_refused_at_once(
    server: Endless, client: Client, nbytes: bytes
) -> None:
    """Memory for a terabyte would be a MemoryError."""
    server.first = OK + b"Content-Length: " + nbytes + b"\r\n\r\n"
    with pytest.raises(UnansweredError, match="more than") as refused:
        client.lookup(["k"])
    assert not refused.value.retryable


def test_a_size_that_is_no_number_is_an_error_of_the_server(server: Endless, client: Client) -> None:
    server.first = CHUNKED.replace(b"\r\n\r\n", b"\r\nContent-Length: " + b"9" * 5_000 + b"\r\n\r\n") + b"0\r\n\r\n"
    with pytest.raises(UnansweredError, match="content-length"):
        client.objects.get_object("k", np.zeros(10, np.uint8), path="tcp")


@pytest.mark.parametrize(
    "body",
    [
        b'<?xml version="1.0" encoding="none-such"?><Error/>',
        b"<Error>" + b"<a/>" * 16_000 + b"</Error>",
        b'<!DOCTYPE a [<!ENTITY b "c">]><Error><Code>&b;</Code></Error>',
        b"<Error>" * 9_000,
    ],
)
def test_an_absurd_error_document_is_none(body: bytes) -> None:
    """The parser of ElementTree raises LookupError for an encoding that it does not know."""
    assert isinstance(parse_error(500, body), UnansweredError)
