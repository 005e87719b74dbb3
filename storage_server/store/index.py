"""The SQLite index: which extent holds which object. A commit here is what publishes an object.

Write-ahead log with synchronous=FULL: a committed row survives power loss. One thread writes, a few read; every public
method is a coroutine that hops to one of them.
"""

from __future__ import annotations

import asyncio
import json
import sqlite3
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from descriptors.errors import CallerError, ErrorCode, ServerError
from descriptors.storage_api import BucketInfo, ObjectInfo
from storage_server.store.extents import Extent, PinSet

SCHEMA_VERSION = 1
READ_THREADS = 2
_T = TypeVar("_T")

_SCHEMA = """
CREATE TABLE IF NOT EXISTS buckets (name TEXT PRIMARY KEY, owner TEXT NOT NULL, created_at REAL NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS objects (
    bucket TEXT NOT NULL, key TEXT NOT NULL, nbytes INTEGER NOT NULL, etag TEXT NOT NULL, modified_at REAL NOT NULL,
    headers TEXT NOT NULL, file_id TEXT NOT NULL, file_offset INTEGER NOT NULL,
    PRIMARY KEY (bucket, key)) WITHOUT ROWID;
"""


@dataclass(frozen=True, slots=True)
class IndexedObject:
    """An object and its extent."""

    info: ObjectInfo
    extent: Extent


