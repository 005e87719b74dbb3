"""Moving objects between the store and a client's memory. A move ends only when nothing of it is in flight and
everything it held is given back.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from descriptors.descriptor import Descriptor
from descriptors.errors import ErrorCode, ObjectCacheError
from descriptors.notices import Mode
from descriptors.objects import BodyDigests, ObjectInfo, PutRequest, ReadHead, ReadRequest
from descriptors.rdma_token import bad_token, declined
from descriptors.storage_api import ChunkPut, ChunksPut, ObjectDelivery, ObjectStored
from objectcache.adapters.threads import finished, to_end
from storage_server.agents.requests import ActiveRequest
from storage_server.delivery.gather.staging import SlotWindow, StagingPool
from storage_server.delivery.scheduler.admission import DeliveryAdmission
from storage_server.delivery.transport.one_sided import OneSided
from storage_server.home.embedded import EmbeddedStore
from storage_server.kernel.data.bodies import AT_ONCE_BYTES_MAX, corrupt_is_internal
from storage_server.kernel.data.file_threads import FileThreads
from storage_server.moves.buffer_path import BufferStaging, StagedBody, read_into_slots, stage_body, write_slots
from storage_server.moves.region_body import RegionBody
from storage_server.planning.extent import Extent, in_one_file, read_object
from storage_server.planning.put_plan import chunk_spans, one_run
from storage_server.settings import StorageSettings

CHUNK_PUTS_MAX = 8
"""How many chunks of one request are stored at once: together they share the committer's syncs."""
SLOTS_AHEAD_MAX = 4
OpenOneSided = Callable[[], OneSided]
_log = logging.getLogger(__name__)


