"""The index of a shared directory: from its rows to records for the own journal, and from other journals' records to
its rows. Functions of an open transaction.

`records` has the newest record of each thing in each journal, without what it says, and when it was noted (Unix
seconds): of the thing's records the one of the greatest stamp holds, and of equal stamps that of the greatest writer.
`journals` has how far each journal is read, and `passed_over` the writers of those with records that made no sense
here: another release, or another Python, may know better. `waiting_uploads` has the uploads of which only parts are
known yet.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from storage_server.home.directory.rules.records import BodyRow, Record, is_named
from storage_server.home.service import Shown
from storage_server.kernel.index.transaction import Transaction
from storage_server.kernel.rules.rows import Touched, TouchedKind

TABLES = (
    """
    CREATE TABLE IF NOT EXISTS journals (
        writer TEXT PRIMARY KEY, generation INTEGER NOT NULL, position INTEGER NOT NULL) WITHOUT ROWID
    """,
    """
    CREATE TABLE IF NOT EXISTS records (
        kind TEXT NOT NULL, name TEXT NOT NULL, key TEXT NOT NULL, writer TEXT NOT NULL, stamp INTEGER NOT NULL,
        generation INTEGER NOT NULL, is_gone INTEGER NOT NULL, noted_at REAL NOT NULL,
        PRIMARY KEY (kind, name, key, writer)) WITHOUT ROWID
    """,
    "CREATE TABLE IF NOT EXISTS passed_over (writer TEXT PRIMARY KEY) WITHOUT ROWID",
    "CREATE TABLE IF NOT EXISTS waiting_uploads (upload_id TEXT PRIMARY KEY, version INTEGER NOT NULL) WITHOUT ROWID",
    "CREATE INDEX IF NOT EXISTS records_by_writer ON records (writer, generation)",
    "CREATE INDEX IF NOT EXISTS records_by_stamp ON records (kind, name, key, stamp, writer, is_gone)",
)
"""The record that holds is the last of its thing in `records_by_stamp`, so that finding it is as little work where all
writers have a record of the thing, as a neighbour can bring about.
"""
Named = tuple[TouchedKind, str, str]
"""A Touched, or the plain tuple of it: the collection of garbage, for which all threads stop, does not follow those."""
ROW_BYTES = 200
"""About so much of a journal a record takes, or a body, beside its checksums."""
FORGOTTEN_ROWS = 2_000
"""So many rows go in one change, which others wait for."""
_ORDER: dict[TouchedKind, int] = {"object": 0, "part": 1, "upload": 2, "bucket": 3}
_ORDER_BACK: dict[TouchedKind, int] = {"object": 0, "upload": 1, "part": 2, "bucket": 3}
"""Parts come behind the upload that comes back."""
_BODY_COLUMNS = "part_number, object_offset, nbytes, file_id, file_offset, etag, modified_at, checksum, blocks"


def prepare(tx: Transaction) -> None:
    """Make the tables."""
    for table in TABLES:
        tx.db.execute(table)


def positions(db: sqlite3.Connection) -> dict[str, tuple[int, int]]:
    """The generation of each writer's journal, and how far it is applied."""
    rows = db.execute("SELECT writer, generation, position FROM journals").fetchall()
    return {writer: (generation, position) for writer, generation, position in rows}


def note_position(db: sqlite3.Connection, writer: str, generation: int, position: int) -> None:
    """This far the journal is applied."""
    db.execute("INSERT OR REPLACE INTO journals VALUES (?, ?, ?)", (writer, generation, position))


def note_passed_over(db: sqlite3.Connection, writer: str) -> None:
    """Records of this journal made no sense here."""
    db.execute("INSERT OR IGNORE INTO passed_over VALUES (?)", (writer,))


def passed_over(db: sqlite3.Connection) -> set[str]:
    """The writers of journals with records that made no sense here."""
    return {writer for (writer,) in db.execute("SELECT writer FROM passed_over").fetchall()}


