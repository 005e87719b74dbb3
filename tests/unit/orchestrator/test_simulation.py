"""The simulation: tokens add up, losses cost a second attempt, and 003's model is one of its cases."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.paper.orchestrator.shared import ENGINE as SHARED_ENGINE
from bench.paper.orchestrator.shared import shared_beginning
from objectcache.orchestrator.rules.latency_model import LatencyCosts, ModelRequest, latency_ms
from objectcache.orchestrator.rules.policies import PolicyName
from objectcache.orchestrator.simulation import (
    Outcome,
    SimulatedEngine,
    SimulatedRequest,
    SimulatedStore,
    Simulation,
    summary,
    with_bursts,
)

ENGINE = SimulatedEngine(100.0, 0.01, blocks_max=100)
STORE = SimulatedStore(1000, 10e9)


def conversations(count: int, turns: int, gap_s: float) -> list[SimulatedRequest]:
    """Each turn goes on from the one before it."""
    return sorted(
        (
            SimulatedRequest(
                (turn * count + number) * gap_s,
                tuple(number * 100 + at for at in range(4 * (turn + 1))),
                4 * (turn + 1) * 512,
                20,
                str(number),
            )
            for number in range(count)
            for turn in range(turns)
        ),
        key=lambda each: each.at_s,
    )


@pytest.mark.parametrize("policy", PolicyName)
@pytest.mark.parametrize("store", [None, STORE])
def test_every_request_ends_once_and_its_tokens_add_up(policy: PolicyName, store: SimulatedStore | None) -> None:
    requests = conversations(12, 4, 0.05)
    outcomes = Simulation([ENGINE] * 3, policy, store).run(requests)
    assert len(outcomes) == len(requests)
    whole = sum(each.held_tokens + each.loaded_tokens + each.computed_tokens for each in outcomes)
    assert whole == sum(each.prompt_tokens for each in requests)
    assert all(each.ttft_s > 0 and each.computed_tokens >= 1 for each in outcomes)
    assert sum(each.loaded_tokens for each in outcomes) == 0 or store is not None
    again = Simulation([ENGINE] * 3, policy, store).run(requests)
    assert again == outcomes


def engines_of(outcomes: list[Outcome]) -> list[int]:
    return [sum(each.engine == at for each in outcomes) for at in range(3)]


def test_what_all_prompts_begin_with_spreads_over_engines_and_reaches_one_that_joins() -> None:
    """One engine held it and got every request, while its steps became longer and longer."""
    engine = SHARED_ENGINE
    requests = shared_beginning(400, 10.0)
    spread = Simulation([engine] * 3, PolicyName.TTFT).run(requests)
    assert min(engines_of(spread)) > 100
    alone = Simulation([engine], PolicyName.TTFT).run(requests)
    assert summary(spread)["whole_mean_s"] < 0.7 * summary(alone)["whole_mean_s"]
    joined = Simulation([engine, engine, replace(engine, joins_at_s=20.0)], PolicyName.TTFT).run(requests)
    assert min(engines_of(joined[200:])) > 50


def test_streams_wait_for_each_other_and_for_prompts() -> None:
    """Two streams of 10 tokens at 0.1 s and 0.05 s more; a prompt of 1 s comes in between."""
    engine = SimulatedEngine(1000.0, 0.1, decode_growth_s=0.05)
    requests = [SimulatedRequest(at, (), 1000, 10) for at in (0.0, 0.0, 2.5)]
    first, second, third = Simulation([engine], PolicyName.LEAST_LOAD).run(requests)
    assert [each.ttft_s for each in (first, second, third)] == pytest.approx([1.0, 2.0, 1.0])
    # from 2.0 s on two streams, 0.15 s a token; from 2.5 to 3.5 s none; then three, 0.2 s a token
    two_s = 3.5 + (10 - 0.5 / 0.15) * 0.2
    assert first.whole_s == second.whole_s == pytest.approx(two_s)
    assert third.whole_s == pytest.approx(two_s + (0.5 / 0.15) * 0.1 - 2.5)


def test_prefixes_that_are_held_make_the_difference() -> None:
    requests = conversations(13, 6, 0.1)
    ours, turns = (
        summary(Simulation([ENGINE] * 4, policy).run(requests)) for policy in (PolicyName.TTFT, PolicyName.ROUND_ROBIN)
    )
    assert ours["held"] > turns["held"]
    assert ours["ttft_mean_s"] < turns["ttft_mean_s"]


def test_an_engine_that_is_lost_costs_its_requests_a_second_attempt() -> None:
    requests = conversations(20, 3, 0.05)
    engines = [replace(ENGINE, lost_at_s=1.0), ENGINE]
    outcomes = Simulation(engines, PolicyName.TTFT, STORE).run(requests)
    assert len(outcomes) == len(requests)
    assert {each.attempt_count for each in outcomes} == {1, 2}
    assert all(each.engine == 1 for each in outcomes if each.at_s > 1.0)


def test_a_slow_link_is_not_used_where_computing_is_sooner() -> None:
    requests = conversations(6, 3, 0.2)
    engines = [replace(ENGINE, blocks_max=1)] * 2
    slow = Simulation(engines, PolicyName.TTFT, replace(STORE, link_bytes_per_s=1e6)).run(requests)
    fast = Simulation(engines, PolicyName.TTFT, STORE).run(requests)
    assert sum(each.loaded_tokens for each in slow) == 0
    assert sum(each.loaded_tokens for each in fast) > 0


def test_blocks_that_went_while_a_request_waited_are_not_loaded_over_a_slow_link() -> None:
    """The engine holds the prefix when the last request is sent, and not when its turn comes."""
    engine, prefix = replace(ENGINE, blocks_max=40), tuple(range(30))
    first = SimulatedRequest(0.0, prefix, 30 * 512, 1)
    others = [SimulatedRequest(10.0, tuple(range(at, at + 40)), 40 * 512, 1) for at in (100, 200)]
    last = SimulatedRequest(10.0, (*prefix, 99), 31 * 512, 1)
    outcomes = Simulation([engine], PolicyName.TTFT, replace(STORE, link_bytes_per_s=1e6)).run([first, *others, last])
    assert outcomes[-1].predicted_s < outcomes[-1].ttft_s
    assert (outcomes[-1].held_tokens, outcomes[-1].loaded_tokens) == (0, 0)


def test_the_model_of_003_is_one_engine_without_routing_or_queue() -> None:
    """Its latency is TTFT and decoding; routing is 003's 5 ms."""
    costs = LatencyCosts()
    engine = SimulatedEngine(costs.prefill_ms * 1000, costs.decode_ms / 1000, requests_max=1)
    requests = [SimulatedRequest(0.0, (1, 2), 1024, 20), SimulatedRequest(10.0, (1, 3), 1024, 20)]
    miss, hit = Simulation([engine], PolicyName.PAPER).run(requests)
    for outcome, hit_tokens in ((miss, 0), (hit, 512)):
        wanted_ms = latency_ms(ModelRequest(1024, 20, hit_tokens), costs)
        assert outcome.ttft_s * 1000 + 20 * costs.decode_ms + costs.routing_ms == pytest.approx(wanted_ms)


def test_bursts_have_the_rate_that_was_asked_for() -> None:
    requests = conversations(100, 20, 0.0)
    for burst in (1, 16):
        times = [each.at_s for each in with_bursts(requests, 10.0, burst, 7)]
        assert times == sorted(times)
        assert len(times) / times[-1] == pytest.approx(10.0, rel=0.2)
        assert (len(set(times)) == len(times)) is (burst == 1)
