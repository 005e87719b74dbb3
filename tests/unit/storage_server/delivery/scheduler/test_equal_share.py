"""What requests would stall under Equal, against processor sharing played layer by layer."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage_server.delivery.scheduler.equal_share import EqualShare

RATE = 100.0


@dataclass(slots=True)
class Sharer:
    layer_bytes: float
    layers_left: int
    compute_s: float
    weight: float
    due_s: float
    left_bytes: float
    """The rest of the layer that is coming."""
    stall_s: float = 0.0


@dataclass(slots=True)
class Sharing:
    """Processor sharing, layer by layer: who has bytes left gets the link by weight."""

    rate: float = RATE
    now: float = 0.0
    sharers: dict[int, Sharer] = field(default_factory=dict)

    def join(self, number: int, size: float, count: int, compute_s: float, weight: float) -> None:
        self.sharers[number] = Sharer(size, count, compute_s, weight, self.now, size)

    def advance(self, until: float) -> None:
        while active := [sharer for sharer in self.sharers.values() if sharer.layers_left]:
            weights = sum(sharer.weight for sharer in active)
            takes = [sharer.left_bytes * weights / sharer.weight / self.rate for sharer in active]
            step = min([*takes, until - self.now])
            for sharer, take_s in zip(active, takes, strict=True):
                if take_s <= step:
                    sharer.stall_s = max(sharer.stall_s, self.now + step - sharer.due_s)
                    sharer.layers_left -= 1
                    sharer.due_s += sharer.compute_s
                    sharer.left_bytes = sharer.layer_bytes
                else:
                    sharer.left_bytes *= 1 - step / take_s
            self.now += step
            if self.now >= until:
                return
        self.now = self.now if until == math.inf else until

    @property
    def stalls(self) -> dict[int, float]:
        return {number: sharer.stall_s for number, sharer in self.sharers.items()}


moves = st.lists(
    st.tuples(
        st.sampled_from(["join", "join", "join", "abandon", "reweigh", "rate"]),
        st.floats(0.0, 3.0),
        st.integers(1, 200),
        st.integers(1, 5),
        st.floats(0.0, 2.0),
        st.sampled_from([0.5, 1.0, 2.0]),
    ),
    min_size=1,
    max_size=8,
)


@given(moves)
def test_stalls_are_those_of_processor_sharing_through_arrivals_departures_weights_and_rates(
    some: list[tuple[str, float, int, int, float, float]],
) -> None:
    shadow, sharing, now = EqualShare(RATE), Sharing(), 0.0
    for number, (what, wait_s, size, count, compute_s, weight) in enumerate(some):
        now += wait_s
        sharing.advance(now)
        oldest = min(sharing.sharers, default=0)
        match what:
            case "join":
                shadow.join(number, size, count, compute_s, weight, now)
                sharing.join(number, float(size), count, compute_s, weight)
            case "abandon":
                shadow.abandon(oldest, now)
                sharing.sharers.pop(oldest, None)
            case "reweigh":
                shadow.reweigh(oldest, weight, now)
                if oldest in sharing.sharers:
                    sharing.sharers[oldest].weight = weight
            case "rate":
                shadow.set_rate(weight * RATE, now)
                sharing.rate = weight * RATE
    predicted = shadow.stalls()
    sharing.advance(math.inf)
    assert predicted == pytest.approx(sharing.stalls, abs=1e-4)
    shadow.advance(now + 1e6)
    assert shadow.stalls() == pytest.approx(sharing.stalls, abs=1e-4)


@given(st.lists(st.tuples(st.integers(1, 200), st.floats(0.0, 2.0)), min_size=1, max_size=6), st.data())
def test_looking_in_between_changes_nothing(some: list[tuple[int, float]], data: st.DataObject) -> None:
    looked, left_alone = EqualShare(RATE), EqualShare(RATE)
    for number, (size, compute_s) in enumerate(some):
        for shadow in (looked, left_alone):
            shadow.join(number, size, 4, compute_s, 1.0, float(number))
        for at_s in sorted(data.draw(st.lists(st.floats(0.0, 1.0), max_size=4))):
            looked.advance(number + at_s)
    assert looked.stalls() == pytest.approx(left_alone.stalls(), abs=1e-6)


@pytest.mark.parametrize("now", [5.0, 4.0, -1e9])
def test_a_clock_that_stands_still_or_goes_back_changes_nothing(now: float) -> None:
    shadow = EqualShare(RATE)
    shadow.join(1, 100, 3, 0.5, 1.0, 5.0)
    before = shadow.stalls()
    shadow.advance(now)
    shadow.reweigh(1, 1.0, now)
    assert shadow.stalls() == before


def test_a_request_that_is_over_early_still_takes_its_share_from_the_others() -> None:
    """The others' bounds are those of Equal, where it would not have been over."""
    shadow = EqualShare(RATE)
    for number in (1, 2):
        shadow.join(number, 100, 4, 0.0, 1.0, 0.0)
    shadow.drop_result(1)
    assert shadow.stalls()[2] == pytest.approx(8.0)
    shadow.abandon(1, 0.0)
    assert shadow.stalls()[2] == pytest.approx(4.0)


@given(st.lists(st.tuples(st.booleans(), st.floats(0.0, 20.0)), min_size=1, max_size=10))
def test_nothing_is_left_of_requests_that_are_over_or_abandoned(ends: list[tuple[bool, float]]) -> None:
    shadow = EqualShare(RATE)
    for number, _ in enumerate(ends):
        shadow.join(number, 100, 4, 0.1, 1.0, float(number))
    for number, (is_over, after_s) in enumerate(ends):
        shadow.advance(len(ends) + after_s)
        if is_over:
            shadow.drop_result(number)
        else:
            shadow.abandon(number, len(ends) + after_s)
    shadow.advance(1e6)
    assert len(shadow) == 0
    assert shadow.stalls() == {}


def test_a_byte_and_a_tebibyte_share_a_link() -> None:
    shadow = EqualShare(1e9)
    shadow.join(1, 1, 32, 0.001, 1.0, 0.0)
    shadow.join(2, 1 << 40, 32, 0.001, 1.0, 0.0)
    stalls = shadow.stalls()
    assert stalls[1] == pytest.approx(2e-9, rel=1e-3)
    assert stalls[2] == pytest.approx(32 * 2.0**40 / 1e9, rel=1e-3)
    assert all(np.isfinite(list(stalls.values())))
