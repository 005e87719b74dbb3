"""The index at the moment of a cut. SQLite is trusted with what it synced; what it did not sync may go.

A copy is legitimate while nobody can commit: the write lock is held, so the log (WAL) is not begun anew, and every page
a checkpoint may just be moving into the database is in the log, too. The shared-memory file is not copied; it is made
again from the log, as after any crash.
"""

from __future__ import annotations

import shutil
import sqlite3
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

INDEX = "index.sqlite3"
_HEADER_BYTES = 32
_FRAME_HEADER_BYTES = 24


@dataclass(frozen=True, slots=True)
class LogPosition:
    """A place in a log: its salt, which changes when the log begins anew, and how many frames come before."""

    salt: bytes = b""
    frames: int = 0


class WatchedIndex:
    """A connection that says when a transaction that will sync the log begins, and when its commit has synced it: one
    made with synchronous=FULL.
    """

    def __init__(
        self, db: sqlite3.Connection, on_synced: Callable[[], None], on_begin: Callable[[], None] = lambda: None
    ) -> None:
        self._db = db
        self._on_synced = on_synced
        self._on_begin = on_begin
        self._is_full = True

    def execute(self, sql: str, *arguments: Any) -> sqlite3.Cursor:
        """As the connection's own."""
        cursor = self._db.execute(sql, *arguments)
        if sql.startswith("PRAGMA synchronous"):
            self._is_full = sql.endswith("FULL")
            if self._is_full:
                self._on_begin()
        elif sql == "COMMIT" and self._is_full:
            self._on_synced()
        return cursor

    def __getattr__(self, name: str) -> Any:
        return getattr(self._db, name)


@contextmanager
def no_commits(data_dir: Path) -> Iterator[None]:
    """Hold SQLite's write lock."""
    connection = sqlite3.connect(data_dir / INDEX, isolation_level=None, timeout=30)
    try:
        connection.execute("BEGIN IMMEDIATE")
        yield
        connection.execute("ROLLBACK")
    finally:
        connection.close()


def log_position(data_dir: Path) -> LogPosition:
    """The log's end."""
    data = _log(data_dir)
    if len(data) < _HEADER_BYTES:
        return LogPosition()
    salt, step = data[16:24], _frame_bytes(data)
    frames = 0
    while data[_HEADER_BYTES + frames * step + 8 :][:8] == salt:
        frames += 1
    return LogPosition(salt, frames)


def copy_index(source: Path, target: Path, frames: int | None) -> None:
    """Database and log, the log cut after `frames`."""
    shutil.copyfile(source / INDEX, target / INDEX)
    data = _log(source)
    if frames is not None and len(data) >= _HEADER_BYTES:
        data = data[: _HEADER_BYTES + frames * _frame_bytes(data)]
    (target / f"{INDEX}-wal").write_bytes(data)


def _log(data_dir: Path) -> bytes:
    path = data_dir / f"{INDEX}-wal"
    return path.read_bytes() if path.exists() else b""


def _frame_bytes(data: bytes) -> int:
    (page_bytes,) = struct.unpack_from(">I", data, 8)
    return _FRAME_HEADER_BYTES + int(page_bytes)
