"""The requests that run, those that wait, and the order of turns."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from objectcache.orchestrator.rules.admission import (
    Admission,
    AdmissionSettings,
    Tenant,
    Verdict,
    Waiting,
    retry_after_s,
)

A, B = Tenant("a"), Tenant("b")


def started(admission: Admission) -> list[str]:
    return [each.request_id for each in admission.start()]


def test_requests_run_while_there_are_places_then_wait_then_are_refused() -> None:
    """003: of ten requests at once three run, and where nothing waits seven are refused."""
    admission = Admission(AdmissionSettings(active_max=3, queue_max=0))
    verdicts = Counter(admission.offer(str(at), A, 100) for at in range(10))
    assert verdicts == {Verdict.RUNS: 3, Verdict.REFUSED: 7}
    waiting = Admission(AdmissionSettings(active_max=1, queue_max=2))
    assert [waiting.offer(str(at), A, 100) for at in range(4)] == [
        Verdict.RUNS, Verdict.WAITS, Verdict.WAITS, Verdict.REFUSED,
    ]  # fmt: skip
    waiting.end("0")
    assert started(waiting) == ["1"]
    waiting.end("1")
    assert started(waiting) == ["2"]


def test_a_full_queue_refuses_nobody_of_a_higher_priority() -> None:
    """One tenant could otherwise keep everybody out for as long as it likes."""
    urgent, low = Tenant("urgent", priority=10), Tenant("low", priority=-1)
    admission = Admission(AdmissionSettings(active_max=1, queue_max=3))
    assert [admission.offer(f"a{at}", A, 1) for at in range(3)] == [Verdict.RUNS, Verdict.WAITS, Verdict.WAITS]
    assert admission.offer("low0", low, 1) is Verdict.WAITS
    assert admission.offer("urgent0", urgent, 1) is Verdict.WAITS
    assert admission.displaced == ["low0"]
    assert admission.offer("urgent1", urgent, 1) is Verdict.WAITS
    assert admission.displaced == ["low0", "a2"]
    assert admission.offer("low1", low, 1) is Verdict.REFUSED
    admission.end("a0")
    assert started(admission) == ["urgent0"]
    assert admission.waiting_count == 2


def test_a_full_queue_is_shared_among_tenants_of_one_priority() -> None:
    heavy = Tenant("heavy", weight=3.0)
    admission = Admission(AdmissionSettings(active_max=1, queue_max=8))
    assert admission.offer("first", A, 1) is Verdict.RUNS
    verdicts = [admission.offer(f"a{at}", A, 1) for at in range(9)]
    assert Counter(verdicts) == {Verdict.WAITS: 8, Verdict.REFUSED: 1}
    verdicts = [admission.offer(f"b{at}", B, 1) for at in range(8)]
    assert verdicts == [Verdict.WAITS] * 4 + [Verdict.REFUSED] * 4
    assert admission.displaced == ["a7", "a6", "a5", "a4"]
    assert [admission.offer(f"h{at}", heavy, 1) for at in range(5)].count(Verdict.WAITS) == 4


def test_tenants_take_turns_by_tokens_and_weight() -> None:
    """A tenant with prompts of a tenth of the tokens runs ten times as many."""
    admission = Admission(AdmissionSettings(active_max=1, queue_max=1000))
    admission.offer("first", A, 1)
    for at in range(100):
        admission.offer(f"a{at}", A, 10_000)
        admission.offer(f"b{at}", B, 1_000)
    running, order = "first", []
    for _ in range(44):
        admission.end(running)
        (running,) = started(admission)
        order.append(running[0])
    counts = Counter(order)
    assert counts["b"] == pytest.approx(10 * counts["a"], rel=0.3)


def test_a_higher_priority_goes_first_and_a_tenants_own_bound_holds() -> None:
    urgent, bounded = Tenant("urgent", priority=1), Tenant("bounded", active_max=1)
    admission = Admission(AdmissionSettings(active_max=2, queue_max=10))
    admission.offer("1", bounded, 10)
    assert admission.offer("2", bounded, 10) is Verdict.WAITS
    assert admission.offer("3", A, 10) is Verdict.RUNS
    admission.offer("4", A, 10)
    admission.offer("5", urgent, 10_000)
    admission.end("3")
    assert started(admission) == ["5"]
    admission.end("5")
    assert started(admission) == ["4"]
    admission.end("1")
    assert started(admission) == ["2"]


def test_one_tenant_cannot_take_the_whole_queue_where_others_wait() -> None:
    admission = Admission(AdmissionSettings(active_max=1, queue_max=10))
    admission.offer("x", A, 1)
    admission.offer("b", B, 1)
    verdicts = [admission.offer(f"a{at}", A, 1) for at in range(9)]
    assert verdicts.count(Verdict.WAITS) == 5
    assert admission.offer("b2", B, 1) is Verdict.WAITS


def test_one_that_leaves_the_queue_waits_no_more() -> None:
    admission = Admission(AdmissionSettings(active_max=1, queue_max=10))
    admission.offer("x", A, 1)
    admission.offer("1", A, 1)
    admission.offer("2", B, 1)
    admission.end("1")
    assert admission.waiting_count == 1
    assert 1 <= retry_after_s(admission.waiting_count, 1, 1000.0) <= 60
    admission.end("x")
    assert started(admission) == ["2"]


@given(
    st.lists(
        st.tuples(st.sampled_from(["offer", "end"]), st.integers(0, 30), st.integers(0, 3), st.integers(1, 100_000)),
        max_size=60,
    )
)
def test_every_request_is_in_one_place_and_places_do_not_stay_empty(
    steps: list[tuple[str, int, int, int]],
) -> None:
    tenants = [Tenant("a"), Tenant("b", weight=0.01), Tenant("c", priority=1), Tenant("d", active_max=2)]
    admission = Admission(AdmissionSettings(active_max=4, queue_max=8))
    active: set[str] = set()
    waiting: dict[str, Tenant] = {}
    for what, number, tenant, tokens in steps:
        name = str(number)
        if what == "offer" and name not in active and name not in waiting:
            verdict = admission.offer(name, tenants[tenant], tokens)
            if verdict is Verdict.RUNS:
                active.add(name)
            elif verdict is Verdict.WAITS:
                waiting[name] = tenants[tenant]
            for displaced in admission.displaced:
                assert waiting.pop(displaced).priority <= tenants[tenant].priority
            admission.displaced.clear()
        elif what == "end":
            admission.end(name)
            active.discard(name)
            waiting.pop(name, None)
        for each in admission.start():
            assert waiting.pop(each.request_id) == each.tenant
            active.add(each.request_id)
        assert admission.active_count == len(active) <= 4
        assert admission.waiting_count == len(waiting) <= 8
        if waiting and len(active) < 4:
            assert all(each.name == "d" for each in waiting.values())


def test_another_share_counts_for_requests_that_wait_already() -> None:
    bounded = Tenant("t", active_max=1)
    admission = Admission(AdmissionSettings(active_max=8, queue_max=8))
    for at in range(4):
        admission.offer(str(at), bounded, 10)
    assert started(admission) == []
    admission.set_share(Tenant("t", active_max=3))
    assert started(admission) == ["1", "2"]


def test_a_crowd_that_hangs_up_costs_no_search_each(monkeypatch: pytest.MonkeyPatch) -> None:
    admission = Admission(AdmissionSettings(1, 4096))
    for index in range(200):
        admission.offer(str(index), Tenant("a"), 1)

    def compared(*_: object) -> bool:
        raise AssertionError("one after the other was looked at")

    monkeypatch.setattr(Waiting, "__eq__", compared)
    for index in reversed(range(200)):
        admission.end(str(index))
    assert (admission.waiting_count, admission.active_count) == (0, 0)


def test_tenants_that_wait_are_looked_at_only_where_a_place_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """A crowd of 4,096 requests of a thousand tenants that hung up stopped the event loop for 0.6 s."""
    admission = Admission(AdmissionSettings(1, 4096))
    for index in range(20):
        admission.offer(str(index), Tenant(f"t{index}"), 1)
    looked_at: list[Tenant] = []
    has_room = Admission._has_room
    monkeypatch.setattr(
        Admission, "_has_room", lambda each, tenant: (looked_at.append(tenant), has_room(each, tenant))[1]
    )
    admission.end("19")
    assert started(admission) == []
    assert looked_at == []
    admission.end("0")
    assert started(admission) == ["1"]


def test_while_others_wait_a_tenant_runs_no_more_than_its_share() -> None:
    """Requests that take long would collect all places otherwise: turns go by requests that start."""
    heavy = Tenant("heavy", weight=3.0)
    admission = Admission(AdmissionSettings(active_max=8, queue_max=100))
    for at in range(8):
        admission.offer(f"a{at}", A, 1)
    for at in range(20):
        admission.offer(f"a-more{at}", A, 1)
        admission.offer(f"heavy{at}", heavy, 1000)
    for at in range(6):
        admission.end(f"a{at}")
    assert [each[:5] for each in started(admission)] == ["heavy"] * 6
    admission.end("a6")
    assert started(admission) == ["a-more0"]  # each runs its share, and takes its turns again
    for at in range(20):
        admission.end(f"heavy{at}")
    assert len(started(admission)) == 6  # nobody else waits


def test_an_engine_that_answers_nothing_keeps_no_place_from_requests_for_others() -> None:
    """A thousand requests for its model had all places, and every other model's requests got 503 for ten minutes."""
    admission = Admission(AdmissionSettings(active_max=4, queue_max=8))
    assert [admission.offer(f"x{at}", A, 1, "x") for at in range(6)] == [Verdict.RUNS] * 2 + [Verdict.WAITS] * 4
    assert started(admission) == []
    assert admission.offer("y0", A, 1, "y") is Verdict.RUNS, "the same tenant's for another engine do not wait behind"
    assert admission.offer("any", B, 1) is Verdict.RUNS
    assert admission.offer("y1", B, 1, "y") is Verdict.WAITS
    admission.end("y0")
    assert started(admission) == ["y1"]
    admission.end("x0")
    assert started(admission) == ["x2"]


