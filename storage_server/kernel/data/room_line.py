"""The line of those that wait for room: who comes next, who may pass, and how many of one access key may wait."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from dataclasses import dataclass

WAITING_MAX = 1024
WAITING_PART = 1 / 8
"""One access key has no more than this part of these places."""


@dataclass(frozen=True, slots=True, eq=False)
class RoomWaiter:
    """A write that waits for room, and the access key that it is for."""

    nbytes: int
    by: str
    coming: asyncio.Future[None]


class RoomLine:
    """Those that wait, in the order in which they came. While the first one waits for more than there is, later ones
    may pass it, with as many bytes in all as it waits for.
    """

    def __init__(self) -> None:
        self._waiting: deque[RoomWaiter] = deque()
        self._nbytes: Counter[str] = Counter()
        self._counts: Counter[str] = Counter()
        """How many wait, by access key."""
        self.passed_bytes = 0
        """The bytes of those that have passed the first one."""

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, waiter: RoomWaiter) -> bool:
        return waiter in self._waiting

    @property
    def nbytes(self) -> int:
        """The bytes that all wait for."""
        return self._nbytes.total()

    def has_place(self, by: str, nbytes: int, limit_bytes: int | None) -> bool:
        """Whether one more may wait: not where too many do, or too many of one access key, or for too much."""
        is_full = len(self._waiting) >= WAITING_MAX or self._counts[by] >= WAITING_PART * WAITING_MAX
        waits_for = self._nbytes[by]
        return not is_full and (limit_bytes is None or not waits_for or waits_for + nbytes <= limit_bytes)

    def join(self, waiter: RoomWaiter) -> None:
        """Stand at the end of the line."""
        self._waiting.append(waiter)
        self._nbytes[waiter.by] += waiter.nbytes
        self._counts[waiter.by] += 1

    def leave(self, waiter: RoomWaiter) -> None:
        """Leave the line, from wherever in it."""
        if self._waiting[0] is waiter:
            self.passed_bytes = 0
        self._waiting.remove(waiter)
        self._nbytes -= Counter({waiter.by: waiter.nbytes})
        self._counts -= Counter({waiter.by: 1})

    def take_all(self) -> list[RoomWaiter]:
        """All of them, in order; the line is empty then."""
        found = list(self._waiting)
        self._waiting.clear()
        self._nbytes.clear()
        self._counts.clear()
        self.passed_bytes = 0
        return found

    def take(self, free_bytes: float) -> list[RoomWaiter]:
        """Those that get room now: the first ones that fit, and later ones that may pass the first that does not."""
        found: list[RoomWaiter] = []
        while self._waiting and self._waiting[0].nbytes <= free_bytes:
            found.append(self._waiting[0])
            free_bytes -= found[-1].nbytes
            self.leave(found[-1])
        if free_bytes <= 0 or not self._waiting:
            return found
        first_bytes = self._waiting[0].nbytes
        for waiter in list(self._waiting)[1:]:
            if waiter.nbytes <= min(free_bytes, first_bytes - self.passed_bytes):
                free_bytes -= waiter.nbytes
                self.passed_bytes += waiter.nbytes
                found.append(waiter)
                self.leave(waiter)
        return found
