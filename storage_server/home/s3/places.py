"""The places of requests at a service: no access key has all of them, and bodies leave some free."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from descriptors.errors import ErrorCode, ServerError
from objectcache.adapters.caller import CallerTurns

_FULL = "this access key has as many requests under way at the upstream store as it may have"


class RequestPlaces:
    """Up to `places_max` requests are under way, and of one access key half of them. A quarter is kept for requests
    that end soon: those with a caller's body, and reads of objects, take as long as the caller likes. At least
    `uploads_max` bodies of one caller are under way, since the server's own uploads are a caller's. A request waits for
    `wait_s` at most.
    """

    def __init__(self, places_max: int, uploads_max: int, wait_s: float) -> None:
        bodies_max = max(uploads_max, places_max - places_max // 4)
        self._all = CallerTurns(places_max, max(uploads_max, _half(places_max)))
        self._bodies = CallerTurns(bodies_max, max(uploads_max, _half(bodies_max)))
        self._wait_s = wait_s

    @asynccontextmanager
    async def place(self, *, has_body: bool) -> AsyncIterator[None]:
        """A place for a request of CALLER. Raises ServerError(SlowDown) where none is free in time."""
        async with AsyncExitStack() as stack:
            try:
                async with asyncio.timeout(self._wait_s):
                    if has_body:
                        await stack.enter_async_context(self._bodies.turn())
                    await stack.enter_async_context(self._all.turn())
            except TimeoutError:
                raise ServerError(ErrorCode.SLOW_DOWN, _FULL, retryable=True) from None
            yield


def _half(count: int) -> int:
    return (count + 1) // 2
