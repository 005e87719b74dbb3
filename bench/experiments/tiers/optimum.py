"""The best that knowledge of the future allows: Belady's rule, with the right not to admit a chunk."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush

from storage_server.eviction.policy import Key, PrefixPolicy, Request, Resident

NEVER = 1 << 60


class Optimum(PrefixPolicy):
    """The chunk whose next use is furthest away leaves first. `requests` are all that will come, in order. For chunks
    of one size no policy has more hits; with sizes that differ it is a good bound, not an exact one.
    """

    def __init__(self, capacity_bytes: int, requests: Sequence[Request]) -> None:
        super().__init__(capacity_bytes)
        self._next_uses = _next_uses(requests)
        self._number = -1
        self._order: list[tuple[int, int, Key]] = []
        self._current: dict[Key, tuple[int, int]] = {}

    def _note(self, request: Request) -> None:
        self._number += 1

    def _admit(self, resident: Resident, position: int) -> None:
        self._use(resident, position)

    def _use(self, resident: Resident, position: int) -> None:
        self._current[resident.key] = -self._next_uses[self._number][position], -position
        self._return(resident)

    def _next(self) -> Resident:
        while True:
            next_use, depth, key = heappop(self._order)
            if self._current.get(key) == (next_use, depth):
                return self._residents[key]

    def _take(self, resident: Resident) -> None:
        """Nothing: `_next` passes over chunks that have left."""

    def _return(self, resident: Resident) -> None:
        heappush(self._order, (*self._current[resident.key], resident.key))

    def _left(self, resident: Resident) -> None:
        del self._current[resident.key]


def _next_uses(requests: Sequence[Request]) -> list[list[int]]:
    """For each chunk of each request the number of the next request that names the chunk."""
    upcoming: dict[Key, int] = {}
    found = []
    for number in range(len(requests) - 1, -1, -1):
        keys = requests[number].keys
        found.append([upcoming.get(key, NEVER) for key in keys])
        upcoming.update(dict.fromkeys(keys, number))
    return found[::-1]
