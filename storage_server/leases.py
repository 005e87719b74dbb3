"""Leases: prefixes a lookup asked to keep. Pure; the caller supplies the time. Eviction must pass leased keys over."""

from __future__ import annotations

import heapq
from collections.abc import Iterable

LEASED_KEYS_MAX = 1_000_000


class LeaseTable:
    """When each (bucket, key) lease ends. Bounded: beyond the limit the leases that end first are dropped."""

    def __init__(self, keys_max: int = LEASED_KEYS_MAX) -> None:
        self._keys_max = keys_max
        self._ends: dict[tuple[str, str], float] = {}
        self._by_end: list[tuple[float, tuple[str, str]]] = []

    def grant(self, bucket: str, keys: Iterable[str], now_s: float, lease_s: float) -> None:
        """Lease keys until now + lease_s; a later end already granted stands."""
        ends_at = now_s + lease_s
        for key in keys:
            name = (bucket, key)
            if self._ends.get(name, 0.0) < ends_at:
                self._ends[name] = ends_at
                heapq.heappush(self._by_end, (ends_at, name))
        self._drop(now_s)

    def is_leased(self, bucket: str, key: str, now_s: float) -> bool:
        """Whether a lease on the key is running."""
        return self._ends.get((bucket, key), 0.0) > now_s

    def _drop(self, now_s: float) -> None:
        while self._by_end and (self._by_end[0][0] <= now_s or len(self._by_end) > self._keys_max):
            ends_at, name = heapq.heappop(self._by_end)
            if self._ends.get(name) == ends_at:
                del self._ends[name]
