"""Policies: the paper's rates, and what every allocation keeps."""

from __future__ import annotations

import math
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.paper.tables import WORKLOADS, PaperPolicy, workload
from descriptors.units import bytes_per_s_from_gbps, gbps_from_bytes_per_s
from storage_server.delivery.scheduler.demand import Demand
from storage_server.delivery.scheduler.policies import SHARE_MIN, Policy, allocate, water_fill, zero_stall_rates

BUDGET = bytes_per_s_from_gbps(50)
TABLE_A9 = [
    (name, policy, index)
    for name in WORKLOADS
    for policy in PaperPolicy
    for index in range(len(workload(name).requests))
]
STALL_POLICIES = (Policy.STALL_OPT, Policy.CALIBRATED_STALL_OPT)

seconds = st.one_of(
    st.none(),
    st.floats(1e-4, 1.0),
    st.sampled_from([0.0, 5e-324, 1e-30, 1e9, 1e308, math.inf, math.nan, -1.0]),
)
demand = st.builds(
    Demand,
    layer_bytes=st.one_of(st.integers(1, 1 << 40), st.integers(1 << 20, 1 << 28)),
    layer_count=st.just(32),
    compute_s=seconds,
    weight=st.sampled_from([0.02, 0.5, 1.0, 1.0, 3.0]),
    rate_max_bytes_per_s=st.one_of(st.none(), st.floats(1e3, 1e11)),
)
demands = st.lists(demand, min_size=1, max_size=12)
ranked = st.lists(
    st.builds(Demand, st.integers(1, 1 << 30), st.just(32), seconds, st.just(1.0), st.integers(-1, 2)),
    min_size=1,
    max_size=8,
)
policies = st.sampled_from(Policy)
budgets = st.floats(1e6, 1e12)


def floors_of(some: list[Demand], budget: float) -> list[float]:
    weights = sum(each.weight for each in some)
    return [min(SHARE_MIN * budget * each.weight / weights, each.rate_max_bytes_per_s or math.inf) for each in some]


def caps_of(policy: Policy, some: list[Demand], budget: float, margin: float) -> list[float]:
    caps = [each.rate_max_bytes_per_s or math.inf for each in some]
    if policy in STALL_POLICIES:
        extra = margin if policy is Policy.CALIBRATED_STALL_OPT else 0.0
        caps = [min(cap, rate + extra) for cap, rate in zip(caps, zero_stall_rates(some, budget), strict=True)]
    return [max(cap, floor) for cap, floor in zip(caps, floors_of(some, budget), strict=True)]


def cost(some: list[Demand], rates: list[float]) -> float:
    return sum(each.weight * each.layer_bytes / rate for each, rate in zip(some, rates, strict=True))


@pytest.mark.parametrize(("name", "policy", "index"), TABLE_A9)
def test_every_rate_of_table_a9_comes_out_to_a_hundredth_of_a_gbps(name: str, policy: PaperPolicy, index: int) -> None:
    """Table A9, 70 rates."""
    paper = workload(name)
    some = [Demand(each.layer_bytes, 32, each.layer_compute_s) for each in paper.requests]
    rate = allocate(Policy(policy.value), some, paper.budget_bytes_per_s)[index]
    assert gbps_from_bytes_per_s(rate) == pytest.approx(paper.rates_gbps[policy][index], abs=0.01)


def test_table_a9_has_seventy_rates() -> None:
    assert len(TABLE_A9) == 70


@given(policies, demands, budgets)
def test_rates_are_above_0_finite_within_their_caps_and_the_budget_and_use_all_that_the_caps_allow(
    policy: Policy, some: list[Demand], budget: float
) -> None:
    """Whatever a client says of itself: nothing, nonsense, 1 byte against 1 TiB."""
    rates = allocate(policy, some, budget).tolist()
    caps = caps_of(policy, some, budget, 625e6)
    assert all(0 < rate < math.inf for rate in rates)
    assert all(rate <= cap * (1 + 1e-9) for rate, cap in zip(rates, caps, strict=True))
    assert sum(rates) == pytest.approx(min(budget, sum(caps)), rel=1e-9)


@given(policies, demands, budgets)
def test_nobody_gets_less_than_a_hundredth_of_its_equal_share(
    policy: Policy, some: list[Demand], budget: float
) -> None:
    rates = allocate(policy, some, budget).tolist()
    floors = floors_of(some, budget)
    assert all(rate >= floor * (1 - 1e-9) for rate, floor in zip(rates, floors, strict=True))


@given(policies, demands, budgets, st.randoms())
def test_the_order_of_requests_does_not_matter(
    policy: Policy, some: list[Demand], budget: float, random: Random
) -> None:
    order = list(range(len(some)))
    random.shuffle(order)
    rates = allocate(policy, some, budget)
    shuffled = allocate(policy, [some[index] for index in order], budget)
    assert np.allclose(shuffled, rates[order], rtol=1e-6)


