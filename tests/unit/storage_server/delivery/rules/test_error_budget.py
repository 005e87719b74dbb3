"""How much loss an access key gets."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from objectcache.kv_codecs.elements import Element
from objectcache.kv_codecs.layer import Codec, LayerShape
from storage_server.delivery.rules.error_budget import COUNT_MIN, HALF_LIFE_CHUNKS, ErrorBudget, ErrorLimits
from storage_server.planning.forms import Reading

READING = Reading(LayerShape(16, 128, Element.BFLOAT16), 4, (Codec.KIVI8, Codec.KIVI4))


def test_a_budget_is_spent_by_errors_and_comes_back_with_exact_chunks() -> None:
    budget = ErrorBudget(0.02)
    budget.note(1000, 0.01)
    assert budget.mean_error == pytest.approx(0.01)
    assert not budget.is_spent
    budget.note(1000, 0.07)
    assert budget.is_spent
    budget.note(HALF_LIFE_CHUNKS, 0.0)
    assert not budget.is_spent


def test_a_keys_first_delivery_does_not_spend_it() -> None:
    budget = ErrorBudget(0.02)
    budget.note(COUNT_MIN // 8, 0.07)
    assert not budget.is_spent


def test_a_budget_of_nothing_is_always_spent() -> None:
    assert ErrorBudget(0.0).is_spent


@given(st.lists(st.integers(1, 2000), min_size=1, max_size=300), st.floats(0.001, 0.2))
def test_whoever_takes_what_the_budget_allows_keeps_it_but_for_one_delivery(
    counts: list[int], mean_error_max: float
) -> None:
    budget, error = ErrorBudget(mean_error_max), 0.1
    for count in counts:
        before = budget.mean_error
        spent = budget.is_spent
        budget.note(count, 0.0 if spent else error)
        if spent:
            assert budget.mean_error <= before
    assert budget.mean_error <= mean_error_max + error * max(counts) / COUNT_MIN


def test_limits_are_those_of_the_key() -> None:
    limits = ErrorLimits({"a": 0.05}, {"b": 0.02}, {"d": 0.5})
    assert limits.limited("a", READING) == READING.bounded(0.05)
    limited = limits.limited("d", READING)
    assert limited is not None
    assert limited.losses is not None
    assert limited.losses.max_loss == 0.5
    assert not limited.bears(limited.loss_of((Codec.KIVI8,))), "without a calibration nothing keeps the bound"
    assert limits.limited("b", READING) is READING
    limits.note("b", 10 * COUNT_MIN, 0.1)
    limits.note("c", 10 * COUNT_MIN, 0.1)
    assert limits.limited("b", READING) is None
    assert limits.limited("c", READING) is READING
    assert limits.limited("a", None) is None
