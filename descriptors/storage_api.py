"""StorageApi: the calls that a gateway makes to the storage side, with a Protocol for each role.

`storage_server.service.storage.EmbeddedStorage` answers in the same process. `gateway.storage_client.RemoteStorage`
carries the same calls over HTTP to a storage server in another process; `descriptors.peer_calls` derives the wire form
from the signatures here. tests/contract/store runs the same rules for objects and uploads against every implementation.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from descriptors.conditions import NO_WRITE_CONDITION, WriteCondition
from descriptors.descriptor import Descriptor, RdmaTarget
from descriptors.errors import ErrorCode, ServerError
from descriptors.layer_forms import LayerForms
from descriptors.lifecycle import LifecycleRule
from descriptors.messages import (
    AgentLease,
    AgentRegistration,
    AgentRenewal,
    LookupAnswer,
    LookupRequest,
    SchedulerStatus,
    Transports,
)
from descriptors.notices import Mode
from descriptors.objects import (
    BUCKETS_LISTED_MAX,
    BodyDigests,
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
from descriptors.rdma_token import RdmaToken
from descriptors.status import StorageStatus

Piece = bytes | bytearray | memoryview
"""A run of body bytes."""


SERVER_KEY = ""
"""The access key of calls that a server makes by itself, for no caller."""


class Body(Protocol):
    """A request's body. Iterate once over its bytes; after the end, and only then, `digests` gives the digests that
    they should have.

    Digests may come in trailers; `has_sha256` says before the first byte whether a SHA-256 will be among them.
    Iterating raises CallerError(IncompleteBody) when the body ends early.
    """

    @property
    def has_sha256(self) -> bool: ...

    @property
    def is_held_back(self) -> bool:
        """Whether the sender waits for leave to send. Iterating gives it."""

    def __aiter__(self) -> AsyncIterator[Piece]: ...

    def digests(self) -> BodyDigests: ...


SendSome = Callable[[memoryview], int]
"""Hands bytes to a connection, in any thread; returns how many it took. Raises BlockingIOError when it
takes none now.
"""


class Pump(Protocol):
    """Reads and sends an open object's bytes in one thread of the storage side, without a turn of the event loop."""

    async def prime(self) -> None:
        """Read the first bytes. Call it before the answer's head is sent, so that a failure can still be an error."""

    async def send(self, send_some: SendSome, fd: int) -> bool:
        """Send until everything is sent (True), or the connection, whose descriptor is `fd`, takes no more for a while
        (False). Raises ServerError(InternalError) at bytes that fail their checksum, ConnectionError.
        """


@dataclass(frozen=True, slots=True)
class ObjectRead:
    """An open object. `body` yields the bytes of `head.range`, from the version that was opened, whatever happens to
    the key meanwhile. Every piece has passed its checksum. Iterating raises ServerError(InternalError) at bytes that
    fail, so take the first piece before answering. A piece's memory is used again when the next piece is asked for.

    `pump`, where there is one, sends the same bytes. Use either `body` or `pump`.
    """

    head: ReadHead
    body: AsyncIterator[Piece]
    pump: Pump | None = None

    def require_whole(self, read_bytes: int) -> None:
        """Call this at the end of `body` with the bytes that it gave. Raises ServerError(InternalError) where they are
        fewer than the head promised, so that a truncated answer does not look complete.
        """
        if read_bytes != self.head.range.length:
            problem = f"the object's body had {read_bytes} bytes, not {self.head.range.length}"
            raise ServerError(ErrorCode.INTERNAL_ERROR, problem, retryable=True)


@dataclass(frozen=True, slots=True)
class Grant:
    """A delivery's share of the link: its rate in bytes/s (0: not limited), held or expected on the whole, and the
    epoch that gave the rate.
    """

    rate_bytes_per_s: int = 0
    epoch: int = 0


@dataclass(frozen=True, slots=True)
class DeliveryStart:
    """The facts of a delivery before its first byte: the mode, k, its size, the request's id and its rate. Portion
    `portion` of `portions` brings `delivery_bytes` of the k chunks. `forms` is there where the descriptor accepts
    encoded layers.
    """

    request_id: str
    mode: Mode
    chunk_count: int
    delivery_bytes: int
    grant: Grant = Grant()
    portion: int = 0
    portions: int = 1
    forms: LayerForms | None = None


