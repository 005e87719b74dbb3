"""The places of requests at a service: no access key has all of them, and bodies leave some free. Requests in a turn of
fetches (turns.py) need none. All callers share the turns, so nobody may wait there for an end of the caller's own
requests: those may be slow for as long as the caller likes.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from contextvars import ContextVar

from descriptors.errors import ErrorCode, ServerError
from objectcache.adapters.caller import CallerTurns

REQUESTS_IN_TURN = 2
"""In a turn so many requests are under way at once: a range of an object, and a question for the object's tags."""
_HAS_TURN: ContextVar[bool] = ContextVar("whether this task has a turn of fetches", default=False)
_FULL = "this access key has as many requests under way at the upstream store as it may have"


@contextmanager
def needing_no_place() -> Iterator[None]:
    """This task has a turn of fetches until the block ends."""
    _HAS_TURN.set(True)
    try:
        yield
    finally:
        _HAS_TURN.set(False)


class RequestPlaces:
    """Up to `places_max` requests are under way beside those in turns of fetches, and of one access key half of them. A
    quarter is kept for requests that end soon: those with a caller's body, and reads of objects, take as long as the
    caller likes. At least `uploads_max` bodies of one caller are under way, since the server's own uploads are a
    caller's. A request waits for `wait_s` at most.
    """

    def __init__(self, places_max: int, uploads_max: int, wait_s: float) -> None:
        bodies_max = max(uploads_max, places_max - places_max // 4)
        self._all = CallerTurns(places_max, max(uploads_max, _half(places_max)))
        self._bodies = CallerTurns(bodies_max, max(uploads_max, _half(bodies_max)))
        self._wait_s = wait_s

    @asynccontextmanager
    async def place(self, *, has_body: bool) -> AsyncIterator[None]:
        """A place for a request of CALLER, if it needs one. Raises ServerError(SlowDown) where none is free in time."""
        if _HAS_TURN.get():
            yield
            return
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
