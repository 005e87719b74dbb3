"""The ChunkSource over an upstream service: chunks that are in the cache are read from there, and others are fetched
into the cache while the delivery is under way.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain, count

import numpy as np

from descriptors.chunk_names import is_chunk, is_chunk_key
from descriptors.errors import CallerError, ErrorCode
from descriptors.layout import ChunkLayout
from descriptors.presence import Presence
from objectcache.adapters.threads import HERE_ITEMS_MAX, computed, in_parts, let_others_run
from storage_server.delivery.gather.coming import ComingExtent, hold_landed, is_whole
from storage_server.delivery.gather.landing import Landed
from storage_server.delivery.gather.passing import PassingExtent
from storage_server.home.comparisons import Comparisons
from storage_server.home.embedded import EmbeddedStore
from storage_server.home.fetch.fetches import Fetches
from storage_server.home.home_lookups import HomeLookups
from storage_server.home.own_keys import OwnKeys
from storage_server.home.rules.known_keys import KnownKeys
from storage_server.home.service import HomeObjects
from storage_server.kernel.index import queries
from storage_server.kernel.index.reader import pinned
from storage_server.kernel.rules.reading import usable_prefix
from storage_server.kernel.rules.rows import StoredObject
from storage_server.kernel.shared_room import Held
from storage_server.planning.extent import Extent
from storage_server.planning.forms import Takes
from storage_server.planning.rows import Rows, SourceTable
from storage_server.planning.source import Pins, RowFailure

PREFETCH_WAIT_S = 30.0
KNOWN_S = 10.0
Forget = Callable[[str, Mapping[str, int]], Awaitable[int]]
Found = Sequence[list[Extent] | None]
"""For each key its extents in the cache, None where it has none."""
IsLost = Callable[[str, str], bool]


class UpstreamChunks:
    """Implements storage_server.planning.source.ChunkSource."""

    def __init__(
        self,
        objects: HomeObjects,
        cache: EmbeddedStore,
        fetches: Fetches,
        forget: Forget,
        own: OwnKeys | None = None,
        is_lost: IsLost = lambda bucket, key: False,
    ) -> None:
        """In a cluster `own` says which keys this server is the keeper of. `is_lost` says that upstream has at most an
        older version of a chunk, and that the only copy of the present one is damaged.
        """
        self._is_lost = is_lost
        self._objects = objects
        self._cache = cache
        self._fetches = fetches
        self._forget = forget
        self._own = own
        self._comparisons = Comparisons(objects)
        self._known = KnownKeys(KNOWN_S)
        self._lookups = HomeLookups(objects)

    @asynccontextmanager
    async def open_chunks(
        self, bucket: str, keys: Sequence[str], layout: ChunkLayout, *, prefix_only: bool, reader: Takes | None = None
    ) -> AsyncIterator[list[list[Extent]]]:
        """Chunks that are not in the cache are on their way when this returns: their extents are ComingExtents, or
        PassingExtents where the cache has no room. All are exact here.
        """

        attempts = count()
        objects = self._cache.objects

        async def find() -> tuple[list[list[Extent]], list[Extent]]:
            is_again = next(attempts) > 0
            since = self._cache.evictor.before_lookup()
            await objects.prefixes.expect(memory, len(keys), layout.chunk_bytes)
            found = await self._found(bucket, keys, memory)
            await self._require_current(bucket, keys, found)
            missing = [index for index, extents in enumerate(found) if extents is None]
            absent = [index for index in missing if not self._is_lost(bucket, keys[index])]
            if absent:
                await objects.prefixes.reserve(memory, len(keys), layout.chunk_bytes)
                await self._stop_stale(bucket, [keys[index] for index in absent])
                self._cache.evictor.note_lookup(bucket, keys, absent[0], since)
                wanted = [keys[index] for index in absent]
                # what came into the cache had to leave it before the prefix was whole: it would again
                begun = await self._fetches.begin(bucket, wanted, layout, keeps=not is_again)
                for index, extent in zip(absent, begun, strict=True):
                    found[index] = None if extent is None else [extent]
                self.forget_known(bucket, [keys[at] for at in absent if found[at] is None])
                if begun[0] is None and absent[0] == 0:
                    await self._objects.require_bucket(bucket)
            usable = await computed(
                lambda: usable_prefix(found, layout.chunk_bytes, prefix_only=prefix_only),
                is_long=len(keys) + sum(len(each) for each in found if each) > HERE_ITEMS_MAX,
            )
            await objects.prefixes.reserve(memory, len(usable), layout.chunk_bytes)
            await objects.prefixes.fill_checksums(bucket, keys, usable, layout.chunk_bytes)
            return usable, [each for each in chain.from_iterable(usable) if not isinstance(each, PassingExtent)]

        async with objects.prefixes.reserving() as memory, pinned(self._cache.files, find) as (chunks, extents):
            self._cache.evictor.note_read(bucket, keys[: len(chunks)])
            held = hold_landed(extents)
            try:
                _require_readable(extents)
                yield chunks
            finally:
                for landed in held:
                    landed.release()

    async def matched(self, bucket: str, keys: Sequence[str], lease_s: float = 0.0, reader: Takes | None = None) -> int:
        """Count the leading keys that are in the cache, or were found upstream a short while ago. Then ask upstream for
        the others: where a prefix is whole, as prefixes are, a binary search finds its end in O(log N) requests.

        With a lease somebody is about to come for them: those that are not in the cache begin to come.

        Where upstream does not answer, those are counted that are known without it.
        """
        since = self._cache.evictor.before_lookup()
        found = await self._in_cache(bucket, keys)
        keys = keys[: await self._count_before(keys, found, partial(self._is_lost, bucket))]
        now_s = time.monotonic()
        known = await self._count_before(keys, found, lambda key: not self._known.has(bucket, key, now_s))
        low = await self._lookups.count(bucket, keys, known)
        await self._remember(bucket, [keys[index] for index in range(known, low) if found[index] is None], now_s)
        staying = self._cache.evictor.note_lookup(bucket, keys, low, since, lease_s)
        if lease_s > 0:  # what has left the cache meanwhile comes again
            absent = [keys[index] for index in range(low) if found[index] is None or index >= staying]
            self._fetches.prefetch(bucket, absent, min(lease_s, PREFETCH_WAIT_S))
        return low

    async def present(
        self, bucket: str, keys: Sequence[str], lease_s: float = 0.0, reader: Takes | None = None
    ) -> tuple[Presence, bool]:
        """The keys that are in the cache, or were found upstream a short while ago; upstream is asked for the others,
        each by itself. Those that it does not answer for in time are not counted.
        """
        since = self._cache.evictor.before_lookup()
        found = await self._in_cache(bucket, keys)
        now_s = time.monotonic()
        cached, known, unknown = list[int](), list[int](), list[int]()
        for start, part in in_parts(keys):
            await let_others_run(start)
            for at, key in enumerate(part, start):
                if found[at] is not None:
                    cached.append(at)
                elif not self._is_lost(bucket, key):
                    (known if self._known.has(bucket, key, now_s) else unknown).append(at)
        there, is_whole = await self._lookups.each(bucket, [keys[at] for at in unknown])
        await self._remember(bucket, [keys[unknown[at]] for at in there], now_s)
        known += [unknown[at] for at in there]
        matched = [*cached, *known]
        leaving = self._cache.evictor.note_present(bucket, [keys[at] for at in matched], since, lease_s)
        if lease_s > 0:  # what has left the cache meanwhile comes again
            absent = [keys[at] for at in dict.fromkeys((*known, *(matched[at] for at in leaving)))]
            self._fetches.prefetch(bucket, absent, min(lease_s, PREFETCH_WAIT_S))
        present = np.zeros(len(keys), dtype=bool)
        present[matched] = True
        return tuple(present.tolist()), is_whole

    async def resolve(self, bucket: str, keys: Sequence[str]) -> AsyncGenerator[list[list[Extent] | None], None]:
        """The extents of the chunks that the cache has."""
        count = 0
        try:
            async with aclosing(self._cache.objects.prefixes.resolve(bucket, keys)) as parts:
                async for part in parts:
                    count += len(part)
                    yield part
        except CallerError as error:
            if error.code is not ErrorCode.NO_SUCH_BUCKET:
                raise
            yield [None] * (len(keys) - count)

    async def _in_cache(self, bucket: str, keys: Sequence[str]) -> list[list[Extent] | None]:
        """None for each key that the cache does not surely have; where the others lie is of no interest to a lookup."""
        found: list[list[Extent] | None] = []
        async with aclosing(self.resolve(bucket, keys)) as parts:
            async for part in parts:
                found += [None if extents is None else [] for extents in part]
        for index, _ in await self._doubtful(bucket, keys, found):
            found[index] = None
        return found

    async def _found(self, bucket: str, keys: Sequence[str], memory: Held) -> list[list[Extent] | None]:
        """The same at once, for a delivery that has room for the checksums."""
        try:
            found, _ = await self._cache.objects.prefixes.found(bucket, keys, memory, takes_damaged=False)
        except CallerError as error:
            if error.code is not ErrorCode.NO_SUCH_BUCKET:
                raise
            return [None] * len(keys)
        return found

    def is_cut_off(self, bucket: str) -> bool:
        """Whether upstream has not answered a lookup of CALLER in this bucket of late."""
        return self._lookups.is_cut_off(bucket)

    def forget_known(self, bucket: str, keys: Sequence[str]) -> None:
        """Upstream may have these no more."""
        self._known.forget(bucket, keys, time.monotonic())

    async def _count_before(self, keys: Sequence[str], found: Found, ends: Callable[[str], bool]) -> int:
        """How many keys stand before the first one that is not in the cache and `ends` them."""
        for start, part in in_parts(keys):
            await let_others_run(start)
            for index, key in enumerate(part, start):
                if found[index] is None and ends(key):
                    return index
        return len(keys)

    async def _remember(self, bucket: str, keys: Sequence[str], asked_s: float) -> None:
        for start, part in in_parts(keys):
            await let_others_run(start)
            self._known.add(bucket, part, asked_s)

    @property
    def generation(self) -> int:
        """The cache's."""
        return self._cache.chunks.generation

    def keep(self, extents: Sequence[Extent], since: int) -> Pins | None:
        """As the cache does; None while one of the chunks is on its way."""
        if not all(map(is_whole, extents)):
            return None
        pins = self._cache.chunks.keep(extents, since)
        return None if pins is None else _Kept(pins, hold_landed(extents))

    def read_rows(self, table: SourceTable, rows: Rows, address: int, *, past_cache: bool) -> RowFailure | None:
        """Read the cache's files."""
        return self._cache.chunks.read_rows(table, rows, address, past_cache=past_cache)

    def read_extent(self, extent: Extent, view: memoryview, start: int = 0) -> None:
        """Copy from landing memory, or read the cache's file."""
        landed = extent.arrival.landed if isinstance(extent, ComingExtent) else None
        if landed is not None and landed.is_held:
            source = landed.view[start : start + len(view)]
            np.copyto(np.frombuffer(view, dtype=np.uint8), np.frombuffer(source, dtype=np.uint8))
            return
        self._cache.chunks.read_extent(_whole(extent), view, start)

    def note_damage(self, bucket: str, key: str, extents: Sequence[Extent]) -> None:
        """Take the chunk out of the cache: the next delivery fetches it again."""
        self._cache.chunks.note_damage(bucket, key, extents)

    async def _doubtful(
        self, bucket: str, keys: Sequence[str], found: Sequence[list[Extent] | None]
    ) -> list[tuple[int, StoredObject | None]]:
        """Index and row of the objects in the cache that upstream may have others of by now: those that are no chunks.
        In a cluster also the chunks of other servers, which are not told of changes here, and those whose keys do not
        say that they are chunks, so that gateways may have others change them.
        """
        own = None if self._own is None else await self._own.are_own(bucket, keys)

        def is_others(at: int) -> bool:
            return own is not None and not own[at]

        at_all = [at for at, key in enumerate(keys) if found[at] is not None]
        doubtful = [at for at in at_all if is_others(at) or not is_chunk_key(keys[at])]
        if not doubtful:
            return []
        wanted = [keys[at] for at in doubtful]
        stored: list[StoredObject | None] = []
        for _, part in in_parts(wanted):
            stored += await self._cache.reader.threaded(partial(queries.objects, bucket=bucket, keys=part))
        return [
            (at, each)
            for at, each in zip(doubtful, stored, strict=True)
            if each is None or own is not None or not is_chunk(keys[at], each.info.attributes)
        ]

    async def _require_current(self, bucket: str, keys: Sequence[str], found: list[list[Extent] | None]) -> None:
        """Compare the ETags of objects that are no chunks with upstream, and forget those that differ."""
        doubtful = await self._doubtful(bucket, keys, found)
        etags = {keys[at]: stored.info.etag for at, stored in doubtful if stored is not None}
        stale = await self._comparisons.stale(bucket, etags)
        versions = {keys[at]: stored.version for at, stored in doubtful if stored is not None and keys[at] in stale}
        if versions:
            await self._forget(bucket, versions)
        for at, stored in doubtful:
            if stored is None or keys[at] in stale:
                found[at] = None

    async def _stop_stale(self, bucket: str, keys: Sequence[str]) -> None:
        """Stop the fetches of objects that are no chunks and that upstream has others of by now."""
        for key in keys:
            info = None if is_chunk_key(key) else await self._fetches.info(bucket, key)
            if info is None or is_chunk(key, info.attributes):
                continue
            if not await self._comparisons.is_current(bucket, key, info.etag):
                await self._fetches.stop(bucket, [key])


@dataclass(frozen=True, slots=True)
class _Kept:
    """The places of some extents in files, and what of them is still in landing memory."""

    pins: Pins
    landed: list[Landed]

    def release(self) -> None:
        """Give both back."""
        self.pins.release()
        for each in self.landed:
            each.release()


def _require_readable(extents: Sequence[Extent]) -> None:
    """Raises the error of a chunk that came as a whole, left the memory, and did not get into its file."""
    for extent in extents:
        if isinstance(extent, ComingExtent) and extent.arrival.address is None:
            failure = extent.arrival.failure
            if failure is not None and extent.arrival.is_whole:
                raise failure


def _whole(extent: Extent) -> Extent:
    """The extent with its checksums, which a ComingExtent has in its arrival."""
    if not isinstance(extent, ComingExtent):
        return extent
    return Extent(
        file_id=extent.file_id,
        offset=extent.offset,
        nbytes=extent.nbytes,
        checksums=bytes(extent.arrival.words),
        object_offset=extent.object_offset,
        content_class=extent.content_class,
    )
