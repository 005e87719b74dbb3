"""The DRAM tier: chunks that are asked for again and again, in huge pages. Bytes are proved once, on their way in.

Used from one event loop; filling runs in a thread of its own, behind every delivery.
"""

from __future__ import annotations

import asyncio
import logging
import mmap
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager

from adapters.threads import finished, in_parts, others
from storage_server.memory_area import Area, PrivateArea
from storage_server.store.extents import CorruptExtentError, Extent, ExtentFiles, PinSet
from storage_server.tiers.residency import Residency

ASKED_MAX = 262_144
_log = logging.getLogger(__name__)


class DramTier:
    """`nbytes` of memory for extents of `files`; it is taken from the system as it is first used. With `make_area` it
    is not made here.
    """

    def __init__(self, nbytes: int, files: ExtentFiles, make_area: Callable[[int], Area] = PrivateArea) -> None:
        self.nbytes = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self._files = files
        self._residency = Residency(self.nbytes, ASKED_MAX)
        self._fillers = ThreadPoolExecutor(1, "dram-fill")
        self._filling: set[asyncio.Task[None]] = set()
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

    @asynccontextmanager
    async def lent(self, extents: Sequence[Extent]) -> AsyncIterator[list[int | None]]:
        """The address of each extent that is here, None for the others, until the block ends. What had to be read then
        may come in.
        """
        if not self.nbytes:
            yield [None] * len(extents)
            return
        now_s, offsets = time.monotonic(), list[int | None]()
        try:
            for start, part in in_parts(extents):
                await others(start)
                offsets += self._residency.pin(part, now_s)
            yield [None if offset is None else self.address + offset for offset in offsets]
        finally:
            if offsets:
                self._track(self._give_back(extents[: len(offsets)], offsets, self._files.punch_count))

    async def close(self) -> None:
        """Finish what is being filled, take in no more."""
        self._closed = True
        for task in list(self._filling):
            await finished(task)
        self._fillers.shutdown()

    def _track(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._filling.add(task)
        task.add_done_callback(self._filling.discard)

    async def _give_back(self, extents: Sequence[Extent], offsets: Sequence[int | None], looked_at: int) -> None:
        """End what `lent` began. What was not here comes in where it is asked for often enough."""
        now_s = time.monotonic()
        for start, asked in in_parts(extents):
            await others(start)
            lent = offsets[start : start + len(asked)]
            self._residency.unpin(asked, lent)
            missing = [extent for extent, offset in zip(asked, lent, strict=True) if offset is None]
            if missing and not self._closed:
                self._take_in(missing, now_s, looked_at)

    def _take_in(self, missing: Sequence[Extent], now_s: float, looked_at: int) -> None:
        coming = self._residency.ask(missing, now_s)
        if not coming:
            return
        pins = PinSet(self._files)
        extents = [extent for extent, _ in coming]
        if not pins.keep(extents) or self._files.is_punched(extents, looked_at):  # deleted meanwhile
            pins.release()
            for extent, _ in coming:
                self._residency.dropped(extent)
            return
        self._track(self._fill(coming, pins))

    async def _fill(self, coming: Sequence[tuple[Extent, int]], pins: PinSet) -> None:
        loop = asyncio.get_running_loop()
        left = deque(coming)
        try:
            while left and not self._closed:
                extent, offset = left[0]
                is_good = await loop.run_in_executor(self._fillers, self._read, extent, offset)
                left.popleft()
                if is_good:
                    self._residency.filled(extent)
                else:
                    self._residency.dropped(extent)
        finally:
            for extent, _ in left:
                self._residency.dropped(extent)
            pins.release()

    def _read(self, extent: Extent, offset: int) -> bool:
        try:
            self._files.read_into(extent, 0, self._view[offset : offset + extent.nbytes])
        except (CorruptExtentError, OSError) as error:
            _log.warning("an extent was not taken into memory: %s", error)
            return False
        return True
