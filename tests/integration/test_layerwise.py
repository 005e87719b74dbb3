"""The main path: a descriptor in, layers out, over each transport and in each arrangement of the processes."""

from __future__ import annotations

import asyncio
import base64
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from descriptors.descriptor import Delivery, Descriptor, OnMissing
from descriptors.descriptor_codec import encode_binary, encode_json
from descriptors.errors import CallerError, ChunkUnavailable, ErrorCode
from descriptors.layout import ChunkLayout
from descriptors.notices import Mode
from nixl_client.client import Client, Transport
from nixl_client.session.signed_http import SignedAnswer, SignedHttp
from nixl_client.transports.shared_memory import allocate
from objectcache.adapters.nixl_agent import NixlFailure
from storage_server.delivery.transport.flight import Flight
from tests.support.chunks import LAYOUT, N, layer_of, make_chunks
from tests.support.clusters import cluster
from tests.support.requests import OWNER, request
from tests.support.servers import LocalStack, Stack, stack, ucx_for
from tests.support.tree import repository
from tests.support.waiting import eventually


@pytest.fixture(scope="module", params=["together", "apart", "cluster"])
def servers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Every arrangement of the processes: the last is three storage servers before one home."""
    folder = tmp_path_factory.mktemp(request.param)
    if request.param != "cluster":
        with stack(request.param, folder) as running:
            running.s3().create_bucket(Bucket="chunks")
            yield running
        return
    with (
        LocalStack(folder / "home") as home,
        cluster(folder / "kv", home.url, storage_options=("--ucx",)) as kv,
    ):
        member = kv.members["a"].process
        assert member is not None
        running = Stack(kv.gateways[0].url, folder / "kv" / "a", member.pid)
        running.s3().create_bucket(Bucket="chunks")
        yield running


@pytest.fixture
def stored(servers: Stack) -> tuple[list[str], np.ndarray]:
    keys, chunks = make_chunks(N, LAYOUT)
    with servers.client("chunks", "http") as client:
        client.put_chunks(keys, list(chunks))
    return keys, chunks


@pytest.mark.parametrize("delivery", [Delivery.LAYER_MAJOR, Delivery.CHUNK_MAJOR])
def test_layers_are_those_that_were_put(
    servers: Stack, stored: tuple[list[str], np.ndarray], transport: str, delivery: Delivery
) -> None:
    keys, chunks = stored
    buffer = allocate(LAYOUT.delivery_bytes(N) + 333)
    with servers.client("chunks", transport) as client:
        assert client.lookup([*keys, "not-there"]) == N
        for _ in range(2):
            fetch = client.fetch(keys, LAYOUT, buffer, offset=333, delivery=delivery)
            assert fetch.wait_admitted(30) == (Mode(delivery.value), N)
            for layer_index in range(LAYOUT.num_layers):
                layer = fetch.wait_layer(layer_index, 30)
                assert np.array_equal(layer.data, layer_of(chunks, LAYOUT, layer_index))
            result = fetch.wait(30)
            assert result.transferred_bytes == LAYOUT.delivery_bytes(N)
            buffer[333:] = 0
    assert not buffer[:333].any(), "bytes before the offset are not ours to touch"


@pytest.mark.parametrize("on_missing", OnMissing)
@pytest.mark.parametrize("is_shuffled", [False, True])
def test_chunks_land_at_their_places_and_nothing_lands_between(
    servers: Stack, stored: tuple[list[str], np.ndarray], transport: str, on_missing: OnMissing, is_shuffled: bool
) -> None:
    """As a pool of pages wants it: some side by side, some apart, by page or not, in the order of the prompt."""
    keys, chunks = stored
    step, gaps = LAYOUT.chunk_bytes, [0, 0, 4096, 1, 0, 3 * LAYOUT.chunk_bytes, *[0] * (N - 6)]
    places = [333 + index * step + sum(gaps[: index + 1]) for index in range(N)]
    buffer = allocate(7 + places[-1] + step + 99)
    if is_shuffled:
        places = places[3:] + places[:3][::-1]
    buffer[:] = 0xAA
    expected = buffer.copy()
    with servers.client("chunks", transport) as client:
        fetch = client.fetch(keys, LAYOUT, buffer, offset=7, places=places, on_missing=on_missing)
        assert fetch.wait(30).chunk_count == N
        for place, chunk in zip(places, chunks, strict=True):
            expected[7 + place : 7 + place + step] = chunk
        assert np.array_equal(buffer, expected)
        with pytest.raises(ValueError, match="places"):
            fetch.wait_layer(0, 30)
        buffer[:], expected[:] = 0xAA, 0xAA
        if on_missing is OnMissing.PREFIX:
            wanted = [*keys[:4], "absent", *keys[5:]]
            assert client.fetch(wanted, LAYOUT, buffer, places=places, on_missing=on_missing).wait(30).chunk_count == 4
            for place, chunk in zip(places[:4], chunks[:4], strict=True):
                expected[place : place + step] = chunk
            assert np.array_equal(buffer, expected)
        else:
            with pytest.raises(ChunkUnavailable) as error:
                client.fetch([*keys[:4], "absent", *keys[5:]], LAYOUT, buffer, places=places).wait(30)
            assert error.value.index == 4
        for bad in (places[:-1], [places[1], *places[1:]], [0, step - 1, *(4 * step + place for place in places[2:])]):
            with pytest.raises(ValueError, match="place"):
                client.fetch(keys, LAYOUT, buffer, places=bad)


def test_plain_http_clients_get_the_payload_with_its_length(
    servers: Stack, stored: tuple[list[str], np.ndarray]
) -> None:
    """POST with either codec, and the GET form with the descriptor in a header."""
    keys, chunks = stored
    by_layer = chunks.reshape(N, LAYOUT.num_layers, -1).transpose(1, 0, 2).tobytes()
    descriptor = Descriptor(tuple(keys), 6, 16, 20_000, Delivery.LAYER_MAJOR)
    for body in (encode_json(descriptor), encode_binary(descriptor)):
        reply = servers.request("POST", "/chunks?layerwise", body=body)
        assert (reply.status, reply.headers["content-length"]) == (200, str(len(by_layer)))
        assert reply.body == by_layer
        assert reply.headers["x-amz-objectcache-mode"] == "layer-major"
        assert reply.headers["x-amz-objectcache-chunks"] == str(N)
        assert len(reply.headers["x-amz-objectcache-request-id"]) >= 16
    header = {"x-amz-objectcache-descriptor": base64.urlsafe_b64encode(encode_binary(descriptor)).decode().rstrip("=")}
    assert servers.request("GET", f"/chunks/{keys[0]}", headers=header).body == by_layer
    refused = servers.request("GET", f"/chunks/{keys[0]}", headers={**header, "range": "bytes=0-1"})
    assert (refused.code, refused.named_field) == ("InvalidRequest", "range")
    refused = servers.request("GET", f"/chunks/{keys[1]}", headers=header)
    assert (refused.code, refused.named_field) == ("InvalidDescriptor", "chunk_keys[0]")


def test_on_missing_prefix_serves_what_is_before_the_gap(
    servers: Stack, stored: tuple[list[str], np.ndarray], transport: str
) -> None:
    """k chunks, laid out for k and not for N."""
    keys, chunks = stored
    wanted = [*keys[:4], "absent", *keys[5:]]
    buffer = allocate(LAYOUT.delivery_bytes(N))
    with servers.client("chunks", transport) as client:
        fetch = client.fetch(wanted, LAYOUT, buffer, on_missing=OnMissing.PREFIX, delivery=Delivery.LAYER_MAJOR)
        assert fetch.wait(30).chunk_count == 4
        for layer_index in range(LAYOUT.num_layers):
            expected = layer_of(chunks[:4], LAYOUT, layer_index)
            assert np.array_equal(fetch.wait_layer(layer_index, 30).data, expected)
        with pytest.raises(ChunkUnavailable) as error:
            client.fetch(["absent", *keys], LAYOUT, allocate(2 << 20), on_missing=OnMissing.PREFIX).wait(30)
        assert error.value.index == 0


@pytest.mark.parametrize(("bad", "code"), [("absent", ErrorCode.NO_SUCH_CHUNK), ("odd", ErrorCode.CHUNK_SIZE_MISMATCH)])
def test_a_missing_or_odd_chunk_moves_nothing(
    servers: Stack, stored: tuple[list[str], np.ndarray], transport: str, bad: str, code: ErrorCode
) -> None:
    """404 with the index of the first bad chunk, and not one byte in the buffer."""
    keys, _ = stored
    servers.s3().put_object(Bucket="chunks", Key="odd", Body=b"x" * (LAYOUT.chunk_bytes - 1))
    buffer = allocate(LAYOUT.delivery_bytes(N))
    with servers.client("chunks", transport) as client:
        fetch = client.fetch([*keys[:3], bad, *keys[4:]], LAYOUT, buffer)
        with pytest.raises(ChunkUnavailable) as error:
            fetch.wait_layer(0, 30)
        assert (error.value.code, error.value.index, error.value.field) == (code, 3, "chunk_keys[3]")
        assert error.value.http_status == 404
        fetch.cancel()
    assert not buffer.any()


async def test_async_iterator_yields_layers_in_order_and_leaving_cancels(
    servers: Stack, stored: tuple[list[str], np.ndarray], transport: str
) -> None:
    keys, chunks = stored
    buffer = allocate(LAYOUT.delivery_bytes(N))
    client = await asyncio.to_thread(servers.client, "chunks", transport)
    try:
        seen = []
        async for layer in client.fetch_layers(keys, LAYOUT, buffer, delivery=Delivery.LAYER_MAJOR):
            assert np.array_equal(layer.data, layer_of(chunks, LAYOUT, layer.layer_index))
            seen.append(layer.layer_index)
        assert seen == list(range(LAYOUT.num_layers))
        layers = client.fetch_layers(keys, LAYOUT, buffer)
        assert (await anext(layers)).layer_index == 0
        await layers.aclose()
        assert await client.lookup_async(keys) == N
    finally:
        await asyncio.to_thread(client.close)


def test_the_example_of_the_client_docs_runs(servers: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/guides/client.md, word for word but for the endpoint and the place where the reader computes."""
    example = (repository() / "docs" / "guides" / "client.md").read_text().split("```python\n")[1].split("```")[0]
    for before, after in (("http://127.0.0.1:9000", servers.url), ("kv-cache", "chunks"), (" ... ", " kv.sum()")):
        assert before in example
        example = example.replace(before, after)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", OWNER[0])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", OWNER[1])
    layout = ChunkLayout(32, 16, 65536)
    names = {"tokens": range(70), "chunks": [np.full(layout.chunk_bytes, index, np.uint8) for index in range(4)]}
    exec(example, names)
    assert names["matched"] == 4
    assert names["kv"].shape == (4, 65536)
    assert names["kv"][:, 0].tolist() == [0, 1, 2, 3]


