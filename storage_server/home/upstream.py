"""Another home of objects, with a cache before it: objects and uploads lie there, and chunks that were read are kept
here. The cache has nothing that cannot be had again, but for dirty chunks.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from typing import TypeVar

from descriptors.chunk_names import is_chunk, is_chunk_key
from descriptors.conditions import NO_WRITE_CONDITION, WriteCondition
from descriptors.errors import CallerError, ErrorCode, ServerError
from descriptors.lifecycle import LifecycleRule
from descriptors.objects import (
    BUCKETS_LISTED_MAX,
    BucketCache,
    BucketInfo,
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
from descriptors.storage_api import SERVER_KEY, Body, ObjectRead, UploadsApi
from objectcache.adapters.beneath import Beneath
from objectcache.adapters.caller import CALLER
from objectcache.adapters.threads import computed, finished, to_end
from storage_server.delivery.gather.landing import Landing
from storage_server.home.cached_read import healing
from storage_server.home.chunks import UpstreamChunks
from storage_server.home.embedded import EmbeddedStore
from storage_server.home.fetch.fetches import Fetches
from storage_server.home.fetch.placed_chunk import PROVED_HERE_BYTES_MAX
from storage_server.home.former_keepers import FormerKeepers, PeerCopies
from storage_server.home.further_tier import FurtherTier
from storage_server.home.key_locks import KeyLocks
from storage_server.home.own_keys import OwnKeys
from storage_server.home.passing_body import CountedBody, EndedBody, RatedBody
from storage_server.home.remote_dram.remote_dram import RemoteDram
from storage_server.home.remote_dram.removed_file import RemovedFile
from storage_server.home.revalidation import PASSES, Revalidation
from storage_server.home.rules.merged_list import dirty_after, merged
from storage_server.home.rules.proof import make_proof
from storage_server.home.service import HomeObjects, Service, Shown
from storage_server.home.write_back import StoredBody, WriteBack, send_stored
from storage_server.kernel.index import transaction
from storage_server.kernel.index.transaction import Transaction
from storage_server.kernel.objects import check_size
from storage_server.kernel.removal import remove_versions
from storage_server.kernel.rules.rows import StoredObject
from storage_server.settings import UpstreamSettings, Write

FULL_S = 5.0
"""For so long after the cache had no room, chunks are not kept when they are put."""
_log = logging.getLogger(__name__)
ABSENT = frozenset({ErrorCode.NO_SUCH_KEY, ErrorCode.NO_SUCH_BUCKET})
_T = TypeVar("_T")


def further_tiers(
    settings: UpstreamSettings, file: RemovedFile, objects: HomeObjects, own: OwnKeys | None, copies: PeerCopies | None
) -> Sequence[FurtherTier]:
    """The tiers between the cache and home, in the order in which they are asked."""
    tiers: list[FurtherTier] = []
    there = settings.remote_dram
    if there is not None:  # a copy that comes from there may be as old, and stays until the next pass
        keep_s = settings.chunk_revalidate_s / PASSES
        tiers.append(RemoteDram(there, there.namespace or settings.endpoint, keep_s, file=file))
    if own is not None and copies is not None:
        tiers.append(FormerKeepers(objects, own.former_keeper, copies))
    return tiers


class UpstreamHome:
    """The roles `objects` and `uploads`, and the ChunkSource `chunks`. `start` before use, `close` after."""

    def __init__(
        self,
        settings: UpstreamSettings,
        service: Service,
        cache: EmbeddedStore,
        own: OwnKeys | None = None,
        copies: PeerCopies | None = None,
    ) -> None:
        """In a cluster `own` says which keys this server is the keeper of, and `copies` reads out of the caches of
        other members.
        """
        self.settings = settings
        self._own = own
        nbytes_max = cache.settings.object_bytes_max
        self.service = service
        service.on_changed(self._forget_changed)
        plain = self.service.objects
        locks = KeyLocks()
        self._removed_file = RemovedFile(Beneath(cache.settings.data_dir, "remote-dram-removed"))
        self.tiers = further_tiers(settings, self._removed_file, plain, own, copies)
        landings = (each.landing(settings.landing_bytes) for each in self.tiers)
        landing = next((each for each in landings if each is not None), None) or Landing(settings.landing_bytes)
        self.fetches = Fetches(
            objects=plain,
            cache=cache,
            locks=locks,
            requests_max=settings.fetches_max,
            landing=landing,
            tiers=self.tiers,
        )
        accepts = settings.write is Write.BACK
        self.write_back = WriteBack(plain, cache, locks, self._stop_copies, settings.uploads_max, accepts=accepts)
        self.cache = cache
        self.objects = CachedObjects(plain, nbytes_max, self)
        self.uploads = CachedUploads(self.service.uploads, self)
        self.chunks = UpstreamChunks(
            objects=plain,
            cache=cache,
            fetches=self.fetches,
            forget=self._forget_versions,
            own=own,
            is_lost=self.is_lost,
        )
        self.revalidation = Revalidation(plain, cache.reader, self._forget_versions)
        self._revalidate_s = settings.chunk_revalidate_s
        self._revalidating: asyncio.Task[None] | None = None

    async def _stop_copies(self, bucket: str, keys: Sequence[str]) -> None:
        """No copy of what these keys showed before comes into the cache any more."""
        await self.fetches.stop(bucket, keys)
        await self._remove_from_tiers(bucket, keys)

    async def _remove_from_tiers(self, bucket: str, keys: Sequence[str]) -> None:
        chunk_keys = [key for key in keys if is_chunk_key(key)]
        await asyncio.gather(*(each.remove(bucket, chunk_keys) for each in self.tiers))

    async def _forget_changed(self, changed: Sequence[Shown]) -> None:
        """Others have changed these: copies that are not what they show now leave the cache."""
        by_bucket = defaultdict[str, dict[str, str | None]](dict)
        for bucket, key, etag, is_changed in changed:
            by_bucket[bucket][key] = etag
            if is_changed and is_chunk_key(key):
                for tier in self.tiers:
                    tier.distrust(bucket, [key])
        for bucket, shown in by_bucket.items():
            await self.fetches.stop_others(bucket, shown)
            await self.revalidation.forget_others(bucket, shown)
            self.chunks.forget_known(bucket, list(shown))

    @property
    def remote(self) -> RemoteDram | None:
        """Remote DRAM, where there is any."""
        return next((each for each in self.tiers if isinstance(each, RemoteDram)), None)

    @property
    def former(self) -> FormerKeepers | None:
        """The caches of former keepers, in a cluster."""
        return next((each for each in self.tiers if isinstance(each, FormerKeepers)), None)

    @property
    def failed_count(self) -> int:
        """How many requests the service did not answer, or was too busy for."""
        return self.service.failed_count

    async def start(self) -> None:
        """Make the pool of connections, begin to upload what is dirty, and to look for what others have changed."""
        if self.remote is None:
            await asyncio.to_thread(self._removed_file.doubt)
        for tier in self.tiers:
            await tier.start()
        await self.service.start()
        await self.write_back.start()
        if self.settings.directory is not None:  # what changed while this server was away
            await self.revalidation.compare_first()
        if self._revalidate_s:
            self._revalidating = asyncio.create_task(self.revalidation.run(self._revalidate_s))

    async def close(self) -> None:
        """Stop what is under way."""
        if self._revalidating is not None:
            self._revalidating.cancel()
            await asyncio.wait([self._revalidating])
        await self.write_back.close()
        await self.fetches.close()
        for tier in self.tiers:
            await tier.close()
        await self.service.close()

    def cached(self, bucket: str, key: str) -> bool:
        """Whether the cache has a sound copy of a chunk, of whichever member's key."""
        stored = self.cache.objects.stored(bucket, key)
        return stored is not None and is_chunk_key(key) and not self.cache.objects.is_damaged(bucket, key)

    def copy_of(self, bucket: str, key: str) -> StoredObject | None:
        """The chunk in the cache that answers for this key; None where upstream must be asked: in a cluster also for
        the keys of other servers, unless upstream does not have the chunk yet. Raises ServerError(InternalError) where
        the chunk is lost.
        """
        stored = self.cache.objects.stored(bucket, key)
        if stored is None or not is_chunk(key, stored.info.attributes):
            return None
        is_others = self._own is not None and not (is_chunk_key(key) and self._own.is_own(bucket, key))
        if is_others and not self.write_back.is_dirty(bucket, key):
            return None
        if self.is_lost(bucket, key):
            problem = "the only copy of this chunk is damaged, and was not uploaded before: put it again"
            raise ServerError(ErrorCode.INTERNAL_ERROR, problem, retryable=False)
        return None if self.cache.objects.is_damaged(bucket, key) else stored

    def is_lost(self, bucket: str, key: str) -> bool:
        """Whether a dirty chunk is damaged. Upstream has an older version, or none: neither answers for it."""
        return self.write_back.is_dirty(bucket, key) and self.cache.objects.is_damaged(bucket, key)

    async def put_chunk(self, request: PutRequest, body: Body) -> ObjectInfo:
        """Put a chunk upstream and into the cache, in this order, so that the cache never has what upstream lacks."""
        bucket, key = request.bucket, request.key
        async with self.cache.bodies.received(request.nbytes, request.checksum, body) as (part, pending):
            assert part.extent is not None
            make = partial(make_proof, request.nbytes, part.extent.checksums)
            proof = await computed(make, is_long=request.nbytes > PROVED_HERE_BYTES_MAX)
            stored = StoredBody(self.cache.received_pieces(part, pending), part)
            async with self.write_back.held(bucket, [key], settled=request.condition != NO_WRITE_CONDITION):
                send = partial(send_stored, self.service.objects, request, stored, proof)
                sent = await self.changing(bucket, [key], send)
                info = ObjectInfo(
                    key=key,
                    nbytes=request.nbytes,
                    etag=sent.etag,
                    modified_at=sent.modified_at,
                    attributes=request.attributes,
                    checksum=part.checksum,
                )

                def publish(tx: Transaction) -> None:
                    transaction.ensure_bucket(tx, bucket, time.time())
                    transaction.publish(tx, bucket, info, part, NO_WRITE_CONDITION)

                try:
                    await to_end(asyncio.ensure_future(self.cache.committer.commit(publish, pending)))
                except ServerError as error:  # upstream has it, and no copy is kept
                    _log.warning("a chunk that was put upstream is not kept in the cache: %s", error.message)
        return info

    async def forget(self, bucket: str, keys: Sequence[str]) -> None:
        """Remove every copy of these objects: a fetch under way ends, and no later read finds what it had brought."""
        await self._stop_copies(bucket, keys)
        self.chunks.forget_known(bucket, keys)
        try:
            await self.cache.objects.delete_objects(SERVER_KEY, bucket, list(keys))
        except CallerError as error:
            if error.code is not ErrorCode.NO_SUCH_BUCKET:
                raise
        self.write_back.forget(bucket, keys)

    async def forget_clean(self, bucket: str, keys: Sequence[str]) -> None:
        """Remove every copy of these objects but those that upstream does not have."""
        clean = [key for key in keys if not self.write_back.is_dirty(bucket, key)]
        if clean:
            await self.forget(bucket, clean)

    async def changing(
        self,
        bucket: str,
        keys: Sequence[str],
        change: Callable[[], Awaitable[_T]],
        unchanged: Callable[[_T], Collection[str]] = lambda changed: (),
    ) -> _T:
        """Carry out a change of these objects upstream, and remove every copy before this returns. A change that fails
        may have been carried out all the same: copies go, but what upstream does not have yet stays. Copies also go
        before the change, so that a crash in the middle leaves none of what it replaced. `unchanged` says which of the
        keys a change that was carried out has left as they were.
        """
        await self.forget_clean(bucket, [key for key in keys if self.cache.objects.stored(bucket, key) is not None])
        try:
            changed = await change()
        except BaseException:
            await to_end(asyncio.ensure_future(self.forget_clean(bucket, keys)))
            raise
        left = set(unchanged(changed))
        await to_end(asyncio.ensure_future(self.forget(bucket, [key for key in keys if key not in left])))
        if left:
            await to_end(asyncio.ensure_future(self.forget_clean(bucket, [key for key in keys if key in left])))
        return changed

    async def _forget_versions(self, bucket: str, versions: Mapping[str, int]) -> int:
        await self._remove_from_tiers(bucket, list(versions))
        return await remove_versions(partial(self.cache.change, frees=True), bucket, versions)


