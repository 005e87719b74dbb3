"""A memory tries its codecs in its books, and encodes with the one that costs least there."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from objectcache.kv_codecs.elements import Element
from objectcache.kv_codecs.layer import Codec, LayerShape
from storage_server.cache.policies import memory_trials
from storage_server.cache.policies.memory_policy import MemoryPolicy
from storage_server.cache.policies.memory_trials import TryingMemoryPolicy, _Trial, preferred
from storage_server.cache.policies.reader_forms import ChunkUse
from storage_server.cache.policies.utility import CodecFigures, UtilitySettings
from storage_server.planning.forms import Reading

SHAPE = LayerShape(512, 192, Element.BFLOAT16)
READING = Reading(SHAPE, 30, (Codec.KIVI8, Codec.KIVI4))
EXACT = READING.exact_bytes
FIGURES = {Codec.KIVI8: CodecFigures(0.995, 4e9), Codec.KIVI4: CodecFigures(0.968, 4e9)}
SETTINGS = UtilitySettings(FIGURES, memory_bytes_per_s=1e9, home_bytes_per_s=EXACT / 0.15)
"""Contexts of 512 tokens of SmolLM2, and what their codecs lose there: a load takes 0.15 s, 4 bits lose 0.032 s."""


def use(policy: MemoryPolicy, now_s: float, names: Iterable[int], reading: Reading | None = READING) -> set[str]:
    """Use these chunks, each in a request of its own. Returns the codecs that chunks were encoded with."""
    seen = set()
    for number in names:
        decision = policy.request(now_s, [ChunkUse((f"chunk {number}", 0), EXACT)], reading)
        made = {**decision.recoded, **decision.admitted}.values()
        seen |= {each.codec.value for each in made if each is not None}
    return seen


def drawn(count: int, requests: int) -> list[int]:
    """Requests for so many chunks, some of them often: by Zipf's law."""
    weights = 1 / np.arange(1, count + 1)
    numbers: list[int] = np.random.default_rng(1).choice(count, requests, p=weights / weights.sum()).tolist()
    return numbers


@pytest.mark.parametrize(("room", "expected"), [(14, "kivi8-1"), (3, "kivi4-1")])
def test_the_codec_is_the_one_whose_uses_cost_least(room: int, expected: str) -> None:
    """Nearly all of 24 contexts fit at 8 bits in the room of 14; in that of 3 only ten do at 4 bits."""
    policy = TryingMemoryPolicy(room * EXACT, SETTINGS)
    asked = drawn(24, 400)
    assert use(policy, 0.0, asked[: room + 2]) <= {"kivi4-1"}, "it begins with what a byte saves"
    for at, number in enumerate(asked[room + 2 :]):
        use(policy, 1.0 + at, [number])
    assert policy.ladders.order is not None
    assert policy.ladders.order[0] == expected


def test_readers_of_other_codecs_get_the_best_of_theirs() -> None:
    policy = TryingMemoryPolicy(4 * EXACT, SETTINGS)
    policy.ladders.prefer(("kivi8-1", "kivi4-1"))
    assert use(policy, 0.0, range(8)) == {"kivi8-1"}
    policy.remove([(f"chunk {number}", 0) for number in range(8)])
    assert use(policy, 1.0, range(8, 16), replace(READING, codecs=(Codec.KIVI4,))) == {"kivi4-1"}


@pytest.mark.parametrize(("order", "expected"), [(None, {"kivi4-1"}), (("kivi8-1",), {"kivi8-1"}), ((), set[str]())])
def test_what_is_offered_now_counts_at_the_turn_of_a_chunk(order: tuple[str, ...] | None, expected: set[str]) -> None:
    """Four chunks were used while 4 bits were offered. One of them has to make room afterwards."""
    policy = MemoryPolicy(4 * EXACT, SETTINGS)
    use(policy, 0.0, range(4))
    if order is not None:
        policy.ladders.prefer(order)
    assert use(policy, 1.0, [4], None) == expected


def test_a_part_of_many_chunks_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trials' memories are as much smaller, and a secret says which chunks are tried."""
    monkeypatch.setattr(memory_trials, "TRIED_HELD_MAX", 16)
    tried = []
    for secret in (b"one", b"another"):
        policy = TryingMemoryPolicy(200 * EXACT, SETTINGS, secret=secret)
        for now_s in range(400):
            use(policy, float(now_s), [now_s % 250])
        assert policy._halvings >= 3
        held = set(policy._exact.policy.held)
        assert 0 < len(held) <= 16
        assert all(policy._is_tried(key) for key in held)
        assert policy._exact.policy.used_bytes <= 200 * EXACT >> policy._halvings
        tried.append({number for number in range(250) if policy._is_tried((f"chunk {number}", 0))})
    assert tried[0] != tried[1]


