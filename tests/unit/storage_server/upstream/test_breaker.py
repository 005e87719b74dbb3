"""A service that fails is left alone for a while, and tried by one request at a time."""

from __future__ import annotations

from storage_server.upstream.breaker import FAILURES_MAX, PAUSE_S_MAX, PAUSE_S_MIN, Breaker


def failed_often(breaker: Breaker, now_s: float = 0.0) -> None:
    for _ in range(FAILURES_MAX):
        breaker.failed(now_s)


def test_a_few_failures_stop_nobody() -> None:
    breaker = Breaker()
    for _ in range(FAILURES_MAX - 1):
        breaker.failed(0.0)
    assert breaker.wait_s(0.0) == 0.0
    breaker.succeeded()
    for _ in range(FAILURES_MAX - 1):
        breaker.failed(0.0)
    assert not breaker.is_open


def test_after_many_one_may_try_when_the_pause_is_over() -> None:
    breaker = Breaker()
    failed_often(breaker)
    assert breaker.wait_s(0.25) == PAUSE_S_MIN - 0.25
    assert breaker.wait_s(PAUSE_S_MIN) == 0.0
    assert breaker.wait_s(PAUSE_S_MIN) > 0.0, "one tries"
    breaker.succeeded()
    assert breaker.wait_s(PAUSE_S_MIN) == 0.0
    assert not breaker.is_open


def test_pauses_grow_to_a_bound_and_start_again_after_success() -> None:
    breaker, now_s, pauses = Breaker(), 0.0, list[float]()
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


def test_a_try_that_its_caller_left_is_another_ones() -> None:
    breaker = Breaker()
    failed_often(breaker)
    assert breaker.wait_s(PAUSE_S_MIN) == 0.0
    breaker.gave_up()
    assert breaker.wait_s(PAUSE_S_MIN) == 0.0
