"""Wrappers around a StorageApi that make its objects and uploads slow, failing, truncated or corrupt, and the servers
that they are tried behind.

Each wrapper passes every call on unless its fault is switched on, so that with its fault switched off it keeps the
contract of the storage that it wraps (tests/contract/store). Wrappers can be put around each other.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from itertools import cycle
from pathlib import Path
from typing import Any, cast

from aiohttp import web

from descriptors.cluster import Member, View
from descriptors.errors import CallerError, ErrorCode
from descriptors.objects import ListRequest, ReadRequest, UploadListRequest, UploadRef
from descriptors.peer_auth import PeerSecrets
from descriptors.peer_calls import CALLS, CallForm
from descriptors.storage_api import ObjectRead, ObjectsApi, Piece, StorageApi, UploadsApi
from gateway.cluster.members import Members
from gateway.cluster.storage import ClusterStorage
from gateway.storage_client import RemoteStorage
from storage_server.home.directory.store import SharedDirectory
from storage_server.home.objects import UpstreamObjects
from storage_server.home.own_keys import OwnKeys
from storage_server.home.s3.connection import Upstream
from storage_server.home.uploads import UpstreamUploads
from storage_server.planning.durability import Durability
from storage_server.service.http_api import StorageHttp
from storage_server.service.storage import EmbeddedStorage
from storage_server.settings import StorageSettings, UpstreamSettings

SECRET = PeerSecrets(b"a secret of gateways and storage servers")
READ_PIECE = "read piece"
"""What a FailingStorage counts besides calls: a piece of an object's body."""


class StorageWrapper:
    """A StorageApi that passes every call on to another. Subclasses override `before` and `opened`."""

    def __init__(self, storage: StorageApi) -> None:
        self.objects = cast(ObjectsApi, _WrappedRole(self, storage.objects, "objects"))
        self.uploads = cast(UploadsApi, _WrappedRole(self, storage.uploads, "uploads"))
        self.prefixes, self.agents, self.status = storage.prefixes, storage.agents, storage.status

    async def before(self, operation: str) -> None:
        """Awaited before each call; `operation` is for example "objects.put_object"."""

    def opened(self, request: ReadRequest, read: ObjectRead) -> ObjectRead:
        """What a caller of `open_object` gets in place of `read`."""
        return read


class _WrappedRole:
    def __init__(self, wrapper: StorageWrapper, role: object, name: str) -> None:
        self._wrapper = wrapper
        self._role = role
        self._name = name

    def __getattr__(self, method_name: str) -> Any:
        operation = f"{self._name}.{method_name}"
        call = CALLS.get(operation)
        if call is None:
            raise AttributeError(method_name)
        method = getattr(self._role, method_name)

        async def passed_on(*arguments: Any, **named: Any) -> Any:
            await self._wrapper.before(operation)
            return await method(*arguments, **named)

        @asynccontextmanager
        async def opened(*arguments: Any, **named: Any) -> AsyncIterator[ObjectRead]:
            await self._wrapper.before(operation)
            async with method(*arguments, **named) as read:
                changed = self._wrapper.opened(call.bound(*arguments, **named)["request"], read)
                if changed is read:
                    yield read
                    return
                async with aclosing(cast(Any, changed.body)):
                    yield changed

        return opened if call.form is CallForm.READ else passed_on


