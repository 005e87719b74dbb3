"""Staging memory: one fixed pool, cut into slots of one payload each. It bounds the memory of every delivery.

Waiting is first come, first served. A `Window` limits what one delivery may hold of the pool.
"""

from __future__ import annotations

import asyncio
import mmap
from collections import deque

import numpy as np


class Slot:
    """One payload's memory; `release` gives it back exactly once."""

    __slots__ = ("_window", "address", "view")

    def __init__(self, view: memoryview, address: int) -> None:
        self.view = view
        self.address = address
        self._window: Window | None = None

    def release(self) -> None:
        """Give the slot back to its window and pool; later calls do nothing."""
        window, self._window = self._window, None
        if window is not None:
            window._give_back(self)

    def _lend(self, window: Window) -> Slot:
        self._window = window
        return self


class StagingPool:
    """`slot_count` slots of `slot_bytes`, page-aligned and prefaulted by first use. Used from one event loop."""

    def __init__(self, slot_bytes: int, slot_count: int) -> None:
        stride = -(-slot_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        # shared anonymous memory, the default, gets no huge pages
        self._map = mmap.mmap(-1, stride * slot_count, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self.nbytes = stride * slot_count
        self.slot_bytes = slot_bytes
        self.slot_count = slot_count
        self.address = int(np.frombuffer(self._map, dtype=np.uint8).ctypes.data)
        view = memoryview(self._map)
        starts = range(0, self.nbytes, stride)
        self._free = deque(Slot(view[start : start + slot_bytes], self.address + start) for start in starts)
        self._waiters: deque[asyncio.Future[Slot]] = deque()

    @property
    def free_count(self) -> int:
        """Slots nobody holds."""
        return len(self._free)

    def window(self, slots_max: int) -> Window:
        """A delivery's share: at most `slots_max` slots at once."""
        return Window(self, slots_max)

    async def _take(self) -> Slot:
        if self._free and not self._waiters:
            return self._free.pop()  # the slot used last is the likeliest to be in a cache and in memory at all
        waiter: asyncio.Future[Slot] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        try:
            return await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled():
                self._put(waiter.result())
            raise

    def _put(self, slot: Slot) -> None:
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(slot)
                return
        self._free.append(slot)


class Window:
    """What one delivery holds of the pool."""

    def __init__(self, pool: StagingPool, slots_max: int) -> None:
        self._pool = pool
        self._permits = asyncio.Semaphore(slots_max)

    async def take(self) -> Slot:
        """A free slot, waiting for this window's limit and then for the pool."""
        await self._permits.acquire()
        try:
            return (await self._pool._take())._lend(self)
        except BaseException:
            self._permits.release()
            raise

    def _give_back(self, slot: Slot) -> None:
        self._permits.release()
        self._pool._put(slot)
