"""A cache that is too small for what is read: its home's chunks pass through memory, and are not kept."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import numpy as np
import pytest
from aiohttp import web

from descriptors.descriptor import Delivery, OnMissing
from descriptors.errors import ChunkUnavailable, ErrorCode, ServerError
from descriptors.layout import ChunkLayout
from descriptors.units import MIB
from storage_server.delivery.gather import passing
from storage_server.home.fetch import passing_chunk
from storage_server.home.fetch.fetch import Ways
from storage_server.settings import Eviction, UpstreamSettings
from tests.support.chunks import layer_of, make_chunks
from tests.support.faulty_upstream import Fault, FaultyUpstream, start_of_range
from tests.support.requests import OWNER, s3_client
from tests.support.servers import UCX, LocalStack, is_idle
from tests.support.waiting import eventually

LAYOUT = ChunkLayout(6, 16, 200_000)
N = 80
DISK_BYTES = 64 * MIB
"""About 47 MiB of it are for chunks."""
KEYS, CHUNKS = make_chunks(N, LAYOUT)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStack]:
    """The service upstream, with a prefix of 92 MiB that carries its proofs."""
    with LocalStack(tmp_path_factory.mktemp("home")) as running:
        running.call(running.storage.objects.create_bucket(OWNER[0], "chunks"))
        with (
            LocalStack(tmp_path_factory.mktemp("writer"), upstream=UpstreamSettings(running.url, *OWNER)) as writer,
            writer.client("chunks", "http") as client,
        ):
            client.put_chunks(KEYS, list(CHUNKS))
        yield running


def front(directory: Path, url: str, landing_bytes: int = 1 << 30, dram_bytes: int = 0) -> LocalStack:
    settings = UpstreamSettings(url, *OWNER, landing_bytes=landing_bytes)
    return LocalStack(directory, upstream=settings, disk_bytes=DISK_BYTES, eviction=Eviction.LRU, dram_bytes=dram_bytes)


def wanted(delivery: Delivery, count: int = N) -> np.ndarray:
    """All bytes of a delivery."""
    layers = CHUNKS[:count].reshape(count, LAYOUT.num_layers, -1)
    return (layers.transpose(1, 0, 2) if delivery is Delivery.LAYER_MAJOR else layers).ravel()


@pytest.mark.slow
@pytest.mark.parametrize("landing_bytes", [0, 4 * MIB, 1 << 30])
@pytest.mark.parametrize("transport", ["http", "shm"])
def test_a_prefix_that_is_larger_than_the_disk_may_hold_is_delivered(
    home: LocalStack, tmp_path: Path, transport: str, landing_bytes: int
) -> None:
    with front(tmp_path, home.url, landing_bytes) as running, running.client("chunks", transport) as client:
        assert client.lookup(KEYS) == N
        buffer = client.allocate_buffer(CHUNKS.nbytes)
        for delivery in (Delivery.LAYER_MAJOR, Delivery.CHUNK_MAJOR):
            buffer[:] = 0
            client.fetch(KEYS, LAYOUT, buffer, delivery=delivery).wait(60)
            assert np.array_equal(buffer, wanted(delivery))
        assert eventually(lambda: is_idle(running))
        assert running.storage.upstream.fetches.passed_bytes > CHUNKS.nbytes / 4
        assert running.storage.store.space.used_bytes <= DISK_BYTES


SMALL, SMALL_N = ChunkLayout(6, 16, 70_000), 9
SMALL_KEYS, SMALL_CHUNKS = make_chunks(SMALL_N, SMALL, seed=5)


@pytest.fixture(scope="module")
def small_home(tmp_path_factory: pytest.TempPathFactory, home: LocalStack) -> LocalStack:
    """The same service, with a small prefix as well, of which the last chunk has no proof."""
    settings = UpstreamSettings(home.url, *OWNER)
    with (
        LocalStack(tmp_path_factory.mktemp("writer"), upstream=settings) as writer,
        writer.client("chunks", "http") as client,
    ):
        client.put_chunks(SMALL_KEYS[:-1], list(SMALL_CHUNKS[:-1]))
    s3_client(home.url).put_object(Bucket="chunks", Key=SMALL_KEYS[-1], Body=SMALL_CHUNKS[-1].tobytes())
    return home


@pytest.fixture
def upstream(small_home: LocalStack) -> Iterator[FaultyUpstream]:
    """The way from us to the service."""
    with FaultyUpstream(small_home.url) as running:
        yield running


@pytest.fixture
def full(tmp_path: Path, upstream: FaultyUpstream, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalStack]:
    """Us, with a cache that never has room, and memory for a part of a prefix."""

    async def no_writer(*_: object) -> None:
        return None

    monkeypatch.setattr(Ways, "writer", no_writer)
    monkeypatch.setattr(passing, "WINDOWS_BYTES", 2 * MIB)
    with LocalStack(tmp_path / "full", upstream=UpstreamSettings(upstream.url, *OWNER), ucx=UCX) as running:
        yield running


@pytest.mark.parametrize("transport", ["http", "shm", pytest.param("ucx", marks=pytest.mark.slow)])
@pytest.mark.parametrize("delivery", [Delivery.LAYER_MAJOR, Delivery.CHUNK_MAJOR])
def test_chunks_without_room_pass_over_every_transport(full: LocalStack, transport: str, delivery: Delivery) -> None:
    """The layers are whole, and each byte is read about once, beside the first request for each chunk."""
    with full.client("chunks", transport) as client:
        buffer = client.allocate_buffer(SMALL_CHUNKS.nbytes)
        fetch = client.fetch(SMALL_KEYS, SMALL, buffer, delivery=delivery)
        if delivery is Delivery.LAYER_MAJOR:
            for layer_index in range(SMALL.num_layers):
                layer = fetch.wait_layer(layer_index, 30)
                assert np.array_equal(layer.data, layer_of(SMALL_CHUNKS, SMALL, layer_index))
        fetch.wait(30)
        wanted = SMALL_CHUNKS.reshape(SMALL_N, SMALL.num_layers, -1)
        assert np.array_equal(
            buffer, (wanted.transpose(1, 0, 2) if delivery is Delivery.LAYER_MAJOR else wanted).ravel()
        )
    fetches = full.storage.upstream.fetches
    assert SMALL_CHUNKS.nbytes <= fetches.passed_bytes <= 1.3 * SMALL_CHUNKS.nbytes  # windows begin with a whole block
    assert eventually(lambda: is_idle(full) and fetches.running_count == 0)
    assert full.storage.store.objects.stored("chunks", SMALL_KEYS[0]) is None


@pytest.mark.slow
@pytest.mark.parametrize("windows_bytes", [64 * 1024, 300 * 1024, MIB])
def test_windows_of_any_size_bring_the_same_bytes(
    full: LocalStack, monkeypatch: pytest.MonkeyPatch, windows_bytes: int
) -> None:
    """Also so small ones that a payload holds a part of a layer, and a block comes for two payloads."""
    monkeypatch.setattr(passing, "WINDOWS_BYTES", windows_bytes)
    with full.client("chunks", "http") as client:
        buffer = np.zeros(SMALL_CHUNKS.nbytes, np.uint8)
        client.fetch(SMALL_KEYS, SMALL, buffer, delivery=Delivery.LAYER_MAJOR).wait(30)
        wanted = SMALL_CHUNKS.reshape(SMALL_N, SMALL.num_layers, -1).transpose(1, 0, 2)
        assert np.array_equal(buffer, wanted.ravel())


@pytest.mark.parametrize("fault", [Fault.CORRUPT, Fault.OTHER_RANGE, Fault.OTHER_ETAG, Fault.SHORT])
def test_a_passing_chunk_of_which_other_bytes_come_ends_the_delivery(
    full: LocalStack, upstream: FaultyUpstream, monkeypatch: pytest.MonkeyPatch, fault: Fault
) -> None:
    """No wrong byte is sent: the client hears which chunk it was."""
    monkeypatch.setattr(passing_chunk, "ATTEMPTS_MAX", 1)

    def later_range(request: web.Request) -> Fault | None:
        return fault if request.path.endswith(SMALL_KEYS[3]) and start_of_range(request) else None

    upstream.choose = later_range
    with full.client("chunks", "shm") as client:
        buffer = client.allocate_buffer(SMALL_CHUNKS.nbytes)
        fetch = client.fetch(SMALL_KEYS, SMALL, buffer, delivery=Delivery.LAYER_MAJOR)
        with pytest.raises(ChunkUnavailable) as refused:
            fetch.wait(30)
        assert refused.value.index == 3
        upstream.choose = lambda _: None
        assert eventually(lambda: is_idle(full))
        client.fetch(SMALL_KEYS, SMALL, buffer, delivery=Delivery.CHUNK_MAJOR).wait(30)
        assert np.array_equal(buffer, SMALL_CHUNKS.ravel())


def test_a_busy_home_is_asked_again_for_what_passes(full: LocalStack, upstream: FaultyUpstream) -> None:
    busy: set[str] = set()

    def once(request: web.Request) -> Fault | None:
        name = f"{request.path} {request.headers.get('Range')}"
        is_first = bool(start_of_range(request)) and name not in busy
        busy.add(name)
        return Fault.BUSY if is_first else None

    upstream.choose = once
    with full.client("chunks", "http") as client:
        buffer = np.zeros(SMALL_CHUNKS.nbytes, np.uint8)
        client.fetch(SMALL_KEYS, SMALL, buffer, delivery=Delivery.CHUNK_MAJOR).wait(30)
        assert np.array_equal(buffer, SMALL_CHUNKS.ravel())


def test_a_missing_chunk_ends_a_prefix_that_passes(full: LocalStack) -> None:
    with full.client("chunks", "http") as client:
        buffer = np.zeros(SMALL_CHUNKS.nbytes, np.uint8)
        keys = [*SMALL_KEYS[:4], "f" * 64, *SMALL_KEYS[4:-1]]
        fetch = client.fetch(keys, SMALL, buffer, delivery=Delivery.CHUNK_MAJOR, on_missing=OnMissing.PREFIX)
        fetch.wait(30)
        assert np.array_equal(buffer[: 4 * SMALL.chunk_bytes], SMALL_CHUNKS[:4].ravel())


@pytest.mark.parametrize("nbytes", [10_000, 200_000, 3 * MIB])
def test_a_chunk_is_put_where_the_cache_has_no_room(
    small_home: LocalStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nbytes: int
) -> None:
    """It goes upstream, of whatever size, and no copy is kept."""

    def no_room(*_: object) -> NoReturn:
        raise ServerError(ErrorCode.INSUFFICIENT_STORAGE, "no room", retryable=True)

    with LocalStack(tmp_path, upstream=UpstreamSettings(small_home.url, *OWNER)) as running:
        bound = running.storage.store.bound
        monkeypatch.setattr(bound, "has_room", lambda _: False)
        monkeypatch.setattr(bound, "reserved", no_room)
        key, body = f"{nbytes:064x}", bytes(range(256)) * (nbytes // 256)
        s3_client(running.url).put_object(Bucket="chunks", Key=key, Body=body)
        assert running.storage.store.objects.stored("chunks", key) is None
        assert s3_client(small_home.url).get_object(Bucket="chunks", Key=key)["Body"].read() == body
