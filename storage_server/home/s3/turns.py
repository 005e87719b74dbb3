"""Which request goes upstream next: first groups before later ones, and among equals the earlier chunk. At most
`requests_max` are under way.

Later groups wait until no first group is waiting or under way, since the first layer of a prefix is complete only with
its last chunk's. They wait for HOLD_S at most: one slow answer must not stop all others. Some turns are left to other
buckets than the one that has most: its objects may all hang.
"""

from __future__ import annotations

import asyncio
import heapq
import time
from collections import Counter, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import chain, count
from typing import NamedTuple

from storage_server.home.s3.places import needing_no_place

HOLD_S = 0.2
OTHERS_FRACTION = 0.125
"""One bucket leaves this part of the turns to others."""
RESOLUTION_S = 0.001
"""Timers may come so much too early."""


class _Waiting(NamedTuple):
    """A request that waits, in the order in which requests are served."""

    group_index: int
    chunk_index: int
    number: int
    held_until_s: float
    turn: asyncio.Future[None]
    bucket: str


class Turns:
    """Turns of requests on one event loop."""

    def __init__(self, requests_max: int) -> None:
        self._requests_max = requests_max
        self._free = requests_max
        self._ended_at_s = float("-inf")
        self._order = count()
        self._waiting: list[_Waiting] = []
        self._each_max = requests_max - int(OTHERS_FRACTION * requests_max)
        self._running: Counter[str] = Counter()
        self._full: dict[str, list[_Waiting]] = {}
        """Requests of buckets that have as many turns as one may have."""
        self._by_age: deque[_Waiting] = deque()
        self._served_count = 0
        self._first_count = 0

    @property
    def waiting_count(self) -> int:
        """Requests that wait for their turn."""
        return sum(not waiting.turn.done() for waiting in chain(self._waiting, *self._full.values()))

    @property
    def busy_at_s(self) -> float:
        """When a turn was last held, by time.monotonic."""
        return self._ended_at_s if self._free == self._requests_max else time.monotonic()

    @asynccontextmanager
    async def turn(self, group_index: int, chunk_index: int, bucket: str = "") -> AsyncIterator[None]:
        """Wait for the turn of this group of this chunk of the bucket, and hold it until the block ends."""
        loop = asyncio.get_running_loop()
        turn: asyncio.Future[None] = loop.create_future()
        held_until_s = loop.time() + HOLD_S
        waiting = _Waiting(
            group_index=group_index,
            chunk_index=chunk_index,
            number=next(self._order),
            held_until_s=held_until_s,
            turn=turn,
            bucket=bucket,
        )
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
                    self._take_back(bucket)
                raise
            try:
                with needing_no_place():
                    yield
            finally:
                self._take_back(bucket)
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
            is_old = oldest is not None and self._served_count % 2 and _left_s(oldest) <= RESOLUTION_S
            if oldest is not None and is_old and self._may_have_more(oldest.bucket):
                self._give(oldest)  # every second turn goes by age where requests wait long: none waits for ever
                continue
            waiting = self._waiting[0]
            if waiting.turn.done():
                heapq.heappop(self._waiting)
                self._refill(waiting.bucket)
            elif not self._may_have_more(waiting.bucket):
                heapq.heappush(self._full.setdefault(waiting.bucket, []), heapq.heappop(self._waiting))
            elif waiting.group_index and self._first_count and _left_s(waiting) > RESOLUTION_S:
                return
            else:
                self._give(heapq.heappop(self._waiting))

    def _may_have_more(self, bucket: str) -> bool:
        return self._running[bucket] < self._each_max

    def _give(self, waiting: _Waiting) -> None:
        self._free -= 1
        self._running[waiting.bucket] += 1
        waiting.turn.set_result(None)

    def _take_back(self, bucket: str) -> None:
        """A turn of this bucket has ended: one more of its requests may have one."""
        self._free += 1
        self._running[bucket] -= 1
        if not self._running[bucket]:
            del self._running[bucket]
        self._refill(bucket)

    def _refill(self, bucket: str) -> None:
        """Have the next request of a bucket wait that had as many turns as it may have."""
        full = self._full.pop(bucket, [])
        while full and full[0].turn.done():
            heapq.heappop(full)
        if full:
            heapq.heappush(self._waiting, heapq.heappop(full))
        if full:
            self._full[bucket] = full


def _left_s(waiting: _Waiting) -> float:
    """How long it may still be held."""
    return waiting.held_until_s - waiting.turn.get_loop().time()
