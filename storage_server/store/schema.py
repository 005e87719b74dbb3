"""The index's tables, and its connections.

An object row carries a `version`, unique for ever; extent rows belong to a version (or to an upload's) by that number.
Rows of several versions may name the same bytes: that is how a copy costs nothing. A file is free when no row names it.
`synced` is 0 while an extent's bytes may not have reached the disk (relaxed durability), 1 from then on. Times are
Unix seconds; `attributes` is the JSON of storage_server.store.rows.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from pathlib import Path

from storage_server.store.identity import draw_identity

SCHEMA_VERSION = 2

_SCHEMA = """
CREATE TABLE IF NOT EXISTS meta (name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS buckets (
    name TEXT PRIMARY KEY, owner TEXT NOT NULL, created_at REAL NOT NULL, lifecycle TEXT NOT NULL DEFAULT '[]'
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS objects (
    bucket TEXT NOT NULL, key TEXT NOT NULL, version INTEGER NOT NULL, nbytes INTEGER NOT NULL, etag TEXT NOT NULL,
    modified_at REAL NOT NULL, attributes TEXT NOT NULL, PRIMARY KEY (bucket, key)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS uploads (
    upload_id TEXT PRIMARY KEY, bucket TEXT NOT NULL, key TEXT NOT NULL, version INTEGER NOT NULL, owner TEXT NOT NULL,
    initiated_at REAL NOT NULL, attributes TEXT NOT NULL) WITHOUT ROWID;
CREATE UNIQUE INDEX IF NOT EXISTS uploads_by_key ON uploads (bucket, key, initiated_at, upload_id);
CREATE TABLE IF NOT EXISTS extents (
    version INTEGER NOT NULL, part_number INTEGER NOT NULL, object_offset INTEGER NOT NULL, nbytes INTEGER NOT NULL,
    file_id TEXT NOT NULL, file_offset INTEGER NOT NULL, etag TEXT NOT NULL, modified_at REAL NOT NULL, checksum TEXT,
    synced INTEGER NOT NULL, blocks BLOB NOT NULL, PRIMARY KEY (version, part_number)) WITHOUT ROWID;
DROP INDEX IF EXISTS extents_by_file;
CREATE INDEX IF NOT EXISTS extents_by_place ON extents (file_id, file_offset, nbytes);
CREATE INDEX IF NOT EXISTS extents_unsynced ON extents (version) WHERE synced = 0;
"""


def connect(path: Path) -> sqlite3.Connection:
    """A connection for one thread at a time; statements commit by themselves unless BEGIN was said."""
    _make_private(path)
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=30)
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("PRAGMA synchronous=FULL")
    connection.execute("PRAGMA cache_size=-16384")
    return connection


def create(connection: sqlite3.Connection) -> None:
    """Make the tables, or see that they are ours. Raises RuntimeError for another release's schema."""
    found = connection.execute("PRAGMA user_version").fetchone()[0]
    if found not in (0, SCHEMA_VERSION):
        raise RuntimeError(f"the index has schema {found}; this release reads {SCHEMA_VERSION}")
    connection.executescript(_SCHEMA)
    draw_identity(connection)
    connection.execute(f"PRAGMA user_version={SCHEMA_VERSION}")


def _make_private(path: Path) -> None:
    """Keys and sizes of every tenant are in the index and its log: they are the server's user's only.

    A file that is there is never opened here: closing it would drop the locks that SQLite holds on it in this process,
    and another process would take the log away under us (sqlite.org/howtocorrupt.html, section 2.2).
    """
    with contextlib.suppress(FileExistsError):
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    for suffix in ("", "-wal", "-shm"):
        part = path.with_name(path.name + suffix)
        with contextlib.suppress(FileNotFoundError, PermissionError):
            if part.stat().st_mode & 0o077:
                part.chmod(0o600)


def next_version(connection: sqlite3.Connection) -> int:
    """A number above every version in use."""
    sql = "SELECT max(coalesce((SELECT max(version) FROM objects), 0), coalesce((SELECT max(version) FROM extents), 0),"
    sql += " coalesce((SELECT max(version) FROM uploads), 0))"
    return int(connection.execute(sql).fetchone()[0]) + 1
