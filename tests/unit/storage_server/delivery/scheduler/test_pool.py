"""The pool of requests on one link, whatever its policy: epochs, ends, changes, clocks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage_server.delivery.scheduler.demand import Demand
from storage_server.delivery.scheduler.flow import AHEAD_MAX, Flow, LinkTenant
from storage_server.delivery.scheduler.policies import Policy
from storage_server.delivery.scheduler.pool import EPOCH_S_PER_FLOW, Pool, PoolSettings
from storage_server.delivery.scheduler.serial import CATCH_UP_S
from tests.support.scheduling import Asked, Outcome, layers_of, play

MIB = 1 << 20
LINK = 1e9
COMPUTE_S = 0.01
SLACK = PoolSettings(gather_s=0.0)
EVERY = [
    SLACK,
    *(PoolSettings(policy, is_work_conserving=True, gather_s=0.0) for policy in Policy),
    *(PoolSettings(policy, gather_s=0.0, epoch_s_max=0.5) for policy in Policy),
]
CONSERVING = [each for each in EVERY if each.is_continuous]
every = pytest.mark.parametrize("setting", EVERY, ids=lambda each: f"{each.policy}-{each.is_work_conserving}")


def flow(number: int, layer_bytes: int = MIB, layer_count: int = 4, tenant: LinkTenant | None = None) -> Flow:
    demand = Demand(layer_bytes, layer_count, COMPUTE_S)
    return Flow(number, tenant or LinkTenant(str(number)), demand, layers_of((layer_bytes,), layer_count), 0.0)


def is_served(outcomes: Sequence[Outcome]) -> bool:
    return all(len(outcome.layers_s) == outcome.asked.layer_count for outcome in outcomes)


asked = st.builds(
    Asked,
    at_s=st.floats(0.0, 3.0),
    layer_bytes=st.one_of(st.integers(1, 1000), st.integers(1, 64 * MIB)),
    compute_s=st.floats(0.0, 0.1),
    stated_s=st.sampled_from([-1.0, -1.0, None, 0.0, 1e9, math.nan]),
    layer_count=st.integers(1, 8),
    tenant=st.sampled_from(
        [
            None,
            None,
            LinkTenant("a"),
            LinkTenant("b", 0.1),
            LinkTenant("c", 5.0, 1e8),
            LinkTenant("d", priority=1),
            LinkTenant("e", 1, 1e7),
        ]
    ),
    payload_bytes=st.sampled_from([None, 8 * MIB]),
    stops_s=st.sampled_from([math.inf, math.inf, 1.0]),
    reads_again_s=st.just(2.0),
    leaves_s=st.sampled_from([math.inf, math.inf, math.inf, 0.5, 2.5]),
)


@given(
    st.sampled_from(EVERY),
    st.lists(asked, min_size=1, max_size=8),
    st.lists(st.tuples(st.floats(0.0, 4.0), st.sampled_from([1e8, 1e9, 1e10])), max_size=2),
    st.lists(st.tuples(st.floats(0.0, 4.0), st.sampled_from([-3600.0, -0.1, 0.1, 3600.0])), max_size=2),
    st.floats(0.0, 0.005),
)
def test_every_request_ends_and_nothing_of_it_is_kept(
    setting: PoolSettings,
    some: list[Asked],
    budgets: list[tuple[float, float]],
    jumps: list[tuple[float, float]],
    late_s: float,
) -> None:
    """Through lies, caps, priorities, stops, departures, other budgets, clock jumps and late wake-ups."""
    pool = Pool(setting, LINK)
    outcomes = play(pool, some, late_s=lambda: late_s, jumps=jumps, budgets=budgets)
    assert is_served([outcome for outcome in outcomes if outcome.asked.leaves_s == math.inf])
    assert (len(pool), pool.active_count, pool.waiting_count) == (0, 0, 0)
    assert pool.wake_at() == math.inf


@given(st.sampled_from(EVERY), st.lists(asked, min_size=1, max_size=8), st.floats(0.0, 0.02))
def test_no_more_than_the_budget_goes_in_any_interval(setting: PoolSettings, some: list[Asked], late_s: float) -> None:
    """But for the catching up, and the payloads that were under way when it began."""
    outcomes = play(Pool(setting, LINK), some, late_s=lambda: late_s)
    gone = sorted(payload for outcome in outcomes for payload in outcome.payloads)
    under_way = sum(max((size for _, size in outcome.payloads), default=0) for outcome in outcomes)
    for first in range(0, len(gone), max(1, len(gone) // 10)):
        sent = 0
        for at_s, size in gone[first:]:
            sent += size
            assert sent <= LINK * (at_s - gone[first][0] + CATCH_UP_S + late_s) + 2 * under_way


@pytest.mark.parametrize("setting", CONSERVING, ids=lambda each: str(each.policy))
def test_a_request_that_leaves_in_mid_transfer_frees_the_link_at_once(setting: PoolSettings) -> None:
    """Policies that leave part of a link idle aside: with no compute time there is none."""
    some = [Asked(0.0, 10 * MIB, 0.0, layer_count=32, payload_bytes=MIB) for _ in range(2)]
    whole_s = 32 * 10 * MIB / LINK
    stays, _ = play(Pool(setting, LINK), [some[0], Asked(0.0, 10 * MIB, 0.0, payload_bytes=MIB, leaves_s=0.2)])
    assert stays.layers_s[-1] <= whole_s + 0.2 + 2 * MIB / LINK + EPOCH_S_PER_FLOW


@every
def test_a_client_that_stops_reading_and_never_leaves_blocks_nobody(setting: PoolSettings) -> None:
    some = [Asked(0.0, 4 * MIB, 0.01, payload_bytes=MIB) for _ in range(3)]
    stops = Asked(0.0, 4 * MIB, 0.01, payload_bytes=MIB, stops_s=0.0, leaves_s=60.0)
    outcomes = play(Pool(setting, LINK), [*some, stops])
    assert is_served(outcomes[:3])
    assert max(outcome.layers_s[-1] for outcome in outcomes[:3]) < 1.0
    assert outcomes[3].sent_bytes() <= AHEAD_MAX * MIB


@every
def test_a_budget_lowered_or_raised_in_mid_transfer_holds_from_then_on(setting: PoolSettings) -> None:
    some = [Asked(0.0, 10 * MIB, 0.0, layer_count=32, payload_bytes=MIB) for _ in range(3)]
    total = 3 * 32 * 10 * MIB
    lowered = play(Pool(setting, LINK), some, budgets=[(0.1, LINK / 4)])
    last_s = max(outcome.layers_s[-1] for outcome in lowered)
    assert last_s >= 0.1 + (total - 0.1 * LINK) / (LINK / 4) - CATCH_UP_S - 3 * MIB / (LINK / 4)
    raised = play(Pool(setting, LINK), some, budgets=[(0.1, LINK * 4)])
    assert max(outcome.layers_s[-1] for outcome in raised) <= (0.1 + (total - 0.1 * LINK) / (4 * LINK)) * 1.1


@every
@pytest.mark.parametrize("by_s", [-1e6, -1.0, -0.01, 0.01, 1.0, 1e6])
def test_a_clock_jump_makes_all_requests_together_hardly_later(setting: PoolSettings, by_s: float) -> None:
    """Back: as if time stood still. Forward: as if the process had slept for `LEAP_S_MAX` at most."""
    some = [Asked(0.05 * index, 4 * MIB, 0.01, layer_count=32, payload_bytes=MIB) for index in range(4)]
    before = play(Pool(setting, LINK), some)
    after = play(Pool(setting, LINK), some, jumps=[(0.1, by_s)])
    assert is_served(after)
    assert max(each.layers_s[-1] for each in after) <= max(each.layers_s[-1] for each in before) + 2 * CATCH_UP_S


@every
def test_epochs_are_numbered_from_1_and_every_request_is_in_one(setting: PoolSettings) -> None:
    random = Random(1)
    pool = Pool(setting, LINK)
    some = [Asked(random.uniform(0.0, 1.0), 4 * MIB, 0.01) for _ in range(10)]
    outcomes = sorted(play(pool, some), key=lambda outcome: outcome.asked.at_s)
    epochs = [outcome.flow.epoch for outcome in outcomes]
    assert epochs == sorted(epochs)
    assert epochs[0] == 1
    assert epochs[-1] <= pool.epoch


@every
def test_a_rate_is_known_before_the_first_payload(setting: PoolSettings) -> None:
    pool, some = Pool(setting, LINK), [flow(number) for number in range(3)]
    for each in some:
        pool.join(each)
    assert pool.due(0.0) == []
    assert all(0 < each.rate_bytes_per_s <= LINK for each in some)
    assert all(each.epoch == 1 for each in some)


def test_a_link_without_requests_waits_for_company() -> None:
    pool = Pool(PoolSettings(gather_s=0.005), LINK)
    first, second = flow(1), flow(2)
    pool.join(first)
    pool.due(100.0)
    assert pool.wake_at() == pytest.approx(100.005)
    pool.join(second)
    pool.due(100.003)
    assert (pool.active_count, pool.waiting_count) == (0, 2)
    pool.due(100.005)
    assert (pool.active_count, pool.waiting_count) == (2, 0)
    assert (first.epoch, second.epoch) == (1, 1)


def test_epochs_of_many_requests_are_further_apart() -> None:
    """So that a thousand arrivals a second do not make a thousand plans of a thousand."""
    pool = Pool(PoolSettings(Policy.EQUAL, is_work_conserving=True, gather_s=0.0), LINK)
    for number in range(200):
        pool.join(flow(number, 1000 * MIB))
    pool.due(0.0)
    for number in range(200, 300):
        pool.join(flow(number, 1000 * MIB))
        pool.due(number * 1e-6)
    assert pool.epoch == 1
    assert pool.wake_at() == pytest.approx(200 * EPOCH_S_PER_FLOW)
    pool.due(pool.wake_at())
    assert (pool.epoch, pool.waiting_count) == (2, 0)


@every
def test_leaving_twice_or_before_an_epoch_does_nothing_more(setting: PoolSettings) -> None:
    pool, waits, other = Pool(setting, LINK), flow(1), flow(2)
    pool.join(waits)
    pool.leave(waits, 0.0)
    pool.leave(waits, 0.0)
    pool.join(other)
    pool.due(0.0)
    pool.leave(other, 0.1)
    pool.leave(other, 0.1)
    pool.resume(other, 0.1)
    assert pool.due(0.2) == []
    assert len(pool) == 0


@every
def test_the_requests_of_a_tenant_share_its_weight_and_cap(setting: PoolSettings) -> None:
    pool, tenant = Pool(setting, LINK), LinkTenant("t", weight=2.0, rate_max_bytes_per_s=6e6, priority=3)
    some = [flow(number, tenant=tenant) for number in range(4)]
    for each in some:
        pool.join(each)
    pool.due(0.0)
    assert {(each.demand.weight, each.demand.rate_max_bytes_per_s, each.demand.priority) for each in some} == {
        (0.5, 1.5e6, 3)
    }


def test_a_request_goes_on_in_another_pool_where_it_was() -> None:
    """As when the policy is changed: no byte twice, none left out."""
    first, half = Pool(SLACK, LINK), flow(1, layer_count=8)
    first.join(half)
    now = 0.0
    while half.layer_index < 5:
        for each in first.due(now):
            each.ahead_count -= 1
            first.resume(each, now)
        now = max(now, first.wake_at())
    for setting in EVERY:
        again = half.for_another_schedule(half.tenant)
        pool, layers, now_there = Pool(setting, LINK), 0, now
        pool.join(again)
        while pool.wake_at() < math.inf:
            now_there = max(now_there, pool.wake_at())
            for each in pool.due(now_there):
                layers += 1
                each.ahead_count -= 1
                pool.resume(each, now_there)
        assert layers == 3
        assert now_there - now <= 3 * COMPUTE_S + 1e-6


def test_a_link_that_carries_more_for_a_while_sends_sooner_under_the_same_plan() -> None:
    pool, each = Pool(SLACK, LINK), flow(1, 100 * MIB)
    pool.join(each)
    pool.due(0.0)
    before, epoch = pool.wake_at(), pool.epoch
    pool.set_link_rate(2 * LINK, 0.0)
    assert pool.wake_at() == pytest.approx(before / 2)
    assert pool.epoch == epoch
