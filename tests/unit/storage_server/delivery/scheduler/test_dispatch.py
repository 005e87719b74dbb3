"""The order of payloads: round robin, held rates, the link that carries one after the other, the deadline queue."""

from __future__ import annotations

import math
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.paper.tables import workload
from storage_server.delivery.scheduler.deadline_queue import DeadlineQueue
from storage_server.delivery.scheduler.demand import Demand
from storage_server.delivery.scheduler.flow import AHEAD_MAX, Flow, LinkTenant
from storage_server.delivery.scheduler.held_rates import CATCH_UP_S, HeldRates
from storage_server.delivery.scheduler.policies import Policy
from storage_server.delivery.scheduler.pool import Pool, PoolSettings
from storage_server.delivery.scheduler.round_robin import FlowRoundRobin
from storage_server.delivery.scheduler.serial import SerialLink
from storage_server.delivery.scheduler.steady_clock import LEAP_S_MAX, SteadyClock
from storage_server.delivery.scheduler.tenant_meter import TenantMeter
from tests.support.scheduling import Asked, layers_of, play

MIB = 1 << 20
RATE = 100.0 * MIB
EQUAL = PoolSettings(Policy.EQUAL, gather_s=0.0, epoch_s_max=1e6)


def flow(number: int, sizes: tuple[int, ...] = (MIB,), layer_count: int = 32, tenant: LinkTenant | None = None) -> Flow:
    demand = Demand(sum(sizes), layer_count, 0.01)
    return Flow(number, tenant or LinkTenant(str(number)), demand, layers_of(sizes, layer_count), 0.0)


@given(st.lists(st.tuples(st.floats(0.01, 100.0), st.integers(1, 1000)), min_size=2, max_size=6), st.integers(1, 300))
def test_round_robin_shares_bytes_by_weight_within_one_payload_each(some: list[tuple[float, int]], turns: int) -> None:
    """However different weights and payloads are, and at every moment."""
    queue, sent = FlowRoundRobin(), {}
    for number, (weight, size) in enumerate(some):
        each = flow(number, (size,))
        sent[each] = (weight, 0)
        queue.add(each, weight)
    for _ in range(turns):
        chosen = queue.next()
        assert chosen is not None
        weight, count = sent[chosen]
        sent[chosen] = weight, count + chosen.payload_bytes
        queue.add(chosen, weight)
        fair = [(count / weight, each.payload_bytes / weight) for each, (weight, count) in sent.items()]
        level = max(served - one for served, one in fair)
        assert all(served >= level - one * 1e-6 - 1e-6 or served + one >= level * (1 - 1e-9) for served, one in fair)


def test_round_robin_saves_nothing_up_for_a_flow_that_has_nothing_to_send() -> None:
    queue, busy, late = FlowRoundRobin(), flow(1), flow(2)
    for _ in range(10):
        queue.add(busy, 1.0)
        assert queue.next() is busy
    turns = []
    for _ in range(6):
        queue.add(busy, 1.0)
        queue.add(late, 1.0)
        turns.append(queue.next())
    assert turns.count(late) == 3


def test_round_robin_forgets_whom_it_removes() -> None:
    queue = FlowRoundRobin()
    for number in range(100):
        each = flow(number)
        queue.add(each, 1.0)
        queue.add(each, 1.0)
        queue.remove(each)
        queue.remove(each)
    assert len(queue) == 0
    assert queue.next() is None


