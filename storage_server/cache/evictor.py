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
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from heapq import nlargest
from itertools import groupby
from typing import Any

from descriptors.errors import ErrorCode, ObjectCacheError, ServerError
from descriptors.objects import CACHE_BYTES_MIN, BucketCache
from descriptors.status import CACHES_MAX, CacheStatus
from descriptors.units import GIB
from storage_server.cache.caches import Cache, ahead_bytes_of, entry_of, spare_bytes_of
from storage_server.cache.former_objects import FormerObjects
from storage_server.cache.policies.choice import policy_of
from storage_server.cache.replacements import Replacements
from storage_server.cache.replacer import Replacer
from storage_server.cache.rules.books import LEASE_SPARE_S, Books, Entry, Name, Victim
from storage_server.cache.rules.departures import Departures
from storage_server.kernel.data.io_threads import IoThreads
from storage_server.kernel.data.space import OFFERED_FRACTION, Bound, Space
from storage_server.kernel.index import queries, transaction
from storage_server.kernel.index.reader import IndexReader
from storage_server.kernel.index.transaction import Transaction
from storage_server.kernel.removal import remove_versions
from storage_server.kernel.rules.rows import KeyChange, KeyUse
from storage_server.kernel.time_of_day import TimeOfDay
from storage_server.kernel.watcher import Watcher
from storage_server.planning.extent import aligned
from storage_server.settings import CacheSettings

TICK_S = 1.0
NEWS_MAX = 16_384
NEWS_BYTES_MAX = 32 << 20
"""The keys of prefixes that wait to be noted have no more bytes; one prefix alone may have more."""
KEY_OBJECT_BYTES = 64
SAVE_INTERVAL_S = 10.0
LEASE_SAVE_S = 0.05
"""Leases are written down so long after the first of them was given, together with those given meanwhile."""
REFUSALS_LOGGED_S = 60.0
CACHE_REMEDY = "its objects are being read or written; raise its capacity"
PARTS_REMEDY = "complete or abort uploads"
SAVED_AT_ONCE = 2000
VICTIMS_PER_CHANGE = 256
ROWS = 2000
UNBOUNDED = 1 << 62
"""The capacity of books until the first step bounds them."""
HELD_FRACTION = 0.5
"""Pins and leases of one tenant, and parts of open uploads, take no more than this fraction of what all caches may take
together: they must not close the cache to others.
"""
_log = logging.getLogger(__name__)
Change = Callable[[Callable[[Transaction], Any]], Awaitable[Any]]
_Use = tuple[Books, Name, Entry]


