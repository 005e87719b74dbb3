"""Which engine holds how much of a prompt."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from objectcache.orchestrator.rules import prefix_index
from objectcache.orchestrator.rules.block_holders import CLEARED_MAX, SWEEP_BLOCKS
from objectcache.orchestrator.rules.chains import block_hashes, root_hash
from objectcache.orchestrator.rules.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, name_bytes
from objectcache.orchestrator.rules.prefix_index import ENGINES_MAX, EXPECTED_S, EXPECTED_STEPS_MAX, PrefixIndex

STEP = 4
PROMPT = list(range(20))
CHAIN = block_hashes(PROMPT, STEP, root_hash())


def stored(tokens: Sequence[int], first_name: int, parent: int | None = None) -> BlockStored:
    count = len(tokens) // STEP
    return BlockStored(tuple(range(first_name, first_name + count)), parent, tuple(tokens[: count * STEP]), STEP)


def index_of(*engines: str) -> PrefixIndex:
    index = PrefixIndex()
    for name in engines:
        index.add_engine(name)
    return index


def test_each_engine_holds_as_much_as_its_events_say() -> None:
    index = index_of("a", "b", "c")
    index.apply("a", stored(PROMPT, 100))
    index.apply("b", stored(PROMPT[:8], 7))
    assert index.held(CHAIN, 0.0) == {"a": 5, "b": 2, "c": 0}
    assert index.block_tokens("a") == STEP
    assert index.block_tokens("c") is None


def test_a_block_that_has_gone_ends_the_prefix() -> None:
    index = index_of("a", "b")
    index.apply("a", stored(PROMPT, 1))
    index.apply("b", stored(PROMPT, 1))
    index.apply("a", BlockRemoved((3,)))
    assert index.held(CHAIN, 0.0) == {"a": 2, "b": 5}
    index.apply("b", AllBlocksCleared())
    assert index.held(CHAIN, 0.0) == {"a": 2, "b": 0}
    assert index.block_count == 4


def test_blocks_go_on_from_a_parent_that_is_known() -> None:
    index = index_of("a")
    index.apply("a", stored(PROMPT[:8], 1))
    index.apply("a", stored(PROMPT[8:], 3, parent=2))
    assert index.held(CHAIN, 0.0) == {"a": 5}
    index.apply("a", stored(PROMPT[8:], 50, parent=999))
    assert index.orphan_count("a") == 3


def test_a_block_that_was_stored_twice_goes_when_both_have_gone() -> None:
    index = index_of("a")
    index.apply("a", stored(PROMPT[:4], 1))
    index.apply("a", stored(PROMPT[:4], 2))
    index.apply("a", BlockRemoved((1,)))
    assert index.held(CHAIN, 0.0) == {"a": 1}
    index.apply("a", BlockRemoved((2,)))
    assert index.held(CHAIN, 0.0) == {"a": 0}
    assert index.block_count == 0


def test_salts_adapters_images_other_memory_and_other_groups_do_not_count() -> None:
    index = index_of("a")
    names, tokens = (1, 2, 3, 4, 5), tuple(PROMPT)
    index.apply("a", BlockStored(names, None, tokens, STEP, extras=(("salt",), (), (), (), ())))
    index.apply("a", BlockStored((11, 12, 13, 14, 15), None, tokens, STEP, adapter="lora"))
    index.apply("a", BlockStored((21, 22, 23, 24, 25), None, tokens, STEP, extras=((("image", 1),), (), (), (), ())))
    index.apply("a", BlockStored((31, 32, 33, 34, 35), None, tokens, STEP, medium="CPU"))
    index.apply("a", BlockStored((41, 42, 43, 44, 45), None, tokens, STEP, group=1))
    assert index.held(CHAIN, 0.0) == {"a": 0}
    assert index.held(block_hashes(PROMPT, STEP, root_hash("", "salt")), 0.0) == {"a": 5}
    assert index.held(block_hashes(PROMPT, STEP, root_hash("lora")), 0.0) == {"a": 5}


def test_a_request_that_was_sent_counts_for_a_while() -> None:
    """So that the next one with the same beginning goes there, too, although no event has come yet."""
    index = index_of("a", "b")
    index.expect("a", CHAIN[:3], 10.0)
    assert index.held(CHAIN, 10.0 + EXPECTED_S / 2) == {"a": 3, "b": 0}
    assert index.held(CHAIN, 10.0 + EXPECTED_S) == {"a": 0, "b": 0}
    index.apply("b", stored(PROMPT[:8], 1))
    index.expect("b", CHAIN, 20.0)
    assert index.held(CHAIN, 20.5)["b"] == 5


def test_an_engine_that_leaves_is_forgotten_and_its_place_is_used_again() -> None:
    index = index_of("a", "b")
    index.apply("a", stored(PROMPT, 1))
    index.remove_engine("a")
    index.add_engine("c")
    assert index.held(CHAIN, 0.0) == {"b": 0, "c": 0}
    index.apply("c", stored(PROMPT[:4], 1))
    assert index.held(CHAIN, 0.0) == {"b": 0, "c": 1}


def test_there_are_not_more_engines_than_may_be() -> None:
    index = index_of(*map(str, range(ENGINES_MAX)))
    with pytest.raises(ValueError, match="engines"):
        index.add_engine("one more")


def test_what_was_written_down_is_taken_over() -> None:
    index = index_of("a")
    index.restore("a", [(name_bytes(name), block) for name, block in enumerate(CHAIN[:3])])
    assert index.held(CHAIN, 0.0) == {"a": 3}
    index.apply("a", BlockRemoved((1,)))
    assert index.held(CHAIN, 0.0) == {"a": 1}
    assert index.prefix_of("a", name_bytes(2)) == CHAIN[2]


def test_an_engine_does_not_choose_where_its_names_lie_in_a_dictionary() -> None:
    """The hash of a number is the number: 700,000 numbers that collided let one search take 10 ms."""
    index, count = index_of("a"), 6400
    index.apply("a", BlockStored(tuple(at << 14 for at in range(count)), None, tuple(range(count)), 1))
    sizes = list(map(len, index._engines["a"].names.slices))
    assert sum(sizes) == count
    assert max(sizes) < 2 * count / len(sizes)


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3), st.integers(0, 4), st.booleans()), max_size=40))
def test_the_index_agrees_with_a_walk_over_each_engines_blocks(steps: list[tuple[int, int, int, bool]]) -> None:
    """Three engines store and remove runs of four prompts that share beginnings."""
    prompts = [[1] * 4 + [2] * 4 + [kind] * 8 for kind in range(2)] + [[kind] * 16 for kind in (5, 6)]
    chains = [block_hashes(prompt, STEP, root_hash()) for prompt in prompts]
    index = index_of("0", "1", "2")
    model: list[dict[int, bytes]] = [{}, {}, {}]
    for engine, prompt, count, is_stored in steps:
        names = [1000 * prompt + at for at in range(count)]
        if is_stored and count:
            index.apply(str(engine), BlockStored(tuple(names), None, tuple(prompts[prompt][: count * STEP]), STEP))
            model[engine].update(zip(names, chains[prompt], strict=False))
        elif names:
            index.apply(str(engine), BlockRemoved((names[-1],)))
            model[engine].pop(names[-1], None)
    for chain in chains:
        wanted = {}
        for engine in range(3):
            held = set(model[engine].values())
            wanted[str(engine)] = next((at for at, block in enumerate(chain) if block not in held), len(chain))
        assert index.held(chain, 0.0) == wanted


def test_what_was_expected_for_a_short_time_does_not_stay_behind_what_is_expected_for_a_long_one() -> None:
    index = index_of("a")
    index.expect("a", [b"other"], 0.0, for_s=120.0)
    index.expect("a", CHAIN, 0.0, for_s=2.0)
    assert index.held(CHAIN, 1.0) == {"a": 5}
    assert index.held(CHAIN, 3.0) == {"a": 0}
    index.expect("a", CHAIN, 10.0)
    index.forget_expected("a")
    assert index.held(CHAIN, 10.0) == {"a": 0}


def test_what_was_cleared_is_swept_in_small_steps_and_counts_no_more() -> None:
    """Millions of blocks would hold the event loop for seconds."""
    index = index_of("a", "b")
    index.apply("a", stored(PROMPT, 100))
    index.apply("b", stored(PROMPT, 100))
    long = list(range(STEP * 3 * SWEEP_BLOCKS))
    index.apply("a", stored(long, 10_000))
    before = index.block_count
    index.apply("a", AllBlocksCleared())
    assert index.held_count("a") == 0
    assert index.held(CHAIN, 0.0) == {"a": 0, "b": 5}
    assert before - index.block_count <= SWEEP_BLOCKS
    index.apply("a", stored(PROMPT[:8], 100))
    assert index.held(CHAIN, 0.0) == {"a": 2, "b": 5}
    steps = 0
    while index.holders.sweep():
        steps += 1
    assert steps >= 2
    assert index.block_count == len(CHAIN)
    assert index.held(CHAIN, 0.0) == {"a": 2, "b": 5}
    for _ in range(2 * CLEARED_MAX):
        index.apply("a", stored(PROMPT, 100))
        index.clear("a")
    while index.holders.sweep():
        continue
    assert index.block_count == len(CHAIN)
    assert max(index.holders._free_bits) <= CLEARED_MAX + 2


def test_all_ranks_of_an_engine_together_have_a_bounded_number_of_expected_blocks() -> None:
    """Each rank had as many as an engine: one of 64 ranks took 2 GB with prompts that had been sent to it."""
    index = PrefixIndex()
    for rank in range(64):
        index.add_engine(f"a#{rank}", 64)
    chain = [at.to_bytes(16, "little") for at in range(EXPECTED_STEPS_MAX)]
    others = [at.to_bytes(16, "big") for at in range(1, 100)]
    index.expect("a#1", others, 0.0)
    index.expect("a#1", chain, 0.0)
    assert index.held([*chain], 0.0)["a#1"] == len(chain), "a long prompt has room"
    assert index.held([*others], 0.0)["a#1"] == 0


def test_an_engine_that_ends_with_all_its_ranks_has_no_more_swept_at_once() -> None:
    """Each rank was swept a step when it was cleared: 64 of them stopped the event loop for a quarter of a second."""
    ranks = [f"a#{rank}" for rank in range(64)]
    index = index_of(*ranks)
    for at, rank in enumerate(ranks):
        index.restore(rank, ((name, (at << 32 | name).to_bytes(16, "little")) for name in range(SWEEP_BLOCKS // 4)))
    before = index.block_count
    for rank in ranks:
        index.clear(rank)
    assert before - index.block_count <= 4 * SWEEP_BLOCKS
    while index.holders.sweep():
        continue
    assert index.block_count == 0


def test_an_engine_is_known_under_the_names_of_its_ranks() -> None:
    index = index_of("a", "a#1", "ab", "b")
    assert index.names_of("a") == ["a", "a#1"]


def test_the_ranks_of_an_engine_share_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that said that it had 64 ranks might fill 64 times the bound."""
    monkeypatch.setattr(prefix_index, "BLOCKS_MAX", 8)
    index = PrefixIndex()
    for name in ("a", "a#1", "a#2", "a#3"):
        index.add_engine(name, rank_count=4)
        index.apply(name, stored(PROMPT, 100))
        index.restore(name, [(7, b"x" * 16)])
    assert [index.held_count(name) for name in index.names_of("a")] == [2, 2, 2, 2]
    index.add_engine("a")
    index.apply("a", stored(PROMPT, 100))
    assert index.held_count("a") == 5


def test_a_decision_follows_so_many_expected_blocks_of_all_engines_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_index, "EXPECTED_STEPS_MAX", 7)
    index = index_of("a", "b", "c")
    for name in ("a", "b", "c"):
        index.expect(name, CHAIN, 0.0)
    assert index.held(CHAIN, 1.0) == {"a": 5, "b": 2, "c": 0}