class SlowStorage(StorageWrapper):
    """Every call takes `call_s` seconds longer and every piece of a body `piece_s`. Waiting is done by `wait`: a test
    gives a function that waits for an event instead of sleeping.
    """

    def __init__(
        self,
        storage: StorageApi,
        *,
        call_s: float = 0.0,
        piece_s: float = 0.0,
        wait: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        super().__init__(storage)
        self.call_s = call_s
        self.piece_s = piece_s
        self._wait = wait

    async def before(self, operation: str) -> None:
        if self.call_s:
            await self._wait(self.call_s)

    def opened(self, request: ReadRequest, read: ObjectRead) -> ObjectRead:
        return replace(read, body=self._slowed(read.body), pump=None) if self.piece_s else read

    async def _slowed(self, body: AsyncIterator[Piece]) -> AsyncIterator[Piece]:
        async for piece in body:
            await self._wait(self.piece_s)
            yield piece


class FailingStorage(StorageWrapper):
    """The nth call of an operation, or the nth READ_PIECE, each counted from 0, raises the error that `failures` has
    for it.
    """

    def __init__(self, storage: StorageApi, failures: Mapping[tuple[str, int], Exception] | None = None) -> None:
        super().__init__(storage)
        self._failures = dict(failures or {})
        self._counts: dict[str, int] = {}

    async def before(self, operation: str) -> None:
        self._count(operation)

    def opened(self, request: ReadRequest, read: ObjectRead) -> ObjectRead:
        if any(counted == READ_PIECE for counted, _ in self._failures):
            return replace(read, body=self._counted(read.body), pump=None)
        return read

    async def _counted(self, body: AsyncIterator[Piece]) -> AsyncIterator[Piece]:
        async for piece in body:
            self._count(READ_PIECE)
            yield piece

    def _count(self, counted: str) -> None:
        index = self._counts.get(counted, 0)
        self._counts[counted] = index + 1
        failure = self._failures.get((counted, index))
        if failure is not None:
            raise failure


class DamagedStorage(StorageWrapper):
    """Bodies of chosen objects end early, or differ from what was put, and nobody says so."""

    def __init__(self, storage: StorageApi) -> None:
        super().__init__(storage)
        self._ends: dict[tuple[str, str], int] = {}
        self._flipped: dict[tuple[str, str], int] = {}

    def truncate(self, bucket: str, key: str, nbytes: int) -> None:
        """The body of a read of this object ends after `nbytes`."""
        self._ends[bucket, key] = nbytes

    def corrupt(self, bucket: str, key: str, offset: int) -> None:
        """The byte at `offset` of the body of a read of this object is another one."""
        self._flipped[bucket, key] = offset

    def opened(self, request: ReadRequest, read: ObjectRead) -> ObjectRead:
        place = request.bucket, request.key
        if place in self._ends:
            return replace(read, body=_first(read.body, self._ends[place]), pump=None)
        if place in self._flipped:
            return replace(read, body=_changed(read.body, self._flipped[place]), pump=None)
        return read


async def _first(body: AsyncIterator[Piece], nbytes: int) -> AsyncIterator[Piece]:
    left = nbytes
    async for piece in body:
        if left:
            yield memoryview(piece)[:left]
        left -= min(left, len(piece))


async def _changed(body: AsyncIterator[Piece], offset: int) -> AsyncIterator[Piece]:
    start = 0
    async for piece in body:
        changed = bytearray(piece)
        if start <= offset < start + len(changed):
            changed[offset - start] ^= 0x04
        yield changed
        start += len(changed)


@asynccontextmanager
async def embedded_storage(
    directory: Path, own: OwnKeys | None = None, **settings: Any
) -> AsyncIterator[EmbeddedStorage]:
    """A whole storage side in this process, without sockets: no ucx, no shm, no DRAM tier."""
    small = {"aggregation_bytes": 8192, "window_bytes": 32768, "staging_bytes": 65536, "dram_bytes": 0, "shm": False}
    storage = EmbeddedStorage(StorageSettings(data_dir=directory, **{**small, **settings}), own=own)
    await storage.start()
    try:
        yield storage
    finally:
        await storage.close()


@asynccontextmanager
async def listening(server: web.Server) -> AsyncIterator[str]:
    """The URL of a server that listens on loopback until the block ends."""
    runner = web.ServerRunner(server, shutdown_timeout=0.1)
    await runner.setup()
    with socket.create_server(("127.0.0.1", 0)) as bound:
        await web.SockSite(runner, bound).start()
        try:
            yield f"http://127.0.0.1:{bound.getsockname()[1]}"
        finally:
            await runner.cleanup()


@asynccontextmanager
async def remote_storage(storage: StorageApi) -> AsyncIterator[RemoteStorage]:
    """The same storage, over the peer protocol on loopback."""
    async with listening(StorageHttp(storage, SECRET).server()) as url:
        remote = RemoteStorage(url, SECRET)
        await remote.start()
        try:
            yield remote
        finally:
            await remote.close()


class KnownMembers:
    """A Membership of one view, which a test replaces."""

    def __init__(self, view: View) -> None:
        self.view = view
        self._told: list[Callable[[View], None]] = []

    @property
    def changed_at(self) -> int:
        return self.view.number

    holds_lease = True
    registration_count = 1

    def on_view(self, told: Callable[[View], None]) -> None:
        self._told.append(told)

    def announce(self, own: Member) -> None: ...

    async def start(self) -> None:
        self.tell()

    def tell(self) -> None:
        for told in self._told:
            told(self.view)

    async def refresh(self) -> None: ...

    async def close(self) -> None: ...


@asynccontextmanager
async def cluster_storage(directory: Path, upstream: UpstreamSettings, count: int = 3) -> AsyncIterator[ClusterStorage]:
    """A gateway's view of storage servers of this process, which talk the peer protocol over loopback."""
    async with AsyncExitStack() as running:
        members: list[Member] = []
        joined: list[tuple[EmbeddedStorage, KnownMembers, str]] = []
        for name in "abcdefgh"[:count]:
            known = KnownMembers(View("kv", 1))
            own = OwnKeys(known, name, settle_s=0.0)
            storage = await running.enter_async_context(
                embedded_storage(directory / name, own=own, upstream=upstream, durability=Durability.RELAXED)
            )
            url = await running.enter_async_context(
                listening(StorageHttp(storage, SECRET, own.require_current).server())
            )
            members.append(Member(name, url))
            joined.append((storage, known, url))
        view = View("kv", 1, tuple(members))
        for storage, known, url in joined:
            known.view = view
            await storage.join(url)
        storages = ClusterStorage(Members(KnownMembers(view), lambda url: RemoteStorage(url, SECRET, lambda: view.id)))
        await storages.start()
        try:
            yield storages
        finally:
            await storages.close()


async def emptied(storage: UpstreamStorage, buckets: Sequence[str]) -> None:
    """Delete the buckets of earlier tests with all that is in them. Other buckets are left alone."""
    for name in buckets:
        try:
            uploads = await storage.uploads.list_uploads("", UploadListRequest(name))
            for upload in uploads.uploads:
                await storage.uploads.abort_upload("", UploadRef(name, upload.key, upload.upload_id))
            page = await storage.objects.list_objects("", ListRequest(name))
            if page.objects:
                await storage.objects.delete_objects("", name, [entry.key for entry in page.objects])
            await storage.objects.delete_bucket("", name)
        except CallerError as error:
            if error.code is not ErrorCode.NO_SUCH_BUCKET:
                raise


@dataclass
class UpstreamStorage:
    """The objects and uploads of another S3 service, as the storage side has them."""

    objects: UpstreamObjects
    uploads: UpstreamUploads


@asynccontextmanager
async def upstream_storage(settings: UpstreamSettings) -> AsyncIterator[UpstreamStorage]:
    """Without a cache before it."""
    upstream = Upstream(settings)
    await upstream.start()
    limits = StorageSettings(data_dir=Path())
    objects = UpstreamObjects(upstream, limits.object_bytes_max)
    try:
        yield UpstreamStorage(objects, UpstreamUploads(upstream, objects, limits.object_bytes_max))
    finally:
        await upstream.close()


@asynccontextmanager
async def shared_directory(root: Path, local: Path, **settings: Any) -> AsyncIterator[SharedDirectory]:
    """A server of a shared directory, without a cache before it."""
    upstream = UpstreamSettings(f"file://{root}", **settings)
    await asyncio.to_thread(lambda: [path.mkdir(exist_ok=True) for path in (root, local.parent)])
    shared = SharedDirectory(upstream, StorageSettings(data_dir=local.parent), local)
    await shared.start()
    try:
        yield shared
    finally:
        await shared.close()


class TakingTurns:
    """Each call goes to the next one of some servers of the same objects."""

    def __init__(self, servers: Sequence[Any]) -> None:
        turns = cycle(servers)
        self.objects: Any = _OneOf(lambda: next(turns).objects)
        self.uploads: Any = _OneOf(lambda: next(turns).uploads)


class _OneOf:
    def __init__(self, choose: Callable[[], Any]) -> None:
        self._choose = choose

    def __getattr__(self, name: str) -> Any:
        return getattr(self._choose(), name)
