"""Costs of engines that publish none."""

from __future__ import annotations

import pytest

from objectcache.orchestrator.rules.observed_costs import (
    GROWTH_S_MAX,
    SAMPLES_MIN,
    TOKEN_US_DEFAULT,
    ObservedCosts,
    ObservedSteps,
    Output,
)


def test_the_fit_finds_the_slope_in_spite_of_some_that_were_late() -> None:
    seen = ObservedCosts()
    assert seen.costs.token_us == TOKEN_US_DEFAULT
    for at in range(20):
        tokens = 100 + 97 * at
        seen.note(tokens, 0.005 + tokens * 300e-6 + (2.0 if at % 7 == 3 else 0.0))
    assert seen.costs.token_us == pytest.approx(300, rel=0.05)
    assert seen.costs.request_us == pytest.approx(5000, abs=2500)


def test_prompts_of_one_length_give_their_rate() -> None:
    seen = ObservedCosts()
    for _ in range(SAMPLES_MIN):
        seen.note(1000, 0.2)
    assert seen.costs.token_us == pytest.approx(200)
    seen.note(0, 0.2)
    seen.note(5, -1.0)
    assert seen.costs.token_us == pytest.approx(200)


def looks(counts: list[int], step_s: float = 0.05, growth_s: float = 0.01, answer_tokens: int = 40) -> ObservedSteps:
    """One look a second at an engine with so many streams."""
    seen, tokens = ObservedSteps(), 0.0
    for at, count in enumerate(counts):
        tokens += count / (step_s + growth_s * count)
        seen.note(Output(float(at), count, tokens, tokens // answer_tokens))
    return seen


def test_the_growth_of_steps_is_that_of_an_answer() -> None:
    """A stream more costs each other one 10 ms a token, 0.4 s in an answer of 40 tokens."""
    assert looks([2, 2, 2, 4, 4, 5, 5, 8, 8, 8, 12, 12]).growth_s == pytest.approx(0.4, rel=0.1)


def test_what_does_not_change_says_nothing_and_what_is_known_stays() -> None:
    assert looks([3] * 100).growth_s is None
    assert looks([0] * 100).growth_s is None
    known = looks([2, 2, 2, 4, 4, 5, 5, 8, 8, 8] + [8] * 100)
    assert known.growth_s == pytest.approx(0.4, rel=0.2)


def test_steps_that_do_not_grow_cost_nobody_anything() -> None:
    assert looks([2, 2, 2, 4, 4, 5, 5, 8, 8, 8], growth_s=0.0).growth_s == pytest.approx(0.0, abs=1e-6)


def test_counts_that_make_no_sense_are_no_fit() -> None:
    """One engine's growth of nan gave every request 500."""
    seen = ObservedSteps()
    for at in range(12):
        seen.note(Output(float(at), int(1e308) if at % 2 else int(1.2e308), at * 1e-3, float(at)))
        assert seen.growth_s is None or 0 <= seen.growth_s <= GROWTH_S_MAX


def test_another_process_is_measured_anew() -> None:
    seen = looks([2, 2, 2, 4, 4, 5, 5, 8, 8, 8])
    seen.note(Output(100.0, 2, 0.0, 0.0))
    assert seen.growth_s is None
