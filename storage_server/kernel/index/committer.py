"""Group commit: one thread makes the writes of several callers durable and publishes them together.

strict   per batch: write small bodies, sync the segments, then commit one transaction, synced. Then answer.
relaxed  per batch: commit one transaction, not synced. Every `RELAXED_SYNC_INTERVAL_S`: sync all segments and the
index.

When a commit removes the last row of a file, the file is deleted only after that commit is durable. The reason: after a
power cut the index may be as it was before the commit, and would name the file again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

from descriptors.errors import ErrorCode, ServerError
from objectcache.adapters.beneath import Beneath
from objectcache.adapters.caller import CALLER
from storage_server.kernel.data.disk import Disk, disk_error
from storage_server.kernel.data.segments import Pending, WriteFile
from storage_server.kernel.data.space import Space
from storage_server.kernel.index.commit_queue import CommitQueue, Job, answer
from storage_server.kernel.index.freed import FreedSpace
from storage_server.kernel.index.identity import Identity, Mark, count_transaction, read_identity
from storage_server.kernel.index.reserve import Reserve
from storage_server.kernel.index.resolved import ResolvedKeys
from storage_server.kernel.index.schema import can_shrink, connect, create, next_version, shorten_log, shrink
from storage_server.kernel.index.transaction import Transaction, version_counter
from storage_server.kernel.rules.pins import Hole
from storage_server.kernel.rules.rows import Committed, Touched
from storage_server.planning.durability import Durability

PENDING_MAX = 2048
"""So many changes may wait; of one caller half of what others leave, so that there is always room for one more."""
TRANSACTION_S = 0.1
TRANSACTION_ROWS = 2_000
"""A transaction that has taken so long, or has so many rows for other servers' journals, takes no further change: a
change of one caller may have thousands of rows, and those of all others wait for it.
"""
RELAXED_SYNC_INTERVAL_S = 1.0
SHRINK_PAUSE_S = 0.05
FAILURE_PAUSE_S = 0.1
_T = TypeVar("_T")
_log = logging.getLogger(__name__)


class RefusedChangesError(ServerError):
    """A transaction is refused for something that some of its changes say; without these it may be carried out."""


class SharedJournal(Protocol):
    """The journal from which other servers keep indexes of their own. A ServerError that a method raises undoes the
    transaction. After a RefusedChangesError its changes are tried in smaller transactions.
    """

    def catch_up(self, tx: Transaction) -> None:
        """The transaction begins: carry out the changes that the journal has and this index has lost."""

    def check(self, tx: Transaction, touched: Sequence[Touched], caller: str) -> int:
        """One change was carried out for a caller, and touched these; about how many rows the journal takes for it. A
        ServerError undoes that change alone.
        """

    def append_to_journal(self, tx: Transaction) -> None:
        """Write down the changes of the transaction, which are all made. It is committed next."""


class Committer:
    """Owns the index's writing connection. Keys that a transaction changed are removed from `resolved`. The thread
    calls `dispose` with files that no row names. It calls `punch` with freed locations in other files, `punch_delay_s`
    after nobody in this process can find them any more. `mark` records the number of transactions. `space` is told
    which bytes are about to be given back, and `on_changes` what has changed, once it is committed. `journal` is where
    other servers read of each transaction; it has the transaction before its commit.
    """

    def __init__(
        self,
        path: Path,
        durability: Durability,
        disk: Disk,
        dispose: Callable[[str], None],
        punch: Callable[[Sequence[Hole]], None],
        punch_delay_s: float,
        resolved: ResolvedKeys,
        mark: Mark,
        space: Space,
        on_changes: Callable[[Committed], None],
        journal: SharedJournal | None = None,
    ) -> None:
        self._path = path
        self._space = space
        self._on_changes = on_changes
        self._journal = journal
        self._mark = mark
        self._durability = durability
        self._disk = disk
        self._freed = FreedSpace(dispose, punch, punch_delay_s)
        self._resolved = resolved
        self._queue = CommitQueue()
        self._pending = Counter[str]()
        """By callers: how many of their changes wait."""
        self._pending_count = 0
        self._considered: set[str] = set()
        self._unsynced: dict[str, WriteFile] = {}
        self._synced_at = time.monotonic()
        self._is_dirty = False
        self._reserve = Reserve(Beneath(path.parent))
        self.db = _opened(path, self._reserve)
        self._reserve.keep()
        self._can_shrink = can_shrink(self.db)
        self._is_shrinking = False
        self._store_number = read_identity(self.db).number
        self.transaction_count = 0
        """How many transactions were committed since the start."""
        self.change_count = 0
        """How many changes these transactions carried out."""
        self._versions = version_counter(next_version(self.db))
        self._thread = threading.Thread(target=self._run, name="committer", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Carry out the submitted changes, sync, and close."""
        self._queue.end()
        self._thread.join()
        self.db.close()
        self._mark.close()

    async def commit(
        self, change: Callable[[Transaction], _T], pending: Pending | None = None, *, frees: bool = False
    ) -> _T:
        """Write and sync what is `pending`, then carry out one change. On return the change is as durable as the mode
        promises. A change that `frees` space can be carried out on a full disk.

        Raises what the change raises; ServerError (InsufficientStorage, InternalError, SlowDown) when the disk or the
        index fails. After an error nothing of the change shows.
        """
        if not frees:
            self.require_space()
        caller = CALLER.get()
        left = PENDING_MAX - self._pending_count + self._pending[caller]
        if self._pending[caller] >= (left // 2 if caller else left):
            raise ServerError(ErrorCode.SLOW_DOWN, "too many changes wait for the disk", retryable=True)
        loop = asyncio.get_running_loop()
        future: asyncio.Future[_T] = loop.create_future()
        self._pending[caller] += 1
        self._pending_count += 1
        if pending is not None:
            pending.file.hold()
            pending.may_be_named = True
        self._queue.put(Job(change, pending, loop, future, frees=frees, caller=caller))
        try:
            return await future
        finally:
            self._pending_count -= 1
            self._pending[caller] -= 1
            if not self._pending[caller]:
                del self._pending[caller]

    @property
    def is_dirty(self) -> bool:
        """Whether some changes were carried out and are not durable yet, as happens under relaxed durability."""
        return self._is_dirty

    @property
    def is_used(self) -> bool:
        """Whether a change is under way."""
        return self._pending_count > 0

    def require_space(self) -> None:
        """Raises ServerError(InsufficientStorage) while the disk is full, or the directory has reached its bound: the
        last space is kept for removals.
        """
        if self._reserve.was_needed:
            raise ServerError(ErrorCode.INSUFFICIENT_STORAGE, "no space left on the disk", retryable=True)
        if not self._space.has_index_room:
            raise ServerError(ErrorCode.INSUFFICIENT_STORAGE, "no room for the index", retryable=True)

    def consider(self, file_id: str) -> None:
        """Delete this file soon if no row names it. May be called from any thread."""
        self._queue.consider(file_id)

    def sync_soon(self) -> None:
        """Make what was carried out durable now, so that space that it freed is given back. May be called from any
        thread.
        """
        self._queue.sync_soon()

    def _run(self) -> None:
        while not self._queue.is_over:
            batch = self._queue.take(self._pause_s())
            self._considered |= batch.files
            try:
                if batch.jobs or self._considered:
                    self._carry_out(batch.jobs)
                is_due = time.monotonic() - self._synced_at >= RELAXED_SYNC_INTERVAL_S
                if is_due or batch.wants_sync or self._queue.is_over:
                    self._sync_relaxed()
                    self._reserve.keep()
                self._freed.punch_due()
                self._shrink_index()
            except Exception as error:  # the thread must live on, or callers would wait for ever
                _log.exception("the committer goes on after this")
                self._rollback()
                for job in batch.jobs:
                    job.is_left = False
                    if not job.is_settled:
                        job.error = index_error(error)
                answer(batch.jobs)
                if batch.wants_sync:
                    self._queue.sync_soon()
                time.sleep(FAILURE_PAUSE_S)

    def _pause_s(self) -> float | None:
        """The time after which something is to be done although nothing comes; None for never."""
        if self._is_shrinking:
            return SHRINK_PAUSE_S
        is_idle = not (self._is_dirty or self._considered or self._freed.is_waiting or self._reserve.is_gone)
        return None if is_idle else RELAXED_SYNC_INTERVAL_S

    def _carry_out(self, batch: list[Job]) -> None:
        fresh = [job for job in batch if not job.is_written]
        for job in fresh:
            job.failure, job.is_written = _write(job.pending, self._disk), True
        if self._durability is Durability.STRICT:
            written = [job for job in fresh if job.pending is not None and job.failure is None]
            failed = _sync({job.pending.file.file_id: job.pending.file for job in written if job.pending})
            for job in written:
                if job.pending is not None:
                    job.failure = failed.get(job.pending.file.file_id)
        else:
            self._keep_unsynced(fresh)
        try:
            dead = self._transact_in_parts(batch)
        except (sqlite3.Error, ServerError) as error:
            for job in batch:
                job.error = job.error or index_error(error)
            answer(batch)
        else:
            self._considered.clear()
            if self._space.bound_bytes is not None:
                self._space.measure()
            answer(batch)
            self._freed.add(dead)
            if self._durability is Durability.STRICT:
                self._freed.note_durable(self.db)
        self._queue.put_back([job for job in batch if job.is_left])

    def _transact_in_parts(self, batch: list[Job]) -> list[str]:
        """Carry the batch out; where something in it is refused, its halves one after the other, so that nobody's
        change fails for another's. Returns files that no row names. Raises sqlite3.Error, ServerError; what was carried
        out by then is answered.
        """
        try:
            return self._transact_even_if_full(batch)
        except RefusedChangesError as error:
            if len(batch) <= 1:
                raise
            _log.debug("a transaction of %d changes is refused, and tried in parts: %s", len(batch), error)
        middle = len(batch) // 2
        for part in (batch[:middle], batch[middle:]):
            try:
                self._freed.add(self._transact_in_parts(part))
            except RefusedChangesError as error:
                for job in part:
                    job.error = job.error or error
            answer(part)
        return []

    def _transact_even_if_full(self, batch: list[Job]) -> list[str]:
        """Do what `_transact` does. On a full disk use the reserve, and carry out only the changes that free space."""
        try:
            return self._transact(batch)
        except sqlite3.Error as error:
            if not (is_full(error) and any(job.frees for job in batch) and self._reserve.give_up()):
                raise
            for job in batch:
                job.failure = job.failure or (None if job.frees else index_error(error))
            dead = self._transact(batch)
            shorten_log(self.db)
            return dead

    def _transact(self, batch: list[Job]) -> list[str]:
        """Carry the batch out in one transaction; returns the files that no row names after it. Raises sqlite3.Error,
        and then nothing has changed.
        """
        for job in batch:
            job.is_left = False
        tx = Transaction(self.db, self._versions, synced=self._durability is Durability.STRICT)
        tx.released |= self._considered
        strict = self._durability is Durability.STRICT
        try:
            self.db.execute(f"PRAGMA synchronous={'FULL' if strict else 'NORMAL'}")
            self.db.execute("BEGIN IMMEDIATE")
            if self._journal is not None:
                self._journal.catch_up(tx)
            self._carry_out_some(tx, batch)
            if self._journal is not None:
                self._journal.append_to_journal(tx)
            # This write also replaces what a failed commit may have left in the log, before the files it named go.
            transactions = count_transaction(self.db)
            dead = tx.dead_files()
            holes = tx.holes()
            self.db.execute("COMMIT")
            self._on_changes(tx.committed())
            self._space.doom(holes)
            self.transaction_count += 1
            self.change_count += sum(job.error is None and not job.is_left for job in batch)
        except BaseException:
            self._rollback()
            raise
        finally:  # also after a failed commit, since it may have changed rows
            _forget_changed_keys(self._resolved, tx)
        if strict:
            self._mark.note(Identity(self._store_number, transactions))
        self._freed.add((), holes)
        return dead

    def _carry_out_some(self, tx: Transaction, batch: Sequence[Job]) -> None:
        """Carry out changes until the transaction is long enough. The others are left."""
        until_s, row_count = time.monotonic() + TRANSACTION_S, 0
        for number, job in enumerate(batch):
            if number and (row_count >= TRANSACTION_ROWS or time.monotonic() >= until_s):
                for later in batch[number:]:
                    later.is_left = True
                return
            job.error = job.failure
            if job.error is None:
                row_count += _carry_out_one(tx, job, self._journal)

    def _rollback(self) -> None:
        if not self.db.in_transaction:
            return
        try:
            self.db.execute("ROLLBACK")
        except sqlite3.Error:  # a connection that cannot roll back is replaced
            self.db.close()
            self.db = connect(self._path)

    def _keep_unsynced(self, batch: list[Job]) -> None:
        self._is_dirty = True
        for job in batch:
            if job.pending is not None and job.pending.file.file_id not in self._unsynced:
                job.pending.file.hold()
                self._unsynced[job.pending.file.file_id] = job.pending.file

    def _sync_relaxed(self) -> None:
        """Make everything so far survive power loss. A file that could not be synced keeps `synced` = 0 in its rows."""
        self._synced_at = time.monotonic()
        if not self._is_dirty:
            return
        failed = _sync(self._unsynced)
        marks = [(file_id,) for file_id in self._unsynced if file_id not in failed]
        try:
            transactions = self._note_synced(marks)
        except sqlite3.Error as error:
            if not (is_full(error) and self._reserve.give_up()):
                return
            try:  # only now may the space of deleted bytes be given back
                transactions = self._note_synced(marks)
            except sqlite3.Error:
                return
            shorten_log(self.db)
        self._mark.note(Identity(self._store_number, transactions))
        for file in self._unsynced.values():
            file.release()
        self._unsynced.clear()
        self._is_dirty = False
        self._freed.note_durable(self.db)

    def _note_synced(self, marks: Sequence[tuple[str]]) -> int:
        """Record that the extents of these files survive power loss; returns the transaction's number. Raises
        sqlite3.Error, and then nothing has changed.
        """
        try:
            self.db.execute("PRAGMA synchronous=FULL")
            self.db.execute("BEGIN IMMEDIATE")
            self.db.executemany("UPDATE extents SET synced = 1 WHERE file_id = ? AND synced = 0", marks)
            transactions = count_transaction(self.db)
            self.db.execute("COMMIT")
        except sqlite3.Error:
            self._rollback()
            raise
        return transactions

    def _shrink_index(self) -> None:
        """Rows that were deleted leave empty pages: without this the index would be as large as it ever was, and its
        bytes count in the bound of the directory.
        """
        if not self._can_shrink:
            return
        was_shrinking, self._is_shrinking = self._is_shrinking, False
        with contextlib.suppress(sqlite3.Error):  # the disk is full: other changes tell whom it concerns
            self._is_shrinking = shrink(self.db)
        if was_shrinking and not self._is_shrinking:
            shorten_log(self.db)
            if self._space.bound_bytes is not None:
                self._space.measure()
                self._space.freed()


def _carry_out_one(tx: Transaction, job: Job, journal: SharedJournal | None) -> int:
    """A change may be carried out several times: it changes nothing but `tx`. About how many rows the journal takes
    for it.
    """
    touched_count, row_count = len(tx.touched), 0
    try:
        with tx.step():
            job.result = job.change(tx)
            if journal is not None:
                row_count = journal.check(tx, tx.touched[touched_count:], job.caller)
        if job.pending is not None:
            job.pending.may_be_named = (job.pending.file.file_id, job.pending.offset) in tx.named
    except sqlite3.Error as error:
        if is_full(error) or not tx.db.in_transaction:
            raise  # the index takes no more changes, or SQLite rolled the whole transaction back
        job.error = index_error(error)
    except Exception as error:  # the change itself refuses: it has left no row
        job.error = error
        if job.pending is not None:
            job.pending.may_be_named = False
    return row_count


def _forget_changed_keys(resolved: ResolvedKeys, tx: Transaction) -> None:
    if tx.has_moved:
        resolved.forget_all()
    elif tx.changes or tx.moved:
        resolved.forget({(change.bucket, change.key) for change in tx.changes} | tx.moved)


def _write(pending: Pending | None, disk: Disk) -> ServerError | None:
    if pending is not None and pending.data:
        try:
            pending.file.write(pending.data, pending.offset, disk)
        except OSError as error:
            return disk_error(error, "writing")
    return None


def _sync(files: dict[str, WriteFile]) -> dict[str, ServerError]:
    """Sync each file; returns the error of each file that failed."""
    failed = {}
    for file_id, file in files.items():
        try:
            file.sync()
        except OSError as error:
            failed[file_id] = disk_error(error, "syncing")
    return failed


def _opened(path: Path, reserve: Reserve) -> sqlite3.Connection:
    """Open the index, or make a new one. On a full disk the reserve is given up for it."""
    try:
        return _open(path)
    except sqlite3.OperationalError as error:
        if not (is_full(error) and reserve.give_up()):
            raise
        return _open(path)


def _open(path: Path) -> sqlite3.Connection:
    connection = connect(path)
    try:
        create(connection)
    except BaseException:
        connection.close()
        raise
    return connection


def is_full(error: sqlite3.Error) -> bool:
    """Whether the error says that the disk is full."""
    return getattr(error, "sqlite_errorcode", None) in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_SHMSIZE)


def index_error(error: Exception) -> ServerError:
    """The ServerError for an error of SQLite, or around it."""
    if isinstance(error, ServerError):
        return error
    if isinstance(error, sqlite3.Error) and is_full(error):
        return ServerError(ErrorCode.INSUFFICIENT_STORAGE, "no space left for the index", retryable=True)
    return ServerError(ErrorCode.INTERNAL_ERROR, "the index could not be written", retryable=True)
