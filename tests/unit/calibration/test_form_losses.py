"""Means with intervals, forms on the curve of bytes against loss, and what the table of people says of them."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from objectcache.calibration.form_losses import FormLoss, TextSample, cells, on_curve
from objectcache.calibration.intervals import mean_interval, student


def form(codec: str, part: float, *kls: float, recall: float = 1.0) -> FormLoss:
    samples = (TextSample(kl, kl / 2, 1 - kl, -kl * recall, 0.25) for kl in kls)
    return FormLoss(codec, part, 0.1, 0.05, tuple(samples))


def test_the_interval_is_students() -> None:
    """Two samples a unit apart: 12.706 times a half on each side."""
    found = mean_interval([1.0, 2.0])
    assert (found.mean, found.high - found.mean) == (1.5, pytest.approx(6.353, abs=0.001))
    assert student(30) == 2.042
    assert student(31) == pytest.approx(2.040, abs=0.003)
    assert student(120) == pytest.approx(1.980, abs=0.003)


def test_one_sample_says_nothing_of_its_spread_and_none_says_nothing() -> None:
    assert mean_interval([3.0]).low == -math.inf
    with pytest.raises(ValueError, match="no samples"):
        mean_interval([])


@given(st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=40), st.floats(-1e3, 1e3))
def test_the_interval_moves_with_its_samples(samples: list[float], offset: float) -> None:
    before, after = mean_interval(samples), mean_interval([each + offset for each in samples])
    assert before.low <= before.mean <= before.high
    assert after.low == pytest.approx(before.low + offset, abs=1e-6)


def test_forms_that_another_one_beats_are_not_on_the_curve() -> None:
    """FP8 is larger than K8V4 and loses more; of two that are as large the one that loses less stays."""
    losses = [
        form("exact", 1.0, 0.0, 0.0), form("fp8-1", 0.5, 0.003, 0.003), form("k8v4-1", 0.44, 0.001, 0.001),
        form("kivi3-1", 0.25, 0.03, 0.03), form("k4v2-1", 0.25, 0.04, 0.04),
    ]  # fmt: skip
    assert on_curve(losses) == {"exact", "k8v4-1", "kivi3-1"}
    losses[-1] = form("k4v2-1", 0.25, 0.04, 0.04, recall=0.5)
    assert on_curve(losses) == {"exact", "k8v4-1", "kivi3-1", "k4v2-1"}, "it loses less by recall"


def test_the_table_has_intervals_and_says_what_is_on_the_curve() -> None:
    heads, rows = cells([form("fp8-1", 0.5, 0.2, 0.2), form("k8v4-1", 0.44, 0.0, 0.2)], {"fp8-1": 0.9, "k8v4-1": 0.8})
    assert len(heads) == len(rows[0])
    assert rows[0][:3] == ["fp8-1", "0.500", "0.20000 (0.20000 to 0.20000)"]
    assert rows[0][3] == "1.1052 (1.1052 to 1.1052)"
    assert [row[-1] for row in rows] == ["no", "yes"]
    assert rows[1][2].startswith("0.10000 (0.00000 to "), "a loss is not below 0"
