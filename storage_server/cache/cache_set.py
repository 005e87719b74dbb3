"""The caches of one store: which there are, what each may take, and whether room is short."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from heapq import nlargest

from descriptors.objects import CACHE_BYTES_MIN, BucketCache
from descriptors.status import CACHES_MAX, CacheStatus
from descriptors.units import GIB
from storage_server.cache.caches import Cache, ahead_bytes_of, spare_bytes_of
from storage_server.cache.policies.choice import policy_of
from storage_server.cache.rules.books import Books
from storage_server.cache.rules.hold_budget import HoldBudget
from storage_server.cache.rules.replacing import MakeLadder
from storage_server.kernel.data.bound import Bound
from storage_server.kernel.data.space import OFFERED_FRACTION, Space
from storage_server.settings import CacheSettings

CACHE_REMEDY = "its objects are being read or written; raise its capacity"
PARTS_REMEDY = "complete or abort uploads"
UNBOUNDED = 1 << 62
"""The capacity of books until the first step bounds them."""
INDEX_FRACTION = 1 / 16
"""Where the index may not grow, the cache with the most evictable bytes gives up this fraction of them at a time."""
HELD_FRACTION = 0.5
"""Pins and leases of one tenant, and parts of open uploads, take no more than this fraction of what all caches may take
together: they must not close the cache to others.
"""
LadderOf = Callable[[CacheSettings], MakeLadder]
"""How the objects of a bucket that replaces them are encoded before they leave."""


class CacheSet:
    """A cache is the whole directory, or a bucket by its settings, or one that was created as a cache. `want` is called
    when somebody waits for room; `growth` is that of the chunks of buckets (storage_server.cache.policies.use_worth).
    Used on the event loop, by the committer's thread, and by that of the books.
    """

    def __init__(
        self,
        settings: Sequence[CacheSettings],
        space: Space,
        bound: Bound,
        want: Callable[[], None],
        growth: float,
        free_bytes: Callable[[], int],
        ladder_of: LadderOf | None = None,
    ) -> None:
        self._ladder_of = ladder_of
        self._space = space
        self._bound = bound
        self._want = want
        self._growth = growth
        self._free_bytes = free_bytes
        self._held = HoldBudget()
        """By pins, leases and dirty objects of all caches together."""
        what = "the half of the directory that parts of open uploads in caches may take"
        self._parts_bound = Bound(
            what,
            lambda: held_of(space.extent_bytes_max),
            lambda: sum([cache.part_bytes for cache in self.buckets.values()]),
            PARTS_REMEDY,
        )
        self.buckets: Mapping[str, Cache] = {}
        """By bucket. Never changed, but replaced: several threads go through it."""
        self.whole: Cache | None = None
        for each in settings:
            if each.bucket is None:
                self.whole = self._made(each)
            else:
                self.buckets = {**self.buckets, each.bucket: self._made(each)}
        self._configured = {each.bucket: each for each in settings if each.bucket is not None}
        self._sizes_declared: dict[str, int | None] = {}
        """Those of configured caches whose settings have no size."""
        if self.is_needed:
            bound.wants = want

    def of(self, bucket: str) -> Cache | None:
        """The cache that has the bucket's objects; None where none has."""
        return self.whole or self.buckets.get(bucket)

    def all(self) -> list[Cache]:
        """All caches."""
        return [*self.buckets.values(), *([self.whole] if self.whole is not None else [])]

    @property
    def is_needed(self) -> bool:
        """Whether there is any cache."""
        return self.whole is not None or bool(self.buckets)

    @property
    def refused_count(self) -> int:
        """Pins and leases that had no effect, since others hold what they may of their cache."""
        return sum(cache.books.refused_count for cache in self.all())

    def declare(self, bucket: str, declared: BucketCache | None) -> None:
        """Note that a bucket was created as a cache; None: as none, or deleted. Settings that name it hold in any case,
        but for the size where they say none. Where the directory is a cache as a whole, no bucket is one by itself.
        """
        settings = self._configured.get(bucket)
        if self.whole is not None or (settings is not None and settings.capacity_bytes is not None):
            return
        if settings is not None:
            size = None if declared is None else declared.capacity_bytes
            if size != self._sizes_declared.get(bucket):
                self._sizes_declared[bucket] = size
                self.buckets = {**self.buckets, bucket: self._made(replace(settings, capacity_bytes=size))}
            return
        caches = {name: cache for name, cache in self.buckets.items() if name != bucket}
        if declared is not None:
            caches[bucket] = self._made(CacheSettings(bucket, declared.capacity_bytes))
            self._bound.wants = self._want
        self.buckets = caches
        self.derive_capacities()

    def derive_capacities(self) -> None:
        """Give caches without a size OFFERED_FRACTION of what the file system offers them, which is what they have and
        what is free: nobody else's room depends on them.
        """
        derived = [cache for cache in self.buckets.values() if cache.is_derived]
        if derived:
            with suppress(OSError):
                free_bytes = self._free_bytes()
                for cache in derived:
                    cache.capacity_bytes = max(
                        CACHE_BYTES_MIN, int(OFFERED_FRACTION * (cache.taken_bytes + free_bytes))
                    )

    def capacities(self) -> dict[str, int | None]:
        """The buckets that are caches, with the bytes that each may take; None: those of the directory."""
        return {bucket: cache.capacity_bytes for bucket, cache in self.buckets.items()}

    def status(self) -> list[CacheStatus]:
        """The contents of the CACHES_MAX largest caches, and how much has left them."""
        return [
            cache.status(cache.taken_bytes, len(cache.sizes_bytes))
            if cache.bucket is not None
            else cache.status(self._space.kept_bytes, cache.books.count)
            for cache in nlargest(CACHES_MAX, self.all(), key=lambda cache: cache.taken_bytes)
        ]

    def lacking(self) -> list[tuple[int, str | None]]:
        """How many bytes those that wait lack in the directory, for None, and in each bucket that is a cache."""
        lacking: list[tuple[int, str | None]] = [(self._bound.lacking_bytes - self._space.dying_bytes, None)]
        bounds = [(bucket, cache.bound) for bucket, cache in self.buckets.items()]
        return lacking + [(bound.lacking_bytes, bucket) for bucket, bound in bounds if bound is not None]

    def hopeless(self, *, has_changes: bool) -> list[Bound]:
        """The bounds in which somebody waits for room, and nothing can leave, nor is on its way: that may leave when it
        has come. None where there are changes that the books do not know of yet.
        """
        if has_changes or self._space.dying_bytes:
            return []
        return [
            bound
            for bound in self.bounds()
            if bound.waiting_bytes and not bound.reserved_bytes and not bound.arriving_count
        ]

    def bounds_of(self, bucket: str, *, of_part: bool = False) -> tuple[Bound, ...]:
        """Those of the bucket, and of parts in all caches, in which a body needs room; none where it is no cache."""
        cache = self.buckets.get(bucket)
        if cache is None:
            return ()
        found = (self._parts_bound, cache.parts_bound, cache.bound) if of_part else (cache.bound,)
        return tuple(bound for bound in found if bound is not None)

    def note_room(self) -> None:
        """Objects have come or gone: whoever waits for room looks again."""
        self.derive_capacities()
        self._parts_bound.notify()
        for cache in self.buckets.values():
            for bound in (cache.parts_bound, cache.bound):
                if bound is not None:
                    bound.notify()

    def bounds(self) -> list[Bound]:
        """All bounds in which somebody may wait for room."""
        own = [cache.bound for cache in self.buckets.values() if cache.bound is not None]
        return [self._bound, *own]

    def is_short(self) -> bool:
        """Whether there is less room than there should be ahead of writes."""
        limit_bytes = self._space.extent_bytes_max
        if limit_bytes is not None and limit_bytes - self._space.kept_bytes < ahead_bytes_of(limit_bytes):
            return True
        return any(
            cache.capacity_bytes is not None
            and cache.capacity_bytes - cache.taken_bytes < spare_bytes_of(cache, cache.capacity_bytes)
            for cache in self.buckets.values()
        )

    def aside_bytes_max(self, bucket: str) -> int:
        """The room of chunks of a bucket that wait to be encoded."""
        capacity_bytes = self.buckets[bucket].capacity_bytes or self._space.extent_bytes_max
        return GIB if capacity_bytes is None else ahead_bytes_of(capacity_bytes)

    def bound_holds(self) -> None:
        """Say how much may be held, in each cache and in all together. Runs in the thread of the books."""
        self._held.bytes_max = held_of(self._space.extent_bytes_max)
        self._held.nbytes = sum(cache.books.held.nbytes for cache in self.all())  # a bucket that was deleted has none
        for cache in self.all():
            cache.books.held.bytes_max = held_of(cache.capacity_bytes)

    def kept_bytes(self, aside_bytes: int, *, is_restored: bool) -> dict[int, int]:
        """The bytes that each cache may keep, by its `id`: its own bound, less its part of the bytes that the directory
        lacks, which the cache with the most evictable bytes gives up first. Some room is kept ahead of writes.
        `aside_bytes` are those of chunks that wait to be encoded.
        """
        capacities: dict[int, int] = {}
        for cache in self.all():
            capacity_bytes = cache.capacity_bytes
            if capacity_bytes is not None and cache.bound is not None:
                ahead_bytes = spare_bytes_of(cache, capacity_bytes) + cache.bound.promised_bytes + cache.part_bytes
                if not is_restored:
                    ahead_bytes += max(0, cache.room_bytes - cache.books.used_bytes)
                capacities[id(cache)] = max(0, capacity_bytes - ahead_bytes)
            else:
                capacities[id(cache)] = UNBOUNDED
        limit_bytes = self._space.extent_bytes_max
        if limit_bytes is None:
            return capacities
        kept_bytes = self._space.kept_bytes - aside_bytes
        ahead_bytes = ahead_bytes_of(limit_bytes) + self._bound.promised_bytes
        if self.whole is not None:
            others_bytes = kept_bytes - self.whole.books.used_bytes  # below 0 where entries share bytes
            capacities[id(self.whole)] = max(0, limit_bytes - ahead_bytes - others_bytes)
            return capacities
        short_bytes = kept_bytes + ahead_bytes - limit_bytes
        largest_first = sorted(self.all(), key=lambda cache: -cache.books.evictable_bytes)
        if largest_first and not self._space.has_index_room:  # objects without bytes take room in the index alone
            short_bytes = max(short_bytes, int(INDEX_FRACTION * largest_first[0].books.evictable_bytes))
        for cache in largest_first:
            if short_bytes <= 0:
                break
            capacities[id(cache)] = min(capacities[id(cache)], max(0, cache.books.used_bytes - short_bytes))
            short_bytes -= cache.books.evictable_bytes
        return capacities

    def _made(self, settings: CacheSettings) -> Cache:
        growth = 0.0 if settings.bucket is None else self._growth  # what is missing there is read, and not computed
        ladder = None if self._ladder_of is None or not settings.replaces else self._ladder_of(settings)
        books = Books(policy_of(settings.eviction, UNBOUNDED, growth), settings.ttl_s, self._held, ladder)
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
                what, lambda: held_of(cache.capacity_bytes), lambda: cache.part_bytes, PARTS_REMEDY
            )
        return cache


def held_of(capacity_bytes: int | None) -> int | None:
    """The bytes of a capacity that one tenant may hold."""
    return None if capacity_bytes is None else int(HELD_FRACTION * capacity_bytes)