def read_again(db: sqlite3.Connection, reader: int, own: str) -> None:
    """Have journals read from their begin by another `reader` than before, where that has passed records over. An index
    that does not tell its reader is of a release that did not note such journals: all are read again, the own one too.
    """
    found = db.execute("SELECT value FROM meta WHERE name = 'journal_reader'").fetchone()
    if found is not None and found[0] == reader:
        return
    again = set(positions(db)) if found is None else passed_over(db)
    db.executemany("DELETE FROM journals WHERE writer = ?", [(writer,) for writer in again - {own}])
    if own in again:
        db.execute("UPDATE journals SET position = 0 WHERE writer = ?", (own,))
    db.execute("DELETE FROM passed_over")
    db.execute("INSERT OR REPLACE INTO meta VALUES ('journal_reader', ?)", (reader,))


def note_coming(db: sqlite3.Connection, generation: int, end: int) -> None:
    """The own journal's next generation is whole up to `end` when it counts. A torn frame behind that is no damage."""
    meta = [("journal_coming_generation", generation), ("journal_coming_end", end)]
    db.executemany("INSERT OR REPLACE INTO meta VALUES (?, ?)", meta)


def coming(db: sqlite3.Connection) -> tuple[int, int]:
    """The generation and the end that `note_coming` has noted last; zeros where it has not."""
    found = dict(db.execute("SELECT name, value FROM meta WHERE name LIKE 'journal_coming_%'").fetchall())
    return found.get("journal_coming_generation", 0), found.get("journal_coming_end", 0)


def last_stamp(db: sqlite3.Connection) -> int:
    """The greatest stamp that was seen."""
    return int(db.execute("SELECT coalesce(max(stamp), 0) FROM records").fetchone()[0])


def collected(db: sqlite3.Connection, touched: Iterable[Touched], now_stamp: int) -> list[Record]:
    """Records of the present state of these things. A deletion's stamp is one above the deleted record's stamp, so a
    concurrent change on another server wins. They come in an order in which the first of them alone make sense, too:
    an upload goes behind its object, and a bucket comes behind the deletion of what an earlier one has left.
    """
    records = list[Record]()
    for about in dict.fromkeys(touched):
        row, bodies = _shown_rows(db, about)
        if row is not None:
            records.append(Record(about, now_stamp, row, bodies))
            continue
        before = _holding(db, about)
        is_known = before is not None and not before[2] and is_named(about)  # releases before gave other names, too
        if about.kind != "part" and before is not None and is_known:
            records.append(Record(about, before[0] + 1, None))
    return sorted(records, key=lambda record: _ORDER[record.about.kind])


def written_rows(db: sqlite3.Connection, touched: Iterable[Touched]) -> tuple[int, int]:
    """About how many rows and bytes the records of these things have, which are not read for it."""
    rows, nbytes = 0, 0
    for about in dict.fromkeys(touched):
        sql, version = "SELECT count(*), coalesce(sum(length(blocks)), 0) FROM extents WHERE version = ?", None
        if about.kind == "object":
            found = db.execute("SELECT version FROM objects WHERE bucket = ? AND key = ?", about[1:]).fetchone()
            version = None if found is None else found[0]
        elif about.kind == "part":
            sql, version = f"{sql} AND part_number = {int(about.key)}", _upload_version(db, about.name)
        body_count, body_bytes = (0, 0) if version is None else db.execute(sql, (version,)).fetchone()
        rows, nbytes = rows + 1 + body_count, nbytes + body_bytes
    return rows, rows * ROW_BYTES + nbytes * 4 // 3  # checksums are written in base64


