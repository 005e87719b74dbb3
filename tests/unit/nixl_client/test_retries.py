"""When a client makes a call again: by error, pause, deadline, tries and budget, on a played clock."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from descriptors.errors import (
    CallerError,
    ChunkUnavailable,
    ErrorCode,
    ObjectCacheError,
    ServerError,
    make_error,
)
from nixl_client.session.retries import (
    ATTEMPTS_MAX,
    BUDGET_RETRIES,
    PAUSE_S_MAX,
    Retries,
    always,
    if_refused,
    pause_s,
)
from nixl_client.session.signed_http import parse_error
from nixl_client.transports.http import UnansweredError
from tests.support.played_http import PlayedClock


def busy(retry_after_s: int | None = None) -> ObjectCacheError:
    return make_error(ErrorCode.SLOW_DOWN, "busy", retry_after_s=retry_after_s)


def broken() -> ObjectCacheError:
    return make_error(ErrorCode.INTERNAL_ERROR, "broken")


def lost() -> ObjectCacheError:
    return UnansweredError("lost")


class Service:
    """Fails with each of `errors` in turn, then answers. Each call takes `call_s`."""

    def __init__(self, errors: Sequence[ObjectCacheError], call_s: float = 0.0) -> None:
        self.clock = PlayedClock()
        self.calls: list[float] = []
        self._errors = list(errors)
        self._call_s = call_s

    def retries(self, chance: float = 0.5, attempts_max: int = ATTEMPTS_MAX) -> Retries:
        return Retries(attempts_max, self.clock.now, self.clock.wait, lambda: chance)

    def call(self, left_s: float) -> str:
        self.calls.append(left_s)
        self.clock.now_s += self._call_s
        if self._errors:
            raise self._errors.pop(0)
        return "answer"


@pytest.mark.parametrize("fault", [busy, broken, lost], ids=["503", "500", "lost"])
def test_what_may_pass_is_tried_again_after_growing_pauses(fault: Callable[[], ObjectCacheError]) -> None:
    service = Service([fault() for _ in range(3)])
    assert service.retries().run(service.call, 60.0) == "answer"
    assert service.clock.waits == pytest.approx([0.05, 0.1, 0.2])


@pytest.mark.parametrize(
    "error",
    [
        CallerError(ErrorCode.ACCESS_DENIED, "no"),
        ChunkUnavailable(ErrorCode.CHUNK_CORRUPT, "damaged", index=1),
        ChunkUnavailable(ErrorCode.NO_SUCH_CHUNK, "missing", index=0),
        make_error(ErrorCode.INSUFFICIENT_STORAGE, "full"),
        ServerError(ErrorCode.TARGET_UNREACHABLE, "gone"),
        UnansweredError("certificate", retryable=False),
    ],
    ids=lambda error: error.code.value,
)
def test_what_cannot_pass_is_not_tried_again(error: ObjectCacheError) -> None:
    service = Service([error])
    with pytest.raises(type(error)) as raised:
        service.retries().run(service.call, 60.0)
    assert raised.value is error
    assert len(service.calls) == 1
    assert not hasattr(error, "__notes__")


def test_a_call_is_given_up_after_so_many_tries_and_says_so() -> None:
    service = Service([busy() for _ in range(9)], call_s=0.25)
    with pytest.raises(ServerError) as raised:
        service.retries().run(service.call, 60.0)
    assert len(service.calls) == ATTEMPTS_MAX
    assert raised.value.__notes__ == ["tried 5 times in 2.0 s"]


def test_a_client_may_be_told_to_try_once() -> None:
    service = Service([busy()])
    with pytest.raises(ServerError):
        service.retries(attempts_max=1).run(service.call, 60.0)
    assert service.clock.waits == []


def test_the_servers_pause_is_kept_and_the_random_one_comes_on_top() -> None:
    """Clients that were refused together do not come again together."""
    service = Service([busy(3)])
    assert service.retries(chance=0.25).run(service.call, 60.0) == "answer"
    assert service.clock.waits == pytest.approx([3.025])


def test_each_try_is_told_what_is_left_and_none_begins_past_the_deadline() -> None:
    service = Service([busy(), busy(2), busy()], call_s=1.0)
    with pytest.raises(ServerError):
        service.retries().run(service.call, 4.5)
    assert service.calls == pytest.approx([4.5, 3.45, 0.35])


def test_a_pause_past_the_deadline_is_not_waited_for() -> None:
    """A server, or somebody in its place, that says to come again in a year holds nobody up."""
    service = Service([busy(31_536_000)])
    with pytest.raises(ServerError):
        service.retries().run(service.call, 60.0)
    assert service.clock.now_s == 0.0


def test_a_service_that_always_fails_is_not_asked_five_times_as_often() -> None:
    service = Service([busy() for _ in range(10_000)])
    retries = service.retries()
    for _ in range(1_000):
        with pytest.raises(ServerError):
            retries.run(service.call, 60.0)
    assert len(service.calls) == 1_000 + BUDGET_RETRIES


def test_calls_that_succeed_pay_for_later_retries() -> None:
    service = Service([])
    retries = service.retries()
    while retries.budget.take():
        pass
    for _ in range(5):
        retries.run(service.call, 60.0)
    failing = Service([busy(), busy()])
    with pytest.raises(ServerError):
        retries.run(failing.call, 60.0)
    assert len(failing.calls) == 2


@pytest.mark.parametrize(
    ("fault", "may_repeat", "is_repeated"),
    [
        (busy, if_refused, True),
        (broken, if_refused, False),
        (lost, if_refused, False),
        (busy, always, True),
        (broken, always, True),
        (lost, always, True),
    ],
)
def test_a_call_that_must_not_be_done_twice_is_repeated_only_where_nothing_was_done(
    fault: Callable[[], ObjectCacheError], may_repeat: Callable[[ObjectCacheError], bool], is_repeated: bool
) -> None:
    assert may_repeat(fault()) is is_repeated


def test_an_engine_waits_for_no_server_that_asks_it_to() -> None:
    """It can compute instead."""
    service = Service([busy(1)])
    retries = Retries.of_engines()
    with pytest.raises(ServerError):
        retries.run(service.call, 60.0)
    assert len(service.calls) == 1


def test_what_an_inner_call_has_given_up_is_not_tried_again_by_the_outer_one() -> None:
    service = Service([busy() for _ in range(100)])
    retries = service.retries()
    with pytest.raises(ServerError) as raised:
        retries.run(lambda left_s: retries.run(service.call, left_s), 60.0)
    assert len(service.calls) == raised.value.tries == ATTEMPTS_MAX


def test_a_repeat_that_is_refused_costs_nothing_of_the_budget() -> None:
    service = Service([broken() for _ in range(1_000)])
    retries = service.retries()
    for _ in range(500):
        with pytest.raises(ServerError):
            retries.run(service.call, 60.0, lambda error: False)
    assert retries.budget.take()


def test_there_is_at_least_one_try() -> None:
    with pytest.raises(ValueError, match="attempts_max"):
        Retries(0)


def test_pauses_are_bounded() -> None:
    assert pause_s(1, None, 0.0) == 0.0
    assert pause_s(1_000, None, 1.0) == PAUSE_S_MAX


@pytest.mark.parametrize("status", [500, 502, 503, 504])
def test_a_proxy_that_answers_without_a_document_may_answer_later(status: int) -> None:
    error = parse_error(status, b"<html>bad gateway</html", "7")
    assert always(error)
    assert error.retry_after_s == 7


@pytest.mark.parametrize("body", [b"", b"<html><Code>SlowDown</Code></html>", b"<Error/>", b"<Error><Code>Slow"])
@pytest.mark.parametrize("status", [301, 403, 404, 413, 501])
def test_other_answers_without_a_document_are_not_asked_for_again(status: int, body: bytes) -> None:
    assert not always(parse_error(status, body))


@pytest.mark.parametrize("status", [403, 503])
def test_nobody_knows_what_became_of_a_request_that_a_proxy_answers(status: int) -> None:
    """So memory that the request names may still be written."""
    assert isinstance(parse_error(status, b"<html/>"), UnansweredError)


@pytest.mark.parametrize("said", ["9" * 400, "-1", "Wed, 21 Oct 2026 07:28:00 GMT", "\u0663", "1e3", ""])
def test_what_is_no_number_of_seconds_is_passed_over(said: str) -> None:
    error = parse_error(503, b"<Error><Code>SlowDown</Code></Error>", said)
    assert error.code is ErrorCode.SLOW_DOWN
    assert error.retry_after_s in (None, 3)
