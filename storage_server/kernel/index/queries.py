"""Reading the index: functions of a connection, each in a transaction of its own (see the module reader)."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Sequence

from descriptors.errors import CallerError, ErrorCode
from descriptors.headers import CLASS_HEADER, CODEC_HEADER
from descriptors.lifecycle import LifecycleRule
from descriptors.objects import (
    BUCKETS_LISTED_MAX,
    BucketCache,
    BucketInfo,
    Checksum,
    ObjectInfo,
    ObjectPart,
    PartPage,
    UploadRef,
)
from descriptors.units import MIB
from storage_server.kernel.index.transaction import find_object, require_bucket, require_object
from storage_server.kernel.index.upload_changes import require_upload
from storage_server.kernel.rules.rows import (
    BUCKET_COLUMNS,
    EXTENT_COLUMNS,
    LOCATION_COLUMNS,
    OBJECT_COLUMNS,
    PART_COLUMNS,
    UPLOAD_COLUMNS,
    CachedRow,
    StoredObject,
    StoredUpload,
    bucket_info,
    extents,
    part_info,
    rules_of,
    stored_object,
    stored_upload,
)
from storage_server.planning.extent import Extent

RULES_HERE_MAX = 16 << 10
"""Lifecycle rules of so many characters, some eighty, are read on the event loop: in a third of a millisecond."""
CHUNK_EXTENTS_MAX = 256
"""A chunk of 1.25 GiB has so many parts, of the least size that S3 takes."""
CHECKED_EXTENT_BYTES_MAX = 16 * MIB
"""A lookup brings the checksums of extents up to this size: 4 KiB, which are remembered for the descriptor to come."""


def _header(name: str) -> str:
    """The value of an object's header in SQL. Most objects have none, and their JSON is not parsed."""
    return f"""CASE WHEN instr(o.attributes, '{name}') THEN json_extract(o.attributes, '$.headers."{name}"') END"""


def bucket(db: sqlite3.Connection, name: str) -> BucketInfo:
    """A bucket. Raises CallerError(NoSuchBucket)."""
    return require_bucket(db, name)


def buckets(db: sqlite3.Connection, after: str = "", most: int = BUCKETS_LISTED_MAX) -> list[BucketInfo]:
    """Up to `most` buckets by name, behind `after`."""
    sql = f"SELECT {BUCKET_COLUMNS} FROM buckets WHERE name > ? ORDER BY name LIMIT ?"
    return [bucket_info(row) for row in db.execute(sql, (after, most))]


def buckets_with_rules(db: sqlite3.Connection, after: str, most: int) -> list[str]:
    """The names of up to `most` buckets that have lifecycle rules, in order, behind `after`."""
    sql = "SELECT name FROM buckets WHERE name > ? AND lifecycle <> '[]' ORDER BY name LIMIT ?"
    return [name for (name,) in db.execute(sql, (after, most))]


def declared_caches(db: sqlite3.Connection) -> dict[str, BucketCache]:
    """The buckets that were created as caches."""
    found = [bucket_info(row) for row in db.execute(f"SELECT {BUCKET_COLUMNS} FROM buckets WHERE cache IS NOT NULL")]
    return {info.name: info.cache for info in found if info.cache is not None}


def lifecycle(db: sqlite3.Connection, name: str) -> list[LifecycleRule]:
    """The lifecycle rules of a bucket. Raises CallerError(NoSuchBucket)."""
    row = db.execute("SELECT lifecycle FROM buckets WHERE name = ?", (name,)).fetchone()
    if row is None:
        require_bucket(db, name)
    return list(rules_of(row[0]))


def short_lifecycle(db: sqlite3.Connection, name: str) -> list[LifecycleRule] | None:
    """The lifecycle rules of a bucket where their text is no longer than RULES_HERE_MAX; else None. Raises
    CallerError(NoSuchBucket).
    """
    sql = "SELECT CASE WHEN length(lifecycle) <= ? THEN lifecycle END FROM buckets WHERE name = ?"
    row = db.execute(sql, (RULES_HERE_MAX, name)).fetchone()
    if row is None:
        require_bucket(db, name)
    return None if row[0] is None else list(rules_of(row[0]))


