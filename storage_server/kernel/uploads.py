"""Multipart uploads. A part is a body like any other; completing an upload changes the index and moves no byte."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable
from typing import TypeVar

from descriptors.errors import CallerError, ErrorCode
from descriptors.headers import CODEC_HEADER
from descriptors.objects import (
    PART_NUMBER_MAX,
    BodyDigests,
    ChecksumAlgorithm,
    CompleteRequest,
    ObjectInfo,
    PartCopyRequest,
    PartInfo,
    PartPage,
    PartRequest,
    UploadInfo,
    UploadListRequest,
    UploadPage,
    UploadRef,
    UploadRequest,
)
from descriptors.storage_api import Body, ObjectRead, Piece
from objectcache.adapters.caller import work_for
from objectcache.adapters.threads import to_end
from storage_server.kernel.data.bodies import BodyWriter
from storage_server.kernel.data.bound import reserved_in
from storage_server.kernel.data.segments import Pending
from storage_server.kernel.index import queries, upload_changes
from storage_server.kernel.index.committer import Committer
from storage_server.kernel.index.reader import IndexReader
from storage_server.kernel.index.transaction import Transaction
from storage_server.kernel.index.upload_changes import require_upload
from storage_server.kernel.objects import Objects
from storage_server.kernel.rules.listing import list_uploads
from storage_server.kernel.rules.rows import StoredPart
from storage_server.kernel.watcher import Watcher

_T = TypeVar("_T")


class Uploads:
    """Implements descriptors.storage_api.UploadsApi over one store."""

    def __init__(
        self,
        reader: IndexReader,
        committer: Committer,
        bodies: BodyWriter,
        part_bytes_max: int,
        objects: Objects,
        watcher: Watcher,
        whole_bytes_max: int | None = None,
    ) -> None:
        self._whole_bytes_max = whole_bytes_max
        self._watcher = watcher
        self._reader = reader
        self._committer = committer
        self._bodies = bodies
        self._part_bytes_max = part_bytes_max
        self._objects = objects

    async def create_upload(self, access_key: str, request: UploadRequest) -> str:
        work_for(access_key)
        upload_id = secrets.token_urlsafe(24)
        await self._commit(lambda tx: upload_changes.create_upload(tx, request, upload_id, self._objects.now_s()))
        return upload_id

    async def put_part(self, access_key: str, request: PartRequest, body: Body) -> PartInfo:
        work_for(access_key)
        check_part(request.part_number, request.nbytes, self._part_bytes_max)
        self._committer.require_space()
        upload = self._reader.here(lambda db: require_upload(db, request.upload)).info
        algorithm = _part_algorithm(upload, request.checksum)
        bounds = self._watcher.bounds_of(request.upload.bucket, of_part=True)
        async with (
            reserved_in(bounds, request.nbytes),
            self._bodies.received(request.nbytes, algorithm, body, bounds) as (part, pending),
        ):
            return await self._add_part(request.upload, request.part_number, part, pending)

    async def copy_part(self, access_key: str, request: PartCopyRequest) -> PartInfo:
        work_for(access_key)
        upload = self._reader.here(lambda db: require_upload(db, request.upload)).info
        async with self._objects.open_object(access_key, request.source) as read:
            if CODEC_HEADER in read.head.info.attributes.headers:
                problem = "an encoded chunk is copied as a whole, by CopyObject"
                raise CallerError(ErrorCode.NOT_IMPLEMENTED, problem, field="x-amz-copy-source")
            nbytes, span = read.head.range.length, request.source.range
            if span is not None and span.last is not None and span.last >= read.head.info.nbytes:
                problem = f"the range must end within the source, which has {read.head.info.nbytes} bytes"
                raise CallerError(ErrorCode.INVALID_ARGUMENT, problem, field="x-amz-copy-source-range")
            check_part(request.part_number, nbytes, self._part_bytes_max)
            async with (
                reserved_in(self._watcher.bounds_of(request.upload.bucket, of_part=True), nbytes),
                self._bodies.received(nbytes, upload.checksum, _CopiedBody(read)) as (part, pending),
            ):
                return await self._add_part(request.upload, request.part_number, part, pending)

    async def complete_upload(self, access_key: str, request: CompleteRequest) -> ObjectInfo:
        work_for(access_key)
        most = self._whole_bytes_max
        return await self._commit(lambda tx: upload_changes.complete_upload(tx, request, self._objects.now_s(), most))

    async def abort_upload(self, access_key: str, upload: UploadRef) -> None:
        work_for(access_key)
        await self._commit(lambda tx: upload_changes.abort_upload(tx, upload), frees=True)

    async def list_parts(self, access_key: str, upload: UploadRef, part_number_marker: int, max_parts: int) -> PartPage:
        work_for(access_key)
        return await self._reader.threaded(lambda db: queries.parts(db, upload, part_number_marker, max_parts))

    async def list_uploads(self, access_key: str, request: UploadListRequest) -> UploadPage:
        work_for(access_key)
        self._reader.here(lambda db: queries.bucket(db, request.bucket))

        async def fetch(key: str, upload_id: str | None, limit: int) -> list[UploadInfo]:
            rows = await self._reader.threaded(
                lambda db: queries.uploads_page(
                    db, request.bucket, key=key, upload_id=upload_id, wanted=request.prefix, limit=limit
                )
            )
            return [row.info for row in rows]

        return await list_uploads(request, fetch)

    async def _add_part(self, ref: UploadRef, number: int, part: StoredPart, pending: Pending | None) -> PartInfo:
        def add(tx: Transaction) -> PartInfo:
            return upload_changes.add_part(tx, ref, number, part, self._objects.now_s())

        return await to_end(asyncio.ensure_future(self._committer.commit(add, pending)))

    async def _commit(self, change: Callable[[Transaction], _T], *, frees: bool = False) -> _T:
        return await to_end(asyncio.ensure_future(self._committer.commit(change, frees=frees)))


class _CopiedBody:
    """Stored bytes as a body. They were proved when they were read."""

    has_sha256 = False
    is_held_back = False

    def __init__(self, read: ObjectRead) -> None:
        self._read = read

    async def __aiter__(self) -> AsyncIterator[Piece]:
        async for piece in self._read.body:
            yield bytes(piece)  # a copy: the memory is used again for the next piece

    def digests(self) -> BodyDigests:
        return BodyDigests()


def check_part(number: int, nbytes: int, nbytes_max: int) -> None:
    """Raises CallerError(InvalidArgument, EntityTooLarge)."""
    if not 1 <= number <= PART_NUMBER_MAX:
        raise CallerError(
            ErrorCode.INVALID_ARGUMENT, f"part numbers go from 1 to {PART_NUMBER_MAX}", field="partNumber"
        )
    if nbytes > nbytes_max:
        raise CallerError(
            ErrorCode.ENTITY_TOO_LARGE, f"a part may have {nbytes_max} bytes, not {nbytes}", field="content-length"
        )


def _part_algorithm(upload: UploadInfo, sent: ChecksumAlgorithm | None) -> ChecksumAlgorithm | None:
    """The checksum algorithm of a part: the upload's or, where the upload has none, the one this part was sent with."""
    if upload.checksum is not None and sent not in (None, upload.checksum):
        raise CallerError(
            ErrorCode.INVALID_REQUEST,
            f"the upload was begun with {upload.checksum.value} checksums; this part has another",
            field="x-amz-checksum-algorithm",
        )
    return upload.checksum or sent
