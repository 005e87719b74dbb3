"""Changes to the index. Each is a function of an open transaction; if it raises, only that change is undone."""

from __future__ import annotations

import itertools
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from descriptors.conditions import WriteCondition, check_read, check_write
from descriptors.errors import CallerError, ErrorCode, ServerError
from descriptors.headers import CACHE_HEADER
from descriptors.lifecycle import LifecycleRule
from descriptors.objects import Attributes, BucketCache, BucketInfo, CopyRequest, ObjectInfo
from storage_server.kernel.rules.rows import (
    BUCKET_COLUMNS,
    OBJECT_COLUMNS,
    RULES,
    Committed,
    KeyChange,
    KeyUse,
    StoredObject,
    StoredPart,
    Touched,
    TouchedKind,
    bucket_info,
    object_attributes,
    stored_object,
)

CACHES_MAX, CACHES_OF_KEY_MAX = 256, 64


class Transaction:
    """One transaction of the writing connection. `released` collects the files that lost a row, and `lost` the
    locations in them: file, offset, bytes; `gained` collects files that rows name that did not before. `changes`
    collects what keys show now, and `moved` the keys whose bytes lie elsewhere now; `has_moved` says that those of any
    other key may, too. `touched` collects what others that have a copy of this index must be told of. `part_bytes` sums
    up by buckets what the parts of open uploads take more. `caches` has the buckets that were created or deleted, with
    the cache that each is from now on.
    """

    def __init__(self, db: sqlite3.Connection, versions: Iterator[int], *, synced: bool) -> None:
        self.db = db
        self.synced = synced
        self.released: set[str] = set()
        self.gained: set[str] = set()
        self.lost: set[tuple[str, int, int]] = set()
        self.changes: list[KeyChange] = []
        self.part_bytes: Counter[str] = Counter()
        self.caches: dict[str, BucketCache | None] = {}
        self.dropped_count = 0
        """How many rows of extents were deleted: most of the work of a transaction that deletes."""
        self.moved: set[tuple[str, str]] = set()
        self.touched: list[Touched] = []
        self.named: set[tuple[str, int]] = set()
        """The locations (file, offset) of bodies that rows name from now on."""
        self.has_moved = False
        self._versions = versions

    def new_version(self) -> int:
        """A version number that no row has had."""
        return next(self._versions)

    @contextmanager
    def step(self) -> Iterator[None]:
        """A step of the transaction. If the block raises, only the changes made in the block are undone."""
        released, self.released = self.released, set()
        lost, self.lost = self.lost, set()
        change_count, touched_count = len(self.changes), len(self.touched)
        part_bytes, caches = self.part_bytes.copy(), self.caches.copy()
        self.db.execute("SAVEPOINT step")
        try:
            yield
        except BaseException:
            if self.db.in_transaction:
                self.db.execute("ROLLBACK TO step")
                self.db.execute("RELEASE step")
            self.released, self.lost, self.part_bytes, self.caches = released, lost, part_bytes, caches
            del self.changes[change_count:]
            del self.touched[touched_count:]
            raise
        self.db.execute("RELEASE step")
        released |= self.released
        lost |= self.lost
        self.released, self.lost = released, lost

    def committed(self) -> Committed:
        """All that has changed."""
        files = self.released | self.gained | {file_id for file_id, _ in self.named}
        return Committed(self.changes, self.part_bytes, self.caches, files)

    def dead_files(self) -> list[str]:
        """Released files that no row names any more."""
        sql = "SELECT 1 FROM extents WHERE file_id = ? LIMIT 1"
        return [file_id for file_id in self.released if self.db.execute(sql, (file_id,)).fetchone() is None]

    def holes(self) -> list[tuple[str, int, int]]:
        """Locations that no row names any more. A location stays as long as a copy names it. Locations of dead files
        are among them, because such a file may still be written, and stay.
        """
        sql = "SELECT 1 FROM extents WHERE file_id = ? AND file_offset = ? LIMIT 1"
        return [
            (file_id, offset, nbytes)
            for file_id, offset, nbytes in self.lost
            if self.db.execute(sql, (file_id, offset)).fetchone() is None
        ]

    def drop_extents(self, version: int, part_numbers: Sequence[int] | None = None) -> int:
        """Delete the extents of a version, or of some of its parts. Returns their bytes."""
        nbytes = 0
        where, arguments = "version = ?", (version,)
        chosen = [arguments] if part_numbers is None else [(version, number) for number in part_numbers]
        if part_numbers is not None:
            where += " AND part_number = ?"
        for one in chosen:
            sql = f"DELETE FROM extents WHERE {where} RETURNING file_id, file_offset, nbytes"
            dropped = self.db.execute(sql, one).fetchall()
            self.dropped_count += len(dropped)
            rows = [row for row in dropped if row[0]]
            self.released.update(row[0] for row in rows)
            self.lost.update(rows)
            nbytes += sum(row[2] for row in rows)
        return nbytes

    def add_extent(self, version: int, part_number: int, part: StoredPart, modified_at: float) -> None:
        """Add the row of one body; an empty part has a row, too, without a file."""
        extent = part.extent
        if extent is not None:
            self.named.add((extent.file_id, extent.offset))
        self.db.execute(
            "INSERT INTO extents VALUES (?, ?, 0, ?, ?, ?, ?, ?, ?, ?, ?, NULL)",
            (
                version,
                part_number,
                part.nbytes,
                extent.file_id if extent else "",
                extent.offset if extent else 0,
                part.etag,
                modified_at,
                part.checksum.value if part.checksum else None,
                self.synced,
                extent.checksums if extent else b"",
            ),
        )

    def touch(self, kind: TouchedKind, name: str, key: str = "") -> None:
        """Note that this has changed."""
        self.touched.append(Touched(kind, name, key))

    def note(
        self,
        bucket: str,
        info: ObjectInfo,
        version: int,
        *,
        is_dirty: bool = False,
        replaced_version: int | None = None,
    ) -> None:
        """Note what a key shows now."""
        self.touch("object", bucket, info.key)
        self.changes.append(
            KeyChange(
                bucket=bucket,
                key=info.key,
                version=version,
                nbytes=info.nbytes,
                modified_at=info.modified_at,
                attributes=info.attributes,
                is_dirty=is_dirty,
                replaced_version=replaced_version,
            )
        )

    def put_row(
        self,
        bucket: str,
        info: ObjectInfo,
        version: int,
        upload_id: str | None = None,
        *,
        is_dirty: bool = False,
        replaced_version: int | None = None,
    ) -> None:
        """Publish: from the commit on the key shows this version. The version that it showed before is deleted."""
        self.note(bucket, info, version, is_dirty=is_dirty, replaced_version=replaced_version)
        before = find_object(self.db, bucket, info.key)
        if before is not None:
            self.drop_extents(before.version)
            self.db.execute("DELETE FROM dirty WHERE bucket = ? AND key = ?", (bucket, info.key))
        if is_dirty:
            self.db.execute("INSERT OR REPLACE INTO dirty VALUES (?, ?, ?)", (bucket, info.key, version))
        self.db.execute(
            "INSERT OR REPLACE INTO objects VALUES (?, ?, ?, ?, ?, ?, ?)",
            (
                bucket,
                info.key,
                version,
                info.nbytes,
                info.etag,
                info.modified_at,
                object_attributes(info, upload_id),
            ),
        )