def collected_before(db: sqlite3.Connection, records: Sequence[Record]) -> list[Record]:
    """Records that take others back which the own journal has and the index has not: what `db`, a connection that sees
    the index before them, shows of their things, and of the parts of their uploads, which end with an upload. A stamp
    is one above that of the record before, so what other servers change meanwhile wins.
    """
    found = dict[Touched, Record]()
    for record in records:
        about, stamp = record.about, record.stamp + 1
        row, bodies = _shown_rows(db, about)
        found[about] = Record(about, stamp, row, bodies)
        if about.kind == "upload" and row is not None:
            for body in _bodies(db, _upload_version(db, about.name)):
                part = Touched("part", about.name, str(body.part_number))
                holding = _holding(db, part)
                found[part] = Record(part, stamp if holding is None else holding[0] + 1, (), (body,))
    return sorted(found.values(), key=lambda record: _ORDER_BACK[record.about.kind])


def note_own(db: sqlite3.Connection, writer: str, generation: int, records: Iterable[Record], now_s: float) -> None:
    """Note what the own journal says now; the rows show it already."""
    for record in records:
        _note(db, writer, generation, record, now_s)


def note_rewritten(db: sqlite3.Connection, writer: str, generation: int, kept: Iterable[Named]) -> None:
    """Note that a new generation of the own journal has these."""
    sql = "UPDATE records SET generation = ? WHERE kind = ? AND name = ? AND key = ? AND writer = ?"
    db.executemany(sql, [(generation, *about, writer) for about in kept])


def apply(tx: Transaction, writer: str, generation: int, records: Sequence[Record], now_s: float) -> list[Shown]:
    """Carry out a frame of a journal, as far as its records hold; returns which keys show something else now."""
    changed = list[Shown]()
    for record in records:
        known = tx.db.execute(
            "SELECT stamp FROM records WHERE kind = ? AND name = ? AND key = ? AND writer = ?",
            (*record.about, writer),
        ).fetchone()
        if known is not None and known[0] > record.stamp:
            continue
        holding = _holding(tx.db, record.about)
        _note(tx.db, writer, generation, record, now_s)
        is_applied = known is not None and known[0] == record.stamp
        if is_applied or (holding is not None and holding[:2] > (record.stamp, writer)):
            continue
        _SHOW[record.about.kind](tx, record)
        if record.about.kind == "object":
            etag = None if record.row is None else record.row[1]
            was_there = holding is not None and not holding[2]
            changed.append(Shown(record.about.name, record.about.key, etag, was_there))
    return changed


def forget_older(
    tx: Transaction, writer: str, generation: int, rows_max: int = FORGOTTEN_ROWS
) -> tuple[list[Shown], bool]:
    """A journal's new generation is read as a whole, and all other journals are, too: records that only older
    generations had are in none of them any more. A row that such a record still shows was deleted, and the deletion's
    record was dropped later. Returns which keys show nothing now, and whether there is more: one call changes about
    `rows_max` rows.
    """
    changed = list[Shown]()
    changes_before = tx.db.total_changes
    sql = "SELECT kind, name, key, stamp, is_gone FROM records WHERE writer = ? AND generation < ? LIMIT ?"
    older = tx.db.execute(sql, (writer, generation, rows_max)).fetchall()
    for kind, name, key, stamp, is_gone in older:
        about = Touched(kind, name, key)
        holding = _holding(tx.db, about)
        if not is_gone and holding is not None and holding[:2] == (stamp, writer):
            _SHOW[about.kind](tx, Record(about, stamp, None))
            if about.kind == "object":
                changed.append(Shown(name, key, None))
        tx.db.execute("DELETE FROM records WHERE kind = ? AND name = ? AND key = ? AND writer = ?", (*about, writer))
        if tx.db.total_changes - changes_before >= rows_max:
            break
    return changed, bool(older)


def outdated(db: sqlite3.Connection) -> list[tuple[str, int]]:
    """The writers, with the generations of their journals, of which records of older generations are still noted."""
    sql = "SELECT writer, generation FROM journals WHERE EXISTS"
    sql += (
        " (SELECT 1 FROM records WHERE records.writer = journals.writer AND records.generation < journals.generation)"
    )
    return [(writer, generation) for writer, generation in db.execute(sql).fetchall()]


