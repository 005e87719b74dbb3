"""Which failed calls are made again, and when: the same for every call of a client.

A call that may be repeated is repeated where the server answers 500 or 503, and where the connection breaks before the
answer is whole. The pause before the next try is random between nothing and a bound that doubles. Where the server says
how long to wait (`Retry-After`), that comes on top. A call gives up after `attempts_max` tries, when the next try would
begin past the caller's deadline, and when the client's budget is spent: a service that fails all the time is not asked
five times as often for it. These are the rules of the AWS SDKs' "standard" retry mode.
"""

from __future__ import annotations

import logging
import math
import random
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from descriptors.errors import ErrorCode, ObjectCacheError

ATTEMPTS_MAX = 5
"""Tries of one call, with the first."""
PAUSE_S_MIN, PAUSE_S_MAX = 0.1, 5.0
"""The bounds of the random pauses after the first try and after many."""
BUDGET_RETRIES = 100.0
"""Retries that a client may make before a call has succeeded."""
REFUND_RETRIES = 0.2
"""Each call that succeeds gives this back to the budget: one retry for five calls."""
TRANSIENT = frozenset({ErrorCode.INTERNAL_ERROR, ErrorCode.SLOW_DOWN})
"""500 and 503. A connection that broke is an InternalError, too (`UnansweredError`)."""
_T = TypeVar("_T")
_log = logging.getLogger(__name__)


def always(error: ObjectCacheError) -> bool:
    """Whether a call that changes nothing when it is repeated may be made again after this error."""
    return error.retryable and error.code in TRANSIENT and not error.tries


def if_refused(error: ObjectCacheError) -> bool:
    """Whether a call that must not be carried out twice may be made again: only where the server has done nothing."""
    return error.retryable and error.code is ErrorCode.SLOW_DOWN and not error.tries


def pause_s(attempt_count: int, retry_after_s: float | None, chance: float) -> float:
    """The pause after so many tries, 1 or more. `chance` is from [0, 1)."""
    random_s: float = min(PAUSE_S_MAX, PAUSE_S_MIN * 2.0 ** min(attempt_count - 1, 32)) * chance
    return (retry_after_s or 0.0) + random_s


class RetryBudget:
    """How many retries a client may still make. Safe from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._left = BUDGET_RETRIES

    def take(self) -> bool:
        """Take one retry; False where none is left."""
        with self._lock:
            if self._left < 1.0:
                return False
            self._left -= 1.0
            return True

    def refund(self, retries: float = REFUND_RETRIES) -> None:
        """Give some back: a call has succeeded, or what was taken is not needed."""
        with self._lock:
            self._left = min(BUDGET_RETRIES, self._left + retries)


class Retries:
    """Makes calls, and makes them again, for one client. Safe from any thread. A server that asks for a longer pause
    than `retry_after_s_max` is not waited for. The clock, the wait and the chance are arguments so that tests can play
    them.
    """

    def __init__(
        self,
        attempts_max: int = ATTEMPTS_MAX,
        now: Callable[[], float] = time.monotonic,
        wait: Callable[[float], None] = time.sleep,
        chance: Callable[[], float] = random.random,
        retry_after_s_max: float = math.inf,
    ) -> None:
        """Raises ValueError where there is not even one try."""
        if attempts_max < 1:
            raise ValueError(f"attempts_max must be 1 or more, not {attempts_max!r}")
        self.attempts_max = attempts_max
        self._retry_after_s_max = retry_after_s_max
        self.budget = RetryBudget()
        self._now = now
        self._wait = wait
        self._chance = chance

    @classmethod
    def of_engines(cls) -> Retries:
        """For calls that an engine's request waits for: the engine can compute instead, so it waits for no server to
        come back. The second try is for a connection that was closed.
        """
        return cls(attempts_max=2, retry_after_s_max=0.2)

    def copy(self) -> Retries:
        """The same rules, with a budget of their own."""
        return Retries(self.attempts_max, self._now, self._wait, self._chance, self._retry_after_s_max)

    def run(
        self,
        call: Callable[[float], _T],
        timeout_s: float,
        may_repeat: Callable[[ObjectCacheError], bool] = always,
        wait: Callable[[float], None] | None = None,
    ) -> _T:
        """The result of `call(left_s)`, which is told how much of `timeout_s` is left. After an error for which
        `may_repeat` is true, `call` is made again, after a pause in `wait`. Raises the last error, with a note that
        says how often the call was made.
        """
        began_s = self._now()
        attempt_count = 0
        while True:
            left_s = timeout_s - (self._now() - began_s)
            attempt_count += 1
            try:
                result = call(max(left_s, 0.001))
            except ObjectCacheError as error:
                pause = pause_s(attempt_count, error.retry_after_s, self._chance())
                took_s = self._now() - began_s
                is_last = attempt_count >= self.attempts_max or took_s + pause >= timeout_s
                is_last = is_last or (error.retry_after_s or 0) > self._retry_after_s_max
                if is_last or not self._may_repeat(error, may_repeat):
                    if attempt_count > 1:
                        error.tries = attempt_count
                        error.add_note(f"tried {attempt_count} times in {took_s:.1f} s")
                    raise
                _log.info("%s; try %d of %d in %.2f s", error, attempt_count + 1, self.attempts_max, pause)
                (wait or self._wait)(pause)
            else:
                self.budget.refund()
                return result

    def _may_repeat(self, error: ObjectCacheError, may_repeat: Callable[[ObjectCacheError], bool]) -> bool:
        """`may_repeat` comes last, because it may prepare the next try."""
        if not self.budget.take():
            return False
        if not may_repeat(error):
            self.budget.refund(1.0)
            return False
        return True