def require_bucket(db: sqlite3.Connection, bucket: str) -> BucketInfo:
    """The bucket. Raises CallerError(NoSuchBucket)."""
    row = db.execute(f"SELECT {BUCKET_COLUMNS} FROM buckets WHERE name = ?", (bucket,)).fetchone()
    if row is None:
        raise CallerError(ErrorCode.NO_SUCH_BUCKET, f"there is no bucket {bucket}", field="bucket")
    return bucket_info(row)


def find_object(db: sqlite3.Connection, bucket: str, key: str) -> StoredObject | None:
    """The object's row; None where there is none."""
    sql = f"SELECT {OBJECT_COLUMNS} FROM objects WHERE bucket = ? AND key = ?"
    row = db.execute(sql, (bucket, key)).fetchone()
    return None if row is None else stored_object(row)


def require_object(db: sqlite3.Connection, bucket: str, key: str) -> StoredObject:
    """The object's row. Raises CallerError(NoSuchBucket, NoSuchKey)."""
    found = find_object(db, bucket, key)
    if found is None:
        require_bucket(db, bucket)
        raise CallerError(ErrorCode.NO_SUCH_KEY, f"there is no object {key!r}", field="key")
    return found


def create_bucket(tx: Transaction, bucket: str, owner: str, now_s: float, cache: BucketCache | None = None) -> None:
    """Add a bucket. Raises CallerError(BucketAlreadyOwnedByYou, BucketAlreadyExists, TooManyBuckets)."""
    row = tx.db.execute("SELECT owner FROM buckets WHERE name = ?", (bucket,)).fetchone()
    if row is not None:
        code = ErrorCode.BUCKET_ALREADY_OWNED if row[0] == owner else ErrorCode.BUCKET_ALREADY_EXISTS
        raise CallerError(code, f"the bucket {bucket} exists already", field="bucket")
    if cache is not None:
        _require_place(tx.db, owner)
    row = (bucket, owner, now_s, None if cache is None else cache.text())
    tx.db.execute("INSERT INTO buckets (name, owner, created_at, cache) VALUES (?, ?, ?, ?)", row)
    tx.caches[bucket] = cache
    tx.touch("bucket", bucket)


