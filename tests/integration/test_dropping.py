"""A whole context as one entry, of which the DRAM tier keeps a half of the tokens for readers that accept that: the
others get every token.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from descriptors.descriptor import Accept, Delivery
from descriptors.layout import ChunkLayout
from nixl_client.client import Client
from objectcache.kv_codecs.dropping import chosen_places
from objectcache.kv_codecs.elements import Element, from_floats
from objectcache.kv_codecs.layer import Codec, LayerShape
from storage_server.cache.encoding_keeper import EncodingKeeper
from storage_server.cache.policies.utility import CodecFigures, UtilitySettings
from tests.support.servers import LocalStack, ucx_of
from tests.support.waiting import eventually

SHAPE = LayerShape(256, 64, Element.BFLOAT16)
LAYERS, COUNT = 3, 4
LAYOUT = ChunkLayout(LAYERS, 256, SHAPE.nbytes)
KEYS = [f"runs/document-{index}" for index in range(COUNT)]
FIGURES = {Codec.KEYDIFF50: CodecFigures(0.999, 4e9), Codec.KIVI8: CodecFigures(0.9999, 2e9)}
ACCEPT = Accept((Codec.KEYDIFF50.value,), "bfloat16")


@pytest.fixture
def chunks() -> np.ndarray:
    """Contexts of 256 tokens: uint8 of shape (COUNT, L*S)."""
    made = np.empty((COUNT, LAYOUT.chunk_bytes), dtype=np.uint8)
    for index, chunk in enumerate(made):
        values = np.random.default_rng(index).standard_normal(LAYOUT.chunk_bytes // 2, dtype=np.float32)
        from_floats(values, Element.BFLOAT16, chunk)
    return made


@pytest.fixture
def local(request: pytest.FixtureRequest, tmp_path: Path, chunks: np.ndarray) -> Iterator[LocalStack]:
    """A server whose DRAM tier has room for all of them without half of their tokens, and for two exact ones."""
    with LocalStack(
        tmp_path,
        ucx=ucx_of(request),
        dram_bytes=COUNT * LAYOUT.chunk_bytes * 5 // 8,
        theta_bytes=0,
        compression=UtilitySettings(FIGURES, alpha_s=0.001, memory_bytes_per_s=8e9, home_bytes_per_s=1e8),
    ) as running:
        running.call(running.storage.objects.create_bucket("OWNERKEY", "chunks"))
        with running.client("chunks", "http") as client:
            client.put_chunks(KEYS, list(chunks))
        yield running


def warm(local: LocalStack) -> None:
    tier = local.storage.dram
    assert isinstance(tier.keeper, EncodingKeeper)
    with local.client("chunks", "http") as client:
        buffer = np.zeros(LAYOUT.delivery_bytes(COUNT), dtype=np.uint8)

        def is_warm() -> bool:
            client.fetch(KEYS, LAYOUT, buffer, accept=ACCEPT).wait(30)
            return eventually(lambda: tier.residency.form_counts == {Codec.KEYDIFF50.value: COUNT}, 1)

        assert eventually(is_warm), tier.residency.form_counts


Fetched = tuple[np.ndarray, list[np.ndarray | None], int]


def fetched(client: Client, accept: Accept | None, delivery: Delivery) -> Fetched:
    """The chunks as the buffer has them, shape (COUNT, L, S), the tokens of each layer, and the bytes that came."""
    buffer = client.allocate_buffer(LAYOUT.delivery_bytes(COUNT))
    buffer[:] = 0xEE
    fetch = client.fetch(KEYS, LAYOUT, buffer, accept=accept, delivery=delivery)
    layers = [fetch.wait_layer(layer, 30) for layer in range(LAYERS)]
    found = np.stack([np.array(layer.data) for layer in layers], axis=1)
    result = fetch.wait(30)
    kept = [layer.kept for layer in layers]
    assert fetch.kept_tokens == (COUNT * 256 if kept[0] is None else int(kept[0].sum()))
    return found, kept, result.transferred_bytes


@pytest.mark.slow
@pytest.mark.parametrize("delivery", [Delivery.LAYER_MAJOR, Delivery.CHUNK_MAJOR])
def test_a_reader_learns_which_tokens_are_there_in_each_layer(
    local: LocalStack, chunks: np.ndarray, transport: str, delivery: Delivery
) -> None:
    warm(local)
    exact = chunks.reshape(COUNT, LAYERS, 2, 256, -1)
    with local.client("chunks", transport) as client:
        found, kept, nbytes = fetched(client, ACCEPT, delivery)
        assert nbytes < 0.51 * LAYOUT.delivery_bytes(COUNT)
        tokens = found.reshape(COUNT, LAYERS, 2, 256, -1)
        for layer, mask in enumerate(kept):
            assert mask is not None
            assert mask.shape == (COUNT, 256)
            for chunk in range(COUNT):
                places = chosen_places(exact[chunk, layer].reshape(-1), SHAPE, Codec.KEYDIFF50)
                assert np.flatnonzero(mask[chunk]).tolist() == places.tolist()
                assert np.array_equal(tokens[chunk, layer][:, places], exact[chunk, layer][:, places])
                assert not np.delete(tokens[chunk, layer], places, axis=1).any()


@pytest.mark.slow
@pytest.mark.parametrize("codecs", [None, (Codec.KIVI8.value, Codec.KIVI4.value)])
def test_all_others_get_every_token(
    local: LocalStack, chunks: np.ndarray, transport: str, codecs: tuple[str, ...] | None
) -> None:
    """A reader of exact chunks, and one that takes quantized ones, as engines do."""
    warm(local)
    with local.client("chunks", transport) as client:
        found, kept, nbytes = fetched(client, None if codecs is None else Accept(codecs, "bfloat16"), Delivery.AUTO)
        assert np.array_equal(found.reshape(COUNT, -1), chunks)
        assert kept == [None] * LAYERS
        assert nbytes == LAYOUT.delivery_bytes(COUNT)


@pytest.mark.slow
def test_the_error_of_dropped_tokens_is_told_and_bounded(local: LocalStack, chunks: np.ndarray, transport: str) -> None:
    warm(local)
    with local.client("chunks", transport) as client:
        buffer = client.allocate_buffer(LAYOUT.delivery_bytes(COUNT))
        forms = client.fetch(KEYS, LAYOUT, buffer, accept=ACCEPT).wait(30).forms
        assert forms is not None
        assert 0.5 < forms.mean_error <= forms.worst_error < 0.9
        found, kept, _ = fetched(client, Accept(ACCEPT.codecs, "bfloat16", max_error=0.3), Delivery.AUTO)
        assert np.array_equal(found.reshape(COUNT, -1), chunks)
        assert kept == [None] * LAYERS


def test_pieces_of_a_context_keep_all_their_tokens(tmp_path: Path) -> None:
    """Chunks of 64 tokens are no whole contexts: whatever a reader accepts, none of their tokens is dropped."""
    layout = ChunkLayout(LAYERS, 64, LayerShape(64, 64, Element.BFLOAT16).nbytes)
    keys = [f"{index:064x}" for index in range(8)]
    chunks = np.random.default_rng(1).integers(0, 256, (8, layout.chunk_bytes), dtype=np.uint8)
    settings = UtilitySettings(FIGURES, alpha_s=0.001, memory_bytes_per_s=8e9, home_bytes_per_s=1e8)
    with LocalStack(tmp_path, dram_bytes=4 * layout.chunk_bytes, theta_bytes=0, compression=settings) as local:
        local.call(local.storage.objects.create_bucket("OWNERKEY", "chunks"))
        with local.client("chunks", "http") as client:
            client.put_chunks(keys, list(chunks))
            buffer = np.zeros(layout.delivery_bytes(8), dtype=np.uint8)
            for _ in range(4):
                fetch = client.fetch(keys, layout, buffer, accept=ACCEPT)
                assert all(fetch.wait_layer(layer, 30).kept is None for layer in range(LAYERS))
                fetch.wait(30)
        assert set(local.storage.dram.residency.form_counts) <= {"exact"}
