"""The blocks that engines hold, in the metadata, with the batches of events that they were last told in."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from objectcache.orchestrator.metadata_file import MetadataFile

BATCH = 5000


@dataclass(frozen=True, slots=True)
class CacheEntry:
    """A block that an engine holds. `block` is the engine's own name of it as bytes, `prefix` ours."""

    engine: str
    prefix: bytes
    block: bytes
    model: str = ""
    used_at: float = 0.0


class KnownBlocks:
    """The blocks in one file."""

    def __init__(self, file: MetadataFile) -> None:
        self._file = file

    def note(self, added: Sequence[CacheEntry], removed: Iterable[tuple[str, bytes]] = ()) -> None:
        """Blocks that engines hold now, and those (engine, block) that they hold no more."""
        with self._file.transaction() as db:
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
        with self._file.transaction() as db:
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

    def batches(self) -> dict[str, tuple[int, float]]:
        """For each source the number and the time of the last batch that is written down."""
        rows = self._file.read("SELECT source, batch, sent_at FROM sources")
        return {source: (number, sent_at) for source, number, sent_at in rows}

    def sources(self) -> set[str]:
        """The names of all sources of which something is written down. SQLite looks each one up, whatever it has."""
        found = set(self.batches())
        last = ""
        while rows := self._file.read("SELECT engine FROM entries WHERE engine > ? ORDER BY engine LIMIT 1", (last,)):
            last = rows[0][0]
            found.add(last)
        return found

    def page(self, source: str, after: bytes = b"") -> list[tuple[bytes, bytes]]:
        """The next BATCH blocks of a source, behind the one that it names `after`: its own name and ours of each. The
        time of a page does not grow with the pages before it. Empty behind the last one.
        """
        return self._file.read(
            "SELECT block, prefix FROM entries WHERE engine = ? AND block > ? ORDER BY block LIMIT ?",
            (source, after, BATCH),
        )

    def all(self, engine: str | None = None) -> Iterator[CacheEntry]:
        """The blocks of one engine, or of all, some thousands at a time."""
        statement = (
            "SELECT engine, prefix, block, model, used_at FROM entries WHERE engine = ? AND block > ?"
            " ORDER BY block LIMIT ?"
        )
        for each in sorted(self.sources()) if engine is None else (engine,):
            last = b""
            while rows := self._file.read(statement, (each, last, BATCH)):
                yield from map(_entry, rows)
                last = rows[-1][2]

    def find(self, engine: str, block: bytes) -> CacheEntry | None:
        """One block."""
        rows = self._file.read(
            "SELECT engine, prefix, block, model, used_at FROM entries WHERE engine = ? AND block = ?", (engine, block)
        )
        return None if not rows else _entry(rows[0])


def _entry(row: Sequence[Any]) -> CacheEntry:
    engine, prefix, block, model, used_at = row
    return CacheEntry(engine, bytes(prefix), bytes(block), model, used_at)