async def test_puts_from_an_event_loop(servers: Stack) -> None:
    keys, chunks = make_chunks(3, LAYOUT, seed=44)
    client = await asyncio.to_thread(servers.client, "chunks", "http")
    await client.put_chunks_async(keys, list(chunks))
    assert await client.lookup_async(keys) == 3
    await asyncio.to_thread(client.close)


def test_torch_buffers_receive_in_place(servers: Stack, stored: tuple[list[str], np.ndarray], transport: str) -> None:
    keys, chunks = stored
    buffer = torch.from_numpy(allocate(LAYOUT.delivery_bytes(N))).view(torch.float32)
    with servers.client("chunks", transport) as client:
        layer = client.fetch(keys, LAYOUT, buffer, delivery=Delivery.CHUNK_MAJOR).wait_layer(2, 30)
        assert torch.equal(layer.data, torch.from_numpy(layer_of(chunks, LAYOUT, 2).copy()))
        assert buffer.view(torch.uint8)[:100].tolist() == chunks[0][:100].tolist()


def test_auto_takes_shared_memory_here_and_http_for_any_other(servers: Stack) -> None:
    """Without an RDMA device http moves more than ucx does. Every fetch says which it is."""
    keys, chunks = make_chunks(2, LAYOUT, seed=45)
    with servers.client("chunks") as client:
        client.put_chunks(keys, list(chunks))
        for buffer, transport in (
            (client.allocate_buffer(LAYOUT.delivery_bytes(2)), Transport.SHM),
            (np.zeros(LAYOUT.delivery_bytes(2), np.uint8), Transport.HTTP),
        ):
            assert client.register_buffer(buffer) is transport
            fetch = client.fetch(keys, LAYOUT, buffer, delivery=Delivery.CHUNK_MAJOR)
            fetch.wait(30)
            assert fetch.transport is transport
            assert np.array_equal(buffer, chunks.ravel())


