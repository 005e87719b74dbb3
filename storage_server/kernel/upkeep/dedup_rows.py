"""The queries that deduplication makes to the index, and the changes that it makes there.

The column `content` of an extent is its content id: SHA-256 of the scope and of the checksums of all blocks. It is NULL
until deduplication has looked at the extent. Equal bytes of one scope have equal ids; the reverse is proved byte by
byte before anything is shared.
"""

from __future__ import annotations

import hashlib
import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass

from descriptors.units import MIB
from storage_server.kernel.index.transaction import Transaction
from storage_server.kernel.rules.rows import EXTENT_COLUMNS
from storage_server.planning.extent import Extent, aligned
from storage_server.settings import Dedup

CONTENT_ID_BYTES = 16
EXTENTS_AT_ONCE = 2_048
CHECKSUM_BYTES_AT_ONCE = 4 * MIB
Version = tuple[str, str, int]
"""A bucket, a key, and the version that the key shows."""


@dataclass(frozen=True, slots=True)
class NewExtent:
    """An extent that deduplication has not looked at."""

    bucket: str
    key: str
    version: int
    part_number: int
    extent: Extent
    content_id: bytes


@dataclass(frozen=True, slots=True)
class NewExtents:
    """The new extents of some versions. Versions that are `unsynced` may not have reached the disk; those `left` have
    more extents than one look takes.
    """

    extents: list[NewExtent]
    unsynced: list[Version]
    left: list[Version]


@dataclass(frozen=True, slots=True)
class Duplicate:
    """A new extent, and an older one of the same length, scope and checksums."""

    new: NewExtent
    old: Extent


@dataclass(frozen=True, slots=True)
class StoredBytes:
    """The bytes that all extents would take if each had a location of its own, and those that their locations take."""

    named_bytes: int = 0
    stored_bytes: int = 0

    @property
    def ratio(self) -> float:
        """How many times its space is used on average; 1 where nothing is shared."""
        return self.named_bytes / self.stored_bytes if self.stored_bytes else 1.0


def content_id(scope: str, extent: Extent) -> bytes:
    """The id of these bytes in this scope."""
    digest = hashlib.sha256(f"{len(scope.encode())} {scope} {extent.nbytes} ".encode())
    digest.update(extent.checksums)
    return digest.digest()[:CONTENT_ID_BYTES]


def newest_version(db: sqlite3.Connection) -> int:
    """The last version whose objects, and all before them, are there; an open upload has its version from the start."""
    newest = "SELECT coalesce(max(version), 0) FROM extents"
    open_ones = "SELECT coalesce(min(version) - 1, 9223372036854775807) FROM uploads"
    return int(db.execute(f"SELECT min(({newest}), ({open_ones}))").fetchone()[0])


def has_unknown(db: sqlite3.Connection) -> bool:
    """Whether there may be extents that were not looked at. Versions up to the mark all were."""
    mark = "SELECT coalesce(max(value), 0) FROM meta WHERE name = 'looked_at'"
    unknown = f"SELECT 1 FROM extents WHERE version > ({mark}) AND content IS NULL AND file_id <> '' LIMIT 1"
    return db.execute(unknown).fetchone() is not None


def note_looked_at(tx: Transaction, version: int) -> None:
    """Note that the extents of all versions up to this one were looked at: a restart need not read their rows."""
    sql = "INSERT INTO meta VALUES ('looked_at', ?) ON CONFLICT DO UPDATE SET value = max(value, excluded.value)"
    tx.db.execute(sql, (version,))


def unknown_versions(
    db: sqlite3.Connection, after: tuple[str, str], limit: int
) -> tuple[list[Version], tuple[str, str] | None]:
    """The objects with extents without a content id among up to `limit` objects behind the bucket and key `after`, and
    the last object looked at; None where there is none.
    """
    sql = "SELECT bucket, key, version FROM objects WHERE (bucket, key) > (?, ?) ORDER BY bucket, key LIMIT ?"
    rows = db.execute(sql, (*after, limit)).fetchall()
    is_unknown = "SELECT 1 FROM extents WHERE version = ? AND content IS NULL AND file_id <> '' LIMIT 1"
    found = [row for row in rows if db.execute(is_unknown, (row[2],)).fetchone()]
    return found, rows[-1][:2] if rows else None


