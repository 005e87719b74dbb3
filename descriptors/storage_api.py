"""What a gateway may ask of the storage side: values and one Protocol, spoken in-process or over HTTP.

`storage_server.service.EmbeddedStorage` answers directly; `gateway.storage_client.RemoteStorage` carries the same calls
to a storage server in another process. One contract test runs against both.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from descriptors.conditions import NO_WRITE_CONDITION, WriteCondition
from descriptors.descriptor import Descriptor
from descriptors.errors import ErrorCode
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
    BodyDigests,
    BucketInfo,
    CompleteRequest,
    CopyRequest,
    ListPage,
    ListRequest,
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

Piece = bytes | bytearray | memoryview
"""A run of body bytes."""


class Body(Protocol):
    """A request's body: iterate once over its bytes; then, and only then, `digests` says what they should hash to.

    Digests may come in trailers; whether a SHA-256 will be among them is known before. Iterating raises
    CallerError(IncompleteBody) when the body ends early.
    """

    @property
    def has_sha256(self) -> bool: ...

    @property
    def is_held_back(self) -> bool:
        """Whether the sender waits to be told that the body is wanted, which iterating does."""

    def __aiter__(self) -> AsyncIterator[Piece]: ...

    def digests(self) -> BodyDigests: ...


SendSome = Callable[[memoryview], int]
"""Hand bytes to a connection, in any thread: how many it took. Raises BlockingIOError when it takes none now."""


class Pump(Protocol):
    """An open object's bytes, read and sent in one thread of the storage side without a turn of the event loop."""

    async def prime(self) -> None:
        """Have the first bytes ready: a failure here is still an error the client can read."""

    async def send(self, send_some: SendSome, fd: int) -> bool:
        """Send until all is sent (True) or the connection, whose descriptor is `fd`, takes no more for a while (False).
        Raises ServerError(InternalError) at bytes that fail their checksum, ConnectionError.
        """


@dataclass(frozen=True, slots=True)
class ObjectRead:
    """An open object: `body` yields the bytes `head.range` names, from the version that was opened, whatever happens to
    the key meanwhile. Every piece has passed its checksum; iterating raises ServerError(InternalError) at one that does
    not, so take the first piece before answering. A piece's memory is used again when the next is asked for.

    `pump`, where there is one, sends the same bytes; use one or the other.
    """

    head: ReadHead
    body: AsyncIterator[Piece]
    pump: Pump | None = None


@dataclass(frozen=True, slots=True)
class Grant:
    """What a delivery may use of the link: its rate in bytes/s (0: not limited), held or expected on the whole, and the
    epoch that gave it.
    """

    rate_bytes_per_s: int = 0
    epoch: int = 0


@dataclass(frozen=True, slots=True)
class DeliveryStart:
    """What is fixed before the first byte: the mode, k, the payload's size, the request's id and its rate."""

    request_id: str
    mode: Mode
    chunk_count: int
    payload_bytes: int
    grant: Grant = Grant()


@dataclass(frozen=True, slots=True)
class DeliveryTiming:
    """Where a delivery's time went on the storage side, one part after the other: planning, waiting for bytes to be
    gathered, waiting for the transport, and waiting for the link while others had it. Gathers run ahead of the
    transport, so the second is what they could not hide.
    """

    plan_s: float
    gather_s: float
    transfer_s: float
    wait_s: float = 0.0


@dataclass(frozen=True, slots=True)
class DeliveryOutcome:
    """How a descriptor GET ended well. `transferred_bytes` is what the transport itself counted."""

    start: DeliveryStart
    transferred_bytes: int
    timing: DeliveryTiming


Spans = npt.NDArray[np.int64]
"""Memory of this process, one run after the other: rows of (address, nbytes)."""


@dataclass(frozen=True, slots=True)
class ObjectDelivery:
    """One object, or a part of it, in the client's memory. `transferred_bytes` is what the transport itself counted,
    `transfer_s` how long bytes were in flight.
    """

    head: ReadHead
    transferred_bytes: int
    transfer_s: float


@dataclass(frozen=True, slots=True)
class ObjectStored:
    """An object stored out of the client's memory; `transfer_s` as above."""

    info: ObjectInfo
    transfer_s: float


@dataclass(frozen=True, slots=True)
class ChunkPut:
    """What became of one chunk of many: stored and durable, with its bare `etag`, or not, and why."""

    key: str
    etag: str | None
    code: ErrorCode | None = None
    message: str = ""


@dataclass(frozen=True, slots=True)
class ChunksPut:
    """What became of every chunk, in order; `transfer_s` as above."""

    puts: list[ChunkPut]
    transfer_s: float


@dataclass(frozen=True, slots=True)
class Patience:
    """How slowly a client may take an answer: while it is waited for, at least `least_bytes_per_s` over any
    `window_s`, and one byte.
    """

    window_s: float
    least_bytes_per_s: float = 0.0


