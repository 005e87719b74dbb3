"""The terms of a prediction."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from descriptors.layout import ChunkLayout
from descriptors.recompute import Choice, DeliveryCosts, PrefillCosts
from objectcache.orchestrator.rules.observed_costs import Correction
from objectcache.orchestrator.rules.prediction import EngineState, StoredPrefix, least_ttft_s, predict, recompute_s

LAYOUT = ChunkLayout(4, 16, 65_536)
COSTS = PrefillCosts(token_us=100.0, request_us=1000.0)


def test_without_a_store_it_is_queue_routing_and_the_tokens_that_are_not_held() -> None:
    found = predict(1000, EngineState("a", COSTS, queue_s=0.5, held_tokens=400), routing_s=0.01)
    assert found.compute_s == pytest.approx(0.001 + 600 * 100e-6)
    assert found.ttft_s == pytest.approx(0.5 + 0.01 + 0.061)
    assert (found.choice, found.load_tokens) == (Choice.RECOMPUTE, 0)


def test_a_prompt_that_is_held_whole_computes_its_last_token_again() -> None:
    assert predict(64, EngineState("a", COSTS, held_tokens=64)).held_tokens == 63


def test_a_fast_store_is_loaded_and_a_slow_one_is_not() -> None:
    fast = predict(1000, EngineState("a", COSTS, stored=StoredPrefix(62, LAYOUT, 10e9)))
    assert fast.load_chunks == 62
    assert fast.load_tokens == 62 * 16
    assert fast.compute_s < fast.recompute_s
    slow = predict(1000, EngineState("a", COSTS, stored=StoredPrefix(62, LAYOUT, 1e6)))
    assert slow.choice is Choice.RECOMPUTE
    assert slow.compute_s == slow.recompute_s
    assert slow.stored_tokens == 62 * 16


def test_chunks_that_the_engine_holds_are_not_loaded() -> None:
    found = predict(1000, EngineState("a", COSTS, held_tokens=320, stored=StoredPrefix(62, LAYOUT, 10e9)))
    assert found.load_tokens == (62 - 20) * 16


def test_what_was_seen_corrects_the_costs() -> None:
    assert predict(100, EngineState("a", COSTS, correction=Correction(2.0))).compute_s == pytest.approx(
        2 * (0.001 + 0.01)
    )


@given(
    st.integers(1, 5000),
    st.integers(0, 5000),
    st.integers(0, 300),
    st.floats(0, 1e11),
    st.floats(0.0, 0.1),
    st.floats(0.25, 4.0),
)
def test_no_prediction_is_below_its_bound_or_above_computing(
    prompt: int, held: int, chunks: int, rate: float, chunk_s: float, bias: float
) -> None:
    """The bound is what saves making most predictions."""
    stored = StoredPrefix(chunks, LAYOUT, rate, DeliveryCosts(chunk_s=chunk_s))
    state = EngineState("a", COSTS, queue_s=0.1, held_tokens=held, stored=stored, correction=Correction(bias, 0.01))
    found = predict(prompt, state)
    assert found.ttft_s >= least_ttft_s(prompt, state) - 1e-9
    assert found.compute_s <= found.recompute_s + 1e-12
    assert found.recompute_s == pytest.approx(
        recompute_s(prompt, found.held_tokens, PrefillCosts(100 * bias, 0, 1000 * bias + 10_000))
    )
