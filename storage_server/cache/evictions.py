"""How victims leave: no lookup promises them meanwhile, and whether they may is asked again in the change that deletes
them. Those that do not leave come back into the books.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from itertools import groupby

from storage_server.cache.cache_set import CacheSet
from storage_server.cache.caches import is_pinned
from storage_server.cache.news import News
from storage_server.cache.rules.departures import Departures
from storage_server.cache.rules.entry import Victim
from storage_server.cache.rules.replacing import Replacement
from storage_server.cache.written_uses import Change
from storage_server.kernel.data.io_threads import IoThreads
from storage_server.kernel.removal import remove_versions


class Evictions:
    """Carries out that victims leave, one bucket's at a time. `io` is the thread of the books, `now` the time of day.
    Used on one event loop.
    """

    def __init__(self, caches: CacheSet, news: News, io: IoThreads, change: Change, now: Callable[[], float]) -> None:
        self._caches = caches
        self._news = news
        self._io = io
        self._change = change
        self._now = now
        self._leaving_one = asyncio.Lock()
        self.departures = Departures()
        """The victims that are leaving, and how many batches have left."""
        self.evicted_count = 0
        """Objects that were evicted since the start."""
        self.evicted_bytes = 0
        """The bytes of these objects."""

    async def evict(self, victims: Sequence[Victim]) -> None:
        """Delete victims, unless somebody has asked for them meanwhile."""
        for bucket, group in groupby(sorted(victims, key=lambda victim: victim.bucket), lambda victim: victim.bucket):
            async with self._leaving_one:
                chosen = list(group)
                self.departures.begin((bucket, victim.key) for victim in chosen)
                try:
                    chosen = await self._io.run(partial(self._news.not_asked, chosen))
                    evicted = await self._removed(bucket, chosen)
                finally:
                    self.departures.end()
            self._count(bucket, chosen, evicted)

    async def _removed(self, bucket: str, victims: Sequence[Victim]) -> int:
        """Delete those that still show what was chosen. One that somebody has pinned since stays: it is among the news
        then.
        """
        versions = {victim.key: victim.entry.version for victim in victims}
        idle = {victim.key for victim in victims if victim.entry.has_idle_pin}
        now = self._now()
        return await remove_versions(
            self._change, bucket, versions, lambda info: info.key not in idle and is_pinned(info.attributes, now)
        )

    def _count(self, bucket: str, victims: Sequence[Victim], evicted: int) -> None:
        nbytes = sum(victim.entry.nbytes for victim in victims)
        self.evicted_count += evicted
        self.evicted_bytes += nbytes
        cache = self._caches.of(bucket)
        if cache is not None and victims:
            cache.evicted_count += evicted
            cache.evicted_bytes += nbytes
            cache.eviction_age_s = max(0.0, self._now() - victims[-1].entry.used_at)

    async def take_back(self, victims: Sequence[Victim]) -> None:
        """Note again what did not leave, unless its key shows something else, or nothing, by now."""

        def put_back() -> None:
            for victim in victims:
                cache = self._caches.of(victim.bucket)
                if cache is not None and not cache.is_gone(victim.key) and not cache.books.takes_back(victim):
                    cache.books.put((victim.bucket, victim.key), victim.entry)

        await self._io.run(put_back)

    async def given_up(self, replacements: Sequence[Replacement]) -> list[Victim]:
        """Those of these objects that leave in place of being encoded."""

        def give_up() -> list[Victim]:
            self._news.take_over()
            found = [(self._caches.of(each.bucket), each) for each in replacements]
            victims = [cache.books.replacing.give_up(each) for cache, each in found if cache is not None]
            return [victim for victim in victims if victim is not None]

        return await self._io.run(give_up) if replacements else []

    @asynccontextmanager
    async def replacing(self, replacement: Replacement) -> AsyncIterator[bool]:
        """Whether an object may be replaced by an encoded one; while the block runs no lookup promises it."""

        def may() -> bool:
            self._news.take_over()
            cache = self._caches.of(replacement.bucket)
            return cache is not None and cache.books.replacing.may_replace(replacement)

        async with self._leaving_one:
            self.departures.begin([(replacement.bucket, replacement.key)])
            try:
                yield await self._io.run(may)
            finally:
                self.departures.end()

    async def keep(self, replacement: Replacement, *, is_refused: bool) -> None:
        """An object that was to be encoded stays as it is."""
        cache = self._caches.of(replacement.bucket)
        if cache is not None:
            await self._io.run(partial(cache.books.replacing.keep, replacement, is_refused=is_refused))
