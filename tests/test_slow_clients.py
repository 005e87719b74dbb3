"""Clients that stop in the middle: they hold little, and nobody waits for them."""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.support import OWNER, LocalStack, eventually, request, signed

MIB = 1 << 20
STALLED = 40


@pytest.fixture
def large(local: LocalStack) -> bytes:
    body = os.urandom(24 * MIB + 333)
    assert request(local.url, "PUT", "/chunks/large", body=body).status == 200
    return body


def begin_get(url: str, path: str) -> socket.socket:
    """A GET whose client never reads."""
    place = urlsplit(url)
    connection = socket.create_connection((place.hostname, place.port))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    headers = signed(url, "GET", path, b"", {}, OWNER)
    head = f"GET {path} HTTP/1.1\r\nHost: {place.netloc}\r\n" + "".join(f"{n}: {v}\r\n" for n, v in headers.items())
    connection.sendall(head.encode() + b"\r\n")
    return connection


def test_readers_that_stall_keep_nobody_waiting_and_leave_nothing(local: LocalStack, large: bytes) -> None:
    """More of them than there are threads; the object is deleted under them, and its file goes when they do."""
    files = local.storage.store.files
    with contextlib.ExitStack() as stack:
        for _ in range(STALLED):
            stack.enter_context(begin_get(local.url, "/chunks/large"))
        assert eventually(lambda: files.pinned_count > 0)
        assert request(local.url, "GET", "/chunks/large").body == large
        assert request(local.url, "PUT", "/chunks/other", body=large[:MIB]).status == 200
        assert request(local.url, "DELETE", "/chunks/large").status == 204
        assert request(local.url, "GET", "/chunks/other").body == large[:MIB]
        assert files.pinned_count > 0
    assert eventually(lambda: files.pinned_count == 0)


@pytest.mark.parametrize(
    ("first", "last"), [(0, 300_000), (16_383, 900_000), (16_384, 12 * MIB - 1), (8 * MIB - 5, 24 * MIB + 332)]
)
def test_large_ranges_are_exact_wherever_they_begin_and_end(
    local: LocalStack, large: bytes, first: int, last: int
) -> None:
    """Across checksum blocks, pieces and turns of a thread."""
    reply = request(local.url, "GET", "/chunks/large", headers={"range": f"bytes={first}-{last}"})
    assert (reply.status, reply.body) == (206, large[first : last + 1])


def test_a_connection_goes_on_after_a_large_answer(local: LocalStack, large: bytes) -> None:
    """Bytes sent past the event loop are followed by the next answer, not mixed with it."""
    with local.client("chunks", "http") as client:
        for _ in range(5):
            assert client._http.request("GET", "/chunks/large").body == large
            assert client._http.request("PUT", "/chunks/small", body=b"s").body == b""
            assert client._http.request("GET", "/chunks/small").body == b"s"


def test_senders_that_stall_keep_nobody_waiting_and_store_nothing(local: LocalStack, tmp_path: Path) -> None:
    place = urlsplit(local.url)
    with contextlib.ExitStack() as stack:
        for index in range(STALLED):
            path = f"/chunks/half-{index}"
            headers = signed(local.url, "PUT", path, b"x" * MIB, {}, OWNER)
            connection = stack.enter_context(socket.create_connection((place.hostname, place.port)))
            lines = "".join(f"{n}: {v}\r\n" for n, v in headers.items())
            head = f"PUT {path} HTTP/1.1\r\nHost: {place.netloc}\r\nContent-Length: {MIB}\r\n{lines}\r\n"
            connection.sendall(head.encode() + b"x" * 1000)
        body = os.urandom(3 * MIB)
        assert request(local.url, "PUT", "/chunks/whole", body=body).status == 200
        assert request(local.url, "GET", "/chunks/whole").body == body
    listed = request(local.url, "GET", "/chunks?list-type=2&prefix=half").body
    assert b"<KeyCount>0</KeyCount>" in listed
