"""Chunks that somebody has changed or deleted upstream, past us, leave the cache within `chunk_revalidate_s`.

The cache and upstream are both read in the order of keys, a page at a time, and their ETags are compared. A list tells
1,000 of them in one request, so that reads of chunks never have to ask.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial

from descriptors.errors import CallerError, ErrorCode, ObjectCacheError, ServerError
from descriptors.objects import ListRequest, ReadRequest
from descriptors.storage_api import SERVER_KEY
from storage_server.home.rules.refusals import NoConnectionError
from storage_server.home.service import HomeObjects
from storage_server.kernel.index import queries, transaction
from storage_server.kernel.index.reader import IndexReader
from storage_server.kernel.rules.rows import StoredObject

KEYS_PER_PAGE = 1000
PASSES = 2
"""In `chunk_revalidate_s`: a change just behind the place where a pass is must be seen by the next one in time."""
RETRY_S = 5.0
"""So long after upstream was busy or gone at a start it is asked again."""
_log = logging.getLogger(__name__)
Forget = Callable[[str, Mapping[str, int]], Awaitable[int]]


class Revalidation:
    """Compares the cache behind `index` with `objects`, and has `forget` remove the versions of keys that are not
    there any more; it returns how many it has removed.
    """

    def __init__(self, objects: HomeObjects, index: IndexReader, forget: Forget) -> None:
        self._objects = objects
        self._index = index
        self._forget = forget
        self.stale_count = 0
        """Chunks that were removed since the start."""

    async def run(self, revalidate_s: float) -> None:
        """Make PASSES passes every `revalidate_s`, until cancelled."""
        while True:
            await asyncio.sleep(revalidate_s / PASSES)
            try:
                await self.compare_all()
            except ObjectCacheError as error:
                _log.warning("the cache could not be compared with upstream: %s", error)
            except Exception:
                _log.exception("the cache could not be compared with upstream; it is tried again")

    async def compare_first(self) -> None:
        """Make a pass before the cache is used. Where upstream is busy or gone, this waits and tries again, as callers
        would. Raises what `compare_all` raises but SlowDown.
        """
        while True:
            try:
                return await self.compare_all()
            except ServerError as error:
                if error.code is not ErrorCode.SLOW_DOWN:
                    raise
                _log.warning("the start waits, since the cache cannot be compared with upstream yet: %s", error)
            await asyncio.sleep(RETRY_S)

    async def compare_all(self) -> None:
        """Make one pass. A bucket whose list is refused, or that upstream is too busy for, keeps its copies, and holds
        no other bucket up; its error is raised at the end, SlowDown before others. Where nobody can connect to
        upstream, that is raised at once.
        """
        busy: ObjectCacheError | None = None
        refused: ObjectCacheError | None = None
        after = ""
        while found := await self._index.threaded(partial(queries.buckets, after=after)):
            after = found[-1].name
            for bucket in found:
                try:
                    await self._compare(bucket.name)
                except NoConnectionError:
                    raise
                except ObjectCacheError as error:
                    if error.code is ErrorCode.SLOW_DOWN:
                        busy = busy or error
                    refused = refused or error
        failed = busy or refused
        if failed is not None:
            raise failed

    async def forget_others(self, bucket: str, shown: Mapping[str, str | None]) -> None:
        """Remove the copies of these keys whose ETag is not what the key shows."""
        keys = list(shown)
        for start in range(0, len(keys), KEYS_PER_PAGE):
            copies = await self._index.threaded(
                partial(_copies, bucket=bucket, keys=keys[start : start + KEYS_PER_PAGE])
            )
            stale = {copy.info.key: copy.version for copy in copies if copy.info.etag != shown[copy.info.key]}
            if stale:
                self.stale_count += await self._forget(bucket, stale)

    async def _compare(self, bucket: str) -> None:
        after = ""
        while cached := await self._cached(bucket, after):
            first, last = next(iter(cached)), next(reversed(cached))
            listed, end = await self._listed(bucket, max(after, just_before(first)))
            if (
                end is not None and end < first
            ):  # so many keys lie before the first cached one that the page ended there
                listed, end = await self._shown(bucket, first), first
            stale = stale_keys({key: stored.info.etag for key, stored in cached.items()}, listed, end)
            if stale:
                self.stale_count += await self._forget(bucket, {key: cached[key].version for key in stale})
            after = last if end is None else min(last, end)  # each page passes a key that is cached

    async def _shown(self, bucket: str, key: str) -> dict[str, str]:
        """The ETag that this key shows upstream; empty where there is no object."""
        try:
            head = await self._objects.head_object(SERVER_KEY, ReadRequest(bucket, key))
        except CallerError as error:
            if error.code not in (ErrorCode.NO_SUCH_KEY, ErrorCode.NO_SUCH_BUCKET):
                raise
            return {}
        return {key: head.info.etag}

    async def _cached(self, bucket: str, after: str) -> dict[str, StoredObject]:
        """The next cached objects by key, in order."""
        page = partial(queries.stored_page, name=bucket, start=after, inclusive=False, wanted="", limit=KEYS_PER_PAGE)
        return {stored.info.key: stored for stored in await self._index.threaded(page)}

    async def _listed(self, bucket: str, after: str) -> tuple[dict[str, str], str | None]:
        """The ETags of the next keys upstream, and how far they reach; None: to the end."""
        try:
            page = await self._objects.list_objects(
                SERVER_KEY, ListRequest(bucket, after=after, max_keys=KEYS_PER_PAGE)
            )
        except CallerError as error:
            if error.code is ErrorCode.NO_SUCH_BUCKET:
                return {}, None
            raise
        return {info.key: info.etag for info in page.objects}, page.next_after


def _copies(db: sqlite3.Connection, bucket: str, keys: Sequence[str]) -> list[StoredObject]:
    found = (transaction.find_object(db, bucket, key) for key in keys)
    return [stored for stored in found if stored is not None]


def stale_keys(cached: Mapping[str, str], listed: Mapping[str, str], end: str | None) -> list[str]:
    """The cached keys up to `end` (None: all) whose ETag upstream is another, or that are not there. Pure."""
    reached = [key for key in cached if end is None or key <= end]
    return [key for key in reached if listed.get(key) != cached[key]]


def just_before(key: str) -> str:
    """A text before `key`, behind which few other keys lie. Pure."""
    return key[:-1]
