"""A Mooncake Store that was joined, played in this process: its calls, and ways in which they go wrong."""

from __future__ import annotations

import asyncio
import ctypes
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

NOT_FOUND, NO_MASTER, NO_ROOM = -704, -900, -200
Spans = Sequence[tuple[int, int]]


class PlayedMooncake:
    """`fails` is the code of every call, if there is one; `corrupts` changes a byte of what is read; while `held`,
    reads and writes wait. Several servers may share it.
    """

    def __init__(self) -> None:
        self.stored: dict[str, bytes] = {}
        self.fails = 0
        self.corrupts = False
        self.capacity_bytes = 1 << 30
        self.is_running = True
        self.has_ended = False
        self._free = threading.Event()
        self._free.set()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Calls wait until the block ends."""
        self._free.clear()
        try:
            yield
        finally:
            self._free.set()

    async def get(self, key: str, spans: Spans) -> int:
        await self._wait()
        if self.fails:
            return self.fails
        if len(self.stored.get(key, b"")) != sum(nbytes for _, nbytes in spans):
            return NOT_FOUND
        data = bytearray(self.stored[key])
        if self.corrupts:
            data[-1] ^= 1
        at = 0
        for address, nbytes in spans:
            ctypes.memmove(address, bytes(data[at : at + nbytes]), nbytes)
            at += nbytes
        return len(data)

    async def put(self, key: str, spans: Spans) -> int:
        await self._wait()
        if self.fails:
            return self.fails
        data = b"".join(ctypes.string_at(address, nbytes) for address, nbytes in spans)
        others = sum(len(stored) for name, stored in self.stored.items() if name != key)
        if others + len(data) > self.capacity_bytes:
            return NO_ROOM
        self.stored[key] = data
        return 0

    async def remove(self, keys: Sequence[str]) -> list[int]:
        if self.fails:
            return [self.fails] * len(keys)
        return [0 if self.stored.pop(key, None) is not None else NOT_FOUND for key in keys]

    async def close(self) -> None:
        pass

    async def _wait(self) -> None:
        if not self._free.is_set():
            assert await asyncio.to_thread(self._free.wait, 30)
