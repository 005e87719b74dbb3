"""The LMCache connector's store against a real server, over each transport."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from nixl_client.connectors.lmcache.chunks import ChunkSize
from nixl_client.connectors.lmcache.options import LMCacheOptions
from nixl_client.connectors.lmcache.store import ChunkKind, ChunkStore, Loaded
from nixl_client.fetch.layer_fetch import LayerFetch
from nixl_client.lossy import Lossy
from nixl_client.transports.http import UnansweredError
from nixl_client.transports.transport import Transport
from objectcache.kv_codecs.elements import Element, from_floats
from objectcache.kv_codecs.encoding import decode, encode
from objectcache.kv_codecs.layer import Codec, LayerShape
from storage_server.cache.policies.utility import CodecFigures, UtilitySettings
from storage_server.planning.losses import LossTable, MeasuredLoss, ModelLosses
from tests.support.requests import OWNER
from tests.support.servers import LocalStack, ucx_for
from tests.support.waiting import LIMIT_S, eventually

CHUNK_BYTES = 30_000
KEYS = [f"lmcache/m/0/{index:x}" for index in range(7)]


def content(count: int = len(KEYS), nbytes: int = CHUNK_BYTES) -> list[memoryview]:
    """Chunks that all differ."""
    made = np.random.default_rng(5).integers(0, 256, (len(KEYS), CHUNK_BYTES), np.uint8)
    return [memoryview(chunk[:nbytes]) for chunk in made[:count]]


def targets(count: int = len(KEYS)) -> list[memoryview]:
    """Buffers for them."""
    return [memoryview(bytearray(CHUNK_BYTES)) for _ in range(count)]


def equal(left: Sequence[memoryview], right: Sequence[memoryview]) -> bool:
    """Whether the bytes are the same."""
    return [bytes(each) for each in left] == [bytes(each) for each in right]


@pytest.fixture
def options(local: LocalStack, transport: str, monkeypatch: pytest.MonkeyPatch) -> LMCacheOptions:
    """The options of a store with room for three chunks in a request."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", OWNER[0])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", OWNER[1])
    return LMCacheOptions(local.url, "chunks", Transport(transport), staging_bytes=3 * CHUNK_BYTES, retry_s=0.0)


@pytest.fixture
def chunks(options: LMCacheOptions) -> Iterator[ChunkStore]:
    store = ChunkStore(options)
    yield store
    store.close()


@pytest.mark.slow
def test_batch_is_fetched_in_as_few_requests_as_fit(chunks: ChunkStore) -> None:
    assert chunks.put(KEYS, content())
    assert chunks.lookup([*KEYS, "lmcache/m/0/none"]) == len(KEYS)
    buffers = targets()
    chunks.warm()
    assert chunks.load(KEYS, buffers) == Loaded(len(KEYS))
    assert equal(buffers, content())
    assert chunks.counters.totals["fetches"] == 3


@pytest.mark.parametrize("transport", ["http"])
def test_lookups_say_what_is_worth_loading_where_the_costs_of_computing_are_known(
    chunks: ChunkStore, options: LMCacheOptions
) -> None:
    """The server of these tests paces nothing: everything is, for a model that takes any time to compute."""
    chunks.put(KEYS, content())
    chunk = ChunkSize(16, CHUNK_BYTES)
    costly = ChunkStore(replace(options, prefill_token_us=100.0))
    assert costly.lookup(KEYS, chunk) == len(KEYS)
    assert costly.counters.totals["advised_against_chunks"] == 0
    costly.close()


