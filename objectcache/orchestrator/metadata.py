"""Durable metadata in SQLite: engines, sessions, prefixes and their blocks on engines, pins and quotas. Source: 003,
"persistent metadata" (model, prefix, block → node; session → node; nodes; access times).

A registration is on the disk when `add_engine` returns. Sessions and blocks change all the time and are written down
about once a second, so a crash loses at most that; the engines' own events bring it back.
"""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SCHEMA = 1
FILE = "orchestrator.sqlite3"
BATCH = 5000
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


class NameTakenError(MetadataError):
    """An engine's name is another engine's."""


@dataclass(frozen=True, slots=True)
class RegisteredEngine:
    """An engine as it was registered. `settings` is JSON."""

    url: str
    name: str
    settings: str
    is_draining: bool = False


@dataclass(frozen=True, slots=True)
class CacheEntry:
    """A block that an engine holds. `block` is the engine's own name of it as bytes, `prefix` ours."""

    engine: str
    prefix: bytes
    block: bytes
    model: str = ""
    used_at: float = 0.0


class Metadata:
    """One file. Safe from any thread; calls wait for each other."""

    def __init__(self, folder: Path) -> None:
        """Opens or makes the file. Raises MetadataError, OSError."""
        folder.mkdir(parents=True, exist_ok=True)
        self._lock = threading.Lock()
        self._file = folder / FILE
        try:
            self._db = sqlite3.connect(self._file, check_same_thread=False, isolation_level=None)
            self._file.chmod(0o600)
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = FULL")
            self._prepare()
        except sqlite3.DatabaseError as error:
            raise MetadataError(f"{self._file}: {error}") from error

    def _prepare(self) -> None:
        (version,) = self._db.execute("PRAGMA user_version").fetchone()
        if version == SCHEMA:
            return
        if version != 0:
            raise MetadataError(f"{self._file} has schema {version}; this release knows {SCHEMA}")
        self._db.executescript(f"BEGIN; {_TABLES} PRAGMA user_version = {SCHEMA}; COMMIT;")

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._db.close()

    def add_engine(self, engine: RegisteredEngine) -> None:
        """Register an engine, or register it anew with other settings. Raises NameTakenError."""
        try:
            self._write(
                "INSERT INTO engines VALUES (?, ?, ?, ?, ?) ON CONFLICT (url) DO UPDATE SET name = excluded.name,"
                " settings = excluded.settings, is_draining = excluded.is_draining",
                [(engine.url, engine.name, engine.settings, int(engine.is_draining), time.time())],
            )
        except sqlite3.IntegrityError:
            raise NameTakenError(f"the name {engine.name} is another engine's") from None

    def set_draining(self, name: str, *, is_draining: bool) -> None:
        """Note that an engine drains, or not any more, if it is registered."""
        self._write("UPDATE engines SET is_draining = ? WHERE name = ?", [(int(is_draining), name)])

    def remove_engine(self, name: str) -> None:
        """Forget an engine with its blocks and sessions."""
        with self._transaction() as db:
            db.execute("DELETE FROM engines WHERE name = ?", (name,))
            db.execute("DELETE FROM sessions WHERE engine = ?", (name,))
            for table, column in (("entries", "engine"), ("sources", "source")):
                db.execute(f"DELETE FROM {table} WHERE {column} = ? OR {column} GLOB ?", (name, f"{name}#*"))

    def engines(self) -> list[RegisteredEngine]:
        """All engines, in the order in which they came."""
        rows = self._read("SELECT url, name, settings, is_draining FROM engines ORDER BY added_at, url")
        return [RegisteredEngine(url, name, settings, bool(draining)) for url, name, settings, draining in rows]

    def note_sessions(self, engines: Mapping[str, str], sessions_max: int = 100_000) -> None:
        """Where sessions are now. The ones that were used longest ago are forgotten."""
        now = time.time()
        with self._transaction() as db:
            db.executemany(
                "INSERT INTO sessions VALUES (?, ?, ?) ON CONFLICT (session) DO UPDATE SET engine = excluded.engine,"
                " used_at = excluded.used_at",
                [(session, engine, now) for session, engine in engines.items()],
            )
            (count,) = db.execute("SELECT COUNT(*) FROM sessions").fetchone()
            if count > sessions_max:
                db.execute(
                    "DELETE FROM sessions WHERE session IN (SELECT session FROM sessions ORDER BY used_at LIMIT ?)",
                    (count - sessions_max,),
                )

    def sessions(self) -> list[tuple[str, str]]:
        """Sessions and their engines, by their last use."""
        return [
            (session, engine) for session, engine in self._read("SELECT session, engine FROM sessions ORDER BY used_at")
        ]

    def note_entries(self, added: Sequence[CacheEntry], removed: Iterable[tuple[str, bytes]] = ()) -> None:
        """Blocks that engines hold now, and those (engine, block) that they hold no more."""
        with self._transaction() as db:
            db.executemany("DELETE FROM entries WHERE engine = ? AND block = ?", removed)
            db.executemany(
                "INSERT OR REPLACE INTO entries VALUES (?, ?, ?, ?, ?)",
                [(each.engine, each.prefix, each.block, each.model, each.used_at) for each in added],
            )

    def note_source(
        self,
        source: str,
        known: tuple[int, float] | None,
        added: Sequence[CacheEntry],
        removed: Sequence[bytes],
        *,
        is_cleared: bool,
    ) -> None:
        """Write the changes of batches, with the number and the time of the last one, in one step."""
        with self._transaction() as db:
            if is_cleared:
                db.execute("DELETE FROM entries WHERE engine = ?", (source,))
            db.executemany("DELETE FROM entries WHERE engine = ? AND block = ?", [(source, block) for block in removed])
            db.executemany(
                "INSERT OR REPLACE INTO entries VALUES (?, ?, ?, ?, ?)",
                [(each.engine, each.prefix, each.block, each.model, each.used_at) for each in added],
            )
            if known is None:
                db.execute("DELETE FROM sources WHERE source = ?", (source,))
            else:
                db.execute("INSERT OR REPLACE INTO sources VALUES (?, ?, ?)", (source, *known))

    def known_batches(self) -> dict[str, tuple[int, float]]:
        """For each source the number and the time of the last batch that is written down."""
        rows = self._read("SELECT source, batch, sent_at FROM sources")
        return {source: (number, sent_at) for source, number, sent_at in rows}

    def entries(self, engine: str | None = None) -> Iterator[CacheEntry]:
        """The blocks of one engine, or of all, some thousands at a time."""
        last: tuple[str, bytes] = (engine or "", b"")
        while True:
            rows = self._read(
                "SELECT engine, prefix, block, model, used_at FROM entries WHERE (engine, block) > (?, ?)"
                + (" AND engine = ?" if engine is not None else "")
                + " ORDER BY engine, block LIMIT ?",
                (*last, *(() if engine is None else (engine,)), BATCH),
            )
            for name, prefix, block, model, used_at in rows:
                yield CacheEntry(name, bytes(prefix), bytes(block), model, used_at)
            if len(rows) < BATCH:
                return
            last = rows[-1][0], bytes(rows[-1][2])

    def find_entry(self, engine: str, block: bytes) -> CacheEntry | None:
        """One block."""
        rows = self._read(
            "SELECT engine, prefix, block, model, used_at FROM entries WHERE engine = ? AND block = ?", (engine, block)
        )
        return None if not rows else CacheEntry(rows[0][0], bytes(rows[0][1]), bytes(rows[0][2]), *rows[0][3:])

    def set_pin(self, prefix: str, engine: str, until: float | None) -> None:
        """Send prompts that begin so to this engine until then (Unix seconds; None: for good)."""
        self._write("INSERT OR REPLACE INTO pins VALUES (?, ?, ?)", [(prefix, engine, until)])

    def remove_pin(self, prefix: str) -> None:
        """Do so no more."""
        self._write("DELETE FROM pins WHERE prefix = ?", [(prefix,)])

    def pins(self, now: float) -> dict[str, tuple[str, float | None]]:
        """Prefixes with their engines and their ends. Pins that are over are forgotten."""
        self._write("DELETE FROM pins WHERE until <= ?", [(now,)])
        rows = self._read("SELECT prefix, engine, until FROM pins")
        return {prefix: (engine, until) for prefix, engine, until in rows}

    def set_quota(self, tenant: str, document: str) -> None:
        """A tenant's share and bounds, as JSON."""
        self._write("INSERT OR REPLACE INTO quotas VALUES (?, ?)", [(tenant, document)])

    def quotas(self) -> dict[str, str]:
        """The shares and bounds of tenants."""
        return dict(self._read("SELECT tenant, document FROM quotas"))

    def _read(self, statement: str, values: Sequence[Any] = ()) -> list[Any]:
        try:
            with self._lock:
                return self._db.execute(statement, values).fetchall()
        except sqlite3.OperationalError as error:
            raise MetadataError(f"{self._file}: {error}") from error

    def _write(self, statement: str, rows: Sequence[Sequence[Any]]) -> None:
        with self._transaction() as db:
            db.executemany(statement, rows)

    def _transaction(self) -> _Transaction:
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
