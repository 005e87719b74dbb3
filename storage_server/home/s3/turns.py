"""Which request goes upstream next: first groups before later ones, and among equals the earlier chunk. At most
`requests_max` are under way.

Later groups wait until no first group is waiting or under way, since the first layer of a prefix is complete only with
its last chunk's. They wait for HOLD_S at most: one slow answer must not stop all others.
"""

from __future__ import annotations

import asyncio
import heapq
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from typing import NamedTuple

HOLD_S = 0.2
RESOLUTION_S = 0.001
"""Timers may come so much too early."""


class _Waiting(NamedTuple):
    """A request that waits, in the order in which requests are served."""

    group_index: int
    chunk_index: int
    number: int
    held_until_s: float
    turn: asyncio.Future[None]


class Turns:
    """Turns of requests on one event loop."""

    def __init__(self, requests_max: int) -> None:
        self._requests_max = requests_max
        self._free = requests_max
        self._ended_at_s = float("-inf")
        self._order = count()
        self._waiting: list[_Waiting] = []
        self._by_age: deque[_Waiting] = deque()
        self._served_count = 0
        self._first_count = 0

    @property
    def waiting_count(self) -> int:
        """Requests that wait for their turn."""
        return sum(not waiting.turn.done() for waiting in self._waiting)

    @property
    def busy_at_s(self) -> float:
        """When a turn was last held, by time.monotonic."""
        return self._ended_at_s if self._free == self._requests_max else time.monotonic()

    @asynccontextmanager
    async def turn(self, group_index: int, chunk_index: int) -> AsyncIterator[None]:
        """Wait for the turn of this group of this chunk, and hold it until the block ends."""
        loop = asyncio.get_running_loop()
        turn: asyncio.Future[None] = loop.create_future()
        held_until_s = loop.time() + HOLD_S
        waiting = _Waiting(group_index, chunk_index, next(self._order), held_until_s, turn)
        heapq.heappush(self._waiting, waiting)
        self._by_age.append(waiting)
        is_first = group_index == 0
        timer = None if is_first else loop.call_at(held_until_s, self._serve)
        self._first_count += is_first
        self._serve()
        try:
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():
                    self._free += 1
                raise
            try:
                yield
            finally:
                self._free += 1
                self._ended_at_s = time.monotonic()
        finally:
            if timer is not None:
                timer.cancel()
            self._first_count -= is_first
            self._serve()

    def _serve(self) -> None:
        while self._free and self._waiting:
            while self._by_age and self._by_age[0].turn.done():
                self._by_age.popleft()
            oldest = self._by_age[0] if self._by_age else None
            self._served_count += 1
            if oldest is not None and self._served_count % 2 and _left_s(oldest) <= RESOLUTION_S:
                self._free -= 1  # every second turn goes by age where requests wait long: none waits for ever
                oldest.turn.set_result(None)
                continue
            waiting = self._waiting[0]
            if (
                waiting.group_index
                and self._first_count
                and _left_s(waiting) > RESOLUTION_S
                and not waiting.turn.done()
            ):
                return
            heapq.heappop(self._waiting)
            if not waiting.turn.done():
                self._free -= 1
                waiting.turn.set_result(None)


def _left_s(waiting: _Waiting) -> float:
    """How long it may still be held."""
    return waiting.held_until_s - waiting.turn.get_loop().time()
