"""Blocks of work on an event loop take turns, because many that begin in one pass of the loop would stop it."""

from __future__ import annotations

import asyncio
import heapq
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

TURN_S: Final = 0.005
WOKEN_MAX: Final = 64
"""So many waiting blocks are woken in one pass of the loop; those that find no time left wait again."""


@dataclass(slots=True)
class _Waiter:
    """A caller with blocks that wait: their number, and the round of the last one."""

    count: int = 0
    round: int = 0


class LoopShare:
    """All blocks together take no more than TURN_S of one pass of the loop, and one block more. A block must not await
    anything. Callers take turns, so that one with thousands of blocks does not stand in front of the others: each round
    has one block of each caller that waits. The blocks of one caller run in the order in which they were begun. Used on
    one event loop.
    """

    def __init__(self) -> None:
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        """A heap, by the rounds and the numbers of the blocks."""
        self._waiters: dict[str, _Waiter] = {}
        self._round = 0
        """The latest round of which a block has run."""
        self._begun_count = 0
        self._woken_count = 0
        """Blocks that were woken and have not looked yet whether the pass has time for them."""
        self._spent_s = 0.0
        self._is_called = False

    @asynccontextmanager
    async def turn(self, caller: str = "") -> AsyncIterator[None]:
        """Run the block when it is the caller's turn: at once where the pass has time left and nobody waits."""
        if self._spent_s >= TURN_S or self._waiting or self._woken_count:
            await self._turn_comes(caller)
        began_s = time.perf_counter()
        try:
            yield
        finally:
            self._spent_s += time.perf_counter() - began_s
            self._call()

    async def _turn_comes(self, caller: str) -> None:
        """Return in a pass that has time left. A block keeps its round and its number until it has run."""
        waiter = self._waiters.setdefault(caller, _Waiter())
        waiter.count += 1
        waiter.round = own_round = max(self._round, waiter.round) + 1
        number = self._begun_count
        self._begun_count += 1
        try:
            await self._wait(own_round, number)
            while self._spent_s >= TURN_S:
                await self._wait(own_round, number)
            self._round = max(self._round, own_round)
        finally:
            waiter.count -= 1
            if not waiter.count:
                del self._waiters[caller]

    async def _wait(self, own_round: int, number: int) -> None:
        turn = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (own_round, number, turn))
        self._call()
        try:
            await turn
        finally:
            self._woken_count -= turn.done() and not turn.cancelled()

    def _call(self) -> None:
        if not self._is_called:
            self._is_called = True
            asyncio.get_running_loop().call_soon(self._next_pass)

    def _next_pass(self) -> None:
        self._is_called = False
        self._spent_s = 0.0
        for _ in range(min(WOKEN_MAX, len(self._waiting))):
            *_, turn = heapq.heappop(self._waiting)
            if not turn.done():  # else whoever waited has gone
                self._woken_count += 1
                turn.set_result(None)
        if self._waiting:
            self._call()
