"""Chains of codecs: which of them have the same bytes, and which a memory makes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from objectcache.kv_codecs.chains import CHAINS_MAX, Chain, chain_name, chains_of, parse_chain, shortest
from objectcache.kv_codecs.elements import Element
from objectcache.kv_codecs.encoding import encode, encode_further
from objectcache.kv_codecs.layer import KIVI, Codec, LayerShape, goes_on

SHAPE = LayerShape(16, 32, Element.BFLOAT16)


def encoded(chain: Chain, seed: int) -> bytes:
    values = np.random.default_rng(seed).standard_normal(2 * SHAPE.half_elements, dtype=np.float32)
    data = encode((values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8), SHAPE, chain[0])
    for codec in chain[1:]:
        data, _ = encode_further(data, SHAPE, codec)
    return data


@given(st.lists(st.sampled_from(KIVI), min_size=1, max_size=4, unique=True), st.integers(0, 99))
def test_a_chain_has_the_bytes_of_its_shortest_one(codecs: list[Codec], seed: int) -> None:
    """So that one measured loss holds for both."""
    chain = tuple(codec for codec in KIVI if codec in codecs)
    if all(map(goes_on, chain, chain[1:])):
        short = shortest(chain)
        assert short[-1] is chain[-1]
        assert encoded(short, seed) == encoded(chain, seed)


def test_the_default_codecs_have_three_chains() -> None:
    found = chains_of((Codec.KIVI8, Codec.K8V4, Codec.KIVI4))
    assert [chain_name(each) for each in found] == ["kivi8-1>k8v4-1", "kivi8-1>kivi4-1", "k8v4-1>kivi4-1"]
    assert shortest((Codec.KIVI8, Codec.K8V4, Codec.KIVI4)) == (Codec.KIVI8, Codec.KIVI4)


def test_chains_are_bounded_and_leave_out_codecs_that_do_not_go_on() -> None:
    assert len(chains_of(tuple(Codec))) == CHAINS_MAX
    assert chains_of((Codec.FP8, Codec.KIVI4, Codec.KEYDIFF50)) == ()


@given(st.sampled_from(chains_of(tuple(Codec))))
def test_a_name_is_read_back(chain: Chain) -> None:
    assert parse_chain(chain_name(chain)) == chain


@pytest.mark.parametrize(
    "text", ["", "kivi5-1", "kivi4-1>kivi8-1", "kivi4-1>kivi4-1", "exact>kivi4-1", "fp8-1>kivi4-1"]
)
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"is no codec|does not go on"):
        parse_chain(text)
