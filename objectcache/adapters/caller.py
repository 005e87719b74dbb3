"""The caller of a request, and turns by callers: one caller's many requests do not stand in front of another's one."""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator, Collection, Hashable, Iterator
from contextlib import asynccontextmanager
from contextvars import ContextVar
from ipaddress import IPv6Address, IPv6Network
from typing import Generic, TypeVar

_T = TypeVar("_T", bound=Hashable)

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


class ByCaller(Generic[_T]):
    """The things that callers have, of each caller the oldest first. The caller that has most is known without a look
    at all of them: there may be as many callers as things.
    """

    def __init__(self) -> None:
        self._own: dict[object, OrderedDict[_T, None]] = {}
        self._callers: dict[int, OrderedDict[object, None]] = {}
        """The callers by the number of their things."""
        self._most = self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[_T]:
        """All things, caller by caller."""
        return (each for own in self._own.values() for each in own)

    def count(self, caller: object) -> int:
        """How many things the caller has."""
        return len(self._own.get(caller, ()))

    def most(self) -> Collection[_T]:
        """The things of a caller that has most, the oldest first; none where nobody has any."""
        return self._own[next(iter(self._callers[self._most]))] if self._most else ()

    def add(self, caller: object, thing: _T) -> None:
        """The caller has one more. One that it has already becomes its newest."""
        own = self._own.setdefault(caller, OrderedDict())
        before = len(own)
        own[thing] = None
        own.move_to_end(thing)
        self._has_now(caller, before, len(own))

    def remove(self, caller: object, thing: _T) -> None:
        """The caller has it no more; nothing happens where that is so already."""
        own = self._own.get(caller)
        if own is None or thing not in own:
            return
        del own[thing]
        if not own:
            del self._own[caller]
        self._has_now(caller, len(own) + 1, len(own))

    def _has_now(self, caller: object, before: int, count: int) -> None:
        if count == before:
            return
        self._count += count - before
        if before:
            del self._callers[before][caller]
            if not self._callers[before]:
                del self._callers[before]
        if count:
            self._callers.setdefault(count, OrderedDict())[caller] = None
        self._most = max(count, self._most if self._most in self._callers else before - 1)


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
