"""Faults of a ChunkSource, through a whole server: what a client is told, and that nothing else suffers."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from descriptors.descriptor import Delivery
from descriptors.errors import ChunkUnavailable, ErrorCode, ObjectCacheError, ServerError
from nixl_client.client import Client
from nixl_client.fetch.fetch_ledger import FetchLedger
from nixl_client.fetch.layer_fetch import LayerFetch
from nixl_client.session.retries import Retries
from nixl_client.session.signed_http import SignedAnswer, SignedHttp
from storage_server.kernel.data import file_threads
from storage_server.planning.source import ChunkSource
from tests.support.chunks import LAYOUT, N, layer_of, make_chunks
from tests.support.requests import request
from tests.support.servers import LocalStack
from tests.support.sources import DamagedSource, FailingSource, FileSource, SlowSource, SourceCall
from tests.support.waiting import eventually, until

KEYS, CHUNKS = make_chunks(N, LAYOUT)
BUCKET = "chunks"
WAIT_S = 30.0
SLOW_DOWN = ServerError(ErrorCode.SLOW_DOWN, "the source is busy", retryable=True, retry_after_s=3)


def served(directory: Path, wrap_source: Callable[[ChunkSource], ChunkSource], **settings: Any) -> LocalStack:
    """A server without ucx and without a DRAM tier, unless `settings` give it one, over a wrapped source."""
    small: dict[str, Any] = {
        "aggregation_bytes": 8192,
        "window_bytes": 32768,
        "staging_bytes": 65536,
        "dram_bytes": 0,
    }
    return LocalStack(directory / "data", wrap_source=wrap_source, **{**small, **settings})


def stored(local: LocalStack) -> None:
    """Store CHUNKS under KEYS."""
    local.call(local.storage.objects.create_bucket("OWNERKEY", BUCKET))
    with local.client(BUCKET, "http") as client:
        client.put_chunks(KEYS, list(CHUNKS))


def fetched(client: Client) -> bytes:
    """All chunks, chunk after chunk."""
    buffer = client.allocate_buffer(LAYOUT.delivery_bytes(N))
    client.fetch(KEYS, LAYOUT, buffer, delivery=Delivery.CHUNK_MAJOR).wait(WAIT_S)
    return buffer.tobytes()


def is_idle(local: LocalStack) -> bool:
    """No request is active, and every slot and pin is given back."""
    storage = local.storage
    held_slots = storage.staging.slot_count - storage.staging.free_count
    return (storage.requests.active_count, held_slots, storage.store.files.pinned_count) == (0, 0, 0)


class Damaged:
    """Wraps the source of a server in a DamagedSource, which is `source` from then on."""

    def wrap(self, source: ChunkSource) -> ChunkSource:
        self.source = DamagedSource(source)
        return self.source


@pytest.mark.parametrize("transport", ["shm", "http"])
@pytest.mark.parametrize("fault", ["truncate", "corrupt"])
def test_a_damaged_chunk_ends_the_delivery_at_its_layer_and_is_not_matched_any_more(
    tmp_path: Path, fault: str, transport: str
) -> None:
    """Layers 0 to 2 are good. Layer 3 begins at byte 60,000 of a chunk; the damage lies in it, in no block before."""
    damaged = Damaged()
    with served(tmp_path, damaged.wrap) as local:
        stored(local)
        getattr(damaged.source, fault)(BUCKET, KEYS[5], 70_000)
        with local.client(BUCKET, transport) as client:
            buffer = client.allocate_buffer(LAYOUT.delivery_bytes(N))
            assert client.lookup(KEYS) == N
            fetch = client.fetch(KEYS, LAYOUT, buffer, delivery=Delivery.LAYER_MAJOR)
            with pytest.raises(ObjectCacheError) as failed:
                fetch.wait(WAIT_S)
            if transport == "shm":
                assert isinstance(failed.value, ChunkUnavailable)
                assert (failed.value.code, failed.value.index, failed.value.layer) == (ErrorCode.CHUNK_CORRUPT, 5, 3)
            for layer_index in range(3):
                assert np.array_equal(fetch.wait_layer(layer_index, WAIT_S).data, layer_of(CHUNKS, LAYOUT, layer_index))
            with pytest.raises(ObjectCacheError):
                fetch.wait_layer(3, WAIT_S)
            assert client.lookup(KEYS) == 5
            damaged.source.repair()
            client.put_chunks(KEYS[5:6], [CHUNKS[5]])
            assert client.lookup(KEYS) == N
            assert fetched(client) == CHUNKS.tobytes()
        assert eventually(lambda: is_idle(local))


def test_layers_before_a_failed_one_count_though_their_notices_come_after_the_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A busy host may run the thread that takes notices later than the one that reads the answer."""
    damaged, has_failed, on_notice, answered = (
        Damaged(),
        threading.Event(),
        FetchLedger.on_notice,
        SignedHttp.request_once,
    )

    def noticed_late(fetch: FetchLedger, notice: Any) -> None:
        has_failed.wait(WAIT_S)
        on_notice(fetch, notice)

    def request_once(http: SignedHttp, *asked: Any, **how: Any) -> SignedAnswer:
        try:
            return answered(http, *asked, **how)
        except ChunkUnavailable:
            has_failed.set()
            raise

    with served(tmp_path, damaged.wrap) as local:
        stored(local)
        damaged.source.corrupt(BUCKET, KEYS[5], 70_000)
        monkeypatch.setattr(FetchLedger, "on_notice", noticed_late)
        monkeypatch.setattr(SignedHttp, "request_once", request_once)
        with local.client(BUCKET, "shm") as client:
            buffer = client.allocate_buffer(LAYOUT.delivery_bytes(N))
            fetch = client.fetch(KEYS, LAYOUT, buffer, delivery=Delivery.LAYER_MAJOR)
            for layer_index in range(3):
                assert np.array_equal(fetch.wait_layer(layer_index, WAIT_S).data, layer_of(CHUNKS, LAYOUT, layer_index))
            with pytest.raises(ChunkUnavailable):
                fetch.wait(WAIT_S)


