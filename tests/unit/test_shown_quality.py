"""Qualities of codecs, as far as samples show them."""

from __future__ import annotations

import numpy as np
import pytest

from objectcache.calibration.shown_quality import least_lead, shown_qualities

SIZES = {"2": 0.13, "4": 0.26, "8": 0.51}


def scores(mean: float, count: int = 64, noise: float = 0.0, seed: int = 0) -> np.ndarray:
    return mean + noise * np.random.default_rng(seed).standard_normal(count)


def test_a_lead_that_is_noise_counts_as_none() -> None:
    """The policy kept forms of four times the size that were no better, and had room for fewer."""
    given = {"8": scores(0.93, noise=0.2, seed=1), "4": scores(0.9, noise=0.2, seed=2), "2": scores(0.9)}
    assert given["8"].mean() > 0.9
    shown = shown_qualities(given, SIZES)
    assert list(shown) == ["8", "4", "2"]
    assert max(shown.values()) == shown["2"] == pytest.approx(0.9)


def test_a_lead_that_the_samples_show_counts() -> None:
    two, four, eight = (scores(mean, noise=0.01, seed=seed) for seed, mean in enumerate((0.8, 0.95, 0.951)))
    shown = shown_qualities({"2": two, "4": four, "8": eight}, SIZES)
    assert shown["2"] == pytest.approx(0.8, abs=0.01)
    assert shown["4"] == pytest.approx(0.95, abs=0.01)
    assert shown["8"] <= max(shown["4"], float(eight.mean()))


def test_a_larger_codec_that_is_worse_stays_so() -> None:
    shown = shown_qualities({"2": scores(0.9), "8": scores(0.5)}, SIZES)
    assert shown == {"2": pytest.approx(0.9), "8": pytest.approx(0.5)}


def test_samples_are_compared_pair_by_pair() -> None:
    hard = np.linspace(0.0, 1.0, 64)
    assert least_lead(hard + 0.01, hard) == pytest.approx(0.01)
    shown = shown_qualities({"2": hard, "8": hard + 0.01}, SIZES)
    assert shown["8"] > shown["2"]


def test_without_the_same_samples_nothing_is_said() -> None:
    with pytest.raises(ValueError, match="the same samples"):
        shown_qualities({"2": scores(1.0, 3), "4": scores(1.0, 4)}, SIZES)
    with pytest.raises(ValueError, match="the same samples"):
        shown_qualities({"2": scores(1.0, 0)}, SIZES)
