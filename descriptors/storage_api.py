"""What a gateway may ask of the storage side: values and one Protocol, spoken in-process or over HTTP.

`storage_server.service.EmbeddedStorage` answers directly; `gateway.storage_client.RemoteStorage` carries the same calls
to a storage server in another process. One contract test runs against both.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Protocol

from descriptors.descriptor import Descriptor
from descriptors.messages import AgentLease, AgentRegistration, AgentRenewal, LookupRequest
from descriptors.notices import Mode

Piece = bytes | bytearray | memoryview
"""A run of body bytes."""


@dataclass(frozen=True, slots=True)
class BucketInfo:
    """A bucket and when it was made (Unix seconds)."""

    name: str
    created_at: float


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """What is known of a stored object. `etag` is the bare MD5 in hex; `modified_at` is Unix seconds;
    `headers` are the stored content and user-metadata headers, lower-case names.
    """

    key: str
    nbytes: int
    etag: str
    modified_at: float
    headers: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PutRequest:
    """A whole object to store. `sha256` and `md5` are hex digests the body must have, where the caller gave them."""

    bucket: str
    key: str
    nbytes: int
    headers: dict[str, str]
    sha256: str | None = None
    md5: str | None = None


@dataclass(frozen=True, slots=True)
class ListRequest:
    """Keys after `after` (exclusive) that start with `prefix`, rolled up at `delimiter`, at most `max_keys` entries."""

    bucket: str
    prefix: str = ""
    delimiter: str = ""
    after: str = ""
    max_keys: int = 1000


@dataclass(frozen=True, slots=True)
class ListPage:
    """One page of a listing. `next_after` continues it; None at the end."""

    objects: list[ObjectInfo]
    common_prefixes: list[str]
    next_after: str | None


@dataclass(frozen=True, slots=True)
class ByteRange:
    """Bytes [start, start + length) of an object."""

    start: int
    length: int


@dataclass(frozen=True, slots=True)
class ObjectRead:
    """An open object: `body` yields its bytes from the pinned version, whatever happens to the key meanwhile."""

    info: ObjectInfo
    range: ByteRange
    body: AsyncIterator[Piece]


@dataclass(frozen=True, slots=True)
class RangeSpec:
    """A Range header's one range: first and last byte (inclusive), or the last `suffix` bytes."""

    first: int | None = None
    last: int | None = None
    suffix: int | None = None


@dataclass(frozen=True, slots=True)
class DeliveryStart:
    """What is fixed before the first byte: the mode, k, the payload's size and the request's id."""

    request_id: str
    mode: Mode
    chunk_count: int
    payload_bytes: int


@dataclass(frozen=True, slots=True)
class DeliveryOutcome:
    """How a descriptor GET ended well. `transferred_bytes` is what the transport itself counted."""

    start: DeliveryStart
    transferred_bytes: int


class BodySink(Protocol):
    """Where an http delivery writes. `write` returns when the view's memory may be used again."""

    async def begin(self, start: DeliveryStart) -> None:
        """Called once, before the first byte."""

    async def write(self, view: memoryview) -> None:
        """Send the view; the memory is the caller's again on return."""

    def abort(self) -> None:
        """Cut the body short: no byte of any view is read after this returns."""


class StorageApi(Protocol):
    """The storage side as a gateway sees it. Every method raises ObjectCacheError for what goes wrong."""

    async def create_bucket(self, access_key: str, bucket: str) -> None: ...

    async def head_bucket(self, bucket: str) -> BucketInfo: ...

    async def list_buckets(self) -> list[BucketInfo]: ...

    async def put_object(self, request: PutRequest, body: AsyncIterator[Piece]) -> ObjectInfo: ...

    async def head_object(self, bucket: str, key: str) -> ObjectInfo: ...

    def open_object(
        self, bucket: str, key: str, range_spec: RangeSpec | None
    ) -> AbstractAsyncContextManager[ObjectRead]: ...

    async def delete_object(self, bucket: str, key: str) -> None: ...

    async def list_objects(self, request: ListRequest) -> ListPage: ...

    async def lookup(self, bucket: str, request: LookupRequest) -> int: ...

    async def register_agent(self, access_key: str, registration: AgentRegistration) -> AgentLease: ...

    async def renew_agent(self, access_key: str, agent_id: str, renewal: AgentRenewal) -> AgentLease: ...

    async def delete_agent(self, access_key: str, agent_id: str) -> None: ...

    async def deliver(
        self, access_key: str, bucket: str, descriptor: Descriptor, sink: BodySink
    ) -> DeliveryOutcome: ...

    async def cancel(self, access_key: str, request_id: str) -> None: ...