def _require_place(db: sqlite3.Connection, owner: str) -> None:
    """Each commit looks at all caches, so they are few, and one key has a part of them."""
    sql = "SELECT count(*), coalesce(sum(owner = ?), 0) FROM buckets WHERE cache IS NOT NULL"
    count, own_count = db.execute(sql, (owner,)).fetchone()
    if count >= CACHES_MAX or own_count >= CACHES_OF_KEY_MAX:
        problem = f"there are {count} caches, {own_count} of this key; {CACHES_MAX} and {CACHES_OF_KEY_MAX} may be"
        raise CallerError(ErrorCode.TOO_MANY_BUCKETS, problem, field=CACHE_HEADER)


def create_bucket_anew(tx: Transaction, bucket: str, owner: str, now_s: float, most: int) -> bool:
    """Delete up to `most` objects that an earlier bucket of the name has left. Where these were all, add the bucket as
    `create_bucket` does; whether it was added.
    """
    if tx.db.execute("SELECT 1 FROM buckets WHERE name = ?", (bucket,)).fetchone() is None:
        keys = tx.db.execute("SELECT key FROM objects WHERE bucket = ? LIMIT ?", (bucket, most)).fetchall()
        for (key,) in keys:
            found = find_object(tx.db, bucket, key)
            if found is not None:
                _remove(tx, bucket, found)
        if len(keys) == most:
            return False
    create_bucket(tx, bucket, owner, now_s)
    return True


def ensure_bucket(tx: Transaction, bucket: str, now_s: float) -> None:
    """Add a bucket that nobody owns, where it is not there yet: in a cache, the home knows its owner."""
    tx.db.execute(
        "INSERT INTO buckets (name, owner, created_at) VALUES (?, '', ?) ON CONFLICT (name) DO NOTHING", (bucket, now_s)
    )


def require_same_bucket(db: sqlite3.Connection, bucket: str, created_at: float) -> None:
    """A body or a copy has room of a bucket that may be gone by now, and made anew with other bounds. Raises
    ServerError(SlowDown) then.
    """
    row = db.execute("SELECT created_at FROM buckets WHERE name = ?", (bucket,)).fetchone()
    if row is not None and row[0] != created_at:
        problem = f"the bucket {bucket} was made anew meanwhile"
        raise ServerError(ErrorCode.SLOW_DOWN, problem, retryable=True)


def require_empty(db: sqlite3.Connection, bucket: str) -> None:
    """Raises CallerError(NoSuchBucket, BucketNotEmpty)."""
    require_bucket(db, bucket)
    if db.execute("SELECT 1 FROM objects WHERE bucket = ? LIMIT 1", (bucket,)).fetchone():
        raise CallerError(ErrorCode.BUCKET_NOT_EMPTY, f"the bucket {bucket} still has objects", field="bucket")


def delete_bucket(tx: Transaction, bucket: str) -> None:
    """Delete an empty bucket and its unfinished uploads. Raises CallerError(NoSuchBucket, BucketNotEmpty)."""
    require_empty(tx.db, bucket)
    sql = "SELECT upload_id, version FROM uploads WHERE bucket = ?"
    for upload_id, version in tx.db.execute(sql, (bucket,)).fetchall():
        tx.part_bytes[bucket] -= tx.drop_extents(version)
        tx.touch("upload", upload_id)
    tx.db.execute("DELETE FROM uploads WHERE bucket = ?", (bucket,))
    tx.db.execute("DELETE FROM buckets WHERE name = ?", (bucket,))
    tx.caches[bucket] = None
    tx.touch("bucket", bucket)