@dataclass(frozen=True, slots=True)
class _Asked:
    """A prefix that was read, or looked up; in the latter case `matched` of its chunks were there, which are to be kept
    for `lease_s`.
    """

    bucket: str
    keys: Sequence[str]
    at: float
    matched: int | None = None
    lease_s: float = 0.0

    @property
    def nbytes(self) -> int:
        """About how much memory its keys take."""
        return sum(map(len, self.keys)) + KEY_OBJECT_BYTES * len(self.keys)


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
    ) -> None:
        self._free_bytes = free_bytes
        self._readers_withhold = readers_withhold
        self._growth = growth
        self._sync_soon = sync_soon
        self._space = space
        self._bound = bound
        self._reader = reader
        self._change = change
        self._io = IoThreads(1)
        self._caches: Mapping[str, Cache] = {}
        """By bucket. Never changed, but replaced: several threads go through it."""
        self._whole: Cache | None = None
        for each in caches:
            if each.bucket is None:
                self._whole = self._made(each)
            else:
                self._caches = {**self._caches, each.bucket: self._made(each)}
        self._configured = {each.bucket: each for each in caches if each.bucket is not None}
        self._sizes_declared: dict[str, int | None] = {}
        """Those of configured caches whose settings have no size."""
        self._news: deque[KeyChange | _Asked] = deque()
        self._held_news: deque[KeyChange | _Asked] = deque()
        """Those of before `_news` that wait until the books are restored."""
        self._noted_bytes = self._drained_bytes = 0
        self._noted_count = self._drained_count = 0
        """How many keys came into `_news` since the start, and how many left it. The event loop counts the former, the
        thread the latter.
        """
        self._loop: asyncio.AbstractEventLoop | None = None
        self._wake = asyncio.Event()
        self._departures = Departures()
        self._leaving_one = asyncio.Lock()
        self._replacements: Replacements | None = None
        self._is_restored = False
        self._saved_at = time.monotonic()
        self._day = TimeOfDay(time.time(), time.monotonic())
        self._lease_timer: asyncio.TimerHandle | None = None
        self._has_leases = False
        self._written_leap_s = 0.0
        """How far the clock was ahead when leases were written down."""
        self._told_refusals = 0
        self._told_refusals_at = -math.inf
        self.evicted_count = 0
        """Objects that were evicted since the start."""
        self.evicted_bytes = 0
        """The bytes of these objects."""
        if self._whole is not None or self._caches:
            bound.wants = self._want

    def _now(self) -> float:
        """The time of day, without leaps ahead: what `ttl_s` deletes, a wrong clock must not."""
        return self._day.now(time.time(), time.monotonic())

    def _made(self, settings: CacheSettings) -> Cache:
        growth = 0.0 if settings.bucket is None else self._growth  # what is missing there is read, and not computed
        books = Books(policy_of(settings.eviction, UNBOUNDED, growth), settings.ttl_s)
        if settings.bucket is None:
            return Cache(books)
        cache = Cache(books, settings.bucket, None, settings.capacity_bytes, is_replaced=settings.replaces)
        cache.is_derived = settings.capacity_bytes is None and self._space.bound_bytes is None
        if settings.capacity_bytes is not None or cache.is_derived:
            what = f"the bucket {settings.bucket}"
            cache.bound = Bound(what, lambda: cache.capacity_bytes, lambda: cache.taken_bytes, CACHE_REMEDY)
            cache.bound.wants = self._want
            what = f"the half of the bucket {settings.bucket} that parts of open uploads may take"
            cache.parts_bound = Bound(
                what, lambda: _held_of(cache.capacity_bytes), lambda: cache.part_bytes, PARTS_REMEDY
            )
        return cache

    def replace_with(self, replacer: Replacer, caches: Sequence[CacheSettings]) -> None:
        """Have chunks of these buckets encoded before they leave. Called before `run`."""
        found = {each.bucket: each for each in caches if each.bucket is not None and each.replaces}
        if found:
            self._replacements = Replacements(replacer, found, self._leaving, self._delete, self._aside_bytes_max)

    @property
    def aside_bytes(self) -> int:
        """The space of chunks that wait to be encoded."""
        return 0 if self._replacements is None else self._replacements.nbytes

    @property
    def is_needed(self) -> bool:
        """Whether there is any cache."""
        return self._whole is not None or bool(self._caches)

    def _declare(self, bucket: str, declared: BucketCache | None) -> None:
        """Note that a bucket was created as a cache; None: as none, or deleted. Settings that name it hold in any case,
        but for the size where they say none. Where the directory is a cache as a whole, no bucket is one by itself.
        """
        settings = self._configured.get(bucket)
        if self._whole is not None or (settings is not None and settings.capacity_bytes is not None):
            return
        if settings is not None:
            size = None if declared is None else declared.capacity_bytes
            if size != self._sizes_declared.get(bucket):
                self._sizes_declared[bucket] = size
                self._caches = {**self._caches, bucket: self._made(replace(settings, capacity_bytes=size))}
            return
        caches = {name: cache for name, cache in self._caches.items() if name != bucket}
        if declared is not None:
            caches[bucket] = self._made(CacheSettings(bucket, declared.capacity_bytes))
            self._bound.wants = self._want
        self._caches = caches
        self._derive_capacities()

    def _derive_capacities(self) -> None:
        """Give caches without a size OFFERED_FRACTION of what the file system offers them, which is what they have and
        what is free: nobody else's room depends on them.
        """
        derived = [cache for cache in self._caches.values() if cache.is_derived]
        if derived:
            with suppress(OSError):
                free_bytes = self._free_bytes()
                for cache in derived:
                    cache.capacity_bytes = max(
                        CACHE_BYTES_MIN, int(OFFERED_FRACTION * (cache.taken_bytes + free_bytes))
                    )

    def capacities(self) -> dict[str, int | None]:
        """The buckets that are caches, with the bytes that each may take; None: those of the directory."""
        return {bucket: cache.capacity_bytes for bucket, cache in self._caches.items()}

    def status(self) -> list[CacheStatus]:
        """The contents of the CACHES_MAX largest caches, and how much has left them."""
        return [
            cache.status(cache.taken_bytes, len(cache.sizes_bytes))
            if cache.bucket is not None
            else cache.status(self._space.kept_bytes, cache.books.count)
            for cache in nlargest(CACHES_MAX, self._all(), key=lambda cache: cache.taken_bytes)
        ]

    def bounds_of(self, bucket: str, *, of_part: bool = False) -> tuple[Bound, ...]:
        """Those of the bucket in which a body needs room; none where the bucket has no bound of its own."""
        cache = self._caches.get(bucket)
        found = () if cache is None else (cache.parts_bound, cache.bound) if of_part else (cache.bound,)
        return tuple(bound for bound in found if bound is not None)

    def note_changes(
        self, changes: Sequence[KeyChange], part_bytes: Mapping[str, int], caches: Mapping[str, BucketCache | None]
    ) -> None:
        """Note what keys show now, what the parts of open uploads take more, by buckets, and which buckets were created
        or deleted. Called by the committer's thread.
        """
        for bucket, declared in caches.items():
            self._declare(bucket, declared)
        for bucket, nbytes in part_bytes.items():
            if bucket in self._caches:
                self._caches[bucket].part_bytes += nbytes
        for change in changes:
            cache = self._caches.get(change.bucket)
            if cache is not None:
                cache.note(change)
            if cache is not None or self._whole is not None:
                self._news.append(change)
        if (changes or part_bytes) and self.is_needed:
            self._derive_capacities()
            for cache in self._caches.values():
                for bound in (cache.parts_bound, cache.bound):
                    if bound is not None:
                        bound.notify()
            if self._is_short():
                self._wake_up()

    def note_read(self, bucket: str, keys: Sequence[str]) -> None:
        """Note that the chunks of a prefix were read."""
        cache = self._cache_of(bucket)
        if cache is not None:
            cache.note_read(keys)
            self._note(_Asked(bucket, keys, self._now()))

    def before_lookup(self) -> int:
        """How many batches have left."""
        return self._departures.ended_count

    def note_lookup(self, bucket: str, keys: Sequence[str], matched: int, since: int, lease_s: float = 0.0) -> int:
        """Note that a prefix was looked up, whose first `matched` chunks are to be kept for `lease_s`. Returns how many
        of them do not leave, and have not left since the index was read. Raises ServerError(SlowDown) where the lease
        cannot be given now.
        """
        matched = self._departures.staying_count(bucket, keys, matched, since)
        cache = self._cache_of(bucket)
        if cache is None or not (matched < len(keys) or lease_s > 0):
            return matched
        has_lease = lease_s > 0 and matched > 0
        if (
            not self._note(_Asked(bucket, keys, self._now(), matched, lease_s))
            and has_lease
            and cache is not self._whole
        ):
            # in front of another service the chunks are there in any case
            raise ServerError(ErrorCode.SLOW_DOWN, "too many lookups wait to be noted", retryable=True)
        if has_lease:
            self._save_leases_later()
        return matched

    def _save_leases_later(self) -> None:
        """Write leases down, with those that are given until then."""
        if self._lease_timer is None and self._loop is not None:
            self._lease_timer = self._loop.call_later(LEASE_SAVE_S, self._save_leases)

    def _note(self, asked: _Asked) -> bool:
        """Note what was asked, in order with the changes of keys; where too much that was asked waits it is forgotten.
        Changes do not count: while a restart's objects come back they wait, and lookups must go on.
        """
        waiting_bytes = self._noted_bytes - self._drained_bytes
        if self._noted_count - self._drained_count >= NEWS_MAX:
            return False
        if waiting_bytes and waiting_bytes + asked.nbytes > NEWS_BYTES_MAX:
            return False
        self._noted_bytes += asked.nbytes
        self._noted_count += 1
        self._news.append(asked)
        return True

    def _save_leases(self) -> None:
        self._lease_timer = None
        self._has_leases = True
        self._wake.set()

    async def load(self) -> None:
        """Count what the caches have. Called before anything is written."""
        self._loop = asyncio.get_running_loop()
        for bucket, declared in (await self._reader.threaded(queries.declared_caches)).items():
            self._declare(bucket, declared)
        if not self.is_needed:
            return
        await self._change(transaction.forget_unused)
        part_bytes = await self._reader.threaded(queries.part_bytes)
        for bucket, cache in self._caches.items():
            cache.part_bytes = part_bytes.get(bucket, 0)
            after = ""
            while found := await self._reader.threaded(partial(queries.sizes, bucket=bucket, after=after, limit=ROWS)):
                for key, nbytes in found:
                    cache.count(key, nbytes)
                after = found[-1][0]
        self._derive_capacities()

    async def run(self) -> None:
        """Evict ahead of writes, until cancelled."""
        self._loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as tasks:
            if self._replacements is not None:
                tasks.create_task(self._replacements.run())
            formers = [FormerObjects(cache, self._reader, self._io, self._now) for cache in self._all()]
            tasks.create_task(self._restore(formers))
            await self._run(formers)

    async def _run(self, formers: Sequence[FormerObjects]) -> None:
        while True:
            self._wake.clear()
            try:
                has_evicted = await self._step()
                if not self._is_restored and (has_evicted or self._is_short()):
                    await self._take_more(formers, is_stuck=not has_evicted)
                await self._follow_clock()
                if time.monotonic() - self._saved_at >= SAVE_INTERVAL_S:
                    await self.save()
                elif self._has_leases:
                    self._has_leases = False
                    await self._write_down(Books.leased)
                if any(cache.books.has_unwritten_leases for cache in self._all()):
                    self._save_leases_later()  # of chunks that have come after their leases
                self._tell_refusals()
            except ObjectCacheError as error:
                _log.warning("eviction: %s", error)
                await asyncio.sleep(TICK_S)
            except Exception:
                _log.exception("eviction failed; it is tried again")
                await asyncio.sleep(TICK_S)
            if not self._is_short() or not self._news:
                with suppress(TimeoutError):
                    async with asyncio.timeout(TICK_S if self.is_needed else None):
                        await self._wake.wait()

    async def _follow_clock(self) -> None:
        """Have all leases written down anew where the clock has leapt since they were: after a restart it is followed,
        wherever it is then.
        """
        if abs(self._day.leap_s - self._written_leap_s) > LEASE_SPARE_S:
            self._written_leap_s = self._day.leap_s
            for cache in self._all():
                await self._io.run(cache.books.forget_written_leases)
            self._has_leases = True

    async def save(self) -> None:
        """Write down which objects were used when, so that a restart knows it."""
        self._saved_at = time.monotonic()
        self._has_leases = False
        await self._write_down(Books.changed)

    async def _write_down(self, what: Callable[[Books], list[tuple[Name, Entry]]]) -> None:
        if not self.is_needed or not self._is_restored:
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

    @property
    def refused_count(self) -> int:
        """Pins and leases that had no effect, since others hold what they may of their cache."""
        return sum(cache.books.refused_count for cache in self._all())

    def _tell_refusals(self) -> None:
        refused, now_s = self.refused_count - self._told_refusals, time.monotonic()
        if refused and now_s - self._told_refusals_at >= REFUSALS_LOGGED_S:
            _log.warning("%d pins and leases of objects had no effect: others hold half of the cache", refused)
            self._told_refusals += refused
            self._told_refusals_at = now_s

    def close(self) -> None:
        """End the thread."""
        if self._lease_timer is not None:
            self._lease_timer.cancel()
        self._io.close()

    def _cache_of(self, bucket: str) -> Cache | None:
        return self._whole or self._caches.get(bucket)

    def _all(self) -> list[Cache]:
        return [*self._caches.values(), *([self._whole] if self._whole is not None else [])]

    def _want(self) -> None:
        self._wake.set()

    def _wake_up(self) -> None:
        loop = self._loop
        if loop is not None and not self._wake.is_set():
            try:
                loop.call_soon_threadsafe(self._wake.set)
            except RuntimeError:  # the loop is closed
                return

    def _is_short(self) -> bool:
        """Whether there is less room than there should be ahead of writes."""
        limit_bytes = self._space.extent_bytes_max
        if limit_bytes is not None and limit_bytes - self._space.kept_bytes < ahead_bytes_of(limit_bytes):
            return True
        return any(
            cache.capacity_bytes is not None
            and cache.capacity_bytes - cache.taken_bytes < spare_bytes_of(cache, cache.capacity_bytes)
            for cache in self._caches.values()
        )

    async def _restore(self, formers: Sequence[FormerObjects]) -> None:
        """Take over what the index knows. Changes and reads since the start are noted after it."""
        while not self._is_restored:
            try:
                for each in formers:
                    await each.take_oldest()
                    each.has_begun = True
                    self._wake.set()
                for each in formers:
                    async for _ in each.take_all():
                        if self._is_short():
                            self._wake.set()
                for cache in self._all():
                    await self._io.run(cache.books.end_restore)
                self._is_restored = True
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
        """Evict what there is no room for. Returns whether anything was to leave."""
        self._derive_capacities()
        victims = await self._io.run(self._kept)
        if self._replacements is not None:
            victims = self._replacements.set_aside(victims, self._now())
            try:
                victims += await self._given_up(self._replacements)
            except BaseException:
                await self._take_back(victims)
                raise
        for start in range(0, len(victims), VICTIMS_PER_CHANGE):
            try:
                await self._evict(victims[start : start + VICTIMS_PER_CHANGE])
            except BaseException:  # what did leave is among the news, and is forgotten again
                await self._take_back(victims[start:])
                raise
        if self._bound.waiting_bytes and self._space.dying_bytes:
            self._sync_soon()
        if not victims and self._hopeless():
            for _ in range(2):  # the committer gives back what has ended without a row before it takes the next change
                await self._change(lambda tx: None)
            for bound in self._hopeless():
                waits_for_readers = bound is self._bound and await self._io.run(self._readers_withhold)
                if not waits_for_readers and bound in self._hopeless():  # what readers gave up just now comes back
                    bound.refuse()
        return bool(victims)

    def _hopeless(self) -> list[Bound]:
        """The bounds in which somebody waits for room, and nothing can leave, nor is on its way: that may leave when it
        has come.
        """
        has_news = not self._is_restored or any(isinstance(each, KeyChange) for each in tuple(self._news))
        if has_news or self._space.dying_bytes:
            return []
        bounds = (self._bound, *(cache.bound for cache in self._caches.values()))
        return [
            bound
            for bound in bounds
            if bound is not None and bound.waiting_bytes and not bound.reserved_bytes and not bound.arriving_count
        ]

    async def _given_up(self, replacements: Replacements) -> list[Victim]:
        """Victims that were set aside to be encoded, and leave now, since somebody waits for their room."""
        async with self._leaving_one:
            taken = replacements.give_up(self._bound.lacking_bytes - self._space.dying_bytes)
            for bucket, cache in self._caches.items():
                if cache.bound is not None:
                    taken += replacements.give_up(cache.bound.lacking_bytes, bucket)
            if not taken:
                return []
            try:
                return await self._io.run(lambda: [victim for victim in taken if self._may_leave(victim)])
            except BaseException:
                await self._take_back(taken)
                raise

    def _aside_bytes_max(self, bucket: str) -> int:
        capacity_bytes = self._caches[bucket].capacity_bytes or self._space.extent_bytes_max
        return GIB if capacity_bytes is None else ahead_bytes_of(capacity_bytes)

    def _may_leave(self, victim: Victim) -> bool:
        """Runs in the thread."""
        self._drain()
        cache = self._cache_of(victim.bucket)
        return cache is None or not cache.books.takes_back(victim)

    @asynccontextmanager
    async def _leaving(self, victim: Victim) -> AsyncIterator[bool]:
        """Whether a victim that was set aside may leave; while the block runs no lookup promises it."""
        async with self._leaving_one:
            self._departures.begin([(victim.bucket, victim.key)])
            try:
                yield await self._io.run(partial(self._may_leave, victim))
            finally:
                self._departures.end()

    async def _delete(self, victim: Victim) -> None:
        versions = {victim.key: victim.entry.version}
        try:
            removed = await remove_versions(self._change, victim.bucket, versions)
        except BaseException:
            await self._take_back([victim])
            raise
        self._count(victim.bucket, [victim] * removed, removed)

    def _kept(self) -> list[Victim]:
        """Bring the books up to date, and take what leaves out of them. Runs in the thread."""
        if self._whole is not None and self._space.extent_bytes_max is not None:
            # objects that share their bytes take less than the books say: only what they take together can be too much
            news = (*self._held_news, *tuple(self._news))
            coming_bytes = sum(aligned(each.nbytes) for each in news if isinstance(each, KeyChange))
            self._whole.books.allow(self._capacities()[id(self._whole)] + coming_bytes)
        self._drain()
        capacities, now = self._capacities(), self._now()
        for cache in self._all():
            limit_bytes = cache.capacity_bytes or self._space.extent_bytes_max
            cache.books.held_bytes_max = None if limit_bytes is None else int(HELD_FRACTION * limit_bytes)
        return [victim for cache in self._all() for victim in cache.books.leaving(capacities[id(cache)], now)]

    def _drain(self) -> None:
        """Note the news. Until the books are restored only leases: they keep what has come, and await the rest."""
        while self._is_restored and self._held_news:
            self._news.appendleft(self._held_news.pop())
        while self._news:
            noted = self._news.popleft()
            if not self._is_restored and (isinstance(noted, KeyChange) or noted.matched is None):
                self._held_news.append(noted)
                continue
            if isinstance(noted, _Asked):
                self._drained_bytes += noted.nbytes
                self._drained_count += 1
            cache = self._cache_of(noted.bucket)
            if cache is None:
                continue
            if isinstance(noted, KeyChange):
                name = (noted.bucket, noted.key)
                if noted.version is None:
                    cache.books.remove(name)
                else:
                    cache.books.put(name, entry_of(noted)._replace(used_at=self._now()))
            elif noted.matched is None:
                cache.books.use(noted.bucket, noted.keys, noted.at)
            else:
                cache.books.expect(noted.bucket, noted.keys, noted.matched)
                if noted.lease_s > 0:
                    cache.books.lease(noted.bucket, noted.keys[: noted.matched], noted.at + noted.lease_s)

    def _capacities(self) -> dict[int, int]:
        """The bytes that each cache may keep: its own bound, less its part of the bytes that the directory lacks, which
        the largest cache gives up first. Some room is kept ahead of writes.
        """
        capacities: dict[int, int] = {}
        for cache in self._all():
            capacity_bytes = cache.capacity_bytes
            if capacity_bytes is not None and cache.bound is not None:
                ahead_bytes = spare_bytes_of(cache, capacity_bytes) + cache.bound.promised_bytes + cache.part_bytes
                if not self._is_restored:
                    ahead_bytes += max(0, cache.room_bytes - cache.books.used_bytes)
                capacities[id(cache)] = max(0, capacity_bytes - ahead_bytes)
            else:
                capacities[id(cache)] = UNBOUNDED
        limit_bytes = self._space.extent_bytes_max
        if limit_bytes is None:
            return capacities
        kept_bytes = self._space.kept_bytes - self.aside_bytes
        ahead_bytes = ahead_bytes_of(limit_bytes) + self._bound.promised_bytes
        if self._whole is not None:
            others_bytes = kept_bytes - self._whole.books.used_bytes  # below 0 where entries share bytes
            capacities[id(self._whole)] = max(0, limit_bytes - ahead_bytes - others_bytes)
            return capacities
        short_bytes = kept_bytes + ahead_bytes - limit_bytes
        for cache in sorted(self._all(), key=lambda cache: -cache.books.used_bytes):
            if short_bytes <= 0:
                break
            used_bytes = cache.books.used_bytes
            capacities[id(cache)] = min(capacities[id(cache)], max(0, used_bytes - short_bytes))
            short_bytes -= used_bytes
        return capacities

    async def _evict(self, victims: Sequence[Victim]) -> None:
        for bucket, group in groupby(sorted(victims, key=lambda victim: victim.bucket), lambda victim: victim.bucket):
            async with self._leaving_one:
                chosen = list(group)
                self._departures.begin((bucket, victim.key) for victim in chosen)
                try:
                    chosen = await self._io.run(partial(self._without_asked, chosen))
                    versions = {victim.key: victim.entry.version for victim in chosen}
                    evicted = await remove_versions(self._change, bucket, versions)
                finally:
                    self._departures.end()
            self._count(bucket, chosen, evicted)

    def _count(self, bucket: str, victims: Sequence[Victim], evicted: int) -> None:
        nbytes = sum(victim.entry.nbytes for victim in victims)
        self.evicted_count += evicted
        self.evicted_bytes += nbytes
        cache = self._cache_of(bucket)
        if cache is not None and victims:
            cache.evicted_count += evicted
            cache.evicted_bytes += nbytes
            cache.eviction_age_s = max(0.0, self._now() - victims[-1].entry.used_at)

    async def _take_back(self, victims: Sequence[Victim]) -> None:
        """Note again what did not leave, unless its key shows something else by now."""

        def put_back() -> None:
            for victim in victims:
                cache = self._cache_of(victim.bucket)
                if cache is not None and not cache.books.takes_back(victim):
                    cache.books.put((victim.bucket, victim.key), victim.entry)

        await self._io.run(put_back)

    def _without_asked(self, victims: list[Victim]) -> list[Victim]:
        """The victims that nobody has got a lease of since they were chosen, nor has used since a restart, as far as
        that waits to be noted. The others stay. Runs in the thread.
        """
        asked = [each for each in (*self._held_news, *tuple(self._news)) if isinstance(each, _Asked)]
        names = {(victim.bucket, victim.key) for victim in victims}
        wanted = {
            (each.bucket, key)
            for each in asked
            if each.lease_s > 0 or not self._is_restored
            for key in each.keys[: each.matched]
            if (each.bucket, key) in names
        }
        for victim in victims:
            cache = self._cache_of(victim.bucket)
            if (victim.bucket, victim.key) in wanted and cache is not None:
                cache.books.put((victim.bucket, victim.key), victim.entry)
        return [victim for victim in victims if (victim.bucket, victim.key) not in wanted]

    def _drained(self, what: Callable[[Books], list[tuple[Name, Entry]]]) -> list[_Use]:
        self._drain()
        return [(cache.books, name, entry) for cache in self._all() for name, entry in what(cache.books)]


def _held_of(capacity_bytes: int | None) -> int | None:
    return None if capacity_bytes is None else int(HELD_FRACTION * capacity_bytes)


def _key_use(name: Name, entry: Entry, leap_s: float) -> KeyUse:
    """A lease ends by the clock, which a restart follows even where it has leapt."""
    leased_until = None if entry.leased_until is None else entry.leased_until + leap_s
    return KeyUse(*name, entry.used_at, entry.use_count, entry.parent, leased_until)


def _not_written(uses: Sequence[_Use]) -> None:
    for books, name, _ in uses:
        books.not_written([name])
