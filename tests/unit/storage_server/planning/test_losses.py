"""The losses of chunks by the calibrations of models, and the file that has them."""

from __future__ import annotations

import json
import math
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from descriptors.layer_forms import LossBasis
from objectcache.kv_codecs.chains import Chain, parse_chain
from objectcache.kv_codecs.elements import Element
from objectcache.kv_codecs.layer import Codec, LayerShape
from storage_server.planning.losses import ChunksModel, LossTable, MeasuredLoss, ModelLosses, ToldLoss
from storage_server.planning.losses_file import (
    LOSSES_BYTES_MAX,
    WrongLossesError,
    losses_bytes,
    parse_losses,
    with_model,
)

KIVI4: Chain = (Codec.KIVI4,)
FURTHER = parse_chain("kivi8-1>kivi4-1")
SHAPE = LayerShape(16, 192, Element.BFLOAT16)


def model(name: str, kl: float, layers: int = 30, **changes: Any) -> ModelLosses:
    forms = {KIVI4: MeasuredLoss(kl / 2, kl, kl, 2 * kl), FURTHER: MeasuredLoss(kl, 2 * kl, kl, 2 * kl)}
    values = {"forms": forms, "width": 192, "element": Element.BFLOAT16, "chunk_tokens": 64, **changes}
    return ModelLosses(name, layers, texts="texts", text_count=16, release="1", **values)


TABLE = LossTable((model("small", 0.5), model("large", 0.25, 32)), {"kv": "small"})
SMALL = ChunksModel("small")


def test_a_loss_is_the_upper_end_for_the_model_and_the_chain() -> None:
    assert TABLE.told(SMALL, SHAPE, 30, KIVI4) == ToldLoss(0.5, LossBasis.CALIBRATED)
    assert TABLE.told(SMALL, SHAPE, 30, FURTHER) == ToldLoss(1.0, LossBasis.CALIBRATED)
    whole = (Codec.KIVI8, Codec.K8V4, Codec.KIVI4)
    assert TABLE.told(SMALL, SHAPE, 30, whole) == ToldLoss(1.0, LossBasis.CALIBRATED), "it has the same bytes"


@pytest.mark.parametrize(
    ("name", "shape", "layers", "problem"),
    [
        ("", SHAPE, 30, "name no model"),
        ("other", SHAPE, 30, "other is not among the 2 calibrated models"),
        ("small", SHAPE, 32, r"measured on 30 layers x 192 bfloat16; the chunks have 32 layers x 192 bfloat16"),
        ("small", LayerShape(16, 96, Element.BFLOAT16), 30, "30 layers x 96"),
        ("small", LayerShape(16, 192, Element.FLOAT16), 30, "30 layers x 192 float16"),
    ],
)
def test_other_models_and_layouts_are_not_calibrated(name: str, shape: LayerShape, layers: int, problem: str) -> None:
    """A calibration of another layout under the same name is none: it is of another model."""
    mine, any_model = ChunksModel(name), ChunksModel(name, takes_worst=True)
    assert TABLE.told(mine, shape, layers, KIVI4) == ToldLoss(math.inf, LossBasis.UNCALIBRATED)
    assert TABLE.told(any_model, shape, layers, KIVI4) == ToldLoss(0.5, LossBasis.WORST)
    assert TABLE.basis(mine, shape, layers) is LossBasis.UNCALIBRATED
    assert TABLE.basis(any_model, shape, layers) is LossBasis.WORST
    told = TABLE.problem(mine, shape, layers)
    assert told is not None
    assert re.search(problem, told)


def shaped(width: int, tokens: int = 16) -> LayerShape:
    return LayerShape(tokens, width, Element.BFLOAT16)


