"""Values of keeping chunks, learned from counts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage_server.cache.policies.reuse_times import (
    BUCKET_COUNT,
    EDGES_S,
    PRIOR_RATE,
    ReuseTimes,
    values_at,
)


def test_the_value_of_a_certain_use_is_one_over_the_time_until_then() -> None:
    """All chunks are used in bucket 1, on average in its middle."""
    rates = np.zeros((1, BUCKET_COUNT))
    rates[0, 1] = 1.0
    values = values_at(rates)[0]
    assert values[1] == pytest.approx(1 / ((EDGES_S[2] - EDGES_S[1]) / 2))
    assert values[0] == pytest.approx(1 / (EDGES_S[1] + (EDGES_S[2] - EDGES_S[1]) / 2))
    assert values[2] == 0


@given(st.lists(st.floats(0, 1), min_size=BUCKET_COUNT, max_size=BUCKET_COUNT))
def test_the_value_is_that_of_the_best_moment_to_give_up(rates: list[float]) -> None:
    """Against the definition, moment after moment."""
    found = values_at(np.asarray([rates]))[0]
    for start in range(0, BUCKET_COUNT, 7):
        best, unused, gain, held_s = 0.0, 1.0, 0.0, 0.0
        for bucket in range(start, BUCKET_COUNT):
            left = unused * (1 - rates[bucket])
            gain += unused - left
            held_s += (EDGES_S[bucket + 1] - EDGES_S[bucket]) * (unused + left) / 2
            unused = left
            best = max(best, gain / held_s) if held_s else best
        assert found[start] == pytest.approx(best, rel=1e-6, abs=1e-9)


def test_before_anything_is_known_the_oldest_chunk_is_worth_least() -> None:
    times = ReuseTimes()
    values = [times.value(times.number_of((1, 2)), bucket) for bucket in range(1, BUCKET_COUNT)]
    assert values == sorted(values, reverse=True)
    assert 0 < PRIOR_RATE < 1


def test_a_class_takes_the_values_of_the_coarser_one_until_it_is_known_itself() -> None:
    times = ReuseTimes()
    often, never = times.number_of((1, 1)), times.number_of((1, 2))
    times.note(often, 5, 500.0, 500.0)
    times.refresh(1.0)
    stranger = times.number_of((1, 3))
    assert times.value(stranger, 5) == times.value(times.number_of((1,)), 5)
    times.note(never, 5, 0.0, 10_000.0)
    times.refresh(1.0)
    assert times.value(never, 5) < times.value(stranger, 5) < times.value(often, 5)


def test_old_counts_fade() -> None:
    times = ReuseTimes()
    number = times.number_of((1,))
    times.note(number, 5, 900.0, 100.0)
    times.refresh(1.0)
    before = times.value(number, 5)
    for _ in range(20):
        times.refresh(0.5)
    assert times.value(number, 5) < before / 2
