"""The layout of a chunk's KV, and the form of an encoded one, as headers."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from descriptors.chunk_flags import copied
from descriptors.headers import CLASS_HEADER, CODEC_HEADER, LAYOUT_HEADER
from descriptors.kv_forms import EncodedForm, KvLayout

LAYOUT = KvLayout(32, 16, 1024, "bfloat16")
layouts = st.builds(
    KvLayout,
    st.integers(1, 1024),
    st.integers(1, 4096),
    st.integers(1, 65_536),
    st.sampled_from(["float16", "bfloat16", "float32"]),
)
errors = st.floats(0, 1e6)


def test_a_layout_says_what_an_exact_chunk_takes() -> None:
    assert LAYOUT.nbytes == 32 * 2 * 16 * 1024 * 2
    assert LAYOUT.text == "layers=32;tokens=16;width=1024;element=bfloat16"


@given(layouts)
def test_a_layout_comes_back_from_its_text(layout: KvLayout) -> None:
    assert KvLayout.parse(layout.text) == layout


@given(layouts, errors, errors, errors)
@example(LAYOUT, 6.5e-308, 1.337142928471398e-260, 2e-308)
@example(LAYOUT, 0.0, 0.1, 0.0)
def test_a_form_comes_back_and_its_errors_are_never_told_too_small(
    layout: KvLayout, worst: float, mean: float, loss: float
) -> None:
    form = EncodedForm("kivi4-1", layout, worst, mean, loss)
    found = EncodedForm.parse(form.text)
    assert (found.codec, found.layout) == ("kivi4-1", layout)
    assert worst <= found.worst_error <= worst * 1.00002
    assert mean <= found.mean_error <= mean * 1.00002
    assert loss <= found.loss <= loss * 1.00002
    assert EncodedForm.parse(found.text) == found


def test_the_label_of_the_release_before_tells_no_loss() -> None:
    found = EncodedForm.parse(f"kivi4-1;{LAYOUT.text};error=0.0861;mean_error=0.0712")
    assert (found.worst_error, found.loss) == (0.0861, 0.0)
    assert found.text == f"kivi4-1;{LAYOUT.text};error=0.0861;mean_error=0.0712"


@pytest.mark.parametrize(
    "text",
    [
        "", "layers=32", "layers=0;tokens=16;width=1;element=float16", "layers=1;tokens=4097;width=1;element=float16",
        "layers=1;tokens=1;width=65537;element=float16", "layers=1;tokens=1;width=1;element=int8",
        " layers=1;tokens=1;width=1;element=float16", "layers=1;tokens=1;width=1;element=float16\n",
        "layers=-1;tokens=1;width=1;element=float16", "layers=1e3;tokens=1;width=1;element=float16",
    ],
)  # fmt: skip
def test_other_texts_are_no_layout(text: str) -> None:
    with pytest.raises(ValueError, match=r"layout|layers|elements"):
        KvLayout.parse(text)


@pytest.mark.parametrize(
    "text",
    [
        "kivi4-1", f"kivi4-1;{LAYOUT.text}", f"kivi4-1;{LAYOUT.text};error=nan;mean_error=0",
        f"kivi4-1;{LAYOUT.text};error=1;mean_error=inf", f"kivi4-1;{LAYOUT.text};error=-1;mean_error=0",
        f"KIVI;{LAYOUT.text};error=1;mean_error=0", f"kivi4-1;{LAYOUT.text};error=1e999;mean_error=0",
        f"kivi4-1;{LAYOUT.text};error=1..2;mean_error=0", f"kivi4-1;{LAYOUT.text};error=1;mean_error=0;loss=-1",
        f"kivi4-1;{LAYOUT.text};error=1;mean_error=0;loss=1e999", f"kivi4-1;{LAYOUT.text};error=1;mean_error=0;loss=",
    ],
)  # fmt: skip
def test_other_texts_are_no_form(text: str) -> None:
    with pytest.raises(ValueError, match=r"form|error|convert"):
        EncodedForm.parse(text)


def test_a_copy_of_an_encoded_chunk_is_encoded() -> None:
    form = EncodedForm("kivi4-1", LAYOUT, 0.1, 0.1).text
    wanted = {LAYOUT_HEADER: LAYOUT.text, CLASS_HEADER: "code"}
    assert copied(wanted, {CODEC_HEADER: form}) == {CLASS_HEADER: "code", CODEC_HEADER: form}
    assert copied(wanted, {}) == wanted
