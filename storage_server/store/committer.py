"""Group commit: one thread makes what several callers have written durable, and publishes it, in one go.

strict   per batch: sync the segments written to, then one transaction, synced. Then the callers are answered.
relaxed  per batch: one transaction, not synced; every `RELAXED_SYNC_INTERVAL_S` the same as strict does, for all since.

A file that lost its last row is disposed of when the commit that says so is durable, never before: after a power cut
the index may be as it was before that commit.
"""

from __future__ import annotations

import asyncio
import queue
import sqlite3
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from descriptors.errors import ErrorCode, ServerError
from storage_server.store.disk import disk_error
from storage_server.store.durability import Durability
from storage_server.store.schema import connect, create, next_version
from storage_server.store.segments import WriteFile
from storage_server.store.transaction import Transaction, version_counter

BATCH_MAX = 256
PENDING_MAX = 4096
RELAXED_SYNC_INTERVAL_S = 1.0
_T = TypeVar("_T")
Change = Callable[[Transaction], Any]


@dataclass(slots=True)
class _Job:
    change: Change
    file: WriteFile | None
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[Any]
    result: Any = None
    error: BaseException | None = None

    def settle(self) -> None:
        if self.future.cancelled():
            return
        if self.error is not None:
            self.future.set_exception(self.error)
        else:
            self.future.set_result(self.result)


