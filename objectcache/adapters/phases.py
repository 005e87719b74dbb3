"""Phases of a request's time: one phase follows another, and the running code says where each one begins."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from descriptors.storage_api import DeliveryTiming
from descriptors.tracing import Phase


class Phases:
    """The time since its creation, divided into phases. `now` returns seconds of a monotonic clock."""

    __slots__ = ("_at_s", "_now", "_phase", "_spent_s")

    def __init__(self, first: Phase, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._phase = first
        self._spent_s: dict[Phase, float] = {}
        self._at_s = now()

    def enter(self, phase: Phase) -> None:
        """End the current phase and begin this one."""
        now_s = self._now()
        self._spent_s[self._phase] = self._spent_s.get(self._phase, 0.0) + now_s - self._at_s
        self._at_s, self._phase = now_s, phase

    @contextmanager
    def during(self, phase: Phase) -> Iterator[None]:
        """Make the block this phase. The phase around it goes on afterwards, unless another phase has begun meanwhile:
        a body may still be waited for when its request has been refused.
        """
        around = self._phase
        self.enter(phase)
        try:
            yield
        finally:
            if self._phase is phase:
                self.enter(around)

    def move(self, seconds: float, source: Phase, target: Phase) -> None:
        """Move seconds that were counted as `source` to `target`, after a more exact measurement."""
        self._spent_s[source] = self._spent_s.get(source, 0.0) - seconds
        self._spent_s[target] = self._spent_s.get(target, 0.0) + seconds

    def seconds(self, phase: Phase) -> float:
        """The seconds of a phase until now; never below 0, though the clocks of two measurements may
        differ a little.
        """
        running_s = self._now() - self._at_s if phase is self._phase else 0.0
        return max(0.0, self._spent_s.get(phase, 0.0) + running_s)

    @property
    def total_s(self) -> float:
        """The seconds of all phases until now."""
        return sum(self._spent_s.values()) + self._now() - self._at_s


def delivery_timing(phases: Phases) -> DeliveryTiming:
    """The phases of a delivery, for its outcome."""
    return DeliveryTiming(
        plan_s=phases.seconds(Phase.PLAN),
        gather_s=phases.seconds(Phase.GATHER),
        transfer_s=phases.seconds(Phase.TRANSFER),
        wait_s=phases.seconds(Phase.WAIT),
    )
