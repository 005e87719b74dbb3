"""Objects of buckets with `lossy = "replace"` that the books want encoded: they stay as they are until that is done, or
somebody waits for their room.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import Protocol

from storage_server.cache.replacer import Replacer
from storage_server.cache.rules.entry import Name
from storage_server.cache.rules.replacing import Replacement
from storage_server.settings import CacheSettings

PAUSE_S = 1.0
MISSES_MAX = 3
"""After so many in a row that could not be put, as on a full disk, the next ones leave rather, with pauses."""
_log = logging.getLogger(__name__)
Replacing = Callable[[Replacement], AbstractAsyncContextManager[bool]]
"""Whether an object may be replaced; while the block runs no lookup promises it."""


class Keep(Protocol):
    """Has the books keep an object as it is."""

    async def __call__(self, replacement: Replacement, *, is_refused: bool) -> None: ...


class Replacements:
    """`caches` has the buckets, of each of which at most `room_bytes` are set aside. `want` is called when the books
    are to look again. Used from one event loop, but for `nbytes`.
    """

    def __init__(
        self,
        *,
        replacer: Replacer,
        caches: Mapping[str, CacheSettings],
        replacing: Replacing,
        keep: Keep,
        room_bytes: Callable[[str], int],
        want: Callable[[], None],
    ) -> None:
        self._room_bytes = room_bytes
        self._of_buckets: Counter[str] = Counter()
        self.nbytes = 0
        """The bytes that the books do not count any more, and that are still taken."""
        self._replacer = replacer
        self._caches = caches
        self._replacing = replacing
        self._keep = keep
        self._want = want
        self._aside: dict[Name, Replacement] = {}
        self._misses = 0
        """Those in a row that were encoded, and could not be put."""
        self._wake = asyncio.Event()

    def set_aside(self, wanted: Sequence[Replacement]) -> list[Replacement]:
        """Set these aside. Returns those for which there is no room."""
        others: list[Replacement] = []
        for each in wanted:
            self._drop(each.name)  # an earlier form of the key, which nobody wants any more
            if self._of_buckets[each.bucket] + each.entry.nbytes <= self._room_bytes(each.bucket):
                self._aside[each.name] = each
                self._count(each, 1)
                self._wake.set()
            else:
                others.append(each)
        return others

    def _drop(self, name: Name) -> None:
        replacement = self._aside.pop(name, None)
        if replacement is not None:
            self._count(replacement, -1)

    def _count(self, replacement: Replacement, sign: int) -> None:
        self.nbytes += sign * replacement.spare_bytes
        self._of_buckets[replacement.bucket] += sign * replacement.entry.nbytes

    def give_up(self, nbytes: int, bucket: str | None = None) -> list[Replacement]:
        """Take objects of so many bytes that were set aside first, of one bucket or of all: somebody waits for room."""
        taken: list[Replacement] = []
        for name, each in list(self._aside.items()):
            if nbytes <= 0:
                break
            if bucket is None or each.bucket == bucket:
                self._drop(name)
                taken.append(each)
                nbytes -= each.entry.nbytes
        return taken

    async def run(self) -> None:
        """Replace what is set aside, one after the other, until cancelled."""
        while True:
            self._wake.clear()
            while self._aside:
                replacement = next(iter(self._aside.values()))
                try:
                    await self._replace(replacement)
                except Exception:  # the next one may be better
                    _log.exception("%s/%s was not encoded", replacement.bucket, replacement.key)
                    await asyncio.sleep(PAUSE_S)
                finally:
                    if self._aside.get(replacement.name) is replacement:
                        self._drop(replacement.name)
            await self._wake.wait()

    async def _replace(self, replacement: Replacement) -> None:
        is_refused = True
        try:
            made = await self._replacer.encoded(replacement, self._caches[replacement.bucket])
            is_refused = made is None
            if made is not None and await self._replacer.put(
                replacement.bucket, made, partial(self._taken, replacement)
            ):
                self._misses = 0
                return
        except Exception:
            await self._keep(replacement, is_refused=is_refused)
            raise
        self._misses += not is_refused
        is_hopeless = self._misses > MISSES_MAX
        await self._keep(replacement, is_refused=is_refused or is_hopeless)
        self._want()
        if is_hopeless and not is_refused:
            await asyncio.sleep(PAUSE_S)

    @asynccontextmanager
    async def _taken(self, replacement: Replacement) -> AsyncIterator[bool]:
        """Whether it may be replaced now."""
        async with self._replacing(replacement) as may_replace:
            is_wanted = self._aside.get(replacement.name) is replacement
            yield may_replace and is_wanted
