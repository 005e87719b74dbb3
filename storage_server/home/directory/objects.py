"""Objects and uploads of a shared directory. Before a call that depends on what others have done, their journals are
read to their ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

import numpy as np

from descriptors.chunk_names import is_chunk
from descriptors.conditions import NO_WRITE_CONDITION, WriteCondition
from descriptors.errors import CallerError, ErrorCode, ServerError
from descriptors.objects import (
    Attributes,
    CompleteRequest,
    CopyRequest,
    ListPage,
    ListRequest,
    NotDeleted,
    ObjectInfo,
    ObjectPart,
    PartCopyRequest,
    PartInfo,
    PartPage,
    PartRequest,
    PutRequest,
    ReadHead,
    ReadRequest,
    UploadListRequest,
    UploadPage,
    UploadRef,
    UploadRequest,
)
from descriptors.storage_api import SERVER_KEY, Body, ObjectRead, Piece
from descriptors.units import GIB
from storage_server.home.cached_read import healing
from storage_server.home.directory.buckets import SharedBuckets
from storage_server.home.directory.files import SharedFiles
from storage_server.home.directory.following import Following
from storage_server.home.directory.reading import SharedReads
from storage_server.home.fetch.bulk_reads import Into
from storage_server.home.rules.proof import Proof
from storage_server.home.rules.refusals import unreachable
from storage_server.home.service import Sent
from storage_server.kernel.objects import Objects
from storage_server.kernel.rules.plain_rows import is_key, unplain_field
from storage_server.kernel.uploads import Uploads
from storage_server.planning.block_checksums import BLOCK_BYTES
from storage_server.planning.extent import Extent

PROVED_BYTES_MAX = GIB
"""A proof has eight bytes for each block, which the event loop makes. No chunk is as large."""
_WORD = np.dtype("<u4")


class SharedObjects(SharedBuckets):
    """Implements storage_server.home.service.HomeObjects."""

    counts_tags = True

    def __init__(self, objects: Objects, files: SharedFiles, following: Following, reads: SharedReads) -> None:
        super().__init__(objects, following)
        self._files = files
        self._reads = reads

    def require_takes(self, request: PutRequest) -> None:
        _require_recordable(request.key, request.attributes)

    async def put_object(self, access_key: str, request: PutRequest, body: Body) -> ObjectInfo:
        self.require_takes(request)
        if request.condition != NO_WRITE_CONDITION or self._may_be_elsewhere(request):
            await self._following.read_journals()
        else:
            await self.require_bucket(request.bucket)
        return await self._objects.put_object(access_key, request, body)

    def _may_be_elsewhere(self, request: PutRequest) -> bool:
        """Whether the stamp must be behind what others have written to the key: to any key but that of a new chunk, and
        where the file system's time is too coarse to tell which came later.
        """
        if self._files.tells_whole_seconds or not is_chunk(request.key, request.attributes):
            return True
        return self._objects.stored(request.bucket, request.key) is not None

    async def send(self, request: PutRequest, body: Body, proof: Proof | None = None) -> Sent:
        """Put an object. The checksums of its blocks, which are its proof, are kept anyway."""
        info = await self.put_object(SERVER_KEY, request, body)
        return Sent(info.etag, info.modified_at)

    async def has_object(self, bucket: str, key: str, since_s: float) -> bool:
        """Whether there is such an object whose bytes are not known to be damaged."""
        if not self._has(bucket, key):
            await self._following.read_journals(since_s)
        return self._has(bucket, key)

    def _has(self, bucket: str, key: str) -> bool:
        return self._objects.stored(bucket, key) is not None and not self._objects.is_damaged(bucket, key)

    async def head_object(self, access_key: str, request: ReadRequest) -> ReadHead:
        await self._read_journals_unless_known(request)
        return await self._objects.head_object(access_key, request)

    @asynccontextmanager
    async def open_object(self, access_key: str, request: ReadRequest) -> AsyncIterator[ObjectRead]:
        await self._read_journals_unless_known(request)
        async with AsyncExitStack() as stack:
            try:
                read = await stack.enter_async_context(self._objects.open_object(access_key, request))
            except ServerError:
                await self._require_there(request)
                raise
            yield healing(read, lambda: self._objects.note_damaged(request.bucket, request.key))

    @asynccontextmanager
    async def open_range(
        self, request: ReadRequest
    ) -> AsyncIterator[tuple[ReadHead, Proof | None, AsyncIterator[Piece]]]:
        """A read that also gives the proof of the whole object."""
        proof = await self._proof(request)
        async with self.open_object(SERVER_KEY, request) as read:
            yield read.head, proof, read.body

    @asynccontextmanager
    async def open_into(
        self, request: ReadRequest, into: Into
    ) -> AsyncIterator[tuple[ReadHead, Proof | None, asyncio.Future[None]]]:
        """A read whose bytes, as many as `into` has room for, go there."""
        proof = await self._proof(request)
        async with self._objects.open_extents(request) as (head, extents):
            if head.range.length != len(into.view):
                body: asyncio.Future[None] = asyncio.get_running_loop().create_future()
                body.set_exception(unreachable(f"{head.range.length} bytes come of {len(into.view)}"))
                body.exception()
                yield head, proof, body
                return
            loop = asyncio.get_running_loop()

            def note_damage() -> None:
                loop.call_soon_threadsafe(self._objects.note_damaged, request.bucket, request.key)

            reading = self._reads.read(extents, head.range.start, into, note_damage)
            try:
                yield head, proof, reading.body
            finally:
                await reading.end()

    async def object_parts(self, access_key: str, bucket: str, key: str) -> list[ObjectPart]:
        await self._following.read_journals()
        return await self._objects.object_parts(access_key, bucket, key)

    async def copy_object(self, access_key: str, request: CopyRequest) -> ObjectInfo:
        headers = {} if request.attributes is None else request.attributes.headers
        _require_recordable(request.key, Attributes(headers, request.tags or {}, request.storage_class))
        await self._following.read_journals()
        return await self._objects.copy_object(access_key, request)

    async def delete_object(
        self, access_key: str, bucket: str, key: str, condition: WriteCondition = NO_WRITE_CONDITION
    ) -> None:
        await self._following.read_journals()
        await self._objects.delete_object(access_key, bucket, key, condition)

    async def delete_objects(self, access_key: str, bucket: str, keys: list[str]) -> list[NotDeleted]:
        await self._following.read_journals()
        return await self._objects.delete_objects(access_key, bucket, keys)

    async def set_tags(self, access_key: str, bucket: str, key: str, tags: dict[str, str]) -> None:
        _require_recordable(key, Attributes(tags=tags))
        await self._following.read_journals()
        await self._objects.set_tags(access_key, bucket, key, tags)

    async def list_objects(self, access_key: str, request: ListRequest) -> ListPage:
        await self._following.read_journals()
        return await self._objects.list_objects(access_key, request)

    async def _read_journals_unless_known(self, request: ReadRequest) -> None:
        """Read the journals, unless the object is a chunk that the index has: chunks do not change. Any other object
        may have been replaced by another server. Raises ServerError, and NoSuchKey for a chunk that is known to be
        damaged, so that its client computes it again.
        """
        bucket, key = request.bucket, request.key
        stored = self._objects.stored(bucket, key)
        if stored is None or not is_chunk(key, stored.info.attributes):
            await self._following.read_journals()
            return
        if self._objects.is_damaged(bucket, key):
            await self._following.read_journals()
            if self._objects.is_damaged(bucket, key):
                raise _gone()

    async def _proof(self, request: ReadRequest) -> Proof | None:
        """The checksums of the object's blocks; None where its parts do not end with blocks, and for an object that is
        larger than chunks are.
        """
        await self._read_journals_unless_known(request)
        known = self._objects.stored(request.bucket, request.key)
        if known is not None and known.info.nbytes > PROVED_BYTES_MAX:
            return None
        try:
            async with self._objects.open_stored(request.bucket, request.key) as (stored, extents):
                return None if stored is None else proof_of(stored.info.nbytes, extents)
        except ServerError:
            await self._require_there(request)
            raise

    async def _require_there(self, request: ReadRequest) -> None:
        """Raises CallerError(NoSuchKey) where the file is gone: somebody has cleared the file system up."""
        locations = self._objects.locations(request.bucket, request.key)
        if not await asyncio.to_thread(self._files.is_there):
            raise ServerError(ErrorCode.SLOW_DOWN, "the shared directory is away", retryable=True)
        if await asyncio.to_thread(_are_gone, self._files, locations):
            self._objects.note_damaged(request.bucket, request.key)
            raise _gone() from None


def _are_gone(files: SharedFiles, locations: Sequence[Extent]) -> bool:
    return any(not files.place(extent.file_id).exists() for extent in locations)


def _require_recordable(key: str, attributes: Attributes) -> None:
    """Raises CallerError for what no record can have, since other servers would pass over it."""
    field = unplain_field(attributes) if is_key(key) else "key"
    if field is not None:
        problem = "a shared directory cannot have this key, or a header of this name or value"
        raise CallerError(ErrorCode.INVALID_ARGUMENT, problem, field=field)


def _gone() -> CallerError:
    return CallerError(ErrorCode.NO_SUCH_KEY, "the object's bytes are damaged, or gone", field="key")


def proof_of(nbytes: int, extents: Sequence[Extent]) -> Proof | None:
    """The proof of an object in these extents; None where one of them but the last does not end with a block. Pure."""
    if not extents or any(extent.nbytes % BLOCK_BYTES for extent in extents[:-1]):
        return None
    words = np.frombuffer(b"".join(extent.checksums for extent in extents), dtype=_WORD)
    if len(words) != -(-nbytes // BLOCK_BYTES):
        return None
    return Proof(nbytes, BLOCK_BYTES, tuple(words.tolist()))


class SharedUploads:
    """Implements descriptors.storage_api.UploadsApi."""

    def __init__(self, uploads: Uploads, following: Following) -> None:
        self._uploads = uploads
        self._following = following

    async def create_upload(self, access_key: str, request: UploadRequest) -> str:
        _require_recordable(request.key, request.attributes)
        await self._following.read_journals()
        return await self._uploads.create_upload(access_key, request)

    async def put_part(self, access_key: str, request: PartRequest, body: Body) -> PartInfo:
        await self._following.read_journals()
        return await self._uploads.put_part(access_key, request, body)

    async def copy_part(self, access_key: str, request: PartCopyRequest) -> PartInfo:
        await self._following.read_journals()
        return await self._uploads.copy_part(access_key, request)

    async def complete_upload(self, access_key: str, request: CompleteRequest) -> ObjectInfo:
        await self._following.read_journals()
        return await self._uploads.complete_upload(access_key, request)

    async def abort_upload(self, access_key: str, upload: UploadRef) -> None:
        await self._following.read_journals()
        await self._uploads.abort_upload(access_key, upload)

    async def list_parts(self, access_key: str, upload: UploadRef, part_number_marker: int, max_parts: int) -> PartPage:
        await self._following.read_journals()
        return await self._uploads.list_parts(access_key, upload, part_number_marker, max_parts)

    async def list_uploads(self, access_key: str, request: UploadListRequest) -> UploadPage:
        await self._following.read_journals()
        return await self._uploads.list_uploads(access_key, request)
