"""Carrying lifecycle rules out: expired objects go, uploads nobody finished are given up."""

from __future__ import annotations

import asyncio
import logging
import time

from descriptors.errors import CallerError, ObjectCacheError
from descriptors.lifecycle import LifecycleRule, expiry, upload_due_at
from descriptors.objects import UploadRef
from storage_server.store import queries, transaction
from storage_server.store.embedded import EmbeddedStore
from storage_server.store.rows import StoredObject, StoredUpload
from storage_server.store.transaction import Transaction

ROWS_PER_STEP = 500
LEAP_S_MAX = 300.0
"""Between two sweeps a clock that is slewed moves less than this against the steady one."""
_log = logging.getLogger(__name__)


class TimeOfDay:
    """The time of day, which cannot leap forward: after a leap it goes on as the steady clock does. What expires late
    can expire later; what a wrong clock has expired is lost. Times in seconds.
    """

    def __init__(self, unix_s: float, monotonic_s: float) -> None:
        self._ahead_s = unix_s - monotonic_s

    def now(self, unix_s: float, monotonic_s: float) -> float:
        """The earlier of the time of day and what it should be by the steady clock."""
        ahead_s = unix_s - monotonic_s
        if ahead_s - self._ahead_s > LEAP_S_MAX:
            leap_s = ahead_s - self._ahead_s
            _log.warning(
                "the clock has leapt %.0f s ahead: lifecycle rules go by the time before, until a restart", leap_s
            )
            return monotonic_s + self._ahead_s
        self._ahead_s = ahead_s
        return unix_s


async def sweep_lifecycle(store: EmbeddedStore, interval_s: float, day_s: float) -> None:
    """Carry out every bucket's rules, again and again, until cancelled."""
    day = TimeOfDay(time.time(), time.monotonic())
    while True:
        await asyncio.sleep(interval_s)
        now_s = day.now(time.time(), time.monotonic())
        try:
            for bucket in await store.reads.list_buckets():
                await carry_out(store, bucket.name, await store.reads.get_lifecycle(bucket.name), now_s, day_s)
        except ObjectCacheError as error:
            _log.warning("lifecycle: %s", error)
        except Exception:
            _log.exception("lifecycle rules could not be carried out; they are tried again")


async def carry_out(
    store: EmbeddedStore, bucket: str, rules: list[LifecycleRule], now_s: float, day_s: float
) -> tuple[int, int]:
    """One pass over one bucket; how many objects expired and uploads were aborted."""
    if not rules:
        return 0, 0
    expired = await _expire_objects(store, bucket, rules, now_s, day_s)
    aborted = await _abort_uploads(store, bucket, rules, now_s, day_s)
    if expired or aborted:
        _log.info("lifecycle of %s: %d objects expired, %d uploads aborted", bucket, expired, aborted)
    return expired, aborted


async def _expire_objects(
    store: EmbeddedStore, bucket: str, rules: list[LifecycleRule], now_s: float, day_s: float
) -> int:
    expired = 0
    after, inclusive = "", True
    while rows := await _objects(store, bucket, after, inclusive):
        after, inclusive = rows[-1].info.key, False
        due = {row.info.key: row.version for row in rows if is_due(expiry(rules, row.info, day_s), now_s)}
        if due:

            def remove(tx: Transaction, due: dict[str, int] = due) -> int:
                return transaction.remove_versions(tx, bucket, due)

            expired += await store.change(remove, frees=True)
    return expired


async def _abort_uploads(
    store: EmbeddedStore, bucket: str, rules: list[LifecycleRule], now_s: float, day_s: float
) -> int:
    aborted = 0
    key, upload_id = "", None
    while rows := await _uploads(store, bucket, key, upload_id):
        key, upload_id = rows[-1].info.key, rows[-1].info.upload_id
        for row in rows:
            info = row.info
            if not is_due(upload_due_at(rules, info.key, info.initiated_at, day_s), now_s):
                continue
            try:
                await store.uploads.abort_upload(UploadRef(bucket, info.key, info.upload_id))
                aborted += 1
            except CallerError:
                continue  # completed or aborted meanwhile
    return aborted


def is_due(due: tuple[float, str] | None, now_s: float) -> bool:
    """Whether what a rule named has come."""
    return due is not None and due[0] <= now_s


async def _objects(store: EmbeddedStore, bucket: str, after: str, inclusive: bool) -> list[StoredObject]:
    return await store.reader.threaded(lambda db: queries.stored_page(db, bucket, after, inclusive, "", ROWS_PER_STEP))


async def _uploads(store: EmbeddedStore, bucket: str, key: str, upload_id: str | None) -> list[StoredUpload]:
    return await store.reader.threaded(lambda db: queries.uploads_page(db, bucket, key, upload_id, "", ROWS_PER_STEP))
