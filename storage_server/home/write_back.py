"""Dirty chunks: durable here, and not upstream yet. They are uploaded behind the answer, in turns of buckets."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial

from descriptors.conditions import NO_WRITE_CONDITION
from descriptors.errors import CallerError, ErrorCode, ObjectCacheError, ServerError
from descriptors.objects import ObjectInfo, PutRequest
from descriptors.storage_api import Body, Piece
from descriptors.units import MIB
from objectcache.adapters.breaker import back_off_s
from objectcache.adapters.kept_errors import without_frames
from objectcache.adapters.threads import to_end
from storage_server.home.embedded import EmbeddedStore
from storage_server.home.key_locks import KeyLocks, Name
from storage_server.home.rules.headers import METADATA_BYTES_MAX, attribute_headers, metadata_bytes
from storage_server.home.rules.proof import Proof, make_proof
from storage_server.home.rules.refusals import unreachable
from storage_server.home.rules.upload_turns import UploadTurns
from storage_server.home.s3.sent_body import CheckedBody
from storage_server.home.service import HomeObjects, Sent
from storage_server.kernel.index import queries, transaction
from storage_server.kernel.index.transaction import Transaction
from storage_server.kernel.rules.rows import StoredPart
from storage_server.planning.extent import aligned

DIRTY_FRACTION = 0.25
"""Dirty chunks take no more than this fraction of the cache. Pins and leases may hold half; the rest stays free for
what is read.
"""
BACK_OFF_MIN_S = 0.5
BACK_OFF_MAX_S = 30.0
REFUSED_AGAIN_S = 60.0
BUCKET_ANSWER_S = 5.0
SENDING_S = 60.0
SENT_BYTES_PER_S_MIN = MIB
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WriteBackStatus:
    """The chunks that are stored here, and not in the service upstream yet: how many, their bytes, the age of the
    oldest in seconds, and how many of them the service has refused.
    """

    dirty_chunks: int = 0
    dirty_bytes: int = 0
    oldest_s: float = 0.0
    refused_chunks: int = 0


@dataclass(eq=False, slots=True)
class Dirty:
    """A dirty chunk. An upload holds the `lock`, which all versions of the key share: where a key is changed by other
    means, the upload under way ends before. `problem` says why upstream refused it.
    """

    version: int
    nbytes: int
    since: float
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    problem: ObjectCacheError | None = None
    failure_count: int = 0


class KnownBuckets:
    """The buckets that are upstream, as far as it was asked."""

    def __init__(self, objects: HomeObjects, cache: EmbeddedStore) -> None:
        self._objects = objects
        self._cache = cache
        self._known: set[str] = set()

    async def require(self, bucket: str) -> None:
        """Ask upstream once. A bucket of which the cache has had objects is there also while upstream does not answer.
        Raises CallerError(NoSuchBucket), ServerError.
        """
        if bucket in self._known:
            return
        try:
            async with asyncio.timeout(BUCKET_ANSWER_S):
                await self._objects.require_bucket(bucket)
        except (ServerError, TimeoutError) as error:
            try:
                await self._cache.reader.threaded(lambda db: transaction.require_bucket(db, bucket))
            except CallerError:
                raise error if isinstance(error, ServerError) else unreachable("no answer about the bucket") from None
        self._known.add(bucket)

    def forget(self, bucket: str) -> None:
        """Upstream has it no more, perhaps."""
        self._known.discard(bucket)


class WriteBack:
    """The dirty chunks of one cache. With `accepts` more may come; without it only those of an earlier run are sent."""

    def __init__(
        self,
        objects: HomeObjects,
        cache: EmbeddedStore,
        locks: KeyLocks,
        stop_fetches: Callable[[str, Sequence[str]], Awaitable[None]],
        uploads_max: int,
        *,
        accepts: bool,
    ) -> None:
        self._locks = locks
        self._stop_fetches = stop_fetches
        self._objects = objects
        self._cache = cache
        self._uploads_max = uploads_max
        self._accepts = accepts
        self._dirty: dict[Name, Dirty] = {}
        """In the order in which they came: the first is the oldest."""
        self._refused_count = 0
        self._turns = UploadTurns(max(1, uploads_max - 1), BACK_OFF_MIN_S, BACK_OFF_MAX_S)
        self._queued: set[Name] = set()
        """Names that have a turn or a timer, or are being uploaded: each once, however often it is put."""
        self._timers: dict[Name, asyncio.TimerHandle] = {}
        self._wake = asyncio.Event()
        self._is_paused = False
        self._coming_bytes = 0
        self.buckets = KnownBuckets(objects, cache)
        """Those that are upstream."""
        self._workers: list[asyncio.Task[None]] = []
        self.dirty_bytes = 0
        """The bytes of all dirty chunks."""

    @property
    def status(self) -> WriteBackStatus:
        """Read now, on the event loop: there may be a million dirty chunks, and nothing walks them."""
        oldest = next(iter(self._dirty.values()), None)
        age_s = 0.0 if oldest is None else max(0.0, time.time() - oldest.since)
        return WriteBackStatus(len(self._dirty), self.dirty_bytes, age_s, self._refused_count)

    async def start(self) -> None:
        """Find what an earlier run has left, and begin to upload."""
        for bucket, stored in await self._cache.reader.threaded(queries.dirty):
            self._note(bucket, stored.info, stored.version)
        if self._accepts or self._dirty:
            self._workers = [asyncio.create_task(self._work()) for _ in range(self._uploads_max)]

    def pause(self) -> None:
        """Begin no upload by itself any more. Chunks that a change needs upstream are still sent there."""
        self._is_paused = True

    def resume(self) -> None:
        """Undo `pause`."""
        self._is_paused = False
        self._wake.set()

    async def close(self) -> None:
        """Stop uploads. Dirty chunks stay so, and are uploaded after the next start."""
        for timer in self._timers.values():
            timer.cancel()
        for worker in self._workers:
            worker.cancel()
        if self._workers:
            await asyncio.wait(self._workers)

    def is_dirty(self, bucket: str, key: str) -> bool:
        """Whether upstream does not have what the key shows."""
        return (bucket, key) in self._dirty

    @contextmanager
    def room(self, request: PutRequest) -> Iterator[bool]:
        """Whether a chunk may be kept here alone; room is kept for it until the block ends. One with more metadata than
        services take is not: upstream would refuse it behind the answer, for ever.
        """
        limit_bytes = self._cache.space.extent_bytes_max
        nbytes = aligned(request.nbytes)
        wanted_bytes = self.dirty_bytes + self._coming_bytes + nbytes
        fits = limit_bytes is None or wanted_bytes <= DIRTY_FRACTION * limit_bytes
        is_taken = metadata_bytes(attribute_headers(request.attributes)) <= METADATA_BYTES_MAX
        if not (self._accepts and fits and is_taken and request.condition == NO_WRITE_CONDITION):
            yield False
            return
        self._coming_bytes += nbytes
        try:
            yield True
        finally:
            self._coming_bytes -= nbytes

    async def put(self, request: PutRequest, body: Body) -> ObjectInfo:
        """Store a chunk here. On return it is durable, and shown; upstream gets it later. Raises what `put_object`
        raises, NoSuchBucket included.
        """
        bucket = request.bucket
        await self.buckets.require(bucket)
        async with self._cache.bodies.received(request.nbytes, request.checksum, body) as (part, pending):
            info = ObjectInfo(
                key=request.key,
                nbytes=request.nbytes,
                etag=part.etag,
                modified_at=float(int(time.time())),
                attributes=request.attributes,
                checksum=part.checksum,
            )

            def publish(tx: Transaction) -> int:
                transaction.ensure_bucket(tx, bucket, time.time())
                return transaction.publish(tx, bucket, info, part, NO_WRITE_CONDITION, is_dirty=True)

            async def store() -> None:
                async with self._locks.held(bucket, [request.key]):
                    self._note(bucket, info, await self._cache.committer.commit(publish, pending))

            await to_end(
                asyncio.ensure_future(store())
            )  # a caller that goes must not leave a chunk that nobody uploads
        return info

    @asynccontextmanager
    async def held(self, bucket: str, keys: Sequence[str], *, settled: bool = False) -> AsyncIterator[None]:
        """Change these keys upstream in the block: nobody else changes them, and no dirty chunk of theirs goes there,
        which could come behind the change. With `settled` they are there before the block begins; raises what upstream
        says to them.
        """
        async with self._locks.held(bucket, keys), AsyncExitStack() as stack:
            for key in sorted(set(keys)):
                dirty = self._dirty.get((bucket, key))
                if dirty is None:
                    continue
                await stack.enter_async_context(dirty.lock)
                current = self._dirty.get((bucket, key))
                if settled and current is not None:
                    await self._send(bucket, key, current)
            yield

    def forget(self, bucket: str, keys: Sequence[str]) -> None:
        """The copies of these keys were removed. Chunks that were put since stay."""
        for key in keys:
            dirty = self._dirty.get((bucket, key))
            if dirty is not None:
                stored = self._cache.objects.stored(bucket, key)
                if stored is None or stored.version != dirty.version:
                    self._drop((bucket, key))

    async def page(self, bucket: str, after: str, prefix: str, limit: int) -> list[ObjectInfo]:
        """Up to `limit` dirty chunks behind `after`, by key."""
        if not self._dirty:
            return []
        page = partial(queries.dirty_page, name=bucket, after=after, wanted=prefix, limit=limit)
        return await self._cache.reader.threaded(page)

    def _note(self, bucket: str, info: ObjectInfo, version: int) -> None:
        name = bucket, info.key
        before = self._drop(name)
        dirty = Dirty(version, aligned(info.nbytes), info.modified_at)
        if before is not None:
            dirty.lock = before.lock
        self._dirty[name] = dirty
        self.dirty_bytes += dirty.nbytes
        timer = self._timers.get(name)
        if timer is not None:  # what failed was another version
            timer.cancel()
        if timer is not None or name not in self._queued:
            self._queued.add(name)
            self._again(name)

    def _drop(self, name: Name) -> Dirty | None:
        dirty = self._dirty.pop(name, None)
        if dirty is not None:
            self.dirty_bytes -= dirty.nbytes
            self._refused_count -= dirty.problem is not None
        return dirty

    async def _work(self) -> None:
        while True:
            while self._is_paused or (name := self._turns.take(time.monotonic())) is None:
                self._wake.clear()
                await self._wake.wait()
            is_answered = True
            try:
                is_answered = await self._uploaded(name)
            finally:
                pause_s = self._turns.ended(name[0], time.monotonic(), is_answered=is_answered)
                self._wake.set()  # another one of the bucket may go, also where this worker waits
                if pause_s is not None:
                    asyncio.get_running_loop().call_later(pause_s, self._wake.set)

    async def _uploaded(self, name: Name) -> bool:
        """Upload what the name shows, or have that tried again. Returns whether the service has answered."""
        dirty = self._dirty.get(name)
        if dirty is None:
            self._queued.discard(name)
            await asyncio.sleep(0)  # many may have been deleted
            return True
        try:
            async with dirty.lock:
                current = self._dirty.get(name)
                if current is not None and current.lock is dirty.lock:
                    await self._send(*name, current)
        except ObjectCacheError as error:
            return self._failed(name, error)
        except Exception as error:
            _log.exception("uploading %s/%s", *name)
            return self._failed(name, ServerError(ErrorCode.INTERNAL_ERROR, str(error)))
        if name in self._dirty:  # put again meanwhile
            self._again(name)
        else:
            self._queued.discard(name)
        return True

    def _failed(self, name: Name, error: ObjectCacheError) -> bool:
        """Try again: soon where upstream is busy or gone, after a while where it refuses. False in the former case, in
        which the others of the bucket wait, too.
        """
        is_passing = isinstance(error, ServerError) and error.retryable
        dirty = self._dirty.get(name)
        delay_s = 0.0
        if dirty is not None and is_passing:
            dirty.failure_count += 1
            delay_s = back_off_s(dirty.failure_count, BACK_OFF_MIN_S, BACK_OFF_MAX_S)
        elif dirty is not None:
            if dirty.problem is None:
                self._refused_count += 1
                _log.warning("%s/%s stays here alone: %s", *name, error)
            dirty.problem = without_frames(error)
            delay_s = REFUSED_AGAIN_S
        self._timers[name] = asyncio.get_running_loop().call_later(delay_s, self._again, name)
        return not (is_passing and error.code is ErrorCode.SLOW_DOWN)

    def _again(self, name: Name) -> None:
        self._timers.pop(name, None)
        self._turns.add(name)
        self._wake.set()

    async def _send(self, bucket: str, key: str, dirty: Dirty) -> None:
        """Upload a chunk, unless its key shows another version by now."""
        name = bucket, key
        async with self._cache.objects.open_stored(bucket, key) as (stored, extents):
            if stored is None or stored.version != dirty.version:
                if self._dirty.get(name) is dirty:
                    self._drop(name)
                return
            info = stored.info
            part = StoredPart(info.etag, info.nbytes, info.checksum, extents[0])
            body = StoredBody(self._cache.received_pieces(part, None), part)
            proof = make_proof(info.nbytes, extents[0].checksums)
            algorithm = None if info.checksum is None else info.checksum.algorithm
            request = PutRequest(bucket, key, info.nbytes, info.attributes, algorithm)
            try:
                sent = await send_stored(self._objects, request, body, proof)
            except ServerError:
                if body.is_damaged:
                    self._cache.chunks.note_damage(bucket, key, extents)
                raise
            except CallerError as error:
                if error.code is ErrorCode.NO_SUCH_BUCKET:
                    self.buckets.forget(bucket)
                raise
        # a fetch of what upstream had before must not publish it once this chunk is clean
        await self._stop_fetches(bucket, [key])
        etag, modified_at = sent.etag or info.etag, sent.modified_at or info.modified_at
        version = dirty.version
        await self._cache.change(
            lambda tx: transaction.mark_clean(tx, bucket, key=key, version=version, etag=etag, modified_at=modified_at),
            frees=True,
        )
        if self._dirty.get(name) is dirty:
            self._drop(name)


async def send_stored(objects: HomeObjects, request: PutRequest, body: StoredBody, proof: Proof) -> Sent:
    """Put a body that is here. Raises what `put_object` raises, and ServerError(SlowDown) where upstream takes fewer
    than SENT_BYTES_PER_S_MIN.
    """
    try:
        async with asyncio.timeout(SENDING_S + request.nbytes / SENT_BYTES_PER_S_MIN):
            return await objects.send(request, body, proof)
    except TimeoutError as error:
        raise ServerError(ErrorCode.SLOW_DOWN, "the upstream store takes a body too slowly", retryable=True) from error


class StoredBody(CheckedBody):
    """A body that was received into the cache, on its way upstream."""

    def __init__(self, pieces: AsyncIterator[Piece], part: StoredPart) -> None:
        super().__init__(part.etag, part.checksum)
        self._pieces = pieces
        self.is_damaged = False

    async def __aiter__(self) -> AsyncIterator[Piece]:
        try:
            async for piece in self._pieces:
                yield piece
        except ServerError as error:
            self.is_damaged = not error.retryable
            raise
