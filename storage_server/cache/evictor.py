"""Eviction: objects of caches are deleted ahead of writes that need their space.

A cache is the whole directory, in front of another S3 service, or a bucket whose owner declared it one. Other buckets
lose nothing. The books of each cache (storage_server.cache.rules.books) say what leaves; they are kept in a thread of
their own, since a request of many chunks takes them a while.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

from descriptors.errors import ObjectCacheError
from objectcache.adapters.long_lived import note_long_lived
from storage_server.cache.cache_set import CacheSet, LadderOf
from storage_server.cache.evictions import Evictions
from storage_server.cache.former_objects import FormerObjects
from storage_server.cache.news import AskedPrefix, News
from storage_server.cache.replacements import Replacements
from storage_server.cache.replacer import Replacer
from storage_server.cache.rules.entry import Victim
from storage_server.cache.rules.replacing import Replacement
from storage_server.cache.written_uses import Change, WrittenUses
from storage_server.kernel.data.bound import Bound
from storage_server.kernel.data.io_threads import IoThreads
from storage_server.kernel.data.space import Space
from storage_server.kernel.index import queries, transaction
from storage_server.kernel.index.reader import IndexReader
from storage_server.kernel.rules.rows import Committed
from storage_server.kernel.time_of_day import TimeOfDay
from storage_server.kernel.watcher import Watcher
from storage_server.settings import CacheSettings

TICK_S = 1.0
REFUSALS_LOGGED_S = 60.0
VICTIMS_PER_CHANGE = 256
ROWS = 2000
_log = logging.getLogger(__name__)


class Evictor(Watcher):
    """The caches of one store. `note_changes`, `note_read` and `note_lookup` are called as things happen; `run` acts on
    them. `growth` is that of the chunks of buckets (storage_server.cache.policies.use_worth).
    """

    def __init__(
        self,
        caches: Sequence[CacheSettings],
        space: Space,
        bound: Bound,
        reader: IndexReader,
        change: Change,
        sync_soon: Callable[[], None],
        growth: float = 0.0,
        free_bytes: Callable[[], int] = lambda: 0,
        readers_withhold: Callable[[], bool] = lambda: False,
        ladder_of: LadderOf | None = None,
    ) -> None:
        self._readers_withhold = readers_withhold
        self._sync_soon = sync_soon
        self._space = space
        self._bound = bound
        self._reader = reader
        self._change = change
        self._io = IoThreads(1)
        self._wake = asyncio.Event()
        self._day = TimeOfDay(time.time(), time.monotonic())
        self.caches = CacheSet(
            settings=caches,
            space=space,
            bound=bound,
            want=self._want,
            growth=growth,
            free_bytes=free_bytes,
            ladder_of=ladder_of,
        )
        self.news = News(self.caches, self._now)
        self.written = WrittenUses(
            caches=self.caches, news=self.news, io=self._io, change=change, day=self._day, wake=self._want
        )
        self._loop: asyncio.AbstractEventLoop | None = None
        self.evictions = Evictions(self.caches, self.news, self._io, change, self._now)
        self.replacements: Replacements | None = None
        self._told_refusals = 0
        self._told_refusals_at = -math.inf

    def _now(self) -> float:
        """The time of day, without leaps ahead: what `ttl_s` deletes, a wrong clock must not."""
        return self._day.now(time.time(), time.monotonic())

    def replace_with(self, replacer: Replacer, caches: Sequence[CacheSettings]) -> None:
        """Have chunks of these buckets encoded before they leave. Called before `run`."""
        found = {each.bucket: each for each in caches if each.bucket is not None and each.replaces}
        if found:
            evictions, room_bytes = self.evictions, self.caches.aside_bytes_max
            self.replacements = Replacements(
                replacer=replacer,
                caches=found,
                replacing=evictions.replacing,
                keep=evictions.keep,
                room_bytes=room_bytes,
                want=self._want,
            )

    def bounds_of(self, bucket: str, *, of_part: bool = False) -> tuple[Bound, ...]:
        """Those of the bucket in which a body needs room; none where the bucket has no bound of its own."""
        return self.caches.bounds_of(bucket, of_part=of_part)

    def note_changes(self, committed: Committed) -> None:
        """As in Watcher."""
        for bucket, declared in committed.caches.items():
            self.caches.declare(bucket, declared)
        for bucket, nbytes in committed.part_bytes.items():
            if bucket in self.caches.buckets:
                self.caches.buckets[bucket].part_bytes += nbytes
        for change in committed.keys:
            cache = self.caches.buckets.get(change.bucket)
            if cache is not None:
                cache.note(change)
            if cache is not None or self.caches.whole is not None:
                self.news.note_change(change)
        if (committed.keys or committed.part_bytes) and self.caches.is_needed:
            self.caches.note_room()
            if self.caches.is_short():
                self._wake_up()

    def note_read(self, bucket: str, keys: Sequence[str]) -> None:
        """Note that the chunks of a prefix were read."""
        cache = self.caches.of(bucket)
        if cache is not None:
            cache.note_read(keys)
            self.news.note(AskedPrefix(bucket, keys, self._now()))

    def before_lookup(self) -> int:
        """How many batches have left."""
        return self.evictions.departures.ended_count

    def note_lookup(self, bucket: str, keys: Sequence[str], matched: int, since: int, lease_s: float = 0.0) -> int:
        """Note that a prefix was looked up, whose first `matched` chunks are to be kept for `lease_s`. Returns how many
        of them do not leave, and have not left since the index was read. Raises ServerError(SlowDown) where the lease
        cannot be given now.
        """
        matched = self.evictions.departures.staying_count(bucket, keys, matched, since)
        if matched < len(keys) or lease_s > 0:
            self.written.note_asked(AskedPrefix(bucket, keys, self._now(), matched, lease_s))
        return matched

    def note_present(self, bucket: str, keys: Sequence[str], since: int, lease_s: float = 0.0) -> Sequence[int]:
        """As in Watcher."""
        leaving = self.evictions.departures.leaving(bucket, keys, since)
        if lease_s > 0 and len(leaving) < len(keys):
            gone = set(leaving)
            staying = [key for at, key in enumerate(keys) if at not in gone] if gone else keys
            self.written.note_asked(AskedPrefix(bucket, staying, self._now(), len(staying), lease_s))
        return leaving

    async def load(self) -> None:
        """Count what the caches have. Called before anything is written."""
        self._loop = asyncio.get_running_loop()
        for bucket, declared in (await self._reader.threaded(queries.declared_caches)).items():
            self.caches.declare(bucket, declared)
        if not self.caches.is_needed:
            return
        await self._change(transaction.forget_unused)
        part_bytes = await self._reader.threaded(queries.part_bytes)
        for bucket, cache in self.caches.buckets.items():
            cache.part_bytes = part_bytes.get(bucket, 0)
            after = ""
            while found := await self._reader.threaded(partial(queries.sizes, bucket=bucket, after=after, limit=ROWS)):
                for key, nbytes in found:
                    cache.count(key, nbytes)
                after = found[-1][0]
        self.caches.derive_capacities()

    async def run(self) -> None:
        """Evict ahead of writes, until cancelled."""
        self._loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as tasks:
            if self.replacements is not None:
                tasks.create_task(self.replacements.run())
            formers = [FormerObjects(cache, self._reader, self._io, self._now) for cache in self.caches.all()]
            tasks.create_task(self._restore(formers))
            await self._run(formers)

    async def _run(self, formers: Sequence[FormerObjects]) -> None:
        while True:
            self._wake.clear()
            try:
                has_evicted = await self._step()
                if not self.news.is_restored and (has_evicted or self.caches.is_short()):
                    await self._take_more(formers, is_stuck=not has_evicted)
                await self.written.write()
                self._tell_refusals()
            except ObjectCacheError as error:
                _log.warning("eviction: %s", error)
                await asyncio.sleep(TICK_S)
            except Exception:
                _log.exception("eviction failed; it is tried again")
                await asyncio.sleep(TICK_S)
            if not self.caches.is_short() or not self.news:
                with suppress(TimeoutError):
                    async with asyncio.timeout(TICK_S if self.caches.is_needed else None):
                        await self._wake.wait()

    def _tell_refusals(self) -> None:
        refused, now_s = self.caches.refused_count - self._told_refusals, time.monotonic()
        if refused and now_s - self._told_refusals_at >= REFUSALS_LOGGED_S:
            _log.warning("%d pins and leases of objects had no effect: others hold half of the cache", refused)
            self._told_refusals += refused
            self._told_refusals_at = now_s

    def close(self) -> None:
        """End the thread."""
        self.written.close()
        self._io.close()

    def _want(self) -> None:
        self._wake.set()

    def _wake_up(self) -> None:
        loop = self._loop
        if loop is not None and not self._wake.is_set():
            try:
                loop.call_soon_threadsafe(self._wake.set)
            except RuntimeError:  # the loop is closed
                return

    async def _restore(self, formers: Sequence[FormerObjects]) -> None:
        """Take over what the index knows. Changes and reads since the start are noted after it."""
        while not self.news.is_restored:
            try:
                for each in formers:
                    await each.take_oldest()
                    each.has_begun = True
                    self._wake.set()
                for each in formers:
                    async for _ in each.take_all():
                        note_long_lived()
                        if self.caches.is_short():
                            self._wake.set()
                for cache in self.caches.all():
                    await self._io.run(cache.books.end_restore)
                self.news.is_restored = True
            except ObjectCacheError as error:
                _log.warning("eviction: %s", error)
                await asyncio.sleep(TICK_S)
            except Exception:
                _log.exception("a restart's objects were not taken over; it is tried again")
                await asyncio.sleep(TICK_S)
        self._wake.set()

    async def _take_more(self, formers: Sequence[FormerObjects], *, is_stuck: bool) -> None:
        """Until all are restored, have some that can leave: also where none of those that are known can."""
        for each in formers:
            if each.has_begun and (is_stuck or each.are_few) and await each.take_oldest():
                self._wake.set()

    async def _step(self) -> bool:
        """Evict what there is no room for. Returns whether anything was to leave, or to be encoded."""
        self.caches.derive_capacities()
        victims, wanted = await self._io.run(self._kept)
        given_up: list[Replacement] = []
        if self.replacements is not None:
            given_up = self.replacements.set_aside(wanted)
            for lack_bytes, bucket in self.caches.lacking():
                leaving_bytes = sum(each.entry.nbytes for each in victims if bucket in (None, each.bucket))
                given_up += self.replacements.give_up(lack_bytes - leaving_bytes, bucket)
            try:
                victims += await self.evictions.given_up(given_up)
            except BaseException:
                await self.evictions.take_back(victims)
                raise
        for start in range(0, len(victims), VICTIMS_PER_CHANGE):
            try:
                await self.evictions.evict(victims[start : start + VICTIMS_PER_CHANGE])
            except BaseException:  # what did leave is among the news, and is forgotten again
                await self.evictions.take_back(victims[start:])
                raise
        if self._bound.waiting_bytes and self._space.dying_bytes:
            self._sync_soon()
        if given_up:  # those that have children stay as they were: others are to leave
            self._want()
        has_acted = bool(victims or wanted or given_up)
        if not has_acted and self.caches.hopeless(has_changes=self.news.has_changes):
            for _ in range(2):  # the committer gives back what has ended without a row before it takes the next change
                await self._change(lambda tx: None)
            for bound in self.caches.hopeless(has_changes=self.news.has_changes):
                waits_for_readers = bound is self._bound and await self._io.run(self._readers_withhold)
                # what readers gave up just now comes back
                if not waits_for_readers and bound in self.caches.hopeless(has_changes=self.news.has_changes):
                    bound.refuse()
        return has_acted

    def _kept(self) -> tuple[list[Victim], list[Replacement]]:
        """Bring the books up to date, and take what leaves out of them; also what is to be encoded. Runs in the
        thread.
        """
        caches, news = self.caches, self.news
        aside_bytes = 0 if self.replacements is None else self.replacements.nbytes
        caches.bound_holds()
        if caches.whole is not None and self._space.extent_bytes_max is not None:
            # objects that share their bytes take less than the books say: only what they take together can be too much
            kept_bytes = caches.kept_bytes(aside_bytes, is_restored=news.is_restored)
            caches.whole.books.allow(kept_bytes[id(caches.whole)] + news.coming_bytes)
        news.take_over()
        kept_bytes, now = caches.kept_bytes(aside_bytes, is_restored=news.is_restored), self._now()
        victims = [victim for cache in caches.all() for victim in cache.books.leaving(kept_bytes[id(cache)], now)]
        return victims, [each for cache in caches.all() for each in cache.books.replacing.told()]