@dataclass(frozen=True, slots=True)
class DeliveryTiming:
    """The time of a delivery on the storage side, in four parts that add up: planning, waiting for bytes to be
    gathered, waiting for the transport, and waiting for the link while others had it. Gathers run ahead of the
    transport, so the second part is only the time that they could not hide.
    """

    plan_s: float
    gather_s: float
    transfer_s: float
    wait_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Moved:
    """Bytes that a call moved outside its answer, and the seconds that they were in flight."""

    nbytes: int
    transfer_s: float


@dataclass(frozen=True, slots=True)
class DeliveryOutcome:
    """The successful end of a descriptor GET. `transferred_bytes` is the count of the transport itself. `given_up`
    names storage servers of a cluster that may still write the bytes that others have brought in their place.
    """

    start: DeliveryStart
    transferred_bytes: int
    timing: DeliveryTiming
    given_up: tuple[str, ...] = ()

    @property
    def moved(self) -> Moved:
        """Bytes and time, for traces."""
        return Moved(self.transferred_bytes, self.timing.transfer_s)


Spans = npt.NDArray[np.int64]
"""Memory of this process, one run after the other: rows of (address, nbytes)."""


@dataclass(frozen=True, slots=True)
class ObjectDelivery:
    """One object, or a part of it, in the client's memory. `transferred_bytes` is the count of the transport itself,
    `transfer_s` the time for which bytes were in flight.
    """

    head: ReadHead
    transferred_bytes: int
    transfer_s: float

    @property
    def moved(self) -> Moved:
        """Bytes and time, for traces."""
        return Moved(self.transferred_bytes, self.transfer_s)


@dataclass(frozen=True, slots=True)
class ObjectStored:
    """An object stored out of the client's memory; `transfer_s` as above."""

    info: ObjectInfo
    transfer_s: float

    @property
    def moved(self) -> Moved:
        """Bytes and time, for traces."""
        return Moved(self.info.nbytes, self.transfer_s)


@dataclass(frozen=True, slots=True)
class ChunkPut:
    """The result for one chunk of many: stored and durable, with its bare `etag`; or not stored, with the reason."""

    key: str
    etag: str | None
    code: ErrorCode | None = None
    message: str = ""


@dataclass(frozen=True, slots=True)
class ChunksPut:
    """The result for every chunk, in order, each of `chunk_bytes`; `transfer_s` as in ObjectStored."""

    puts: list[ChunkPut]
    chunk_bytes: int
    transfer_s: float

    @property
    def moved(self) -> Moved:
        """Bytes and time of the chunks that are stored, for traces."""
        return Moved(self.chunk_bytes * sum(put.etag is not None for put in self.puts), self.transfer_s)


@dataclass(frozen=True, slots=True)
class Patience:
    """The least speed of a client that takes an answer: at least `least_bytes_per_s` over any `window_s` in which the
    server waits for it, and at least one byte.
    """

    window_s: float
    least_bytes_per_s: float = 0.0


class BodySink(Protocol):
    """The body that an http delivery is written to. `write` and `send` return when the memory may be used again."""

    async def begin(self, start: DeliveryStart) -> None:
        """Begin the body. Called once, before the first byte."""

    async def write(self, view: memoryview) -> None:
        """Send the view."""

    async def send(self, spans: Spans, patience: Patience) -> None:
        """Send memory. Raises TimeoutError or ConnectionError when the client is slower than `patience` allows."""

    def abort(self) -> None:
        """Cut the body short. No byte of any view is read after this returns."""


