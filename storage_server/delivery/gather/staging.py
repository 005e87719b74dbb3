"""Staging memory: one fixed pool, cut into slots of one payload each. It bounds the memory of every delivery.

An access key holds at most half of a pool, unless the pool is made otherwise. A free slot goes to the waiting key that
holds the fewest slots, and within the key to the delivery that came first. Example: A holds 3 slots, B holds 1, both
wait: B gets the next slot. A `SlotWindow` limits the slots of one delivery.
"""

from __future__ import annotations

import asyncio
import mmap
from collections import Counter, deque

import numpy as np

from objectcache.adapters.memory_area import Area, PrivateArea

KEY_BOUND_FROM = 4
"""In a pool with fewer slots than this, one access key may hold all of them."""


class Slot:
    """One payload's memory; `release` gives it back exactly once."""

    __slots__ = ("_window", "address", "last_key", "view")

    def __init__(self, view: memoryview, address: int) -> None:
        self.view = view
        self.address = address
        self.last_key: str | None = None
        """The access key whose bytes may still lie in the slot."""
        self._window: SlotWindow | None = None

    def release(self) -> None:
        """Give the slot back to its window and pool. Later calls do nothing."""
        window, self._window = self._window, None
        if window is not None:
            window._give_back(self)

    def wipe(self) -> None:
        """Overwrite the slot with zeros, so that no key's bytes lie in it."""
        np.frombuffer(self.view, dtype=np.uint8).fill(0)
        self.last_key = None

    def _lend(self, window: SlotWindow) -> Slot:
        self._window = window
        return self


def stride_of(slot_bytes: int) -> int:
    """The bytes that a slot takes in its area: `slot_bytes` rounded up to whole pages."""
    return -(-slot_bytes // mmap.PAGESIZE) * mmap.PAGESIZE


class StagingPool:
    """`slot_count` page-aligned slots of `slot_bytes` each, from `offset` of an area, or in private memory. Used from
    one event loop. With `wipes` a slot is wiped when it passes from one access key to another, because others can read
    the area.
    """

    def __init__(
        self,
        slot_bytes: int,
        slot_count: int,
        area: Area | None = None,
        offset: int = 0,
        *,
        key_slots_max: int | None = None,
        wipes: bool = False,
    ) -> None:
        stride = stride_of(slot_bytes)
        self.nbytes = stride * slot_count
        self._area = area = area or PrivateArea(self.nbytes)
        self._wipes = wipes
        self.slot_bytes = slot_bytes
        self.slot_count = slot_count
        half = slot_count // 2 if slot_count >= KEY_BOUND_FROM else slot_count
        self._key_slots_max = key_slots_max or half
        view = memoryview(area.map)
        starts = range(offset, offset + self.nbytes, stride)
        self._free = deque(Slot(view[start : start + slot_bytes], area.address + start) for start in starts)
        self._held: Counter[str] = Counter()
        self._waiters: dict[str, deque[asyncio.Future[Slot]]] = {}

    @property
    def free_count(self) -> int:
        """Slots nobody holds."""
        return len(self._free)

    @property
    def key_slots_max(self) -> int:
        """The most slots that one access key may hold at once."""
        return self._key_slots_max

    def window(self, access_key: str, slots_max: int) -> SlotWindow:
        """A delivery's share: at most `slots_max` slots at once, in the name of `access_key`."""
        return SlotWindow(self, access_key, slots_max)

    async def _take(self, access_key: str) -> Slot:
        waiter: asyncio.Future[Slot] = asyncio.get_running_loop().create_future()
        self._waiters.setdefault(access_key, deque()).append(waiter)
        self._serve()
        try:
            return await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled():
                self._put(access_key, waiter.result())
            raise

    def _put(self, access_key: str, slot: Slot) -> None:
        self._held[access_key] -= 1
        if not self._held[access_key]:
            del self._held[access_key]
        self._free.append(slot)
        self._serve()

    def _serve(self) -> None:
        """Give free slots to waiting deliveries whose key is below its bound."""
        while self._free:
            access_key = self._next_key()
            if access_key is None:
                return
            waiting = self._waiters[access_key]
            waiter = waiting.popleft()
            if not waiting:
                del self._waiters[access_key]
            if waiter.done():
                continue
            self._held[access_key] += 1
            waiter.set_result(self._slot_for(access_key))

    def _next_key(self) -> str | None:
        """The waiting key that holds the fewest slots and is below its bound; None when there is none."""
        waiting = [key for key in self._waiters if self._held[key] < self._key_slots_max]
        return min(waiting, key=lambda key: self._held[key]) if waiting else None

    def _slot_for(self, access_key: str) -> Slot:
        """A free slot for the key. The slot used last is the likeliest to be in a cache. Where a change of key costs a
        wipe, a slot that this key used before is better.
        """
        if not self._wipes:
            return self._free.pop()
        own = next((slot for slot in reversed(self._free) if slot.last_key in (access_key, None)), None)
        if own is None:
            own = self._free[-1]
            own.wipe()
        self._free.remove(own)
        own.last_key = access_key
        return own


class SlotWindow:
    """The slots of the pool that one delivery holds."""

    def __init__(self, pool: StagingPool, access_key: str, slots_max: int) -> None:
        self._pool = pool
        self._access_key = access_key
        self._permits = asyncio.Semaphore(slots_max)

    async def take(self) -> Slot:
        """A free slot, waiting for this window's limit and then for the pool."""
        await self._permits.acquire()
        try:
            return (await self._pool._take(self._access_key))._lend(self)
        except BaseException:
            self._permits.release()
            raise

    def _give_back(self, slot: Slot) -> None:
        self._permits.release()
        self._pool._put(self._access_key, slot)
