"""Running gateway and storage server, together or apart, until a signal ends them."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import resource
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol, TypeAlias
from urllib.parse import urlsplit

from aiohttp import web

from descriptors.errors import CallerError, ErrorCode, ServerError
from descriptors.objects import BucketCache
from descriptors.peer_auth import PeerSecrets
from gateway.app import Gateway, GatewaySettings
from gateway.cluster.storage import ClusterStorage
from gateway.s3.credentials import Credential, CredentialBook
from gateway.storage_client import RemoteStorage
from objectcache.adapters.long_lived import note_long_lived
from objectcache.adapters.name_lookups import ServerLoop
from objectcache.cli.banner import Started, banner
from objectcache.cli.listening import Listen, listening, refuse_taken, renewed_tls
from objectcache.cli.rereading import Apply, Rereading
from objectcache.cli.workers import Workers, beat
from storage_server.cache.policies.threshold import told
from storage_server.delivery.scheduler.settings import SchedulerSettings
from storage_server.home.own_keys import OwnKeys
from storage_server.kernel.data.disk import Disk
from storage_server.service.http_api import StorageHttp
from storage_server.service.storage import (
    EmbeddedStorage,
    Peers,
    WrapDestination,
    WrapSource,
    unwrapped_destination,
    unwrapped_source,
)
from storage_server.settings import StorageSettings

WORKER_READ_S = 30.0
"""The seconds for which a worker may go on reading deleted bytes of a segment. After that its answer is cut."""
SWITCH_INTERVAL_S = 0.0005
"""The longest time that a thread waits for the interpreter; Python's default is ten times as long."""
_log = logging.getLogger(__name__)


class Together:
    """Gateway and storage server in one process; the gateway calls the storage server directly. With `worker_command`,
    further gateways in their own processes share the port. The command gets the port and the socket of this process.
    The limits of `gateway` are those of all `worker_count` gateways together.
    """

    def __init__(
        self,
        storage: StorageSettings,
        gateway: GatewaySettings,
        credentials: Sequence[Credential],
        listen: Listen,
        worker_count: int = 1,
        worker_command: Callable[[int, Path], Sequence[str]] | None = None,
        secrets: PeerSecrets | None = None,
        disk: Disk | None = None,
        wrap_source: WrapSource = unwrapped_source,
        wrap_destination: WrapDestination = unwrapped_destination,
        makes: Mapping[str, BucketCache] | None = None,
    ) -> None:
        """`makes` are buckets that are made at the start where they are missing, for the first of `credentials` that
        may.
        """
        self._makes = makes or {}
        if worker_count > 1:
            storage = replace(storage, punch_delay_s=WORKER_READ_S)
        self.storage = EmbeddedStorage(storage, disk, wrap_source, wrap_destination)
        self.credentials = CredentialBook(credentials)
        self._first_credentials = tuple(credentials)
        self._gateway = Gateway(self.storage, self.credentials, gateway.share_of(worker_count))
        self._listen = replace(listen, shares_port=listen.shares_port or worker_count > 1)
        self._worker_count = worker_count
        self._worker_command = worker_command
        self._peers = None if secrets is None else StorageHttp(self.storage, secrets)
        self._runners: list[web.ServerRunner] = []
        self._workers: Workers | None = None
        self._socket_folder: Path | None = None
        self.url = ""

    async def start(self) -> None:
        if self._listen.shares_port:
            await refuse_taken(self._listen)
        await self.storage.start()
        await self._make_buckets()
        runner, self.url = await listening(self._gateway.server(), self._listen)
        self._runners.append(runner)
        if self._peers is not None and self._worker_command is not None:
            self._socket_folder = Path(tempfile.mkdtemp(prefix="objectcache-"))
            socket_path = self._socket_folder / "storage.sock"
            peers, _ = await listening(self._peers.server(), Listen(socket_path=socket_path))
            self._runners.append(peers)
            port = urlsplit(self.url).port or 0
            self._workers = Workers(self._worker_command(port, socket_path), self._worker_count - 1)
            await self._workers.start()

    async def _make_buckets(self) -> None:
        """Those that exist stay as they are. A service upstream that cannot be reached keeps nobody from serving."""
        for bucket, cache in self._makes.items():
            try:
                await self.storage.objects.create_bucket(self._owner_of(bucket), bucket, cache)
            except CallerError as error:
                if error.code is ErrorCode.TOO_MANY_BUCKETS:  # the settings say that it is a cache
                    await self.storage.objects.create_bucket(self._owner_of(bucket), bucket)
                elif error.code not in (ErrorCode.BUCKET_ALREADY_OWNED, ErrorCode.BUCKET_ALREADY_EXISTS):
                    raise
            except ServerError as error:
                _log.warning("the bucket %s was not made: %s", bucket, error)

    def _owner_of(self, bucket: str) -> str:
        """The first key that may make the bucket."""
        able = (each.access_key for each in self._first_credentials if each.allows("CreateBucket", bucket))
        return next(able, "")

    def started(self, keys_from: str) -> Started:
        """The facts that its start tells."""
        settings, store = self.storage.settings, self.storage.store
        scheduler = settings.scheduler
        upstream = settings.upstream
        return Started(
            url=self.url,
            data=str(settings.data_dir),
            used_bytes=store.space.used_bytes,
            bound_bytes=store.space.bound_bytes,
            free_bytes=store.disk.free_bytes(settings.data_dir),
            upstream=None if upstream is None else upstream.endpoint,
            caches=sorted(store.evictor.caches.capacities().items()),
            dram_bytes=settings.dram_bytes,
            transports=[name for name, is_there in (("shm", self.storage.shm), ("ucx", self.storage.ucx)) if is_there]
            + ["http"],
            access_keys=[each.access_key for each in self._first_credentials],
            keys_from=keys_from,
            credentials=str(settings.data_dir)
            if keys_from == f"from {settings.data_dir / 'credentials.json'}"
            else None,
            link_bytes_per_s=scheduler.link_bytes_per_s,
            compression=told(settings.compression),
        )

    def tell_workers(self, number: signal.Signals) -> None:
        """Send a signal on to the workers."""
        if self._workers is not None:
            self._workers.tell(number)

    async def close(self) -> None:
        if self._workers is not None:
            await self._workers.stop()
        for runner in self._runners:
            await runner.cleanup()
        await self.storage.close()
        if self._socket_folder is not None:
            shutil.rmtree(self._socket_folder, ignore_errors=True)


