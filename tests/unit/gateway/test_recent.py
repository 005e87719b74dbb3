"""The failures that a server remembers, for people who look at it."""

from __future__ import annotations

from gateway.recent import KEPT, NAME_CHARACTERS_MAX, RecentFailures


def test_the_latest_come_first_and_the_oldest_are_forgotten() -> None:
    recent = RecentFailures()
    for at in range(3 * KEPT):
        recent.note(float(at), f"id-{at}", "get_object", "b", 503, "SlowDown")
    assert [each["request_id"] for each in recent.told()] == [
        f"id-{at}" for at in range(3 * KEPT - 1, 2 * KEPT - 1, -1)
    ]


def test_wrong_requests_push_no_failure_of_the_server_out() -> None:
    recent = RecentFailures()
    recent.note(0.0, "ours", "put_object", "b", 500, "InternalError")
    for at in range(1, 10 * KEPT):
        recent.note(float(at), "theirs", "-", "b", 403, "AccessDenied")
    told = recent.told()
    assert len(told) == KEPT + 1
    assert (told[-1]["request_id"], told[-1]["status"], told[-1]["code"]) == ("ours", 500, "InternalError")


def test_a_name_takes_no_more_than_its_place() -> None:
    recent = RecentFailures()
    recent.note(0.0, "r" * 10_000, "o" * 10_000, "b" * 10_000, 404, "c" * 10_000)
    (told,) = recent.told()
    assert {len(told[name]) for name in ("request_id", "operation", "bucket", "code")} == {NAME_CHARACTERS_MAX}