def test_shm_fills_parts_of_a_buffer_and_no_other_memory(servers: Stack) -> None:
    """A view of an allocation is as good as the whole; what was never allocated for it is refused."""
    keys, chunks = make_chunks(3, LAYOUT, seed=46)
    with servers.client("chunks", "shm") as client:
        client.put_chunks(keys, list(chunks))
        whole = client.allocate_buffer(LAYOUT.delivery_bytes(3) + 10_001)
        part = whole[5_001:-4_000]
        client.fetch(keys, LAYOUT, part, offset=1_000, delivery=Delivery.CHUNK_MAJOR).wait(30)
        assert np.array_equal(part[1_000:], chunks.ravel())
        assert not whole[:6_001].any()
        assert not whole[-4_000:].any()
        with pytest.raises(ValueError, match="allocate_buffer"):
            client.register_buffer(np.zeros(4096, np.uint8))


def test_auto_falls_back_to_http_and_ucx_says_why_not(tmp_path: Path) -> None:
    """A server without UCX declines registration; the client that insisted is told."""
    keys, chunks = make_chunks(2, LAYOUT)
    with LocalStack(tmp_path / "data") as local:
        local.call(local.storage.objects.create_bucket("OWNERKEY", "chunks"))
        buffer = np.zeros(LAYOUT.delivery_bytes(2), np.uint8)
        with local.client("chunks") as client:
            client.put_chunks(keys, list(chunks))
            assert client.register_buffer(buffer) is Transport.HTTP
            client.fetch(keys, LAYOUT, buffer, delivery=Delivery.CHUNK_MAJOR).wait(30)
            assert np.array_equal(buffer, chunks.ravel())
        with local.client("chunks", "ucx") as client, pytest.raises(CallerError, match="NotImplemented"):
            client.register_buffer(buffer)


