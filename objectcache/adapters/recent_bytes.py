"""An answer that many ask for and that takes long to make."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable


class RecentBytes:
    """Bytes that `make` gives at most once in `period_s`: all who ask meanwhile share them. Used on one event loop."""

    def __init__(self, make: Callable[[], Awaitable[bytes]], period_s: float) -> None:
        self._make = make
        self._period_s = period_s
        self._made: asyncio.Future[bytes] | None = None
        self._begun_s = 0.0

    async def get(self) -> bytes:
        """The bytes. Raises what `make` raises."""
        now_s = time.monotonic()
        if self._made is None or (self._made.done() and now_s - self._begun_s >= self._period_s):
            self._begun_s = now_s
            self._made = asyncio.ensure_future(self._make())
        return await asyncio.shield(self._made)  # others wait for it where one that asks goes away