@pytest.mark.parametrize(
    ("ranks", "shape", "layers", "is_calibrated"),
    [
        ("tp0of2-pp0of1", shaped(96), 30, True),
        ("tp1of3-pp0of1", shaped(64), 30, True),
        ("tp3of6-pp0of1", shaped(64), 30, True),  # three heads on six ranks: each is there twice
        ("tp1of2-pp0of1", shaped(192), 30, True),  # one head on two ranks
        ("tp0of1-pp1of2", shaped(192), 15, True),
        ("tp0of1-pp3of4", shaped(192), 7, True),
        ("tp0of1-pp0of4", shaped(192), 8, True),
        ("tp1of2-pp1of2", shaped(96), 15, True),
        ("tp0of1-pp0of1", shaped(96), 30, False),
        ("tp0of2-pp0of1", shaped(64), 30, False),
        ("tp0of2-pp0of1", shaped(384), 30, False),
        ("tp0of1-pp0of2", shaped(192), 16, False),
        ("tp0of1-pp0of4", shaped(192), 9, False),
        ("tp0of0-pp0of1", shaped(192), 15, False),
        ("ranks", shaped(96), 30, False),
    ],
)
def test_a_rank_s_part_loses_what_all_of_them_do(
    ranks: str, shape: LayerShape, layers: int, is_calibrated: bool
) -> None:
    """The keys say over how many ranks the model is split; the same layout without that is another model's."""
    keys = [f"kv/small/layout/{ranks}/{hashed}" for hashed in "ab"]
    told = TABLE.told(TABLE.model_of("other", keys), shape, layers, KIVI4)
    assert told == (
        ToldLoss(0.5, LossBasis.CALIBRATED) if is_calibrated else ToldLoss(math.inf, LossBasis.UNCALIBRATED)
    )


def test_keys_of_several_ranks_are_of_a_whole_model() -> None:
    keys = [f"kv/small/layout/tp{rank}of2-pp0of1/a" for rank in (0, 1)]
    assert TABLE.model_of("other", keys) == SMALL


@pytest.mark.parametrize(
    ("shape", "layers", "is_calibrated"),
    [
        (shaped(192, 30 * 256), 1, True),
        (shaped(192, 30 * 32), 1, True),
        (shaped(192, 30 * 16), 1, False),  # groups of 32 rows would have two layers
        (shaped(384, 30 * 128), 1, False),
        (shaped(192, 256), 30, False),
    ],
)
def test_chunks_that_have_all_layers_in_one_lose_what_the_layers_do(
    shape: LayerShape, layers: int, is_calibrated: bool
) -> None:
    mine = TABLE.model_of("other", ["lmcache/small/space/a", "lmcache/small/space/b"])
    assert mine.joins_layers
    told = TABLE.told(mine, shape, layers, KIVI4)
    assert told.basis is (LossBasis.CALIBRATED if is_calibrated else LossBasis.UNCALIBRATED)


def test_layers_that_share_one_scale_were_not_measured() -> None:
    table = LossTable((model("a", 0.5, 2, forms={(Codec.FP8,): MeasuredLoss(0, 0.5, 0, 0)}),))
    mine = table.model_of("other", ["lmcache/a/space/x"])
    assert table.told(mine, shaped(192, 64), 1, (Codec.FP8,)).basis is LossBasis.UNCALIBRATED


def test_the_model_stands_in_the_keys_or_is_the_bucket_s() -> None:
    table = LossTable(TABLE.models, {"kv": "small", "any": "worst"})
    ours = ["kv/large/x/1", "kv/large/x/2"]
    assert [table.model_of(bucket, ours) for bucket in ("kv", "any", "other")] == [
        ChunksModel("large"), ChunksModel("large", takes_worst=True), ChunksModel("large"),
    ]  # fmt: skip
    assert [table.model_of(bucket, ["a", "b"]) for bucket in ("kv", "any", "other")] == [
        ChunksModel("small"), ChunksModel("", takes_worst=True), ChunksModel(),
    ]  # fmt: skip
    assert table.model_of("kv", ["kv/large/x/1", "a"]) == ChunksModel(), "keys of two models have none"


def test_a_form_that_was_not_measured_has_no_loss_whatever_other_models_have() -> None:
    table = LossTable((model("a", 0.5, forms={KIVI4: MeasuredLoss(0, 0.5, 0, 0)}), model("b", 0.5)))
    mine = ChunksModel("a", takes_worst=True)
    assert table.told(mine, SHAPE, 30, FURTHER).basis is LossBasis.UNCALIBRATED
    assert table.told(mine, SHAPE, 30, (Codec.KIVI2,)).kl == math.inf


def test_chunks_with_more_tokens_count_where_groups_share_a_scale_and_not_where_the_chunk_does() -> None:
    table = LossTable((model("a", 0.5, forms={form: MeasuredLoss(0, 0.5, 0, 0) for form in (KIVI4, (Codec.FP8,))}),))
    long = LayerShape(128, 192, Element.BFLOAT16)
    assert table.told(ChunksModel("a"), long, 30, KIVI4).basis is LossBasis.CALIBRATED
    assert table.told(ChunksModel("a"), long, 30, (Codec.FP8,)).basis is LossBasis.UNCALIBRATED
    assert table.told(ChunksModel("a"), SHAPE, 30, (Codec.FP8,)).basis is LossBasis.CALIBRATED


