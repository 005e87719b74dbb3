"""The index's tables, and its connections.

An object row carries a `version`, unique for ever. Extent rows belong to a version, or to the version of an upload.
Rows of several versions may name the same bytes, so a copy writes no bytes. A file is free when no row names it.
`synced` is 0 while an extent's bytes may not have reached the disk (relaxed durability), and 1 from then on. Times are
Unix seconds; `attributes` is the JSON of kernel.rules.rows. `uses` has the objects of bounded caches; `parent`
is the key of the chunk before. `dirty` has the chunks that the service upstream does not have yet. `cache` says that a
bucket is a cache, and its bytes (descriptors.objects.BucketCache). `content` is the content id of an extent
(storage_server.kernel.upkeep.dedup_rows), NULL until deduplication has looked at it.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from pathlib import Path

from objectcache.adapters.beneath import Beneath
from storage_server.kernel.index.identity import draw_identity
from storage_server.kernel.index.migrations import SCHEMA_VERSION, migrate, require_current, run_whole, schema_of

INCREMENTAL = 2
"""SQLite's auto_vacuum that gives pages back when it is told to."""
SHRINK_PAGES = 256
"""Pages of 4 KiB that are given back at once; it takes some milliseconds."""
REWRITTEN_BYTES_MAX = 64 << 20
_TABLES = (
    "CREATE TABLE IF NOT EXISTS meta (name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID",
    """
    CREATE TABLE IF NOT EXISTS buckets (
        name TEXT PRIMARY KEY, owner TEXT NOT NULL, created_at REAL NOT NULL, lifecycle TEXT NOT NULL DEFAULT '[]',
        cache TEXT
    ) WITHOUT ROWID
    """,
    """
    CREATE TABLE IF NOT EXISTS objects (
        bucket TEXT NOT NULL, key TEXT NOT NULL, version INTEGER NOT NULL, nbytes INTEGER NOT NULL, etag TEXT NOT NULL,
        modified_at REAL NOT NULL, attributes TEXT NOT NULL, PRIMARY KEY (bucket, key)) WITHOUT ROWID
    """,
    """
    CREATE TABLE IF NOT EXISTS uploads (
        upload_id TEXT PRIMARY KEY, bucket TEXT NOT NULL, key TEXT NOT NULL, version INTEGER NOT NULL,
        owner TEXT NOT NULL, initiated_at REAL NOT NULL, attributes TEXT NOT NULL) WITHOUT ROWID
    """,
    "CREATE UNIQUE INDEX IF NOT EXISTS uploads_by_key ON uploads (bucket, key, initiated_at, upload_id)",
    """
    CREATE TABLE IF NOT EXISTS extents (
        version INTEGER NOT NULL, part_number INTEGER NOT NULL, object_offset INTEGER NOT NULL, nbytes INTEGER NOT NULL,
        file_id TEXT NOT NULL, file_offset INTEGER NOT NULL, etag TEXT NOT NULL, modified_at REAL NOT NULL,
        checksum TEXT, synced INTEGER NOT NULL, blocks BLOB NOT NULL, content BLOB,
        PRIMARY KEY (version, part_number)) WITHOUT ROWID
    """,
    """
    CREATE TABLE IF NOT EXISTS uses (
        bucket TEXT NOT NULL, key TEXT NOT NULL, used_at REAL NOT NULL, use_count INTEGER NOT NULL, parent TEXT,
        leased_until REAL,
        PRIMARY KEY (bucket, key)) WITHOUT ROWID
    """,
    """
    CREATE TABLE IF NOT EXISTS dirty (
        bucket TEXT NOT NULL, key TEXT NOT NULL, version INTEGER NOT NULL, PRIMARY KEY (bucket, key)) WITHOUT ROWID
    """,
    "CREATE INDEX IF NOT EXISTS extents_by_place ON extents (file_id, file_offset, nbytes)",
    "CREATE INDEX IF NOT EXISTS extents_by_content ON extents (content, version) WHERE content IS NOT NULL",
    "CREATE INDEX IF NOT EXISTS extents_unsynced ON extents (version) WHERE synced = 0",
)


