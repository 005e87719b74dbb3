"""The plan of slack-aware dispatch, against brute force."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from storage_server.delivery.scheduler import slack_plan
from storage_server.delivery.scheduler.slack_plan import kept_promises, plan_stalls
from storage_server.delivery.scheduler.slack_steps import Floats, Line, Remaining, Steps

RATE = 1000.0


def shared_stalls(some: list[Remaining]) -> Floats:
    """The stalls of an equal share of the link from now on."""
    return Steps(some, RATE).shared()


def can_be_kept(some: list[Remaining], stalls: Floats) -> bool:
    """Whether these stalls can be had together."""
    return Steps(some, RATE).can_be_kept(stalls)


def request(
    size: float,
    layer_count: int,
    compute_s: float,
    *,
    first_bytes: float | None = None,
    first_due_s: float = 0.0,
    stall_s: float = 0.0,
    stall_max_s: float = 1e6,
    weight: float = 1.0,
    priority: int = 0,
) -> Remaining:
    first = size if first_bytes is None else first_bytes
    computing_s = layer_count * compute_s
    return Remaining(
        first, size, layer_count, first_due_s, compute_s, stall_s, stall_max_s, weight, priority, computing_s
    )


def promised(some: list[Remaining]) -> list[Remaining]:
    """The same, each promised what an equal share gives it."""
    return [
        request(
            each.layer_bytes,
            each.layer_count,
            each.compute_s,
            first_bytes=each.first_bytes,
            first_due_s=each.first_due_s,
            stall_s=each.stall_s,
            stall_max_s=stall_s,
            weight=each.weight,
            priority=each.priority,
        )
        for each, stall_s in zip(some, shared_stalls(some).tolist(), strict=True)
    ]


def played_stalls(some: list[Remaining], stalls: list[float]) -> list[float]:
    """Serve layers one after the other, earliest deadline first; the stalls that come of it."""
    layers = sorted(
        (each.first_due_s + stalls[index] + layer * each.compute_s, layer, index)
        for index, each in enumerate(some)
        for layer in range(each.layer_count)
    )
    seen, now = [each.stall_s for each in some], 0.0
    for _, layer, index in layers:
        each = some[index]
        now += (each.layer_bytes if layer else each.first_bytes) / RATE
        seen[index] = max(seen[index], now - each.first_due_s - layer * each.compute_s)
    return seen


requests = st.lists(
    st.builds(
        request,
        st.floats(1.0, 2000.0),
        st.integers(1, 6),
        st.floats(0.0, 2.0),
        first_due_s=st.floats(-1.0, 2.0),
        weight=st.sampled_from([0.25, 1.0, 4.0]),
        stall_s=st.sampled_from([0.0, 0.0, 0.5]),
    ),
    min_size=1,
    max_size=6,
)


def tightened(some: list[Remaining], stalls: list[float], index: int) -> float:
    steps = Steps(some, RATE)
    return float(steps.tighten(steps.line(np.array(stalls)), index).stalls[index])


@given(requests)
def test_what_an_equal_share_gives_can_always_be_kept(some: list[Remaining]) -> None:
    assert can_be_kept(some, shared_stalls(some))


@given(requests)
def test_a_plan_is_kept_by_serving_the_earliest_deadline_first(some: list[Remaining]) -> None:
    """The feasibility that the plan rests on, played out layer by layer."""
    some = promised(some)
    stalls = plan_stalls(some, RATE).tolist()
    for seen, planned in zip(played_stalls(some, stalls), stalls, strict=True):
        assert seen <= planned + 1e-6


@given(requests)
def test_no_stall_is_longer_than_promised_where_promises_can_be_kept(some: list[Remaining]) -> None:
    some = promised(some)
    stalls = plan_stalls(some, RATE)
    assert all(stall <= each.stall_max_s + 1e-9 for stall, each in zip(stalls.tolist(), some, strict=True))


@given(requests)
def test_no_stall_is_shorter_than_incurred_or_than_the_whole_link_allows(some: list[Remaining]) -> None:
    stalls = plan_stalls(promised(some), RATE)
    for index, each in enumerate(some):
        alone = plan_stalls([each], RATE)[0]
        assert stalls[index] >= max(each.stall_s, alone) - 1e-9


@given(requests, st.data())
def test_the_least_stall_is_the_least_that_leaves_the_others_theirs(some: list[Remaining], data: st.DataObject) -> None:
    """The closed form against bisection by feasibility."""
    stalls = shared_stalls(some).tolist()
    index = data.draw(st.integers(0, len(some) - 1))
    found = tightened(some, stalls, index)

    def with_stall(stall: float) -> bool:
        return can_be_kept(some, np.array([*stalls[:index], stall, *stalls[index + 1 :]]))

    assert with_stall(found + 1e-6)
    assert found <= some[index].stall_s + 1e-9 or not with_stall(found - 1e-6)


@pytest.mark.slow
@given(st.lists(st.tuples(st.integers(1, 3), st.integers(1, 2), st.integers(0, 3)), min_size=2, max_size=3))
def test_small_plans_are_close_to_the_best_of_all_stalls_on_a_grid(shapes: list[tuple[int, int, int]]) -> None:
    """Every set of stalls in steps of the link's time for one unit: exhaustive, since sizes and times are whole."""
    some = promised([request(size * RATE, layer_count, float(compute)) for size, layer_count, compute in shapes])
    limits = [range(math.floor(each.stall_max_s + 1e-9) + 1) for each in some]
    best = min(
        (sum(stalls) for stalls in itertools.product(*limits) if can_be_kept(some, np.array(stalls, float))),
        default=math.inf,
    )
    assert plan_stalls(some, RATE).sum() <= best * 1.1 + 1e-6


