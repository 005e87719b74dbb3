"""One chunk on its way from upstream into the cache: the requests for it, the proof of its bytes, and its row. A chunk
that finds no room there passes: each delivery reads it for itself.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import count

from descriptors.chunk_names import is_chunk_key
from descriptors.conditions import NO_WRITE_CONDITION, ReadCondition
from descriptors.errors import CallerError, ErrorCode, ObjectCacheError, ServerError
from descriptors.layout import ChunkLayout
from descriptors.objects import ObjectInfo, RangeSpec, ReadRequest
from descriptors.units import MIB
from objectcache.adapters.kept_errors import without_frames
from objectcache.adapters.threads import HERE_BYTES_MAX, to_end
from storage_server.delivery.gather.landing import MEMORY_FRACTION, Landing
from storage_server.delivery.gather.passing import PassingExtent
from storage_server.home.embedded import EmbeddedStore
from storage_server.home.fetch.passing_chunk import PassingChunk
from storage_server.home.fetch.placed_chunk import PlacedChunk
from storage_server.home.fetch.receiving import ChunkReceiver, IntoFile, IntoMemory, wrong
from storage_server.home.further_tier import FurtherTier
from storage_server.home.key_locks import KeyLocks
from storage_server.home.rules.attempts import ATTEMPTS_MAX, pause_before_next_s
from storage_server.home.rules.groups import group_ends
from storage_server.home.rules.proof import Proof, proved_bytes
from storage_server.home.rules.remote_entry import RemoteEntry
from storage_server.home.s3.copied_tags import CopiedTags
from storage_server.home.s3.turns import Turns
from storage_server.home.service import HomeHead, HomeObjects
from storage_server.kernel.data.disk import disk_error
from storage_server.kernel.data.io_threads import IoThreads
from storage_server.kernel.data.segments import ExtentWriter
from storage_server.kernel.index import transaction
from storage_server.kernel.index.transaction import Transaction
from storage_server.kernel.rules.body_hashes import BodyHashes
from storage_server.kernel.rules.rows import StoredPart
from storage_server.planning.extent import Extent, aligned

PREFETCH_BYTES_MAX = 128 * MIB
"""One chunk has no more bytes fetched ahead."""
PREFETCH_GROUP = 1 << 20
"""Behind all groups of chunks that somebody waits for."""
QUIET_S = 0.05
"""Landed chunks are written when so long nothing has come from upstream,"""
QUIET_WAIT_MAX_S = 1.0
"""or so long after they came, or when anybody waits for room in the cache,"""
QUIET_FRACTION_MAX = 0.75
"""or when this part of what one bucket may have of the landing memory is used."""
ROOM_WAIT_S = 1.0
"""A chunk passes where the cache makes no room for it in so long,"""
FULL_S = 1.0
"""and for so long after that each one passes at once that finds none."""
_log = logging.getLogger(__name__)
_ABSENT = frozenset({ErrorCode.NO_SUCH_KEY, ErrorCode.NO_SUCH_BUCKET})


class _BrokenOffError(Exception):
    """An answer whose head has come, and whose body ends after the first `received_bytes` of the chunk."""

    def __init__(self, error: ServerError, received_bytes: int) -> None:
        super().__init__(str(error))
        self.error = error
        self.received_bytes = received_bytes


class Ways:
    """Everything that all fetches share."""

    def __init__(
        self,
        objects: HomeObjects,
        cache: EmbeddedStore,
        locks: KeyLocks,
        turns: Turns,
        landing: Landing,
        io: IoThreads,
        tiers: Sequence[FurtherTier],
        tags: CopiedTags,
    ) -> None:
        self.objects = objects
        self.tags = tags
        self.tiers = tiers
        """Those that are asked before home, in this order."""
        self.cache = cache
        self.locks = locks
        self.turns = turns
        self.landing = landing
        self.io = io
        self._storing = asyncio.Semaphore(1)
        self._full_until_s = -math.inf
        self.passed_bytes = 0
        """The bytes of chunks that found no room in the cache, as often as they were read, since the start."""

    async def writer(self, nbytes: int, hashes: BodyHashes) -> ExtentWriter | None:
        """A place in a file; None where the cache has no room, and makes none soon. Raises ServerError."""
        if time.monotonic() < self._full_until_s and not self.cache.bound.has_room(aligned(nbytes)):
            return None
        try:
            return await self.cache.bodies.writer(nbytes, hashes, self.io, ROOM_WAIT_S)
        except ServerError as error:
            if error.code not in (ErrorCode.INSUFFICIENT_STORAGE, ErrorCode.SLOW_DOWN):
                raise
            self._full_until_s = time.monotonic() + FULL_S
            return None

    def passing(self, bucket: str, info: ObjectInfo, proof: Proof | None) -> PassingExtent:
        """A chunk for which there is no room."""

        def on_passed(nbytes: int) -> None:
            self.passed_bytes += nbytes

        return PassingChunk(
            objects=self.objects,
            turns=self.turns,
            io=self.io,
            bucket=bucket,
            info=info,
            proof=proof,
            on_passed=on_passed,
        ).extent

    def receiver(self, bucket: str, layout: ChunkLayout | None, on_step: Callable[[bytes, int], None]) -> ChunkReceiver:
        """Into memory, if the chunk's size is known and there is room."""
        landed = None if layout is None else self.landing.take(bucket, layout.chunk_bytes)
        if layout is None or landed is None:
            return IntoFile(self.objects, self.io, self.cache.disk, on_step)
        return IntoMemory(self.objects, self.io, landed, layout.per_layer_chunk_bytes, on_step)

    async def store(self, receiver: IntoMemory, writer: ExtentWriter) -> None:
        """Write a landed chunk into its file, one after the other, while deliveries do not need the processor. Raises
        ServerError.
        """
        until_s = time.monotonic() + QUIET_WAIT_MAX_S
        async with self._storing:
            for _ in range(round(QUIET_WAIT_MAX_S / QUIET_S)):
                if self._is_quiet() or time.monotonic() >= until_s:
                    break
                await asyncio.sleep(QUIET_S)
            store = partial(writer.store, receiver.landed.view, receiver.blocks, self.cache.disk)
            if len(receiver.landed.view) <= HERE_BYTES_MAX:
                try:
                    store()  # in less time than a hand-over to a thread takes
                except OSError as error:
                    raise disk_error(error, "writing a chunk") from error
            else:
                await self.io.run(store)

    def _is_quiet(self) -> bool:
        is_pressed = self.landing.used_bytes > QUIET_FRACTION_MAX * MEMORY_FRACTION * self.landing.nbytes
        is_waited_for = self.cache.bound.waiting_bytes > 0
        return is_pressed or is_waited_for or time.monotonic() - self.turns.busy_at_s >= QUIET_S


