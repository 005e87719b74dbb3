"""A model on a prefix that a server is still sending."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from descriptors.descriptor import Delivery
from descriptors.prefix_keys import Namespace, chunk_keys
from nixl_client.connectors.prefills import Prefills
from nixl_client.connectors.transformers import KvShape, WaitingCache, chunks_from_cache
from tests.support.small_llama import (
    CHUNK_TOKENS,
    CHUNKS,
    LAYERS,
    QUESTION,
    TIMEOUT_S,
    filled_cache,
    largest_difference,
    small_deepseek,
    small_gemma,
    small_llama,
    tokens,
)
from tests.support.tree import repository


@pytest.fixture(scope="module")
def model():
    return small_llama()


@pytest.fixture(scope="module")
def shape(model):
    return KvShape.of(model.config, torch.float32, CHUNK_TOKENS)


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.mark.slow
@pytest.mark.with_ucx
@pytest.mark.parametrize("way", ["ucx", "http"])
def test_with_a_layer_held_back_at_the_server_the_model_stops_before_it(local, model, shape, way):
    """The whole path: the model finishes layer k-1 on what arrived, layer k's attention waits, and the logits are those
    of the ordinary cache once the server lets go.
    """
    held = 2
    cache = filled_cache(model)
    keys = [f"{index:064x}" for index in range(CHUNKS)]
    buffer = torch.zeros(shape.layout.delivery_bytes(CHUNKS), dtype=torch.uint8)
    finished = [threading.Event() for _ in range(LAYERS)]
    hooks = [
        layer.register_forward_hook(lambda *_, done=done: done.set())
        for layer, done in zip(model.model.layers, finished, strict=True)
    ]
    logits = []
    with local.client("chunks", way) as client:
        client.put_chunks(keys, list(chunks_from_cache(cache, CHUNK_TOKENS)))
        released = local.hold_from_layer(held)
        fetch = client.fetch(keys, shape.layout, buffer, delivery=Delivery.LAYER_MAJOR)

        def run() -> None:
            with torch.inference_mode():
                waiting = WaitingCache(fetch, shape, timeout_s=TIMEOUT_S)
                logits.append(model(QUESTION, past_key_values=waiting).logits)

        thread = threading.Thread(target=run)
        thread.start()
        try:
            assert finished[held - 1].wait(TIMEOUT_S)
            assert not finished[held].wait(0.3)
            assert not logits
        finally:
            released.set()
            thread.join(TIMEOUT_S)
            for hook in hooks:
                hook.remove()
        fetch.wait(TIMEOUT_S)
    assert all(done.is_set() for done in finished)
    assert torch.equal(logits[0], model(QUESTION, past_key_values=cache).logits)


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "make", [small_llama, *(pytest.param(each, marks=SLOW) for each in (small_gemma, small_deepseek))]
)
def test_the_documented_prefill_loads_what_it_stored(local, make):
    """docs/guides/client.md, as it is printed, with full attention, windows and latents."""
    model = make()
    text = (repository() / "docs" / "guides" / "client.md").read_text()
    names: dict[str, Any] = {}
    exec(text.split("## transformers")[1].split("```python\n")[1].split("```")[0], names)
    model.config.name_or_path = "tiny"
    prompt = tokens(41).flatten().tolist()
    wanted = model(torch.tensor([prompt])).logits[0, -1]
    shape = KvShape.of_model(model, 4)
    prefills = Prefills(shape.layout, torch.device("cpu"))
    local.call(local.storage.objects.create_bucket("OWNERKEY", "documented"))
    with local.client("documented", "shm") as client:
        for stored_before, stored_after in ((0, 10), (10, 10)):
            keys = chunk_keys(Namespace("tiny", "torch.float32", 4), prompt, 4)
            assert client.lookup(keys) == stored_before
            logits, cache = names["prefill"](model, shape, client, prompt, prefills)
            assert client.lookup(keys) == stored_after
            assert isinstance(cache, WaitingCache) is (stored_before > 0)
            assert largest_difference(logits, wanted) < 1e-4