def set_lifecycle(tx: Transaction, bucket: str, rules: list[LifecycleRule]) -> None:
    """Replace the lifecycle rules of a bucket. Raises CallerError(NoSuchBucket)."""
    require_bucket(tx.db, bucket)
    tx.db.execute("UPDATE buckets SET lifecycle = ? WHERE name = ?", (RULES.dump_json(rules).decode(), bucket))
    tx.touch("bucket", bucket)


def publish(
    tx: Transaction,
    bucket: str,
    info: ObjectInfo,
    part: StoredPart,
    condition: WriteCondition,
    *,
    is_dirty: bool = False,
) -> int:
    """Publish a whole object; returns its version. Raises CallerError(NoSuchBucket, PreconditionFailed, NoSuchKey for
    If-Match).
    """
    require_bucket(tx.db, bucket)
    _check_write(tx, bucket, info.key, condition)
    version = tx.new_version()
    tx.put_row(bucket, info, version, is_dirty=is_dirty)
    if part.extent is not None:
        tx.add_extent(version, 1, part, info.modified_at)
    return version


def replace_version(tx: Transaction, bucket: str, before: StoredObject, info: ObjectInfo, part: StoredPart) -> bool:
    """Publish an object in the place of one that the key showed; False where it shows something else by now, or the
    same with other tags.
    """
    if find_object(tx.db, bucket, info.key) != before:
        return False
    version = tx.new_version()
    tx.put_row(bucket, info, version, replaced_version=before.version)
    tx.add_extent(version, 1, part, info.modified_at)
    return True


def mark_clean(tx: Transaction, bucket: str, key: str, version: int, etag: str, modified_at: float) -> bool:
    """Note that upstream has this version now, under `etag` and since `modified_at` (Unix seconds). False where the key
    shows another version by now.
    """
    found = find_object(tx.db, bucket, key)
    if found is None or found.version != version:
        return False
    tx.db.execute("DELETE FROM dirty WHERE bucket = ? AND key = ?", (bucket, key))
    tx.db.execute(
        "UPDATE objects SET etag = ?, modified_at = ? WHERE bucket = ? AND key = ?", (etag, modified_at, bucket, key)
    )
    tx.note(bucket, replace(found.info, etag=etag, modified_at=modified_at), version)
    return True


def copy(tx: Transaction, request: CopyRequest, seen: StoredObject, made: ObjectInfo, now_s: float) -> ObjectInfo:
    """Publish a copy that shares the source's bytes.

    `made` is the copy as the caller made it from the source as `seen`. Raises CallerError as `publish`, and
    ConditionalRequestConflict when the source has changed since; the caller then reads the source again.
    """
    source = require_object(tx.db, request.source.bucket, request.source.key)
    if source != seen:
        raise CallerError(ErrorCode.CONDITIONAL_CONFLICT, "the source changed while it was copied", field="source")
    check_read(request.source.condition, source.info.etag, source.info.modified_at, copying=True)
    require_bucket(tx.db, request.bucket)
    _check_write(tx, request.bucket, request.key, request.condition)
    version = tx.new_version()
    columns = "part_number, object_offset, nbytes, file_id, file_offset, etag, modified_at, checksum, synced, blocks"
    tx.db.execute(
        f"INSERT INTO extents (version, {columns}) SELECT ?, {columns} FROM extents WHERE version = ?",
        (version, source.version),
    )
    named = tx.db.execute("SELECT DISTINCT file_id FROM extents WHERE version = ?", (version,))
    tx.gained.update(file_id for (file_id,) in named)
    info = replace(made, key=request.key, modified_at=now_s)
    tx.put_row(request.bucket, info, version)
    return info


def remove(tx: Transaction, bucket: str, key: str, condition: WriteCondition) -> None:
    """Delete an object, if there is one. Raises CallerError(NoSuchBucket, PreconditionFailed, NoSuchKey
    for If-Match).
    """
    require_bucket(tx.db, bucket)
    _check_write(tx, bucket, key, condition)
    found = find_object(tx.db, bucket, key)
    if found is not None:
        _remove(tx, bucket, found)


