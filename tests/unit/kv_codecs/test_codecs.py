"""The laws of codecs: sizes, errors, and what becomes of garbage."""

from __future__ import annotations

import hashlib
import random

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from objectcache.adapters import native
from objectcache.kv_codecs.elements import Element, from_floats, to_floats
from objectcache.kv_codecs.encoding import (
    HEAD,
    WrongLayerError,
    decode,
    decode_many,
    encode,
    encoded_bytes_max,
    read_head,
)
from objectcache.kv_codecs.fp8 import ALL
from objectcache.kv_codecs.kivi import kivi_decode, kivi_encode
from objectcache.kv_codecs.layer import KIVI, Codec, LayerShape, group_of
from objectcache.kv_codecs.loss import loss
from objectcache.kv_codecs.packing import pack, packed_bytes, unpack

WHOLE = [codec for codec in Codec if not codec.drops_tokens]
"""The codecs that have every token; tests/unit/kv_codecs/test_dropping.py has the others."""
SHAPES = [
    LayerShape(16, 128, Element.BFLOAT16),
    LayerShape(64, 96, Element.FLOAT16),
    LayerShape(7, 5, Element.FLOAT32),
    LayerShape(1, 1, Element.BFLOAT16),
    LayerShape(48, 33, Element.BFLOAT16),
]


def layer_of(shape: LayerShape, seed: int = 1, spread: float = 3.0) -> np.ndarray:  # type: ignore[type-arg]
    """A layer whose channels have sizes of their own, as keys have."""
    numbers = np.random.default_rng(seed)
    sizes = np.exp(numbers.normal(0, 1, shape.width))
    values = (numbers.normal(0, spread, (2 * shape.tokens, shape.width)) * sizes).astype(np.float32)
    layer = np.empty(shape.nbytes, dtype=np.uint8)
    from_floats(values, shape.element, layer)
    return layer


def decoded(data: bytes, shape: LayerShape) -> np.ndarray:  # type: ignore[type-arg]
    out = np.empty(shape.nbytes, dtype=np.uint8)
    decode(data, shape, out)
    return out


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("codec", WHOLE)
def test_a_layer_has_the_size_that_was_foretold_and_the_same_bytes_each_time(shape: LayerShape, codec: Codec) -> None:
    layer = layer_of(shape)
    first, again = encode(layer, shape, codec), encode(layer, shape, codec)
    assert first == again
    assert read_head(first).codec is codec
    if codec is Codec.LOSSLESS:
        assert len(first) <= encoded_bytes_max(codec, shape)
    else:
        assert len(first) == encoded_bytes_max(codec, shape)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("codec", [Codec.EXACT, Codec.LOSSLESS])
def test_exact_codecs_give_every_byte_back(shape: LayerShape, codec: Codec) -> None:
    for seed in range(3):
        layer = layer_of(shape, seed)
        assert np.array_equal(decoded(encode(layer, shape, codec), shape), layer)
    garbage = np.frombuffer(random.Random(3).randbytes(shape.nbytes), dtype=np.uint8)  # NaN, infinities
    assert np.array_equal(decoded(encode(garbage, shape, codec), shape), garbage)


@pytest.mark.parametrize("shape", SHAPES)
def test_more_bits_are_nearer(shape: LayerShape) -> None:
    layer = layer_of(shape)
    errors = [loss(layer, decoded(encode(layer, shape, codec), shape), shape).worst for codec in KIVI]
    assert errors == sorted(errors)
    assert errors[0] < 0.02


