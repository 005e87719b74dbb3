"""The file of the metadata: SQLite, in the steps of its callers."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

SCHEMA = 1
FILE = "orchestrator.sqlite3"
_TABLES = """
CREATE TABLE engines (
    url TEXT PRIMARY KEY, name TEXT NOT NULL UNIQUE, settings TEXT NOT NULL, is_draining INTEGER NOT NULL,
    added_at REAL NOT NULL
) STRICT;
CREATE TABLE sessions (session TEXT PRIMARY KEY, engine TEXT NOT NULL, used_at REAL NOT NULL) STRICT, WITHOUT ROWID;
CREATE INDEX sessions_by_use ON sessions (used_at);
CREATE TABLE entries (
    engine TEXT NOT NULL, prefix BLOB NOT NULL, block BLOB NOT NULL, model TEXT NOT NULL, used_at REAL NOT NULL,
    PRIMARY KEY (engine, block)
) STRICT, WITHOUT ROWID;
CREATE TABLE sources (source TEXT PRIMARY KEY, batch INTEGER NOT NULL, sent_at REAL NOT NULL) STRICT;
CREATE TABLE pins (prefix TEXT PRIMARY KEY, engine TEXT NOT NULL, until REAL) STRICT;
CREATE TABLE quotas (tenant TEXT PRIMARY KEY, document TEXT NOT NULL) STRICT;
"""


class MetadataError(Exception):
    """The metadata cannot be read or written; the message says why."""


class DamagedMetadataError(MetadataError):
    """A part of the file makes no sense, as after a disk's error; the other parts may be well."""


class MetadataFile:
    """One file. Safe from any thread; calls wait for each other. A call fails with MetadataError, whatever the disk has
    done, and with sqlite3.IntegrityError where the caller's values contradict those that are there.
    """

    def __init__(self, folder: Path) -> None:
        """Opens or makes the file. Raises MetadataError, OSError."""
        folder.mkdir(parents=True, exist_ok=True)
        self._lock = threading.Lock()
        self.path = folder / FILE
        try:
            self._db = sqlite3.connect(self.path, check_same_thread=False, isolation_level=None)
            self.path.chmod(0o600)
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = FULL")
            self._prepare()
        except sqlite3.DatabaseError as error:
            raise MetadataError(f"{self.path}: {error}") from error
        self._identity = _identity_of(self.path)

    def _prepare(self) -> None:
        (version,) = self._db.execute("PRAGMA user_version").fetchone()
        if version == SCHEMA:
            return
        if version != 0:
            raise MetadataError(f"{self.path} has schema {version}; this release knows {SCHEMA}")
        self._db.executescript(f"BEGIN; {_TABLES} PRAGMA user_version = {SCHEMA}; COMMIT;")

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._db.close()

    def read(self, statement: str, values: Sequence[Any] = ()) -> list[Any]:
        """All rows of a statement. Raises MetadataError."""
        try:
            with self._lock:
                return self._db.execute(statement, values).fetchall()
        except sqlite3.DatabaseError as error:
            raise _failure(error, f"{self.path}: {error}") from error

    def write(self, statement: str, rows: Sequence[Sequence[Any]]) -> None:
        """Carry a statement out for each of these values, in one step. Raises MetadataError."""
        with self.transaction() as db:
            db.executemany(statement, rows)

    def transaction(self) -> _Transaction:
        """Several statements in one step."""
        return _Transaction(self._db, self._lock, self.require_same)

    def require_same(self) -> None:
        """SQLite goes on with a file that somebody has removed, or put another one in the place of: nothing of what it
        then writes would be there after a restart. Raises MetadataError.
        """
        try:
            is_same = _identity_of(self.path) == self._identity
        except OSError as error:
            raise MetadataError(f"{self.path}: {error.strerror}") from error
        if not is_same:
            raise MetadataError(f"{self.path} is another file than at the start")


class _Transaction:
    """Everything in the block, or nothing of it, is on the disk when the block ends."""

    def __init__(self, db: sqlite3.Connection, lock: threading.Lock, require_same: Callable[[], None]) -> None:
        self._db = db
        self._lock = lock
        self._require_same = require_same

    def __enter__(self) -> sqlite3.Connection:
        self._lock.acquire()
        try:
            self._require_same()
            self._db.execute("BEGIN IMMEDIATE")
        except BaseException as error:
            self._lock.release()
            if isinstance(error, sqlite3.DatabaseError):
                raise _unwritten(error) from error
            raise
        return self._db

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            if error is None:
                self._db.execute("COMMIT")
            elif self._db.in_transaction:  # an error of the disk may have ended it
                self._db.execute("ROLLBACK")
        except sqlite3.DatabaseError as failure:
            raise _unwritten(failure) from failure
        finally:
            self._lock.release()
        if isinstance(error, sqlite3.DatabaseError) and not isinstance(error, sqlite3.IntegrityError):
            raise _unwritten(error) from error


def _identity_of(path: Path) -> tuple[int, int]:
    """The device and the inode of a file. Raises OSError."""
    status = path.stat()
    return status.st_dev, status.st_ino


def _unwritten(error: sqlite3.DatabaseError) -> MetadataError:
    return _failure(error, f"the metadata cannot be written: {error}")


def _failure(error: sqlite3.DatabaseError, problem: str) -> MetadataError:
    """SQLite has one class for errors of the disk, and its base for a file that makes no sense."""
    return MetadataError(problem) if isinstance(error, sqlite3.OperationalError) else DamagedMetadataError(problem)