class ObjectsApi(Protocol):
    """Buckets and whole objects. `access_key` is the caller's, in every call of every role."""

    async def create_bucket(self, access_key: str, bucket: str, cache: BucketCache | None = None) -> None:
        """Create a bucket, which is a cache where `cache` is given and the directory is not one as a whole. Raises
        CallerError: BucketAlreadyOwnedByYou, BucketAlreadyExists.
        """

    async def head_bucket(self, access_key: str, bucket: str) -> BucketInfo: ...

    async def list_buckets(self, access_key: str, after: str = "", most: int = BUCKETS_LISTED_MAX) -> list[BucketInfo]:
        """Up to `most` of all buckets, in the order of their names, behind the name `after`; the gateway shows a caller
        those that its policy allows.
        """

    async def delete_bucket(self, access_key: str, bucket: str) -> None:
        """Delete a bucket and its unfinished uploads. Raises CallerError(BucketNotEmpty) while it has objects."""

    async def get_lifecycle(self, access_key: str, bucket: str) -> list[LifecycleRule]:
        """The rules of a bucket; an empty list when none are set."""

    async def own_lifecycle(self, access_key: str, bucket: str) -> list[LifecycleRule]:
        """The rules that this storage side carries out by itself, and knows without asking others."""

    async def set_lifecycle(self, access_key: str, bucket: str, rules: list[LifecycleRule]) -> None:
        """Replace the rules. An empty list removes the configuration."""

    async def put_object(self, access_key: str, request: PutRequest, body: Body) -> ObjectInfo:
        """Store an object. On return it is durable as the server's mode promises. Raises CallerError: IncompleteBody,
        BadDigest, XAmzContentSHA256Mismatch, EntityTooLarge, PreconditionFailed; then nothing of it is visible.
        """

    async def head_object(self, access_key: str, request: ReadRequest) -> ReadHead:
        """Raises CallerError: PreconditionFailed, NotModified, InvalidRange, InvalidPartNumber."""

    def open_object(self, access_key: str, request: ReadRequest) -> AbstractAsyncContextManager[ObjectRead]:
        """Open an object to read its bytes. Raises what `head_object` raises."""

    async def object_parts(self, access_key: str, bucket: str, key: str) -> list[ObjectPart]:
        """The parts of a multipart object; empty for an object that was stored whole."""

    async def copy_object(self, access_key: str, request: CopyRequest) -> ObjectInfo:
        """Raises CallerError: PreconditionFailed for a condition of source or target, EntityTooLarge over 5 GiB."""

    async def delete_object(
        self, access_key: str, bucket: str, key: str, condition: WriteCondition = NO_WRITE_CONDITION
    ) -> None:
        """Delete an object. An absent object is no error, except with If-Match."""

    async def delete_objects(self, access_key: str, bucket: str, keys: list[str]) -> list[NotDeleted]:
        """Delete these keys in one step; those that were not deleted. An absent object is no error. The embedded store
        deletes all of them, or raises and deletes none.
        """

    async def set_tags(self, access_key: str, bucket: str, key: str, tags: dict[str, str]) -> None:
        """Replace all tags. ETag and modification time stay."""

    async def list_objects(self, access_key: str, request: ListRequest) -> ListPage: ...


class UploadsApi(Protocol):
    """Multipart uploads."""

    async def create_upload(self, access_key: str, request: UploadRequest) -> str:
        """Begin an upload; returns its id."""

    async def put_part(self, access_key: str, request: PartRequest, body: Body) -> PartInfo:
        """Store a part; a part of the same number is replaced. Raises what `put_object` raises."""

    async def copy_part(self, access_key: str, request: PartCopyRequest) -> PartInfo: ...

    async def complete_upload(self, access_key: str, request: CompleteRequest) -> ObjectInfo:
        """Make the object. Raises CallerError: InvalidPart, InvalidPartOrder, EntityTooSmall, BadDigest,
        PreconditionFailed; the upload then stays. A repeated completion gets the same answer as the first.
        """

    async def abort_upload(self, access_key: str, upload: UploadRef) -> None: ...

    async def list_parts(
        self, access_key: str, upload: UploadRef, part_number_marker: int, max_parts: int
    ) -> PartPage: ...

    async def list_uploads(self, access_key: str, request: UploadListRequest) -> UploadPage: ...


