"""The DRAM tier: chunks that are expected to be asked for again, in huge pages. Bytes are proved once, when they are
copied into the tier.

Used from one event loop. One thread asks the policy what is to be in memory, another fills the tier and yields to
deliveries.
"""

from __future__ import annotations

import asyncio
import logging
import mmap
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from typing import TypeVar, cast

from adapters.threads import finished, in_parts, others, to_end
from storage_server.eviction.choice import POLICIES, Eviction
from storage_server.eviction.policy import EvictionPolicy, Request
from storage_server.gather.coming import is_whole
from storage_server.gather.source import ChunkSource, Pins
from storage_server.memory_area import Area, PrivateArea
from storage_server.planning.extent import ALIGNMENT_BYTES, CorruptExtentError, Extent, aligned
from storage_server.tiers.residency import Key, Residency, key_of

WAITING_MAX = 256
_T = TypeVar("_T")
_log = logging.getLogger(__name__)


class DramTier:
    """`nbytes` of memory for extents of `source`; `eviction` says which. The system provides a page at its first use.
    `make_area` may give memory that was made elsewhere.
    """

    def __init__(
        self,
        nbytes: int,
        source: ChunkSource,
        make_area: Callable[[int], Area] = PrivateArea,
        eviction: Eviction = Eviction.REUSE_VALUE,
    ) -> None:
        self.nbytes = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self._source = source
        self._residency = Residency(self.nbytes)
        self._policy = POLICIES[eviction](self.nbytes)
        self._books = ThreadPoolExecutor(1, "dram-books")
        self._fillers = ThreadPoolExecutor(1, "dram-fill")
        self._deciding = asyncio.Lock()
        self._waiting_count = 0
        self._working: set[asyncio.Task[None]] = set()
        self._closed = False
        self.address = 0
        if self.nbytes:
            self._area = make_area(self.nbytes)
            self._view = memoryview(self._area.map)
            self.address = self._area.address

    @property
    def resident_count(self) -> int:
        """Extents in memory."""
        return self._residency.resident_count

    @property
    def resident_bytes(self) -> int:
        """The memory in bytes that extents lie in, or are being copied into."""
        return self._residency.used_bytes

    @property
    def hit_count(self) -> int:
        """How many extents deliveries found in memory."""
        return self._residency.hit_count

    @property
    def missed_count(self) -> int:
        """How many extents deliveries had to read."""
        return self._residency.missed_count

    @property
    def evicted_count(self) -> int:
        """How many extents were evicted for others."""
        return self._residency.evicted_count

    @asynccontextmanager
    async def lent(self, extents: Sequence[Extent]) -> AsyncIterator[list[int | None]]:
        """Lend the extents of a prefix, from the first on, until the block ends: the address of each resident extent,
        None for the others. After the block the others may be copied into the tier.
        """
        if not self.nbytes:
            yield [None] * len(extents)
            return
        offsets: list[int | None] = []
        try:
            for start, part in in_parts(extents):
                await others(start)
                offsets += self._residency.pin(part)
            yield [None if offset is None else self.address + offset for offset in offsets]
        finally:
            if offsets:
                self._track(self._give_back(extents[: len(offsets)], offsets, self._source.generation))

    async def close(self) -> None:
        """Finish the copies under way and begin no more."""
        self._closed = True
        for task in list(self._working):
            await finished(task)
        self._books.shutdown()
        self._fillers.shutdown()

    def _track(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._working.add(task)
        task.add_done_callback(self._working.discard)

    async def _give_back(self, extents: Sequence[Extent], offsets: Sequence[int | None], looked_at: int) -> None:
        """End what `lent` began, and tell the policy. Where too many wait to tell it, this use is forgotten."""
        for start, asked in in_parts(extents):
            await others(start)
            self._residency.unpin(asked, offsets[start : start + len(asked)])
        if self._closed or self._waiting_count >= WAITING_MAX:
            return
        self._waiting_count += 1
        try:
            async with self._deciding:  # what one decision admits, the next one may evict: in this order
                coming = await self._decided(extents)
        finally:
            self._waiting_count -= 1
        left = deque(coming)
        try:
            for start, part in in_parts(coming):
                await others(start)
                for _ in part:
                    left.popleft()
                await self._take_in(part, looked_at)
        finally:
            if left:
                await self._dropped(left)

    async def _decided(self, extents: Sequence[Extent]) -> list[tuple[Extent, int]]:
        """Ask the policy what is to be in memory after a use of these extents, and carry it out but for the copying. Of
        a delivery that was broken off some may not have come.
        """
        known: dict[Key, Extent] = {}
        for start, part in in_parts(extents):
            await others(start)
            known |= {key_of(extent): extent for extent in part if is_whole(extent)}
        admitted, evicted = await self._in_books(partial(_requested, self._policy, known))
        coming: list[tuple[Extent, int]] = []
        refused: list[Key] = []
        for start, keys in in_parts(evicted):
            await others(start)
            self._residency.evict(keys)
        for start, keys in in_parts(admitted):
            await others(start)
            come, refuse = self._residency.admit(keys, known)
            coming += come
            refused += refuse
        await self._forgotten(refused)
        return coming

    async def _forgotten(self, keys: Sequence[Key]) -> None:
        """Tell the policy that these are not in memory after all."""
        if keys:
            await self._in_books(lambda: [self._policy.remove(key) for key in keys])

    async def _in_books(self, call: Callable[[], _T]) -> _T:
        return await to_end(asyncio.get_running_loop().run_in_executor(self._books, call))

    async def _take_in(self, coming: Sequence[tuple[Extent, int]], looked_at: int) -> None:
        pins = self._source.keep([extent for extent, _ in coming], looked_at)
        if pins is None:  # deleted meanwhile
            await self._dropped(coming)
        else:
            await self._copy_in(coming, pins)

    async def _copy_in(self, coming: Sequence[tuple[Extent, int]], pins: Pins) -> None:
        loop = asyncio.get_running_loop()
        left, bad = deque(coming), list[tuple[Extent, int]]()
        try:
            while left and not self._closed:
                extent, offset = left[0]
                is_good = await loop.run_in_executor(self._fillers, self._read, extent, offset)
                taken = left.popleft()
                if is_good:
                    self._residency.filled(extent)
                else:
                    bad.append(taken)
        finally:
            pins.release()
            await self._dropped([*bad, *left])

    async def _dropped(self, coming: Sequence[tuple[Extent, int]]) -> None:
        for extent, _ in coming:
            self._residency.dropped(extent)
        await self._forgotten([key_of(extent) for extent, _ in coming])

    def _read(self, extent: Extent, offset: int) -> bool:
        try:
            self._source.read_extent(extent, self._view[offset : offset + extent.nbytes])
        except (CorruptExtentError, OSError) as error:
            _log.warning("an extent was not taken into memory: %s", error)
            return False
        return True


def _requested(policy: EvictionPolicy, extents: Mapping[Key, Extent]) -> tuple[list[Key], list[Key]]:
    """What comes, parents before children, and what goes, after this use."""
    sizes = [max(ALIGNMENT_BYTES, aligned(extent.nbytes)) for extent in extents.values()]
    change = policy.request(Request(time.monotonic(), list(extents), sizes))
    return cast("list[Key]", list(change.admitted)), cast("list[Key]", list(change.evicted))
