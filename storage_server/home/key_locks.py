"""One change of a key at a time: what is changed upstream, and what the cache then shows of it, belong together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

Name = tuple[str, str]
"""Bucket and key."""


@dataclass(slots=True)
class _Entry:
    """A key's lock, and how many have it or wait for it."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    count: int = 0


class KeyLocks:
    """Locks of keys, on one event loop. They are served in the order in which they were asked for."""

    def __init__(self) -> None:
        self._entries: dict[Name, _Entry] = {}

    @asynccontextmanager
    async def held(self, bucket: str, keys: Sequence[str]) -> AsyncIterator[None]:
        """Hold these keys until the block ends. Take all that are needed at once: two calls in turn may wait for each
        other.
        """
        async with AsyncExitStack() as stack:
            for key in sorted(set(keys)):
                await stack.enter_async_context(self._one((bucket, key)))
            yield

    @asynccontextmanager
    async def _one(self, name: Name) -> AsyncIterator[None]:
        entry = self._entries.setdefault(name, _Entry())
        entry.count += 1
        try:
            async with entry.lock:
                yield
        finally:
            entry.count -= 1
            if not entry.count:
                del self._entries[name]