def unnamed(db: sqlite3.Connection, file_ids: Iterable[str]) -> list[str]:
    """Those of these files that no row names."""
    sql = "SELECT 1 FROM extents WHERE file_id = ? LIMIT 1"
    return [file_id for file_id in file_ids if db.execute(sql, (file_id,)).fetchone() is None]


def kept(db: sqlite3.Connection, writer: str, gone_after_s: float) -> Iterator[Record]:
    """The records that a new generation of the own journal must have: all own records that hold. Of what is gone only
    what was deleted after `gone_after_s`, or hides another journal's record.
    """
    sql = "SELECT kind, name, key, stamp, is_gone, noted_at FROM records WHERE writer = ?"
    for kind, name, key, stamp, is_gone, noted_at in db.execute(sql, (writer,)):  # a list of all is freed at once
        about = Touched(kind, name, key)
        holding = _holding(db, about)
        if holding is None or holding[:2] != (stamp, writer):
            continue
        if is_gone:
            if noted_at > gone_after_s or _has_others(db, about, writer):
                yield Record(about, stamp, None)
            continue
        row, bodies = _shown_rows(db, about)
        if row is not None:
            yield Record(about, stamp, row, bodies)


def _holding(db: sqlite3.Connection, about: Touched) -> tuple[int, str, bool] | None:
    """Stamp and writer of the record that holds, and whether it says that the thing is gone."""
    sql = "SELECT stamp, writer, is_gone FROM records WHERE kind = ? AND name = ? AND key = ?"
    row = db.execute(f"{sql} ORDER BY stamp DESC, writer DESC LIMIT 1", about).fetchone()
    return None if row is None else (row[0], row[1], bool(row[2]))


def _has_others(db: sqlite3.Connection, about: Touched, writer: str) -> bool:
    sql = "SELECT 1 FROM records WHERE kind = ? AND name = ? AND key = ? AND writer != ? LIMIT 1"
    return db.execute(sql, (*about, writer)).fetchone() is not None


def _note(db: sqlite3.Connection, writer: str, generation: int, record: Record, now_s: float) -> None:
    db.execute(
        "INSERT INTO records VALUES (?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET stamp = excluded.stamp,"
        " generation = excluded.generation, is_gone = excluded.is_gone,"
        " noted_at = CASE WHEN stamp = excluded.stamp THEN noted_at ELSE excluded.noted_at END",
        (*record.about, writer, record.stamp, generation, record.row is None, now_s),
    )


def _shown_rows(db: sqlite3.Connection, about: Touched) -> tuple[tuple[Any, ...] | None, tuple[BodyRow, ...]]:
    """The index's rows of a thing."""
    if about.kind == "bucket":
        return db.execute(
            "SELECT owner, created_at, lifecycle FROM buckets WHERE name = ?", (about.name,)
        ).fetchone(), ()
    if about.kind == "object":
        sql = "SELECT nbytes, etag, modified_at, attributes, version FROM objects WHERE bucket = ? AND key = ?"
        row = db.execute(sql, (about.name, about.key)).fetchone()
        return (None, ()) if row is None else (row[:4], _bodies(db, row[4]))
    if about.kind == "upload":
        sql = "SELECT bucket, key, owner, initiated_at, attributes FROM uploads WHERE upload_id = ?"
        return db.execute(sql, (about.name,)).fetchone(), ()
    version = _upload_version(db, about.name) or _upload_version(db, about.name, "waiting_uploads")
    bodies = _bodies(db, version, int(about.key))
    return (() if bodies else None), bodies


def _bodies(db: sqlite3.Connection, version: int | None, part_number: int | None = None) -> tuple[BodyRow, ...]:
    """Those of a version, or of one part of it: an upload has thousands, and each new one is recorded by itself."""
    sql = f"SELECT {_BODY_COLUMNS} FROM extents WHERE version = ?"
    if part_number is not None:
        sql += f" AND part_number = {part_number}"
    return tuple(BodyRow(*row) for row in db.execute(f"{sql} ORDER BY part_number", (version,)).fetchall())