class BodySink(Protocol):
    """Where an http delivery writes. `write` and `send` return when the memory may be used again."""

    async def begin(self, start: DeliveryStart) -> None:
        """Called once, before the first byte."""

    async def write(self, view: memoryview) -> None:
        """Send the view."""

    async def send(self, spans: Spans, patience: Patience) -> None:
        """Send memory. Raises TimeoutError or ConnectionError when the client takes it more slowly than that."""

    def abort(self) -> None:
        """Cut the body short: no byte of any view is read after this returns."""


class StorageApi(Protocol):
    """The storage side as a gateway sees it. Every method raises ObjectCacheError for what goes wrong: NoSuchBucket,
    NoSuchKey and NoSuchUpload where those are missing, and what is named below.
    """

    async def create_bucket(self, access_key: str, bucket: str) -> None:
        """BucketAlreadyOwnedByYou, BucketAlreadyExists."""

    async def head_bucket(self, bucket: str) -> BucketInfo: ...

    async def list_buckets(self) -> list[BucketInfo]: ...

    async def delete_bucket(self, bucket: str) -> None:
        """BucketNotEmpty while it has objects; unfinished uploads go with it."""

    async def get_lifecycle(self, bucket: str) -> list[LifecycleRule]:
        """Empty when none is set."""

    async def set_lifecycle(self, bucket: str, rules: list[LifecycleRule]) -> None:
        """An empty list removes the configuration."""

    async def put_object(self, request: PutRequest, body: Body) -> ObjectInfo:
        """Stored and durable when this returns; IncompleteBody, BadDigest, XAmzContentSHA256Mismatch, EntityTooLarge,
        PreconditionFailed otherwise, and then nothing of it is visible.
        """

    async def head_object(self, request: ReadRequest) -> ReadHead:
        """PreconditionFailed, NotModified, InvalidRange, InvalidPartNumber."""

    def open_object(self, request: ReadRequest) -> AbstractAsyncContextManager[ObjectRead]:
        """As `head_object`, with the bytes."""

    async def object_parts(self, bucket: str, key: str) -> list[ObjectPart]:
        """The parts of a multipart object; empty for one stored whole."""

    async def copy_object(self, request: CopyRequest) -> ObjectInfo:
        """PreconditionFailed for the source's condition or the target's; EntityTooLarge over 5 GiB."""

    async def delete_object(self, bucket: str, key: str, condition: WriteCondition = NO_WRITE_CONDITION) -> None:
        """Deleting what is not there is fine, but for If-Match."""

    async def delete_objects(self, bucket: str, keys: list[str]) -> None:
        """All or nothing, in one step."""

    async def set_tags(self, bucket: str, key: str, tags: dict[str, str]) -> None:
        """Replaces all tags; ETag and modification time stay."""

    async def list_objects(self, request: ListRequest) -> ListPage: ...

    async def create_upload(self, request: UploadRequest) -> str:
        """The new upload's id."""

    async def put_part(self, request: PartRequest, body: Body) -> PartInfo:
        """As `put_object`. A part sent again replaces the one before."""

    async def copy_part(self, request: PartCopyRequest) -> PartInfo: ...

    async def complete_upload(self, request: CompleteRequest) -> ObjectInfo:
        """InvalidPart, InvalidPartOrder, EntityTooSmall, BadDigest, PreconditionFailed; the upload then stays. Asked
        again for what it completed already, it answers as it did then.
        """

    async def abort_upload(self, upload: UploadRef) -> None: ...

    async def list_parts(self, upload: UploadRef, part_number_marker: int, max_parts: int) -> PartPage: ...

    async def list_uploads(self, request: UploadListRequest) -> UploadPage: ...

    async def lookup(self, access_key: str, bucket: str, request: LookupRequest) -> LookupAnswer:
        """Advice, where it is asked for, assumes the rate this access key would be offered now."""

    async def transports(self) -> Transports: ...

    async def scheduler(self) -> SchedulerStatus: ...

    async def register_agent(self, access_key: str, registration: AgentRegistration) -> AgentLease: ...

    async def renew_agent(self, access_key: str, agent_id: str, renewal: AgentRenewal) -> AgentLease: ...

    async def delete_agent(self, access_key: str, agent_id: str) -> None: ...

    async def deliver(
        self, access_key: str, bucket: str, descriptor: Descriptor, sink: BodySink
    ) -> DeliveryOutcome: ...

    async def get_object_into(self, access_key: str, request: ReadRequest, token: RdmaToken) -> ObjectDelivery:
        """As `open_object`, the bytes written into the client's memory when this returns. NotImplemented with the
        token's header as field: declined, and nothing was moved.
        """

    async def put_object_from(
        self, access_key: str, request: PutRequest, token: RdmaToken, said: BodyDigests
    ) -> ObjectStored:
        """As `put_object`, the bytes read from the client's memory; `said` is what they must hash to."""

    async def put_chunks_from(self, access_key: str, bucket: str, descriptor: Descriptor) -> ChunksPut:
        """Every chunk read from the descriptor's target and stored, or not."""

    async def cancel(self, access_key: str, request_id: str) -> None: ...