@pytest.mark.parametrize("fault", ["truncate", "corrupt"])
def test_damage_before_the_first_byte_is_an_answer_that_names_the_chunk(tmp_path: Path, fault: str) -> None:
    """Over http, too: the answer's head waits for the first payload."""
    damaged = Damaged()
    with served(tmp_path, damaged.wrap) as local:
        stored(local)
        getattr(damaged.source, fault)(BUCKET, KEYS[0], 0)
        with local.client(BUCKET, "http") as client, pytest.raises(ChunkUnavailable) as failed:
            fetched(client)
        assert (failed.value.code, failed.value.index, failed.value.layer) == (ErrorCode.CHUNK_CORRUPT, 0, 0)


@pytest.mark.parametrize("transport", ["shm", "http"])
@pytest.mark.parametrize("call", [SourceCall.OPEN_CHUNKS, SourceCall.READ_ROWS])
def test_a_source_that_is_busy_is_503_and_the_next_request_is_served(
    tmp_path: Path, call: SourceCall, transport: str
) -> None:
    with served(tmp_path, lambda source: FailingSource(source, {(call, 0): SLOW_DOWN})) as local:
        stored(local)
        with local.client(BUCKET, transport, retries=Retries(1)) as client:
            with pytest.raises(ServerError) as failed:
                fetched(client)
            assert failed.value.code is ErrorCode.SLOW_DOWN
            assert failed.value.retryable
            assert eventually(lambda: is_idle(local))
            assert fetched(client) == CHUNKS.tobytes()


@pytest.mark.parametrize("transport", ["shm", "http"])
@pytest.mark.parametrize("call", [SourceCall.OPEN_CHUNKS, SourceCall.READ_ROWS])
def test_an_error_that_nobody_expected_is_500_without_its_text(
    tmp_path: Path, call: SourceCall, transport: str
) -> None:
    failures = {(call, 0): RuntimeError("the secret address of the disk")}
    with served(tmp_path, lambda source: FailingSource(source, failures)) as local:
        stored(local)
        with local.client(BUCKET, transport, retries=Retries(1)) as client:
            with pytest.raises(ServerError) as failed:
                fetched(client)
            assert failed.value.code is ErrorCode.INTERNAL_ERROR
            assert "secret" not in str(failed.value)
            assert eventually(lambda: is_idle(local))
            assert fetched(client) == CHUNKS.tobytes()


@pytest.mark.parametrize(("transport", "read_index"), [("shm", 3), ("http", 60)])
def test_a_read_that_fails_after_the_first_layer_is_never_a_success(
    tmp_path: Path, transport: str, read_index: int
) -> None:
    """shm reads a layer at once, http a payload of 8 KiB. Over http the answer has begun, so it is cut short."""
    failures = {(SourceCall.READ_ROWS, read_index): SLOW_DOWN}
    with served(tmp_path, lambda source: FailingSource(source, failures)) as local:
        stored(local)
        with local.client(BUCKET, transport) as client:
            buffer = client.allocate_buffer(LAYOUT.delivery_bytes(N))
            fetch = client.fetch(KEYS, LAYOUT, buffer, delivery=Delivery.LAYER_MAJOR)
            with pytest.raises(ServerError):
                fetch.wait(WAIT_S)
            with pytest.raises(ServerError):
                fetch.wait_layer(LAYOUT.num_layers - 1, WAIT_S)
            assert client.lookup(KEYS) == N  # a busy source says nothing about the chunks
        assert eventually(lambda: is_idle(local))


def test_a_chunk_that_cannot_be_taken_into_memory_is_served_from_the_source(tmp_path: Path) -> None:
    failures = {(SourceCall.READ_EXTENT, 0): OSError(5, "injected")}
    with served(tmp_path, lambda source: FailingSource(source, failures), dram_bytes=64 << 20) as local:
        stored(local)
        with local.client(BUCKET, "http") as client:
            for count in (N - 1, N):
                assert fetched(client) == CHUNKS.tobytes()
                assert eventually(lambda count=count: local.storage.dram.residency.resident_count == count)
            assert fetched(client) == CHUNKS.tobytes()