def test_a_request_for_many_chunks_is_tried_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_trials, "TRIED_HELD_MAX", 16)
    policy = TryingMemoryPolicy(1000 * EXACT, SETTINGS)
    policy.request(0.0, [ChunkUse((f"chunk {number}", 0), EXACT) for number in range(500)], READING)
    assert len(policy._exact.policy.held) <= 16


def test_nothing_is_tried_where_nothing_may_be_encoded() -> None:
    policy = TryingMemoryPolicy(4 * EXACT, SETTINGS)
    use(policy, 0.0, range(20), None)
    assert not policy._exact.policy.known_count
    use(policy, 1.0, range(20))
    assert policy._exact.policy.known_count


def test_a_crowd_of_small_chunks_takes_no_room_of_the_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    """They would have had half of all chunks left out, again and again, until no large one had room in a trial."""
    monkeypatch.setattr(memory_trials, "TRIED_HELD_MAX", 16)
    policy = TryingMemoryPolicy(8 * EXACT, SETTINGS)
    use(policy, 0.0, range(8))
    held = set(policy._exact.policy.held)
    for now_s in range(1, 20):
        small = [ChunkUse((f"small {now_s} {number}", 0), 4096) for number in range(100)]
        policy.request(float(now_s), small, None)
    assert policy._halvings == 0
    assert set(policy._exact.policy.held) == held


def test_readers_of_exact_chunks_count_in_the_trials() -> None:
    """To them an encoded chunk is none."""
    policy = TryingMemoryPolicy(8 * EXACT, SETTINGS)
    use(policy, 0.0, range(2))
    use(policy, 1.0, range(2, 4), None)
    assert len(policy._exact.policy.held) == 4


@given(st.lists(st.tuples(st.integers(0, 9), st.sampled_from([READING, None])), max_size=80), st.integers(0, 5))
def test_the_books_stay_right_while_codecs_are_tried(asked: list[tuple[int, Reading | None]], room: int) -> None:
    """The decisions fit into the memory, whatever the trials choose meanwhile."""
    policy = TryingMemoryPolicy(room * EXACT, SETTINGS)
    held: dict[tuple[str, int], int] = {}
    for now_s, (number, reading) in enumerate(asked):
        if now_s % 7 == 6:
            policy.ladders.prefer((("kivi8-1",), (), ("kivi4-1", "kivi8-1"))[now_s // 7 % 3])
        decision = policy.request(float(now_s), [ChunkUse((f"chunk {number}", 0), EXACT)], reading)
        for key in decision.evicted:
            del held[key]
        for key, encoding in {**decision.recoded, **decision.admitted}.items():
            held[key] = EXACT if encoding is None else encoding.reading.chunk_bytes(encoding.codec)
        assert policy.used_bytes == sum(held.values()) <= room * EXACT
        assert set(policy.held) == set(held)


def trial(codec: str, gain_s: float, deviation_s: float = 1.0) -> _Trial:
    return _Trial(MemoryPolicy(0, SETTINGS), codec, gain_s, deviation_s**2)


@pytest.mark.parametrize(
    ("present", "gains_s", "expected"),
    [
        ("", (4.0, 5.0), ("kivi4-1", "kivi8-1")),
        ("", (2.0, 5.0), ("kivi4-1",)),
        ("", (2.0, 2.5), ()),
        ("kivi8-1", (2.0, 2.1), ("kivi8-1", "kivi4-1")),
        ("kivi8-1", (2.0, 2.5), ("kivi4-1", "kivi8-1")),
        ("kivi8-1", (0.5, -1.0), ("kivi8-1",)),
        ("kivi8-1", (-0.1, 2.0), ()),
        ("kivi8-1", (-0.1, 4.0), ("kivi4-1",)),
    ],
)
def test_a_codec_has_to_gain_surely_and_clearly_more_than_the_present_one(
    present: str, gains_s: tuple[float, float], expected: tuple[str, ...]
) -> None:
    trials = [trial("kivi8-1", gains_s[0]), trial("kivi4-1", gains_s[1])]
    assert preferred(present, trials) == expected
