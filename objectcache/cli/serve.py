"""Running gateway and storage server, together or apart, until a signal ends them."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import logging
import os
import resource
import shutil
import signal
import socket
import ssl
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
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
from objectcache.adapters.accepting import Door
from objectcache.adapters.limited_server import LimitedServer
from objectcache.adapters.long_lived import note_long_lived
from objectcache.adapters.name_lookups import ServerLoop
from objectcache.adapters.tls_door import CONNECTION_BYTES, TlsDoor
from objectcache.cli.banner import Started, banner
from objectcache.cli.config import ConfigError
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

BACKLOG = 4096
SHUTDOWN_S = 5.0
TLS_PART = 8
"""Connections with TLS have this part of the host's memory at most."""
PORT_WAIT_S = 5.0
"""The kernel takes a while to end the workers of a killed server: a start waits so long for their port."""
PORT_TRY_S = 0.1
WORKER_READ_S = 30.0
"""The seconds for which a worker may go on reading deleted bytes of a segment. After that its answer is cut."""
SWITCH_INTERVAL_S = 0.0005
"""The longest time that a thread waits for the interpreter; Python's default is ten times as long."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Tls:
    """PEM files: the certificate with its chain, and its key. With `client_ca`, clients need certificates of it."""

    certificate: Path
    key: Path
    client_ca: Path | None = None

    def context(self) -> ssl.SSLContext:
        """The context of the TLS server. Raises OSError (ssl.SSLError included) when the files cannot be used."""
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=self.client_ca)
        context.load_cert_chain(self.certificate, self.key, password=_refuse_encrypted)
        if self.client_ca is not None:
            context.verify_mode = ssl.CERT_REQUIRED
        return context


def _refuse_encrypted() -> str:
    """OpenSSL would ask for the pass phrase on the terminal, and wait."""
    raise OSError("the key is encrypted: give it without a pass phrase, in a file of mode 0600")


def tls_of(certificate: Path | None, key: Path | None, client_ca: Path | None = None) -> Tls | None:
    """The files that were given; None where none was. Raises ConfigError where one is missing or cannot be used."""
    if certificate is None and key is None and client_ca is None:
        return None
    if certificate is None or key is None:
        raise ConfigError("a TLS certificate needs its key, a key its certificate, and a CA of clients needs both")
    tls = Tls(certificate, key, client_ca)
    try:
        tls.context()
    except OSError as error:
        raise ConfigError(f"the TLS certificate and key cannot be used: {error}") from None
    return tls


@dataclass(frozen=True, slots=True)
class Listen:
    """An address to listen at: host and port (0 picks a free port), or a Unix socket. With `shares_port` other
    processes may listen on the same port, and the kernel divides connections among them.
    """

    host: str = "127.0.0.1"
    port: int = 0
    socket_path: Path | None = None
    tls: Tls | None = None
    shares_port: bool = False


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
            await _refuse_taken(self._listen)
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
        rereading = Rereading[Server](server, {**rereads, "the TLS certificate and key": _renewed_tls})
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
_doors: list[tuple[Tls, TlsDoor]] = []
"""The TLS doors of this process, with the files that their contexts were made from."""
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


def _renewed_tls() -> Apply[Server]:
    """New connections get what the files have now: a context that was changed would go on to have its old key beside a
    new one of another kind. Raises OSError.
    """
    renewed = [(door, _fresh(tls, door.context)) for tls, door in _doors]

    def renew(_: Server) -> None:
        for door, context in renewed:
            door.context = context

    return renew


def _fresh(tls: Tls, before: ssl.SSLContext) -> ssl.SSLContext:
    context = tls.context()
    if tls.client_ca is not None and context.get_ca_certs(True) != before.get_ca_certs(True):
        raise OSError(f"{tls.client_ca} has other certificates: start anew, so that those before count no more")
    return context


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


async def _refuse_taken(listen: Listen) -> None:
    """Raises OSError where the port stays in use: a port that workers share could be shared with a foreign server
    unseen.
    """
    loop = asyncio.get_running_loop()
    until_s, is_told = loop.time() + PORT_WAIT_S, False
    while True:
        try:
            with _bound(replace(listen, shares_port=False)) as probe:
                probe.listen()
            return
        except OSError as error:
            if error.errno != errno.EADDRINUSE or loop.time() >= until_s:
                raise
            if not is_told:
                is_told = True
                _log.warning("%s:%d is in use: waiting up to %.0f s for it", listen.host, listen.port, PORT_WAIT_S)
        await asyncio.sleep(PORT_TRY_S)


def _bound(listen: Listen) -> socket.socket:
    family = socket.AF_INET6 if ":" in listen.host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if listen.shares_port:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        bound.bind((listen.host, listen.port))
    except OSError as error:
        bound.close()
        taken = "; another process has it: `--port` takes another, and 0 a free one"
        said = f"{error.strerror}{taken if error.errno == errno.EADDRINUSE else ''}"
        raise OSError(error.errno, said, f"{listen.host}:{listen.port}") from None
    return bound


class _DoorSite(web.SockSite):
    """aiohttp's site, whose connections come through a door."""

    def __init__(self, runner: web.ServerRunner, sock: socket.socket, door: Door | TlsDoor) -> None:
        super().__init__(runner, sock)
        self._door = door
        self._accepting: asyncio.Task[None] | None = None

    async def start(self) -> None:
        await web.BaseSite.start(self)
        self._sock.listen(BACKLOG)
        self._sock.setblocking(False)
        self._accepting = asyncio.create_task(self._door.serve(self._sock))

    async def stop(self) -> None:
        if self._accepting is not None:
            self._accepting.cancel()
            await asyncio.gather(self._accepting, return_exceptions=True)
        self._sock.close()
        await super().stop()


async def listening(server: LimitedServer, listen: Listen) -> tuple[web.ServerRunner, str]:
    """Have a server listen. Returns what ends it, and its address."""
    runner = web.ServerRunner(server, shutdown_timeout=SHUTDOWN_S)
    await runner.setup()
    site: web.BaseSite
    if listen.socket_path is not None:
        listen.socket_path.unlink(missing_ok=True)
        site = web.UnixSite(runner, str(listen.socket_path), backlog=BACKLOG)
        await site.start()
        listen.socket_path.chmod(0o600)
        return runner, f"unix:{listen.socket_path}"
    bound = _bound(listen)
    door: Door | TlsDoor = Door(server)
    if listen.tls is not None:
        door = tls_door = TlsDoor(server, listen.tls.context())
        server.take_at_most(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // TLS_PART // CONNECTION_BYTES)
        _doors.append((listen.tls, tls_door))
    site = _DoorSite(runner, bound, door)
    await site.start()
    host = f"[{listen.host}]" if ":" in listen.host else listen.host
    return runner, f"{'http' if listen.tls is None else 'https'}://{host}:{bound.getsockname()[1]}"