def test_requests_for_one_engine_do_not_keep_the_queue_from_those_for_others() -> None:
    admission = Admission(AdmissionSettings(active_max=2, queue_max=4))
    for at in range(5):
        admission.offer(f"x{at}", A, 1, "x")
    assert admission.offer("y0", A, 1, "y") is Verdict.RUNS
    assert [admission.offer(f"y{at}", A, 1, "y") for at in range(1, 4)] == [Verdict.WAITS] * 2 + [Verdict.REFUSED]
    assert admission.displaced == ["x4", "x3"]
    assert admission.offer("x5", A, 1, "x") is Verdict.REFUSED
    admission.end("y0")
    assert started(admission) == ["y1"]


def test_a_request_counts_at_the_engine_that_it_was_sent_to() -> None:
    admission = Admission(AdmissionSettings(active_max=4, queue_max=8))
    for name in ("a", "b"):
        assert admission.offer(name, A, 1) is Verdict.RUNS
        admission.sent(name, "x")
    assert admission.offer("c", A, 1, "x") is Verdict.WAITS
    assert started(admission) == []
    admission.sent("b", "y")
    assert started(admission) == ["c"]
    admission.end("a")
    admission.end("b")
    admission.end("c")
    admission.sent("c", "x")  # over already
    assert [admission.offer(f"x{at}", A, 1, "x") for at in range(3)] == [Verdict.RUNS, Verdict.RUNS, Verdict.WAITS]


