"""Which request goes upstream next: first groups before later ones, and among equals the earlier chunk. At most
`requests_max` are under way.

Later groups wait until no first group is waiting or under way, since the first layer of a prefix is complete only with
its last chunk's. They wait for HOLD_S at most: one slow answer must not stop all others. Some turns are left to other
buckets and callers than those that have most: all objects of the bucket may hang, and the caller may have many buckets.
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

from objectcache.adapters.caller import CALLER
from storage_server.home.s3.places import needing_no_place

HOLD_S = 0.2
OTHERS_FRACTION = 0.125
"""One bucket leaves this part of the turns to others, and one caller does."""
RESOLUTION_S = 0.001
"""Timers may come so much too early."""

_User = tuple[str, str]
"""A bucket or a caller: which of the two, and its name."""
_Users = tuple[_User, _User]
"""The bucket and the caller of a request."""


class _Waiting(NamedTuple):
    """A request that waits, in the order in which requests are served."""

    group_index: int
    chunk_index: int
    number: int
    held_until_s: float
    turn: asyncio.Future[None]
    users: _Users


class Turns:
    """Turns of requests on one event loop."""

    def __init__(self, requests_max: int) -> None:
        self._requests_max = requests_max
        self._free = requests_max
        self._ended_at_s = float("-inf")
        self._order = count()
        self._waiting: list[_Waiting] = []
        self._each_max = requests_max - int(OTHERS_FRACTION * requests_max)
        self._running: Counter[_User] = Counter()
        self._full: dict[_Users, list[_Waiting]] = {}
        """Requests of a bucket or a caller that had as many turns as one may have."""
        self._full_of: dict[_User, dict[_Users, None]] = {}
        """The keys of these by each bucket and each caller: the first one is next."""
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
        loop = asyncio.get_running_loop()
        turn: asyncio.Future[None] = loop.create_future()
        held_until_s = loop.time() + HOLD_S
        waiting = _Waiting(
            group_index=group_index,
            chunk_index=chunk_index,
            number=next(self._order),
            held_until_s=held_until_s,
            turn=turn,
            users=(users := (("bucket", bucket), ("caller", CALLER.get()))),
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
                    self._take_back(users)
                raise
            try:
                with needing_no_place():
                    yield
            finally:
                self._take_back(users)
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
            if oldest is not None and is_old and self._may_have_more(oldest.users):
                self._give(oldest)  # every second turn goes by age where requests wait long: none waits for ever
                continue
            waiting = self._waiting[0]
            if waiting.turn.done():
                heapq.heappop(self._waiting)
                self._refill(waiting.users)
            elif not self._may_have_more(waiting.users):
                self._set_aside(heapq.heappop(self._waiting))
                self._refill(waiting.users)  # it may have come in place of one that can have the turn
            elif waiting.group_index and self._first_count and _left_s(waiting) > RESOLUTION_S:
                return
            else:
                self._give(heapq.heappop(self._waiting))

    def _may_have_more(self, users: _Users) -> bool:
        return all(self._running[user] < self._each_max for user in users)

    def _set_aside(self, waiting: _Waiting) -> None:
        heapq.heappush(self._full.setdefault(waiting.users, []), waiting)
        for user in waiting.users:
            self._full_of.setdefault(user, {})[waiting.users] = None

    def _give(self, waiting: _Waiting) -> None:
        self._free -= 1
        self._running.update(waiting.users)
        waiting.turn.set_result(None)

    def _take_back(self, users: _Users) -> None:
        """A turn of this bucket and caller has ended: one more of their requests may have one."""
        self._free += 1
        for user in users:
            self._running[user] -= 1
            if not self._running[user]:
                del self._running[user]
        self._refill(users)

    def _refill(self, users: _Users) -> None:
        """Have one request of the bucket wait, and one of the caller, that was set aside and may have a turn now."""
        for user in users:
            if self._running[user] < self._each_max:
                while (able := next(filter(self._may_have_more, self._full_of.get(user, ())), None)) is not None:
                    if self._refill_from(able):
                        break

    def _refill_from(self, users: _Users) -> bool:
        """Whether there is a request that nobody has given up."""
        full = self._full.pop(users)
        while full and full[0].turn.done():
            heapq.heappop(full)
        is_one = bool(full)
        if is_one:
            heapq.heappush(self._waiting, heapq.heappop(full))
        for user in users:
            del self._full_of[user][users]
            if full:
                self._full_of[user][users] = None  # behind the others
            elif not self._full_of[user]:
                del self._full_of[user]
        if full:
            self._full[users] = full
        return is_one


def _left_s(waiting: _Waiting) -> float:
    """How long it may still be held."""
    return waiting.held_until_s - waiting.turn.get_loop().time()
