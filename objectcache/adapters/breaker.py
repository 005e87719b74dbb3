"""When a service that fails is asked again. Pure: time is an argument, in seconds of a steady clock.

closed ── `failures_max` failures in a row ──▶ open (nobody asks) ── pause_s_min, twice, four times … pause_s_max ──┐
   ▲                                                                                                               │
   └── it went well ◀── asked again: a failure opens the breaker once more, for twice as long ◀────────────────────┘
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial
from typing import Generic, TypeVar

_Name = TypeVar("_Name", bound=Hashable)


def back_off_s(failure_count: int, pause_s_min: float, pause_s_max: float) -> float:
    """The pause after so many failures in a row, 1 or more: `pause_s_min`, and twice as long for each further one."""
    return min(pause_s_max, pause_s_min * 2.0 ** min(failure_count - 1, 64))


class Breaker:
    """Counts failures of one service: answers that say it is busy or broken, and no answers."""

    def __init__(self, failures_max: int, pause_s_min: float, pause_s_max: float) -> None:
        self._failures_max = failures_max
        self._pause_s_min = pause_s_min
        self._pause_s_max = pause_s_max
        self._open_until_s = float("-inf")
        self._is_trying = False
        self.failure_count = 0
        """Failures since the last success. Those that come during a pause began before it, and do not count."""

    def is_open(self, now_s: float) -> bool:
        """Whether nothing is to be asked now, because the service failed a moment ago."""
        return now_s < self._open_until_s

    @property
    def is_trying(self) -> bool:
        """Whether a request has gone after a pause, to see how the service is, and has not ended."""
        return self._is_trying

    def wait_s(self, now_s: float) -> float:
        """How long a request must wait; 0 where it may go now, and then `succeeded`, `failed` or `gave_up` follows.
        After a pause one request goes at a time, until one has succeeded.
        """
        if self.is_open(now_s):
            return self._open_until_s - now_s
        if self.failure_count < self._failures_max:
            return 0.0
        if self._is_trying:
            return self._pause_s()
        self._is_trying = True
        return 0.0

    def succeeded(self) -> None:
        """Note an answer, be it a refusal."""
        self.failure_count = 0
        self._open_until_s = float("-inf")
        self._is_trying = False

    def failed(self, now_s: float) -> None:
        """Note a failure."""
        self._is_trying = False
        if self.is_open(now_s):
            return
        self.failure_count += 1
        if self.failure_count >= self._failures_max:
            self._open_until_s = now_s + self._pause_s()

    def gave_up(self) -> None:
        """Note that a request ended without telling anything of the service, because its caller left."""
        self._is_trying = False

    def _pause_s(self) -> float:
        return back_off_s(self.failure_count - self._failures_max + 1, self._pause_s_min, self._pause_s_max)


class Breakers(Generic[_Name]):
    """Breakers by name, each for a part of what fails: whoever meets no failure has none. The last `kept_max` that
    failed first are kept.
    """

    def __init__(self, failures_max: int, pause_s_min: float, pause_s_max: float, kept_max: int) -> None:
        self._make: Callable[[], Breaker] = partial(Breaker, failures_max, pause_s_min, pause_s_max)
        self._kept_max = kept_max
        self._failing: dict[_Name, Breaker] = {}

    def failing(self, name: _Name) -> Breaker | None:
        """The breaker of a part that has failed since its last success."""
        return self._failing.get(name)

    def is_open(self, name: _Name, now_s: float) -> bool:
        """As Breaker."""
        breaker = self._failing.get(name)
        return breaker is not None and breaker.is_open(now_s)

    def wait_s(self, name: _Name, now_s: float) -> float:
        """As Breaker."""
        breaker = self._failing.get(name)
        return 0.0 if breaker is None else breaker.wait_s(now_s)

    def succeeded(self, name: _Name) -> None:
        """As Breaker."""
        self._failing.pop(name, None)

    def failed(self, name: _Name, now_s: float) -> None:
        """As Breaker."""
        breaker = self._failing.get(name)
        if breaker is None:
            breaker = self._failing[name] = self._make()
            if len(self._failing) > self._kept_max:
                del self._failing[next(iter(self._failing))]
        breaker.failed(now_s)

    def gave_up(self, name: _Name) -> None:
        """As Breaker."""
        if (breaker := self._failing.get(name)) is not None:
            breaker.gave_up()
