"""The caller of a request, and turns by callers: one caller's many requests do not stand in front of another's one."""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from contextvars import ContextVar
from ipaddress import IPv6Address, IPv6Network

CALLER: ContextVar[str] = ContextVar("the access key that this task works for", default="")
"""A write waits for room, and a query for its turn, for an access key. Upkeep has none: it is a caller of its own."""

HOST_PREFIX_BITS = 64
"""Any host of IPv6 has the addresses of its network, 2^64 of them, to itself (RFC 4291, section 2.5.1)."""


def work_for(access_key: str) -> None:
    """This task works for the access key. The server's own key, which is empty, changes nothing: what one part of a
    server asks of another one it asks for its caller.
    """
    if access_key:
        CALLER.set(access_key)


def caller_of(address: str) -> str:
    """The name of the caller at an address: IPv6 addresses count by their networks, since a host has all of one."""
    if ":" not in address:
        return address
    try:
        parsed = IPv6Address(address)
    except ValueError:
        return address
    return str(parsed.ipv4_mapped or IPv6Network((int(parsed), HOST_PREFIX_BITS), strict=False))


class CallerTurns:
    """Up to `running_max` hold a turn at once, and of one caller up to `each_max`. The callers that wait get theirs one
    after the other, each in its own order. Used on one event loop.
    """

    def __init__(self, running_max: int, each_max: int | None = None) -> None:
        self._free = running_max
        self._each_max = running_max if each_max is None else each_max
        self._running: Counter[str] = Counter()
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()
        """By callers: the first one is next."""

    @asynccontextmanager
    async def turn(self, caller: str | None = None) -> AsyncIterator[None]:
        """Wait for a turn for the caller, by default CALLER, and hold it until the block ends."""
        caller = CALLER.get() if caller is None else caller
        if self._free and self._running[caller] < self._each_max:
            self._begin(caller)
        else:
            await self._wait(caller)
        try:
            yield
        finally:
            self._end(caller)

    async def _wait(self, caller: str) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(caller, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._end(caller)
            raise

    def _begin(self, caller: str) -> None:
        self._free -= 1
        self._running[caller] += 1

    def _end(self, caller: str) -> None:
        self._free += 1
        self._running[caller] -= 1
        if not self._running[caller]:
            del self._running[caller]
        able = (each for each in self._waiting if self._running[each] < self._each_max)
        while (following := next(able, None)) is not None and self._free:
            turns = self._waiting.pop(following)
            turn = turns.popleft()
            if turns:
                self._waiting[following] = turns
            if not turn.done():
                self._begin(following)
                turn.set_result(None)
            able = (each for each in self._waiting if self._running[each] < self._each_max)
