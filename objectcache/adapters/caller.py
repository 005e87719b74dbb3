"""The caller of a request, and turns by callers: one caller's many requests do not stand in front of another's one."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from contextvars import ContextVar

CALLER: ContextVar[str] = ContextVar("the access key that this task works for", default="")
"""A write waits for room, and a query for its turn, for an access key. Upkeep has none: it is a caller of its own."""


class CallerTurns:
    """Up to `running_max` hold a turn at once. The callers that wait get theirs one after the other, each in its own
    order. Used on one event loop.
    """

    def __init__(self, running_max: int) -> None:
        self._free = running_max
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()
        """By callers: the first one is next."""

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Wait for a turn for CALLER, and hold it until the block ends."""
        if self._free:
            self._free -= 1
        else:
            await self._wait(CALLER.get())
        try:
            yield
        finally:
            self._give_back()

    async def _wait(self, caller: str) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(caller, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._give_back()
            raise

    def _give_back(self) -> None:
        while self._waiting:
            caller, turns = self._waiting.popitem(last=False)
            turn = turns.popleft()
            if turns:
                self._waiting[caller] = turns
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1