def extents_of(db: sqlite3.Connection, version: int, start: int, end: int) -> list[Extent]:
    """The extents of a version that hold any of its bytes [start, end), in order."""
    sql = f"SELECT {EXTENT_COLUMNS} FROM extents WHERE version = ? AND object_offset < ? AND object_offset + nbytes > ?"
    return extents(db.execute(f"{sql} ORDER BY object_offset", (version, end, start)))


def locations(db: sqlite3.Connection, name: str, key: str) -> list[Extent]:
    """Where the bytes of a key's object lie: its extents, without checksums."""
    sql = f"SELECT {LOCATION_COLUMNS} FROM extents WHERE version = ? ORDER BY object_offset"
    found = find_object(db, name, key)
    return [] if found is None else extents(db.execute(sql, (found.version,)))


def checked(db: sqlite3.Connection, name: str, keys: Sequence[str]) -> list[list[Extent]]:
    """The extents of each key's object, with all checksums; none where there is no object."""
    found = [find_object(db, name, key) for key in keys]
    return [[] if each is None else extents_of(db, each.version, 0, each.info.nbytes) for each in found]


def objects(db: sqlite3.Connection, bucket: str, keys: Sequence[str]) -> list[StoredObject | None]:
    """The object of each key; None where there is none."""
    return [find_object(db, bucket, key) for key in keys]


def part_span(db: sqlite3.Connection, found: StoredObject, part_number: int) -> tuple[int, int]:
    """Offset and length in bytes of the object's n-th part, whatever number the part was uploaded under. An object that
    was stored whole has one part. Raises CallerError(InvalidPartNumber).
    """
    if found.info.part_count is None:
        if part_number == 1:
            return 0, found.info.nbytes
    elif 1 <= part_number <= found.info.part_count:
        sql = "SELECT object_offset, nbytes FROM extents WHERE version = ? ORDER BY part_number LIMIT 1 OFFSET ?"
        row = db.execute(sql, (found.version, part_number - 1)).fetchone()
        if row is not None:
            return row[0], row[1]
    raise CallerError(ErrorCode.INVALID_PART_NUMBER, "The requested partnumber is not satisfiable", field="partNumber")


def object_parts(db: sqlite3.Connection, name: str, key: str) -> list[ObjectPart]:
    """The parts of an object, in the order that `part_span` counts them. Raises
    CallerError(NoSuchBucket, NoSuchKey).
    """
    found = require_object(db, name, key)
    if found.info.part_count is None:
        return []
    whole = found.info.checksum
    sql = "SELECT nbytes, checksum FROM extents WHERE version = ? ORDER BY part_number"
    return [
        ObjectPart(number, nbytes, Checksum(whole.algorithm, value) if whole and value else None)
        for number, (nbytes, value) in enumerate(db.execute(sql, (found.version,)), start=1)
    ]


_PREFIX = (
    "SELECT * FROM (SELECT wanted.key AS at, o.nbytes, e.file_id, e.file_offset, e.nbytes,"
    f" CASE WHEN e.nbytes <= {CHECKED_EXTENT_BYTES_MAX} THEN e.blocks ELSE x'' END, e.object_offset,"
    f" {_header(CLASS_HEADER)}, {_header(CODEC_HEADER)}"
    " FROM json_each(?) AS wanted LEFT JOIN objects AS o ON o.bucket = ? AND o.key = wanted.value"
    " LEFT JOIN extents AS e ON e.version = CASE WHEN"
    " (SELECT count(*) FROM (SELECT 1 FROM extents AS p WHERE p.version = o.version LIMIT ?)) <= ? THEN o.version END"
    " LIMIT ?) ORDER BY at, object_offset LIMIT -1"
)
"""SQLite sorts the limited rows before it gives the first one, and then each at once: the interpreter's lock, which it
returns for each row, is not fought for.
"""


