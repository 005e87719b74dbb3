"""Blocks of work on an event loop take turns, because many that begin in one pass of the loop would stop it."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

TURN_S: Final = 0.005
WOKEN_MAX: Final = 64
"""So many waiting blocks are woken in one pass of the loop; those that find no time left wait again."""


class LoopShare:
    """All blocks together take no more than TURN_S of one pass of the loop, and one block more. A block must not await
    anything. Used on one event loop.
    """

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._spent_s = 0.0
        self._is_called = False

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Run the block when it is its turn: at once where the pass has time left and nobody waits."""
        is_woken = False
        while self._spent_s >= TURN_S or (self._waiting and not is_woken):
            await self._wait(is_first=is_woken)
            is_woken = True
        began_s = time.perf_counter()
        try:
            yield
        finally:
            self._spent_s += time.perf_counter() - began_s
            self._call()

    async def _wait(self, *, is_first: bool) -> None:
        turn = asyncio.get_running_loop().create_future()
        if is_first:
            self._waiting.appendleft(turn)
        else:
            self._waiting.append(turn)
        self._call()
        await turn

    def _call(self) -> None:
        if not self._is_called:
            self._is_called = True
            asyncio.get_running_loop().call_soon(self._next_pass)

    def _next_pass(self) -> None:
        self._is_called = False
        self._spent_s = 0.0
        for _ in range(min(WOKEN_MAX, len(self._waiting))):
            turn = self._waiting.popleft()
            if not turn.done():  # else whoever waited has gone
                turn.set_result(None)
        if self._waiting:
            self._call()
