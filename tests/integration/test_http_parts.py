"""A fetch over several http connections: the same bytes, the same errors, and a layer only when all of it is there."""

from __future__ import annotations

import contextlib
import threading
from http.client import HTTPConnection
from typing import Any

import numpy as np
import pytest

from descriptors.descriptor import Delivery, OnMissing
from descriptors.errors import CallerError, ChunkUnavailable, ErrorCode, ObjectCacheError, ServerError
from descriptors.units import MIB
from nixl_client.fetch import http as fetch_http
from nixl_client.session.retries import Retries
from tests.support.chunks import LAYOUT, N, layer_of, make_chunks
from tests.support.servers import LocalStack
from tests.support.waiting import eventually


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Payloads of a few kilobytes are split."""
    monkeypatch.setattr(fetch_http, "SPLIT_BYTES_MIN", 1)


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("delivery", list(Delivery))
@pytest.mark.parametrize("connections", [2, 3, 8, 32])
def test_the_bytes_are_those_of_one_connection(
    local: LocalStack, keys: list[str], connections: int, delivery: Delivery
) -> None:
    chunks = make_chunks(N, LAYOUT)[1]
    buffer = np.zeros(LAYOUT.delivery_bytes(N), np.uint8)
    with local.client("chunks", "http", http_connections=connections) as client:
        fetch = client.fetch(keys, LAYOUT, buffer, delivery=delivery)
        for layer_index in range(LAYOUT.num_layers):
            layer = fetch.wait_layer(layer_index, 30)
            assert np.array_equal(layer.data, layer_of(chunks, LAYOUT, layer_index))
        result = fetch.wait(30)
    assert (result.chunk_count, result.transferred_bytes) == (N, LAYOUT.delivery_bytes(N))
    assert not [thread for thread in threading.enumerate() if thread.name == "objectcache-part"]


@pytest.mark.usefixtures("small_parts")
def test_a_layer_is_there_when_every_part_of_it_is(local: LocalStack, keys: list[str]) -> None:
    released = local.hold_from_layer(3)
    with local.client("chunks", "http", http_connections=3) as client:
        fetch = client.fetch(keys, LAYOUT, np.zeros(LAYOUT.delivery_bytes(N), np.uint8), delivery="layer-major")
        fetch.wait_layer(2, 30)
        with pytest.raises(TimeoutError):
            fetch.wait_layer(3, 0.2)
        released.set()
        fetch.wait(30)


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("missing", range(1, N))
def test_of_a_prefix_the_chunks_before_the_first_gap_come(local: LocalStack, keys: list[str], missing: int) -> None:
    """Wherever in a part the gap is, and though other parts lay their layers out for more chunks."""
    chunks = make_chunks(N, LAYOUT)[1]
    buffer = np.zeros(LAYOUT.delivery_bytes(N), np.uint8)
    with local.client("chunks", "http", http_connections=3) as client:
        client.delete(keys[missing : missing + 2])
        fetch = client.fetch(keys, LAYOUT, buffer, delivery="layer-major", on_missing=OnMissing.PREFIX)
        assert fetch.wait(30).chunk_count == missing
        for layer_index in range(LAYOUT.num_layers):
            expected = layer_of(chunks[:missing], LAYOUT, layer_index)
            assert np.array_equal(fetch.wait_layer(layer_index, 30).data, expected)
    assert eventually(lambda: local.storage.requests.active_count == 0)


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("missing", [0, 2, 3, 8])
def test_a_missing_chunk_is_named_by_its_place_in_the_whole(local: LocalStack, keys: list[str], missing: int) -> None:
    with local.client("chunks", "http", http_connections=3) as client:
        client.delete([keys[missing]])
        fetch = client.fetch(keys, LAYOUT, np.zeros(LAYOUT.delivery_bytes(N), np.uint8), delivery="layer-major")
        with pytest.raises(ChunkUnavailable) as failed:
            fetch.wait(30)
        assert (failed.value.code, failed.value.index) == (ErrorCode.NO_SUCH_CHUNK, missing)
        assert eventually(lambda: fetch.is_settled)
    assert eventually(lambda: local.storage.requests.active_count == 0)


@pytest.mark.usefixtures("small_parts")
def test_damage_in_one_part_ends_all(local: LocalStack, keys: list[str]) -> None:
    released = local.hold_from_layer(3)
    with local.client("chunks", "http", http_connections=3) as client:
        fetch = client.fetch(keys, LAYOUT, np.zeros(LAYOUT.delivery_bytes(N), np.uint8), delivery="layer-major")
        fetch.wait_layer(2, 30)
        local.damage("chunks", keys[5], 70_000)
        released.set()
        with pytest.raises(ObjectCacheError):
            fetch.wait(30)
        fetch.wait_settled(30)
        assert client.lookup(keys) == 5
    assert eventually(lambda: local.storage.requests.active_count == 0)


@pytest.mark.usefixtures("small_parts")
def test_a_cancelled_fetch_ends_every_request(local: LocalStack, keys: list[str]) -> None:
    released = local.hold_from_layer(2)
    with local.client("chunks", "http", http_connections=3) as client:
        buffer = np.zeros(LAYOUT.delivery_bytes(N), np.uint8)
        fetch = client.fetch(keys, LAYOUT, buffer, delivery="layer-major")
        fetch.wait_layer(1, 30)
        assert local.storage.requests.active_count == 3
        fetch.cancel()
        assert fetch.is_settled
        buffer[:] = 7
        released.set()
        assert eventually(lambda: local.storage.requests.active_count == 0)
        assert (buffer == 7).all()
        with pytest.raises(ServerError, match="cancelled"):
            fetch.wait(30)


@pytest.mark.usefixtures("small_parts")
def test_a_part_that_is_refused_ends_the_others(
    local: LocalStack, keys: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline = local.storage.pipeline
    run = pipeline.run

    async def refusing(access_key: str, bucket: str, *, request_id: str, **rest: Any) -> Any:
        if request_id.endswith(".1"):
            raise ServerError(ErrorCode.SLOW_DOWN, "not now", retryable=True)
        return await run(access_key, bucket, request_id=request_id, **rest)

    monkeypatch.setattr(pipeline, "run", refusing)
    local.hold_from_layer(2)
    with local.client("chunks", "http", http_connections=3, retries=Retries(1)) as client:
        fetch = client.fetch(keys, LAYOUT, np.zeros(LAYOUT.delivery_bytes(N), np.uint8), delivery="layer-major")
        with pytest.raises(ServerError, match="not now"):
            fetch.wait(30)
        fetch.wait_settled(30)
    assert eventually(lambda: local.storage.requests.active_count == 0)


def test_a_count_that_cannot_be_is_refused(local: LocalStack) -> None:
    for count in (0, 33):
        with pytest.raises(ValueError, match="http_connections"):
            local.client("chunks", "http", http_connections=count)


def test_a_refused_caller_hears_it(local: LocalStack, keys: list[str]) -> None:
    with local.client("elsewhere", "http", http_connections=2) as client:
        fetch = client.fetch(keys, LAYOUT, np.zeros(LAYOUT.delivery_bytes(N), np.uint8))
        with pytest.raises(CallerError, match="NoSuchBucket"):
            fetch.wait(30)


@pytest.mark.usefixtures("keys")
def test_a_request_that_is_over_is_ended_without_harm_to_the_next_one_on_its_connection(
    local: LocalStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fetch that is cancelled as it ends breaks its connection, which may be another request's by then."""
    connected: list[object] = []
    connect = HTTPConnection.connect

    def counted(connection: HTTPConnection) -> None:
        connected.append(connection)
        connect(connection)

    monkeypatch.setattr(HTTPConnection, "connect", counted)
    with contextlib.closing(local.http()) as http:
        ended = http.stream("GET", "/chunks", {"list-type": "2"})
        ended.read(MIB)
        ended.close()
        next_one = http.stream("GET", "/chunks", {"list-type": "2"})
        ended.abort()
        assert b"ListBucketResult" in next_one.read(MIB)
        next_one.close()
        with contextlib.closing(http.stream("GET", "/chunks", {"list-type": "2"})) as last:
            last.read(MIB)
    assert len(connected) == 1, "each request took the connection of the one before"