LOSS = MeasuredLoss(0.004, 0.005, 0.0, 0.0)
CALIBRATION = ModelLosses(
    "m", 3, 64, Element.BFLOAT16, chunk_tokens=64, forms={(Codec.KIVI4,): LOSS}, texts="", text_count=2, release="1"
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lossy", "max_loss", "comes_encoded"),
    [
        (Lossy.BOUNDED, math.inf, True),
        (Lossy.OFF, math.inf, False),
        (Lossy.ADAPTIVE, LOSS.kl_high, True),
        (Lossy.ADAPTIVE, LOSS.kl_high * 0.99, False),
    ],
)
def test_chunks_of_keys_and_values_come_encoded_to_those_who_accept_it(
    tmp_path: Path, transport: str, lossy: Lossy, max_loss: float, comes_encoded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole chunk is one layer to the server; what is not KV, or of another format, comes exactly. Memory has room
    for four encoded chunks, and for one exact one.
    """
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", OWNER[0])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", OWNER[1])
    kind = ChunkKind((2, 3, 32, 64), "bfloat16", is_kv=True)
    shape = LayerShape(96, 64, Element.BFLOAT16)
    exact = np.empty((4, shape.nbytes), dtype=np.uint8)
    for number, chunk in enumerate(exact):
        from_floats(np.random.default_rng(number).standard_normal(2 * 96 * 64), Element.BFLOAT16, chunk)
    settings = UtilitySettings({Codec.KIVI4: CodecFigures(0.99, 2e9)}, alpha_s=0.001, home_bytes_per_s=1e8)
    with LocalStack(
        tmp_path, ucx=ucx_for(transport), dram_bytes=4 * 8192 + 4096, theta_bytes=0, compression=settings,
        losses=LossTable((CALIBRATION,)),
    ) as running:  # fmt: skip
        running.call(running.storage.objects.create_bucket(OWNER[0], "chunks"))
        made = ChunkStore(
            LMCacheOptions(
                running.url, "chunks", Transport(transport), lossy=lossy, max_loss=max_loss, content_class="chat"
            )
        )
        assert made.put(KEYS[:4], [memoryview(chunk) for chunk in exact])
        buffers = [memoryview(bytearray(shape.nbytes)) for _ in range(4)]

        def is_encoded() -> bool:
            before = made.counters.totals.get("lossy_chunks", 0)
            assert made.load(KEYS[:4], buffers, kind) == Loaded(4)
            return made.counters.totals.get("lossy_chunks", 0) == before + 4

        assert eventually(is_encoded, LIMIT_S if comes_encoded else 1) is comes_encoded
        if comes_encoded:
            back = np.empty(shape.nbytes, dtype=np.uint8)
            for chunk, buffer in zip(exact, buffers, strict=True):
                decode(encode(chunk, shape, Codec.KIVI4), shape, back)
                assert bytes(buffer) == back.tobytes()
            assert 0 < made.counters.totals["lossy_error"] / made.counters.totals["lossy_chunks"] < 0.12
        for other in (None, replace(kind, is_kv=False), replace(kind, dtype="float8_e4m3fn")):
            assert made.load(KEYS[:4], buffers, other) == Loaded(4)
            assert equal(buffers, [memoryview(chunk) for chunk in exact])
        made.close()


@pytest.mark.slow
def test_missing_chunk_ends_the_load_and_is_named(chunks: ChunkStore) -> None:
    chunks.put(KEYS, content())
    assert chunks.delete([KEYS[4]]) == 1
    buffers = targets()
    assert chunks.load(KEYS, buffers) == Loaded(4, KEYS[4])
    assert equal(buffers[:4], content(4))
    assert chunks.load(KEYS[4:], targets(3)) == Loaded(0, KEYS[4])


@pytest.mark.slow
def test_chunk_of_another_size_ends_the_load_and_is_named(chunks: ChunkStore) -> None:
    chunks.put(KEYS[:1], content(1))
    chunks.put(KEYS[1:2], content(1, 1000))
    chunks.put(KEYS[2:], content()[2:])
    assert chunks.load(KEYS, targets()) == Loaded(1, KEYS[1])


def test_larger_chunks_than_the_buffer_come_one_by_one(chunks: ChunkStore, options: LMCacheOptions) -> None:
    chunks.put(KEYS[:2], content(2))
    small = ChunkStore(LMCacheOptions(options.endpoint, "chunks", Transport.HTTP, staging_bytes=1))
    buffers = targets(2)
    assert small.load(KEYS[:2], buffers) == Loaded(2)
    assert equal(buffers, content(2))
    small.close()


def test_part_of_a_chunk_is_told_from_a_chunk_cut_short(chunks: ChunkStore) -> None:
    """By what its writer said of it, since its size alone does not say."""
    whole, part = content(1)[0], content(1, 3000)[0]
    assert chunks.put_partial(KEYS[0], part, 1)
    chunks.put(KEYS[1:2], [part])
    chunks.put(KEYS[2:3], [whole])
    buffer = targets(1)[0]
    assert chunks.load_partial(KEYS[0], buffer, 3000) == 1
    assert equal([buffer[:3000]], [part])
    assert [chunks.load_partial(key, targets(1)[0], 3000) for key in KEYS[1:4]] == [0, 0, 0]
    assert chunks.load_partial(KEYS[0], targets(1)[0], 1000) == 0


def test_only_what_is_missing_is_written(chunks: ChunkStore) -> None:
    chunks.put(KEYS[:5], content(5))
    chunks.put(KEYS, content())
    assert chunks.counters.totals["stored_chunks"] == len(KEYS)
    assert chunks.counters.totals["stored_already_chunks"] == 5


def test_server_that_is_gone_is_a_miss_and_is_left_alone_for_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", OWNER[0])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", OWNER[1])
    store = ChunkStore(LMCacheOptions("http://127.0.0.1:9", "chunks", retry_s=60.0))
    assert store.lookup(KEYS) == 0
    assert store.load(KEYS, targets()) == Loaded(0)
    assert store.counters.totals["failures"] == 1
    assert not store.put(KEYS, content())
    assert not store.put(KEYS, content())
    assert store.counters.totals["failures"] == 2
    store.discard(KEYS[0])
    assert not store.is_answering()
    store.close()


@pytest.mark.slow
@pytest.mark.parametrize("index", [0, 1, 2, 5])
def test_damaged_chunk_ends_the_load_and_is_named(local: LocalStack, chunks: ChunkStore, index: int) -> None:
    """Over http, too, where the answer just breaks off, and nothing says that the server is not gone."""
    chunks.put(KEYS, content())
    local.damage("chunks", KEYS[index], 20_000)
    buffers = targets()
    assert chunks.load(KEYS, buffers) == Loaded(index, KEYS[index])
    assert equal(buffers[:index], content(index))
    assert "failures" not in chunks.counters.totals


@pytest.mark.slow
def test_buffers_a_server_may_still_write_into_are_given_up(
    chunks: ChunkStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a deadline the load is a miss at once; its buffer comes back when the fetch is over."""

    def wait(*_: object) -> object:
        raise TimeoutError("the deadline")

    chunks.put(KEYS[:2], content(2))
    buffers = targets(2)
    with monkeypatch.context() as patched:
        patched.setattr(LayerFetch, "wait", wait)
        for _ in range(3):
            assert chunks.load(KEYS[:2], buffers) == Loaded(0)
    assert equal(buffers, targets(2))
    assert chunks.load(KEYS[:2], buffers) == Loaded(2)
    assert equal(buffers, content(2))


@pytest.mark.slow
def test_sound_chunks_are_not_named_damaged_where_a_connection_broke(
    chunks: ChunkStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is named is deleted: that an answer broke off once says nothing of the chunk."""
    chunks.put(KEYS[:3], content(3))
    broken = iter([True])
    wait = LayerFetch.wait

    def break_off_once(fetch: LayerFetch, timeout_s: float | None = None) -> object:
        found = wait(fetch, timeout_s)
        if next(broken, False):
            raise UnansweredError("the connection broke")
        return found

    monkeypatch.setattr(LayerFetch, "wait", break_off_once)
    buffers = targets(3)
    assert chunks.load(KEYS[:3], buffers) == Loaded(3)
    assert equal(buffers, content(3))
