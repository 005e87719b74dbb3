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
from storage_server.cache.replacements import Replacements
from storage_server.cache.rules.books import Victim
from storage_server.cache.rules.departures import Departures
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

    async def given_up(self, replacements: Replacements) -> list[Victim]:
        """Victims that were set aside to be encoded, and leave now, since somebody waits for their room."""
        async with self._leaving_one:
            taken = [victim for lack in self._caches.lacking() for victim in replacements.give_up(*lack)]
            if not taken:
                return []
            try:
                return await self._io.run(lambda: [victim for victim in taken if self._may_leave(victim)])
            except BaseException:
                await self.take_back(taken)
                raise

    def _may_leave(self, victim: Victim) -> bool:
        """Runs in the thread."""
        self._news.take_over()
        cache = self._caches.of(victim.bucket)
        return cache is None or cache.is_gone(victim.key) or not cache.books.takes_back(victim)

    @asynccontextmanager
    async def leaving(self, victim: Victim) -> AsyncIterator[bool]:
        """Whether a victim that was set aside may leave; while the block runs no lookup promises it."""
        async with self._leaving_one:
            self.departures.begin([(victim.bucket, victim.key)])
            try:
                yield await self._io.run(partial(self._may_leave, victim))
            finally:
                self.departures.end()

    async def delete(self, victim: Victim) -> None:
        """Delete a victim inside a block of `leaving`."""
        try:
            removed = await self._removed(victim.bucket, [victim])
        except BaseException:
            await self.take_back([victim])
            raise
        self._count(victim.bucket, [victim] * removed, removed)
