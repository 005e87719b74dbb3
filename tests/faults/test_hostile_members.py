"""Somebody at a member's address answers anything: the gateway's calls end, and nobody else is asked in its name."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from pydantic import TypeAdapter

from descriptors.descriptor import Delivery, Descriptor, OnMissing
from descriptors.notices import Mode
from descriptors.peer_auth import PeerSecrets
from descriptors.peer_calls import RESULT_BYTES_MAX
from descriptors.storage_api import SERVER_KEY, DeliveryStart
from gateway.storage_client import RemoteStorage, StorageUnreachableError
from objectcache.adapters.etcd import Etcd, EtcdError

Answer = Callable[[bytes, asyncio.StreamWriter], Awaitable[None]]
DESCRIPTOR = Descriptor(("0" * 64,), 4, 16, 250, Delivery.AUTO, OnMissing.PREFIX, request_id="r" * 16)
START = DeliveryStart("r" * 32, Mode.LAYER_MAJOR, 1, 1_000)


@asynccontextmanager
async def played(answer: Answer, host: str = "127.0.0.1") -> AsyncIterator[str]:
    """A server on loopback that answers the head of each request so; its URL."""

    async def converse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
                if length:
                    await reader.readexactly(int(length[0].partition(b":")[2]))
                await answer(head, writer)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(converse, "127.0.0.1", 0)
    async with server:
        yield f"http://{host}:{server.sockets[0].getsockname()[1]}"


@asynccontextmanager
async def storage_at(url: str) -> AsyncIterator[RemoteStorage]:
    storage = RemoteStorage(url, PeerSecrets(b"s" * 32))
    await storage.start()
    try:
        yield storage
    finally:
        await storage.close()


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_a_redirect_is_no_answer_and_nobody_is_asked_there(status: int) -> None:
    """The call is signed for every member of the cluster."""
    asked: list[bytes] = []

    async def elsewhere(head: bytes, writer: asyncio.StreamWriter) -> None:
        asked.append(head)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")

    async with played(elsewhere) as target:

        async def redirect(head: bytes, writer: asyncio.StreamWriter) -> None:
            writer.write(f"HTTP/1.1 {status} Go\r\nLocation: {target}/\r\nContent-Length: 0\r\n\r\n".encode())

        async with played(redirect) as url, storage_at(url) as storage:
            with pytest.raises(StorageUnreachableError):
                await storage.status.transports(SERVER_KEY)
            etcd = Etcd([url])
            await etcd.start()
            with pytest.raises(EtcdError):
                await etcd.range("kv/")
            await etcd.close()
    assert asked == []


async def test_answers_before_the_answer_have_an_end() -> None:
    """Each is parsed on the event loop of all requests."""
    has_left = asyncio.Event()

    async def endless(head: bytes, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                writer.write(b"HTTP/1.1 100 Continue\r\n\r\n" * 1_000)
                await writer.drain()
        finally:
            has_left.set()

    async with played(endless) as url, storage_at(url) as storage:
        with pytest.raises(StorageUnreachableError):
            await storage.status.transports(SERVER_KEY)
        await has_left.wait()


async def test_no_cookie_of_a_member_is_kept() -> None:
    heads: list[bytes] = []

    async def answer(head: bytes, writer: asyncio.StreamWriter) -> None:
        heads.append(head)
        writer.write(b"HTTP/1.1 500 No\r\nSet-Cookie: a=b\r\nContent-Length: 2\r\n\r\nno")

    async with played(answer, "localhost") as url, storage_at(url) as storage:
        for _ in range(2):
            with pytest.raises(StorageUnreachableError):
                await storage.status.transports(SERVER_KEY)
    assert len(heads) == 2
    assert b"cookie" not in heads[1].lower()


class Sink:
    """Counts the bytes of a delivery."""

    def __init__(self) -> None:
        self.nbytes = 0
        self.is_aborted = False

    async def begin(self, start: DeliveryStart) -> None: ...

    async def write(self, view: memoryview) -> None:
        self.nbytes += len(view)

    def abort(self) -> None:
        self.is_aborted = True


@pytest.mark.parametrize("nbytes", [0, 999, 1_001])
async def test_a_delivery_has_the_bytes_that_its_start_says(nbytes: int) -> None:
    """A body that ends early, and cleanly, would leave the merge waiting for ever."""
    result = base64.urlsafe_b64encode(TypeAdapter(DeliveryStart).dump_json(START)).decode()

    async def answer(head: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(f"HTTP/1.1 200 OK\r\nx-objectcache-result: {result}\r\nContent-Length: {nbytes}\r\n\r\n".encode())
        writer.write(bytes(nbytes))

    sink: Any = Sink()
    async with played(answer) as url, storage_at(url) as storage:
        with pytest.raises(StorageUnreachableError):
            await storage.prefixes.deliver(SERVER_KEY, "bucket", DESCRIPTOR, sink)
    assert sink.is_aborted
    assert sink.nbytes <= START.delivery_bytes


@pytest.mark.parametrize(("nbytes", "is_read"), [(RESULT_BYTES_MAX - 1, True), (RESULT_BYTES_MAX + 1, False)])
async def test_an_answer_about_one_thing_is_bounded(nbytes: int, is_read: bool) -> None:
    """A thousand clients' HEADs at a time would bring 32 GiB."""

    async def answer(head: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        writer.write(f"{nbytes:x}\r\n".encode() + b"1".rjust(nbytes) + b"\r\n0\r\n\r\n")

    async with played(answer) as url, storage_at(url) as storage:
        if is_read:
            assert await storage.prefixes.count_prefix(SERVER_KEY, "bucket", DESCRIPTOR) == 1
        else:
            with pytest.raises(StorageUnreachableError):
                await storage.prefixes.count_prefix(SERVER_KEY, "bucket", DESCRIPTOR)
