"""The DRAM tier: chunks that are expected to be asked for again, in huge pages. Bytes are proved once, when they are
copied into the tier.

A keeper (storage_server.cache.keeping) decides what is in memory, and in which form. A tier that takes landings asks it
when a delivery begins. An extent that is to come gets its memory at once, and the rows that the delivery reads past the
page cache are read into that memory. Any other tier asks when a delivery has ended. Bytes that are still missing are
read behind the answer.

Used from one event loop. One thread asks the policy what is to be in memory, another fills the tier. That one yields to
deliveries, and leaves most of the host's cores to others.
"""

from __future__ import annotations

import asyncio
import logging
import mmap
import os
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, TypeVar

import numpy as np

from objectcache.adapters.memory_area import Area, PrivateArea
from objectcache.adapters.threads import finished, in_parts, let_others_run
from storage_server.cache.exact_keeper import ExactKeeper
from storage_server.cache.keeping import Copy, Keeper, TierMemory
from storage_server.cache.rules.landed import LandedUnits
from storage_server.cache.rules.lent import Lent
from storage_server.cache.rules.pace import pause_s
from storage_server.cache.rules.residency import Key, Residency, key_of
from storage_server.delivery.gather.coming import is_whole
from storage_server.planning.extent import Extent
from storage_server.planning.forms import Encoded, Reading, Takes
from storage_server.planning.rows import Row, Rows
from storage_server.planning.source import ChunkSource, Pins

WAITING_MAX = 256
_T = TypeVar("_T")
_log = logging.getLogger(__name__)