def connect(path: Path) -> sqlite3.Connection:
    """A connection for one thread at a time. Each statement commits by itself, except after BEGIN."""
    _make_private(path)
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=30)
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("PRAGMA synchronous=FULL")
    connection.execute("PRAGMA cache_size=-16384")
    return connection


def connect_current(path: Path) -> sqlite3.Connection:
    """A connection to an index that has this release's schema. Raises SchemaError."""
    connection = connect(path)
    try:
        require_current(connection)
    except BaseException:
        connection.close()
        raise
    return connection


def create(connection: sqlite3.Connection) -> None:
    """Make the tables of a new index, or upgrade those of an earlier release. Raises SchemaError, sqlite3.Error.

    It always commits once, which syncs the log with all that a killed server had left in it. The server then deletes
    files that no row names, and those rows must not come back when the power fails.
    """
    if schema_of(connection) == 0:
        _let_it_shrink(connection)
        run_whole(connection, _TABLES)
    else:
        migrate(connection)
        # a large one of an earlier release stays as large as it was
        if not can_shrink(connection) and _bytes_of(connection) <= REWRITTEN_BYTES_MAX:
            with contextlib.suppress(sqlite3.OperationalError):  # the disk is full: it is tried again at the next start
                _let_it_shrink(connection)
    run_whole(connection, (f"PRAGMA user_version={SCHEMA_VERSION}",))
    draw_identity(connection)


def can_shrink(connection: sqlite3.Connection) -> bool:
    """Whether pages without rows can be given back to the file system."""
    return bool(connection.execute("PRAGMA auto_vacuum").fetchone()[0] == INCREMENTAL)


def shrink(connection: sqlite3.Connection) -> bool:
    """Give some pages back, if a quarter of all has no rows; whether there was something to do."""
    free = connection.execute("PRAGMA freelist_count").fetchone()[0]
    if free < max(SHRINK_PAGES, connection.execute("PRAGMA page_count").fetchone()[0] // 4):
        return False
    connection.executescript(f"PRAGMA incremental_vacuum({SHRINK_PAGES})")  # `execute` takes one step: a page
    return True


def shorten_log(connection: sqlite3.Connection) -> None:
    """Shorten SQLite's log, because its space can be used for changes, too."""
    with contextlib.suppress(sqlite3.Error):
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()


def _bytes_of(connection: sqlite3.Connection) -> int:
    pages, size = (connection.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_count", "page_size"))
    return int(pages * size)


def _let_it_shrink(connection: sqlite3.Connection) -> None:
    """The setting counts from the next rewriting on."""
    connection.execute(f"PRAGMA auto_vacuum={INCREMENTAL}")
    connection.execute("VACUUM")


def _make_private(path: Path) -> None:
    """Make the index and its log readable for the server's user only, as they hold keys and sizes of every tenant.

    A file that exists is never opened here: closing it would drop the locks that SQLite holds on it in this process,
    and another process could then delete the log that we use (sqlite.org/howtocorrupt.html, section 2.2).
    """
    with contextlib.suppress(FileExistsError):
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    for suffix in ("", "-wal", "-shm"):
        part = path.with_name(path.name + suffix)
        with contextlib.suppress(FileNotFoundError, PermissionError):
            if Beneath(part.parent, part.name).status().st_mode & 0o077:
                part.chmod(0o600)


def next_version(connection: sqlite3.Connection) -> int:
    """A number above every version in use."""
    sql = "SELECT max(coalesce((SELECT max(version) FROM objects), 0), coalesce((SELECT max(version) FROM extents), 0),"
    sql += " coalesce((SELECT max(version) FROM uploads), 0))"
    return int(connection.execute(sql).fetchone()[0]) + 1
