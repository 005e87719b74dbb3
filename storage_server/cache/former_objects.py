"""The objects that a cache had before a restart come back from the index into its books: first those whose last use is
longest ago, so that they can leave at once, then all, in order, in slices that leave time to requests.

    100 objects, 16 at first:   oldest 16 -> books    evict    rows 1 to 100, in order of use -> books, slice by slice
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from functools import partial

import numpy as np

from storage_server.cache.caches import Cache, former_entry
from storage_server.cache.rules.entry import Entry, Name
from storage_server.kernel.data.io_threads import IoThreads
from storage_server.kernel.index import queries
from storage_server.kernel.index.reader import IndexReader
from storage_server.kernel.rules.rows import CachedRow

OLDEST_COUNT = 16_384
"""Objects that are taken over at first, and again when most of them have left before all others have come."""
SLICE_COUNT = 256
"""Rows in one go: a few milliseconds, in which the interpreter lock is held."""


class FormerObjects:
    """Those of one cache. `io` is the thread that keeps the books."""

    def __init__(self, cache: Cache, reader: IndexReader, io: IoThreads, now: Callable[[], float]) -> None:
        self._cache = cache
        self._reader = reader
        self._io = io
        self._now = now
        self.has_begun = False
        """Whether the oldest have been taken over."""

    @property
    def are_few(self) -> bool:
        """Whether most of those that were taken over have left again."""
        return self._cache.books.count < OLDEST_COUNT // 4

    async def take_oldest(self) -> bool:
        """Take over those that were used longest ago, and are nobody's only copy. Returns whether any is new. Raises
        ObjectCacheError.
        """
        before = self._cache.books.count
        query = partial(queries.least_recently_used, bucket=self._cache.bucket, limit=OLDEST_COUNT)
        rows = await self._reader.threaded(query)
        for start in range(0, len(rows), SLICE_COUNT):
            await self._io.run(partial(self._restore, list(map(_named, rows[start : start + SLICE_COUNT]))))
        return self._cache.books.count > before

    async def take_all(self) -> AsyncIterator[None]:
        """Take over the others, with pauses, in which others may use the books. Raises ObjectCacheError."""
        found: list[tuple[Name, Entry]] = []
        after = ("", "")
        while True:
            began_s = time.monotonic()
            query = partial(queries.cached, bucket=self._cache.bucket, after=after, limit=SLICE_COUNT)
            rows = await self._reader.threaded(query)
            if not rows:
                break
            after = (rows[-1].bucket, rows[-1].key)
            found += await self._io.run(partial(_all_named, rows))
            yield
            await asyncio.sleep(time.monotonic() - began_s)
        order = await self._io.run(partial(_oldest_first, found))
        for start in range(0, len(found), SLICE_COUNT):
            began_s = time.monotonic()
            chosen = [found[index] for index in order[start : start + SLICE_COUNT].tolist()]
            await self._io.run(partial(self._restore, chosen))
            yield
            await asyncio.sleep(time.monotonic() - began_s)

    def _restore(self, found: list[tuple[Name, Entry]]) -> None:
        self._cache.books.restore(found, self._now())


def _named(row: CachedRow) -> tuple[Name, Entry]:
    return (row.bucket, row.key), former_entry(row)


def _all_named(rows: list[CachedRow]) -> list[tuple[Name, Entry]]:
    return list(map(_named, rows))


def _oldest_first(found: list[tuple[Name, Entry]]) -> np.ndarray[tuple[int], np.dtype[np.intp]]:
    used_at = np.fromiter((entry.used_at for _, entry in found), np.float64, len(found))
    return np.argsort(used_at, kind="stable")
