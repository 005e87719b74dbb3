"""The file of the metadata: SQLite, in the steps of its callers."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Sequence
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


class MetadataFile:
    """One file. Safe from any thread; calls wait for each other."""

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
        except sqlite3.OperationalError as error:
            raise MetadataError(f"{self.path}: {error}") from error

    def write(self, statement: str, rows: Sequence[Sequence[Any]]) -> None:
        """Carry a statement out for each of these values, in one step. Raises MetadataError."""
        with self.transaction() as db:
            db.executemany(statement, rows)

    def transaction(self) -> _Transaction:
        """Several statements in one step."""
        return _Transaction(self._db, self._lock)


class _Transaction:
    """Everything in the block, or nothing of it, is on the disk when the block ends."""

    def __init__(self, db: sqlite3.Connection, lock: threading.Lock) -> None:
        self._db = db
        self._lock = lock

    def __enter__(self) -> sqlite3.Connection:
        self._lock.acquire()
        try:
            self._db.execute("BEGIN IMMEDIATE")
        except BaseException as error:
            self._lock.release()
            if isinstance(error, sqlite3.OperationalError):
                raise MetadataError(f"the metadata cannot be written: {error}") from error
            raise
        return self._db

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        try:
            self._db.execute("COMMIT" if kind is None else "ROLLBACK")
        except sqlite3.OperationalError as failure:
            raise MetadataError(f"the metadata cannot be written: {failure}") from failure
        finally:
            self._lock.release()