def remove_many(tx: Transaction, bucket: str, keys: Sequence[str], extents_max: int | None = None) -> int:
    """Delete the objects of these keys, until so many extents are deleted; returns how many keys were looked at. Raises
    CallerError(NoSuchBucket).
    """
    require_bucket(tx.db, bucket)
    before = tx.dropped_count
    for seen, key in enumerate(keys, start=1):
        found = find_object(tx.db, bucket, key)
        if found is not None:
            _remove(tx, bucket, found)
        if extents_max is not None and tx.dropped_count - before >= extents_max:
            return seen
    return len(keys)


def is_dirty(db: sqlite3.Connection, bucket: str, key: str) -> bool:
    """Whether upstream does not have what the key shows."""
    return db.execute("SELECT 1 FROM dirty WHERE bucket = ? AND key = ?", (bucket, key)).fetchone() is not None


def remove_versions(
    tx: Transaction,
    bucket: str,
    versions: Sequence[tuple[str, int]],
    extents_max: int,
    stays: Callable[[ObjectInfo], bool],
) -> tuple[int, int]:
    """Delete the keys that still show these versions, are not dirty, and of which `stays` says no, until so many
    extents are deleted; returns how many did, and how many were looked at.
    """
    removed, before = 0, tx.dropped_count
    for seen, (key, version) in enumerate(versions, start=1):
        found = find_object(tx.db, bucket, key)
        is_shown = found is not None and found.version == version
        if found is not None and is_shown and not is_dirty(tx.db, bucket, key) and not stays(found.info):
            _remove(tx, bucket, found)
            removed += 1
        if tx.dropped_count - before >= extents_max:
            return removed, seen
    return removed, len(versions)


def set_tags(tx: Transaction, bucket: str, key: str, tags: dict[str, str]) -> None:
    """Replace an object's tags. ETag and modification time stay. Raises CallerError(NoSuchBucket, NoSuchKey)."""
    found = require_object(tx.db, bucket, key)
    attributes = Attributes(found.info.attributes.headers, tags, found.info.attributes.storage_class)
    text = object_attributes(replace(found.info, attributes=attributes), found.upload_id)
    tx.db.execute("UPDATE objects SET attributes = ? WHERE bucket = ? AND key = ?", (text, bucket, key))
    dirty = is_dirty(tx.db, bucket, key)
    tx.note(bucket, replace(found.info, attributes=attributes), found.version, is_dirty=dirty)


def doubt_tags(tx: Transaction, bucket: str, key: str) -> None:
    """Note that the tags of a copy may be others upstream, until `set_tags`. They still pin it."""
    found = find_object(tx.db, bucket, key)
    if found is not None:
        text = object_attributes(found.info, found.upload_id, has_doubtful_tags=True)
        tx.db.execute("UPDATE objects SET attributes = ? WHERE bucket = ? AND key = ?", (text, bucket, key))


def note_uses(tx: Transaction, uses: Iterable[KeyUse]) -> None:
    """Record uses of those objects that are there."""
    tx.db.executemany(
        "INSERT OR REPLACE INTO uses SELECT ?1, ?2, ?3, ?4, ?5, ?6"
        " WHERE EXISTS (SELECT 1 FROM objects WHERE bucket = ?1 AND key = ?2)",
        [(use.bucket, use.key, use.used_at, use.use_count, use.parent, use.leased_until) for use in uses],
    )


def forget_unused(tx: Transaction) -> None:
    """Delete the uses of objects that are not there."""
    tx.db.execute(
        "DELETE FROM uses WHERE NOT EXISTS"
        " (SELECT 1 FROM objects WHERE objects.bucket = uses.bucket AND objects.key = uses.key)"
    )


def _remove(tx: Transaction, bucket: str, found: StoredObject) -> None:
    tx.touch("object", bucket, found.info.key)
    tx.changes.append(KeyChange(bucket, found.info.key, None))
    tx.drop_extents(found.version)
    tx.db.execute("DELETE FROM objects WHERE bucket = ? AND key = ?", (bucket, found.info.key))
    tx.db.execute("DELETE FROM uses WHERE bucket = ? AND key = ?", (bucket, found.info.key))
    tx.db.execute("DELETE FROM dirty WHERE bucket = ? AND key = ?", (bucket, found.info.key))


def _check_write(tx: Transaction, bucket: str, key: str, condition: WriteCondition) -> None:
    if condition.if_absent or condition.if_match is not None:
        found = find_object(tx.db, bucket, key)
        check_write(condition, found.info.etag if found else None)


def version_counter(start: int) -> Iterator[int]:
    """Versions from `start` on."""
    return itertools.count(start)