def test_a_model_is_there_once_for_each_layout() -> None:
    changed = with_model((model("a", 0.5), model("b", 0.5)), model("a", 0.25))
    assert [(each.model, each.forms[KIVI4].kl_high) for each in changed] == [("b", 0.5), ("a", 0.25)]


finite = st.floats(0, 1e300, allow_nan=False)


@given(st.lists(st.tuples(finite, finite), min_size=1, max_size=3))
def test_a_file_is_read_back(figures: list[tuple[float, float]]) -> None:
    models = [
        model(f"m{at}", 1.0, forms={FURTHER: MeasuredLoss(min(each), max(each), -1.5, 2.5)})
        for at, each in enumerate(figures)
    ]
    assert parse_losses(losses_bytes(models)) == tuple(models)


WHOLE = json.loads(losses_bytes([model("small", 0.5)]))


def changed(path: str, value: Any) -> bytes:
    """The file with another value at this path; None takes the field away."""
    found = json.loads(json.dumps(WHOLE))
    *parts, last = path.split("/")
    place = found
    for part in parts:
        place = place[int(part)] if isinstance(place, list) else place[part]
    if value is None:
        del place[last]
    else:
        place[last] = value
    return json.dumps(found).encode()


@pytest.mark.parametrize(
    ("path", "value", "field"),
    [
        ("version", 2, "version"),
        ("version", None, "version"),
        ("more", 1, "more"),
        ("models", {}, "models"),
        ("models/0/model", "", "models.0.model"),
        ("models/0/model", "worst", "models.0.model: worst is no model"),
        ("models/0/model", "a/b", "models.0.model"),
        ("models/0/layers", 0, "models.0.layers"),
        ("models/0/layers", "30", "models.0.layers"),
        ("models/0/width", 1 << 20, "models.0.width"),
        ("models/0/element", "int8", "models.0.element"),
        ("models/0/text_count", 1, "models.0.text_count"),
        ("models/0/texts", "x" * 300, "models.0.texts"),
        ("models/0/forms", {}, "models.0.forms"),
        ("models/0/forms/kivi5-1", WHOLE["models"][0]["forms"]["kivi4-1"], "models.0.forms.kivi5-1"),
        ("models/0/forms/keydiff50-1", WHOLE["models"][0]["forms"]["kivi4-1"], "models.0.forms.keydiff50-1"),
        ("models/0/forms/exact", WHOLE["models"][0]["forms"]["kivi4-1"], "models.0.forms.exact"),
        (
            "models/0/forms/kivi8-1>k8v4-1>kivi4-1",
            WHOLE["models"][0]["forms"]["kivi4-1"],
            "kivi8-1>kivi4-1 has the same bytes",
        ),
        ("models/0/forms/kivi4-1/kl", None, "models.0.forms.kivi4-1.kl"),
        ("models/0/forms/kivi4-1/kl_high", 0.1, "models.0.forms.kivi4-1: kl is from 0 on"),
        ("models/0/forms/kivi4-1/kl", -0.1, "models.0.forms.kivi4-1: kl is from 0 on"),
        ("models/0/forms/kivi4-1/kl_high", math.nan, "models.0.forms.kivi4-1"),
        ("models/0/forms/kivi4-1/kl_high", math.inf, "models.0.forms.kivi4-1"),
        ("models/0/forms/kivi4-1/kl_high", True, "models.0.forms.kivi4-1.kl_high"),
    ],
)
def test_a_file_that_cannot_be_is_refused_by_the_field(path: str, value: Any, field: str) -> None:
    with pytest.raises(WrongLossesError) as refused:
        parse_losses(changed(path, value))
    assert field in str(refused.value)


@given(st.binary(max_size=200) | st.sampled_from([b"[]", b"null", b'{"version": 1}', b"[" * 9000]))
def test_garbage_is_refused(data: bytes) -> None:
    with pytest.raises(WrongLossesError):
        parse_losses(data)


def test_a_file_is_bounded_and_a_cut_one_is_refused() -> None:
    whole = losses_bytes([model("a", 0.5)])
    for end in range(0, len(whole) - 2, 7):
        with pytest.raises(WrongLossesError):
            parse_losses(whole[:end])
    with pytest.raises(WrongLossesError, match="at most"):
        parse_losses(whole + b" " * LOSSES_BYTES_MAX)
    with pytest.raises(WrongLossesError, match="twice"):
        parse_losses(json.dumps({"version": 1, "models": WHOLE["models"] * 2}).encode())
