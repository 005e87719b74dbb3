"""A failure that one caller meets in a bucket is its own; a service that nobody can reach is everybody's."""

from __future__ import annotations

import pytest

from descriptors.errors import CallerError, ErrorCode, ObjectCacheError, ServerError
from storage_server.home.rules.health import SCOPES_MAX, ServiceHealth, scope_of
from storage_server.home.rules.refusals import NoConnectionError, refusal, unreachable

FIRST, SECOND, OTHER = ("first", "a"), ("second", "a"), ("first", "b")
BUSY = refusal(503, b"")


def made() -> ServiceHealth:
    return ServiceHealth(2, 1.0, 4.0)


def waits(health: ServiceHealth, now_s: float) -> list[float]:
    return [health.wait_s(scope, now_s) for scope in (FIRST, SECOND, OTHER)]


@pytest.mark.parametrize("error", [BUSY, refusal(429, b""), refusal(502, b""), refusal(504, b""), unreachable("reset")])
def test_a_busy_answer_or_none_is_about_its_caller_and_bucket(error: ObjectCacheError) -> None:
    health = made()
    health.failed(FIRST, error, 0.0)
    assert waits(health, 0.0) == [0.0, 0.0, 0.0]
    health.failed(FIRST, error, 0.0)
    assert waits(health, 0.0) == [1.0, 0.0, 0.0]
    assert waits(health, 1.0) == [0.0, 0.0, 0.0]
    assert health.is_trying(FIRST)
    assert waits(health, 1.0) == [1.0, 0.0, 0.0], "one tries"
    health.failed(FIRST, error, 1.0)
    assert waits(health, 1.0) == [2.0, 0.0, 0.0]
    assert not health.has_to_connect


@pytest.mark.parametrize(
    "error", [CallerError(ErrorCode.NO_SUCH_KEY, "none"), ServerError(ErrorCode.INTERNAL_ERROR, "500", retryable=True)]
)
def test_a_refusal_and_a_wrong_answer_are_answers(error: ObjectCacheError) -> None:
    health = made()
    health.failed(FIRST, BUSY, 0.0)
    health.failed(FIRST, error, 0.0)
    assert health.failure_count(FIRST) == 0


def test_a_service_that_nobody_can_connect_to_is_left_alone_by_all() -> None:
    health = made()
    for scope in (FIRST, OTHER):
        health.failed(scope, NoConnectionError("refused"), 0.0)
    assert waits(health, 0.25) == [0.75, 0.75, 0.75]
    assert health.wait_s(SECOND, 1.0) == 0.0
    assert health.has_to_connect
    assert health.wait_s(FIRST, 1.0) == 1.0, "one tries"
    health.connected()
    assert waits(health, 1.0) == [0.0, 0.0, 0.0]
    assert not health.has_to_connect


def test_a_try_that_may_not_connect_is_another_ones() -> None:
    health = made()
    for _ in range(2):
        health.failed(FIRST, BUSY, 0.0)
    for _ in range(2):
        health.failed(OTHER, NoConnectionError("refused"), 0.5)
    assert health.wait_s(FIRST, 1.25) == 0.25
    assert not health.is_trying(FIRST)
    assert health.wait_s(FIRST, 1.5) == 0.0
    assert (health.is_trying(FIRST), health.has_to_connect) == (True, True)


def test_the_failing_are_remembered_to_a_bound() -> None:
    health = made()
    for number in range(SCOPES_MAX + 1):
        health.failed(("first", f"bucket-{number}"), BUSY, 0.0)
    assert health.failure_count(("first", "bucket-0")) == 0
    assert health.failure_count(("first", f"bucket-{SCOPES_MAX}")) == 1


def test_a_scope_is_the_caller_and_the_bucket_of_the_path() -> None:
    targets = ("/", "/b", "/b?delete", "/b/k/x?y=/z", "/?x-id=ListBuckets")
    assert [scope_of("key", target)[1] for target in targets] == ["", "b", "b", "b", ""]
