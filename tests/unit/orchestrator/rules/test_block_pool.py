"""The allocation trace of 003, and the laws of block pools."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from objectcache.orchestrator.rules.block_pool import (
    MODEL_BLOCK_BYTES,
    Allocation,
    BlockPools,
    Candidate,
    Refused,
    required_blocks,
)

MB = 1_000_000


def papers_pools() -> BlockPools:
    """As 003's trace begins: node-a has 20 of 62 blocks free, node-b 31 of 62; req-1 is active on node-a."""
    pools = BlockPools({"node-a": 62, "node-b": 62})
    for request_id, required in (("req-1", 42), ("req-2", 31)):
        assert isinstance(pools.allocate(request_id, required), Allocation)
    return pools


def test_the_trace_of_003() -> None:
    pools = papers_pools()
    assert (pools.free_blocks("node-a"), pools.free_blocks("node-b")) == (20, 31)
    required = required_blocks(180 * MB, MODEL_BLOCK_BYTES)
    assert required == 12
    assert pools.candidates(required) == [Candidate("node-a", 20, 8), Candidate("node-b", 31, 19)]
    fourth = pools.allocate("req-4", required)
    assert isinstance(fourth, Allocation)
    assert fourth.node == "node-a"
    assert pools.free_blocks("node-a") == 8
    pools.finish("req-4")

    required = required_blocks(600 * MB, MODEL_BLOCK_BYTES)
    assert required == 38
    fifth = pools.allocate("req-5", required)  # evicts req-4, skips req-1, tries once more, and is refused
    assert fifth == Refused("req-5", 38, {"node-a": 20, "node-b": 31}, {"node-a": 62, "node-b": 62})
    assert not fifth.never_fits
    assert pools.allocation("req-4") is None
    assert pools.allocation("req-1") is not None


def test_a_request_that_never_fits_is_told_so() -> None:
    refused = papers_pools().allocate("req-9", required_blocks(1000 * MB, MODEL_BLOCK_BYTES))
    assert isinstance(refused, Refused)
    assert refused.never_fits


def test_the_oldest_inactive_request_leaves_and_stale_entries_are_skipped() -> None:
    pools = BlockPools({"a": 4})
    for name in ("1", "2", "3", "4"):
        pools.allocate(name, 1)
    pools.free("1")
    pools.allocate("5", 1)
    for name in ("2", "3"):
        pools.finish(name)
    assert isinstance(pools.allocate("6", 1), Allocation)
    assert pools.allocation("2") is None
    assert pools.allocation("3") is not None
    with pytest.raises(ValueError, match="has blocks"):
        pools.allocate("6", 1)


@given(st.lists(st.tuples(st.sampled_from(["take", "finish", "free"]), st.integers(0, 9), st.integers(1, 12))))
def test_no_block_is_given_out_twice_and_none_is_lost(steps: list[tuple[str, int, int]]) -> None:
    totals = {"a": 16, "b": 9}
    pools, known = BlockPools(totals), set()
    for what, number, required in steps:
        name = str(number)
        if what == "take" and pools.allocation(name) is None:
            before = {node: pools.free_blocks(node) for node in totals}
            found = pools.allocate(name, required)
            known.add(name)
            if isinstance(found, Refused):
                assert all(free < required for free in found.free_blocks.values())
            elif before[found.node] >= required:
                assert all(before[node] < required or before[node] >= before[found.node] for node in totals)
        elif what == "finish":
            pools.finish(name)
        else:
            pools.free(name)
        held = [each for name in known if (each := pools.allocation(name)) is not None]
        blocks = [(each.node, block) for each in held for block in each.blocks]
        assert len(blocks) == len(set(blocks))
        for node, total in totals.items():
            assert pools.free_blocks(node) + sum(len(each.blocks) for each in held if each.node == node) == total