def prefix(db: sqlite3.Connection, name: str, keys: Sequence[str], extents_max: int) -> list[list[Extent] | None]:
    """The extents of each key's object, in the order of `keys`, large ones without checksums. None where there is none,
    or where it has more than CHUNK_EXTENTS_MAX, so that it is no chunk.

    The answer ends with the object that `extents_max` is reached at: the time that this takes is bounded by both.
    """
    require_bucket(db, name)
    most = CHUNK_EXTENTS_MAX
    found: list[list[Extent] | None] = []
    rows = db.execute(
        _PREFIX, (json.dumps(keys, ensure_ascii=False), name, most + 1, most, extents_max + most)
    ).fetchall()
    for count, (at, whole, file_id, offset, nbytes, blocks, object_offset, content_class, form) in enumerate(rows):
        if at == len(found):
            if count >= extents_max:
                break
            found.append(None if whole is None or (file_id is None and whole > 0) else [])
        chunk = found[-1]
        if file_id and chunk is not None:
            chunk.append(Extent(file_id, offset, nbytes, blocks, object_offset, content_class or "", form or ""))
    return found


def page(db: sqlite3.Connection, name: str, start: str, inclusive: bool, wanted: str, limit: int) -> list[ObjectInfo]:
    """Up to `limit` objects from `start` on whose keys start with `wanted`, in UTF-8 byte order."""
    return [found.info for found in stored_page(db, name, start=start, inclusive=inclusive, wanted=wanted, limit=limit)]


def stored_page(
    db: sqlite3.Connection, name: str, start: str, inclusive: bool, wanted: str, limit: int
) -> list[StoredObject]:
    """The objects of `page`, with their versions."""
    comparison = ">=" if inclusive else ">"
    sql = f"SELECT {OBJECT_COLUMNS} FROM objects WHERE bucket = ? AND key {comparison} ? ORDER BY key LIMIT ?"
    found = []
    for row in db.execute(sql, (name, start, limit)):
        if not row[0].startswith(wanted):
            break
        found.append(stored_object(row))
    return found


def parts(db: sqlite3.Connection, ref: UploadRef, after: int, limit: int) -> PartPage:
    """Up to `limit` parts numbered above `after`. Raises CallerError(NoSuchUpload)."""
    upload = require_upload(db, ref)
    sql = f"SELECT {PART_COLUMNS} FROM extents WHERE version = ? AND part_number > ? ORDER BY part_number LIMIT ?"
    rows = db.execute(sql, (upload.version, after, limit + 1)).fetchall()
    shown = [part_info(row, upload.info.checksum) for row in rows[:limit]]
    more = len(rows) > limit and bool(shown)
    return PartPage(upload.info, shown, shown[-1].part_number if more else None)


def part_bytes(db: sqlite3.Connection) -> dict[str, int]:
    """The bytes of the parts of open uploads, by buckets."""
    sql = "SELECT bucket, sum(nbytes) FROM extents JOIN uploads USING (version) GROUP BY bucket"
    return {bucket: int(nbytes) for bucket, nbytes in db.execute(sql)}


def uploads_page(
    db: sqlite3.Connection, name: str, key: str, upload_id: str | None, wanted: str, limit: int
) -> list[StoredUpload]:
    """Up to `limit` uploads from `key` on that start with `wanted`, by key and age.

    With `upload_id` the uploads of `key` itself are skipped up to and including that upload.
    """
    seen = "SELECT initiated_at FROM uploads WHERE bucket = ? AND key = ? AND upload_id = ?"
    row = db.execute(seen, (name, key, upload_id)).fetchone() if upload_id is not None else None
    after = (row[0], upload_id) if row is not None and upload_id is not None else (0.0, "")
    sql = f"SELECT {UPLOAD_COLUMNS} FROM uploads WHERE bucket = ? AND (key, initiated_at, upload_id) > (?, ?, ?)"
    found = []
    for upload in db.execute(f"{sql} ORDER BY key, initiated_at, upload_id LIMIT ?", (name, key, *after, limit)):
        if not upload[1].startswith(wanted):
            break
        found.append(stored_upload(upload))
    return found