@pytest.mark.slow
def test_theta_chooses_the_mode_when_the_caller_does_not(tmp_path: Path, transport: str) -> None:
    keys, chunks = make_chunks(4, LAYOUT)
    with LocalStack(tmp_path / "data", ucx=ucx_for(transport), theta_bytes=LAYOUT.delivery_bytes(3)) as local:
        local.call(local.storage.objects.create_bucket("OWNERKEY", "chunks"))
        buffer = allocate(LAYOUT.delivery_bytes(4))
        with local.client("chunks", transport) as client:
            client.put_chunks(keys, list(chunks))
            assert client.fetch(keys[:2], LAYOUT, buffer).wait(30).mode is Mode.CHUNK_MAJOR
            assert client.fetch(keys[:3], LAYOUT, buffer).wait(30).mode is Mode.LAYER_MAJOR


@pytest.mark.slow
def test_a_layer_held_back_is_not_announced_and_the_one_before_is(local: LocalStack, transport: str) -> None:
    """With layer 3 held back, layers 0 to 2 arrive and layer 3 does not, until it is let go."""
    keys, chunks = make_chunks(N, LAYOUT)
    released = local.hold_from_layer(3)
    buffer = allocate(LAYOUT.delivery_bytes(N))
    with local.client("chunks", transport) as client:
        client.put_chunks(keys, list(chunks))
        fetch = client.fetch(keys, LAYOUT, buffer, delivery=Delivery.LAYER_MAJOR)
        for layer_index in range(3):
            assert np.array_equal(fetch.wait_layer(layer_index, 30).data, layer_of(chunks, LAYOUT, layer_index))
        with pytest.raises(TimeoutError):
            fetch.wait_layer(3, 0.3)
        assert not buffer[LAYOUT.layer_offset(3, N) :].any()
        released.set()
        assert np.array_equal(fetch.wait_layer(5, 30).data, layer_of(chunks, LAYOUT, 5))
        fetch.wait(30)


@pytest.mark.slow
@pytest.mark.with_ucx
def test_ucx_answers_with_an_empty_body_and_nixls_own_count(local: LocalStack, monkeypatch: pytest.MonkeyPatch) -> None:
    """The payload moves by one-sided writes; the HTTP answer carries no byte of it."""
    keys, chunks = make_chunks(N, LAYOUT)
    buffer = allocate(LAYOUT.delivery_bytes(N))
    counted: list[int] = []
    ended, send = Flight.ended, SignedHttp.request_once

    def counting(flight: Flight, nbytes: int, failure: NixlFailure | None) -> None:
        counted.append(nbytes)
        ended(flight, nbytes, failure)

    replies: list[SignedAnswer] = []

    def recording(http: SignedHttp, *arguments: Any, **named: Any) -> SignedAnswer:
        answer = send(http, *arguments, **named)
        if "layerwise" in str((arguments, named)):
            replies.append(answer)
        return answer

    with local.client("chunks", "ucx") as client:
        client.put_chunks(keys, list(chunks))
        monkeypatch.setattr(Flight, "ended", counting)
        monkeypatch.setattr(SignedHttp, "request_once", recording)
        client.fetch(keys, LAYOUT, buffer, delivery=Delivery.LAYER_MAJOR).wait(30)
    assert sum(counted) == LAYOUT.delivery_bytes(N)
    (answer,) = replies
    assert answer.body == b""
    assert answer.headers["content-length"] == "0"
    assert answer.headers["x-amz-rdma-reply"] == "200"
    assert answer.headers["x-amz-rdma-bytes-transferred"] == str(LAYOUT.delivery_bytes(N))
    assert np.array_equal(buffer, chunks.reshape(N, 6, -1).transpose(1, 0, 2).ravel())