@pytest.mark.parametrize("payload_bytes", [MIB, 4 * MIB, 10 * MIB])
@pytest.mark.parametrize("late_ms", [0.0, 1.0, 5.0])
def test_a_held_rate_is_kept_within_2_percent_over_10_layers(late_ms: float, payload_bytes: int) -> None:
    """Or the time of one wake-up, where that is more: a lateness is made up for, not added up."""
    paper, random = workload("A"), Random(1)
    some = [
        Asked(0.0, request.layer_bytes // 10, request.layer_compute_s, payload_bytes=payload_bytes)
        for request in paper.requests
    ]
    pool = Pool(PoolSettings(Policy.CALIBRATED_STALL_OPT, False, 62.5e6, 1e6, 0.0), paper.budget_bytes_per_s / 10)
    for outcome in play(pool, some, late_s=lambda: random.uniform(0.0, late_ms / 1e3)):
        rate = outcome.rates[0]
        assert set(outcome.rates) == {rate}
        for first in range(22):
            took_s = outcome.layers_s[first + 10] - outcome.layers_s[first]
            assert took_s == pytest.approx(10 * outcome.asked.layer_bytes / rate, rel=0.02, abs=late_ms / 1e3)


def test_a_layer_under_a_held_rate_is_there_when_its_bytes_have_crossed() -> None:
    """(l+1)*s/r, several requests due at the same moment included."""
    some = [Asked(0.0, 8 * MIB, 0.01, payload_bytes=8 * MIB) for _ in range(10)]
    for outcome in play(Pool(EQUAL, RATE), some):
        assert outcome.layers_s == pytest.approx([(layer + 1) * 0.8 for layer in range(32)])


def test_rates_are_stable_within_an_epoch_and_freed_ones_come_back_at_the_next() -> None:
    settings = PoolSettings(Policy.EQUAL, gather_s=0.0, epoch_s_max=2.0)
    some = [Asked(0.0, MIB, 0.01, layer_count=32), Asked(0.0, 10 * MIB, 0.01, layer_count=32)]
    short, long = play(Pool(settings, RATE), some)
    assert short.layers_s[-1] == pytest.approx(0.64)
    rates = dict(zip([at_s for at_s, _ in long.payloads], long.rates, strict=True))
    assert {rate for at_s, rate in rates.items() if at_s <= 2.0} == {RATE / 2}
    assert {rate for at_s, rate in rates.items() if at_s > 2.2} == {RATE}


def test_a_request_that_comes_within_an_epoch_waits_for_the_next() -> None:
    settings = PoolSettings(Policy.EQUAL, gather_s=0.0, epoch_s_max=1.0)
    first, second = play(Pool(settings, RATE), [Asked(0.0, 10 * MIB, 0.01), Asked(0.3, MIB, 0.01)])
    assert (first.flow.epoch, second.flow.epoch) == (1, 2)
    assert second.layers_s[0] == pytest.approx(1.02)


def test_work_conserving_rates_are_solved_anew_at_arrivals_and_ends() -> None:
    settings = PoolSettings(Policy.EQUAL, is_work_conserving=True, gather_s=0.0)
    some = [Asked(0.0, MIB, 0.01, layer_count=100), Asked(0.0, MIB, 0.01, layer_count=10)]
    long, short = play(Pool(settings, RATE), some)
    assert short.layers_s[-1] == pytest.approx(0.2)
    assert long.layers_s[-1] == pytest.approx(1.1, abs=1e-3)


def test_a_lowered_budget_is_kept_from_that_moment() -> None:
    some = [Asked(0.0, MIB, 0.01, layer_count=100) for _ in range(5)]
    outcomes = play(Pool(EQUAL, RATE), some, budgets=[(1.0, RATE / 4)])
    for end_s in (1.5, 2.0, 4.0):
        sent = sum(outcome.sent_bytes(1.0, end_s) for outcome in outcomes)
        assert sent <= (end_s - 1.0) * RATE / 4 + 5 * MIB
    assert {outcome.rates[-1] for outcome in outcomes} == {RATE / 20}


def test_a_client_that_stops_reading_costs_others_nothing_and_gets_no_burst_beyond_the_catch_up() -> None:
    some = [Asked(0.0, MIB, 0.01, layer_count=100) for _ in range(3)]
    alone = play(Pool(EQUAL, RATE), some)
    stopped = Asked(0.0, MIB, 0.01, layer_count=100, stops_s=0.5, reads_again_s=1.5)
    outcomes = play(Pool(EQUAL, RATE), [*some[:2], stopped])
    for before, after in zip(alone[:2], outcomes[:2], strict=True):
        assert after.layers_s == pytest.approx(before.layers_s, abs=1e-6)
    rate = RATE / 3
    assert outcomes[2].sent_bytes(0.5, 1.5) <= AHEAD_MAX * MIB + MIB
    for end_s in (1.5, 1.6, 2.0):
        assert outcomes[2].sent_bytes(1.5 - 1e-9, end_s) <= rate * (end_s - 1.5 + CATCH_UP_S) + MIB
    assert outcomes[2].sent_bytes() == 100 * MIB


def test_the_links_clock_keeps_the_budget_when_all_wake_ups_were_late() -> None:
    """After a pause of a second everybody is due; the link makes up for no more than `CATCH_UP_S`."""
    rates = HeldRates(Policy.EQUAL, 0.0, RATE)
    flows = [flow(number, layer_count=1000) for number in range(4)]
    rates.share(flows, 0.0)
    sent = 0
    for now in (1.0, 1.0, 1.0, 1.01):
        for each in rates.due(now):
            sent += MIB
            each.ahead_count -= 1
            rates.resume(each, now)
    assert sent <= RATE * (CATCH_UP_S + 0.01) + 4 * MIB + MIB


def test_a_link_carries_one_after_the_other_and_catches_up_a_little() -> None:
    waiting = [flow(number) for number in range(20)]
    link = SerialLink(RATE, lambda now: waiting.pop(0) if waiting else None, lambda went, now: None)
    assert link.due(0.0) == []
    assert link.wake_at() == pytest.approx(0.01)
    assert [each.number for each in link.due(0.035)] == [0, 1, 2]
    assert len(link.due(10.0)) == 1 + int(CATCH_UP_S / 0.01)


def test_what_is_left_of_a_payload_goes_at_the_new_rate() -> None:
    waiting = [flow(0, (100 * MIB,))]
    link = SerialLink(RATE, lambda now: waiting.pop(0) if waiting else None, lambda went, now: None)
    link.due(0.0)
    link.set_rate(RATE / 2, 0.5)
    assert link.wake_at() == pytest.approx(1.5)


@given(st.lists(st.tuples(st.sampled_from(["push", "push", "pop", "discard"]), st.integers(0, 5), st.integers(0, 9))))
def test_the_queue_gives_the_earliest_deadline_of_those_that_wait(moves: list[tuple[str, int, int]]) -> None:
    """Whatever has been pushed again, taken out or discarded; tenants with and without a cap alike."""
    capped = LinkTenant("capped", rate_max_bytes_per_s=1e12)
    flows = [flow(number, tenant=capped if number % 2 else None) for number in range(6)]
    queue, dues = DeadlineQueue(TenantMeter()), {}
    for what, number, due_s in moves:
        match what:
            case "push":
                queue.push(flows[number], float(due_s))
                dues[number] = due_s
            case "discard":
                queue.discard(flows[number])
                dues.pop(number, None)
            case "pop":
                found = queue.pop(0.0)
                first = min(dues, key=lambda each: (dues[each], each), default=None)
                assert (None if found is None else found.number) == first
                if first is not None:
                    del dues[first]
    assert len(queue) == len(dues)


def test_a_tenant_over_its_cap_is_passed_over_until_its_time_has_come() -> None:
    queue = DeadlineQueue(TenantMeter())
    capped = LinkTenant("capped", rate_max_bytes_per_s=float(MIB))
    first, second, other = flow(1, tenant=capped), flow(2, tenant=capped), flow(3)
    for each, due_s in ((first, 1.0), (second, 2.0), (other, 3.0)):
        queue.push(each, due_s)
    assert queue.pop(0.0) is first
    queue.charge(capped, MIB, 0.0)
    assert queue.pop(0.0) is other
    assert queue.pop(0.0) is None
    assert queue.free_s() == pytest.approx(1.0 - CATCH_UP_S)
    assert queue.pop(1.0) is second
    assert queue.free_s() == math.inf


def test_the_pools_clock_never_goes_back_and_does_not_leap_while_something_is_awaited() -> None:
    clock = SteadyClock()
    assert clock.steady(100.0, math.inf) == 100.0
    assert clock.steady(40.0, 101.0) == 100.0
    assert clock.steady(41.0, 101.0) == 101.0
    assert clock.callers_time(102.0) == pytest.approx(42.0)
    assert clock.steady(3600.0, 102.0) == 102.0 + LEAP_S_MAX
    assert clock.steady(9000.0, math.inf) == pytest.approx(102.0 + LEAP_S_MAX + 5400.0)
