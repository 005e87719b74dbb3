"""Lifecycle rules: expired objects are deleted, and unfinished uploads are aborted."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import TypeVar

from descriptors.errors import CallerError, ObjectCacheError
from descriptors.lifecycle import LifecycleRule, expiry, upload_due_at
from descriptors.objects import UploadRef
from objectcache.adapters.threads import HERE_ITEMS_MAX, computed
from storage_server.kernel.index import queries
from storage_server.kernel.index.reader import IndexReader
from storage_server.kernel.index.transaction import Transaction
from storage_server.kernel.objects import Objects
from storage_server.kernel.removal import remove_versions
from storage_server.kernel.rules.rows import StoredObject, StoredUpload
from storage_server.kernel.time_of_day import TimeOfDay
from storage_server.kernel.uploads import Uploads

ROWS_PER_STEP = 500
BUCKETS_PER_STEP = 500
NOBODY = ""
"""The access key for actions that the server takes by itself."""
_Row = TypeVar("_Row", StoredObject, StoredUpload)
_log = logging.getLogger(__name__)


class Lifecycle:
    """Carries out the rules of every bucket. `change` makes a change of the index."""

    def __init__(
        self,
        objects: Objects,
        uploads: Uploads,
        reader: IndexReader,
        change: Callable[[Callable[[Transaction], int]], Awaitable[int]],
    ) -> None:
        self._objects = objects
        self._uploads = uploads
        self._reader = reader
        self._change = change

    async def run(self, interval_s: float, day_s: float) -> None:
        """Carry out every bucket's rules every `interval_s`, until cancelled."""
        day = TimeOfDay(self._objects.now_s(), time.monotonic())
        while True:
            await asyncio.sleep(interval_s)
            now_s = day.now(self._objects.now_s(), time.monotonic())
            try:
                await self.carry_all_out(now_s, day_s)
            except ObjectCacheError as error:
                _log.warning("lifecycle: %s", error)
            except Exception:
                _log.exception("lifecycle rules could not be carried out; they are tried again")

    async def carry_all_out(self, now_s: float, day_s: float) -> None:
        """Carry out the rules of every bucket that has some, once. Raises ObjectCacheError."""
        after = ""
        while names := await self._reader.threaded(
            partial(queries.buckets_with_rules, after=after, most=BUCKETS_PER_STEP)
        ):
            after = names[-1]
            for name in names:
                with suppress(CallerError):  # its owner has deleted it meanwhile
                    rules = await self._reader.threaded(partial(queries.lifecycle, name=name))
                    await self.carry_out(name, rules, now_s, day_s)

    async def carry_out(
        self, bucket: str, rules: Sequence[LifecycleRule], now_s: float, day_s: float
    ) -> tuple[int, int]:
        """Carry out the rules of one bucket once; returns how many objects expired and how many uploads
        were aborted.
        """
        if not rules:
            return 0, 0
        expired = await self._expire_objects(bucket, rules, now_s, day_s)
        aborted = await self._abort_uploads(bucket, rules, now_s, day_s)
        if expired or aborted:
            _log.info("lifecycle of %s: %d objects expired, %d uploads aborted", bucket, expired, aborted)
        return expired, aborted

    async def _expire_objects(self, bucket: str, rules: Sequence[LifecycleRule], now_s: float, day_s: float) -> int:
        expired = 0
        after, inclusive = "", True
        while rows := await self._object_rows(bucket, after, inclusive):
            after, inclusive = rows[-1].info.key, False
            due = await _due(rows, rules, lambda row: is_due(expiry(rules, row.info, day_s), now_s))
            expired += await remove_versions(self._change, bucket, {row.info.key: row.version for row in due})
        return expired

    async def _abort_uploads(self, bucket: str, rules: Sequence[LifecycleRule], now_s: float, day_s: float) -> int:
        def is_over(row: StoredUpload) -> bool:
            return is_due(upload_due_at(rules, row.info.key, row.info.initiated_at, day_s), now_s)

        aborted = 0
        key, upload_id = "", None
        while rows := await self._upload_rows(bucket, key, upload_id):
            key, upload_id = rows[-1].info.key, rows[-1].info.upload_id
            for row in await _due(rows, rules, is_over):
                info = row.info
                try:
                    await self._uploads.abort_upload(NOBODY, UploadRef(bucket, info.key, info.upload_id))
                    aborted += 1
                except CallerError:
                    continue  # completed or aborted meanwhile
        return aborted

    async def _object_rows(self, bucket: str, after: str, inclusive: bool) -> list[StoredObject]:
        return await self._reader.threaded(
            lambda db: queries.stored_page(db, bucket, start=after, inclusive=inclusive, wanted="", limit=ROWS_PER_STEP)
        )

    async def _upload_rows(self, bucket: str, key: str, upload_id: str | None) -> list[StoredUpload]:
        return await self._reader.threaded(
            lambda db: queries.uploads_page(db, bucket, key=key, upload_id=upload_id, wanted="", limit=ROWS_PER_STEP)
        )


async def _due(rows: Sequence[_Row], rules: Sequence[LifecycleRule], is_over: Callable[[_Row], bool]) -> list[_Row]:
    """Those of the rows that are over by the rules. A bucket's owner may write a thousand rules of ten tags: for 500
    objects they take half a second, in which the event loop goes on.
    """
    return await computed(
        lambda: [row for row in rows if is_over(row)], is_long=len(rows) * len(rules) > HERE_ITEMS_MAX
    )


def is_due(due: tuple[float, str] | None, now_s: float) -> bool:
    """Whether the time that a rule gives has come."""
    return due is not None and due[0] <= now_s
