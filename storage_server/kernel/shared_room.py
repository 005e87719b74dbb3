"""SharedRoom: something that all requests share, such as memory. One caller never has more than its share of it, and
callers that wait for it come in turn.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from descriptors.errors import ErrorCode, ServerError
from objectcache.adapters.caller import CALLER

PATIENCE_S = 10.0
WAITING_MAX = 64
"""So many requests of one caller wait; more are refused at once."""


@dataclass(slots=True, eq=False)
class _Wish:
    caller: str
    amount: int
    granted: asyncio.Future[None]


class SharedRoom:
    """`total` of something, of which one caller may have `share`. `problem` says in an error what there is too much of.
    Used on one event loop.
    """

    def __init__(self, total: int, share: int, problem: str) -> None:
        self.share = share
        self._free = total
        self._held: Counter[str] = Counter()
        self._waiting: OrderedDict[str, deque[_Wish]] = OrderedDict()
        """By callers: the first one is next."""
        self._problem = problem

    @asynccontextmanager
    async def holding(self, caller: str | None = None) -> AsyncIterator[Held]:
        """A part of it for the caller, by default CALLER, empty at first, until the block ends."""
        held = Held(self, CALLER.get() if caller is None else caller)
        try:
            yield held
        finally:
            if held.amount:
                self._give_back(held.caller, held.amount)

    async def take(self, caller: str, amount: int) -> None:
        """Wait until so much is free, for the caller too. Raises ServerError(SlowDown) after PATIENCE_S, or where
        WAITING_MAX of the caller's requests wait.
        """
        waiting = self._waiting.setdefault(caller, deque())
        if len(waiting) >= WAITING_MAX:
            raise ServerError(ErrorCode.SLOW_DOWN, self._problem, retryable=True)
        wish = _Wish(caller, amount, asyncio.get_running_loop().create_future())
        waiting.append(wish)
        self._serve()
        if wish.granted.done():
            return
        try:
            async with asyncio.timeout(PATIENCE_S):
                await wish.granted
        except TimeoutError:
            self._withdraw(wish)
            raise ServerError(ErrorCode.SLOW_DOWN, self._problem, retryable=True) from None
        except asyncio.CancelledError:
            self._withdraw(wish)
            raise

    def _withdraw(self, wish: _Wish) -> None:
        if wish.granted.done() and not wish.granted.cancelled():
            self._give_back(wish.caller, wish.amount)
            return
        waiting = self._waiting.get(wish.caller)
        if waiting is not None and wish in waiting:
            self._drop(wish)
            self._serve()

    def _drop(self, wish: _Wish) -> None:
        waiting = self._waiting[wish.caller]
        waiting.remove(wish)
        if not waiting:
            del self._waiting[wish.caller]

    def _give_back(self, caller: str, amount: int) -> None:
        self._free += amount
        self._held[caller] -= amount
        if not self._held[caller]:
            del self._held[caller]
        self._serve()

    def _serve(self) -> None:
        """Grant what fits, to one caller after the other. A caller that lacks only the room of others is waited for, so
        that small wishes never keep a large one waiting for ever; one that has its own share in use is passed over.
        """
        is_granted = True
        while is_granted:
            is_granted = False
            for caller in list(self._waiting):
                wish = self._waiting[caller][0]
                if wish.granted.cancelled():
                    self._drop(wish)
                    is_granted = True
                    continue
                if self._held[caller] + wish.amount > self.share:
                    continue
                if wish.amount > self._free:
                    return
                self._drop(wish)
                if caller in self._waiting:
                    self._waiting.move_to_end(caller)
                self._free -= wish.amount
                self._held[caller] += wish.amount
                wish.granted.set_result(None)
                is_granted = True


@dataclass(slots=True)
class Held:
    """The part of a room that one request has."""

    room: SharedRoom
    caller: str
    amount: int = 0

    async def at_least(self, amount: int) -> None:
        """Wait until the request has so much. More than a share counts as the share, so that it can be had at all.
        Raises ServerError(SlowDown) where it does not become free.
        """
        more = min(amount, self.room.share) - self.amount
        if more > 0:
            await self.room.take(self.caller, more)
            self.amount += more
