"""The queries that compaction makes to the index, and the one change that it makes there."""

from __future__ import annotations

import sqlite3
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from storage_server.kernel.index.transaction import Transaction
from storage_server.kernel.rules.compaction_plan import ExtentMove, LiveExtent
from storage_server.planning.extent import ALIGNMENT_BYTES, Extent

_NEXT_FILE = "SELECT min(file_id) FROM extents WHERE file_id > ?"
_USE = f"""
SELECT sum((nbytes + {ALIGNMENT_BYTES - 1}) / {ALIGNMENT_BYTES} * {ALIGNMENT_BYTES}), count(*), sum(row_count),
    min(first_version), max(nbytes)
FROM (
    SELECT nbytes, count(*) AS row_count, min(version) AS first_version
    FROM extents WHERE file_id = ? GROUP BY file_offset, nbytes
)
"""


@dataclass(frozen=True, slots=True)
class FileUse:
    """The use of a file by rows; see SegmentUse."""

    file_id: str
    live_bytes: int
    extent_count: int
    row_count: int
    first_version: int
    extent_bytes_max: int


def files_after(db: sqlite3.Connection, after: str, limit: int) -> list[str]:
    """Up to `limit` files in the order of their names, from the first after `after`."""
    found: list[str] = []
    while len(found) < limit:
        (after,) = db.execute(_NEXT_FILE, (after,)).fetchone()
        if after is None:
            break
        found.append(after)
    return found


def file_uses(db: sqlite3.Connection, file_ids: Iterable[str]) -> list[FileUse]:
    """Those of these files that rows name."""
    found = [(file_id, db.execute(_USE, (file_id,)).fetchone()) for file_id in file_ids]
    return [FileUse(file_id, *use) for file_id, use in found if use[0] is not None]


def live_extents(db: sqlite3.Connection, file_ids: Collection[str]) -> list[LiveExtent]:
    """Every extent that rows name in these files, once."""
    sql = (
        "SELECT file_offset, nbytes, blocks, object_offset, min(version) FROM extents WHERE file_id = ?"
        " GROUP BY file_offset, nbytes, blocks"
    )
    return [
        LiveExtent(Extent(file_id, *extent), version)
        for file_id in file_ids
        for *extent, version in db.execute(sql, (file_id,))
    ]


def move_rows(tx: Transaction, file_id: str, moves: Sequence[ExtentMove]) -> int:
    """Make every row that still names a moved extent name its copy in `file_id`; returns how many rows did.

    A location names the same bytes for ever. So the rows there are now are right, whatever became of objects meanwhile:
    a deleted or overwritten object has no row, and a copy made meanwhile moves along. The new bytes are synced.
    """
    targets = {(*_location(move.source), move.source.checksums): move.offset for move in moves}
    sources = {move.source.file_id for move in moves}
    found: list[tuple[str, int, int, int]] = []
    for source in sources:
        sql = "SELECT file_offset, nbytes, blocks, version, part_number FROM extents WHERE file_id = ?"
        for offset, nbytes, blocks, version, part_number in tx.db.execute(sql, (source,)):
            target = targets.get((source, offset, nbytes, blocks))
            if target is not None:
                found.append((file_id, target, version, part_number))
    tx.db.executemany(
        "UPDATE extents SET file_id = ?, file_offset = ?, synced = 1 WHERE version = ? AND part_number = ?", found
    )
    tx.has_moved = tx.has_moved or bool(found)
    used = {target for _, target, _, _ in found}
    tx.released.update(sources)
    tx.gained.add(file_id)
    tx.lost.update((file_id, move.offset, move.source.nbytes) for move in moves if move.offset not in used)
    return len(found)


def _location(extent: Extent) -> tuple[str, int, int]:
    return extent.file_id, extent.offset, extent.nbytes