@pytest.mark.parametrize("codec", KIVI)
@pytest.mark.parametrize("ranks", [2, 3])
def test_the_parts_of_ranks_come_back_as_the_whole_does(codec: Codec, ranks: int) -> None:
    """So what a calibration of the whole model says holds for them (storage_server.planning.losses)."""
    whole = LayerShape(64, 192, Element.BFLOAT16)
    part = LayerShape(64, 192 // ranks, Element.BFLOAT16)
    layer = layer_of(whole).view(np.uint16).reshape(2, whole.tokens, ranks, part.width)
    found = np.empty_like(layer)
    for rank in range(ranks):
        mine = np.ascontiguousarray(layer[:, :, rank]).view(np.uint8).reshape(-1)
        found[:, :, rank] = decoded(encode(mine, part, codec), part).view(np.uint16).reshape(2, 64, part.width)
    wanted = decoded(encode(layer.view(np.uint8).reshape(-1), whole, codec), whole)
    assert np.array_equal(found.view(np.uint8).reshape(-1), wanted)


@pytest.mark.parametrize("codec", KIVI)
def test_layers_one_after_the_other_come_back_as_each_does(codec: Codec) -> None:
    """As LMCache has them: all keys, then all values."""
    shape = LayerShape(64, 96, Element.BFLOAT16)
    layers = [layer_of(shape, seed) for seed in range(3)]
    joined = LayerShape(3 * shape.tokens, shape.width, shape.element)

    def as_one(rows: list[np.ndarray]) -> np.ndarray:  # type: ignore[type-arg]
        return np.stack([row.reshape(2, -1) for row in rows], axis=1).reshape(-1)

    wanted = as_one([decoded(encode(layer, shape, codec), shape) for layer in layers])
    assert np.array_equal(decoded(encode(as_one(layers), joined, codec), joined), wanted)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("codec", "keys", "values"),
    [
        (Codec.K8V4, Codec.KIVI8, Codec.KIVI4),
        (Codec.K4V3, Codec.KIVI4, Codec.KIVI3),
        (Codec.K4V2, Codec.KIVI4, Codec.KIVI2),
    ],
)
def test_keys_and_values_of_other_bits_are_those_of_each(
    shape: LayerShape, codec: Codec, keys: Codec, values: Codec
) -> None:
    """Only the bits differ: keys and values come back as the codecs that have these bits for both give them."""
    layer, half = layer_of(shape), shape.nbytes // 2
    found, of_keys, of_values = (decoded(encode(layer, shape, each), shape) for each in (codec, keys, values))
    assert np.array_equal(found[:half], of_keys[:half])
    assert np.array_equal(found[half:], of_values[half:])


def test_the_ratios_count_scales_and_zeros() -> None:
    """A group of 32 elements of 4 bits takes 16 bytes, and 4 for its scale and zero: 3.2 times less than bfloat16."""
    shape = LayerShape(64, 1024, Element.BFLOAT16)
    ratios = {codec: shape.nbytes / encoded_bytes_max(codec, shape) for codec in Codec}
    assert ratios[Codec.KIVI4] == pytest.approx(3.2, rel=0.001)
    assert ratios[Codec.KIVI8] == pytest.approx(64 / 36, rel=0.001)
    assert ratios[Codec.K8V4] == pytest.approx(64 / 28, rel=0.001)
    assert ratios[Codec.K4V2] == pytest.approx(4, rel=0.001)
    assert ratios[Codec.KIVI2] == pytest.approx(64 / 12, rel=0.001)
    assert ratios[Codec.FP8] == pytest.approx(2.0, rel=0.001)


