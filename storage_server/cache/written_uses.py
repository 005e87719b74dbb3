"""Uses and leases are written into the index, so that a restart knows them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

from descriptors.errors import ErrorCode, ObjectCacheError, ServerError
from storage_server.cache.cache_set import CacheSet
from storage_server.cache.news import AskedPrefix, News
from storage_server.cache.rules.books import Books
from storage_server.cache.rules.entry import Entry, Name
from storage_server.cache.rules.unwritten import LEASE_SPARE_S, Unwritten
from storage_server.kernel.data.io_threads import IoThreads
from storage_server.kernel.index import transaction
from storage_server.kernel.index.transaction import Transaction
from storage_server.kernel.rules.rows import KeyUse
from storage_server.kernel.time_of_day import TimeOfDay

SAVE_INTERVAL_S = 10.0
LEASE_SAVE_S = 0.05
"""Leases are written down so long after the first of them was given, together with those given meanwhile."""
SAVED_AT_ONCE = 2000
Change = Callable[[Callable[[Transaction], Any]], Awaitable[Any]]
_Use = tuple[Books, Name, Entry]


class WrittenUses:
    """Writes down what the books of `caches` know. `io` is the thread of the books; `wake` has somebody call `write`
    soon. Used on one event loop.
    """

    def __init__(
        self,
        caches: CacheSet,
        news: News,
        io: IoThreads,
        change: Change,
        day: TimeOfDay,
        wake: Callable[[], None],
    ) -> None:
        self._caches = caches
        self._news = news
        self._io = io
        self._change = change
        self._day = day
        self._wake = wake
        self._saved_at = time.monotonic()
        self._lease_timer: asyncio.TimerHandle | None = None
        self._has_leases = False
        self._written_leap_s = 0.0
        """How far the clock was ahead when leases were written down."""

    def note_asked(self, asked: AskedPrefix) -> None:
        """Note a lookup. Raises ServerError(SlowDown) where its lease cannot be noted."""
        cache = self._caches.of(asked.bucket)
        if cache is None:
            return
        has_lease = asked.lease_s > 0 and bool(asked.matched)
        if not self._news.note(asked) and has_lease and cache is not self._caches.whole:
            # in front of another service the chunks are there in any case
            raise ServerError(ErrorCode.SLOW_DOWN, "too many lookups wait to be noted", retryable=True)
        if has_lease:
            self.leases_soon()

    def leases_soon(self) -> None:
        """Write leases down, with those that are given until then."""
        if self._lease_timer is None:
            self._lease_timer = asyncio.get_running_loop().call_later(LEASE_SAVE_S, self._save_leases)

    def close(self) -> None:
        """Write nothing more."""
        if self._lease_timer is not None:
            self._lease_timer.cancel()

    async def write(self) -> None:
        """Write down what is due. Raises ObjectCacheError."""
        await self._follow_clock()
        if time.monotonic() - self._saved_at >= SAVE_INTERVAL_S:
            await self.save()
        elif self._has_leases:
            self._has_leases = False
            await self._write_down(Unwritten.leased)
        if any(cache.books.unwritten.has_leases for cache in self._caches.all()):
            self.leases_soon()  # of chunks that have come after their leases

    async def save(self) -> None:
        """Write down which objects were used when, so that a restart knows it."""
        self._saved_at = time.monotonic()
        self._has_leases = False
        await self._write_down(Unwritten.changed)

    def _save_leases(self) -> None:
        self._lease_timer = None
        self._has_leases = True
        self._wake()

    async def _follow_clock(self) -> None:
        """Have all leases written down anew where the clock has leapt since they were: after a restart it is followed,
        wherever it is then.
        """
        if abs(self._day.leap_s - self._written_leap_s) > LEASE_SPARE_S:
            self._written_leap_s = self._day.leap_s
            for cache in self._caches.all():
                await self._io.run(cache.books.unwritten.forget_written_leases)
            self._has_leases = True

    async def _write_down(self, what: Callable[[Unwritten], list[tuple[Name, Entry]]]) -> None:
        if not self._caches.is_needed or not self._news.is_restored:
            return
        found = await self._io.run(partial(self._drained, what))
        for start in range(0, len(found), SAVED_AT_ONCE):
            leap_s = self._day.leap_s
            uses = [_key_use(name, entry, leap_s) for _, name, entry in found[start : start + SAVED_AT_ONCE]]
            try:
                await self._change(partial(transaction.note_uses, uses=uses))
            except ObjectCacheError:
                await self._io.run(partial(_not_written, found[start:]))
                raise

    def _drained(self, what: Callable[[Unwritten], list[tuple[Name, Entry]]]) -> list[_Use]:
        self._news.take_over()
        return [
            (cache.books, name, entry) for cache in self._caches.all() for name, entry in what(cache.books.unwritten)
        ]


def _key_use(name: Name, entry: Entry, leap_s: float) -> KeyUse:
    """A lease ends by the clock, which a restart follows even where it has leapt."""
    leased_until = None if entry.leased_until is None else entry.leased_until + leap_s
    return KeyUse(*name, entry.used_at, entry.use_count, entry.parent, leased_until)


def _not_written(uses: Sequence[_Use]) -> None:
    for books, name, _ in uses:
        books.unwritten.not_written([name])
