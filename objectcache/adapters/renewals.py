"""Renewing a lease in a thread of its own, where a busy event loop cannot keep it waiting.

A lease is renewed four times while it lasts, so that three renewals in a row may fail. The log says when one came late.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from objectcache.adapters.breaker import back_off_s

RENEWALS = 4
"""How often a lease is renewed while it lasts."""
PAUSE_S_MIN, PAUSE_S_MAX = 0.1, 1.0
"""The pauses after one failed renewal and after many; of a long lease up to a sixteenth."""
_log = logging.getLogger(__name__)


class RenewalTimes:
    """When a lease is renewed next, and how late that was. Pure: times are arguments, in seconds of a steady clock."""

    def __init__(self, lease_s: float, first_s: float) -> None:
        """The first renewal is due at `first_s`."""
        self.interval_s = lease_s / RENEWALS
        self.failure_count = 0
        self._wanted_s = self._next_s = first_s

    def pause_s(self, now_s: float) -> float:
        """How long to wait for the next renewal."""
        return max(0.0, self._next_s - now_s)

    def succeeded(self, now_s: float) -> float:
        """Note a renewal; by how much it was late, with the failed ones before it."""
        late_s = now_s - self._wanted_s
        self.failure_count = 0
        self._wanted_s = self._next_s = now_s + self.interval_s
        return max(0.0, late_s)

    def failed(self, now_s: float) -> None:
        """Note a failure: the next try comes sooner."""
        self.failure_count += 1
        longest_s = max(PAUSE_S_MAX, self.interval_s / RENEWALS)
        self._next_s = now_s + min(self.interval_s, back_off_s(self.failure_count, PAUSE_S_MIN, longest_s))


class Renewals:
    """Calls `renew` four times a lease, from `start` to `stop`, always in one thread, and `end` last in that thread. An
    error of `renew` is a failed renewal. `what` names the lease in the log.
    """

    def __init__(
        self, what: str, lease_s: float, renew: Callable[[], None], end: Callable[[], None] = lambda: None
    ) -> None:
        self._what = what
        self._lease_s = lease_s
        self._renew = renew
        self._end = end
        self._times = RenewalTimes(lease_s, 0.0)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="objectcache-renewals", daemon=True)

    def start(self, first_in_s: float | None = None) -> None:
        """Begin. The first renewal comes after `first_in_s`; without one after a quarter of the lease."""
        first_in_s = self._lease_s / RENEWALS if first_in_s is None else first_in_s
        self._times = RenewalTimes(self._lease_s, time.monotonic() + first_in_s)
        self._thread.start()

    def stop(self) -> None:
        """Renew no more. Returns when the renewal under way has ended. Idempotent."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        try:
            while not self._stopping.wait(self._times.pause_s(time.monotonic())):
                self._renew_once(self._times)
        finally:
            self._end()

    def _renew_once(self, times: RenewalTimes) -> None:
        try:
            self._renew()
        except Exception as error:
            times.failed(time.monotonic())
            if times.failure_count == 1:
                _log.warning("%s could not be renewed: %r", self._what, error)
            return
        late_s = times.succeeded(time.monotonic())
        if late_s > times.interval_s / 2:
            _log.warning(
                "%s was renewed %.1f s late; it lasts %.1f s without a renewal", self._what, late_s, self._lease_s
            )