class Held:
    """Wraps the source of a server in a SlowSource that waits for `released` instead of sleeping."""

    def __init__(self) -> None:
        self.waits = threading.Event()
        self.released = threading.Event()

    def wrap(self, source: ChunkSource) -> ChunkSource:
        self.source = SlowSource(source, block=self._block)
        return self.source

    def _block(self, _: float) -> None:
        self.waits.set()
        assert self.released.wait(WAIT_S)


class HangingFile(Held):
    """Reads of the file of one chunk wait for `released`."""

    def wrap(self, source: ChunkSource) -> ChunkSource:
        self.files = FileSource(source, self._block)
        return self.files

    def begin(self, local: LocalStack, key: str) -> None:
        (extent,) = local.call(at_once(partial(local.storage.store.objects.locations, BUCKET, key)))
        self.files.file_id = extent.file_id


async def at_once(call: Callable[[], Any]) -> Any:
    """What `call` returns on the event loop."""
    return call()


def fetching(client: Client, keys: Sequence[str]) -> LayerFetch:
    """A delivery of these chunks that goes on behind this call."""
    buffer = client.allocate_buffer(LAYOUT.delivery_bytes(len(keys)))
    return client.fetch(keys, LAYOUT, buffer, delivery=Delivery.CHUNK_MAJOR)


def test_a_request_whose_reads_are_slow_does_not_hold_up_another(tmp_path: Path) -> None:
    """A delivery reads a few payloads ahead at most. Here there are more gather threads than that, and more staging
    memory than the window of one delivery.
    """
    held = Held()
    with served(tmp_path, held.wrap, gather_threads=8, staging_bytes=1 << 20) as local:
        stored(local)
        with local.client(BUCKET, "http") as slow, local.client(BUCKET, "http") as quick:
            buffer = slow.allocate_buffer(LAYOUT.delivery_bytes(N))
            held.source.read_s = 1.0
            fetch = slow.fetch(KEYS, LAYOUT, buffer, delivery=Delivery.CHUNK_MAJOR)
            assert held.waits.wait(WAIT_S)
            held.source.read_s = 0.0
            try:
                assert fetched(quick) == CHUNKS.tobytes()
                assert quick.lookup(KEYS) == N
                assert not fetch.is_settled
            finally:
                held.released.set()
            fetch.wait(WAIT_S)
            assert buffer.tobytes() == CHUNKS.tobytes()


def test_a_file_that_hangs_holds_up_no_delivery_of_other_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the two gather threads of a server as it is started. Each chunk has a file here."""
    monkeypatch.setattr(file_threads, "HANGS_S", 0.1)
    hanging = HangingFile()
    with served(tmp_path, hanging.wrap, staging_bytes=1 << 20, packed_bytes_max=1) as local:
        stored(local)
        hanging.begin(local, KEYS[-1])
        with local.client(BUCKET, "http") as client:
            fetches = [fetching(client, KEYS) for _ in range(4)]
            assert hanging.waits.wait(WAIT_S)
            try:
                buffer = client.allocate_buffer(LAYOUT.delivery_bytes(N - 1))
                client.fetch(KEYS[:-1], LAYOUT, buffer, delivery=Delivery.CHUNK_MAJOR).wait(WAIT_S)
                assert buffer.tobytes() == CHUNKS[:-1].tobytes()
            finally:
                hanging.released.set()
            for fetch in fetches:
                with contextlib.suppress(ObjectCacheError):  # some were told to slow down
                    fetch.wait(WAIT_S)
        assert eventually(lambda: is_idle(local))


def test_a_request_whose_open_is_slow_does_not_hold_up_another(tmp_path: Path) -> None:
    waits, released = threading.Event(), threading.Event()

    async def wait(_: float) -> None:
        waits.set()
        await until(released.is_set)

    sources: list[SlowSource] = []

    def wrap(source: ChunkSource) -> ChunkSource:
        sources.append(SlowSource(source, wait=wait))
        return sources[0]

    with served(tmp_path, wrap) as local:
        stored(local)
        with local.client(BUCKET, "http") as slow, local.client(BUCKET, "http") as quick:
            buffer = slow.allocate_buffer(LAYOUT.delivery_bytes(N))
            sources[0].open_s = 1.0
            fetch = slow.fetch(KEYS, LAYOUT, buffer, delivery=Delivery.CHUNK_MAJOR)
            assert waits.wait(WAIT_S)
            sources[0].open_s = 0.0
            try:
                assert fetched(quick) == CHUNKS.tobytes()
                assert request(local.url, "GET", f"/{BUCKET}/{KEYS[0]}").body == CHUNKS[0].tobytes()
            finally:
                released.set()
            fetch.wait(WAIT_S)
            assert buffer.tobytes() == CHUNKS.tobytes()
