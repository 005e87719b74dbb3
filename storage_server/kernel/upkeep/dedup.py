"""Deduplication: one copy of equal bytes of one tenant, behind the answers.

Bodies are written as they come. Behind that, each new extent takes these steps:

1. If an older extent has the same content id, both are read, each block is proved, and their bytes are compared. The
   checksums of its blocks give the id, so a new extent that is not like any other is not read.
2. One transaction notes the id. If the bytes are equal, it also makes the new extent's row name the older bytes. The
   new ones are given back like those of a deleted object, when nobody reads them any more.

So a crash leaves two copies, or one that both rows name. Damaged bytes are not shared. No answer waits for any of it:
no client can tell by time what others have stored. The id depends on the scope, so nothing is shared between tenants.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from descriptors.errors import ObjectCacheError
from descriptors.units import KIB, MIB
from objectcache.adapters.threads import to_end
from storage_server.kernel.data.extents import ExtentFiles, PinSet
from storage_server.kernel.data.io_threads import IoThreads
from storage_server.kernel.index.committer import Committer
from storage_server.kernel.index.reader import IndexReader
from storage_server.kernel.index.transaction import Transaction
from storage_server.kernel.rules.rows import Committed
from storage_server.kernel.upkeep.dedup_rows import (
    StoredBytes,
    Version,
    has_unknown,
    new_extents,
    newest_version,
    note_looked_at,
    older_duplicates,
    settle,
    stored_bytes,
    unknown_versions,
)
from storage_server.kernel.upkeep.pace import wait_turn
from storage_server.planning.extent import CorruptExtentError, Extent
from storage_server.settings import Dedup

TICK_S = 0.25
NEWS_MAX = 65_536
"""If more comes before it was looked at, the index is read for what is missing."""
VERSIONS_AT_ONCE = 256
SCAN_INTERVAL_S = MARK_INTERVAL_S = 60.0
STEP_BYTES = MIB
LOOK_BYTES = 64 * KIB
"""Looking at one version counts like comparing so many bytes."""
COUNT_INTERVAL_S = 30.0
COUNT_PART_MAX = 0.01
"""Counting, which reads one index entry for each extent, takes no more than this part of the time."""
_log = logging.getLogger(__name__)
_T = TypeVar("_T")


class Deduplicator:
    """Shares equal extents of one store. `is_busy` gets the number of locations that it has pinned itself, and says
    whether anybody else uses the store.
    """

    def __init__(
        self,
        dedup: Dedup,
        reader: IndexReader,
        committer: Committer,
        files: ExtentFiles,
        is_busy: Callable[[int], bool],
    ) -> None:
        self._dedup = dedup
        self._is_needed = dedup is not Dedup.OFF
        self._reader = reader
        self._committer = committer
        self._files = files
        self._is_busy = is_busy
        self._io = IoThreads(1)
        self._news: deque[Version] = deque()
        self._lock = threading.Lock()
        self._is_scan_due = True
        self._scanned_at = float("-inf")
        self._newest = self._marked = 0
        """The last version at the last look, and the last that was written down as looked at."""
        self._mark_due_at = 0.0
        self._count_due_at = 0.0
        self.stored = StoredBytes()
        """The bytes of all extents, as they were COUNT_INTERVAL_S ago, or longer in a large store."""
        self.shared_count = 0
        """Extents that were given up for older ones since the start."""
        self.shared_bytes = 0
        """The space of these extents."""

    def note_changes(self, committed: Committed) -> None:
        """Note what keys show now. May be called from any thread."""
        if not self._is_needed:
            return
        self._note(
            [
                (change.bucket, change.key, change.version)
                for change in committed.keys
                if change.version and change.nbytes
            ]
        )

    async def run(self, bytes_per_s: float) -> None:
        """Look at what is new every TICK_S, and compare `bytes_per_s`, until cancelled. Where nothing is to be shared,
        it counts what copies save.
        """
        while True:
            await asyncio.sleep(TICK_S)
            try:
                if self._is_needed:
                    await self.share_new(bytes_per_s)
                if time.monotonic() >= self._count_due_at:
                    began_s = time.monotonic()
                    await self.count()
                    took_s = time.monotonic() - began_s
                    self._count_due_at = time.monotonic() + max(COUNT_INTERVAL_S, took_s / COUNT_PART_MAX)
            except ObjectCacheError as error:
                _log.warning("deduplication: %s", error)
                self._is_scan_due = True
            except Exception:
                _log.exception("deduplication failed; it is tried again")
                self._is_scan_due = True

    async def share_new(self, bytes_per_s: float) -> None:
        """Look at everything that is new now. Raises ServerError where the index fails."""
        if self._is_scan_due and time.monotonic() - self._scanned_at >= SCAN_INTERVAL_S:
            self._is_scan_due = False
            self._scanned_at = time.monotonic()
            await self._scan(bytes_per_s)
        unsynced: list[Version] = []
        before_count = self.shared_count
        while some := self._some_news():
            unsynced += await self._look_at(some, bytes_per_s)
        self._note(unsynced)
        if not unsynced and not self._is_scan_due and time.monotonic() >= self._mark_due_at:
            await self._mark()
        if self.shared_count > before_count:
            _log.info("%d extents share the bytes of older ones from now on", self.shared_count - before_count)

    async def count(self) -> None:
        """Read what all extents take, with and without their copies, into `stored`."""
        self.stored = await self._reader.threaded(stored_bytes)

    def close(self) -> None:
        """End the thread."""
        self._io.close()

    def _note(self, versions: Sequence[Version]) -> None:
        with self._lock:
            if len(self._news) + len(versions) > NEWS_MAX:
                self._is_scan_due = True
            else:
                self._news.extend(versions)

    def _some_news(self) -> list[Version]:
        with self._lock:
            return [self._news.popleft() for _ in range(min(len(self._news), VERSIONS_AT_ONCE))]

    async def _mark(self) -> None:
        """Write down what was looked at: all that was there at the look before this one, of which the news have told
        meanwhile.
        """
        self._mark_due_at = time.monotonic() + MARK_INTERVAL_S
        looked_at, self._newest = self._newest, await self._reader.threaded(newest_version)
        if looked_at > self._marked:
            await self._change(partial(note_looked_at, version=looked_at))
            self._marked = looked_at

    async def _scan(self, bytes_per_s: float) -> None:
        """Look at what was stored before the start, or came too fast."""
        if not await self._reader.threaded(has_unknown):
            return
        after: tuple[str, str] | None = ("", "")
        while after is not None:
            found, after = await self._reader.threaded(partial(unknown_versions, after=after, limit=VERSIONS_AT_ONCE))
            if found:
                self._note(await self._look_at(found, bytes_per_s))
            await asyncio.sleep(0)

    async def _look_at(self, versions: Sequence[Version], bytes_per_s: float) -> list[Version]:
        """Share the extents of these versions where they have older duplicates; returns the versions that are not on
        the disk yet.
        """
        unsynced: list[Version] = []
        while versions:
            await wait_turn(len(versions) * LOOK_BYTES, bytes_per_s, lambda: self._is_busy(0))
            since = self._files.punch_count
            found = await self._reader.threaded(partial(new_extents, versions=versions, dedup=self._dedup))
            if found.extents:
                duplicates = await self._reader.threaded(partial(older_duplicates, extents=found.extents))
                equal = [
                    each
                    for each in duplicates
                    if await self._are_equal((each.new.extent, each.old), since, bytes_per_s)
                ]
                shared_count, shared_bytes = await self._change(partial(settle, extents=found.extents, equal=equal))
                self.shared_count += shared_count
                self.shared_bytes += shared_bytes
            unsynced += found.unsynced
            versions = found.left
        return unsynced

    async def _are_equal(self, extents: Sequence[Extent], since: int, bytes_per_s: float) -> bool:
        """Whether both have the same bytes; False, too, where one is damaged, or gone since the count of punches was
        `since`.
        """
        pins = PinSet(self._files)
        try:
            if not pins.keep(extents, since):
                return False
            nbytes = extents[0].nbytes
            buffers = np.empty((2, min(STEP_BYTES, nbytes)), dtype=np.uint8)
            for start in range(0, nbytes, STEP_BYTES):
                if not await self._io.run(partial(_is_step_equal, self._files, extents, start, buffers)):
                    return False
                await wait_turn(buffers.nbytes, bytes_per_s, lambda: self._is_busy(len({e.file_id for e in extents})))
        finally:
            pins.release()
        return True

    async def _change(self, change: Callable[[Transaction], _T]) -> _T:
        """Carry the change out. It takes nothing of the reserve, which is for removals and for the next start."""
        return await to_end(asyncio.ensure_future(self._committer.commit(change)))


def _is_step_equal(files: ExtentFiles, extents: Sequence[Extent], start: int, buffers: npt.NDArray[np.uint8]) -> bool:
    nbytes = min(STEP_BYTES, extents[0].nbytes - start)
    try:
        for extent, buffer in zip(extents, buffers, strict=True):
            files.open.read_into(extent, start, memoryview(buffer)[:nbytes])
    except CorruptExtentError as error:
        _log.error("an extent is damaged and is not shared: %s", error)
        return False
    return bool(np.array_equal(buffers[0, :nbytes], buffers[1, :nbytes]))
