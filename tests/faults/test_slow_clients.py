"""Clients that stop in the middle: they hold little, and nobody waits for them."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pytest

from descriptors.descriptor import Delivery, Descriptor
from descriptors.descriptor_codec import encode_json
from descriptors.layout import ChunkLayout
from tests.support.chunks import make_chunks
from tests.support.requests import OTHER, OWNER, request, signed
from tests.support.servers import LocalStack
from tests.support.waiting import eventually

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
    with contextlib.closing(local.http()) as http:
        for _ in range(5):
            assert http.request("GET", "/chunks/large", bytes_max=len(large)).body == large
            assert http.request("PUT", "/chunks/small", body=b"s").body == b""
            assert http.request("GET", "/chunks/small").body == b"s"


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


def begin_descriptor(url: str, keys: list[str], layout: ChunkLayout, key: tuple[str, str] = OWNER) -> socket.socket:
    """A descriptor GET over http whose answer is not read yet."""
    place = urlsplit(url)
    body = encode_json(Descriptor(tuple(keys), layout.num_layers, layout.chunk_tokens, layout.per_layer_chunk_bytes))
    headers = signed(url, "POST", "/chunks?layerwise=", body, {}, key)
    connection = socket.create_connection((place.hostname, place.port), timeout=30)
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    head = f"POST /chunks?layerwise= HTTP/1.1\r\nHost: {place.netloc}\r\nContent-Length: {len(body)}\r\n{lines}\r\n"
    connection.sendall(head.encode() + body)
    return connection


def read_at(connection: socket.socket, bytes_per_s: float, upto: int) -> int:
    """Read steadily; how many bytes came before the connection ended."""
    got, began_s = 0, time.monotonic()
    with contextlib.suppress(OSError):
        while got < upto:
            piece = connection.recv(min(upto - got, int(bytes_per_s / 20)))
            if not piece:
                break
            got += len(piece)
            time.sleep(max(0.0, began_s + got / bytes_per_s - time.monotonic()))  # the rate of this reader
    return got


@pytest.fixture
def impatient(tmp_path: Path) -> Iterator[tuple[LocalStack, list[str], ChunkLayout]]:
    """A server that waits a second, and a prefix of 12 MB."""
    layout = ChunkLayout(4, 16, MIB)
    settings = {"aggregation_bytes": MIB, "window_bytes": 4 * MIB, "staging_bytes": 8 * MIB, "stall_timeout_s": 1.0}
    with LocalStack(tmp_path / "data", dram_bytes=0, **settings) as running:
        running.call(running.storage.objects.create_bucket(OWNER[0], "chunks"))
        keys, chunks = make_chunks(3, layout)
        with running.client("chunks", "http") as client:
            client.put_chunks(keys, list(chunks))
        yield running, keys, layout


@pytest.mark.slow
def test_a_slow_but_steady_reader_gets_everything(impatient: tuple[LocalStack, list[str], ChunkLayout]) -> None:
    """The kernel calls a connection writable when a third of its buffer is free, which takes this reader longer than
    the server waits; what it has acknowledged shows that it reads.
    """
    running, keys, layout = impatient
    with begin_descriptor(running.url, keys, layout) as connection:
        assert read_at(connection, 1.5 * MIB, layout.delivery_bytes(3)) == layout.delivery_bytes(3)


@pytest.mark.slow
def test_a_reader_below_the_least_rate_is_cut(impatient: tuple[LocalStack, list[str], ChunkLayout]) -> None:
    """A byte now and then kept all staging memory for as long as it liked."""
    running, keys, layout = impatient
    with begin_descriptor(running.url, keys, layout) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65_536)
        reader = threading.Thread(target=read_at, args=(connection, 20_000, layout.delivery_bytes(3)))
        reader.start()
        assert eventually(lambda: running.storage.requests.active_count == 1)
        assert eventually(lambda: running.storage.requests.active_count == 0)
        assert eventually(lambda: running.storage.staging.free_count == running.storage.staging.slot_count)
        connection.shutdown(socket.SHUT_RDWR)
        reader.join(30)


def test_one_keys_stalled_readers_leave_half_of_staging_to_others(tmp_path: Path) -> None:
    """Sixty connections of one key held every slot; another key's descriptor got nothing."""
    layout = ChunkLayout(4, 16, MIB)
    settings = {"aggregation_bytes": MIB, "window_bytes": 4 * MIB, "staging_bytes": 8 * MIB, "stall_timeout_s": 60.0}
    with LocalStack(tmp_path / "data", dram_bytes=0, **settings) as running, contextlib.ExitStack() as stack:
        running.call(running.storage.objects.create_bucket(OWNER[0], "chunks"))
        keys, chunks = make_chunks(3, layout)
        with running.client("chunks", "http") as client:
            client.put_chunks(keys, list(chunks))
        for _ in range(20):
            stack.enter_context(begin_descriptor(running.url, keys, layout))
        assert eventually(lambda: running.storage.staging.free_count == 4)
        with running.client("chunks", "http", OTHER) as client:
            buffer = np.zeros(layout.delivery_bytes(3), dtype=np.uint8)
            client.fetch(keys, layout, buffer, delivery=Delivery.CHUNK_MAJOR).wait(30)
        assert buffer.tobytes() == chunks.tobytes()