def _upload_version(db: sqlite3.Connection, upload_id: str, table: str = "uploads") -> int | None:
    row = db.execute(f"SELECT version FROM {table} WHERE upload_id = ?", (upload_id,)).fetchone()
    return None if row is None else int(row[0])


def _show_bucket(tx: Transaction, record: Record) -> None:
    name = record.about.name
    tx.db.execute("DELETE FROM buckets WHERE name = ?", (name,))
    if record.row is not None:
        tx.db.execute(
            "INSERT INTO buckets (name, owner, created_at, lifecycle) VALUES (?, ?, ?, ?)", (name, *record.row)
        )


def _show_object(tx: Transaction, record: Record) -> None:
    bucket, key = record.about.name, record.about.key
    row = tx.db.execute("SELECT version FROM objects WHERE bucket = ? AND key = ?", (bucket, key)).fetchone()
    if row is not None:
        tx.drop_extents(row[0])
        tx.db.execute("DELETE FROM objects WHERE bucket = ? AND key = ?", (bucket, key))
    tx.moved.add((bucket, key))
    if record.row is None:
        return
    version = tx.new_version()
    nbytes, etag, modified_at, attributes = record.row
    row = (bucket, key, version, nbytes, etag, modified_at, attributes)
    tx.db.execute("INSERT INTO objects VALUES (?, ?, ?, ?, ?, ?, ?)", row)
    _add_bodies(tx, version, record.bodies)


def _show_upload(tx: Transaction, record: Record) -> None:
    upload_id = record.about.name
    version = _upload_version(tx.db, upload_id)
    if version is None:
        version = _upload_version(tx.db, upload_id, "waiting_uploads")
        tx.db.execute("DELETE FROM waiting_uploads WHERE upload_id = ?", (upload_id,))
    if record.row is None:
        if version is not None:
            tx.drop_extents(version)
        tx.db.execute("DELETE FROM uploads WHERE upload_id = ?", (upload_id,))
        return
    bucket, key, owner, initiated_at, attributes = record.row
    version = tx.new_version() if version is None else version
    row = (upload_id, bucket, key, version, owner, initiated_at, attributes)
    tx.db.execute("INSERT OR REPLACE INTO uploads VALUES (?, ?, ?, ?, ?, ?, ?)", row)


def _show_part(tx: Transaction, record: Record) -> None:
    """A part may be known before its upload, which another journal tells of: its file is named from now on."""
    upload_id = record.about.name
    version = _upload_version(tx.db, upload_id) or _upload_version(tx.db, upload_id, "waiting_uploads")
    if version is None:
        if record.row is None or _holding(tx.db, Touched("upload", upload_id)) is not None:
            return  # it was completed or aborted
        version = tx.new_version()
        tx.db.execute("INSERT INTO waiting_uploads VALUES (?, ?)", (upload_id, version))
    tx.drop_extents(version, [int(record.about.key)])
    _add_bodies(tx, version, record.bodies)


def _add_bodies(tx: Transaction, version: int, bodies: Iterable[BodyRow]) -> None:
    columns = f"version, {_BODY_COLUMNS}, synced"
    tx.db.executemany(
        f"INSERT OR REPLACE INTO extents ({columns}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, 1)",
        [
            (
                version,
                body.part_number,
                body.object_offset,
                body.nbytes,
                body.file_id,
                body.file_offset,
                body.etag,
                body.modified_at,
                body.checksum,
                body.blocks,
            )
            for body in bodies
        ],
    )


_SHOW: dict[TouchedKind, Any] = {
    "bucket": _show_bucket,
    "object": _show_object,
    "upload": _show_upload,
    "part": _show_part,
}