class Index:
    """Buckets and objects. Raises CallerError(NoSuchBucket, NoSuchKey, BucketAlready...)."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._local = threading.local()
        self._connections: list[sqlite3.Connection] = []
        self._connections_lock = threading.Lock()
        self._writer = ThreadPoolExecutor(1, "index-writer")
        self._readers = ThreadPoolExecutor(READ_THREADS, "index-reader")
        self._writer.submit(self._create).result()
        everyone = threading.Barrier(READ_THREADS)
        for opened in [self._readers.submit(self._open_one, everyone) for _ in range(READ_THREADS)]:
            opened.result()

    def close(self) -> None:
        """Wait for what is running, then close every connection."""
        self._writer.shutdown()
        self._readers.shutdown()
        for connection in self._connections:
            connection.close()

    async def create_bucket(self, bucket: str, owner: str, now_s: float) -> None:
        """BucketAlreadyOwnedByYou or BucketAlreadyExists when the name is taken."""

        def create(connection: sqlite3.Connection) -> None:
            row = connection.execute("SELECT owner FROM buckets WHERE name = ?", (bucket,)).fetchone()
            if row is None:
                connection.execute("INSERT INTO buckets VALUES (?, ?, ?)", (bucket, owner, now_s))
                return
            code = ErrorCode.BUCKET_ALREADY_OWNED if row[0] == owner else ErrorCode.BUCKET_ALREADY_EXISTS
            raise CallerError(code, f"the bucket {bucket} exists already", field="bucket")

        await self._write(create)

    async def bucket(self, bucket: str) -> BucketInfo:
        """NoSuchBucket when there is none."""
        return await self._read(lambda connection: _require_bucket(connection, bucket))

    async def buckets(self) -> list[BucketInfo]:
        """All buckets by name."""
        sql = "SELECT name, created_at FROM buckets ORDER BY name"
        return await self._read(lambda connection: [BucketInfo(*row) for row in connection.execute(sql)])

    async def publish(self, bucket: str, entry: IndexedObject) -> Extent | None:
        """Make the object visible; the extent it replaced, if any. NoSuchBucket when the bucket is gone."""

        def publish(connection: sqlite3.Connection) -> Extent | None:
            _require_bucket(connection, bucket)
            replaced = _object(connection, bucket, entry.info.key)
            info, extent = entry.info, entry.extent
            connection.execute(
                "INSERT OR REPLACE INTO objects VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    bucket,
                    info.key,
                    info.nbytes,
                    info.etag,
                    info.modified_at,
                    json.dumps(info.headers),
                    extent.file_id,
                    extent.offset,
                ),
            )
            return replaced.extent if replaced else None

        return await self._write(publish)

    async def remove(self, bucket: str, key: str) -> Extent | None:
        """Forget an object; its extent, or None when there was none. NoSuchBucket when the bucket is gone."""

        def remove(connection: sqlite3.Connection) -> Extent | None:
            _require_bucket(connection, bucket)
            found = _object(connection, bucket, key)
            connection.execute("DELETE FROM objects WHERE bucket = ? AND key = ?", (bucket, key))
            return found.extent if found else None

        return await self._write(remove)

    async def find(self, bucket: str, key: str, pins: PinSet | None = None) -> IndexedObject:
        """NoSuchKey when absent. With `pins`, the extent is pinned before any later write can dispose of it."""

        def find(connection: sqlite3.Connection) -> IndexedObject:
            with pins.planning() if pins else nullcontext():
                _require_bucket(connection, bucket)
                found = _object(connection, bucket, key)
                if found is not None and pins is not None:
                    pins.keep([found.extent])
            if found is None:
                raise CallerError(ErrorCode.NO_SUCH_KEY, f"there is no object {key!r}", field="key")
            return found

        return await self._read(find)

    async def find_prefix(self, bucket: str, keys: Sequence[str], pins: PinSet | None = None) -> list[Extent | None]:
        """The extent of each key, None where there is none, in the order of `keys`; pinned as in `find`."""
        sql = (
            "SELECT o.file_id, o.file_offset, o.nbytes FROM json_each(?) AS wanted"
            " LEFT JOIN objects AS o ON o.bucket = ? AND o.key = wanted.value ORDER BY wanted.id"
        )
        wanted = json.dumps(keys, ensure_ascii=False)

        def find(connection: sqlite3.Connection) -> list[Extent | None]:
            with pins.planning() if pins else nullcontext():
                _require_bucket(connection, bucket)
                rows = connection.execute(sql, (wanted, bucket)).fetchall()
                extents = [Extent(*row) if row[0] is not None else None for row in rows]
                if pins is not None:
                    pins.keep(extents)
            return extents

        return await self._read(find)

    async def page(self, bucket: str, start: str, inclusive: bool, prefix: str, limit: int) -> list[ObjectInfo]:
        """Up to `limit` objects from `start` on whose keys start with `prefix`, in UTF-8 byte order."""
        comparison = ">=" if inclusive else ">"
        sql = (
            "SELECT key, nbytes, etag, modified_at, headers FROM objects"
            f" WHERE bucket = ? AND key {comparison} ? ORDER BY key LIMIT ?"
        )

        def page(connection: sqlite3.Connection) -> list[ObjectInfo]:
            found = []
            for key, nbytes, etag, modified_at, headers in connection.execute(sql, (bucket, start, limit)):
                if not key.startswith(prefix):
                    break
                found.append(ObjectInfo(key, nbytes, etag, modified_at, json.loads(headers)))
            return found

        return await self._read(page)

    async def file_ids(self) -> set[str]:
        """Every file some object refers to."""
        sql = "SELECT DISTINCT file_id FROM objects"
        return await self._read(lambda connection: {row[0] for row in connection.execute(sql)})

    async def _write(self, action: Callable[[sqlite3.Connection], _T]) -> _T:
        def run() -> _T:
            connection = self._connection()
            connection.execute("BEGIN IMMEDIATE")
            try:
                result = action(connection)
                connection.execute("COMMIT")
            except BaseException as error:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                if isinstance(error, sqlite3.OperationalError):
                    raise _index_error(error) from error
                raise
            return result

        return await asyncio.get_running_loop().run_in_executor(self._writer, run)

    async def _read(self, action: Callable[[sqlite3.Connection], _T]) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._readers, lambda: action(self._connection()))

    def _connection(self) -> sqlite3.Connection:
        connection: sqlite3.Connection | None = getattr(self._local, "connection", None)
        if connection is None:
            connection = sqlite3.connect(self._path, isolation_level=None, check_same_thread=False, timeout=30)
            connection.execute("PRAGMA journal_mode=WAL")
            connection.execute("PRAGMA synchronous=FULL")
            self._local.connection = connection
            with self._connections_lock:
                self._connections.append(connection)
        return connection

    def _open_one(self, everyone: threading.Barrier) -> None:
        """Each reader thread opens its connection now, so that no request pays for it."""
        self._connection()
        everyone.wait()

    def _create(self) -> None:
        connection = self._connection()
        version = connection.execute("PRAGMA user_version").fetchone()[0]
        if version not in (0, SCHEMA_VERSION):
            raise RuntimeError(f"{self._path} has schema {version}; this release reads {SCHEMA_VERSION}")
        connection.executescript(_SCHEMA)
        connection.execute(f"PRAGMA user_version={SCHEMA_VERSION}")


def _index_error(error: sqlite3.OperationalError) -> ServerError:
    if error.sqlite_errorcode == sqlite3.SQLITE_FULL:
        return ServerError(ErrorCode.INSUFFICIENT_STORAGE, "no space left for the index", retryable=True)
    return ServerError(ErrorCode.INTERNAL_ERROR, "the index could not be written", retryable=True)


def _require_bucket(connection: sqlite3.Connection, bucket: str) -> BucketInfo:
    row = connection.execute("SELECT name, created_at FROM buckets WHERE name = ?", (bucket,)).fetchone()
    if row is None:
        raise CallerError(ErrorCode.NO_SUCH_BUCKET, f"there is no bucket {bucket}", field="bucket")
    return BucketInfo(*row)


def _object(connection: sqlite3.Connection, bucket: str, key: str) -> IndexedObject | None:
    row = connection.execute(
        "SELECT nbytes, etag, modified_at, headers, file_id, file_offset FROM objects WHERE bucket = ? AND key = ?",
        (bucket, key),
    ).fetchone()
    if row is None:
        return None
    nbytes, etag, modified_at, headers, file_id, offset = row
    return IndexedObject(
        ObjectInfo(key, nbytes, etag, modified_at, json.loads(headers)), Extent(file_id, offset, nbytes)
    )
