"""Which request goes upstream next: first groups before later ones, and among equals the earlier chunk. At most
`requests_max` are under way.

Later groups wait until no first group is waiting or under way, since the first layer of a prefix is complete only with
its last chunk's. They wait for HOLD_S at most: one slow answer must not stop all others. Some turns are left to other
buckets than the one that has most, whose objects may all hang, and to other callers, since one may ask in many buckets.
"""

from __future__ import annotations

import asyncio
import heapq
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from itertools import chain, count
from typing import NamedTuple

from objectcache.adapters.caller import CALLER
from storage_server.home.s3.places import needing_no_place

HOLD_S = 0.2
OTHERS_FRACTION = 0.125
"""One bucket leaves this part of the turns to others, and so does one caller."""
RESOLUTION_S = 0.001
"""Timers may come so much too early."""


class _Owner(NamedTuple):
    """A bucket or a caller, whose requests leave turns to others."""

    kind: str
    name: str


def _owners(bucket: str) -> tuple[_Owner, ...]:
    """Return the owners of a request for CALLER. The server itself is none, and may have all turns."""
    caller = CALLER.get()
    return (_Owner("bucket", bucket), *([_Owner("caller", caller)] if caller else []))


class _Waiting(NamedTuple):
    """A request that waits, in the order in which requests are served."""

    group_index: int
    chunk_index: int
    number: int
    held_until_s: float
    turn: asyncio.Future[None]
    owners: tuple[_Owner, ...]


class Turns:
    """Turns of requests on one event loop."""

    def __init__(self, requests_max: int) -> None:
        self._requests_max = requests_max
        self._free = requests_max
        self._ended_at_s = float("-inf")
        self._order = count()
        self._waiting: list[_Waiting] = []
        self._each_max = requests_max - int(OTHERS_FRACTION * requests_max)
        self._running: Counter[_Owner] = Counter()
        self._full: dict[_Owner, list[_Waiting]] = {}
        """Requests of owners that have as many turns as one may have. Each is in the list of one of its owners."""
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
        """Wait for the turn of this group of this chunk of the bucket, for CALLER, and hold it until the block ends."""
        loop, owners = asyncio.get_running_loop(), _owners(bucket)
        turn: asyncio.Future[None] = loop.create_future()
        held_until_s = loop.time() + HOLD_S
        waiting = _Waiting(
            group_index=group_index,
            chunk_index=chunk_index,
            number=next(self._order),
            held_until_s=held_until_s,
            turn=turn,
            owners=owners,
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
                    self._take_back(owners)
                raise
            try:
                with needing_no_place():
                    yield
            finally:
                self._take_back(owners)
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
            if oldest is not None and is_old and self._full_one(oldest.owners) is None:
                self._give(oldest)  # every second turn goes by age where requests wait long: none waits for ever
                continue
            waiting = self._waiting[0]
            full = None if waiting.turn.done() else self._full_one(waiting.owners)
            if waiting.turn.done() or full is not None:
                heapq.heappop(self._waiting)
                if full is not None:
                    heapq.heappush(self._full.setdefault(full, []), waiting)
                self._refill(owner for owner in waiting.owners if self._running[owner] < self._each_max)
            elif waiting.group_index and self._first_count and _left_s(waiting) > RESOLUTION_S:
                return
            else:
                self._give(heapq.heappop(self._waiting))

    def _full_one(self, owners: Iterable[_Owner]) -> _Owner | None:
        """The first of these that may have no more turns now."""
        return next((owner for owner in owners if self._running[owner] >= self._each_max), None)

    def _give(self, waiting: _Waiting) -> None:
        self._free -= 1
        self._running.update(waiting.owners)
        waiting.turn.set_result(None)

    def _take_back(self, owners: Sequence[_Owner]) -> None:
        """A turn of these has ended: one more of the requests of each may have one."""
        self._free += 1
        for owner in owners:
            self._running[owner] -= 1
            if not self._running[owner]:
                del self._running[owner]
        self._refill(owners)

    def _refill(self, owners: Iterable[_Owner]) -> None:
        """Have the next request wait of each owner that had as many turns as it may have."""
        for owner in owners:
            full = self._full.pop(owner, [])
            while full and full[0].turn.done():
                heapq.heappop(full)
            if full:
                heapq.heappush(self._waiting, heapq.heappop(full))
            if full:
                self._full[owner] = full


def _left_s(waiting: _Waiting) -> float:
    """How long it may still be held."""
    return waiting.held_until_s - waiting.turn.get_loop().time()
