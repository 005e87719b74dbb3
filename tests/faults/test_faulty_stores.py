"""Faults of an object store behind a gateway, in one process and over the peer protocol: what a client is told."""

from __future__ import annotations

import asyncio
import http.client
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import FlexibleChecksumError

from descriptors.errors import ErrorCode, ServerError
from descriptors.storage_api import StorageApi
from gateway.app import Gateway
from gateway.s3.credentials import Credential, CredentialBook
from gateway.settings import GatewaySettings
from tests.support.requests import OWNER, Reply, request, s3_client
from tests.support.store_bed import content
from tests.support.stores import (
    READ_PIECE,
    DamagedStorage,
    FailingStorage,
    SlowStorage,
    StorageWrapper,
    embedded_storage,
    listening,
    remote_storage,
)
from tests.support.waiting import until

BUCKET = "bucket"
SMALL_BYTES, LARGE_BYTES = 50_000, 3_000_000
"""A small object is one piece of a body, a large one several."""
WAIT_S = 30.0
CUT = (http.client.IncompleteRead, http.client.RemoteDisconnected, ConnectionError)
"""How a client sees an answer that ends before its length."""
Wrap = Callable[[StorageApi], StorageWrapper]


@dataclass
class Front:
    """A gateway over a wrapped store."""

    url: str
    storage: Any

    async def call(
        self, method: str, key: str, body: bytes = b"", query: str = "", headers: Mapping[str, str] | None = None
    ) -> Reply:
        """One request, in a thread, since the gateway runs on this event loop."""
        target = f"/{BUCKET}/{key}{query}"
        return await asyncio.to_thread(request, self.url, method, target, body=body, headers=headers)


@asynccontextmanager
async def front(directory: Path, way: str, wrap: Wrap) -> AsyncIterator[Front]:
    """The bucket BUCKET with the objects `small` and `large`, behind a gateway: "together" with the storage, or "apart"
    and over the peer protocol.
    """
    async with AsyncExitStack() as stack:
        storage = await stack.enter_async_context(embedded_storage(directory / "data"))
        await storage.objects.create_bucket(OWNER[0], BUCKET)
        wrapped = wrap(storage)
        seen: StorageApi = wrapped
        if way == "apart":
            seen = await stack.enter_async_context(remote_storage(wrapped))
        book = CredentialBook([Credential(*OWNER)])
        plain = Gateway(storage, book, GatewaySettings())
        plain_url = await stack.enter_async_context(listening(plain.server()))
        s3 = s3_client(plain_url)
        for key, nbytes in (("small", SMALL_BYTES), ("large", LARGE_BYTES)):
            await asyncio.to_thread(s3.put_object, Bucket=BUCKET, Key=key, Body=content(nbytes))
        url = await stack.enter_async_context(listening(Gateway(seen, book, GatewaySettings()).server()))
        yield Front(url, wrapped)
        await until(lambda: storage.store.files.pinned_count == 0)  # a client has its answer a little earlier


@pytest.fixture(params=["together", "apart"])
def way(request: pytest.FixtureRequest) -> str:
    return str(request.param)


# truncation


@pytest.mark.parametrize(("key", "nbytes"), [("small", SMALL_BYTES), ("large", LARGE_BYTES)])
async def test_a_truncated_body_is_never_a_complete_answer(tmp_path: Path, way: str, key: str, nbytes: int) -> None:
    """Where nothing was sent yet the answer is an error; else the connection is cut, which the client must see."""
    async with front(tmp_path, way, DamagedStorage) as tried:
        for kept in (nbytes - 1, 1_000):
            tried.storage.truncate(BUCKET, key, kept)
            for headers in ({}, {"range": f"bytes=0-{nbytes - 1}"}):
                with pytest.raises(CUT):
                    await tried.call("GET", key, headers=headers)
        tried.storage.truncate(BUCKET, key, 0)
        reply = await tried.call("GET", key)
        assert (reply.status, reply.code) == (500, "InternalError")
        other = "large" if key == "small" else "small"
        assert len((await tried.call("GET", other)).body) == SMALL_BYTES + LARGE_BYTES - nbytes


# corruption


