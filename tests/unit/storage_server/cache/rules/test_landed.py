"""Which bytes of the DRAM tier have been read to their place."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from storage_server.cache.rules.landed import LandedUnits
from storage_server.planning.extent import ALIGNMENT_BYTES

UNIT = ALIGNMENT_BYTES


@given(st.lists(st.tuples(st.integers(0, 31), st.integers(1, 8)), max_size=8), st.integers(1, 32 * UNIT))
def test_missing_parts_are_what_was_not_added(spans: list[tuple[int, int]], nbytes: int) -> None:
    """An extent at unit 4 of the memory; spans may lie outside it."""
    landed = LandedUnits(64 * UNIT)
    offsets = np.array([start * UNIT for start, _ in spans], dtype=np.int64)
    lengths = np.array([count * UNIT for _, count in spans], dtype=np.int64)
    landed.add(offsets, lengths)
    expected = np.ones(nbytes, dtype=np.bool_)
    for start, count in spans:
        first, last = max(0, (start - 4) * UNIT), max(0, (start + count - 4) * UNIT)
        expected[first:last] = False
    found = np.zeros(nbytes, dtype=np.bool_)
    for start, end in landed.missing(4 * UNIT, nbytes):
        assert 0 <= start < end <= nbytes
        assert not found[start:end].any()
        found[start:end] = True
    assert (found == expected).all()


def test_a_cleared_place_is_missing() -> None:
    landed = LandedUnits(16 * UNIT)
    landed.add(np.array([0]), np.array([16 * UNIT]))
    landed.clear(4 * UNIT, 3 * UNIT)
    assert landed.missing(2 * UNIT, 8 * UNIT) == [(2 * UNIT, 5 * UNIT)]
    assert landed.missing(8 * UNIT, UNIT) == []
