"""Durable metadata in SQLite: engines, sessions, prefixes and their blocks on engines, pins and quotas. Source: 003,
"persistent metadata" (model, prefix, block → node; session → node; nodes; access times).

A registration is on the disk when `add_engine` returns. Sessions and blocks change all the time and are written down
about once a second, so a crash loses at most that; the engines' own events bring it back.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from objectcache.orchestrator.metadata_blocks import KnownBlocks
from objectcache.orchestrator.metadata_file import MetadataError, MetadataFile


class NameTakenError(MetadataError):
    """An engine's name is another engine's."""


@dataclass(frozen=True, slots=True)
class RegisteredEngine:
    """An engine as it was registered. `settings` is JSON."""

    url: str
    name: str
    settings: str
    is_draining: bool = False


class Metadata:
    """One file. Safe from any thread; calls wait for each other."""

    def __init__(self, folder: Path) -> None:
        """Opens or makes the file. Raises MetadataError, OSError."""
        self.file = MetadataFile(folder)
        self.blocks = KnownBlocks(self.file)

    def close(self) -> None:
        """Close the file."""
        self.file.close()

    def add_engine(self, engine: RegisteredEngine) -> None:
        """Register an engine, or register it anew with other settings. Raises NameTakenError."""
        try:
            self.file.write(
                "INSERT INTO engines VALUES (?, ?, ?, ?, ?) ON CONFLICT (url) DO UPDATE SET name = excluded.name,"
                " settings = excluded.settings, is_draining = excluded.is_draining",
                [(engine.url, engine.name, engine.settings, int(engine.is_draining), time.time())],
            )
        except sqlite3.IntegrityError:
            raise NameTakenError(f"the name {engine.name} is another engine's") from None

    def set_draining(self, name: str, *, is_draining: bool) -> None:
        """Note that an engine drains, or not any more, if it is registered."""
        self.file.write("UPDATE engines SET is_draining = ? WHERE name = ?", [(int(is_draining), name)])

    def remove_engine(self, name: str) -> None:
        """Forget an engine with its blocks and sessions."""
        with self.file.transaction() as db:
            db.execute("DELETE FROM engines WHERE name = ?", (name,))
            db.execute("DELETE FROM sessions WHERE engine = ?", (name,))
            for table, column in (("entries", "engine"), ("sources", "source")):
                is_rank = f"substr({column}, 1, length(?2)) = ?2"  # GLOB would read a name as a pattern
                db.execute(f"DELETE FROM {table} WHERE {column} = ?1 OR {is_rank}", (name, f"{name}#"))

    def engines(self) -> list[RegisteredEngine]:
        """All engines, in the order in which they came."""
        rows = self.file.read("SELECT url, name, settings, is_draining FROM engines ORDER BY added_at, url")
        return [RegisteredEngine(url, name, settings, bool(draining)) for url, name, settings, draining in rows]

    def note_sessions(self, engines: Mapping[str, str], sessions_max: int = 100_000) -> None:
        """Where sessions are now. The ones that were used longest ago are forgotten."""
        now = time.time()
        with self.file.transaction() as db:
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
        rows = self.file.read("SELECT session, engine FROM sessions ORDER BY used_at")
        return [(session, engine) for session, engine in rows]

    def set_pin(self, prefix: str, engine: str, until: float | None) -> None:
        """Send prompts that begin so to this engine until then (Unix seconds; None: for good)."""
        self.file.write("INSERT OR REPLACE INTO pins VALUES (?, ?, ?)", [(prefix, engine, until)])

    def remove_pin(self, prefix: str) -> None:
        """Do so no more."""
        self.file.write("DELETE FROM pins WHERE prefix = ?", [(prefix,)])

    def pins(self) -> dict[str, tuple[str, float | None]]:
        """Prefixes with their engines and their ends, also those that are over by this host's clock."""
        rows = self.file.read("SELECT prefix, engine, until FROM pins")
        return {prefix: (engine, until) for prefix, engine, until in rows}

    def set_quota(self, tenant: str, document: str) -> None:
        """A tenant's share and bounds, as JSON."""
        self.file.write("INSERT OR REPLACE INTO quotas VALUES (?, ?)", [(tenant, document)])

    def quotas(self) -> dict[str, str]:
        """The shares and bounds of tenants."""
        return dict(self.file.read("SELECT tenant, document FROM quotas"))
