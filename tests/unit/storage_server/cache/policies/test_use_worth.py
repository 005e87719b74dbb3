"""What a use saves for each byte."""

from __future__ import annotations

import math

import pytest

from storage_server.cache.policies.use_worth import CHUNK_FRACTION, STEP_MAX, STEPS_PER_OCTAVE, UseWorth, worth_of
from storage_server.delivery.scheduler.profiles import ComputeProfile, growth_of


def test_chunks_of_one_size_are_worth_the_same() -> None:
    """So caches of such chunks decide as if there were no worth."""
    worth = UseWorth()
    steps = set()
    for offset_bytes in range(0, 10**6, 10**5):
        worth.note(2 << 20)
        steps.add(worth.step(offset_bytes, 2 << 20))
    assert steps == {0}
    assert worth_of(0) == 1.0


@pytest.mark.parametrize(
    ("nbytes", "offset_bytes", "growth", "wanted"),
    [(10, 0, 0.0, 1.2), (1000, 0, 0.0, 1.002), (10, 500, 0.001, 1.705), (1000, 500, 0.001, 2.002)],
)
def test_worth_is_that_of_the_example(nbytes: int, offset_bytes: int, growth: float, wanted: float) -> None:
    """The example is that of the module's head; its worth is right to the nearest step."""
    assert CHUNK_FRACTION == 0.02
    worth = UseWorth(growth)
    worth.note(100)
    step = worth.step(offset_bytes, nbytes)
    assert step == round(STEPS_PER_OCTAVE * math.log2(wanted))
    assert worth_of(step) == pytest.approx(wanted, rel=2 ** (0.5 / STEPS_PER_OCTAVE) - 1)


def test_steps_are_bounded() -> None:
    worth = UseWorth(1e9)
    worth.note(1)
    assert worth.step(1 << 60, 1) == STEP_MAX
    for growth in (-1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="growth"):
            UseWorth(growth)


def test_growth_is_the_least_of_all_models() -> None:
    """A bucket may have chunks of each."""
    small = ComputeProfile("small", 32, 4096, 0.0, 60.0, 0.0036, 0.5)
    large = ComputeProfile("large", 80, 4096, 0.0, 500.0, 0.009, 0.5)
    assert growth_of([small]) == pytest.approx(0.0036 / 60 / 131_072)
    assert growth_of([small, large]) == growth_of([large]) == pytest.approx(0.009 / 500 / 327_680)
    assert growth_of([]) == growth_of([ComputeProfile("free", 1, 1, 1.0, 0.0, 1.0, 0.5)]) == 0.0
