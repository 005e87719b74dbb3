"""Encoding chunks: errors are measured against exact chunks, and bounded where a chunk was encoded before."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nixl_client.lossy import MAX_ERROR
from objectcache.kv_codecs.elements import Element, from_floats
from objectcache.kv_codecs.encoding import decode
from objectcache.kv_codecs.layer import KIVI, Codec, LayerShape, goes_on
from objectcache.kv_codecs.loss import loss
from storage_server.cache.recoding import Recoder
from storage_server.planning.forms import Reading

SHAPE = LayerShape(32, 64, Element.BFLOAT16)
LAYERS = 2
READING = Reading(SHAPE, LAYERS, KIVI)
CHAINS = [(first, second) for first, second in product(KIVI, KIVI) if goes_on(first, second)]


def chunk(seed: int, outlier: float = 1.0) -> np.ndarray:
    random = np.random.default_rng(seed)
    values = random.standard_normal(LAYERS * 2 * SHAPE.half_elements).astype(np.float32)
    values[:: SHAPE.width] *= outlier
    out = np.empty(LAYERS * SHAPE.nbytes, dtype=np.uint8)
    from_floats(values, Element.BFLOAT16, out)
    return out


def errors(exact: np.ndarray, packed: bytes) -> list[float]:
    found = []
    rows = np.frombuffer(packed, dtype=np.uint8).reshape(LAYERS, -1)
    for layer, row in zip(exact.reshape(LAYERS, -1), rows, strict=True):
        back = np.empty(SHAPE.nbytes, dtype=np.uint8)
        decode(row.tobytes(), SHAPE, back)
        lost = loss(layer, back, SHAPE)
        found += [lost.keys, lost.values]
    return found


@pytest.fixture(scope="module")
def recoder() -> Iterator[Recoder]:
    made = Recoder(cpu_fraction=1.0)
    yield made
    made.close()


@given(seed=st.integers(0, 1 << 30), outlier=st.sampled_from([0.0, 1.0, 30.0, 1000.0]), chain=st.sampled_from(CHAINS))
@settings(deadline=None)
def test_what_is_told_of_a_chunk_that_was_encoded_before_bounds_its_error(
    recoder: Recoder, seed: int, outlier: float, chain: tuple[Codec, Codec]
) -> None:
    exact = chunk(seed, outlier)
    first = recoder.encode(memoryview(exact), READING, chain[0])
    assert first is not None
    assert first[0].worst_error == pytest.approx(max(errors(exact, first[1])))
    second = recoder.encode_further(memoryview(first[1]), first[0], READING, chain[1])
    assert second is not None
    told, packed = second
    assert told.codec is chain[1]
    assert len(packed) == told.nbytes
    real = errors(exact, packed)
    assert max(real) <= told.worst_error * (1 + 1e-6)
    assert np.mean(real) <= told.mean_error * (1 + 1e-6)


def test_a_little_before_costs_nearly_nothing(recoder: Recoder) -> None:
    """4 bits out of 8 are as good as 4 bits out of the exact ones, within a hundredth."""
    exact = chunk(1)
    eight = recoder.encode(memoryview(exact), READING, Codec.KIVI8)
    four = recoder.encode(memoryview(exact), READING, Codec.KIVI4)
    assert eight is not None
    assert four is not None
    further = recoder.encode_further(memoryview(eight[1]), eight[0], READING, Codec.KIVI4)
    assert further is not None
    assert max(errors(exact, further[1])) == pytest.approx(four[0].worst_error, rel=0.01)


@pytest.mark.parametrize("chain", [(Codec.KIVI8, Codec.K8V4, Codec.KIVI4), (Codec.KIVI8, Codec.KIVI4)])
def test_the_default_codecs_one_after_the_other_keep_the_default_bound(
    recoder: Recoder, chain: tuple[Codec, ...]
) -> None:
    """The error that is told is 0.01 above the real one at most, so a reader does not refuse what keeps its bound."""
    exact = chunk(3)
    made = recoder.encode(memoryview(exact), READING, chain[0])
    for codec in chain[1:]:
        assert made is not None
        made = recoder.encode_further(memoryview(made[1]), made[0], READING, codec)
    assert made is not None
    real = max(errors(exact, made[1]))
    assert real <= made[0].worst_error <= min(real + 0.01, MAX_ERROR)


@pytest.mark.parametrize(
    ("first", "second", "kept"),
    [
        (Codec.K8V4, Codec.KIVI4, 1),
        (Codec.KIVI8, Codec.K8V4, 0),
        (Codec.KIVI4, Codec.K4V2, 0),
        (Codec.K4V2, Codec.KIVI2, 1),
    ],
)
def test_keys_or_values_that_keep_their_bits_lose_nothing_more(
    recoder: Recoder, first: Codec, second: Codec, kept: int
) -> None:
    exact = chunk(4, 30.0)
    before = recoder.encode(memoryview(exact), READING, first)
    assert before is not None
    after = recoder.encode_further(memoryview(before[1]), before[0], READING, second)
    assert after is not None
    assert errors(exact, after[1])[kept::2] == errors(exact, before[1])[kept::2]


def test_damaged_bytes_are_not_encoded_further(recoder: Recoder) -> None:
    made = recoder.encode(memoryview(chunk(2)), READING, Codec.KIVI8)
    assert made is not None
    damaged = bytearray(made[1])
    damaged[-3] ^= 4
    assert recoder.encode_further(memoryview(damaged), made[0], READING, Codec.KIVI4) is None


def test_only_fewer_bits_go_on_from_encoded_layers() -> None:
    assert goes_on(Codec.EXACT, Codec.STREAMING50)
    assert goes_on(Codec.KIVI8, Codec.K8V4)
    assert goes_on(Codec.K8V4, Codec.K4V2)
    for before, after in ((Codec.KIVI4, Codec.K8V4), (Codec.KIVI3, Codec.K4V2), (Codec.K4V2, Codec.KIVI3)):
        assert not goes_on(before, after), "neither keys nor values get more bits"
    for before in KIVI:
        assert not goes_on(Codec.FP8, before), "the bound would be far above the error"
    for before, after in ((Codec.KIVI4, Codec.KIVI8), (Codec.KIVI4, Codec.EXACT), (Codec.KIVI4, Codec.KIVI4)):
        assert not goes_on(before, after)
    for before, after in ((Codec.KIVI4, Codec.KEYDIFF25), (Codec.KEYDIFF50, Codec.KEYDIFF25), (Codec.KIVI8, Codec.FP8)):
        assert not goes_on(before, after)
