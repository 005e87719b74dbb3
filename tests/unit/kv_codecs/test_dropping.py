"""The laws of codecs that drop tokens: those that are kept are exact, and their places are known and proved."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from objectcache.adapters import native
from objectcache.kv_codecs import dropping, slots
from objectcache.kv_codecs.dropping import SINKS, chosen_places
from objectcache.kv_codecs.elements import Element, from_floats, to_floats
from objectcache.kv_codecs.encoding import HEAD, WrongLayerError, decode, encode, encoded_bytes_max, read_head
from objectcache.kv_codecs.layer import (
    DROPPING,
    KEYDIFF,
    RUN_TOKENS_MIN,
    STREAMING,
    Codec,
    LayerShape,
    kept_count,
    takes,
)
from objectcache.kv_codecs.loss import loss
from objectcache.kv_codecs.slots import WrongChunkError

SHAPE = LayerShape(200, 24, Element.BFLOAT16)
shapes = st.builds(LayerShape, st.integers(RUN_TOKENS_MIN, 400), st.integers(1, 40), st.sampled_from(Element))


def layer_of(shape: LayerShape, seed: int = 1) -> np.ndarray:  # type: ignore[type-arg]
    layer = np.empty(shape.nbytes, dtype=np.uint8)
    numbers = np.random.default_rng(seed).standard_normal(2 * shape.half_elements, dtype=np.float32)
    from_floats(numbers, shape.element, layer)
    return layer


def encoded_with(places: np.ndarray, shape: LayerShape = SHAPE) -> bytes:  # type: ignore[type-arg]
    """A layer whose checksum is right, with these places."""
    data = bytearray(encode(layer_of(shape), shape, Codec.KEYDIFF50))
    data[HEAD.size : HEAD.size + 4 * len(places)] = places.astype("<u4").tobytes()
    checksum = native.crc32c(bytes(data[HEAD.size :]), native.crc32c(bytes(data[: HEAD.size - 4])))
    data[HEAD.size - 4 : HEAD.size] = checksum.to_bytes(4, "little")
    return bytes(data)


@given(shapes, st.sampled_from(DROPPING), st.integers(0, 1 << 30))
def test_kept_tokens_come_back_exactly_and_the_others_as_zeros(shape: LayerShape, codec: Codec, seed: int) -> None:
    layer = layer_of(shape, seed)
    data = encode(layer, shape, codec)
    assert len(data) == encoded_bytes_max(codec, shape)
    assert (read_head(data).codec, encode(layer, shape, codec)) == (codec, data)
    out = np.full(shape.nbytes, 7, dtype=np.uint8)
    assert decode(data, shape, out) is codec
    places = chosen_places(layer, shape, codec)
    assert len(places) == kept_count(codec, shape.tokens)
    before, after = (each.reshape(2, shape.tokens, -1) for each in (layer, out))
    assert np.array_equal(after[:, places], before[:, places])
    assert not np.delete(after, places, axis=1).any()
    assert 0 < loss(layer, out, shape).worst <= 1


@pytest.mark.parametrize("codec", STREAMING)
def test_streaming_keeps_the_first_tokens_and_the_last(codec: Codec) -> None:
    places = chosen_places(layer_of(SHAPE), SHAPE, codec).tolist()
    count = kept_count(codec, 200)
    assert places == [*range(SINKS), *range(200 - count + SINKS, 200)]
    assert count == {Codec.STREAMING50: 100, Codec.STREAMING25: 50}[codec]


@pytest.mark.parametrize("codec", KEYDIFF)
def test_keydiff_keeps_the_tokens_that_are_unlike_the_others(codec: Codec) -> None:
    """Nearly all keys point one way; those that do not are kept, however long they are."""
    numbers = np.random.default_rng(3)
    keys = np.ones((200, 24), dtype=np.float32) + numbers.normal(0, 0.05, (200, 24)).astype(np.float32)
    odd = np.sort(numbers.permutation(200)[:20])
    keys[odd] *= np.float32(-0.01)
    layer = np.empty(SHAPE.nbytes, dtype=np.uint8)
    from_floats(np.concatenate([keys, keys]), SHAPE.element, layer)
    assert set(odd.tolist()) <= set(chosen_places(layer, SHAPE, codec).tolist())


def test_keys_are_looked_at_in_blocks_and_chosen_as_if_they_were_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer of many MiB is not held several times as float64; blocks that do not divide the tokens change nothing."""
    layer = layer_of(SHAPE, 5)
    keys = to_floats(layer[: SHAPE.nbytes // 2], SHAPE.element).reshape(200, 24).astype(np.float64)
    normal = keys / np.linalg.norm(keys, axis=1, keepdims=True)
    wanted = np.sort(np.argsort(normal @ normal.mean(axis=0))[:50]).tolist()
    for elements in (1, 24 * 7, 24 * 199, 1 << 18):
        monkeypatch.setattr(dropping, "BLOCK_ELEMENTS", elements)
        assert chosen_places(layer, SHAPE, Codec.KEYDIFF25).tolist() == wanted


@pytest.mark.parametrize("value", [0.0, np.nan, np.inf, 3e38])
def test_any_keys_have_places(value: float) -> None:
    shape = LayerShape(128, 8, Element.FLOAT32)
    layer = np.full(2 * shape.half_elements, value, dtype=np.float32).view(np.uint8)
    out = np.empty_like(layer)
    for codec in DROPPING:
        decode(encode(layer, shape, codec), shape, out)
        there = to_floats(out, shape.element).reshape(2, 128, 8)[:, chosen_places(layer, shape, codec)]
        assert np.array_equal(there, np.full_like(there, value), equal_nan=True)


@pytest.mark.parametrize(
    "places",
    [
        np.arange(100)[::-1], np.zeros(100), np.r_[np.arange(99), 200], np.r_[np.arange(99), 2**31],
        np.r_[np.arange(99), 2**32 - 1], np.r_[0, np.arange(99)],
    ],
)  # fmt: skip
def test_places_that_cannot_be_are_refused_before_anything_is_written(places: np.ndarray) -> None:  # type: ignore[type-arg]
    out = np.full(SHAPE.nbytes, 7, dtype=np.uint8)
    with pytest.raises(WrongLayerError, match="tokens are in no order"):
        decode(encoded_with(places), SHAPE, out)
    assert np.all(out == 7)
    in_slot = np.zeros(SHAPE.nbytes, dtype=np.uint8)
    data = np.frombuffer(encoded_with(places), dtype=np.uint8)
    in_slot[: len(data)] = data
    with pytest.raises(WrongChunkError):
        slots.decode_places(in_slot, [(Codec.KEYDIFF50.value, 1, len(data))], SHAPE)


@pytest.mark.parametrize("codec", DROPPING)
def test_a_short_chunk_is_no_whole_context_and_is_refused(codec: Codec) -> None:
    shape = LayerShape(RUN_TOKENS_MIN - 1, 4, Element.FLOAT16)
    assert not takes(codec, shape.tokens)
    with pytest.raises(ValueError, match="128 or more"):
        encode(layer_of(shape), shape, codec)
    head = HEAD.pack(b"KV01", codec.number, shape.element.value, 0, shape.tokens, shape.width, 10, 0)
    with pytest.raises(WrongLayerError, match="127 tokens"):
        read_head(head)


@pytest.mark.parametrize("is_packed", [True, False])
def test_a_layer_of_several_chunks_says_which_tokens_are_there(is_packed: bool) -> None:
    """An exact chunk, one at 4 bits and two that dropped tokens, packed and in their places."""
    codecs = [Codec.EXACT, Codec.KIVI4, Codec.KEYDIFF25, Codec.KEYDIFF25]
    exact = [layer_of(SHAPE, seed) for seed in range(4)]
    parts = [layer.tobytes() if codec is Codec.EXACT else encode(layer, SHAPE, codec)
             for layer, codec in zip(exact, codecs, strict=True)]  # fmt: skip
    runs = [("exact", 1, SHAPE.nbytes), ("kivi4-1", 1, len(parts[1])), ("keydiff25-1", 2, len(parts[2]))]
    places = np.zeros(4 * SHAPE.nbytes, dtype=np.uint8)
    if is_packed:
        kept = slots.decode_packed(np.frombuffer(b"".join(parts), dtype=np.uint8), runs, SHAPE, places)
    else:
        for at, part in enumerate(parts):
            places[at * SHAPE.nbytes : at * SHAPE.nbytes + len(part)] = np.frombuffer(part, dtype=np.uint8)
        kept = slots.decode_places(places, runs, SHAPE)
    assert kept is not None
    assert kept.shape == (4, 200)
    assert kept[:2].all()
    for at in (2, 3):
        assert np.flatnonzero(kept[at]).tolist() == chosen_places(exact[at], SHAPE, Codec.KEYDIFF25).tolist()
    assert np.array_equal(places[: SHAPE.nbytes], exact[0])


def test_without_dropped_tokens_nothing_is_said() -> None:
    data = np.frombuffer(encode(layer_of(SHAPE), SHAPE, Codec.KIVI4), dtype=np.uint8)
    out = np.empty(SHAPE.nbytes, dtype=np.uint8)
    assert slots.decode_packed(data, [("kivi4-1", 1, len(data))], SHAPE, out) is None


def test_chunks_with_all_their_layers_say_it_for_each_layer() -> None:
    layers = [layer_of(SHAPE, seed) for seed in range(3)]
    parts = [encode(layer, SHAPE, Codec.KEYDIFF50) for layer in layers]
    places = np.zeros(2 * 3 * SHAPE.nbytes, dtype=np.uint8)
    packed = np.frombuffer(b"".join(parts), dtype=np.uint8)
    places[: len(packed)] = packed
    places[3 * SHAPE.nbytes :] = np.concatenate(layers)
    kept = slots.decode_chunks(places, [("keydiff50-1", 1, len(parts[0])), ("exact", 1, SHAPE.nbytes)], SHAPE, 3)
    assert kept is not None
    assert kept.shape == (2, 3, 200)
    assert kept[1].all()
    for index, layer in enumerate(layers):
        assert np.flatnonzero(kept[0, index]).tolist() == chosen_places(layer, SHAPE, Codec.KEYDIFF50).tolist()


def test_the_bytes_of_each_codec_never_change() -> None:
    """What one release has encoded another must decode, so the layouts are held by their digests."""
    shape = LayerShape(128, 4, Element.BFLOAT16)
    values = (np.arange(2 * 128 * 4, dtype=np.float32).reshape(256, 4) % 61 - 30) / 4
    layer = np.empty(shape.nbytes, dtype=np.uint8)
    from_floats(values, shape.element, layer)
    digests = {codec.value: hashlib.sha256(encode(layer, shape, codec)).hexdigest()[:16] for codec in DROPPING}
    assert digests == GOLDEN


GOLDEN = {
    "streaming50-1": "39d60aab451cfc7c",
    "streaming25-1": "417c9bc311b858fa",
    "keydiff50-1": "e521ad71115dd708",
    "keydiff25-1": "8284f3534499e93a",
}
