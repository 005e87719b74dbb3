"""When leases are renewed, and what is said of renewals that come late."""

from __future__ import annotations

import logging
import re
import threading

import pytest

from objectcache.adapters.renewals import RENEWALS, Renewals, RenewalTimes


def test_a_lease_is_renewed_four_times_while_it_lasts() -> None:
    times = RenewalTimes(10.0, 102.5)
    assert times.pause_s(100.0) == 2.5
    assert times.succeeded(102.5) == 0.0
    assert times.pause_s(102.5) == 2.5


def test_a_failed_renewal_is_tried_again_soon_and_then_less_often() -> None:
    times = RenewalTimes(10.0, 0.0)
    pauses = []
    for _ in range(6):
        times.failed(0.0)
        pauses.append(times.pause_s(0.0))
    assert pauses == [0.1, 0.2, 0.4, 0.8, 1.0, 1.0]
    assert times.failure_count == 6


def test_tries_are_never_further_apart_than_renewals() -> None:
    times = RenewalTimes(1.0, 0.0)
    for _ in range(9):
        times.failed(0.0)
    assert times.pause_s(0.0) == 1.0 / RENEWALS


def test_lateness_counts_from_when_the_renewal_was_due_with_its_failures() -> None:
    times = RenewalTimes(10.0, 2.5)
    times.failed(4.0)
    times.failed(5.0)
    assert times.succeeded(6.0) == 3.5
    assert times.failure_count == 0
    assert times.succeeded(8.5) == 0.0


def test_a_renewal_that_is_due_in_the_past_comes_at_once() -> None:
    assert RenewalTimes(10.0, 1.0).pause_s(5.0) == 0.0


def test_renewals_go_on_in_one_thread_after_failures_and_the_log_says_how_late_they_were(
    caplog: pytest.LogCaptureFixture,
) -> None:
    threads: list[threading.Thread] = []
    enough = threading.Event()

    def renew() -> None:
        threads.append(threading.current_thread())
        if len(threads) in (2, 3):
            raise OSError("no answer")
        if len(threads) > 4:
            enough.set()

    renewals = Renewals("the lease of a", 0.04, renew, lambda: threads.append(threading.current_thread()))
    with caplog.at_level(logging.WARNING):
        renewals.start(first_in_s=0.0)
        assert enough.wait(60)
        renewals.stop()
    told = [record.getMessage() for record in caplog.records]
    failed = told.index("the lease of a could not be renewed: OSError('no answer')")
    late = r"the lease of a was renewed \d+\.\d s late; it lasts 0\.0 s without a renewal"
    assert re.fullmatch(late, told[failed + 1])
    assert len(set(threads)) == 1
    assert not threads[0].is_alive()
    renewals.stop()


def test_renewals_that_never_began_can_be_stopped() -> None:
    renewals = Renewals("the lease of a", 10.0, lambda: pytest.fail("renewed"))
    renewals.stop()
