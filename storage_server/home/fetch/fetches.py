"""Chunks on their way from upstream into the cache. A fetch belongs to the cache: the one that asked for it first may
go, and the fetch goes on for the others.

A chunk comes into landing memory, where deliveries read it, and is written into its file behind them: writing files
takes more of the processor than all the rest. Where the landing memory has no room, it comes straight into its file.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from functools import partial

from descriptors.errors import ErrorCode, ObjectCacheError, ServerError
from descriptors.layout import ChunkLayout
from descriptors.objects import ObjectInfo
from objectcache.adapters.caller import CALLER
from objectcache.adapters.threads import in_parts, let_others_run
from storage_server.delivery.gather.landing import Landing
from storage_server.home.embedded import EmbeddedStore
from storage_server.home.fetch.fetch import Fetch, Ways
from storage_server.home.further_tier import FurtherTier
from storage_server.home.key_locks import KeyLocks, Name
from storage_server.home.s3.copied_tags import CopiedTags
from storage_server.home.s3.turns import Turns
from storage_server.home.service import HomeObjects
from storage_server.kernel.data.io_threads import IoThreads
from storage_server.kernel.data.replaceable_threads import SPARE_THREADS
from storage_server.planning.extent import Extent
from storage_server.planning.fair_shares import FairShares

FETCHES_MAX = 16_384
FETCHES_FRACTION = 0.5
"""One bucket has no more than this fraction of all fetches and prefetches, and one caller of what others leave: its
reads must not stop those of others.
"""
PREFETCHES_MAX = 1024
PREFETCH_FRACTION = 0.25
"""Prefetches take this fraction of the connections for chunks."""
IO_THREADS = 2


class Fetches:
    """The fetches under way, one for each chunk, into `cache`. Used on one event loop."""

    def __init__(
        self,
        objects: HomeObjects,
        cache: EmbeddedStore,
        locks: KeyLocks,
        requests_max: int,
        landing: Landing,
        tiers: Sequence[FurtherTier] = (),
    ) -> None:
        self._requests_max = requests_max
        self._turns = Turns(requests_max)
        self.landing = landing
        self._io = IoThreads(IO_THREADS, SPARE_THREADS)
        self._tags = CopiedTags(objects, cache, locks)
        self._ways = Ways(
            objects=objects,
            cache=cache,
            locks=locks,
            turns=self._turns,
            landing=landing,
            io=self._io,
            tiers=tiers,
            tags=self._tags,
        )
        self._running: dict[Name, Fetch] = {}
        self._fetching = FairShares(FETCHES_MAX, FETCHES_FRACTION)
        self._prefetching = FairShares(PREFETCHES_MAX, FETCHES_FRACTION)
        self._prefetch_slots = asyncio.Semaphore(max(1, int(PREFETCH_FRACTION * requests_max)))
        self.fetched_bytes = 0
        """The bytes of chunks that have come as a whole since the start."""

    @property
    def running_count(self) -> int:
        """Chunks on their way."""
        return len(self._running)

    @property
    def passed_bytes(self) -> int:
        """The bytes of chunks that found no room in the cache, as often as they were read, since the start."""
        return self._ways.passed_bytes

    @property
    def landed_bytes(self) -> int:
        """The memory in bytes that chunks lie in until they are written into files."""
        return self.landing.used_bytes

    async def begin(
        self, bucket: str, keys: Sequence[str], layout: ChunkLayout, *, keeps: bool = True
    ) -> list[Extent | None]:
        """The extents of these chunks, on their way, when upstream has begun to answer; None where upstream has none.
        An object of another size has an extent of its size that cannot be read, a chunk without room a PassingExtent.
        Chunks that are on their way already
        are joined. Where it does not keep them, others pass. Raises ServerError(SlowDown).
        """
        waves = -(-(len(keys) + self._fetching.held) // self._requests_max)
        fetches: list[Fetch] = []
        for start, part in in_parts(keys):
            await let_others_run(start)
            fetches += [
                self._fetch(bucket, key, at, layout, waves=waves, keeps=keeps) for at, key in enumerate(part, start)
            ]
        return [await asyncio.shield(fetch.begun) for fetch in fetches]

    async def info(self, bucket: str, key: str) -> ObjectInfo | None:
        """Upstream's description of a chunk that is on its way; None where none is, or it will not come."""
        fetch = self._running.get((bucket, key))
        if fetch is None:
            return None
        try:
            await asyncio.shield(fetch.begun)
        except ObjectCacheError:
            return None
        return fetch.info

    def prefetch(self, bucket: str, keys: Sequence[str], wait_s: float) -> None:
        """Begin to read these chunks, as far as there is room for it. A chunk that is still on its way after `wait_s`,
        and that nobody has asked for, is given up.
        """
        begun = set[Fetch]()
        for key in keys:
            if self._prefetching.left(bucket, CALLER.get()) < 1 or self._is_full(bucket):
                break
            if (bucket, key) not in self._running:
                fetch = self._begun(bucket, key, 0, None, waves=1)
                begun.add(fetch)
                fetch.task.add_done_callback(partial(_forget, begun, fetch))  # not kept until `wait_s` are over
        if begun:
            asyncio.get_running_loop().call_later(wait_s, _give_up, begun)

    async def stop(self, bucket: str, keys: Sequence[str]) -> None:
        """Stop the fetches of these chunks, and return when they have ended."""
        names = [(bucket, key) for key in keys]
        await _ended([self._running[name].task for name in names if name in self._running])

    async def stop_others(self, bucket: str, shown: Mapping[str, str | None]) -> None:
        """Stop the fetches of these keys that bring another object than the one of this ETag."""
        stale = []
        for key, etag in shown.items():
            fetch = self._running.get((bucket, key))
            if fetch is not None and fetch.info is not None and fetch.info.etag != etag:
                stale.append(key)
        await self.stop(bucket, stale)

    async def close(self) -> None:
        """Stop every fetch."""
        await _ended([fetch.task for fetch in self._running.values()])
        await self._tags.close()
        self._io.close()

    def _fetch(self, bucket: str, key: str, index: int, layout: ChunkLayout, *, waves: int, keeps: bool) -> Fetch:
        running = self._running.get((bucket, key))
        if running is not None and (running.layout is not None or running.has_begun):
            running.is_wanted = True
            return running
        if running is not None:  # a prefetch that has not begun: this one is more urgent
            running.task.cancel()
        if self._is_full(bucket):
            raise ServerError(ErrorCode.SLOW_DOWN, "too many chunks are on their way", retryable=True)
        return self._begun(bucket, key, index, layout, waves=waves, keeps=keeps)

    def _is_full(self, bucket: str) -> bool:
        return self._fetching.left(bucket, CALLER.get()) < 1

    def _begun(
        self,
        bucket: str,
        key: str,
        index: int,
        layout: ChunkLayout | None,
        *,
        waves: int,
        keeps: bool = True,
    ) -> Fetch:
        counted, caller = [self._fetching] + [self._prefetching] * (layout is None), CALLER.get()
        for shares in counted:
            shares.take(bucket, caller, 1)

        def on_come() -> None:
            """A chunk that has come, and is still written into its file, counts no more."""
            while counted:
                counted.pop().give_back(bucket, caller, 1)

        fetch = self._running[bucket, key] = Fetch(
            ways=self._ways,
            bucket=bucket,
            key=key,
            index=index,
            layout=layout,
            prefetch_slots=self._prefetch_slots,
            on_come=on_come,
            waves=waves,
            keeps=keeps,
        )
        fetch.task.add_done_callback(lambda _: on_come())
        fetch.task.add_done_callback(lambda _: self._ended(fetch, (bucket, key)))
        return fetch

    def _ended(self, fetch: Fetch, name: Name) -> None:
        if self._running.get(name) is fetch:
            del self._running[name]
        if not fetch.begun.done():  # it was stopped before its first step
            fetch.begun.set_exception(ServerError(ErrorCode.SLOW_DOWN, "the chunk has changed", retryable=True))
        self.fetched_bytes += fetch.fetched_bytes


def _forget(fetches: set[Fetch], fetch: Fetch, _: asyncio.Task[None]) -> None:
    fetches.discard(fetch)


def _give_up(fetches: Collection[Fetch]) -> None:
    for fetch in fetches:
        if not fetch.is_wanted:
            fetch.task.cancel()


async def _ended(tasks: Sequence[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks)
