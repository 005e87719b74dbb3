"""Where the parts of pages lie: no byte outside of a pool is ever named."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nixl_client.connectors.sglang.rules.parts import HostAllocation, PartGroup, part_groups, places, portions

POOL = HostAllocation(1000, 400)


def test_parts_of_one_size_in_one_allocation_go_together() -> None:
    allocations = [POOL, HostAllocation(5000, 100)]
    groups = part_groups([1000, 1200, 5000, 1300], [50, 50, 50, 20], allocations)
    assert groups == (PartGroup(0, 50, (0, 1)), PartGroup(1, 50, (2,)), PartGroup(0, 20, (3,)))


def test_a_part_is_placed_in_the_largest_allocation_that_holds_it() -> None:
    """A pool refers to parts of its memory, too."""
    assert part_groups([1000], [50], [HostAllocation(1000, 60), POOL]) == (PartGroup(1, 50, (0,)),)


@pytest.mark.parametrize(
    ("addresses", "sizes"), [([999], [10]), ([1395], [10]), ([1000], [0]), ([], []), ([1000] * 5, [10] * 5)]
)
def test_parts_outside_or_empty_or_too_many_are_refused(addresses: list[int], sizes: list[int]) -> None:
    with pytest.raises(ValueError, match="part"):
        part_groups(addresses, sizes, [POOL])


def test_places_go_page_by_page() -> None:
    addresses = np.array([[1300, 1100], [1000, 1200]], dtype=np.int64)
    assert places(PartGroup(0, 50, (0, 1)), addresses, POOL) == [300, 100, 0, 200]


@pytest.mark.parametrize("addresses", [[[990]], [[1360]], [[1000], [1049]], [[1000], [1000]]])
def test_places_outside_of_the_pool_and_pages_that_share_memory_are_refused(addresses: list[list[int]]) -> None:
    with pytest.raises(ValueError, match="memory"):
        places(PartGroup(0, 50, (0,)), np.array(addresses, dtype=np.int64), POOL)


@given(st.integers(0, 200), st.integers(1, 100), st.integers(1, 1000), st.integers(1, 50))
def test_portions_cover_every_object_once_and_fit(count: int, nbytes: int, portion_bytes: int, most: int) -> None:
    found = portions(count, nbytes, portion_bytes, most)
    assert [number for first, end in found for number in range(first, end)] == list(range(count))
    assert all(end - first == 1 or (end - first) * nbytes <= portion_bytes for first, end in found)
    assert all(0 < end - first <= most for first, end in found)
