"""Spans of two memories, cut so that pieces fit each other."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from objectcache.adapters.nixl_memory import paired


@given(st.lists(st.integers(1, 9), min_size=1, max_size=12), st.data())
def test_each_byte_goes_to_its_place(sizes: list[int], data: st.DataObject) -> None:
    """Whatever way the same bytes are cut on both sides."""
    total = sum(sizes)
    ends = sorted(data.draw(st.sets(st.integers(1, total - 1), max_size=8))) if total > 1 else []
    others = np.diff([0, *ends, total]).tolist()

    def spans(lengths: list[int], base: int) -> np.ndarray:
        """Ascending, with gaps between some of them."""
        gaps = data.draw(st.lists(st.integers(0, 3), min_size=len(lengths), max_size=len(lengths)))
        starts = np.cumsum([base, *lengths[:-1]]) + np.cumsum(gaps)
        return np.array(list(zip(starts.tolist(), lengths, strict=True)), dtype=np.int64)

    ours, theirs = spans(sizes, 1_000), spans(others, 5_000)
    sources, sinks = paired(ours, theirs)
    assert (sources[:, 1] == sinks[:, 1]).all()

    def addresses(rows: np.ndarray) -> list[int]:
        return [at for address, nbytes in rows.tolist() for at in range(address, address + nbytes)]

    assert addresses(sources) == addresses(ours)
    assert addresses(sinks) == addresses(theirs)
