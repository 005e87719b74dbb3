"""The delay that a request causes to others."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from descriptors.recompute import PrefillCosts
from objectcache.orchestrator.rules.congestion import BUSY_SHARE_MAX, Congestion
from objectcache.orchestrator.rules.observed_costs import Correction
from objectcache.orchestrator.rules.prediction import EngineState

A = EngineState("a", PrefillCosts(100.0), queue_s=1.0, arrivals_per_s=2.0, busy_share=0.8)
B = replace(A, name="b", queue_s=1.2)


def test_the_example_of_the_module() -> None:
    assert Congestion.among([A, B]).others_s(0.4, A) == pytest.approx(4.4)


def test_prompts_that_wait_at_the_engine_are_delayed_by_all_of_it() -> None:
    congestion = Congestion.among([A, B])
    assert congestion.others_s(0.4, replace(A, waiting_count=3)) == pytest.approx(4.4 + 3 * 0.4)


def test_a_stream_more_takes_time_from_each_other_stream_there() -> None:
    """Engines that do not know how much take the least of the others, and a quarter of a second at most: one that lies
    must not decide about them.
    """
    crowded = replace(A, active_count=5, growth_s=0.5)
    assert Congestion.among([crowded, B]).others_s(0.4, crowded) == pytest.approx(4.4 + 5 * 0.5)
    others = [crowded, replace(B, growth_s=0.6), replace(B, growth_s=1e9)]
    new = replace(B, name="new", active_count=2)
    alone = Congestion.among([*others, new])
    assert alone.others_s(0.0, new) == pytest.approx(2 * 0.25)
    assert Congestion.among([replace(A, growth_s=0.1), *others, new]).others_s(0.0, new) == pytest.approx(2 * 0.1)
    assert Congestion.among([A, new]).others_s(0.0, new) == 0


def test_one_engine_that_lies_of_its_speed_does_not_change_what_work_is_worth() -> None:
    honest = [A, B, replace(A, name="c")]
    liar = replace(A, name="d", prefill=PrefillCosts(1e-9))
    assert Congestion.among([*honest, liar]).others_s(0.4, A) == pytest.approx(
        Congestion.among(honest).others_s(0.4, A), rel=0.35
    )


def test_with_an_idle_engine_only_the_new_work_delays_those_that_come() -> None:
    idle = replace(B, queue_s=0.0)
    assert Congestion.among([A, idle]).others_s(0.4, A) == pytest.approx(0.4 * 2 * 0.1 / 0.2)
    many = [A, *(replace(idle, name=str(at)) for at in range(63))]
    assert Congestion.among(many).others_s(0.4, A) < 0.02


def test_a_second_of_a_slow_engine_is_worth_less() -> None:
    slow = replace(B, prefill=PrefillCosts(300.0))
    congestion = Congestion.among([A, slow])
    assert congestion.others_s(0.4, slow) < congestion.others_s(0.4, A)
    believed = replace(B, correction=Correction(3.0))
    assert Congestion.among([A, believed]).others_s(0.4, believed) == pytest.approx(congestion.others_s(0.4, slow))


def test_engines_that_cannot_keep_up_do_not_make_a_delay_infinite() -> None:
    full = [replace(state, busy_share=3.0) for state in (A, B)]
    assert Congestion.among(full).busy_share == BUSY_SHARE_MAX
    assert Congestion.among(full).others_s(0.4, A) == pytest.approx(8.8)


@given(st.floats(0, 10), st.floats(0, 10), st.floats(0, 100), st.floats(0, 5), st.integers(0, 20))
def test_more_work_delays_more_and_none_delays_nobody(
    work_s: float, more_s: float, arrivals_per_s: float, queue_s: float, waiting_count: int
) -> None:
    state = replace(A, arrivals_per_s=arrivals_per_s, queue_s=queue_s, waiting_count=waiting_count)
    congestion = Congestion.among([state, B])
    assert congestion.others_s(0.0, state) == 0
    assert congestion.others_s(work_s + more_s, state) >= congestion.others_s(work_s, state) - 1e-9
