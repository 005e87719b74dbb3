"""The used bytes of rows: what is stored, and where it is put back."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nixl_client.connectors.vllm_tier.rules.rows import RowForm, UsedPages

ROW = 4096


@st.composite
def pages(draw: st.DrawFn) -> list[UsedPages]:
    """Tensors side by side, each with pages that are used in part."""
    found, start = [], 0
    for _ in range(draw(st.integers(1, 5))):
        page, count = draw(st.integers(1, 200)), draw(st.integers(1, 4))
        if start + page * count > ROW:
            break
        if draw(st.booleans()) or not found:
            found.append(UsedPages(start, page, draw(st.integers(1, page)), count))
        start += page * count
    return found


@given(pages(), st.integers(1, 4))
def test_only_used_bytes_are_packed_and_they_come_back_to_where_they_were(found: list[UsedPages], count: int) -> None:
    is_used = np.zeros(ROW, dtype=bool)
    for each in found:
        for index in range(each.count):
            is_used[each.start + index * each.stride :][: each.nbytes] = True
    form = RowForm.of(found, ROW)
    rows = np.random.default_rng(1).integers(0, 256, (count, ROW), dtype=np.uint8)
    packed = form.pack(rows)
    assert form.nbytes == is_used.sum()
    assert np.array_equal(packed, rows[:, is_used])
    assert form.is_front == bool(is_used[: form.nbytes].all())
    slots = np.arange(count)[::-1] * 2
    target = np.full((2 * count, ROW), 0xAA, dtype=np.uint8)
    form.unpack(packed, target, slots)
    assert np.array_equal(target[slots][:, is_used], packed)
    assert (target[:, ~is_used] == 0xAA).all()
    assert (np.delete(target, slots, axis=0) == 0xAA).all()


@pytest.mark.parametrize(
    "bad",
    [
        [],
        [UsedPages(0, 64, 0, 1)],
        [UsedPages(-1, 64, 64, 1)],
        [UsedPages(0, 64, 64, 0)],
        [UsedPages(0, 64, 64, ROW)],
        [UsedPages(ROW, 64, 1, 1)],
        [UsedPages(0, 0, 1, 1 << 40)],
    ],
)
def test_pages_that_cannot_be_are_refused(bad: list[UsedPages]) -> None:
    with pytest.raises(ValueError, match=r"page|used"):
        RowForm.of(bad, ROW)