@given(
    st.integers(1, 70), st.integers(1, 70), st.sampled_from(KIVI), st.sampled_from(Element), st.integers(0, 1 << 30),
    st.floats(1e-6, 1e4),
)  # fmt: skip
def test_c_and_numpy_decode_to_the_same_bits(
    tokens: int, width: int, codec: Codec, element: Element, seed: int, size: float
) -> None:
    shape = LayerShape(tokens, width, element)
    numbers = np.random.default_rng(seed)
    keys, values = (numbers.normal(0, size, (tokens, width)).astype(np.float32) for _ in range(2))
    payload = kivi_encode(keys, values, codec.key_bits, codec.value_bits)
    out = np.empty(shape.nbytes, dtype=np.uint8)
    groups = group_of(tokens), group_of(width)
    native.kivi_decode(payload, tokens, width, *groups, codec.key_bits, codec.value_bits, element.value, out)
    wanted = np.empty(shape.nbytes, dtype=np.uint8)
    for at, half in enumerate(kivi_decode(payload, shape, codec.key_bits, codec.value_bits)):
        from_floats(half, element, wanted[at * shape.nbytes // 2 : (at + 1) * shape.nbytes // 2])
    assert np.array_equal(out, wanted)


@given(
    st.integers(1, 70), st.integers(1, 70), st.sampled_from(KIVI), st.sampled_from(Element), st.integers(0, 1 << 30),
    st.floats(1e-6, 1e6), st.sampled_from([0.0, 1.0, np.nan, np.inf, -np.inf]),
)  # fmt: skip
@example(17, 6, Codec.KIVI8, Element.FLOAT16, 0, 1e-6, 0.0)
def test_c_and_numpy_encode_to_the_same_bytes(
    tokens: int, width: int, codec: Codec, element: Element, seed: int, size: float, odd: float
) -> None:
    """Also elements that are no numbers, or too large for float16."""
    shape = LayerShape(tokens, width, element)
    numbers = np.random.default_rng(seed)
    values = numbers.normal(0, size, (2, tokens, width)).astype(np.float32)
    values[numbers.random(values.shape) < 0.05] = odd
    layer = np.empty(shape.nbytes, dtype=np.uint8)
    from_floats(values, element, layer)
    keys, vals = to_floats(layer, element).reshape(2, tokens, width)
    with np.errstate(all="ignore"):
        wanted = kivi_encode(keys, vals, codec.key_bits, codec.value_bits).tobytes()
    assert encode(layer, shape, codec)[HEAD.size :] == wanted


@pytest.mark.parametrize("codec", [Codec.KIVI4, Codec.K8V4, Codec.KIVI3, Codec.K4V2, Codec.FP8])
@pytest.mark.parametrize("is_in_place", [False, True])
def test_many_layers_are_decoded_in_one_call(codec: Codec, is_in_place: bool) -> None:
    """As one by one; a damaged one is named, and it and those behind it are not written."""
    shape, count = LayerShape(16, 48, Element.BFLOAT16), 5
    layers = [layer_of(shape, seed) for seed in range(count)]
    encoded = [encode(layer, shape, codec) for layer in layers]
    wanted = [decoded(data, shape) for data in encoded]
    out = np.full(count * shape.nbytes, 0xEE, dtype=np.uint8)
    starts = np.arange(count) * shape.nbytes
    source, places = np.frombuffer(b"".join(encoded), dtype=np.uint8), np.arange(count) * len(encoded[0])
    if is_in_place:
        for start, data in zip(starts, encoded, strict=True):
            out[start : start + len(data)] = np.frombuffer(data, dtype=np.uint8)
        source, places = out, starts
    rows = np.stack([places, starts], axis=1)
    if not is_in_place:
        damaged = source.copy()
        damaged[3 * len(encoded[0]) + 60] ^= 2
        assert decode_many(damaged, rows, codec, shape, out) == 3
        assert (out[starts[3] :] == 0xEE).all()
    assert decode_many(source, rows, codec, shape, out, is_in_place=is_in_place) == -1
    assert np.array_equal(out.reshape(count, -1), np.stack(wanted))


def test_a_layer_of_another_codec_counts_as_damaged_among_many() -> None:
    shape = LayerShape(16, 48, Element.BFLOAT16)
    data = np.frombuffer(encode(layer_of(shape), shape, Codec.KIVI8), dtype=np.uint8)
    out = np.zeros(shape.nbytes, dtype=np.uint8)
    for codec in (Codec.KIVI4, Codec.FP8):
        assert decode_many(data, np.zeros((1, 2), dtype=np.int64), codec, shape, out) == 0
    assert not out.any()


@pytest.mark.parametrize("place", [(-1, 0), (0, -1), (1 << 40, 0), (0, 1 << 40), (1, 0), (0, 1)])
def test_places_outside_of_their_memory_are_refused(place: tuple[int, int]) -> None:
    shape = LayerShape(16, 48, Element.BFLOAT16)
    data = np.frombuffer(encode(layer_of(shape), shape, Codec.KIVI4), dtype=np.uint8)
    with pytest.raises(ValueError, match="outside"):
        decode_many(data, np.array([place]), Codec.KIVI4, shape, np.zeros(shape.nbytes, dtype=np.uint8))


@given(st.integers(1, 40), st.integers(1, 40), st.sampled_from(KIVI), st.integers(0, 1 << 30), st.floats(1e-3, 1e3))
def test_no_element_is_further_off_than_half_a_step(
    tokens: int, width: int, codec: Codec, seed: int, size: float
) -> None:
    """A step of the group, and the rounding of scale and zero to float16."""
    numbers = np.random.default_rng(seed)
    keys, values = (numbers.normal(0, size, (tokens, width)).astype(np.float32) for _ in range(2))
    shape = LayerShape(tokens, width, Element.FLOAT32)
    bits = codec.key_bits, codec.value_bits
    got_keys, got_values = kivi_decode(kivi_encode(keys, values, *bits), shape, *bits)
    levels = (1 << codec.key_bits) - 1
    step, span = group_of(tokens), group_of(width)
    grouped = keys.reshape(-1, step, width)
    reach = np.repeat(np.ptp(grouped, axis=1) / levels, step, axis=0).reshape(tokens, width)
    slack = 0.002 * np.abs(keys).max() + levels * 6e-8  # scales near 0 are subnormal in float16
    assert np.all(np.abs(got_keys - keys) <= 0.5 * reach + slack)
    by_token, levels = values.reshape(tokens, -1, span), (1 << codec.value_bits) - 1
    reach = np.repeat(np.ptp(by_token, axis=2) / levels, span, axis=1).reshape(tokens, width)
    slack = 0.002 * np.abs(values).max() + levels * 6e-8
    assert np.all(np.abs(got_values - values) <= 0.5 * reach + slack)


def test_equal_elements_come_back_as_float16_has_them() -> None:
    shape = LayerShape(32, 32, Element.FLOAT32)
    values = np.full((64, 32), 0.1, dtype=np.float32)
    layer = values.view(np.uint8).reshape(-1)
    for codec in KIVI:
        got = decoded(encode(layer, shape, codec), shape).view("<f4")
        assert np.all(got == np.float32(np.float16(0.1)))


@pytest.mark.parametrize("codec", [codec for codec in WHOLE if codec.is_lossy])
def test_infinities_and_nan_are_clipped_and_never_spread(codec: Codec) -> None:
    """One bad element must not make a group, or a head, of NaN."""
    shape = LayerShape(32, 64, Element.FLOAT32)
    values = np.ones((64, 64), dtype=np.float32)
    values[0, 0], values[5, 5], values[40, 3] = np.nan, np.inf, -np.inf
    got = decoded(encode(values.view(np.uint8).reshape(-1), shape, codec), shape).view("<f4")
    assert np.all(np.isfinite(got))
    assert got.reshape(64, 64)[20, 60] == pytest.approx(1.0, rel=0.01) or codec is Codec.FP8


def test_every_byte_of_fp8_is_the_value_that_the_specification_gives() -> None:
    """OCP 8-bit floating point, E4M3: the least 2^-9, the greatest 448, NaN at 0x7f."""
    assert (ALL[1], ALL[8], ALL[0x7E]) == (2.0**-9, 2.0**-6, 448.0)
    assert np.isnan(ALL[0x7F])
    assert ALL[0x38] == 1.0
    assert ALL[0x80 + 0x38] == -1.0
    assert np.all(np.diff(ALL[:0x7F]) > 0)


@pytest.mark.parametrize("bits", [8, 4, 3, 2])
@pytest.mark.parametrize("count", [1, 2, 3, 7, 8, 9, 64, 65])
def test_numbers_come_out_of_their_bits(bits: int, count: int) -> None:
    numbers = np.random.default_rng(count).integers(0, 1 << bits, count).astype(np.uint8)
    data = pack(numbers, bits)
    assert len(data) == packed_bytes(count, bits)
    assert np.array_equal(unpack(data, count, bits), numbers)


@pytest.mark.parametrize("element", Element)
def test_elements_come_back_and_are_rounded_to_the_nearest(element: Element) -> None:
    layer = layer_of(LayerShape(4, 4, element))
    again = np.empty_like(layer)
    from_floats(to_floats(layer, element), element, again)
    assert np.array_equal(layer, again)
    out = np.empty(2 * element.nbytes, dtype=np.uint8)
    from_floats(np.array([1 + 2**-9, 1 + 3 * 2**-8], dtype=np.float32), Element.BFLOAT16, np.empty(4, dtype=np.uint8))
    from_floats(np.array([np.nan, 1.0], dtype=np.float32), element, out)
    assert np.isnan(to_floats(out, element)[0])


@pytest.mark.parametrize("codec", Codec)
def test_a_changed_or_cut_layer_is_never_decoded(codec: Codec) -> None:
    shape = LayerShape(128, 8, Element.BFLOAT16) if codec.drops_tokens else SHAPES[0]
    data = encode(layer_of(shape), shape, codec)
    before = np.full(shape.nbytes, 7, dtype=np.uint8)
    chooser = random.Random(5)
    for _ in range(200):
        changed = bytearray(data)
        kind = chooser.randrange(3)
        if kind == 0:
            changed[chooser.randrange(len(changed))] ^= 1 << chooser.randrange(8)
        elif kind == 1:
            del changed[chooser.randrange(len(changed)) :]
        else:
            changed += bytes(chooser.randrange(1, 9))
        out = before.copy()
        with pytest.raises(WrongLayerError):
            decode(bytes(changed), shape, out)
        assert np.array_equal(out, before)


@given(st.binary(max_size=200))
def test_garbage_is_refused_and_raises_nothing_else(data: bytes) -> None:
    shape = LayerShape(2, 2, Element.BFLOAT16)
    for each in (data, b"KV01" + data, HEAD.pack(b"KV01", 4, 2, 0, 2, 2, len(data), 0) + data):
        with pytest.raises(WrongLayerError):
            decode(each, shape, np.empty(shape.nbytes, dtype=np.uint8))


def test_planes_that_unpack_to_more_than_a_layer_are_refused() -> None:
    """A bomb: a few bytes that would be gigabytes."""
    import zlib

    shape = LayerShape(2, 2, Element.BFLOAT16)
    payload = b"\1" + zlib.compress(bytes(1 << 20))
    assert len(payload) > 1 + shape.nbytes
    small = b"\1" + zlib.compress(bytes(64))[:16]
    head = HEAD.pack(b"KV01", 1, 2, 0, 2, 2, len(small), 0)[: HEAD.size - 4]
    data = head + native.crc32c(small, native.crc32c(head)).to_bytes(4, "little") + small
    with pytest.raises(WrongLayerError, match="planes"):
        decode(data, shape, np.empty(shape.nbytes, dtype=np.uint8))


def test_a_layer_of_another_shape_is_refused() -> None:
    shape = SHAPES[0]
    data = encode(layer_of(shape), shape, Codec.KIVI4)
    for other in (LayerShape(16, 64, Element.BFLOAT16), LayerShape(16, 128, Element.FLOAT16)):
        with pytest.raises(WrongLayerError, match="layer of"):
            decode(data, other, np.empty(other.nbytes, dtype=np.uint8))


def test_the_bytes_of_each_codec_never_change() -> None:
    """What one release has encoded another must decode, so the layouts are held by their digests."""
    shape = LayerShape(32, 64, Element.BFLOAT16)
    values = (np.arange(64 * 64, dtype=np.float32).reshape(64, 64) % 97 - 48) / 16
    layer = np.empty(shape.nbytes, dtype=np.uint8)
    from_floats(values, shape.element, layer)
    digests = {
        codec.value: hashlib.sha256(encode(layer, shape, codec)).hexdigest()[:16]
        for codec in WHOLE
        if codec is not Codec.LOSSLESS  # its bytes are the library's
    }
    assert digests == GOLDEN


GOLDEN = {
    "k8v4-1": "fbf82be3d5151aeb",
    "k4v3-1": "7777879a641ca8aa",
    "k4v2-1": "66f1d84520eeb0fb",
    "exact": "66443d75e6c487f7",
    "fp8-1": "11c75e3eb8f0987f",
    "kivi8-1": "2b4ab695ae063ff6",
    "kivi4-1": "90175620e1ab1974",
    "kivi3-1": "637172462cb3e2ab",
    "kivi2-1": "d59ec683c27c7813",
}
