"""Buckets and objects of the embedded store: the ObjectsApi."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TypeVar

from descriptors.chunk_flags import copied
from descriptors.conditions import NO_WRITE_CONDITION, WriteCondition, check_read, check_write
from descriptors.errors import CallerError, ErrorCode
from descriptors.lifecycle import LifecycleRule
from descriptors.objects import (
    Attributes,
    BucketCache,
    CopyRequest,
    NotDeleted,
    ObjectInfo,
    PutRequest,
    ReadRequest,
    UploadRef,
)
from descriptors.storage_api import Body
from descriptors.units import GIB
from objectcache.adapters.caller import work_for
from objectcache.adapters.threads import to_end
from storage_server.kernel.data.bodies import BodyReader, BodyWriter
from storage_server.kernel.data.bound import reserved_in
from storage_server.kernel.data.extents import ExtentFiles
from storage_server.kernel.data.io_threads import IoThreads
from storage_server.kernel.index import queries, transaction, upload_changes
from storage_server.kernel.index.committer import Committer
from storage_server.kernel.index.reader import IndexReader
from storage_server.kernel.index.resolved import ResolvedKeys
from storage_server.kernel.index.transaction import Transaction
from storage_server.kernel.reads import Reads
from storage_server.kernel.removal import remove_keys
from storage_server.kernel.rules.body_hashes import BodyHashes
from storage_server.kernel.rules.rows import StoredObject
from storage_server.kernel.slow_readers import SlowReaders
from storage_server.kernel.watcher import Watcher

COPIED_BYTES_MAX = 5 * GIB
"""S3 copies no larger object as one; a larger one keeps its parts here."""
COPY_ATTEMPTS_MAX = 8
UPLOADS_AT_ONCE = 100
REMOVED_AT_ONCE = 1000
_T = TypeVar("_T")


class Objects(Reads):
    """Implements descriptors.storage_api.ObjectsApi over one store."""

    def __init__(
        self,
        index: IndexReader,
        files: ExtentFiles,
        reader: BodyReader,
        resolved: ResolvedKeys,
        committer: Committer,
        writer: BodyWriter,
        io: IoThreads,
        object_bytes_max: int,
        watcher: Watcher,
        readers: SlowReaders | None = None,
        now_s: Callable[[], float] = time.time,
    ) -> None:
        super().__init__(index, files, reader, resolved, watcher, readers)
        self._watcher = watcher
        self._committer = committer
        self._writer = writer
        self._io = io
        self._object_bytes_max = object_bytes_max
        self.now_s = now_s
        """The time of day, in Unix seconds, that objects and uploads carry, and by which rules make them expire."""

    async def _change(self, change: Callable[[Transaction], _T], *, frees: bool = False) -> _T:
        """Carry out a change of the index to its end, even when the caller is cancelled."""
        return await to_end(asyncio.ensure_future(self._committer.commit(change, frees=frees)))

    async def create_bucket(self, access_key: str, bucket: str, cache: BucketCache | None = None) -> None:
        work_for(access_key)
        await self._change(lambda tx: transaction.create_bucket(tx, bucket, access_key, self.now_s(), cache))

    async def create_bucket_anew(self, access_key: str, bucket: str) -> None:
        """Create a bucket as `create_bucket` does, and before that delete what was put into one of its name when that
        was gone. Other writes go between the changes.
        """
        work_for(access_key)
        create = partial(transaction.create_bucket_anew, bucket=bucket, owner=access_key, most=REMOVED_AT_ONCE)
        while not await self._change(partial(create, now_s=self.now_s())):
            pass

    async def delete_bucket(self, access_key: str, bucket: str) -> None:
        """Other writes go between the changes: each unfinished upload is deleted in one of its own."""
        work_for(access_key)
        self._index.here(lambda db: transaction.require_empty(db, bucket))
        first = partial(queries.uploads_page, name=bucket, key="", upload_id=None, wanted="", limit=UPLOADS_AT_ONCE)
        while uploads := await self._index.threaded(first):
            for upload in uploads:
                ref = UploadRef(bucket, upload.info.key, upload.info.upload_id)
                with suppress(CallerError):  # it has ended meanwhile
                    await self._change(partial(upload_changes.abort_upload, ref=ref), frees=True)
        await self._change(lambda tx: transaction.delete_bucket(tx, bucket), frees=True)

    async def set_lifecycle(self, access_key: str, bucket: str, rules: list[LifecycleRule]) -> None:
        work_for(access_key)
        await self._change(lambda tx: transaction.set_lifecycle(tx, bucket, rules))

    async def put_object(self, access_key: str, request: PutRequest, body: Body) -> ObjectInfo:
        """Store a whole object. On return it is visible, and durable as the mode promises; after an error it is not
        visible at all.
        """
        work_for(access_key)
        check_size(request.nbytes, self._object_bytes_max)
        self._committer.require_space()
        created_at = self._index.here(lambda db: _check_before_body(db, request))
        bounds = self._watcher.bounds_of(request.bucket)
        async with (
            reserved_in(bounds, request.nbytes),
            self._writer.received(request.nbytes, request.checksum, body, bounds) as (part, pending),
        ):
            info = ObjectInfo(
                key=request.key,
                nbytes=request.nbytes,
                etag=part.etag,
                modified_at=self.now_s(),
                attributes=request.attributes,
                checksum=part.checksum,
            )

            def publish(tx: Transaction) -> None:
                transaction.require_same_bucket(tx.db, request.bucket, created_at)
                transaction.publish(tx, request.bucket, info, part, request.condition)

            await to_end(asyncio.ensure_future(self._committer.commit(publish, pending)))
        return info

    async def copy_object(self, access_key: str, request: CopyRequest) -> ObjectInfo:
        """Copy an object. The copy shares the source's bytes. They are read only for a checksum that the source lacks,
        and for the ETag of a source that came in parts: the copy is one object.
        """
        work_for(access_key)
        for _ in range(COPY_ATTEMPTS_MAX):
            source = self._index.here(lambda db: _find_source(db, request.source))
            check_size(source.info.nbytes, self._object_bytes_max)
            copied = await self._described_copy(access_key, request, source)
            created_at = self._index.here(lambda db: queries.bucket(db, request.bucket)).created_at

            def publish(
                tx: Transaction, seen: StoredObject = source, made: ObjectInfo = copied, since: float = created_at
            ) -> ObjectInfo:
                transaction.require_same_bucket(tx.db, request.bucket, since)
                return transaction.copy(tx, request, seen, made, self.now_s())

            try:
                async with reserved_in(self._watcher.bounds_of(request.bucket), copied.nbytes):
                    return await self._change(publish)
            except CallerError as error:
                if error.code is not ErrorCode.CONDITIONAL_CONFLICT:
                    raise
        raise CallerError(ErrorCode.CONDITIONAL_CONFLICT, "the source keeps changing", field="x-amz-copy-source")

    async def _described_copy(self, access_key: str, request: CopyRequest, source: StoredObject) -> ObjectInfo:
        kept = request.attributes or source.info.attributes
        tags = source.info.attributes.tags if request.tags is None else request.tags
        headers = copied(kept.headers, source.info.attributes.headers)
        info = replace(source.info, attributes=Attributes(headers, tags, request.storage_class))
        wanted = request.checksum
        is_whole = info.part_count is None or info.nbytes > COPIED_BYTES_MAX
        if is_whole and (wanted is None or (info.checksum is not None and info.checksum.algorithm is wanted)):
            return info
        if not is_whole and info.checksum is not None:
            wanted = wanted or info.checksum.algorithm
        hashes = BodyHashes(wanted, sha256=False)
        whole = replace(request.source, range=None, part_number=None)
        async with self.open_object(access_key, whole) as read:
            async for piece in read.body:
                await self._io.run(lambda data=piece: hashes.update(data))  # type: ignore[misc]
        if is_whole:
            return replace(info, checksum=hashes.checksum)
        return replace(info, etag=hashes.etag, part_count=None, checksum=hashes.checksum)

    async def delete_object(
        self, access_key: str, bucket: str, key: str, condition: WriteCondition = NO_WRITE_CONDITION
    ) -> None:
        work_for(access_key)
        await self._change(lambda tx: transaction.remove(tx, bucket, key, condition), frees=True)

    async def delete_objects(self, access_key: str, bucket: str, keys: list[str]) -> list[NotDeleted]:
        """Other writes go between the changes: S3 does not ask for all or nothing, and one change of a thousand objects
        with many parts would keep everybody waiting.
        """
        work_for(access_key)
        await remove_keys(partial(self._change, frees=True), bucket, keys)
        return []

    async def set_tags(self, access_key: str, bucket: str, key: str, tags: dict[str, str]) -> None:
        work_for(access_key)
        await self._change(lambda tx: transaction.set_tags(tx, bucket, key, tags))


def check_size(nbytes: int, nbytes_max: int) -> None:
    """Raises CallerError(EntityTooLarge)."""
    if nbytes > nbytes_max:
        raise CallerError(
            ErrorCode.ENTITY_TOO_LARGE,
            f"one request may store {nbytes_max} bytes, not {nbytes}",
            field="content-length",
        )


def _check_before_body(db: sqlite3.Connection, request: PutRequest) -> float:
    """Raise before the body what would be raised after it. The commit checks again. Returns when the bucket was made,
    in Unix seconds.
    """
    bucket = queries.bucket(db, request.bucket)
    if request.condition != NO_WRITE_CONDITION:
        found = transaction.find_object(db, request.bucket, request.key)
        check_write(request.condition, found.info.etag if found else None)
    return bucket.created_at


def _find_source(db: sqlite3.Connection, source: ReadRequest) -> StoredObject:
    found = transaction.require_object(db, source.bucket, source.key)
    check_read(source.condition, found.info.etag, found.info.modified_at, copying=True)
    return found
