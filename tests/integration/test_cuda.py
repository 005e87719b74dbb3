"""A GPU decodes layers, a server writes layers into its memory, and models on it wait for them."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from descriptors.descriptor import Accept, Delivery
from descriptors.layer_forms import LayerForms
from nixl_client.client import Client
from nixl_client.connectors.transformers import KvShape, WaitingCache, chunks_from_cache
from nixl_client.device_tier import DeviceTier
from nixl_client.transports.transport import Transport
from objectcache.adapters.nixl_agent import is_available
from objectcache.kv_codecs import slots
from objectcache.kv_codecs.elements import Element, from_floats
from objectcache.kv_codecs.encoding import encode, encoded_bytes_max
from objectcache.kv_codecs.layer import DROPPING, KIVI, Codec, LayerShape
from objectcache.kv_codecs.slots import Run, WrongChunkError
from storage_server.cache.policies.utility import UtilitySettings
from tests.integration.test_compression import (
    COUNT,
    ENCODED_BYTES,
    FIGURES,
    LAYERS,
    LAYOUT,
    decoded,
    kv_chunks,
    warm,
)
from tests.support.requests import OWNER
from tests.support.servers import UCX, LocalStack
from tests.support.small_llama import CHUNK_TOKENS, CHUNKS, PREFIX, QUESTION, TIMEOUT_S, filled_cache, small_llama

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)
device_slots = pytest.importorskip("objectcache.kv_codecs.device_slots")
pytest.importorskip("objectcache.kv_codecs.device_kernels", reason="Triton is missing, which torch brings for CUDA")

SHAPES = (
    LayerShape(64, 1024, Element.BFLOAT16),
    LayerShape(16, 80, Element.FLOAT16),
    LayerShape(7, 33, Element.FLOAT32),
    LayerShape(256, 64, Element.BFLOAT16),
)
ACCEPT = Accept((Codec.KIVI4.value,), "bfloat16")
needs_nixl = pytest.mark.skipif(not is_available(), reason="NIXL is not installed")


def encoded_places(codec: Codec, shape: LayerShape, count: int, scale: float) -> tuple[np.ndarray, list[Run]]:
    """Encoded layers at the beginning of their places, with an exact one between them: uint8 of shape (count, S)."""
    nbytes = encoded_bytes_max(codec, shape)
    first = count // 2
    runs = [(codec.value, first, nbytes), ("exact", 1, shape.nbytes), (codec.value, count - first - 1, nbytes)]
    places = np.random.default_rng(9).integers(0, 256, (count, shape.nbytes), dtype=np.uint8)
    exact = np.empty(shape.nbytes, dtype=np.uint8)
    for at, place in enumerate(places):
        values = np.random.default_rng(at).standard_normal(2 * shape.half_elements, dtype=np.float32)
        from_floats(values * np.float32(scale), shape.element, exact)
        if at == first:
            place[:] = exact
        else:
            place[:nbytes] = np.frombuffer(encode(exact, shape, codec), dtype=np.uint8)
    return places, runs


def is_taken(codec: Codec, shape: LayerShape) -> bool:
    return encoded_bytes_max(codec, shape) <= shape.nbytes and (codec not in DROPPING or shape.tokens >= 128)


@pytest.mark.parametrize("scale", [3.0, 1e6, 0.0])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("codec", [*KIVI, Codec.FP8, *DROPPING])
def test_the_gpu_decodes_to_the_bytes_of_the_host(codec: Codec, shape: LayerShape, scale: float) -> None:
    if not is_taken(codec, shape):
        return
    places, runs = encoded_places(codec, shape, 9, scale)
    on_device = torch.from_numpy(places.reshape(-1).copy()).cuda()
    on_host = places.reshape(-1).copy()
    kept = device_slots.decode_places(on_device, runs, shape)
    kept_on_host = slots.decode_places(on_host, runs, shape)
    assert np.array_equal(on_device.cpu().numpy(), on_host)
    assert (kept is None) == (kept_on_host is None)
    assert kept is None or np.array_equal(kept, kept_on_host)


@pytest.mark.parametrize("codec", [*KIVI, Codec.FP8, *DROPPING])
def test_the_gpu_finds_every_damaged_byte_and_leaves_the_layer(codec: Codec) -> None:
    shape = SHAPES[3]
    places, runs = encoded_places(codec, shape, 9, 3.0)
    for at in np.random.default_rng(4).integers(0, runs[2][2], 24):
        damaged = places.copy()
        damaged[7, at] ^= 1
        on_device = torch.from_numpy(damaged.reshape(-1)).cuda()
        with pytest.raises(WrongChunkError) as found:
            device_slots.decode_places(on_device, runs, shape)
        assert found.value.index == 7
        assert np.array_equal(on_device.cpu().numpy().reshape(damaged.shape)[5:], damaged[5:])


def test_layers_decoded_in_several_threads() -> None:
    """As a fetch does it: layer by layer in a pool, while others wait."""
    shape = SHAPES[0]
    places, runs = encoded_places(Codec.KIVI4, shape, 33, 3.0)
    wanted = places.reshape(-1).copy()
    slots.decode_places(wanted, runs, shape)
    layers = [torch.from_numpy(places.reshape(-1)).cuda() for _ in range(16)]
    threads = [threading.Thread(target=device_slots.decode_places, args=(each, runs, shape)) for each in layers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert all(np.array_equal(each.cpu().numpy(), wanted) for each in layers)


def loaded(
    client: Client, keys: list[str], delivery: Delivery, accept: Accept | None = None
) -> tuple[np.ndarray, LayerForms | None, Transport]:
    """The chunks, as they come into the GPU's memory."""
    buffer = torch.full((LAYOUT.delivery_bytes(len(keys)) + 512,), 0xEE, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    fetch = client.fetch(keys, LAYOUT, buffer, offset=512, delivery=delivery, accept=accept)
    layers = [fetch.wait_layer(layer, TIMEOUT_S).data.cpu().numpy() for layer in range(LAYERS)]
    result = fetch.wait(TIMEOUT_S)
    assert (buffer[:512] == 0xEE).all(), "bytes before the offset are not the fetch's"
    found = np.stack(layers, axis=1).reshape(len(keys), -1)
    client.release_buffer(buffer)
    return found, result.forms, fetch.transport


@pytest.mark.with_ucx
@needs_nixl
@pytest.mark.parametrize("delivery", [Delivery.LAYER_MAJOR, Delivery.CHUNK_MAJOR])
def test_a_server_writes_into_the_gpu(local: LocalStack, delivery: Delivery) -> None:
    keys, chunks = kv_chunks(COUNT)
    with local.client("chunks", "auto") as client:
        client.put_chunks(keys, list(chunks))
        found, _, transport = loaded(client, keys, delivery)
        assert transport is Transport.UCX
        assert np.array_equal(found, chunks)


@needs_nixl
@pytest.mark.parametrize("delivery", [Delivery.LAYER_MAJOR, Delivery.CHUNK_MAJOR])
def test_encoded_layers_are_decoded_where_they_arrive(tmp_path: Path, delivery: Delivery) -> None:
    settings = UtilitySettings(FIGURES, alpha_s=0.001, memory_bytes_per_s=8e9, home_bytes_per_s=1e8)
    room = COUNT * ENCODED_BYTES + 8_192
    keys, chunks = kv_chunks(COUNT)
    with LocalStack(tmp_path, ucx=UCX, dram_bytes=room, theta_bytes=0, compression=settings) as running:
        running.call(running.storage.objects.create_bucket(OWNER[0], "chunks"))
        with running.client("chunks", "ucx") as client:
            client.put_chunks(keys, list(chunks))
            warm(running, keys)
            found, forms, _ = loaded(client, keys, delivery, ACCEPT)
            assert forms is not None
            assert [(run.codec, run.chunk_count) for run in forms.runs] == [(Codec.KIVI4.value, COUNT)]
            assert np.array_equal(found, np.stack([decoded(chunk, Codec.KIVI4) for chunk in chunks]))


@pytest.mark.parametrize("transport", [pytest.param("ucx", marks=needs_nixl), "http"])
def test_chunks_stay_on_the_gpu(local: LocalStack, transport: str) -> None:
    keys, chunks = kv_chunks(COUNT)
    wanted = chunks.reshape(COUNT, LAYERS, -1).transpose(1, 0, 2)
    with local.client("chunks", transport) as client:
        client.put_chunks(keys, list(chunks))
        tier = DeviceTier(COUNT * LAYOUT.chunk_bytes, LAYOUT, "cuda")
        assert np.array_equal(tier.load(client, keys[:3]).cpu().numpy(), wanted[:, :3])
        assert np.array_equal(tier.load(client, keys).cpu().numpy(), wanted)
        client.delete(keys)
        assert np.array_equal(tier.load(client, keys).cpu().numpy(), wanted)


@pytest.mark.with_ucx
@needs_nixl
def test_a_model_on_the_gpu_waits_for_layers_that_arrive_there(local: LocalStack) -> None:
    with torch.inference_mode():
        model: Any = small_llama().cuda()
        shape = KvShape.of(model.config, torch.float32, CHUNK_TOKENS)
        cache = filled_cache(model, PREFIX.cuda())
        chunks = chunks_from_cache(cache, CHUNK_TOKENS)
        wanted = model(QUESTION.cuda(), past_key_values=cache).logits
        keys = [f"{index:064x}" for index in range(CHUNKS)]
        buffer = torch.zeros(shape.layout.delivery_bytes(CHUNKS), dtype=torch.uint8, device="cuda")
        with local.client("chunks", "ucx") as client:
            client.put_chunks(keys, list(chunks))
            with client.fetch(keys, shape.layout, buffer, delivery=Delivery.LAYER_MAJOR) as fetch:
                waiting = WaitingCache(fetch, shape, timeout_s=TIMEOUT_S)
                logits = model(QUESTION.cuda(), past_key_values=waiting).logits
                fetch.wait(TIMEOUT_S)
        assert torch.equal(logits, wanted)