_CACHED = (
    "SELECT o.bucket, o.key, o.version, o.nbytes, o.modified_at, o.attributes, u.used_at, u.use_count, u.parent,"
    " u.leased_until, d.version IS NOT NULL FROM objects AS o"
    " LEFT JOIN uses AS u ON u.bucket = o.bucket AND u.key = o.key"
    " LEFT JOIN dirty AS d ON d.bucket = o.bucket AND d.key = o.key"
)


def cached(db: sqlite3.Connection, bucket: str | None, after: tuple[str, str], limit: int) -> list[CachedRow]:
    """Up to `limit` objects of a bucket, None for all, behind the bucket and key `after`."""
    if bucket is None:
        condition, values = "(o.bucket, o.key) > (?, ?)", after
    else:
        condition, values = "o.bucket = ? AND o.key > ?", (bucket, after[1])
    sql = f"{_CACHED} WHERE {condition} ORDER BY o.bucket, o.key LIMIT ?"
    return list(map(CachedRow._make, db.execute(sql, (*values, limit))))


def least_recently_used(db: sqlite3.Connection, bucket: str | None, limit: int) -> list[CachedRow]:
    """The `limit` objects of a bucket, None for all, whose last use is longest ago, the oldest first, without dirty
    ones. It reads all of them, and keeps so many.
    """
    condition = "" if bucket is None else " AND o.bucket = ?"
    sql = f"{_CACHED} WHERE d.version IS NULL{condition} ORDER BY max(o.modified_at, ifnull(u.used_at, 0)) LIMIT ?"
    return list(map(CachedRow._make, db.execute(sql, (limit,) if bucket is None else (bucket, limit))))


def sizes(db: sqlite3.Connection, bucket: str, after: str, limit: int) -> list[tuple[str, int]]:
    """Key and bytes of up to `limit` objects of a bucket behind the key `after`."""
    sql = "SELECT key, nbytes FROM objects WHERE bucket = ? AND key > ? ORDER BY key LIMIT ?"
    return db.execute(sql, (bucket, after, limit)).fetchall()


def dirty(db: sqlite3.Connection) -> list[tuple[str, StoredObject]]:
    """Bucket and object of every dirty chunk, the oldest first."""
    sql = (
        f"SELECT o.bucket, {', '.join(f'o.{name}' for name in OBJECT_COLUMNS.split(', '))} FROM dirty AS d"
        " JOIN objects AS o ON o.bucket = d.bucket AND o.key = d.key AND o.version = d.version ORDER BY o.version"
    )
    return [(bucket, stored_object(tuple(row))) for bucket, *row in db.execute(sql)]


def dirty_page(db: sqlite3.Connection, name: str, after: str, wanted: str, limit: int) -> list[ObjectInfo]:
    """Up to `limit` dirty chunks behind `after` whose keys start with `wanted`, by key."""
    sql = (
        f"SELECT {', '.join(f'o.{name}' for name in OBJECT_COLUMNS.split(', '))} FROM dirty AS d"
        " JOIN objects AS o ON o.bucket = d.bucket AND o.key = d.key WHERE d.bucket = ? AND d.key > ? AND d.key >= ?"
        " ORDER BY d.key LIMIT ?"
    )
    found = []
    for row in db.execute(sql, (name, after, wanted, limit)):
        if not row[0].startswith(wanted):
            break
        found.append(stored_object(row).info)
    return found


def unsynced(db: sqlite3.Connection) -> list[tuple[int, int, Extent]]:
    """Version, part number and extent of every row whose bytes may not have reached the disk."""
    sql = f"SELECT version, part_number, {EXTENT_COLUMNS} FROM extents WHERE synced = 0"
    return [(version, number, Extent(*rest)) for version, number, *rest in db.execute(sql)]


def file_ids(db: sqlite3.Connection) -> set[str]:
    """Every file that a row names."""
    return {row[0] for row in db.execute("SELECT DISTINCT file_id FROM extents WHERE file_id <> ''")}