class DramTier:
    """`nbytes` of memory for extents of `source`, of which a keeper that `keep` makes says which are there. The system
    provides a page at its first use. `make_area` may give memory that was made elsewhere. With `takes_landings` the
    keeper has exact chunks.
    """

    def __init__(
        self,
        nbytes: int,
        source: ChunkSource,
        keep: Callable[[TierMemory], Keeper] = ExactKeeper,
        make_area: Callable[[int], Area] = PrivateArea,
        *,
        takes_landings: bool = False,
    ) -> None:
        self.nbytes = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self._source = source
        self.residency = Residency(self.nbytes)
        """The extents in memory, and the counts of them."""
        self._books = ThreadPoolExecutor(1, "dram-books")
        self._fillers = ThreadPoolExecutor(1, "dram-fill")
        self._core_count = len(os.sched_getaffinity(0))
        self._deciding = asyncio.Lock()
        self._waiting_count = 0
        self._working: set[asyncio.Task[Any]] = set()
        self._closed = False
        self._landed = LandedUnits(self.nbytes) if takes_landings and self.nbytes else None
        self.address = 0
        view = memoryview(b"")
        if self.nbytes:
            self._area = make_area(self.nbytes)
            view = memoryview(self._area.map)
            self.address = self._area.address
        self.keeper = keep(TierMemory(view, self.residency, source, self._books))

    def has(self, extents: Sequence[Extent], reader: Takes | None) -> bool:
        """Whether all these extents are in memory in forms that the reader takes."""
        return bool(extents) and all(self.residency.has(extent, reader) for extent in extents)

    @asynccontextmanager
    async def lent(self, extents: Sequence[Extent], reading: Reading | None = None) -> AsyncIterator[Lent]:
        """Lend the extents of a prefix, from the first on, until the block ends: exact ones, and encoded ones that
        `reading` takes. After the block those that are not in memory may be copied into the tier.
        """
        if not self.nbytes:
            yield Lent([None] * len(extents))
            return
        offsets: list[int | None] = []
        deciding: asyncio.Task[list[Copy]] | None = None
        landings: Rows | None = None
        try:
            for start, part in in_parts(extents):
                await let_others_run(start)
                offsets += self.residency.pin(part, reading)
            if self._landed is not None and None in offsets and all(map(is_whole, extents)):
                landings = np.zeros(len(extents), dtype=np.int64)
                deciding = self._track(self._coming(extents, landings, reading))
            addresses = [None if offset is None else self.address + offset for offset in offsets]
            yield Lent(addresses, landings, None if reading is None else self._forms(extents, offsets))
        finally:
            if offsets:
                generation = self._source.generation
                self._track(self._give_back(extents[: len(offsets)], offsets, generation, deciding, reading))

    def note_landed(self, rows: Rows) -> None:
        """Note that these rows of a payload have been read: those that have a landing lie there, proved. May run in any
        thread.
        """
        if self._landed is not None:
            landed = rows[rows[:, Row.LANDING] > 0]
            self._landed.add(landed[:, Row.LANDING] - self.address, landed[:, Row.NBYTES])

    async def close(self) -> None:
        """Finish the copies under way and begin no more."""
        self._closed = True
        self.keeper.stop()
        for task in list(self._working):
            await finished(task)
        self._books.shutdown()
        self._fillers.shutdown()
        self.keeper.close()

    def _track(self, work: Coroutine[None, None, _T]) -> asyncio.Task[_T]:
        task = asyncio.create_task(work)
        self._working.add(task)
        task.add_done_callback(self._working.discard)
        return task

    async def _give_back(
        self,
        extents: Sequence[Extent],
        offsets: Sequence[int | None],
        looked_at: int,
        deciding: asyncio.Task[list[Copy]] | None,
        reading: Reading | None,
    ) -> None:
        """End what `lent` began. The policy is told of the use now, unless `deciding` has told it already."""
        for start, asked in in_parts(extents):
            await let_others_run(start)
            self.residency.unpin(asked, offsets[start : start + len(asked)])
        coming = await (self._coming(extents, None, reading) if deciding is None else deciding)
        left = deque(coming)
        try:
            for start, part in in_parts(coming):
                await let_others_run(start)
                for _ in part:
                    left.popleft()
                await self._take_in(part, looked_at)
        finally:
            if left:
                await self._dropped(left)

    def _forms(self, extents: Sequence[Extent], offsets: Sequence[int | None]) -> list[Encoded | None] | None:
        found = [
            None if offset is None else self.residency.form(extent)
            for extent, offset in zip(extents, offsets, strict=True)
        ]
        return found if any(form is not None for form in found) else None

    async def _coming(self, extents: Sequence[Extent], landings: Rows | None, reading: Reading | None) -> list[Copy]:
        """Tell the policy of a use of these extents. Returns those that are to come into memory, each with its offset,
        and fills their addresses in into `landings`. Where too many wait to tell the policy, this use is forgotten.
        """
        if self._closed or self._waiting_count >= WAITING_MAX:
            return []
        self._waiting_count += 1
        try:
            async with self._deciding:  # what one decision admits, the next one may evict: in this order
                coming = await self.keeper.decide(await self._whole(extents), reading)
        finally:
            self._waiting_count -= 1
        if self._landed is not None:
            for extent, offset in coming:
                self._landed.clear(offset, extent.nbytes)
        if landings is not None and coming:
            places = {key_of(extent): self.address + offset for extent, offset in coming}
            for start, part in in_parts(extents):
                await let_others_run(start)
                landings[start : start + len(part)] = [places.get(key_of(extent), 0) for extent in part]
        return coming

    async def _whole(self, extents: Sequence[Extent]) -> dict[Key, Extent]:
        """Those that are there: of a delivery that was broken off some may not have come."""
        known: dict[Key, Extent] = {}
        for start, part in in_parts(extents):
            await let_others_run(start)
            known |= {key_of(extent): extent for extent in part if is_whole(extent)}
        return known

    async def _take_in(self, coming: Sequence[Copy], looked_at: int) -> None:
        pins = self._source.keep([extent for extent, _ in coming], looked_at)
        if pins is None:  # deleted meanwhile
            await self._dropped(coming)
        else:
            await self._copy_in(coming, pins)

    async def _copy_in(self, coming: Sequence[Copy], pins: Pins) -> None:
        loop = asyncio.get_running_loop()
        left, bad = deque(coming), list[Copy]()
        try:
            while left and not self._closed:
                extent, offset = left[0]
                missing = [(0, extent.nbytes)] if self._landed is None else self._landed.missing(offset, extent.nbytes)
                is_good, used_s = True, 0.0
                if missing:
                    is_good, used_s = await loop.run_in_executor(
                        self._fillers, partial(_timed, self.keeper.read, extent, offset, missing)
                    )
                taken = left.popleft()
                if is_good:
                    self.residency.filled(extent, self.keeper.form_of_copy(extent, offset))
                else:
                    bad.append(taken)
                if left and used_s:
                    await asyncio.sleep(pause_s(used_s, self._core_count))
        finally:
            pins.release()
            await self._dropped([*bad, *left])

    async def _dropped(self, coming: Sequence[Copy]) -> None:
        """Give these up, while no decision is under way: such a decision might admit one of them again, and the policy
        would forget it afterwards.
        """
        if not coming:
            return
        async with self._deciding:
            self.keeper.drop(coming)
            for extent, _ in coming:
                self.residency.dropped(extent)
            await self.keeper.forget([key_of(extent) for extent, _ in coming])


def _timed(work: Callable[..., _T], *arguments: object) -> tuple[_T, float]:
    """Its result, and for how long this thread has used a processor."""
    began_s = time.thread_time()
    return work(*arguments), time.thread_time() - began_s