class ObjectMoves:
    """Moves over one store and one staging pool; `whole` stages whole objects. `target_bytes` of a method are the bytes
    of the client's memory for the object.
    """

    def __init__(
        self, settings: StorageSettings, store: EmbeddedStore, staging: StagingPool, whole: StagingPool | None
    ) -> None:
        self._window_slots = max(1, settings.window_bytes // staging.slot_bytes)
        self._store = store
        self._staging = staging
        self._buffer = BufferStaging(whole)
        self._admission = DeliveryAdmission(settings.deliveries_max)
        self._threads = FileThreads(settings.gather_threads, settings.gather_threads)

    @property
    def active_count(self) -> int:
        """How many requests are under way."""
        return self._admission.active_count

    def close(self) -> None:
        """Wait for running reads."""
        self._threads.close()

    def require_buffer(self, nbytes: int) -> None:
        """Raises CallerError(NotImplemented) for an object that is too large to be staged whole."""
        if nbytes > self._buffer.nbytes:
            raise declined(f"{nbytes} bytes do not fit the {self._buffer.nbytes} of the gateway's buffer")

    async def get_direct(
        self, access_key: str, open_one_sided: OpenOneSided, request: ReadRequest, target_bytes: int
    ) -> ObjectDelivery:
        """S3RDMA Direct: send the object piece after piece through the staging pool."""
        async with (
            self._admission.admit(access_key),
            self._store.objects.open_extents(request) as (head, extents),
            open_one_sided() as one_sided,
        ):
            _require_target(head, target_bytes)
            window, slot_bytes = self._ahead(access_key), self._staging.slot_bytes
            for start in range(0, head.range.length, slot_bytes):
                nbytes = min(slot_bytes, head.range.length - start)
                slot = await window.take()
                try:
                    await self._read(extents, head.range.start + start, slot.view[:nbytes])
                    one_sided.write(slot, nbytes, start, slot.release)
                except BaseException:
                    slot.release()
                    raise
            return ObjectDelivery(head, await one_sided.finish(), one_sided.busy_s)

    async def get_staged(
        self, access_key: str, open_one_sided: OpenOneSided, request: ReadRequest, target_bytes: int
    ) -> ObjectDelivery:
        """S3RDMA Buffer: read the whole object into the gateway's memory, then write it to the client's."""
        async with self._admission.admit(access_key), self._store.objects.open_object(access_key, request) as read:
            nbytes = read.head.range.length
            _require_target(read.head, target_bytes)
            self.require_buffer(nbytes)
            async with self._buffer.lent(access_key, nbytes) as slots, open_one_sided() as one_sided:
                await stage_body(read.body, slots)
                write_slots(one_sided, slots, nbytes)
                return ObjectDelivery(read.head, await one_sided.finish(), one_sided.busy_s)

    async def put_direct(
        self, access_key: str, open_one_sided: OpenOneSided, request: PutRequest, said: BodyDigests
    ) -> ObjectStored:
        """S3RDMA Direct: read the client's memory piece by piece, as the store takes the pieces."""
        async with (
            self._admission.admit(access_key),
            open_one_sided() as one_sided,
            RegionBody(
                one_sided=one_sided,
                window=self._ahead(access_key),
                slot_bytes=self._staging.slot_bytes,
                nbytes=request.nbytes,
                spans_of=one_run,
                said=said,
            ) as body,
        ):
            return ObjectStored(await self._store.objects.put_object(access_key, request, body), one_sided.busy_s)

    async def put_staged(
        self, access_key: str, open_one_sided: OpenOneSided, request: PutRequest, said: BodyDigests
    ) -> ObjectStored:
        """S3RDMA Buffer: read all of the client's bytes into the gateway's memory, then store them."""
        async with self._admission.admit(access_key), self._buffer.lent(access_key, request.nbytes) as slots:
            async with open_one_sided() as one_sided:
                await read_into_slots(one_sided, slots, request.nbytes)
            info = await self._store.objects.put_object(access_key, request, StagedBody(slots, request.nbytes, said))
            return ObjectStored(info, one_sided.busy_s)

    async def put_chunks(
        self,
        access_key: str,
        open_one_sided: OpenOneSided,
        bucket: str,
        descriptor: Descriptor,
        mode: Mode,
        active: ActiveRequest,
    ) -> ChunksPut:
        """S3RDMA Batch and Agg: store many chunks, several at once. When the server stops the request `active`, the
        chunks that are not stored yet fail with the error it was stopped with, and the answer still tells each apart.
        """
        puts: dict[int, ChunkPut] = {}
        window = self._staging.window(access_key, self._window_slots)
        waiting = iter(range(descriptor.chunk_count))

        async def put_some(one_sided: OneSided, indices: Iterator[int]) -> None:
            for index in indices:
                if active.stopped_by is None:
                    puts[index] = await self._put_chunk(
                        access_key,
                        one_sided,
                        window=window,
                        bucket=bucket,
                        descriptor=descriptor,
                        mode=mode,
                        active=active,
                        index=index,
                    )

        async with self._admission.admit(access_key), open_one_sided() as one_sided:
            try:
                async with asyncio.TaskGroup() as tasks:
                    for _ in range(min(descriptor.chunk_count, CHUNK_PUTS_MAX)):
                        tasks.create_task(put_some(one_sided, waiting))
            except asyncio.CancelledError:
                if active.stopped_by is None:
                    raise
            except BaseExceptionGroup as group:
                raise group.exceptions[0] from None
        if active.stopped_by is not None:
            for index, key in enumerate(descriptor.chunk_keys):
                puts.setdefault(index, ChunkPut(key, None, active.stopped_by.code, active.stopped_by.message))
        made = [puts[index] for index in range(descriptor.chunk_count)]
        return ChunksPut(made, descriptor.layout.chunk_bytes, one_sided.busy_s)

    async def _put_chunk(
        self,
        access_key: str,
        one_sided: OneSided,
        window: SlotWindow,
        bucket: str,
        descriptor: Descriptor,
        mode: Mode,
        active: ActiveRequest,
        index: int,
    ) -> ChunkPut:
        """Store one chunk. A failure becomes part of the answer, so that the other chunks go on. When the request is
        stopped, the chunk's body ends with that error; a chunk whose body was whole by then is stored, and said to be.
        """
        key, layout = descriptor.chunk_keys[index], descriptor.layout
        spans_of = chunk_spans(mode, layout, descriptor.chunk_count, index)
        info: ObjectInfo | None = None
        try:
            one_sided.require_reachable()
            async with RegionBody(one_sided, window, self._staging.slot_bytes, layout.chunk_bytes, spans_of) as body:
                request = PutRequest(bucket, key, layout.chunk_bytes)
                putting = asyncio.ensure_future(self._store.objects.put_object(access_key, request, body))
                try:
                    info = await asyncio.shield(putting)
                except asyncio.CancelledError:
                    if active.stopped_by is None:
                        putting.cancel()
                        await finished(putting)
                        raise
                    body.fail(active.stopped_by)
                    info = await to_end(putting)
        except asyncio.CancelledError:
            if info is None or active.stopped_by is None:  # else the stop came while the stored body was given back
                raise
        except ObjectCacheError as error:
            return ChunkPut(key, None, error.code, error.message)
        except Exception:
            _log.exception("putting chunk %d", index)
            return ChunkPut(key, None, ErrorCode.INTERNAL_ERROR, "the chunk could not be stored")
        return ChunkPut(key, info.etag)

    def _ahead(self, access_key: str) -> SlotWindow:
        return self._staging.window(access_key, min(SLOTS_AHEAD_MAX, self._window_slots))

    async def _read(self, extents: Sequence[Extent], start: int, view: memoryview) -> None:
        """Fill `view`, every byte proved by its checksum. A small read from memory runs on the event loop itself."""
        files = self._store.files
        with corrupt_is_internal():
            if len(view) <= AT_ONCE_BYTES_MAX:
                try:
                    read_object(files.open.read_cached_into, extents, start, view)
                    return
                except BlockingIOError:
                    pass
            while view:
                file_id, nbytes = in_one_file(extents, start, len(view))
                read = partial(read_object, files.open.read_into, extents, start, view[:nbytes])
                await self._threads.run_on((file_id,), read)
                start, view = start + nbytes, view[nbytes:]


def _require_target(head: ReadHead, target_bytes: int) -> None:
    if head.range.length > target_bytes:
        raise bad_token(f"length is {target_bytes}, {head.range.length} bytes are to be written")
