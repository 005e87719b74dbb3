"""When a load is given up for being late: pure decisions."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from descriptors.recompute import PrefillCosts
from nixl_client.connectors.late import RECHECK_MIN_S, LoadProgress, Tail, judge, pace_s

COSTS = PrefillCosts(token_us=1000.0)
TAIL = Tail(0, 1000, 10, 100)
"""A second of computing."""


def test_what_recomputing_costs_falls_to_nothing_but_the_step() -> None:
    costs = PrefillCosts(token_us=100.0, token_pair_us=1.0, request_us=50.0)
    recompute_s = Tail(40, 100, 16, 4).recompute_s(costs)
    pairs = (100**2 - np.array([40, 48, 64, 80, 96]) ** 2) / 2  # the first chunk begins before the first token
    assert recompute_s == pytest.approx((50 + 100 * np.array([60, 52, 36, 20, 4]) + pairs) / 1e6)


def test_a_load_at_its_pace_is_gone_on_with() -> None:
    verdict = judge(LoadProgress(32, 20, 0.01, 0.005), TAIL, COSTS)
    assert verdict.chunk_count == 100
    assert verdict.recheck_s > 0.1


def test_a_silence_is_borne_about_as_long_as_recomputing_takes() -> None:
    """Nothing has come, nothing is known: at most GAIN_MIN more is waited than computing costs."""
    waited_s, recheck_s = 0.0, 0.0
    while (verdict := judge(LoadProgress(32, 32, 0.0, waited_s), TAIL, COSTS)).chunk_count == 100:
        recheck_s = verdict.recheck_s
        waited_s += recheck_s
    assert verdict.chunk_count == 0
    assert 1.0 <= waited_s <= 1.26


def test_a_pace_that_is_too_slow_is_given_up_at_once() -> None:
    assert judge(LoadProgress(32, 30, 10.0, 0.0), TAIL, COSTS).chunk_count == 0


def test_of_a_slow_load_the_part_is_kept_that_is_soonest() -> None:
    """With costs by pairs of tokens the first chunks are cheap to compute, and the last ones dear: what is kept is
    fetched again from the first layer on.
    """
    dear = PrefillCosts(token_us=0.0, token_pair_us=4.0)  # two seconds of computing
    verdict = judge(LoadProgress(4, 4, 0.7, 0.0), TAIL, dear)
    assert 0 <= verdict.chunk_count < 100
    best_s = 4 * 0.7 * verdict.chunk_count / 100 + TAIL.recompute_s(dear)[verdict.chunk_count]
    for count in range(100):
        assert best_s <= 4 * 0.7 * count / 100 + TAIL.recompute_s(dear)[count] + 1e-9


def test_what_the_step_computes_anyway_hides_a_load() -> None:
    """Layers that come no later than they are computed cost nobody anything."""
    assert judge(LoadProgress(32, 32, 0.1, 0.0), TAIL, COSTS, layer_compute_s=0.1).chunk_count == 100
    assert judge(LoadProgress(32, 32, 0.1, 0.0), TAIL, COSTS, layer_compute_s=0.0).chunk_count < 100


@given(
    st.integers(1, 80),
    st.floats(0, 1),
    st.floats(0, 10),
    st.floats(0, 10),
    st.floats(0, 0.1),
    st.floats(0, 1e4),
    st.integers(1, 200),
)
def test_nothing_is_given_up_that_would_not_be_sooner(
    layers: int, left: float, pace: float, silent: float, compute: float, token_us: float, chunks: int
) -> None:
    progress = LoadProgress(layers, max(1, round(left * layers)), pace, silent)
    tail, costs = Tail(5, 16 * chunks, 16, chunks), PrefillCosts(token_us, 0.01)
    verdict = judge(progress, tail, costs, compute)
    forward_s = progress.layers_left * compute
    if verdict.chunk_count == chunks:
        assert verdict.recheck_s >= RECHECK_MIN_S
        return
    fetched_s = silent + layers * pace * verdict.chunk_count / chunks if verdict.chunk_count else 0.0
    instead_s = max(forward_s, fetched_s) + tail.recompute_s(costs)[verdict.chunk_count]
    assert instead_s < max(forward_s, progress.remaining_s)


def test_the_pace_is_that_of_the_last_layers() -> None:
    assert pace_s([]) == pace_s([3.0]) == 0.0
    assert pace_s([0.0, 1.0, 2.0]) == 1.0
    assert pace_s([0.0, 0.1, 0.2, 0.3, 1.3, 2.3, 3.3, 4.3]) == 1.0