def test_a_running_request_goes_to_the_only_engine_that_is_left_where_there_is_room() -> None:
    """Others have refused it, or are gone: it would else pass the part of the places that one engine may have."""
    admission = Admission(AdmissionSettings(active_max=4, queue_max=8))
    for at in range(3):
        admission.offer(f"r{at}", A, 1)
    assert admission.may_go_to("r0", "x")
    assert admission.may_go_to("r0", "")
    admission.sent("r0", "x")
    admission.sent("r1", "x")
    assert [admission.may_go_to(f"r{at}", "x") for at in range(3)] == [True, True, False]
    admission.end("r0")
    assert admission.may_go_to("r2", "x")


def test_a_tenant_whose_requests_take_long_leaves_places_to_those_that_run_few() -> None:
    """One with 1,100 long streams had all places, and every other tenant's requests got 503 until one of them ended."""
    admission = Admission(AdmissionSettings(active_max=1024, queue_max=4096))
    verdicts = Counter(admission.offer(f"a{at}", A, 1) for at in range(1100))
    assert verdicts == {Verdict.RUNS: 896, Verdict.WAITS: 204}
    assert Counter(admission.offer(f"b{at}", B, 1) for at in range(20)) == {Verdict.RUNS: 16, Verdict.WAITS: 4}
    assert admission.offer("c0", Tenant("c"), 1) is Verdict.RUNS
    assert started(admission) == []
    admission.end("b0")
    assert started(admission) == ["b16"], "it runs few again"
    for at in range(40):
        admission.end(f"a{at}")
    assert len(started(admission)) == 40 - 16 - 1, "those with many have what is left beside the others"


def test_without_tenants_everybody_has_all_places() -> None:
    admission = Admission(AdmissionSettings(active_max=1024, queue_max=4096))
    assert Counter(admission.offer(str(at), Tenant(""), 1) for at in range(1025)) == {
        Verdict.RUNS: 1024, Verdict.WAITS: 1,
    }  # fmt: skip


def test_a_request_that_waits_may_have_other_engines_later() -> None:
    admission = Admission(AdmissionSettings(active_max=4, queue_max=9))
    for at in range(4):
        admission.offer(f"busy {at}", A, 100, "a")
    assert (admission.active_count, admission.waiting_count) == (2, 2)
    admission.reassign("busy 2", "a")
    admission.reassign("nobody", "")
    assert started(admission) == []
    admission.reassign("busy 3", "")
    assert started(admission) == ["busy 3"]
    admission.reassign("busy 2", "b")
    assert started(admission) == ["busy 2"]
    for at in range(4):
        admission.end(f"busy {at}")
    assert (admission.active_count, admission.waiting_count) == (0, 0)