async def test_bytes_that_changed_on_the_way_are_found_by_the_objects_checksum(tmp_path: Path, way: str) -> None:
    """A gateway does not hash what it sends; the checksum that was stored with the object goes with it."""
    async with front(tmp_path, way, DamagedStorage) as tried:
        for key, nbytes in (("small", SMALL_BYTES), ("large", LARGE_BYTES)):
            tried.storage.corrupt(BUCKET, key, nbytes // 2)

            def read(key: str = key) -> bytes:
                answer = s3_client(tried.url).get_object(Bucket=BUCKET, Key=key)
                data: bytes = answer["Body"].read()
                return data

            with pytest.raises(FlexibleChecksumError):
                await asyncio.to_thread(read)


# failure


@pytest.mark.parametrize(
    ("error", "status", "code", "retry_after"),
    [
        (ServerError(ErrorCode.SLOW_DOWN, "busy", retryable=True, retry_after_s=7), 503, "SlowDown", "7"),
        (ServerError(ErrorCode.INSUFFICIENT_STORAGE, "full", retryable=True), 507, "InsufficientStorage", None),
        (ServerError(ErrorCode.INTERNAL_ERROR, "broken"), 500, "InternalError", None),
        (RuntimeError("the secret address of the disk"), 500, "InternalError", None),
    ],
)
async def test_a_failing_store_is_an_error_of_the_server_and_the_next_request_is_served(
    tmp_path: Path, way: str, error: Exception, status: int, code: str, retry_after: str | None
) -> None:
    """Only SlowDown says when to come again. An error that nobody expected keeps its text to itself."""
    operations = ("objects.put_object", "objects.open_object", "objects.list_objects", "uploads.create_upload")
    failures = {(operation, 0): error for operation in operations}
    async with front(tmp_path, way, lambda storage: FailingStorage(storage, failures)) as tried:
        calls = (
            ("PUT", "new", b"data", ""),
            ("GET", "small", b"", ""),
            ("GET", "", b"", ""),
            ("POST", "new", b"", "?uploads"),
        )
        for method, key, body, query in calls:
            reply = await tried.call(method, key, body, query)
            assert (reply.status, reply.code) == (status, code), (method, query)
            assert reply.headers.get("retry-after") == retry_after
            assert b"secret" not in reply.body
            assert (await tried.call(method, key, body, query)).status == 200, (method, query)
        assert (await tried.call("GET", "new")).body == b"data"


async def test_a_store_that_fails_in_mid_body_cuts_the_answer(tmp_path: Path, way: str) -> None:
    error = ServerError(ErrorCode.INTERNAL_ERROR, "the disk is gone")
    async with front(tmp_path, way, lambda storage: FailingStorage(storage, {(READ_PIECE, 1): error})) as tried:
        with pytest.raises(CUT):
            await tried.call("GET", "large")
        assert (await tried.call("GET", "large")).body == content(LARGE_BYTES)


async def test_a_store_that_fails_at_the_first_piece_is_an_answer(tmp_path: Path, way: str) -> None:
    error = ServerError(ErrorCode.SLOW_DOWN, "busy", retryable=True)
    async with front(tmp_path, way, lambda storage: FailingStorage(storage, {(READ_PIECE, 0): error})) as tried:
        reply = await tried.call("GET", "large")
        assert (reply.status, reply.code) == (503, "SlowDown")
        assert (await tried.call("GET", "large")).body == content(LARGE_BYTES)


# latency


@dataclass
class Hold:
    """Waits for `released` in place of sleeping, and tells by `waits` that it does."""

    waits: asyncio.Event = field(default_factory=asyncio.Event)
    released: asyncio.Event = field(default_factory=asyncio.Event)

    async def wait(self, _: float) -> None:
        self.waits.set()
        await asyncio.wait_for(self.released.wait(), WAIT_S)


@pytest.mark.parametrize("slow", ["call_s", "piece_s"])
async def test_a_slow_request_does_not_hold_up_another(tmp_path: Path, way: str, slow: str) -> None:
    hold = Hold()
    async with front(tmp_path, way, lambda storage: SlowStorage(storage, wait=hold.wait)) as tried:
        setattr(tried.storage, slow, 1.0)
        held = asyncio.create_task(tried.call("GET", "large"))
        await asyncio.wait_for(hold.waits.wait(), WAIT_S)
        setattr(tried.storage, slow, 0.0)
        assert (await tried.call("GET", "small")).body == content(SMALL_BYTES)
        assert (await tried.call("PUT", "new", b"data")).status == 200
        assert not held.done()
        hold.released.set()
        assert (await held).body == content(LARGE_BYTES)