class CachedObjects:
    """Implements descriptors.storage_api.ObjectsApi: objects upstream, copies of which may be in the cache. A copy is
    removed before a change is answered. Chunks are read from the cache without asking upstream, dirty ones always.
    """

    def __init__(self, there: HomeObjects, object_bytes_max: int, home: UpstreamHome) -> None:
        self._there = there
        self._object_bytes_max = object_bytes_max
        self._home = home
        self._write_back = home.write_back
        self._full_at_s = -math.inf

    async def create_bucket(self, access_key: str, bucket: str, cache: BucketCache | None = None) -> None:
        await self._there.create_bucket(access_key, bucket)

    async def head_bucket(self, access_key: str, bucket: str) -> BucketInfo:
        return await self._there.head_bucket(access_key, bucket)

    async def list_buckets(self, access_key: str, after: str = "", most: int = BUCKETS_LISTED_MAX) -> list[BucketInfo]:
        return await self._there.list_buckets(access_key, after, most)

    async def get_lifecycle(self, access_key: str, bucket: str) -> list[LifecycleRule]:
        return await self._there.get_lifecycle(access_key, bucket)

    async def own_lifecycle(self, access_key: str, bucket: str) -> list[LifecycleRule]:
        return await self._there.own_lifecycle(access_key, bucket)

    async def set_lifecycle(self, access_key: str, bucket: str, rules: list[LifecycleRule]) -> None:
        await self._there.set_lifecycle(access_key, bucket, rules)

    async def delete_bucket(self, access_key: str, bucket: str) -> None:
        if await self._write_back.page(bucket, "", "", 1):
            raise CallerError(ErrorCode.BUCKET_NOT_EMPTY, f"the bucket {bucket} still has objects", field="bucket")
        self._write_back.buckets.forget(bucket)
        await self._there.delete_bucket(access_key, bucket)

    async def put_object(self, access_key: str, request: PutRequest, body: Body) -> ObjectInfo:
        """A chunk is received as a whole before it is sent upstream, with its proof, and stays in the cache. Written
        back, it is sent after the answer. Where the cache has no room, it passes through as other objects do.
        """
        CALLER.set(access_key)
        check_size(request.nbytes, self._object_bytes_max)
        self._there.require_takes(request)
        if (
            request.nbytes
            and is_chunk(request.key, request.attributes)
            and time.monotonic() >= self._full_at_s + FULL_S
        ):
            counted = CountedBody(body)
            try:
                with self._write_back.room(request) as has_room:
                    if has_room:
                        return await self._write_back.put(request, counted)
                return await self._home.put_chunk(request, counted)
            except ServerError as error:
                if error.code is not ErrorCode.INSUFFICIENT_STORAGE:
                    raise
                if request.nbytes <= (self._home.cache.space.extent_bytes_max or request.nbytes):
                    self._full_at_s = time.monotonic()
                if counted.has_begun:
                    raise
        return await self._put_passing(access_key, request, body)

    async def _put_passing(self, access_key: str, request: PutRequest, body: Body) -> ObjectInfo:
        """A body is sent as it comes, but for its last piece, which goes while the key is held: so the object comes
        neither before nor behind another change of the key. A slow sender holds no key.
        """
        bucket, keys = request.bucket, [request.key]
        is_settled = request.condition != NO_WRITE_CONDITION
        if is_settled and self._write_back.is_dirty(bucket, request.key):
            async with self._write_back.held(bucket, keys, settled=True):
                pass
        ended = EndedBody(RatedBody(body, self._home.settings.read_timeout_s))
        sending = asyncio.ensure_future(self._there.put_object(access_key, request, ended))
        coming = asyncio.ensure_future(ended.has_come.wait())
        try:
            if request.nbytes:  # an object without bytes is there as soon as its head is
                await asyncio.wait((sending, coming), return_when=asyncio.FIRST_COMPLETED)
            async with self._write_back.held(bucket, keys, settled=is_settled):
                ended.may_end.set()
                return await self._home.changing(bucket, keys, lambda: sending)
        finally:
            coming.cancel()
            sending.cancel()
            await finished(sending)

    async def head_object(self, access_key: str, request: ReadRequest) -> ReadHead:
        """Upstream is asked where the copy's tags may not be those of the object, unless it is gone."""
        copy = self._home.copy_of(request.bucket, request.key)
        if copy is None:
            return await self._there.head_object(access_key, request)
        here = self._home.cache.objects
        has_tags = self._there.counts_tags and not copy.has_doubtful_tags
        if has_tags or self._write_back.is_dirty(request.bucket, request.key):
            try:
                return await here.head_object(access_key, request)
            except CallerError as error:
                if error.code not in ABSENT:
                    raise
            return await self._there.head_object(access_key, request)  # it was evicted meanwhile
        try:
            return await self._there.head_object(access_key, request)
        except ServerError:
            return await here.head_object(access_key, request)

    @asynccontextmanager
    async def open_object(self, access_key: str, request: ReadRequest) -> AsyncIterator[ObjectRead]:
        bucket, key = request.bucket, request.key
        if request.only_if_cached:
            if not self._home.cached(bucket, key):
                raise CallerError(ErrorCode.NO_SUCH_KEY, "the cache has no copy of the chunk", field="key")
            async with self._home.cache.objects.open_object(access_key, request) as read:
                yield healing(read, lambda: self._home.cache.objects.note_damaged(bucket, key))
            return
        copy = self._home.copy_of(bucket, key)
        if copy is None or copy.has_doubtful_tags:
            async with self._there.open_object(access_key, request) as read:
                yield read
            return
        async with AsyncExitStack() as stack:
            try:
                read = await stack.enter_async_context(self._home.cache.objects.open_object(access_key, request))
                read = healing(read, lambda: self._home.cache.objects.note_damaged(bucket, key))
            except CallerError as error:
                if error.code not in ABSENT:
                    raise
                read = await stack.enter_async_context(
                    self._there.open_object(access_key, request)
                )  # evicted meanwhile
            yield read

    async def object_parts(self, access_key: str, bucket: str, key: str) -> list[ObjectPart]:
        async with self._write_back.held(bucket, [key], settled=True):
            return await self._there.object_parts(access_key, bucket, key)

    async def copy_object(self, access_key: str, request: CopyRequest) -> ObjectInfo:
        """The source must be upstream; a copy under its own key settles that key, too."""
        source, bucket, keys = request.source, request.bucket, [request.key]
        async with self._write_back.held(source.bucket, [source.key], settled=True):
            pass
        async with self._write_back.held(bucket, keys, settled=True):
            return await self._home.changing(bucket, keys, partial(self._there.copy_object, access_key, request))

    async def delete_object(
        self, access_key: str, bucket: str, key: str, condition: WriteCondition = NO_WRITE_CONDITION
    ) -> None:
        async with self._write_back.held(bucket, [key], settled=condition != NO_WRITE_CONDITION):
            try:
                delete = partial(self._there.delete_object, access_key, bucket, key, condition)
                await self._home.changing(bucket, [key], delete)
            except CallerError as error:
                if error.code is ErrorCode.NO_SUCH_BUCKET:  # nothing can be there: what is here alone goes, too
                    await to_end(asyncio.ensure_future(self._home.forget(bucket, [key])))
                raise

    async def delete_objects(self, access_key: str, bucket: str, keys: list[str]) -> list[NotDeleted]:
        async with self._write_back.held(bucket, keys):
            delete = partial(self._there.delete_objects, access_key, bucket, keys)
            return await self._home.changing(
                bucket, keys, delete, lambda failed: [not_deleted.key for not_deleted in failed]
            )

    async def set_tags(self, access_key: str, bucket: str, key: str, tags: dict[str, str]) -> None:
        """A crash in the middle leaves a copy whose tags are doubtful."""
        cache = self._home.cache
        async with self._write_back.held(bucket, [key], settled=True):
            has_copy = cache.objects.stored(bucket, key) is not None
            if has_copy:
                await cache.change(partial(transaction.doubt_tags, bucket=bucket, key=key), frees=True)
            await self._there.set_tags(access_key, bucket, key, tags)
            if has_copy:
                with suppress(CallerError):  # evicted meanwhile
                    await cache.objects.set_tags(access_key, bucket, key, tags)

    async def list_objects(self, access_key: str, request: ListRequest) -> ListPage:
        """Dirty chunks are read first. A chunk that gets upstream after that is in upstream's list."""
        dirty = await self._write_back.page(request.bucket, dirty_after(request), request.prefix, request.max_keys + 1)
        page = await self._there.list_objects(access_key, request)
        return merged(page, dirty, request) if dirty and request.max_keys else page