@given(requests, st.lists(st.floats(0.05, 1.0), min_size=6, max_size=6))
def test_a_plan_is_no_worse_than_a_set_of_stalls_that_keeps_the_promises(
    some: list[Remaining], shares: list[float]
) -> None:
    """Such as those of Calibrated Stall-opt: here those of any rates held."""
    rates = RATE * np.array(shares[: len(some)]) / sum(shares[: len(some)])
    by_rates = []
    for each, rate in zip(some, rates.tolist(), strict=True):
        there = [(each.first_bytes + layer * each.layer_bytes) / rate for layer in range(each.layer_count)]
        late = [at - each.first_due_s - layer * each.compute_s for layer, at in enumerate(there)]
        by_rates.append(max(each.stall_s, *late))
    some = promised(some)
    assert can_be_kept(some, np.array(by_rates))
    if all(stall <= each.stall_max_s for stall, each in zip(by_rates, some, strict=True)):
        weights = np.array([each.weight for each in some])
        planned = plan_stalls(some, RATE, [np.array(by_rates)])
        assert planned @ weights <= np.array(by_rates) @ weights + 1e-6


def test_a_set_that_cannot_be_kept_or_breaks_a_promise_is_not_taken() -> None:
    some = promised([request(1000.0, 2, 0.0), request(1000.0, 2, 0.0)])
    assert plan_stalls(some, RATE, [np.zeros(2)]).sum() == pytest.approx(6.0)
    assert plan_stalls(some, RATE, [np.array([9.0, 2.0])]).sum() == pytest.approx(6.0)


@given(requests)
def test_the_same_requests_give_the_same_plan(some: list[Remaining]) -> None:
    some = promised(some)
    assert plan_stalls(some, RATE).tolist() == plan_stalls(some, RATE).tolist()


def test_a_higher_priority_is_served_as_if_the_lower_had_only_their_promises() -> None:
    """The small one would go first, and does among its equals."""
    small, large = request(100.0, 2, 0.0, stall_max_s=10.0), request(1000.0, 2, 0.0, stall_max_s=10.0)
    assert plan_stalls([small, large], RATE) == pytest.approx([0.2, 2.2])
    urgent = request(1000.0, 2, 0.0, stall_max_s=10.0, priority=1)
    assert plan_stalls([small, urgent], RATE) == pytest.approx([2.2, 2.0])


def test_a_priority_breaks_no_promise() -> None:
    low = request(100.0, 2, 0.0, stall_max_s=0.5)
    urgent = request(1000.0, 2, 0.0, stall_max_s=10.0, priority=1)
    assert plan_stalls([low, urgent], RATE) == pytest.approx([0.2, 2.2])


def test_where_promises_cannot_be_kept_every_ttft_is_later_by_the_same_factor() -> None:
    """Two that were each promised the whole link share what is missing."""
    some = [request(1000.0, 4, 0.5, stall_max_s=2.5), request(1000.0, 4, 0.5, stall_max_s=2.5)]
    kept = kept_promises(Steps(some, RATE))
    assert can_be_kept(some, kept)
    assert not can_be_kept(some, kept - 0.2)
    assert kept[0] == pytest.approx(kept[1])


def test_a_request_that_has_lost_its_promise_long_ago_spoils_no_plan() -> None:
    """Its layers are due in the past, however soon they come."""
    lost = request(1000.0, 2, 0.0, first_due_s=-1e6, stall_max_s=1.0)
    plan = plan_stalls([lost, request(10.0, 2, 0.0, stall_max_s=1.0)], RATE)
    assert np.isfinite(plan).all()
    assert plan[0] >= 1e6


@pytest.mark.parametrize("sizes", [(1.0, 2.0**40), (2.0**40, 1.0)])
def test_a_byte_and_a_tebibyte_are_planned_together(sizes: tuple[float, float]) -> None:
    some = promised([request(size, 32, 0.001) for size in sizes])
    stalls = plan_stalls(some, 1e9)
    small, large = sorted(stalls.tolist())
    assert 0 <= small < 0.01
    assert large == pytest.approx(32 * 2.0**40 / 1e9, rel=0.01)


@pytest.mark.parametrize("count", [1, 3, 100, 1000])
def test_the_work_of_a_plan_is_bounded_however_many_the_requests(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few are tightened among many; the others keep what they were promised."""
    seen = []
    tighten = Steps.tighten

    def counted(steps: Steps, line: Line, index: int) -> Line:
        seen.append(steps.count)
        return tighten(steps, line, index)

    monkeypatch.setattr(Steps, "tighten", counted)
    random = np.random.default_rng(7)
    sizes: NDArray[np.float64] = random.uniform(1.0, 1000.0, count)
    some = promised([request(size, 32, 0.01 * count) for size in sizes.tolist()])
    plan_stalls(some, RATE, [shared_stalls(some)])
    assert len(seen) <= slack_plan.TRIALS_MAX
    assert sum(seen) <= max(slack_plan.WORK_MAX, some[0].layer_count * count)


def test_layers_beyond_the_most_deadlines_share_the_first_ones() -> None:
    """Which is on the safe side: 4,096 layers of 64 requests."""
    some = promised([request(1.0, 4096, 0.5) for _ in range(64)])
    steps = Steps(some, RATE)
    assert steps.count <= 1 << 17
    assert np.isfinite(plan_stalls(some, RATE)).all()


def test_nothing_left_needs_no_plan() -> None:
    assert plan_stalls([], RATE).tolist() == []
