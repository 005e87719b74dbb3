"""What leaves between a look into the index and the promise that follows."""

from __future__ import annotations

from storage_server.cache.rules.departures import BATCHES_MAX, Departures

KEYS = ["a", "b", "c"]


def staying(departures: Departures, since: int) -> int:
    return departures.staying_count("bucket", KEYS, 3, since)


def test_what_is_leaving_does_not_stay() -> None:
    departures = Departures()
    since = departures.ended_count
    departures.begin([("bucket", "b"), ("other", "a")])
    assert staying(departures, since) == 1


def test_what_left_after_the_index_was_read_does_not_stay_and_what_left_before_is_not_in_it() -> None:
    departures = Departures()
    before = departures.ended_count
    departures.begin([("bucket", "a")])
    meanwhile = departures.ended_count
    departures.end()
    assert staying(departures, before) == 0
    assert staying(departures, meanwhile) == 0  # the index may have been read before the batch had left
    assert staying(departures, departures.ended_count) == 3


def test_keys_behind_those_that_matched_do_not_count() -> None:
    departures = Departures()
    departures.begin([("bucket", "c")])
    assert departures.staying_count("bucket", KEYS, 2, 0) == 2


def test_more_batches_than_are_remembered_leave_nothing_certain() -> None:
    departures = Departures()
    for _ in range(BATCHES_MAX + 1):
        departures.begin([])
        departures.end()
    assert staying(departures, 1) == 3
    assert staying(departures, 0) == 0