class CachedUploads:
    """Implements descriptors.storage_api.UploadsApi: uploads upstream, which may replace objects in the cache."""

    def __init__(self, there: UploadsApi, home: UpstreamHome) -> None:
        self._there = there
        self._home = home

    async def create_upload(self, access_key: str, request: UploadRequest) -> str:
        return await self._there.create_upload(access_key, request)

    async def put_part(self, access_key: str, request: PartRequest, body: Body) -> PartInfo:
        return await self._there.put_part(access_key, request, RatedBody(body, self._home.settings.read_timeout_s))

    async def abort_upload(self, access_key: str, upload: UploadRef) -> None:
        await self._there.abort_upload(access_key, upload)

    async def list_parts(self, access_key: str, upload: UploadRef, part_number_marker: int, max_parts: int) -> PartPage:
        return await self._there.list_parts(access_key, upload, part_number_marker, max_parts)

    async def list_uploads(self, access_key: str, request: UploadListRequest) -> UploadPage:
        return await self._there.list_uploads(access_key, request)

    async def copy_part(self, access_key: str, request: PartCopyRequest) -> PartInfo:
        async with self._home.write_back.held(request.source.bucket, [request.source.key], settled=True):
            pass
        return await self._there.copy_part(access_key, request)

    async def complete_upload(self, access_key: str, request: CompleteRequest) -> ObjectInfo:
        bucket, keys = request.upload.bucket, [request.upload.key]
        async with self._home.write_back.held(bucket, keys, settled=True):
            return await self._home.changing(bucket, keys, partial(self._there.complete_upload, access_key, request))
