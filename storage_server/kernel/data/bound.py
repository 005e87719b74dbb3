"""Room for bytes that are about to come."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress

from descriptors.errors import ErrorCode, ServerError
from descriptors.units import format_bytes
from objectcache.adapters.caller import CALLER
from storage_server.kernel.data.arriving_bodies import SLOW_S, ArrivingBodies
from storage_server.kernel.data.room_line import RoomLine, RoomWaiter

PATIENCE_S = 10.0
LACKING_S = 10.0
"""So long after a refusal somebody lacks room: writers come again, and slow reads are looked at meanwhile."""


@asynccontextmanager
async def reserved_in(bounds: Sequence[Bound], nbytes: int) -> AsyncIterator[None]:
    """Keep room for `nbytes` in all of these until the block ends. Raises what `Bound.reserved` raises."""
    async with AsyncExitStack() as stack:
        for bound in bounds:
            await stack.enter_async_context(bound.reserved(nbytes))
        yield


DELETE = "delete objects"
"""The remedy of a bound that names none."""


class Bound:
    """Room for bytes that are about to come, in the order in which it was asked for; while the first one waits for
    more, later ones may pass it, with as many bytes in all as it waits for. `limit_bytes` (None: no bound) and
    `used_bytes` say how much there is now; `remedy` tells a client what helps; `wants` is called when somebody waits.
    Used on one event loop, but for `notify`.
    """

    def __init__(
        self, what: str, limit_bytes: Callable[[], int | None], used_bytes: Callable[[], int], remedy: str = DELETE
    ) -> None:
        self._what = what
        self._remedy = remedy
        self._limit_bytes = limit_bytes
        self._used_bytes = used_bytes
        self._line = RoomLine()
        self._is_notified = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self.bodies = ArrivingBodies()
        self._refused_at_s = -math.inf
        self.wants: Callable[[], None] | None = None
        """Called when somebody waits. None where nobody can make room, so that nobody needs to wait."""
        self.reserved_bytes = 0
        """Bytes that were promised, and have not come yet."""
        self.arriving_count = 0
        """Objects that count as used, and have no row yet: they may leave when they have one."""

    @property
    def waiting_bytes(self) -> int:
        """Bytes that somebody waits for, and that there could be."""
        waiting_bytes, limit_bytes = self._line.nbytes, self._limit_bytes()
        return waiting_bytes if limit_bytes is None else min(waiting_bytes, limit_bytes)

    @property
    def lacking_bytes(self) -> int:
        """Bytes that must become free so that those who wait get room."""
        limit_bytes = self._limit_bytes()
        if limit_bytes is None or not self._line:
            return 0
        return self.waiting_bytes - min(
            self.waiting_bytes, max(0, limit_bytes - self._used_bytes() - self.reserved_bytes)
        )

    def lacks_room(self) -> bool:
        """Whether somebody waits for room, or was refused it within the last LACKING_S."""
        return bool(self._line) or asyncio.get_running_loop().time() - self._refused_at_s < LACKING_S

    @property
    def promised_bytes(self) -> int:
        """Bytes that somebody waits for, or that were promised and have not come."""
        return self.waiting_bytes + self.reserved_bytes

    @asynccontextmanager
    async def reserved(self, nbytes: int, patience_s: float = PATIENCE_S) -> AsyncIterator[None]:
        """Keep room for `nbytes` until the block ends; by then they are counted among what is used.

        Raises ServerError: InsufficientStorage where no room comes within `patience_s`, SlowDown where too many wait.
        """
        if self._line or not self._fits(nbytes):
            await self._wait(nbytes, patience_s)
        else:
            self.reserved_bytes += nbytes
        try:
            yield
        finally:
            self.reserved_bytes -= nbytes
            self._admit()

    @contextmanager
    def arriving(self) -> Iterator[None]:
        """An object counts as used, and gets its row before the block ends."""
        self.arriving_count += 1
        try:
            yield
        finally:
            self.arriving_count -= 1
            if self._line and self.wants is not None:
                self.wants()

    def has_room(self, nbytes: int) -> bool:
        """Whether there is room without waiting, for a caller that counts the bytes as used before it awaits."""
        return not self._line and self._fits(nbytes)

    def notify(self) -> None:
        """There may be more room. May be called from any thread."""
        if self._line and self._loop is not None and not self._is_notified:
            self._is_notified = True  # bytes are given back piece by piece, and one look at the queue is enough
            with suppress(RuntimeError):  # the loop is closed, so nobody waits any more
                self._loop.call_soon_threadsafe(self._notified)

    def _notified(self) -> None:
        self._is_notified = False
        self._admit()

    def refuse(self) -> None:
        """No more room can be made: those that wait and do not fit are told so, one after the other."""
        free_bytes = self._free_bytes()
        for waiter in self._line.take_all():
            if waiter.nbytes <= free_bytes:
                free_bytes -= waiter.nbytes
                self._give(waiter)
            else:
                waiter.coming.set_exception(self._refusal(waiter.nbytes))

    def _free_bytes(self) -> float:
        limit_bytes = self._limit_bytes()
        return math.inf if limit_bytes is None else limit_bytes - self._used_bytes() - self.reserved_bytes

    def _fits(self, nbytes: int) -> bool:
        return nbytes <= self._free_bytes()

    async def _wait(self, nbytes: int, patience_s: float) -> None:
        limit_bytes = self._limit_bytes()
        if limit_bytes is not None and nbytes > limit_bytes:
            raise self._refusal(nbytes)
        by = CALLER.get()
        if not self._line.has_place(by, nbytes, limit_bytes):
            raise ServerError(ErrorCode.SLOW_DOWN, f"too many wait for room in {self._what}", retryable=True)
        if self.wants is None and not self._end_slow(nbytes):
            raise self._refusal(nbytes)
        self._loop = asyncio.get_running_loop()
        coming: asyncio.Future[None] = self._loop.create_future()
        waiter = RoomWaiter(nbytes, by, coming)
        self._line.join(waiter)
        self._admit()  # room that came just before was told to nobody
        if self.wants is not None:
            self.wants()
        until_s = self._loop.time() + patience_s
        is_kept = False
        try:
            await asyncio.wait((coming,), timeout=min(SLOW_S, patience_s))
            if not coming.done() and patience_s > SLOW_S:
                self._end_slow(nbytes)
                await asyncio.wait((coming,), timeout=until_s - self._loop.time())
            is_kept = coming.done()
        finally:
            if not is_kept:
                if waiter in self._line:
                    self._line.leave(waiter)
                elif coming.exception() is None:
                    self.reserved_bytes -= nbytes
                self._admit()
        if not is_kept:
            raise self._refusal(nbytes)
        coming.result()

    def _end_slow(self, nbytes: int) -> bool:
        """Have bodies that come too slowly give room up for so many bytes, and in a cache those of other keys that have
        announced too much of it. Returns whether that is enough.
        """
        greedy = frozenset[str]()
        if self.wants is not None:
            greedy = self.bodies.greedy_keys(self._limit_bytes() or math.inf) - {CALLER.get()}
        return self.bodies.end_slow(nbytes - self._free_bytes(), asyncio.get_running_loop().time(), greedy)

    def _admit(self) -> None:
        """Give room to those that it is there for."""
        if self._line:
            for waiter in self._line.take(self._free_bytes()):
                self._give(waiter)

    def _give(self, waiter: RoomWaiter) -> None:
        self.reserved_bytes += waiter.nbytes
        waiter.coming.set_result(None)

    def _refusal(self, nbytes: int) -> ServerError:
        limit_bytes = self._limit_bytes()
        if limit_bytes is None or nbytes <= limit_bytes:
            self._refused_at_s = asyncio.get_running_loop().time()
        limit = "" if limit_bytes is None else f", which has {format_bytes(limit_bytes)}"
        is_too_large = limit_bytes is not None and nbytes > limit_bytes
        remedy = "it is smaller than the object; raise its bound" if is_too_large else self._remedy
        problem = f"no room for {nbytes} bytes in {self._what}{limit}: {remedy}"
        return ServerError(ErrorCode.INSUFFICIENT_STORAGE, problem, retryable=True)