@given(policies, demands, budgets, st.sampled_from([2, 10, 1000]))
def test_bytes_and_budget_scaled_together_scale_the_rates(
    policy: Policy, some: list[Demand], budget: float, factor: int
) -> None:
    scaled = [
        Demand(
            each.layer_bytes * factor,
            each.layer_count,
            each.compute_s,
            each.weight,
            each.priority,
            None if each.rate_max_bytes_per_s is None else each.rate_max_bytes_per_s * factor,
        )
        for each in some
    ]
    rates = allocate(policy, some, budget, 625e6)
    assert np.allclose(allocate(policy, scaled, budget * factor, 625e6 * factor), rates * factor, rtol=1e-6)


@given(st.sampled_from(STALL_POLICIES), demands, budgets, st.data())
def test_no_transfer_of_rate_between_two_requests_lowers_the_cost(
    policy: Policy, some: list[Demand], budget: float, data: st.DataObject
) -> None:
    """sum w s/r is what Stall-opt minimises within floors and caps."""
    rates = allocate(policy, some, budget).tolist()
    giver, taker = (data.draw(st.integers(0, len(some) - 1)) for _ in range(2))
    room = min(
        rates[giver] - floors_of(some, budget)[giver],
        caps_of(policy, some, budget, 625e6)[taker] - rates[taker],
    )
    moved = room * data.draw(st.floats(1e-3, 1.0))
    if giver == taker or moved <= 1e-6 * min(rates[giver], rates[taker]):
        return
    others = rates.copy()
    others[giver] -= moved
    others[taker] += moved
    pair = [some[giver], some[taker]]
    assert cost(pair, [others[giver], others[taker]]) >= cost(pair, [rates[giver], rates[taker]]) * (1 - 1e-9)


@given(policies, ranked, budgets)
def test_what_a_priority_gets_does_not_depend_on_lower_ones_but_for_their_floors(
    policy: Policy, some: list[Demand], budget: float
) -> None:
    rates = allocate(policy, some, budget)
    lower = [each.priority < max(one.priority for one in some) for each in some]
    high = sum(rate for rate, is_lower in zip(rates, lower, strict=True) if not is_lower)
    caps = caps_of(policy, some, budget, 625e6)
    wanted = sum(cap for cap, is_lower in zip(caps, lower, strict=True) if not is_lower)
    floors = sum(floor for floor, is_lower in zip(floors_of(some, budget), lower, strict=True) if is_lower)
    assert high == pytest.approx(min(wanted, budget - floors), rel=1e-9)


@pytest.mark.parametrize("policy", Policy)
def test_of_two_alike_the_one_that_weighs_more_gets_more(policy: Policy) -> None:
    light, heavy = allocate(policy, [Demand(1 << 26, 32, 0.001), Demand(1 << 26, 32, 0.001, weight=4.0)], BUDGET)
    by_weight = 4.0 if policy not in STALL_POLICIES else 2.0
    assert heavy == pytest.approx(by_weight * light)


@pytest.mark.parametrize("policy", Policy)
def test_what_a_capped_tenant_leaves_goes_to_the_others(policy: Policy) -> None:
    rates = allocate(policy, [Demand(1 << 26, 32, 0.001, rate_max_bytes_per_s=1e6), Demand(1 << 26, 32, 0.001)], BUDGET)
    assert rates == pytest.approx([1e6, BUDGET - 1e6])


@pytest.mark.parametrize("compute_s", [0.0, 1e-300, -5.0])
def test_a_claim_counts_for_no_more_than_two_links(compute_s: float) -> None:
    """A client that says it computes nothing takes no more of BW-prop than one that needs the link twice."""
    some = [Demand(1 << 20, 32, compute_s), Demand(1 << 27, 32, (1 << 27) / BUDGET)]
    liar, honest = allocate(Policy.BW_PROP, some, BUDGET)
    assert liar == pytest.approx(2 * honest)


@pytest.mark.parametrize("budget", [0.0, -1.0, math.nan, math.inf])
def test_a_budget_that_is_no_rate_is_refused(budget: float) -> None:
    with pytest.raises(ValueError, match="budget"):
        allocate(Policy.EQUAL, [Demand(1, 1, 1.0)], budget)


def test_nobody_gets_nothing() -> None:
    assert allocate(Policy.EQUAL, [], BUDGET).tolist() == []


def test_filling_is_exact_with_ties_infinite_caps_and_floors_beyond_the_budget() -> None:
    """Hundreds of equal corners, shapes over 30 orders of magnitude."""
    same = water_fill(np.ones(500), np.full(500, 3.0), np.full(500, 0.5), 1000.0)
    assert same == pytest.approx(np.full(500, 2.0))
    wide = water_fill(np.logspace(-15, 15, 31), np.full(31, np.inf), np.full(31, 1e-3), 1e6)
    assert wide.sum() == pytest.approx(1e6, rel=1e-12)
    assert water_fill(np.ones(2), np.full(2, 9.0), np.array([3.0, 1.0]), 2.0) == pytest.approx([1.5, 0.5])
