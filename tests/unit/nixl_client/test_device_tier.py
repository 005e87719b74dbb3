"""Chunks in a device's memory: which are kept."""

from __future__ import annotations

import pytest
import torch

from descriptors.layout import ChunkLayout
from nixl_client.device_tier import DeviceTier

LAYOUT = ChunkLayout(2, 16, 8)


def chunk(value: int) -> torch.Tensor:
    return torch.full((2, 8), value, dtype=torch.uint8)


def filled(count: int, keys: str) -> DeviceTier:
    tier = DeviceTier(count * LAYOUT.chunk_bytes + 5, LAYOUT)
    for prefix in keys.split():
        tier.put(list(prefix), [chunk(ord(key)) for key in prefix])
    return tier


def test_the_prefix_that_was_used_longest_ago_leaves_from_its_end() -> None:
    tier = filled(4, "abc")
    tier.put(["x", "y"], [chunk(1), chunk(2)])
    assert (tier.matched("abc"), tier.matched("xy")) == (2, 2)
    assert [int(each[0, 0]) for each in tier.leading("abc")] == [ord("a"), ord("b")]
    tier.put(["z"], [chunk(3)])
    assert [tier.matched(each) for each in ("ab", "xy", "z")] == [2, 1, 1]
    assert tier.used_bytes == 4 * LAYOUT.chunk_bytes
    tier.clear()
    assert (tier.matched("a"), tier.used_bytes) == (0, 0)


def test_of_a_prefix_that_is_too_long_the_beginning_is_kept() -> None:
    tier = filled(2, "abcd")
    assert tier.matched("abcd") == 2
    assert filled(0, "ab").used_bytes == 0


def test_copies_are_kept_and_other_shapes_refused() -> None:
    tier, mine = filled(2, ""), chunk(7)
    tier.put(["a"], [mine])
    mine[:] = 0
    assert int(tier.leading("a")[0].sum()) == 7 * 16
    for wrong in (torch.zeros((2, 9), dtype=torch.uint8), torch.zeros((2, 8))):
        with pytest.raises(ValueError, match="a chunk is uint8 of shape"):
            tier.put(["b"], [wrong])
    assert tier.matched("b") == 0


def test_chunks_that_follow_others_do_not_push_them_out() -> None:
    tier = filled(3, "a")
    assert len(tier.leading("abcd")) == 1
    tier.put(list("bcd"), [chunk(1)] * 3, parents="a")
    assert tier.matched("abcd") == 3
