"""The forms of chunks: text and back, and what is refused."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from descriptors.descriptor import Accept, Delivery, Descriptor, Portion, RdmaTarget
from descriptors.descriptor_codec import decode_descriptor, decode_peer_descriptor, encode_binary, encode_json
from descriptors.errors import CallerError
from descriptors.layer_forms import (
    EXACT,
    FormRun,
    LayerForms,
    LossBasis,
    WrongFormsError,
    forms_text,
    greatest_loss,
    parse_forms,
)
from descriptors.notices import Forms, NoticeError, decode_notice, encode_notice

RUNS = st.lists(
    st.builds(FormRun, st.sampled_from([EXACT, "kivi4-1", "fp8-1"]), st.integers(1, 65_536), st.integers(1, 1 << 30)),
    min_size=1, max_size=9,
)  # fmt: skip
ACCEPTS = st.builds(
    Accept, st.lists(st.sampled_from(["kivi4-1", "kivi2-1", "fp8-1", "new.codec_2"]), min_size=1, max_size=4,
    unique=True).map(tuple), st.sampled_from(["float16", "bfloat16", "float32"]), st.none() | st.floats(0, 10),
    st.none() | st.floats(0, 10),
)  # fmt: skip


@given(RUNS, st.floats(0, 2), st.floats(0, 2), st.none() | st.tuples(st.floats(0, 9), st.sampled_from(LossBasis)))
def test_forms_survive_their_text_and_a_notice(
    runs: list[FormRun], worst: float, mean: float, loss: tuple[float, LossBasis] | None
) -> None:
    forms = LayerForms(tuple(runs), worst, mean, *(loss or ()))
    assert parse_forms(forms_text(forms)) == forms
    notice = Forms("r" * 16, forms)
    assert decode_notice(encode_notice(notice)) == notice
    assert forms.layer_bytes.tolist() == [run.layer_bytes for run in runs for _ in range(run.chunk_count)]


@pytest.mark.parametrize(
    "text",
    ["", "exact;1;2", "error;0;0", "exact;1;2,error;0", "exact;0;2,error;0;0", "exact;1;-2,error;0;0",
     "exact;1;x,error;0;0", "exact;1;2,error;nan;0", "exact;1;2,error;inf;0", "exact;1,error;0;0",
     ",".join(["exact;1;2"] * 300) + ",error;0;0", "exact;1;2,error;0;0,loss;0", "exact;1;2,error;0;0,loss;nan;worst",
     "exact;1;2,error;0;0,loss;-1;worst", "exact;1;2,error;0;0,loss;inf;worst", "exact;1;2,error;0;0,loss;0;certain",
     "exact;1;2,error;0;0,loss;0;worst;1", "exact;1;2,loss;0;worst", "loss;0;worst", "error;0;0,loss;0;worst",
     "exact;1;2,error;0;0,loss;0;worst,loss;0;worst"],
)  # fmt: skip
def test_other_texts_tell_no_forms(text: str) -> None:
    with pytest.raises(WrongFormsError):
        parse_forms(text)


@given(st.text(max_size=60))
def test_no_text_makes_the_parser_fail_otherwise(text: str) -> None:
    with contextlib.suppress(WrongFormsError):
        parse_forms(text)


def test_a_notice_with_other_bytes_is_refused() -> None:
    data = encode_notice(Forms("r" * 16, LayerForms((FormRun(EXACT, 1, 2),))))
    for broken in (data[:-1] + b"\xff", data[:-4], data[:30]):
        with pytest.raises(NoticeError):
            decode_notice(broken)


@given(ACCEPTS, st.booleans(), st.booleans())
def test_what_is_accepted_survives_both_codings(accept: Accept, has_target: bool, hex_keys: bool) -> None:
    keys = ("ab" * 32,) if hex_keys else ("a key",)
    target = RdmaTarget("agent", "region", 3, 1 << 20) if has_target else None
    descriptor = Descriptor(
        keys, 4, 16, 8192, Delivery.AUTO, rdma_target=target, request_id="r" * 16, accept=accept,
        version=accept.version,
    )  # fmt: skip
    for encoded in (encode_json(descriptor), encode_binary(descriptor)):
        assert decode_descriptor(encoded) == descriptor
    assert decode_peer_descriptor(encode_binary(descriptor)) == descriptor
    assert descriptor.exact.accept is None
    assert decode_descriptor(encode_binary(descriptor.exact)) == descriptor.exact


BASE = '"version": %d, "chunk_keys": ["a"], "num_layers": 2, "chunk_tokens": 16, "per_layer_chunk_bytes": 4096'


@pytest.mark.parametrize(
    ("version", "more", "field"),
    [
        (1, '"accept": ["kivi4-1"], "element": "bfloat16"', "version"),
        (2, "", "version"),
        (2, '"accept": ["kivi4-1"]', "element"),
        (2, '"element": "bfloat16"', "element"),
        (2, '"max_error": 0.5', "max_error"),
        (2, '"accept": [], "element": "bfloat16"', "accept"),
        (2, '"accept": ["KIVI"], "element": "bfloat16"', "accept[0]"),
        (2, '"accept": ["a;b"], "element": "bfloat16"', "accept[0]"),
        (2, '"accept": ["x", "x"], "element": "bfloat16"', "accept"),
        (2, '"accept": ["x"], "element": "int4"', "element"),
        (2, '"accept": ["x"], "element": "bfloat16", "max_error": -1', "max_error"),
        (2, '"accept": ["x"], "element": "bfloat16", "max_error": 1e999', "max_error"),
        (2, '"max_loss": 0.5', "max_loss"),
        (3, '"accept": ["x"], "element": "bfloat16"', "version"),
        (2, '"accept": ["x"], "element": "bfloat16", "max_loss": 0.5', "version"),
        (3, '"accept": ["x"], "element": "bfloat16", "max_loss": -1', "max_loss"),
        (3, '"accept": ["x"], "element": "bfloat16", "max_loss": 1e999', "max_loss"),
        (3, '"accept": ["x"], "element": "bfloat16", "max_loss": true', "max_loss"),
        (2, '"accept": ["x"], "element": "float32", "per_layer_chunk_bytes": 4100', "per_layer_chunk_bytes"),
    ],
)
def test_what_cannot_be_accepted_is_refused_by_name(version: int, more: str, field: str) -> None:
    body = "{" + ", ".join(filter(None, [BASE % version, more])) + "}"
    if '"per_layer_chunk_bytes": 4100' in more:
        body = body.replace('"per_layer_chunk_bytes": 4096, ', "")
    with pytest.raises(CallerError) as error:
        decode_descriptor(body.encode())
    assert error.value.field == field


def test_seventeen_codecs_are_too_many() -> None:
    with pytest.raises(CallerError, match="accept"):
        Accept(tuple(f"codec-{at}" for at in range(17)), "bfloat16")


@given(st.binary(max_size=200), st.sampled_from([None, 0.5]))
def test_no_binary_makes_the_decoder_fail_otherwise(tail: bytes, max_loss: float | None) -> None:
    accept = Accept(("kivi4-1",), "bfloat16", max_loss=max_loss)
    whole = encode_binary(Descriptor(("a",), 2, 16, 4096, accept=accept, version=accept.version))
    for data in (whole[: len(whole) // 2] + tail, whole + tail):
        with contextlib.suppress(CallerError):
            decode_descriptor(data)


@given(ACCEPTS)
def test_a_portion_that_accepts_encoded_layers_is_for_servers_only(accept: Accept) -> None:
    portion = Portion(1, 3, 9, (0, 4))
    keys = (f"{1:064x}", f"{2:064x}")
    descriptor = Descriptor(
        keys, 4, 16, 8192, request_id="r" * 16, version=accept.version, portion=portion, accept=accept
    )
    data = encode_binary(descriptor)
    assert decode_peer_descriptor(data) == descriptor
    with pytest.raises(CallerError) as refused:
        decode_descriptor(data)
    assert refused.value.field == "flags"
    changes: list[dict[str, Any]] = [
        {"rdma_target": RdmaTarget("agent", "region", 0, 9 * 4 * 8192)}, {"portion": replace(portion, first_layer=1)},
    ]  # fmt: skip
    for change in changes:
        with pytest.raises(CallerError) as refused:
            replace(descriptor, **change)
        assert refused.value.field == "accept"


def test_a_bound_of_the_loss_is_a_flag_of_version_3() -> None:
    """A server of the release before finds the version before anything else, so its client asks again without."""
    accept = Accept(("kivi4-1",), "bfloat16", max_loss=0.5)
    descriptor = Descriptor(("a",), 2, 16, 4096, accept=accept, version=3)
    data = encode_binary(descriptor)
    older = encode_binary(descriptor.accepting(replace(accept, max_loss=None)))
    assert (data[3], older[3], len(data) - len(older)) == (3, 2, 8)
    assert data[6] ^ older[6] == 64
    for at, value, field in (
        (3, 2, "version"),
        (3, 4, "version"),
        (6, data[6] & ~4, "max_loss"),
        (6, older[6], "version"),
    ):
        with pytest.raises(CallerError) as refused:
            decode_descriptor(data[:at] + bytes([value]) + data[at + 1 :])
        assert refused.value.field == field
    assert descriptor.exact == Descriptor(("a",), 2, 16, 4096)


def test_the_loss_of_parts_is_the_greatest_on_the_weakest_ground() -> None:
    exact, kivi = (FormRun(EXACT, 1, 4),), (FormRun("kivi4-1", 1, 2),)
    sure, worst = LayerForms(kivi, 0, 0, 0.5, LossBasis.CALIBRATED), LayerForms(kivi, 0, 0, 0.25, LossBasis.WORST)
    unknown = LayerForms(exact, 0, 0, 0.0, LossBasis.UNCALIBRATED)
    assert greatest_loss([sure, worst]) == (0.5, LossBasis.WORST)
    assert greatest_loss([sure, worst, unknown]) == (0.5, LossBasis.UNCALIBRATED)
    assert greatest_loss([sure, LayerForms(exact)]) == (0.5, LossBasis.CALIBRATED), "exact chunks lose nothing"
    assert greatest_loss([sure, LayerForms(kivi)]) == (0.0, None), "encoded ones of which no loss is told"
    assert sure.without_loss == LayerForms(kivi)