class PrefixesApi(Protocol):
    """Prefixes of chunks, and all other calls that move bytes of a client's registered memory under a request id."""

    async def lookup(self, access_key: str, bucket: str, request: LookupRequest) -> LookupAnswer:
        """Look a prefix up. Advice, where it is asked for, assumes the rate that this access key would
        be offered now.
        """

    async def deliver(
        self, access_key: str, bucket: str, descriptor: Descriptor, sink: BodySink
    ) -> DeliveryOutcome: ...

    async def put_chunks_from(self, access_key: str, bucket: str, descriptor: Descriptor) -> ChunksPut:
        """Read every chunk from the descriptor's target and store it; the answer says which chunks failed."""

    async def get_object_into(self, access_key: str, request: ReadRequest, token: RdmaToken) -> ObjectDelivery:
        """Open an object as `open_object` does, and write its bytes into the client's memory before returning. Raises
        CallerError(NotImplemented) with the token's header as field where that is declined; nothing was moved then.
        """

    async def put_object_from(
        self, access_key: str, request: PutRequest, token: RdmaToken, said: BodyDigests
    ) -> ObjectStored:
        """Store an object as `put_object` does, from the client's memory; its bytes must have the digests in `said`."""

    async def count_prefix(
        self, access_key: str, bucket: str, descriptor: Descriptor, target: RdmaTarget | None = None
    ) -> int:
        """How many of the chunks, from the first, a delivery would bring. Unlike a lookup this is exact, and chunks
        that are only upstream begin to come. Raises ChunkUnavailable where the descriptor says that none may be
        missing, and NoSuchAgent where the target of the whole is in memory that is not known.
        """

    async def claim(self, access_key: str, request_id: str) -> None:
        """Take a request id for a request whose portions other storage servers carry out. Raises
        CallerError(RequestReplayed) where it was taken before.
        """

    async def cancel(self, access_key: str, request_id: str, writers: tuple[str, ...] = ()) -> None:
        """Returns when nothing of the request is in flight. An id that was not used yet is marked as used. In a cluster
        `writers` are the ids of the members that must answer, be they members still or not.
        """


class AgentsApi(Protocol):
    """Registrations of clients' memory."""

    async def register_agent(self, access_key: str, registration: AgentRegistration) -> AgentLease: ...

    async def renew_agent(self, access_key: str, agent_id: str, renewal: AgentRenewal) -> AgentLease: ...

    async def delete_agent(self, access_key: str, agent_id: str, writers: tuple[str, ...] = ()) -> None:
        """Returns when nothing moves bytes of the agent's memory any more; `writers` as in `cancel`."""

    async def downlink_share(
        self, access_key: str, agent_id: str, writer: str, left_bytes: int, whole_bytes: int
    ) -> float:
        """The bytes/s that the member `writer` of a cluster may use of an agent's downlink for a short while. It has
        `left_bytes` of the `whole_bytes` that all members have for the same requests. Members ask each other; gateways
        do not.
        """


class StatusApi(Protocol):
    """The state of the storage side: its transports, its scheduler and its metrics."""

    async def transports(self, access_key: str) -> Transports: ...

    async def scheduler(self, access_key: str) -> SchedulerStatus: ...

    async def servers(self, access_key: str) -> list[StorageStatus]:
        """Each storage server that can be reached."""

    async def metrics(self, access_key: str) -> str:
        """The metrics of descriptors.metrics.STORAGE, in Prometheus' text format."""


class StorageApi(Protocol):
    """The storage side as a gateway sees it, by role. Every method raises an ObjectCacheError: NoSuchBucket, NoSuchKey
    and NoSuchUpload where those are missing, and the errors that its docstring names.
    """

    @property
    def objects(self) -> ObjectsApi: ...

    @property
    def uploads(self) -> UploadsApi: ...

    @property
    def prefixes(self) -> PrefixesApi: ...

    @property
    def agents(self) -> AgentsApi: ...

    @property
    def status(self) -> StatusApi: ...


ROLES: Mapping[str, type] = {
    "objects": ObjectsApi,
    "uploads": UploadsApi,
    "prefixes": PrefixesApi,
    "agents": AgentsApi,
    "status": StatusApi,
}
"""The roles of a StorageApi, by the name of their property."""
