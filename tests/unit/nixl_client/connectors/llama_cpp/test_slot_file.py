"""Files of llama.cpp's slots: cut into runs and made of runs, and refused where they are anything else."""

from __future__ import annotations

import struct
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nixl_client.connectors.llama_cpp.rules.slot_file import (
    HOLDS_MORE,
    ParsedSlot,
    SlotFileError,
    SlotForm,
    SlotPart,
    SlotSection,
    cut,
    fill,
    parse,
)

ROWS = SlotPart(struct.pack("<iQ", 1, 24), 1, 24)
TRANSPOSED = SlotPart(struct.pack("<iII", 1, 2, 12), 12, 2)
PLAIN = SlotForm((SlotSection(2, 1, (0, 2, 0, 0), (ROWS,) * 4),))
FORMS = {
    "rows": PLAIN,
    "transposed": SlotForm((SlotSection(1, 0, (1, 2, 0, 0), (ROWS, ROWS, TRANSPOSED, TRANSPOSED)),)),
    "latents": SlotForm((SlotSection(3, 0, (0, 3, 64, 64), (ROWS,) * 3),)),
    "two caches": SlotForm((PLAIN.sections[0], SlotSection(2, 1, (0, 1, 0, 0), (ROWS,) * 2))),
}


def tokens_of(count: int) -> np.ndarray:
    return np.arange(count, dtype=np.uint32) * 7 + 1


def file_of(form: SlotForm, count: int, seed: int = 1) -> np.ndarray:
    """A file whose KV is random."""
    plan = form.plan(tokens_of(count))
    data = np.random.default_rng(seed).integers(0, 256, plan.nbytes, np.uint8)
    for at, text in plan.literals:
        data[at : at + len(text)] = np.frombuffer(text, np.uint8)
    return data


def made_of(data: np.ndarray, slot: ParsedSlot, run_tokens: int) -> np.ndarray:
    """A file of the same tokens, made of runs."""
    plan = slot.form.plan(slot.tokens)
    made = np.zeros(plan.nbytes, np.uint8)
    for at, text in plan.literals:
        made[at : at + len(text)] = np.frombuffer(text, np.uint8)
    for first in range(0, len(slot.tokens), run_tokens):
        fill(made, slot.form, plan, first, cut(data, slot, first, min(run_tokens, len(slot.tokens) - first)))
    return made


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_a_file_is_what_its_runs_make(form: SlotForm) -> None:
    data = file_of(form, 11)
    slot = parse(data)
    assert slot.form == form
    assert np.array_equal(slot.tokens, tokens_of(11))
    for run_tokens in (1, 4, 11):
        assert np.array_equal(made_of(data, slot, run_tokens), data)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_a_run_does_not_depend_on_the_tokens_behind_it(form: SlotForm) -> None:
    """A file of the first tokens has the same KV of them: so that prompts share runs."""
    data = file_of(form, 11)
    slot = parse(data)
    plan = form.plan(tokens_of(8))
    shorter = np.zeros(plan.nbytes, np.uint8)
    for at, text in plan.literals:
        shorter[at : at + len(text)] = np.frombuffer(text, np.uint8)
    for first in (0, 4):
        fill(shorter, form, plan, first, cut(data, slot, first, 4))
    found = parse(shorter)
    assert np.array_equal(found.tokens, tokens_of(8))
    assert np.array_equal(cut(shorter, found, 0, 8), cut(data, slot, 0, 8))


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_runs_that_follow_each_other_are_cut_and_filled_together(form: SlotForm) -> None:
    """Rows of values lie far from each other: each is read and written once for all runs."""
    data = file_of(form, 12)
    slot = parse(data)
    runs = cut(data, slot, 3, 3, 2)
    assert [run.tobytes() for run in runs] == [cut(data, slot, first, 3)[0].tobytes() for first in (3, 6)]
    made = data.copy()
    fill(made, form, form.plan(slot.tokens), 3, [np.bitwise_not(run) for run in runs])
    assert not np.array_equal(made, data)
    fill(made, form, form.plan(slot.tokens), 3, runs)
    assert np.array_equal(made, data)


def test_cells_in_any_order_are_cut_by_position() -> None:
    """In a cache that slots share, a slot's cells need not lie in the order of its tokens."""
    data = file_of(PLAIN, 6)
    slot = parse(data)
    order = np.array([2, 0, 1, 5, 4, 3])
    shuffled = data.copy()
    cells_at = 4 * (3 + 10 + 3)  # behind the head, the tokens, the stream count and two cell counts
    cells = shuffled[cells_at : cells_at + 72].view("<u4").reshape(6, 3)
    cells[:, 0] = order
    for start in slot.starts:
        rows = data[start : start + 144].reshape(6, 24)
        shuffled[start : start + 144].reshape(6, 24)[...] = rows[order]
    found = parse(shuffled)
    assert np.array_equal(cut(shuffled, found, 0, 6), cut(data, slot, 0, 6))
    assert np.array_equal(cut(shuffled, found, 2, 2), cut(data, slot, 2, 2))


def test_streams_do_not_change_the_names_of_kv_and_types_do() -> None:
    (section,) = PLAIN.sections
    assert SlotForm((replace(section, stream_count=4, stream_index=2),)).digest == PLAIN.digest
    assert SlotForm((replace(section, words=(0, 2, 64, 0)),)).digest != PLAIN.digest
    assert FORMS["transposed"].digest != PLAIN.digest


def test_a_window_that_has_dropped_tokens_is_refused() -> None:
    late = file_of(PLAIN, 6)
    cells_at = 4 * (3 + 10 + 3)  # as above
    late[cells_at : cells_at + 72].view("<u4").reshape(6, 3)[:, 0] += 1
    with pytest.raises(SlotFileError, match="windows"):
        parse(late)


@pytest.mark.parametrize(
    ("at", "value", "said"),
    [
        (0, 1, "no file of a slot"),
        (4, 2, "version 2 are unknown"),
        (8, 3, "a slot of 3 words"),
        (8, 1 << 30, "a slot of 1073741824 words"),
        (12, 0, "more than the tokens of a text"),
        (48, 1, "more than the tokens of a text"),
        (52, 0, "0 streams"),
        (60, 1 << 30, "several streams"),
        (68, 2, "positions of several kinds"),
    ],
)
def test_anything_else_is_refused_with_the_reason(at: int, value: int, said: str) -> None:
    data = file_of(PLAIN, 6)
    data[at : at + 4].view("<u4")[0] = value
    with pytest.raises(SlotFileError, match=said):
        parse(data)


def test_a_file_with_something_behind_its_kv_is_refused() -> None:
    with pytest.raises(SlotFileError, match="recurrent states"):
        parse(np.concatenate([file_of(PLAIN, 6), np.ones(40, np.uint8)]))
    assert "drafts" in HOLDS_MORE


@given(st.binary(max_size=300) | st.tuples(st.integers(0, 400), st.integers(0, 255)))
def test_no_bytes_do_anything_but_parse_or_be_refused(change: bytes | tuple[int, int]) -> None:
    if isinstance(change, bytes):
        data = np.frombuffer(change, np.uint8)
    else:
        data = file_of(FORMS["two caches"], 5)
        data[change[0] % len(data)] = change[1]
    try:
        slot = parse(data)
    except SlotFileError:
        return
    assert len(cut(data, slot, 0, len(slot.tokens))[0]) == len(slot.tokens) * slot.form.token_bytes
