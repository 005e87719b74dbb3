"""Victims of buckets with `lossy = "replace"`: they stay until they are encoded, or somebody waits for their room."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial

from storage_server.cache.replacer import Replacer
from storage_server.cache.rules.books import Victim
from storage_server.cache.rules.entry import Name
from storage_server.settings import CacheSettings

PAUSE_S = 1.0
_log = logging.getLogger(__name__)
Leaving = Callable[[Victim], AbstractAsyncContextManager[bool]]
"""Whether a victim may leave; while the block runs no lookup promises it."""


class Replacements:
    """`caches` has the buckets, of each of which at most `room_bytes` are set aside. `delete` deletes a victim inside a
    block of `leaving`. Used from one event loop, but for `nbytes`.
    """

    def __init__(
        self,
        replacer: Replacer,
        caches: Mapping[str, CacheSettings],
        leaving: Leaving,
        delete: Callable[[Victim], Awaitable[None]],
        room_bytes: Callable[[str], int],
    ) -> None:
        self._room_bytes = room_bytes
        self._of_buckets: Counter[str] = Counter()
        self.nbytes = 0
        """The space of what is set aside."""
        self._replacer = replacer
        self._caches = caches
        self._leaving = leaving
        self._delete = delete
        self._aside: dict[Name, Victim] = {}
        self._wake = asyncio.Event()

    def set_aside(self, victims: Sequence[Victim], now: float) -> list[Victim]:
        """Set those aside that can be replaced. Returns the others, among them those whose time has come."""
        others: list[Victim] = []
        for victim in victims:
            cache = self._caches.get(victim.bucket)
            is_replaceable = cache is not None and victim.entry.is_replaceable and not _is_over(victim, cache, now)
            self._drop((victim.bucket, victim.key))  # an earlier object of the key
            if is_replaceable and self._has_room(victim):
                self._aside[victim.bucket, victim.key] = victim
                self._count(victim, 1)
                self._wake.set()
            else:
                others.append(victim)
        return others

    def _has_room(self, victim: Victim) -> bool:
        return self._of_buckets[victim.bucket] + victim.entry.nbytes <= self._room_bytes(victim.bucket)

    def _drop(self, name: Name) -> Victim | None:
        victim = self._aside.pop(name, None)
        if victim is not None:
            self._count(victim, -1)
        return victim

    def _count(self, victim: Victim, sign: int) -> None:
        self.nbytes += sign * victim.entry.nbytes
        self._of_buckets[victim.bucket] += sign * victim.entry.nbytes

    def give_up(self, nbytes: int, bucket: str | None = None) -> list[Victim]:
        """Take victims of so many bytes that were set aside first, of one bucket or of all: somebody waits for room."""
        taken: list[Victim] = []
        for name, victim in list(self._aside.items()):
            if nbytes <= 0:
                break
            if bucket is None or victim.bucket == bucket:
                self._drop(name)
                taken.append(victim)
                nbytes -= victim.entry.nbytes
        return taken

    async def run(self) -> None:
        """Replace what is set aside, one after the other, until cancelled."""
        while True:
            self._wake.clear()
            while self._aside:
                try:
                    await self._replace(next(iter(self._aside.values())))
                except Exception:
                    _log.exception("replacing failed; it is tried again")
                    await asyncio.sleep(PAUSE_S)
            await self._wake.wait()

    async def _replace(self, victim: Victim) -> None:
        bucket, name = victim.bucket, (victim.bucket, victim.key)
        made = await self._replacer.encoded(bucket, victim.key, victim.entry.version, self._caches[bucket])
        if made is not None and await self._replacer.put(bucket, made, partial(self._taken, name, victim)):
            return
        async with self._taken(name, victim) as may_leave:
            if may_leave:
                await self._delete(victim)

    @asynccontextmanager
    async def _taken(self, name: Name, victim: Victim) -> AsyncIterator[bool]:
        """Whether it may leave now. It is set aside no more then."""
        async with self._leaving(victim) as may_leave:
            if self._aside.get(name) is not victim:
                yield False  # given up meanwhile
                return
            yield may_leave
            if self._aside.get(name) is victim:
                self._drop(name)


def _is_over(victim: Victim, cache: CacheSettings, now: float) -> bool:
    return cache.ttl_s is not None and victim.entry.modified_at + cache.ttl_s <= now
