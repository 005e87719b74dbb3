"""Requests whose bodies come slowly. Where every place for a connection is taken, they give theirs up, the slowest one
first: otherwise one client that sends a byte a minute on each connection keeps everybody else out. Pure: the caller
supplies the time.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

BODY_WINDOW_S = 10.0
"""A rate is measured over at least so long."""
LEAST_BODY_BYTES_PER_S = 1024
LOOK_PAUSE_S = 1.0
"""After a look that found less than wanted, nobody looks again for so long: a look costs microseconds a request."""
BATCH_FRACTION = 1 / 64
"""One look ends at most this fraction of all connections. As many more may be open while those still end."""
_T = TypeVar("_T", bound=Hashable)


class BodyWatch:
    """How fast the body of a connection's request comes. Only windows count in which the server waits for it."""

    __slots__ = ("_bytes", "_rate", "_since_s")

    def __init__(self) -> None:
        self.begun(0.0)

    def begun(self, now_s: float) -> None:
        """A request begins; no byte of its body counts yet."""
        self._since_s, self._bytes = now_s, 0
        self._rate: float | None = None

    def slow_rate(self, received_bytes: int, now_s: float, *, is_awaited: bool) -> float | None:
        """The bytes/s of the last whole window where they are below LEAST_BODY_BYTES_PER_S, else None.
        `received_bytes` came since the request began. A body is not awaited where the server is not ready for it.
        """
        new_bytes, elapsed_s = received_bytes - self._bytes, now_s - self._since_s
        if not is_awaited or new_bytes >= LEAST_BODY_BYTES_PER_S * max(elapsed_s, BODY_WINDOW_S):
            self._since_s, self._bytes, self._rate = now_s, received_bytes, None
        elif elapsed_s >= BODY_WINDOW_S:
            self._since_s, self._bytes, self._rate = now_s, received_bytes, new_bytes / elapsed_s
        return self._rate


class SlowBodies(Generic[_T]):
    """The connections whose requests' bodies come too slowly, and those among them that were told to end."""

    def __init__(self, connections_max: int) -> None:
        self._batch_count = max(1, int(BATCH_FRACTION * connections_max))
        self._rates: dict[_T, float] = {}
        self._ending: set[_T] = set()
        self._looked_s = -math.inf

    @property
    def count(self) -> int:
        """How many are slow and were not told to end."""
        return len(self._rates)

    @property
    def ending_count(self) -> int:
        """How many were told to end, and are still open."""
        return len(self._ending)

    def note(self, connection: _T, rate: float | None) -> None:
        """Remember at how many bytes/s a connection's body comes; None where it is not slow."""
        if rate is None or connection in self._ending:
            self._rates.pop(connection, None)
        else:
            self._rates[connection] = rate

    def closed(self, connection: _T) -> None:
        """Forget a connection."""
        self._rates.pop(connection, None)
        self._ending.discard(connection)

    def slowest(self, now_s: float, rate_of: Callable[[_T], float | None]) -> list[_T]:
        """The connections that must end now: those still slow by `rate_of`, at most a batch."""
        if now_s - self._looked_s < LOOK_PAUSE_S:
            return []
        found = heapq.nsmallest(self._batch_count, self._rates, key=self._rates.__getitem__)
        chosen = []
        for connection in found:
            del self._rates[connection]
            if rate_of(connection) is not None:
                chosen.append(connection)
        self._ending.update(chosen)
        if len(chosen) < self._batch_count:
            self._looked_s = now_s
        return chosen