class StorageServer:
    """A storage server for gateways in other processes."""

    def __init__(
        self,
        storage: StorageSettings,
        secrets: PeerSecrets,
        listen: Listen,
        own: OwnKeys | None = None,
        advertised: str | None = None,
        peers: Peers | None = None,
    ) -> None:
        """With `own`, it is a member of a cluster, whose gateways reach it at `advertised`, or where it listens;
        `peers` are the others.
        """
        self.storage = EmbeddedStorage(storage, own=own, peers=peers)
        self._http = StorageHttp(self.storage, secrets, None if own is None else own.require_current)
        self.membership = None if own is None else own.membership
        self._advertised = advertised
        self._listen = listen
        self._runner: web.ServerRunner | None = None
        self.url = ""

    async def start(self) -> None:
        await self.storage.start()
        self._runner, self.url = await listening(self._http.server(), self._listen)
        await self.storage.join(self._advertised or self.url)

    async def close(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
        await self.storage.close()


class GatewayServer:
    """A gateway over a storage server elsewhere, or over a cluster of them."""

    def __init__(
        self,
        storage: RemoteStorage | ClusterStorage,
        gateway: GatewaySettings,
        credentials: Sequence[Credential],
        listen: Listen,
    ) -> None:
        self._storage = storage
        self.membership = storage.membership if isinstance(storage, ClusterStorage) else None
        self.credentials = CredentialBook(credentials)
        membership = self.membership
        view = (lambda: None) if membership is None else lambda: membership.view
        self._gateway = Gateway(self._storage, self.credentials, gateway, view)
        self._listen = listen
        self._runner: web.ServerRunner | None = None
        self.url = ""

    async def start(self) -> None:
        await self._storage.start()
        self._runner, self.url = await listening(self._gateway.server(), self._listen)

    async def close(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
        await self._storage.close()


class Server(Protocol):
    """A server of any kind, until a signal ends it."""

    url: str

    async def start(self) -> None:
        """Listen."""
        ...

    async def close(self) -> None:
        """End."""
        ...


def run(
    name: str,
    make_server: Callable[[], Server],
    *,
    until_stdin_ends: bool = False,
    rereads: Mapping[str, Reread] | None = None,
    keys_from: str | None = None,
) -> None:
    """Build the server on a uvloop event loop, print its address, and stop on SIGINT or SIGTERM. A worker also stops
    when the process that started it has ended. SIGHUP reads TLS certificates and `rereads` again, which are by the name
    of what they read.
    """
    raise_file_limit()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    with asyncio.Runner(loop_factory=ServerLoop) as runner:
        runner.run(_until_stopped(name, make_server, rereads or {}, keys_from, until_stdin_ends=until_stdin_ends))


async def _until_stopped(
    name: str,
    make_server: Callable[[], Server],
    rereads: Mapping[str, Reread],
    keys_from: str | None,
    *,
    until_stdin_ends: bool,
) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    loop.add_signal_handler(signal.SIGHUP, _log.info, "SIGHUP: nothing is read anew before the server has started")
    if until_stdin_ends:
        threading.Thread(target=_wait_for_stdin, args=(loop, stop), daemon=True).start()
    server = make_server()
    try:
        await server.start()
        gc.collect()
        note_long_lived()
        # only now, because UCX takes SIGHUP when it starts
        rereading = Rereading[Server](server, {**rereads, "the TLS certificate and key": renewed_tls})
        loop.add_signal_handler(signal.SIGHUP, _read_anew, server, rereading)
        print(f"{name} is listening on {server.url}", flush=True)
        if until_stdin_ends:
            beat(loop, sys.stdout.fileno())
        if isinstance(server, Together) and keys_from is not None:
            print(banner(server.started(keys_from)), flush=True)
        await stop.wait()
        _log.info("stopping")
    finally:
        await server.close()


Reread: TypeAlias = "Callable[[], Apply[Server]]"
"""Reads files again, in a thread, and returns what has a server use them."""
_rereading: set[asyncio.Task[None]] = set()
"""Tasks that read the members again; the event loop does not hold them."""


def _read_anew(server: Server, rereading: Rereading[Server]) -> None:
    """Read again what may be renewed while the server runs. A file that cannot be used changes nothing."""
    rereading.again()
    if isinstance(server, Together):
        server.tell_workers(signal.SIGHUP)
    if isinstance(server, StorageServer | GatewayServer) and server.membership is not None:
        task = asyncio.get_running_loop().create_task(server.membership.refresh())
        _rereading.add(task)
        task.add_done_callback(_rereading.discard)


def reconfigured(read: Callable[[], SchedulerSettings]) -> Reread:
    """Have the scheduler of a server use the settings that are read."""

    def reread() -> Apply[Server]:
        settings = read()

        def apply(server: Server) -> None:
            if isinstance(server, Together | StorageServer):
                server.storage.pipeline.link.reconfigure(settings)
                _log.info("the scheduler uses %s", settings)

        return apply

    return reread


def recredited(read: Callable[[], Sequence[Credential]]) -> Reread:
    """Have a gateway know the credentials that are read, and no others."""

    def reread() -> Apply[Server]:
        credentials = read()

        def apply(server: Server) -> None:
            if isinstance(server, Together | GatewayServer):
                server.credentials.become(credentials)

        return apply

    return reread


def _wait_for_stdin(loop: asyncio.AbstractEventLoop, stop: asyncio.Event) -> None:
    while os.read(0, 4096):
        continue
    with contextlib.suppress(RuntimeError):  # the loop is closed already
        loop.call_soon_threadsafe(stop.set)


def raise_file_limit() -> None:
    """Lift the soft limit on open files to the hard limit, because a delivery keeps a descriptor for
    each chunk file.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
