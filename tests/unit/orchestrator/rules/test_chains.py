"""Our own names of blocks."""

from __future__ import annotations

import pytest

from objectcache.orchestrator.rules.chains import block_hashes, next_hash, root_hash

TOKENS = list(range(100, 140))


def test_a_name_depends_on_every_token_before_it_and_on_nothing_behind() -> None:
    whole = block_hashes(TOKENS, 8, root_hash())
    assert len(whole) == 5
    assert block_hashes(TOKENS[:23], 8, root_hash()) == whole[:2]
    changed = block_hashes([1, *TOKENS[1:]], 8, root_hash())
    assert not set(changed) & set(whole)
    assert block_hashes([*TOKENS[:-1], 1], 8, root_hash())[:4] == whole[:4]


def test_blocks_one_by_one_have_the_same_names() -> None:
    parent = root_hash("adapter", "salt")
    names = []
    for start in range(0, 40, 8):
        parent = next_hash(parent, TOKENS[start : start + 8])
        names.append(parent)
    assert names == block_hashes(TOKENS, 8, root_hash("adapter", "salt"))


def test_adapters_and_salts_share_no_name() -> None:
    roots = {root_hash(), root_hash("a"), root_hash("", "a"), root_hash("a", "b"), root_hash("ab"), root_hash("", "ab")}
    assert len(roots) == 6


@pytest.mark.parametrize("tokens", [[-1], [1 << 32], [1.5], ["a"], [[1]]])
def test_tokens_are_whole_numbers_of_32_bits(tokens: list[object]) -> None:
    with pytest.raises((ValueError, OverflowError)):
        block_hashes(tokens, 1, root_hash())  # type: ignore[arg-type]