@pytest.mark.slow
def test_many_fetches_at_once_each_get_their_own_bytes(servers: Stack, transport: str) -> None:
    layout = ChunkLayout(4, 16, 70_000)
    with servers.client("chunks", transport) as client:
        sets = [make_chunks(5, layout, seed=100 + i) for i in range(12)]
        for keys, chunks in sets:
            client.put_chunks(keys, list(chunks))
        buffers = [allocate(layout.delivery_bytes(5)) for _ in sets]
        fetches = [
            client.fetch(keys, layout, buffer, delivery=Delivery.CHUNK_MAJOR)
            for (keys, _), buffer in zip(sets, buffers, strict=True)
        ]
        for fetch, buffer, (_, chunks) in zip(fetches, buffers, sets, strict=True):
            fetch.wait(60)
            assert np.array_equal(buffer, chunks.ravel())


def test_lookup_leases_and_refuses_nonsense(servers: Stack, stored: tuple[list[str], np.ndarray]) -> None:
    keys, _ = stored
    with servers.client("chunks", "http") as client:
        assert client.lookup(keys, lease_s=5) == N
        assert client.lookup(["absent", *keys]) == 0
        assert client.lookup([]) == 0
    for body, field in [
        ({"chunk_keys": []}, "chunk_keys"),
        ({"chunk_keys": ["a"], "lease_s": -1}, "lease_s"),
        ({"chunk_keys": ["a"], "lease_s": 1e9}, "lease_s"),
        ({"chunk_keys": [""]}, "chunk_keys[0]"),
        ({"chunk_keys": ["a"], "more": 1}, "more"),
        ({}, "chunk_keys"),
    ]:
        reply = servers.request("POST", "/chunks?lookup", body=json.dumps(body).encode())
        assert (reply.status, reply.code, reply.named_field) == (400, "InvalidArgument", field)


@pytest.mark.slow
def test_overwriting_or_deleting_in_mid_read_never_mixes_versions(local: LocalStack, transport: str) -> None:
    """Planning pins the extents: what was there at planning is what arrives."""
    keys, old = make_chunks(N, LAYOUT)
    _, new = make_chunks(N, LAYOUT, seed=2)
    released = local.hold_from_layer(2)
    buffer = allocate(LAYOUT.delivery_bytes(N))
    files = local.storage.store.files
    with local.client("chunks", transport) as client:
        client.put_chunks(keys, list(old))
        fetch = client.fetch(keys, LAYOUT, buffer, delivery=Delivery.LAYER_MAJOR)
        fetch.wait_layer(1, 30)
        client.put_chunks(keys[:5], list(new[:5]))
        for key in keys[5:]:
            request(local.url, "DELETE", f"/chunks/{key}")
        released.set()
        fetch.wait(30)
        for layer_index in range(LAYOUT.num_layers):
            expected = layer_of(old, LAYOUT, layer_index)
            assert np.array_equal(fetch.wait_layer(layer_index, 30).data, expected)
        assert client.fetch(keys[:5], LAYOUT, buffer, delivery=Delivery.CHUNK_MAJOR).wait(30).chunk_count == 5
        assert np.array_equal(buffer[: new[:5].size], new[:5].ravel())
        assert client.lookup(keys) == 5
    assert eventually(lambda: files.pinned_count == 0)


def test_client_is_safe_from_many_threads(servers: Stack, stored: tuple[list[str], np.ndarray]) -> None:
    keys, chunks = stored
    failures: list[BaseException] = []
    with servers.client("chunks", "ucx") as client:

        def work() -> None:
            try:
                buffer = allocate(LAYOUT.delivery_bytes(N))
                client.fetch(keys, LAYOUT, buffer, delivery=Delivery.CHUNK_MAJOR).wait(60)
                assert np.array_equal(buffer, chunks.ravel())
                client.release_buffer(buffer)
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=work) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(90)
    assert not failures


def test_bad_buffers_are_refused_before_anything_is_sent(servers: Stack) -> None:
    with servers.client("chunks", "http") as client:
        with pytest.raises(ValueError, match="do not fit"):
            client.fetch(["a"], LAYOUT, np.zeros(10, np.uint8))
        with pytest.raises(ValueError, match="writable"):
            client.fetch(["a"], LAYOUT, bytes(LAYOUT.chunk_bytes))
        with pytest.raises(ValueError, match="contiguous"):
            client.fetch(["a"], LAYOUT, np.zeros((200_000, 4), np.uint8)[:, 0])
    with pytest.raises(ValueError, match="endpoint"):
        Client("ftp://x", "b", access_key=OWNER[0], secret_key=OWNER[1])
