"""The interface of a home of objects that a cache can stand in front of: another S3 service, or files that many servers
share.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from descriptors.objects import PutRequest, ReadHead, ReadRequest
from descriptors.storage_api import Body, ObjectsApi, Piece, UploadsApi
from storage_server.home.fetch.bulk_reads import Into
from storage_server.home.rules.proof import Proof


@dataclass(frozen=True, slots=True)
class Sent:
    """The home's answer to storing an object: its ETag, empty where the home did not tell it, and when it was modified
    (Unix seconds).
    """

    etag: str
    modified_at: float


@dataclass(frozen=True, slots=True)
class HomeHead(ReadHead):
    """The head of an answer of home. `has_digest` says whether an ETag that looks like an MD5 is that of the bytes."""

    has_digest: bool = True


class Shown(NamedTuple):
    """The state of an object's key now: its ETag, None for no object; and whether the key showed an object before."""

    bucket: str
    key: str
    etag: str | None
    is_changed: bool = True


OnChanged = Callable[[Sequence[Shown]], Awaitable[None]]
"""Called with the keys that others have changed."""


class HomeObjects(ObjectsApi, Protocol):
    """The objects of a home. Every method raises what those of ObjectsApi raise; ServerError(SlowDown) where the home
    cannot be reached.
    """

    @property
    def counts_tags(self) -> bool:
        """Whether the home has been seen to say how many tags an object has, so that the tags of a copy are known."""

    def require_takes(self, request: PutRequest) -> None:
        """Raises CallerError for an object that this home would never take: it must be answered so, also where it is
        kept elsewhere first.
        """

    async def require_bucket(self, bucket: str) -> None:
        """Raises CallerError(NoSuchBucket)."""

    async def has_object(self, bucket: str, key: str, since_s: float) -> bool:
        """Whether there is such an object; where there is none, there may be no such bucket either. An object that was
        stored before `since_s`, by the steady clock, is seen.
        """

    async def send(self, request: PutRequest, body: Body, proof: Proof | None = None) -> Sent:
        """Put an object whose bytes have this proof. Raises what `put_object` raises."""

    def open_range(
        self, request: ReadRequest
    ) -> AbstractAsyncContextManager[tuple[ReadHead, Proof | None, AsyncIterator[Piece]]]:
        """A read that also gives the proof of the whole object, if there is one."""

    def open_into(
        self, request: ReadRequest, into: Into
    ) -> AbstractAsyncContextManager[tuple[ReadHead, Proof | None, asyncio.Future[None]]]:
        """A read whose bytes, as many as `into` has room for, go there; its head, the proof of the whole object, if
        there is one, and when the bytes are there.
        """


class Service(Protocol):
    """One home. `start` before use, `close` after."""

    @property
    def objects(self) -> HomeObjects: ...

    @property
    def uploads(self) -> UploadsApi: ...

    @property
    def failed_count(self) -> int:
        """How many requests the home did not answer, or was too busy for."""

    @property
    def unread_count(self) -> int:
        """How many journals cannot be read to their ends, where the home has journals."""

    @property
    def bad_record_count(self) -> int:
        """How many records of journals were passed over because they make no sense."""

    def on_changed(self, tell: OnChanged) -> None:
        """Call `tell` with what others have changed, where this home hears of it."""

    async def start(self) -> None: ...

    async def close(self) -> None: ...
