"""Costs of engines that publish none."""

from __future__ import annotations

import pytest

from orchestrator.rules.observed_costs import SAMPLES_MIN, TOKEN_US_DEFAULT, ObservedCosts


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