def new_extents(db: sqlite3.Connection, versions: Sequence[Version], dedup: Dedup) -> NewExtents:
    """The extents of these versions that have no content id yet, up to EXTENTS_AT_ONCE or CHECKSUM_BYTES_AT_ONCE. A
    bucket without an owner, as in front of another service, is a scope of its own.
    """
    found = NewExtents([], [], [])
    checksum_bytes = 0
    scopes: dict[str, str] = {}
    columns = f"part_number, synced, {EXTENT_COLUMNS}"
    sql = f"SELECT {columns} FROM extents WHERE version = ? AND content IS NULL AND file_id <> ''"
    for bucket, key, version in versions:
        if bucket not in scopes:
            row = db.execute("SELECT owner FROM buckets WHERE name = ?", (bucket,)).fetchone()
            owner = row[0] if row is not None and dedup is Dedup.OWNER else ""
            scopes[bucket] = f"owner {owner}" if owner else f"bucket {bucket}"
        for number, is_synced, *columns_of_extent in db.execute(sql, (version,)):
            if not is_synced:
                found.unsynced.append((bucket, key, version))
                break
            if len(found.extents) >= EXTENTS_AT_ONCE or checksum_bytes >= CHECKSUM_BYTES_AT_ONCE:
                found.left.append((bucket, key, version))
                break
            extent = Extent(*columns_of_extent)
            identity = content_id(scopes[bucket], extent)
            found.extents.append(
                NewExtent(
                    bucket=bucket, key=key, version=version, part_number=number, extent=extent, content_id=identity
                )
            )
            checksum_bytes += len(extent.checksums)
    return found


def older_duplicates(db: sqlite3.Connection, extents: Sequence[NewExtent]) -> list[Duplicate]:
    """The extents that have a duplicate in another location, which is on the disk: one that was looked at before, or an
    older one of these.
    """
    sql = (
        f"SELECT {EXTENT_COLUMNS} FROM extents WHERE content = ? AND nbytes = ? AND blocks = ?"
        " AND synced = 1 ORDER BY version LIMIT 1"
    )
    found: list[Duplicate] = []
    firsts: dict[tuple[bytes, int, bytes], Extent] = {}
    for each in sorted(extents, key=lambda each: (each.version, each.part_number)):
        same = (each.content_id, each.extent.nbytes, each.extent.checksums)
        row = db.execute(sql, same).fetchone()
        old = firsts.setdefault(same, each.extent) if row is None else Extent(*row)
        if location_of(old) != location_of(each.extent):
            found.append(Duplicate(each, old))
    return found


def settle(tx: Transaction, extents: Sequence[NewExtent], equal: Sequence[Duplicate]) -> tuple[int, int]:
    """Note the ids of these extents, and make the rows of the `equal` ones name the old bytes; returns how many rows
    do so now, and how many bytes no row names now.

    A location names the same bytes for ever. So if rows still name both locations, the proof of before is still right;
    what was deleted, overwritten or moved meanwhile stays as it is.
    """
    rows = [(each.content_id, each.version, each.part_number) for each in extents]
    tx.db.executemany("UPDATE extents SET content = ? WHERE version = ? AND part_number = ?", rows)
    named = "SELECT 1 FROM extents WHERE file_id = ? AND file_offset = ? AND nbytes = ? AND synced = 1 LIMIT 1"
    shared_count = shared_bytes = 0
    for each in equal:
        if tx.db.execute(named, location_of(each.old)).fetchone() is None:
            continue
        moved = tx.db.execute(
            "UPDATE extents SET file_id = ?, file_offset = ?, synced = 1 WHERE version = ? AND part_number = ?"
            " AND file_id = ? AND file_offset = ? AND nbytes = ?",
            (each.old.file_id, each.old.offset, each.new.version, each.new.part_number, *location_of(each.new.extent)),
        )
        if moved.rowcount:
            shared_count += 1
            tx.moved.add((each.new.bucket, each.new.key))
            tx.released.add(each.new.extent.file_id)
            tx.gained.add(each.old.file_id)
            tx.lost.add(location_of(each.new.extent))
            if tx.db.execute(named, location_of(each.new.extent)).fetchone() is None:
                shared_bytes += aligned(each.new.extent.nbytes)
    return shared_count, shared_bytes


def stored_bytes(db: sqlite3.Connection) -> StoredBytes:
    """The bytes of all extents, with and without their copies."""
    locations = "SELECT nbytes, count(*) AS uses FROM extents WHERE file_id <> '' GROUP BY file_id, file_offset, nbytes"
    row = db.execute(f"SELECT coalesce(sum(nbytes * uses), 0), coalesce(sum(nbytes), 0) FROM ({locations})").fetchone()
    return StoredBytes(*row)


def location_of(extent: Extent) -> tuple[str, int, int]:
    """File, offset and bytes."""
    return extent.file_id, extent.offset, extent.nbytes