class Committer:
    """Owns the index's writing connection. `dispose` is called, in the committer's thread, with files no row names."""

    def __init__(self, path: Path, durability: Durability, dispose: Callable[[str], None]) -> None:
        self._durability = durability
        self._dispose = dispose
        self._queue: queue.SimpleQueue[_Job | str | None] = queue.SimpleQueue()
        self._pending = 0
        self._considered: set[str] = set()
        self._unsynced: dict[str, WriteFile] = {}
        self._dead: list[str] = []
        self._synced_at = time.monotonic()
        self._in_doubt = False
        self.db = connect(path)
        create(self.db)
        self._versions = version_counter(next_version(self.db))
        self._thread = threading.Thread(target=self._run, name="committer", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Carry out what was submitted, sync, and close."""
        self._queue.put(None)
        self._thread.join()
        self.db.close()

    async def commit(self, change: Callable[[Transaction], _T], file: WriteFile | None = None) -> _T:
        """Carry out one change; durable, as far as the mode promises, on return. `file` is synced before it.

        Raises what the change raises; ServerError (InsufficientStorage, InternalError, SlowDown) when the disk or the
        index fails: then nothing of the change shows.
        """
        if self._pending >= PENDING_MAX:
            raise ServerError(ErrorCode.SLOW_DOWN, "too many changes wait for the disk", retryable=True)
        loop = asyncio.get_running_loop()
        future: asyncio.Future[_T] = loop.create_future()
        self._pending += 1
        if file is not None:
            file.hold()
        self._queue.put(_Job(change, file, loop, future))
        try:
            return await future
        finally:
            self._pending -= 1

    def consider(self, file_id: str) -> None:
        """Dispose of this file soon if no row names it. From any thread."""
        self._queue.put(file_id)

    def _run(self) -> None:
        open_for_more = True
        while open_for_more:
            batch, open_for_more = self._next_batch()
            if batch or self._considered:
                self._carry_out(batch)
                for loop in {job.loop for job in batch}:
                    loop.call_soon_threadsafe(_settle, [job for job in batch if job.loop is loop])
            if not open_for_more or time.monotonic() - self._synced_at >= RELAXED_SYNC_INTERVAL_S:
                self._sync_relaxed()

    def _next_batch(self) -> tuple[list[_Job], bool]:
        """Wait for something, and take what came meanwhile; and whether more may come."""
        batch: list[_Job] = []
        idle = not (self._unsynced or self._dead or self._considered)
        try:
            item = self._queue.get(timeout=None if idle else RELAXED_SYNC_INTERVAL_S)
            while item is not None:
                if isinstance(item, str):
                    self._considered.add(item)
                else:
                    batch.append(item)
                if len(batch) == BATCH_MAX:
                    return batch, True
                item = self._queue.get_nowait()
        except queue.Empty:
            return batch, True
        return batch, False

    def _carry_out(self, batch: list[_Job]) -> None:
        if self._durability is Durability.STRICT:
            failed = _sync({job.file.file_id: job.file for job in batch if job.file is not None})
            for job in batch:
                if job.file is not None:
                    job.error = failed.get(job.file.file_id)
        else:
            self._keep_unsynced(batch)
        try:
            dead = self._transact(batch)
        except sqlite3.Error as error:
            self._in_doubt = True
            for job in batch:
                job.error = job.error or index_error(error)
        else:
            self._dead += dead
            self._considered.clear()
            if self._durability is Durability.STRICT:
                self._dispose_dead()
        for job in batch:
            if job.file is not None:
                job.file.release()

    def _transact(self, batch: list[_Job]) -> list[str]:
        """One transaction; the files no row names after it. Raises sqlite3.Error, and nothing has changed."""
        tx = Transaction(self.db, self._versions, synced=self._durability is Durability.STRICT)
        tx.released |= self._considered
        try:
            self.db.execute("BEGIN IMMEDIATE")
            for job in batch:
                if job.error is None:
                    _carry_out_one(tx, job)
            if self._in_doubt:  # overwrite what a commit that failed may have left in the log, before files it named go
                self.db.execute("INSERT INTO meta VALUES ('doubts', 1) ON CONFLICT DO UPDATE SET value = value + 1")
            dead = tx.dead_files()
            self.db.execute("COMMIT")
        except BaseException:
            if self.db.in_transaction:
                self.db.execute("ROLLBACK")
            raise
        self._in_doubt = False
        return dead

    def _keep_unsynced(self, batch: list[_Job]) -> None:
        self.db.execute("PRAGMA synchronous=NORMAL")
        for job in batch:
            if job.file is not None and job.file.file_id not in self._unsynced:
                job.file.hold()
                self._unsynced[job.file.file_id] = job.file

    def _sync_relaxed(self) -> None:
        """Make everything so far survive power loss. A file that cannot be synced stays marked as such in the index."""
        self._synced_at = time.monotonic()
        if not self._unsynced and not self._dead:
            return
        failed = _sync(self._unsynced)
        marks = [(file_id,) for file_id in self._unsynced if file_id not in failed]
        try:
            self.db.execute("PRAGMA synchronous=FULL")
            self.db.execute("BEGIN IMMEDIATE")
            self.db.executemany("UPDATE extents SET synced = 1 WHERE file_id = ? AND synced = 0", marks)
            self.db.execute("INSERT INTO meta VALUES ('syncs', 1) ON CONFLICT DO UPDATE SET value = value + 1")
            self.db.execute("COMMIT")
        except sqlite3.Error:
            if self.db.in_transaction:
                self.db.execute("ROLLBACK")
            return
        for file in self._unsynced.values():
            file.release()
        self._unsynced.clear()
        self._dispose_dead()

    def _dispose_dead(self) -> None:
        dead, self._dead = self._dead, []
        for file_id in dead:
            self._dispose(file_id)


def _carry_out_one(tx: Transaction, job: _Job) -> None:
    try:
        with tx.step():
            job.result = job.change(tx)
    except sqlite3.Error as error:
        job.error = index_error(error)
        if not tx.db.in_transaction:
            raise  # SQLite gave the whole transaction up
    except Exception as error:
        job.error = error


def _sync(files: dict[str, WriteFile]) -> dict[str, ServerError]:
    """Sync each file; the errors of those that failed."""
    failed = {}
    for file_id, file in files.items():
        try:
            file.sync()
        except OSError as error:
            failed[file_id] = disk_error(error, "syncing")
    return failed


def _settle(jobs: list[_Job]) -> None:
    for job in jobs:
        job.settle()


def index_error(error: sqlite3.Error) -> ServerError:
    """The answer for what SQLite says."""
    if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL:
        return ServerError(ErrorCode.INSUFFICIENT_STORAGE, "no space left for the index", retryable=True)
    return ServerError(ErrorCode.INTERNAL_ERROR, "the index could not be written", retryable=True)
