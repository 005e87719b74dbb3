"""A service that fails is left alone for a while, and tried by one request at a time."""

from __future__ import annotations

from objectcache.adapters.breaker import Breaker, back_off_s

FAILURES_MAX = 5
PAUSE_S_MIN, PAUSE_S_MAX = 1.0, 30.0


def made() -> Breaker:
    return Breaker(FAILURES_MAX, PAUSE_S_MIN, PAUSE_S_MAX)


def failed_often(breaker: Breaker, now_s: float = 0.0) -> None:
    for _ in range(FAILURES_MAX):
        breaker.failed(now_s)


def test_a_few_failures_stop_nobody() -> None:
    breaker = made()
    for _ in range(FAILURES_MAX - 1):
        breaker.failed(0.0)
    assert breaker.wait_s(0.0) == 0.0
    breaker.succeeded()
    for _ in range(FAILURES_MAX - 1):
        breaker.failed(0.0)
    assert not breaker.is_open(0.0)


def test_after_many_one_may_try_when_the_pause_is_over() -> None:
    breaker = made()
    failed_often(breaker)
    assert breaker.is_open(0.25)
    assert breaker.wait_s(0.25) == PAUSE_S_MIN - 0.25
    assert not breaker.is_open(PAUSE_S_MIN)
    assert breaker.wait_s(PAUSE_S_MIN) == 0.0
    assert breaker.wait_s(PAUSE_S_MIN) > 0.0, "one tries"
    breaker.succeeded()
    assert breaker.wait_s(PAUSE_S_MIN) == 0.0
    assert breaker.failure_count == 0


def test_pauses_grow_to_a_bound_and_start_again_after_success() -> None:
    breaker, now_s, pauses = made(), 0.0, list[float]()
    failed_often(breaker)
    for _ in range(8):
        pause_s = breaker.wait_s(now_s)
        pauses.append(pause_s)
        now_s += pause_s
        assert breaker.wait_s(now_s) == 0.0
        breaker.failed(now_s)
    assert pauses == [1.0, 2.0, 4.0, 8.0, 16.0, PAUSE_S_MAX, PAUSE_S_MAX, PAUSE_S_MAX]
    breaker.succeeded()
    failed_often(breaker, now_s)
    assert breaker.wait_s(now_s) == PAUSE_S_MIN


def test_failures_of_requests_that_began_before_the_pause_do_not_lengthen_it() -> None:
    """Else a service that drops 64 connections at once would be left alone for the longest time."""
    breaker = made()
    for _ in range(64):
        breaker.failed(0.0)
    assert breaker.wait_s(0.0) == PAUSE_S_MIN


def test_a_try_that_its_caller_left_is_another_ones() -> None:
    breaker = made()
    failed_often(breaker)
    assert breaker.wait_s(PAUSE_S_MIN) == 0.0
    breaker.gave_up()
    assert breaker.wait_s(PAUSE_S_MIN) == 0.0


def test_one_failure_may_be_enough_and_every_pause_as_long() -> None:
    breaker = Breaker(1, 5.0, 5.0)
    assert not breaker.is_open(0.0)
    breaker.failed(10.0)
    assert [breaker.is_open(now_s) for now_s in (10.0, 14.9, 15.0)] == [True, True, False]
    breaker.failed(15.0)
    assert [breaker.is_open(now_s) for now_s in (15.0, 19.9, 20.0)] == [True, True, False]


def test_a_pause_doubles_with_each_failure() -> None:
    assert [back_off_s(count, 0.5, 30.0) for count in (1, 2, 3, 7, 8, 10_000)] == [0.5, 1.0, 2.0, 30.0, 30.0, 30.0]
