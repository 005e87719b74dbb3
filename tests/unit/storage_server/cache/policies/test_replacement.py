"""The codec in which a stored chunk is replaced."""

from __future__ import annotations

from objectcache.kv_codecs.elements import Element
from objectcache.kv_codecs.layer import Codec, LayerShape
from storage_server.cache.policies.replacement import replacements
from storage_server.cache.policies.utility_policy import CodecFigures, UtilitySettings

SHAPE = LayerShape(16, 1024, Element.BFLOAT16)
FIGURES = {
    Codec.KIVI8: CodecFigures(1.0, 2.5e9), Codec.KIVI4: CodecFigures(0.99, 2.5e9), Codec.KIVI2: CodecFigures(0.7, 2.5e9)
}  # fmt: skip


def chosen(alpha_s: float, classes: dict[str, dict[Codec, float]] | None = None, name: str = "") -> list[Codec]:
    return list(replacements(SHAPE, 32, name, UtilitySettings(FIGURES, classes or {}, alpha_s=alpha_s)))


def test_where_quality_counts_the_codec_that_loses_none_comes_first() -> None:
    assert chosen(10.0) == [Codec.KIVI8, Codec.KIVI4, Codec.KIVI2]


def test_where_quality_counts_nothing_the_codec_that_saves_most_time_for_its_bytes_comes_first() -> None:
    """All are decoded as fast, so the smallest wins most for the bytes that it frees."""
    assert chosen(0.0)[0] is Codec.KIVI2


def test_the_class_of_the_content_decides_with() -> None:
    classes = {"code": {Codec.KIVI8: 0.5}}
    assert chosen(10.0, classes, "code")[0] is Codec.KIVI4
    assert chosen(10.0, classes, "chat")[0] is Codec.KIVI8


def test_a_codec_that_frees_nothing_is_none() -> None:
    """Tiny layers are mostly head."""
    tiny = LayerShape(1, 1, Element.BFLOAT16)
    assert replacements(tiny, 1, "", UtilitySettings(FIGURES)) == ()


def test_no_codec_that_drops_tokens_replaces_anything() -> None:
    """However little it is said to cost: nobody could get the tokens back."""
    figures = {Codec.KEYDIFF50: CodecFigures(1.0, 9e9), Codec.KIVI8: CodecFigures(0.9, 1e9)}
    assert replacements(LayerShape(256, 64, Element.BFLOAT16), 4, "", UtilitySettings(figures)) == (Codec.KIVI8,)
