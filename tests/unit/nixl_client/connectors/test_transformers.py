"""A model on a prefix that is still arriving gives what it gives on the whole prefix, and never runs ahead of it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from descriptors.errors import ChunkUnavailable, ErrorCode
from descriptors.layout import ChunkLayout
from descriptors.notices import Mode
from descriptors.recompute import advise
from nixl_client.connectors.prefills import Prefills
from nixl_client.connectors.transformers import KvShape, WaitingCache, chunks_from_cache
from nixl_client.fetch.layer_fetch import Layer
from nixl_client.lossy import Lossy
from objectcache.calibration.quality import answer_logits
from objectcache.kv_codecs.elements import Element
from objectcache.kv_codecs.encoding import encode
from objectcache.kv_codecs.layer import Codec, LayerShape
from objectcache.kv_codecs.slots import decode_packed
from tests.support.small_llama import (
    CHUNK_TOKENS,
    CHUNKS,
    LAYERS,
    PREFIX,
    PREFIX_TOKENS,
    QUESTION,
    TIMEOUT_S,
    WINDOW,
    filled_cache,
    largest_difference,
    small_deepseek,
    small_gemma,
    small_llama,
    small_mistral,
    tokens,
)


class FakeFetch:
    """A fetch of `chunks` (k, L*S) whose layers are there once `arrive` says so."""

    def __init__(self, chunks, layout, mode=Mode.LAYER_MAJOR, *, as_torch=False):
        self.mode = mode
        self.arrived = [threading.Event() for _ in range(layout.num_layers)]
        self.asked = [threading.Event() for _ in range(layout.num_layers)]
        self.failure = None
        chunk_count = len(chunks)
        by_chunk = chunks.reshape(chunk_count, layout.num_layers, layout.per_layer_chunk_bytes)
        by_layer = np.ascontiguousarray(by_chunk.transpose(1, 0, 2))
        layers = by_layer if mode is Mode.LAYER_MAJOR else by_chunk.transpose(1, 0, 2)
        self.data = [torch.from_numpy(layer) if as_torch else layer for layer in layers]
        self.chunk_count, self.chunk_tokens = chunk_count, layout.chunk_tokens
        self.kept = None

    def arrive(self, *layer_indexes):
        for layer_index in layer_indexes or range(len(self.arrived)):
            self.arrived[layer_index].set()
        return self

    def fail(self, error):
        self.failure = error
        for event in self.arrived:
            event.set()

    def wait_admitted(self, timeout_s=None):
        return self.mode, self.chunk_count

    @property
    def kept_tokens(self):
        if self.kept is None:
            return self.chunk_count * self.chunk_tokens
        return int(self.kept[0].sum())

    def wait_layer(self, layer_index, timeout_s=None):
        self.asked[layer_index].set()
        if not self.arrived[layer_index].wait(timeout_s):
            raise TimeoutError(f"layer {layer_index} is not there after {timeout_s} s")
        if self.failure is not None:
            raise self.failure
        kept = None if self.kept is None else self.kept[layer_index]
        return Layer(layer_index, self.chunk_count, self.data[layer_index], 0.0, kept)


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


def chunks_of(model, prefix=PREFIX):
    return chunks_from_cache(filled_cache(model, prefix), CHUNK_TOKENS)


def waiting_cache(model, shape, chunks=None):
    fetch = FakeFetch(chunks_of(model) if chunks is None else chunks, shape.layout).arrive()
    return WaitingCache(fetch, shape, timeout_s=TIMEOUT_S)


def answer(model, cache, question=QUESTION):
    return model(question, past_key_values=cache).logits


def test_a_chunk_object_is_layer_then_keys_and_values_then_token(model, shape):
    """KV_L2TD is what every other writer and reader of these objects assumes."""
    cache = filled_cache(model)
    chunk = chunks_from_cache(cache, CHUNK_TOKENS)[2]
    start, length = shape.layout.layer_range(3)
    keys_and_values = chunk[start : start + length].view(np.float32).reshape(2, CHUNK_TOKENS, 2, 16)
    for part, states in enumerate((cache.layers[3].keys, cache.layers[3].values)):
        for token in range(CHUNK_TOKENS):
            assert np.array_equal(keys_and_values[part, token], states[0, :, 2 * CHUNK_TOKENS + token].numpy())


@pytest.mark.parametrize("as_torch", [False, True], ids=["numpy", "torch"])
@pytest.mark.parametrize("mode", list(Mode), ids=[mode.value for mode in Mode])
def test_a_fetched_prefix_equals_the_cache_it_came_from(model, shape, mode, as_torch):
    """Rows of a chunk-major payload are strided; buffers are numpy or torch: the bytes are the same."""
    fetch = FakeFetch(chunks_of(model), shape.layout, mode, as_torch=as_torch).arrive()
    fetched, ordinary = WaitingCache(fetch, shape), filled_cache(model)
    assert torch.equal(answer(model, fetched), answer(model, ordinary))
    for ours, theirs in zip(fetched.layers, ordinary.layers, strict=True):
        assert torch.equal(ours.keys, theirs.keys)
        assert torch.equal(ours.values, theirs.values)


def test_bfloat16_survives(model):
    """numpy has no bfloat16: chunks travel as bytes."""
    half = transformers.LlamaForCausalLM(model.config).to(torch.bfloat16).eval()
    shape = KvShape.of(half.config, torch.bfloat16, CHUNK_TOKENS)
    assert torch.equal(answer(half, waiting_cache(half, shape)), answer(half, filled_cache(half)))


def test_tokens_past_the_last_whole_chunk_have_no_object(model, shape):
    """A partial chunk has no key."""
    chunks = chunks_of(model, tokens(PREFIX_TOKENS + CHUNK_TOKENS - 1, seed=1))
    assert chunks.shape == (CHUNKS, shape.layout.chunk_bytes)
    assert chunks.dtype == np.uint8


def test_decoding_goes_on_as_with_an_ordinary_cache(model, shape):
    """After its prefix arrived, a layer is a DynamicLayer."""
    everything = torch.cat([PREFIX, QUESTION], dim=1)
    options = {"max_new_tokens": 6, "do_sample": False}
    ours = model.generate(everything, past_key_values=waiting_cache(model, shape), **options)
    theirs = model.generate(everything, past_key_values=filled_cache(model), **options)
    assert ours.shape[1] == everything.shape[1] + 6
    assert torch.equal(ours, theirs)


def test_lengths_are_known_before_any_layer_arrives(model, shape):
    """Masks and positions are made before layer 0 runs: asking for them must not wait."""
    cache = WaitingCache(FakeFetch(chunks_of(model), shape.layout), shape, timeout_s=TIMEOUT_S)
    assert cache.get_seq_length() == PREFIX_TOKENS
    assert cache.get_mask_sizes(5, LAYERS - 1) == (PREFIX_TOKENS + 5, 0)
    assert cache.waits == (None,) * LAYERS


def test_layers_run_as_they_arrive_and_no_further(model, shape):
    """Held back at layer 2, the model finishes layers 0 and 1 and stays inside layer 2 until it is there."""
    fetch = FakeFetch(chunks_of(model), shape.layout).arrive(0, 1)
    cache = WaitingCache(fetch, shape, timeout_s=TIMEOUT_S)
    finished = [threading.Event() for _ in range(LAYERS)]
    attended = [threading.Event() for _ in range(LAYERS)]
    hooks = []
    for index, layer in enumerate(model.model.layers):
        hooks.append(layer.register_forward_hook(lambda *_, index=index: finished[index].set()))
        hooks.append(layer.self_attn.register_forward_hook(lambda *_, index=index: attended[index].set()))
    logits = []

    def run():
        with torch.inference_mode():
            logits.append(answer(model, cache))

    thread = threading.Thread(target=run)
    thread.start()
    try:
        assert finished[1].wait(TIMEOUT_S)
        assert fetch.asked[2].wait(TIMEOUT_S)
        assert not attended[2].is_set()
        assert [wait is not None for wait in cache.waits] == [True, True, False, False]
        fetch.arrive()
        thread.join(TIMEOUT_S)
        assert finished[3].is_set()
    finally:
        fetch.arrive()
        thread.join(TIMEOUT_S)
        for hook in hooks:
            hook.remove()
    assert torch.equal(logits[0], answer(model, filled_cache(model)))
    times_s = [time_s for wait in cache.waits for time_s in (wait.started_s, wait.ended_s)]
    assert times_s == sorted(times_s)


def test_a_chunk_of_other_tokens_changes_the_logits(model, shape):
    """Two chunks of different documents swapped: wrong bytes must show, or no comparison of logits proves anything."""
    chunks, others = chunks_of(model), chunks_of(model, tokens(PREFIX_TOKENS, seed=3))
    chunks[CHUNKS - 1], others[CHUNKS - 1] = others[CHUNKS - 1].copy(), chunks[CHUNKS - 1].copy()
    right = answer(model, filled_cache(model))
    assert largest_difference(answer(model, waiting_cache(model, shape, chunks)), right) > 1e-3


def test_full_attention_cannot_tell_the_order_of_whole_chunks(model, shape):
    """Cached keys carry their positions, so swapped chunks of one prefix give the same sum in another order. Tests
    that want wrong logits need wrong bytes, or must compare the cache itself.
    """
    chunks = chunks_of(model)
    swapped = waiting_cache(model, shape, chunks[[0, 4, 2, 3, 1, 5]])
    right = filled_cache(model)
    assert largest_difference(answer(model, swapped), answer(model, right)) < 1e-4
    assert not torch.equal(swapped.layers[0].keys, right.layers[0].keys)


def test_a_failed_fetch_ends_the_forward_pass(model, shape):
    """The engine must learn of it, and where to recompute from."""
    fetch = FakeFetch(chunks_of(model), shape.layout)
    fetch.fail(ChunkUnavailable(ErrorCode.CHUNK_CORRUPT, "chunk 3 could not be read", index=3, layer=0))
    with pytest.raises(ChunkUnavailable) as raised:
        answer(model, WaitingCache(fetch, shape, timeout_s=TIMEOUT_S))
    assert raised.value.index == 3


def test_a_layer_that_does_not_come_is_a_timeout_and_may_come_later(model, shape):
    """A deadline, not a hang; the layer is not lost by it."""
    fetch = FakeFetch(chunks_of(model), shape.layout).arrive(0)
    with pytest.raises(TimeoutError, match="layer 1"):
        answer(model, WaitingCache(fetch, shape, timeout_s=0.05))
    fetch.arrive()
    assert torch.equal(answer(model, WaitingCache(fetch, shape, timeout_s=0.05)), answer(model, filled_cache(model)))


def test_batches_are_refused(model, shape):
    """Only batch size 1 is supported, both ways."""
    with pytest.raises(ValueError, match="batch size 2"):
        answer(model, waiting_cache(model, shape), QUESTION.repeat(2, 1))
    with pytest.raises(ValueError, match="batch size 2"):
        chunks_from_cache(filled_cache(model, PREFIX.repeat(2, 1)), CHUNK_TOKENS)


def test_another_models_prefix_is_refused(model):
    """The same bytes in another shape would run and be wrong."""
    other = KvShape(LAYERS, kv_heads=4, head_dim=8, dtype=torch.float32, chunk_tokens=CHUNK_TOKENS)
    with pytest.raises(ValueError, match="kv_heads, head_dim, dtype"):
        answer(model, waiting_cache(model, other))
    longer = KvShape(LAYERS, kv_heads=2, head_dim=16, dtype=torch.float32, chunk_tokens=2 * CHUNK_TOKENS)
    with pytest.raises(ValueError, match="of shape"):
        answer(model, WaitingCache(FakeFetch(chunks_of(model), other.layout).arrive(), longer))


def test_a_prefix_on_its_way_is_not_cropped_but_may_be_dropped(model, shape):
    """Cropping would be forgotten when the layer arrives; a reset cache waits for nothing."""
    cache = waiting_cache(model, shape)
    with pytest.raises(ValueError, match="has not arrived"):
        cache.crop(-1)
    cache.reset()
    assert cache.get_seq_length() == 0
    assert torch.equal(answer(model, cache), answer(model, transformers.DynamicCache()))


def test_caches_that_do_not_hold_every_token_are_refused(model):
    """A sliding window has dropped what a chunk would need; a layer never run has nothing."""
    windowed = small_mistral()
    cache = transformers.DynamicCache(config=windowed.config)
    windowed(PREFIX, past_key_values=cache)
    with pytest.raises(ValueError, match="keeping_cache"):
        chunks_from_cache(cache, CHUNK_TOKENS)
    with pytest.raises(ValueError, match="every token"):
        chunks_from_cache(transformers.DynamicCache(config=model.config), CHUNK_TOKENS)


class TestWindowsAndLatents:
    """Models whose layers keep other things than all keys and values."""

    @pytest.fixture(params=[small_mistral, small_gemma, small_deepseek], ids=lambda make: make.__name__)
    def other(self, request):
        return request.param()

    @pytest.mark.slow
    def test_tokens_are_those_of_the_model_without_a_cache(self, other):
        """Well past the window, and past the chunks: what a prefix gives, decoding goes on from."""
        shape = KvShape.of_model(other, CHUNK_TOKENS)
        kept = chunks_from_cache(filled_cache(other), CHUNK_TOKENS)
        waiting = WaitingCache(FakeFetch(kept, shape.layout).arrive(), shape)
        plain = transformers.DynamicCache(config=other.config)
        right = other(torch.cat([PREFIX, QUESTION], dim=1), past_key_values=plain).logits[:, -QUESTION.shape[1] :]
        found = answer(other, waiting)
        assert largest_difference(found, right) < 1e-4
        for _ in range(WINDOW):
            token = right[:, -1:].argmax(dim=-1)
            assert torch.equal(found[:, -1:].argmax(dim=-1), token)
            right = other(token, past_key_values=plain).logits
            found = other(token, past_key_values=waiting).logits
            assert largest_difference(found, right) < 1e-4

    def test_a_loaded_prefix_gives_the_chunks_that_it_was_made_of(self, other):
        """And those of the tokens behind it, so that each turn of a conversation is stored."""
        shape = KvShape.of_model(other, CHUNK_TOKENS)
        kept = chunks_from_cache(filled_cache(other), CHUNK_TOKENS)
        waiting = WaitingCache(FakeFetch(kept, shape.layout).arrive(), shape)
        answer(other, waiting)
        again = chunks_from_cache(waiting, CHUNK_TOKENS)
        assert again.shape == (CHUNKS + QUESTION.shape[1] // CHUNK_TOKENS, shape.layout.chunk_bytes)
        assert np.array_equal(again[:CHUNKS], kept)

    def test_a_window_is_all_that_its_layer_hands_to_attention(self):
        gemma = small_gemma()
        shape = KvShape.of_model(gemma, CHUNK_TOKENS)
        assert shape.windows == (WINDOW, None, WINDOW, None)
        assert KvShape.of(gemma.config, torch.float32, CHUNK_TOKENS) == shape
        waiting = waiting_cache(gemma, shape)
        assert waiting.get_mask_sizes(5, 0) == (WINDOW - 1 + 5, PREFIX_TOKENS - WINDOW + 1)
        assert waiting.get_mask_sizes(5, 1) == (PREFIX_TOKENS + 5, 0)
        assert waiting.is_sliding == [True, False, True, False]
        answer(gemma, waiting)
        waiting.crop(-2)
        assert waiting.get_seq_length() == PREFIX_TOKENS + QUESTION.shape[1] - 2

    def test_latents_are_one_head_and_their_values_are_the_part_with_positions(self):
        deepseek = small_deepseek()
        shape = KvShape.of_model(deepseek, CHUNK_TOKENS)
        assert (shape.kv_heads, shape.head_dim, shape.value_dim) == (1, 32, 8)
        assert shape.layout.per_layer_chunk_bytes == CHUNK_TOKENS * (32 + 8) * 4
        with pytest.raises(ValueError, match="of_model"):
            KvShape.of(deepseek.config, torch.float32, CHUNK_TOKENS)
        for wanted in (lambda: shape.kv_layout, lambda: shape.accept(Lossy.ADAPTIVE)):
            with pytest.raises(ValueError, match="latents come exactly"):
                wanted()
        assert shape.accept(Lossy.OFF) is None

    def test_a_window_takes_no_codec_that_drops_tokens(self):
        shape = KvShape.of_model(small_gemma(), CHUNK_TOKENS)
        with pytest.raises(ValueError, match="a window counts tokens"):
            shape.accept(Lossy.OFF, dropping=[Codec.KEYDIFF50])

    @pytest.mark.parametrize(
        ("config", "said"),
        [
            (transformers.Qwen3NextConfig(num_hidden_layers=4), "layer 0 caches no keys and values .* LinearAttention"),
            (transformers.Gemma3nTextConfig(), "layer 20 caches no keys and values of its own"),
        ],
        ids=["states", "shared layers"],
    )
    def test_other_models_are_refused_with_the_reason(self, config, said):
        with pytest.raises(ValueError, match=said):
            KvShape.of(config, torch.float32, CHUNK_TOKENS)


class Offering:
    """A client whose server has ten chunks, and offers a rate."""

    def __init__(self, rate_bytes_per_s: float) -> None:
        self._rate_bytes_per_s = rate_bytes_per_s

    def lookup(self, keys, lease_s=0.0):
        return 10

    def advise(self, keys, compute, lease_s=0.0):
        return 10, advise(10, compute, self._rate_bytes_per_s)


def test_prefills_learn_what_is_worth_loading_and_how_long_a_layer_takes(monkeypatch):
    """A token costs a millisecond in two layers of 1,000 bytes a chunk; at first nothing is known."""
    layout = ChunkLayout(2, 16, 1000)
    prefills = Prefills(layout, torch.device("cpu"))
    client: Any = Offering(1e3)
    assert prefills.layer_compute_us(0, 100) == ()
    assert prefills.worth_loading(client, ["k"] * 10, 200) == (10, 10)
    clock = [0.0]
    monkeypatch.setattr("nixl_client.connectors.step_timer.time.perf_counter", lambda: clock[0])
    for tokens_computed in (16, 64, 256, 1024):
        with prefills.timed(0, tokens_computed, lambda: 5.0):
            clock[0] += 5.0 + tokens_computed * 0.001
    with pytest.raises(ZeroDivisionError), prefills.timed(0, 16):
        clock[0] += 1 / 0
    (layer_us,) = prefills.layer_compute_us(100, 100)
    assert layer_us == pytest.approx(50_000, rel=0.05)
    assert prefills.worth_loading(client, ["k"] * 10, 200)[1] == 0  # 2 s a chunk, to save 16 ms of computing
    client = Offering(1e9)
    assert prefills.worth_loading(client, ["k"] * 10, 200) == (10, 10)


class TestDroppedTokens:
    """A whole context as one chunk, of whose tokens each layer has kept others."""

    TOKENS = 160

    @pytest.fixture
    def run_shape(self, model):
        return KvShape.of(model.config, torch.float32, self.TOKENS)

    def coded(self, model, run_shape, codec):
        """The exact chunk, and a fetch that brings it without the dropped tokens."""
        with torch.inference_mode():
            chunk = chunks_from_cache(filled_cache(model, tokens(self.TOKENS, seed=9)), self.TOKENS)
        layer_shape = LayerShape(self.TOKENS, 2 * 16, Element.FLOAT32)
        layers, out, kept = chunk.reshape(LAYERS, -1), np.empty_like(chunk), []
        for layer, place in zip(layers, out.reshape(LAYERS, -1), strict=True):
            data = np.frombuffer(encode(layer, layer_shape, codec), dtype=np.uint8)
            kept.append(decode_packed(data, [(codec.value, 1, len(data))], layer_shape, place))
        fetch = FakeFetch(out, run_shape.layout).arrive()
        fetch.kept = kept
        return chunk, fetch

    @pytest.mark.parametrize("codec", [Codec.STREAMING50, Codec.KEYDIFF50, Codec.KEYDIFF25])
    def test_nobody_attends_to_them_and_positions_count_them(self, model, run_shape, codec):
        """The same as a forward pass whose mask hides them: the mask is made by hand here, layer by layer."""
        chunk, fetch = self.coded(model, run_shape, codec)
        cache = WaitingCache(fetch, run_shape)
        assert cache.get_seq_length() == self.TOKENS
        found = answer(model, cache)
        states = dropped_states(chunk, fetch.kept, run_shape)
        assert largest_difference(found, answer_logits(model, states, QUESTION, self.TOKENS)) < 1e-4
        whole = answer_logits(model, dropped_states(chunk, [np.ones((1, self.TOKENS), bool)] * LAYERS, run_shape),
                              QUESTION, self.TOKENS)  # fmt: skip
        assert largest_difference(found, whole) > 1e-3

    def test_decoding_goes_on_behind_them(self, model, run_shape):
        """Token by token as all at once: lengths, masks and positions fit after the first pass, too."""
        _, fetch = self.coded(model, run_shape, Codec.KEYDIFF50)
        at_once = answer(model, WaitingCache(fetch, run_shape))
        cache = WaitingCache(fetch, run_shape)
        one_by_one = []
        for index in range(QUESTION.shape[1]):
            assert cache.get_seq_length() == self.TOKENS + index
            one_by_one.append(answer(model, cache, QUESTION[:, index : index + 1]))
        assert largest_difference(torch.cat(one_by_one, dim=1), at_once) < 1e-4
        assert cache.get_mask_sizes(1, 0) == (self.TOKENS // 2 + QUESTION.shape[1] + 1, self.TOKENS // 2)
        cache.crop(-2)
        assert cache.get_seq_length() == self.TOKENS + QUESTION.shape[1] - 2
        cache.reset()
        assert cache.get_seq_length() == 0

    def test_other_tokens_than_were_announced_are_refused(self, model, run_shape):
        _, fetch = self.coded(model, run_shape, Codec.KEYDIFF50)
        fetch.kept[2] = np.ones((1, self.TOKENS), dtype=bool)
        with pytest.raises(ValueError, match="layer 2 has other tokens"):
            answer(model, WaitingCache(fetch, run_shape))

    def test_what_is_accepted(self, shape):
        assert shape.accept(Lossy.OFF) is None
        only = shape.accept(Lossy.OFF, dropping=[Codec.KEYDIFF50])
        assert (only.codecs, only.element, only.max_error) == (("keydiff50-1",), "float32", None)
        assert shape.accept(Lossy.ADAPTIVE, dropping=[Codec.KEYDIFF50]).codecs[-2:] == ("k4v2-1", "keydiff50-1")
        with pytest.raises(ValueError, match="take `adaptive`"):
            shape.accept(Lossy.BOUNDED, dropping=[Codec.KEYDIFF50])
        assert shape.accept(Lossy.ADAPTIVE, max_loss=0.01).max_loss == 0.01
        with pytest.raises(ValueError, match="no `max_loss`"):
            shape.accept(Lossy.ADAPTIVE, max_loss=0.01, dropping=[Codec.KEYDIFF50])
        with pytest.raises(ValueError, match="not all of these"):
            shape.accept(Lossy.OFF, dropping=[Codec.KIVI4])


def dropped_states(chunk, kept, shape):
    """The keys and values that are there in each layer, (1, heads, tokens, head dimension)."""
    data = torch.from_numpy(chunk.copy()).view(torch.float32)
    layers = data.view(LAYERS, 2, shape.chunk_tokens, shape.kv_heads, shape.head_dim)
    found = []
    for layer, mask in zip(layers, kept, strict=True):
        there = layer[:, torch.from_numpy(mask[0])].permute(0, 2, 1, 3)
        found.append((there[0][None].clone(), there[1][None].clone()))
    return found