class Fetch:
    """One chunk on its way. `begun` gives its extent. Without a layout nobody waits for it yet: it is read as a whole,
    behind all others.
    """

    def __init__(
        self,
        ways: Ways,
        bucket: str,
        key: str,
        index: int,
        layout: ChunkLayout | None,
        prefetch_slots: asyncio.Semaphore,
        on_come: Callable[[], None],
        *,
        waves: int,
        keeps: bool,
    ) -> None:
        self._on_come = on_come
        self._ways = ways
        self._prefetch_slots = prefetch_slots
        self._bucket = bucket
        self._key = key
        self._index = index
        self.layout = layout
        self.is_wanted = layout is not None
        """Whether somebody waits for it."""
        self.has_begun = False
        """Whether it has had its first turn."""
        self._waves = waves
        self._keeps = keeps
        self.begun: asyncio.Future[Extent | None] = asyncio.get_running_loop().create_future()
        self.begun.add_done_callback(lambda begun: begun.cancelled() or begun.exception())
        self._receiver: ChunkReceiver | None = None
        self._placed: PlacedChunk | None = None
        self._so_far = b"", 0
        self.info: ObjectInfo | None = None
        """Upstream's description of it, when it has begun."""
        self.fetched_bytes = 0
        self._asked_at = time.time()
        self.task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        try:
            if self.layout is None:
                async with self._prefetch_slots:
                    await self._fetch([None])
            else:
                await self._fetch(group_ends(self.layout, self._waves))
        except asyncio.CancelledError:
            problem = "the fetch was broken off: the chunk has changed, or the server is shutting down"
            self._end_with(ServerError(ErrorCode.SLOW_DOWN, problem, retryable=True))
            raise
        except ObjectCacheError as error:
            self._end_with(error)
        except Exception:
            _log.exception("fetching a chunk from upstream")
            self._end_with(ServerError(ErrorCode.INTERNAL_ERROR, "the chunk could not be fetched", retryable=True))

    async def _fetch(self, ends: Sequence[int | None]) -> None:
        """Read the groups that end there; None is the end of the chunk. The file of a chunk in memory is written behind
        that.
        """
        if self.layout is not None and is_chunk_key(self._key):
            for tier in self._ways.tiers:
                if tier.may_have(self._bucket, self._key) and await self._fetch_from(tier, self.layout):
                    return
        start = 0
        self._asked_at = time.time()
        with ExitStack() as stack:
            placed = None
            for group_index, group_end in enumerate(ends):
                turn_index = PREFETCH_GROUP if self.layout is None else group_index
                placed = await self._fetch_group(turn_index, start, group_end, stack)
                if placed is None:
                    return
                start = group_end or placed.info.nbytes
            if placed is None:
                return
            await self._prove(placed)
            if isinstance(self._receiver, IntoMemory):
                self._admit(placed, self._receiver)
                await self._ways.store(self._receiver, placed.writer)
            await self._publish(placed)

    async def _fetch_from(self, tier: FurtherTier, layout: ChunkLayout) -> bool:
        """Bring the chunk from a tier before home; False where it is not there, or not what it should be."""
        landed = self._ways.landing.take(self._bucket, layout.chunk_bytes)
        if landed is None:
            return False
        receiver = IntoMemory(self._ways.objects, self._ways.io, landed, layout.per_layer_chunk_bytes, self._advance)
        with ExitStack() as stack:
            stack.callback(receiver.close)
            async with self._ways.turns.turn(0, self._index, self._bucket):
                self.has_begun = True
                entry = await tier.read(self._bucket, self._key, landed)
                if entry is None:
                    return False
                await self._ways.io.run(partial(receiver.blocks.update, landed.view))
            if proved_bytes(entry.proof, receiver.blocks.packed(), entry.info.nbytes) != entry.info.nbytes:
                tier.found_wrong(self._bucket, self._key)
                return False
            placed = await self._place(entry.info, entry.proof, receiver, stack)
            if placed is None:
                return True
            await self._prove(placed)
            self.fetched_bytes = 0  # not from upstream
            await self._ways.store(receiver, placed.writer)
            await self._publish(placed, has_doubtful_tags=True)
        return True

    def _admit(self, placed: PlacedChunk, receiver: IntoMemory) -> None:
        """Offer a chunk that came from home to the tiers before it, for other servers."""
        if placed.proof is not None and is_chunk_key(self._key):
            for tier in self._ways.tiers:
                tier.admit(RemoteEntry(self._bucket, placed.info, placed.proof, self._asked_at), receiver.landed)

    async def _fetch_group(
        self, turn_index: int, start: int, group_end: int | None, stack: ExitStack
    ) -> PlacedChunk | None:
        """Read one group when it is its turn; None where the object is no chunk of this layout, or finds no room. Where
        an answer breaks off or comes too slowly, the rest is asked for again.
        """
        for attempt in count(1):
            try:
                async with self._ways.turns.turn(turn_index, self._index, self._bucket):
                    self.has_begun = True
                    if self._receiver is None:
                        self._receiver = self._ways.receiver(self._bucket, self.layout, self._advance)
                        stack.callback(self._receiver.close)
                    return await self._ask(self._receiver, start, group_end, stack)
            except _BrokenOffError as broken:
                start = max(start, broken.received_bytes)
                if attempt == ATTEMPTS_MAX:
                    raise broken.error from broken
            await asyncio.sleep(pause_before_next_s(attempt))
        raise AssertionError("the loop ends by itself")

    async def _ask(
        self, receiver: ChunkReceiver, start: int, group_end: int | None, stack: ExitStack
    ) -> PlacedChunk | None:
        """One request for the rest of a group, from `start` on. Raises _BrokenOffError."""
        last = None if group_end is None else group_end - 1
        condition = ReadCondition() if self.info is None else ReadCondition(if_match=(self.info.etag,))
        request = ReadRequest(self._bucket, self._key, RangeSpec(start, last), condition=condition)
        async with receiver.open(request, start, group_end) as opened:
            head, placed = opened.head, self._placed
            if placed is None:
                if self.layout is None and head.info.nbytes > PREFETCH_BYTES_MAX:
                    raise ServerError(ErrorCode.SLOW_DOWN, "too large to be read ahead", retryable=True)
                if self.layout is not None and head.info.nbytes != self.layout.chunk_bytes:
                    self.begun.set_result(_of_another_size(head.info.nbytes))
                    return None
                has_digest = not isinstance(head, HomeHead) or head.has_digest
                placed = await self._place(head.info, opened.proof, receiver, stack, has_digest=has_digest)
                if placed is None:
                    return None
            elif head.info.etag != placed.info.etag:
                raise wrong("the object has changed meanwhile")
            end = head.info.nbytes if group_end is None else group_end
            if (head.range.start, head.range.length) != (start, end - start):
                raise wrong("another range came than was asked for")
            try:
                await opened.receive(placed.writer)
            except ServerError as error:
                if error.code is not ErrorCode.SLOW_DOWN or receiver.received_bytes >= end:
                    raise
                raise _BrokenOffError(error, receiver.received_bytes) from error
        return placed

    async def _place(
        self,
        info: ObjectInfo,
        proof: Proof | None,
        receiver: ChunkReceiver,
        stack: ExitStack,
        *,
        has_digest: bool = True,
    ) -> PlacedChunk | None:
        """Give the chunk its place in a file until the stack ends, and tell those that wait for it. None where there is
        no room.
        """
        hashes = BodyHashes(None, sha256=False, md5=proof is None and receiver.landed is None)
        writer = await self._ways.writer(info.nbytes, hashes) if self._keeps else None
        self.info = info
        if writer is None:
            self.begun.set_result(self._ways.passing(self._bucket, info, proof))
            return None
        placed = self._placed = PlacedChunk(info, proof, receiver, writer, has_digest=has_digest)
        stack.callback(placed.close)
        stack.enter_context(self._ways.cache.bound.arriving())
        self.begun.set_result(placed.extent)
        placed.advance(*self._so_far)
        return placed

    def _advance(self, words: bytes, arrived_bytes: int) -> None:
        """Note the bytes so far, and tell them once the chunk has its place."""
        self._so_far = words, arrived_bytes
        if self._placed is not None:
            self._placed.advance(words, arrived_bytes)

    async def _prove(self, placed: PlacedChunk) -> None:
        await placed.prove()
        self.fetched_bytes = placed.info.nbytes
        self._on_come()

    async def _publish(self, placed: PlacedChunk, *, has_doubtful_tags: bool = False) -> None:
        """The chunk is in the cache from now on."""
        info, writer = placed.info, placed.writer
        part = StoredPart(info.etag, info.nbytes, info.checksum, writer.extent())

        def publish(tx: Transaction) -> None:
            transaction.ensure_bucket(tx, self._bucket, time.time())
            if not transaction.is_dirty(tx.db, self._bucket, self._key):  # put here meanwhile, and newer
                transaction.publish(tx, self._bucket, info, part, NO_WRITE_CONDITION)
                if has_doubtful_tags:
                    transaction.doubt_tags(tx, self._bucket, self._key)

        committer, locks = self._ways.cache.committer, self._ways.locks
        async with locks.held(self._bucket, [self._key]):  # while others change the key, they end this fetch
            await to_end(asyncio.ensure_future(committer.commit(publish, writer.pending())))
        self._ways.tags.note(self._bucket, self._key, info.etag)

    def _end_with(self, error: ObjectCacheError) -> None:
        """Keep the error for those that wait, without its frames: they have pieces of the answer, and this fetch."""
        without_frames(error)
        if self._placed is not None:
            self._placed.fail(error)
        elif not self.begun.done():
            if isinstance(error, CallerError) and error.code in _ABSENT:
                self.begun.set_result(None)
            elif isinstance(error, CallerError) and error.code is ErrorCode.INVALID_RANGE:
                self.begun.set_result(_of_another_size(0))  # only an empty object has no first byte
            else:
                self.begun.set_exception(error)


def _of_another_size(nbytes: int) -> Extent:
    """Stands for an object that is no chunk of the layout: it lies nowhere, and a delivery is refused for its size."""
    return Extent("", 0, nbytes, b"")
