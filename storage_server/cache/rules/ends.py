"""When holds end, and when objects are too old. Pure; the caller supplies the time."""

from __future__ import annotations

import math
from collections.abc import Iterator
from heapq import heapify, heappop, heappush

from storage_server.cache.rules.entry import Name

ENDS_SPARE = 1000


class HoldEnds:
    """The earliest end of each object's pin and lease. Leases that are renewed must not fill the memory, so one end
    counts for each object, and others are dropped now and then.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, Name]] = []
        self._next: dict[Name, float] = {}

    def note(self, name: Name, end: float) -> None:
        """An object is to be looked at then, unless it is to be earlier."""
        if end >= self._next.get(name, math.inf):
            return
        self._next[name] = end
        heappush(self._heap, (end, name))
        if len(self._heap) > 2 * len(self._next) + ENDS_SPARE:
            self._heap = [(end, name) for name, end in self._next.items()]
            heapify(self._heap)

    def due(self, now: float) -> Iterator[Name]:
        """The objects whose time has come, which are forgotten here one by one."""
        while self._heap and self._heap[0][0] <= now:
            end, name = heappop(self._heap)
            if self._next.get(name) == end:
                del self._next[name]
                yield name

    def forget(self, name: Name) -> None:
        """An object is not in the cache any more."""
        self._next.pop(name, None)


class Births:
    """When objects were stored. `ttl_s` is how old they become; None: as old as they like, and nothing is kept."""

    def __init__(self, ttl_s: float | None) -> None:
        self._ttl_s = ttl_s
        self._births: dict[Name, float] = {}
        self._heap: list[tuple[float, Name]] = []
        """Those births, and some of objects that have left, or have others by now."""

    def note(self, name: Name, born: float) -> None:
        """An object has come, or has come back, in any order of births."""
        if self._ttl_s is None:
            return
        self._births[name] = born
        heappush(self._heap, (born, name))
        if len(self._heap) > 2 * len(self._births) + ENDS_SPARE:
            self._heap = [(born, name) for name, born in self._births.items()]
            heapify(self._heap)

    def due(self, now: float) -> Iterator[Name]:
        """The objects that are too old, which are forgotten here one by one."""
        while self._ttl_s is not None and self._heap and self._heap[0][0] + self._ttl_s <= now:
            born, name = heappop(self._heap)
            if self._births.get(name) == born:
                del self._births[name]
                yield name

    def forget(self, name: Name) -> None:
        """An object is not in the cache any more."""
        self._births.pop(name, None)
