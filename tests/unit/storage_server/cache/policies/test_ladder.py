"""The forms through which a stored chunk goes, and the prices of its steps."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from descriptors.kv_forms import KvLayout
from objectcache.kv_codecs.chains import Chain
from objectcache.kv_codecs.elements import Element
from objectcache.kv_codecs.layer import KIVI, Codec, goes_on
from storage_server.cache.policies.ladder import ChunkForm, Ladder, Ladders
from storage_server.cache.policies.use_worth import STEPS_PER_OCTAVE
from storage_server.cache.policies.utility import CodecFigures, UtilitySettings
from storage_server.planning.extent import aligned
from storage_server.planning.forms import LossView
from storage_server.planning.losses import ChunksModel, LossTable, MeasuredLoss, ModelLosses

LAYOUT = KvLayout(32, 16, 1024, "bfloat16")
FIGURES = {
    Codec.KIVI8: CodecFigures(1.0, 1e12), Codec.KIVI4: CodecFigures(0.99, 1e12), Codec.KIVI2: CodecFigures(0.7, 1e12)
}  # fmt: skip


def ladder(
    alpha_s: float,
    form: ChunkForm | None = None,
    classes: dict[str, dict[Codec, float]] | None = None,
    refused: tuple[Codec, ...] = (),
) -> Ladder:
    settings = UtilitySettings(FIGURES, classes or {}, alpha_s=alpha_s, home_bytes_per_s=1e12)
    return Ladders(settings).of(form or ChunkForm(LAYOUT), refused=refused)


def codecs(found: Ladder) -> list[Codec]:
    return [rung.codec for rung in found]


def test_where_quality_counts_the_codec_that_loses_none_comes_first() -> None:
    assert codecs(ladder(0.002)) == [Codec.EXACT, Codec.KIVI8, Codec.KIVI4, Codec.KIVI2]
    assert codecs(ladder(0.05)) == [Codec.EXACT, Codec.KIVI8, Codec.KIVI4]


def test_where_quality_counts_nothing_the_codec_that_saves_most_time_for_its_bytes_comes_first() -> None:
    """All are decoded as fast, so the smallest wins most for the bytes that it frees; nothing is behind it."""
    assert codecs(ladder(0.0)) == [Codec.EXACT, Codec.KIVI2]


def test_the_class_of_the_content_decides_with() -> None:
    classes = {"code": {Codec.KIVI8: 0.5}}
    assert codecs(ladder(10.0, ChunkForm(LAYOUT, (), "code"), classes))[1] is Codec.KIVI4
    assert codecs(ladder(10.0, ChunkForm(LAYOUT, (), "chat"), classes))[1] is Codec.KIVI8


def test_a_codec_that_frees_nothing_is_none() -> None:
    """Tiny layers are mostly head."""
    assert codecs(ladder(1.0, ChunkForm(KvLayout(1, 1, 1, "bfloat16")))) == [Codec.EXACT]


def test_no_codec_that_drops_tokens_replaces_anything() -> None:
    """However little it is said to cost: nobody could get the tokens back."""
    figures = {Codec.KEYDIFF50: CodecFigures(1.0, 9e9), Codec.KIVI8: CodecFigures(0.9, 1e9)}
    found = Ladders(UtilitySettings(figures)).of(ChunkForm(KvLayout(4, 256, 64, "bfloat16")))
    assert codecs(found) == [Codec.EXACT, Codec.KIVI8]


def test_a_chunk_that_was_encoded_before_a_restart_goes_on_from_its_form() -> None:
    assert codecs(ladder(0.0, ChunkForm(LAYOUT, (Codec.KIVI4,)))) == [Codec.KIVI4, Codec.KIVI2]
    assert codecs(ladder(10.0, ChunkForm(LAYOUT, (Codec.FP8,)))) == [Codec.FP8]  # nothing goes on from it


def test_a_codec_that_was_refused_is_passed_over() -> None:
    assert codecs(ladder(0.05, refused=(Codec.KIVI8,))) == [Codec.EXACT, Codec.KIVI4]
    assert codecs(ladder(0.05, refused=tuple(FIGURES))) == [Codec.EXACT]


def test_the_first_step_costs_at_most_what_leaving_costs_and_a_further_one_is_taken_where_it_costs_less() -> None:
    """An encoded chunk is better than none, says the owner; a chunk that loses more is worse than computing it."""
    assert [(rung.codec, rung.step) for rung in ladder(1e6, refused=(Codec.KIVI8,))[:1]] == [(Codec.EXACT, 0)]
    assert codecs(ladder(1e6, refused=(Codec.KIVI8,))) == [Codec.EXACT, Codec.KIVI4]
    assert codecs(ladder(1e6)) == [Codec.EXACT, Codec.KIVI8]
    assert codecs(ladder(1e6, ChunkForm(LAYOUT, (Codec.KIVI8,)))) == [Codec.KIVI8]
    assert ladder(1e-3)[0].step < 0


def test_the_smaller_a_chunk_is_the_later_it_leaves() -> None:
    """A chunk of a third of the size frees a third of the room, and computing it again takes as long."""
    for alpha_s in (0.0, 0.05, 1e6):
        found = ladder(alpha_s)
        assert 2 ** (found[-1].step / STEPS_PER_OCTAVE) == pytest.approx(found[0].nbytes / found[-1].nbytes, rel=0.1)


def test_the_faster_a_model_computes_the_dearer_is_encoding_its_chunks() -> None:
    settings = UtilitySettings(FIGURES, alpha_s=0.01, home_bytes_per_s=1e12)
    slow, fast = ({(32, 2 * 1024 * 2): rate} for rate in (1e8, 3e8))
    one, other = (Ladders(settings, rates).of(ChunkForm(LAYOUT)) for rates in (slow, fast))
    assert one[0].step < other[0].step
    assert Ladders(settings, {(1, 2): 1e3}).of(ChunkForm(LAYOUT)) == Ladders(settings).of(ChunkForm(LAYOUT))


def view(bound: float | None, forms: dict[Chain, float]) -> LossView:
    measured = {chain: MeasuredLoss(0.0, kl, 0.0, 0.0) for chain, kl in forms.items()}
    model = ModelLosses(
        model="m", num_layers=32, width=1024, element=Element.BFLOAT16, chunk_tokens=64, forms=measured, texts="",
        text_count=2, release="1",
    )  # fmt: skip
    return LossView(LossTable((model,)), ChunksModel("m"), bound)


def test_no_step_passes_the_bound_of_the_loss() -> None:
    """4 bits out of 8 lose more than 4 bits out of the exact chunk, and are a form of their own."""
    forms = {(Codec.KIVI8,): 0.01, (Codec.KIVI4,): 0.05, (Codec.KIVI8, Codec.KIVI4): 0.07}
    made = Ladders(UtilitySettings(FIGURES, alpha_s=0.05, home_bytes_per_s=1e12))
    for bound, expected in (
        (None, [Codec.EXACT, Codec.KIVI8, Codec.KIVI4]),
        (0.07, [Codec.EXACT, Codec.KIVI8, Codec.KIVI4]),
        (0.06, [Codec.EXACT, Codec.KIVI8]),
        (0.001, [Codec.EXACT]),
    ):
        assert codecs(made.of(ChunkForm(LAYOUT), view(bound, forms))) == expected


@given(
    alpha_s=st.floats(0, 1e3),
    qualities=st.dictionaries(st.sampled_from(KIVI), st.floats(0, 1), max_size=7),
    tokens=st.sampled_from([1, 16, 64, 4096]),
    layers=st.integers(1, 80),
    rate=st.floats(1e3, 1e13),
)
def test_a_ladder_goes_down_and_every_step_can_be_taken(
    alpha_s: float, qualities: dict[Codec, float], tokens: int, layers: int, rate: float
) -> None:
    settings = UtilitySettings({codec: CodecFigures(each, 1e9) for codec, each in qualities.items()}, alpha_s=alpha_s)
    layout = KvLayout(layers, tokens, 128, "float32")
    found = Ladders(settings, {(layers, 2 * 128 * 4): rate}).of(ChunkForm(layout))
    assert found[0].codec is Codec.EXACT
    assert found[0].nbytes == max(4096, aligned(layout.nbytes))
    for before, after in pairwise(found):
        assert goes_on(before.codec, after.codec)
        assert after.nbytes < before.nbytes
    for rung in found[1:]:
        assert abs(rung.step) <= 4 * STEPS_PER_OCTAVE * math.log2(1e3)
    assert found[0].step <= 0
