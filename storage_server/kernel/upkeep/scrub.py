"""Scrub: reads everything a store holds and reports damaged bytes before a client asks for them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from storage_server.kernel.beside import FilesBeside
from storage_server.kernel.data.disk import Disk
from storage_server.kernel.index.schema import connect, connect_current
from storage_server.planning.extent import CorruptExtentError, Extent

PIECE_BYTES = 1 << 20
OPEN_FILES_MAX = 64
REREADS_MAX = 8


@dataclass(frozen=True, slots=True)
class Damage:
    """Bytes [start, end) of an object, or of a part of an unfinished upload, that fail their checksums."""

    bucket: str
    key: str
    part_number: int
    start: int
    end: int
    reason: str


@dataclass(frozen=True, slots=True)
class CheckedExtent:
    """An extent that was read. `damage` is None when it is sound."""

    nbytes: int
    damage: Damage | None


@dataclass(frozen=True, slots=True)
class _Row:
    extent_id: tuple[int, int]
    bucket: str
    key: str
    part_number: int
    extent: Extent


def stored_bytes(directory: Path) -> tuple[int, int]:
    """The number of extents, and their bytes. Raises sqlite3.Error for a file that is no index, SchemaError for the
    index of another release.
    """
    with closing(connect_current(directory / "index.sqlite3")) as db:
        count, nbytes = db.execute(
            "SELECT count(*), coalesce(sum(nbytes), 0) FROM extents WHERE file_id <> ''"
        ).fetchone()
    return count, nbytes


def scrub(directory: Path) -> Iterator[CheckedExtent]:
    """Read every extent. A server may use the store meanwhile: an extent that was deleted or moved is
    looked up again.
    """
    files = FilesBeside(directory, OPEN_FILES_MAX, Disk())
    try:
        for row in _rows(directory):
            yield _check(directory, files, row)
    finally:
        files.close()


def _check(directory: Path, files: FilesBeside, row: _Row) -> CheckedExtent:
    """Read one extent. A failure counts as damage only if the index still names the extent at this location."""
    found: _Row | None = row
    reason = ""
    start = 0
    for _ in range(REREADS_MAX):
        if found is None:
            return CheckedExtent(row.extent.nbytes, None)
        if not files.pin([found.extent.file_id]):
            reason, start = "its file is missing", 0
        else:
            try:
                problem = _first_bad(files, found.extent)
            finally:
                files.unpin([found.extent.file_id])
            if problem is None:
                return CheckedExtent(row.extent.nbytes, None)
            start, reason = problem
        again = _row(directory, row.extent_id)
        if again == found:
            break
        found = again
    extent = row.extent
    damage = Damage(
        bucket=row.bucket,
        key=row.key,
        part_number=row.part_number,
        start=extent.object_offset + start,
        end=extent.object_offset + min(extent.nbytes, start + PIECE_BYTES),
        reason=reason,
    )
    return CheckedExtent(extent.nbytes, damage)


def _first_bad(files: FilesBeside, extent: Extent) -> tuple[int, str] | None:
    buffer = memoryview(bytearray(min(PIECE_BYTES, extent.nbytes)))
    for start in range(0, extent.nbytes, PIECE_BYTES):
        try:
            files.open.read_into(extent, start, buffer[: min(PIECE_BYTES, extent.nbytes - start)])
        except CorruptExtentError as error:
            return start, str(error)
    return None


_SELECT = """
SELECT e.version, e.part_number, coalesce(o.bucket, u.bucket), coalesce(o.key, u.key), e.file_id, e.file_offset,
    e.nbytes, e.blocks, e.object_offset
FROM extents AS e LEFT JOIN objects AS o ON o.version = e.version LEFT JOIN uploads AS u ON u.version = e.version
"""


def _rows(directory: Path) -> Iterator[_Row]:
    """Every extent, in pages: no transaction stays open while bytes are read."""
    last = (-1, -1)
    while True:
        sql = f"{_SELECT} WHERE e.file_id <> '' AND (e.version, e.part_number) > (?, ?)"
        with closing(connect(directory / "index.sqlite3")) as db:
            page = db.execute(f"{sql} ORDER BY e.version, e.part_number LIMIT 256", last).fetchall()
        for row in page:
            yield _as_row(row)
        if not page:
            return
        last = page[-1][:2]


def _row(directory: Path, extent_id: tuple[int, int]) -> _Row | None:
    with closing(connect(directory / "index.sqlite3")) as db:
        row = db.execute(f"{_SELECT} WHERE e.version = ? AND e.part_number = ?", extent_id).fetchone()
    return None if row is None else _as_row(row)


def _as_row(row: tuple[int, int, str, str, str, int, int, bytes, int]) -> _Row:
    version, part_number, bucket, key = row[:4]
    return _Row((version, part_number), bucket or "", key or "", part_number, Extent(*row[4:]))
