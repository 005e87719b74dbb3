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
import socket
import ssl
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import urlsplit

import uvloop
from aiohttp import web

from gateway.app import Gateway, GatewaySettings
from gateway.credentials import Credential, CredentialBook
from gateway.storage_client import RemoteStorage
from objectcache.workers import Workers
from storage_server.http_api import StorageHttp
from storage_server.scheduler.settings import SchedulerSettings
from storage_server.service import EmbeddedStorage
from storage_server.settings import StorageSettings
from storage_server.store.disk import Disk

BACKLOG = 4096
SHUTDOWN_S = 5.0
HANDSHAKE_S = 10.0
WORKER_READ_S = 30.0
"""How long a worker may go on reading an object of a segment after it was deleted; then its answer is cut."""
SWITCH_INTERVAL_S = 0.0005
"""A thread back from hashing or the disk waits this long for the event loop at most; the default is ten times that."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Tls:
    """PEM files: the certificate with its chain, and its key."""

    certificate: Path
    key: Path

    def context(self) -> ssl.SSLContext:
        """Raises OSError (ssl.SSLError included) when the files cannot be used."""
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(self.certificate, self.key)
        return context


@dataclass(frozen=True, slots=True)
class Listen:
    """Where to listen: host and port (0 picks a free one), or a Unix socket. `shares_port` lets other processes listen
    on the same port, and the kernel divides connections between them.
    """

    host: str = "127.0.0.1"
    port: int = 0
    socket_path: Path | None = None
    tls: Tls | None = None
    shares_port: bool = False


class Together:
    """Gateway and storage server in one process, joined by a plain call. With `worker_command`, more gateways in
    processes of their own share its port; the command is given the port and the socket of the store's owner.
    """

    def __init__(
        self,
        storage: StorageSettings,
        gateway: GatewaySettings,
        credentials: Sequence[Credential],
        listen: Listen,
        worker_count: int = 1,
        worker_command: Callable[[int, Path], Sequence[str]] | None = None,
        secret: bytes = b"",
        disk: Disk | None = None,
    ) -> None:
        if worker_count > 1:
            storage = replace(storage, punch_delay_s=WORKER_READ_S)
        self.storage = EmbeddedStorage(storage, disk)
        self._gateway = Gateway(self.storage, CredentialBook(credentials), gateway)
        self._listen = replace(listen, shares_port=listen.shares_port or worker_count > 1)
        self._worker_count = worker_count
        self._worker_command = worker_command
        self._peers = StorageHttp(self.storage, secret) if worker_count > 1 else None
        self._runners: list[web.ServerRunner] = []
        self._workers: Workers | None = None
        self._socket_folder: Path | None = None
        self.url = ""

    async def start(self) -> None:
        if self._listen.shares_port:
            _refuse_taken(self._listen)
        await self.storage.start()
        runner, self.url = await _listen(self._gateway.server(), self._listen)
        self._runners.append(runner)
        if self._peers is not None and self._worker_command is not None:
            self._socket_folder = Path(tempfile.mkdtemp(prefix="objectcache-"))
            socket_path = self._socket_folder / "storage.sock"
            peers, _ = await _listen(self._peers.server(), Listen(socket_path=socket_path))
            self._runners.append(peers)
            port = urlsplit(self.url).port or 0
            self._workers = Workers(self._worker_command(port, socket_path), self._worker_count - 1)
            await self._workers.start()

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

    def __init__(self, storage: StorageSettings, secret: bytes, listen: Listen) -> None:
        self.storage = EmbeddedStorage(storage)
        self._http = StorageHttp(self.storage, secret)
        self._listen = listen
        self._runner: web.ServerRunner | None = None
        self.url = ""

    async def start(self) -> None:
        await self.storage.start()
        self._runner, self.url = await _listen(self._http.server(), self._listen)

    async def close(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
        await self.storage.close()


class GatewayServer:
    """A gateway over a storage server elsewhere."""

    def __init__(
        self,
        storage: RemoteStorage,
        gateway: GatewaySettings,
        credentials: Sequence[Credential],
        listen: Listen,
    ) -> None:
        self._storage = storage
        self._gateway = Gateway(self._storage, CredentialBook(credentials), gateway)
        self._listen = listen
        self._runner: web.ServerRunner | None = None
        self.url = ""

    async def start(self) -> None:
        await self._storage.start()
        self._runner, self.url = await _listen(self._gateway.server(), self._listen)

    async def close(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
        await self._storage.close()


Server = Together | StorageServer | GatewayServer


def run(
    name: str,
    make_server: Callable[[], Server],
    *,
    until_stdin_ends: bool = False,
    read_scheduler: Callable[[], SchedulerSettings] | None = None,
) -> None:
    """Build the server on a uvloop event loop, say where it listens, and stop on SIGINT or SIGTERM; a worker also when
    whoever started it is gone. SIGHUP reads the scheduler's settings anew where there are any.
    """
    raise_file_limit()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_until_stopped(name, make_server, read_scheduler, until_stdin_ends=until_stdin_ends))


async def _until_stopped(
    name: str,
    make_server: Callable[[], Server],
    read_scheduler: Callable[[], SchedulerSettings] | None,
    *,
    until_stdin_ends: bool,
) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    loop.add_signal_handler(signal.SIGHUP, _log.info, "SIGHUP: there is nothing to read anew")
    if until_stdin_ends:
        threading.Thread(target=_wait_for_stdin, args=(loop, stop), daemon=True).start()
    server = make_server()
    try:
        await server.start()
        gc.collect()
        gc.freeze()  # a full collection holds the event loop: it need not go through what never goes
        if read_scheduler is not None and not isinstance(server, GatewayServer):  # UCX, once started, takes this signal
            loop.add_signal_handler(signal.SIGHUP, _reconfigure, server.storage, read_scheduler)
        print(f"{name} is listening on {server.url}", flush=True)
        await stop.wait()
        _log.info("stopping")
    finally:
        await server.close()


def _reconfigure(storage: EmbeddedStorage, read_scheduler: Callable[[], SchedulerSettings]) -> None:
    """Go by the file as it is now; a file that cannot be used changes nothing."""
    try:
        settings = read_scheduler()
    except Exception as error:
        _log.error("the scheduler goes on as it was: %s", error)
        return
    storage.pipeline.link.reconfigure(settings)
    _log.info("the scheduler goes by %s", settings)


def _wait_for_stdin(loop: asyncio.AbstractEventLoop, stop: asyncio.Event) -> None:
    while os.read(0, 4096):
        continue
    with contextlib.suppress(RuntimeError):  # the loop is closed already
        loop.call_soon_threadsafe(stop.set)


def raise_file_limit() -> None:
    """Lift the soft limit on open files to the hard one: a delivery keeps one descriptor per chunk file."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _refuse_taken(listen: Listen) -> None:
    """A port our own workers share would be shared with another server just as silently. Raises OSError."""
    with _bound(replace(listen, shares_port=False)) as probe:
        probe.listen()


def _bound(listen: Listen) -> socket.socket:
    family = socket.AF_INET6 if ":" in listen.host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if listen.shares_port:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        bound.bind((listen.host, listen.port))
    except OSError:
        bound.close()
        raise
    return bound


class _Site(web.SockSite):
    """aiohttp's, with a bound on how long a TLS handshake may take: until it is done, a connection is nobody's."""

    async def start(self) -> None:
        await web.BaseSite.start(self)
        loop = asyncio.get_running_loop()
        if self._runner.server is None:
            raise RuntimeError("the runner is not set up")
        timeout_s = HANDSHAKE_S if self._ssl_context is not None else None
        self._server = await loop.create_server(
            self._runner.server,
            sock=self._sock,
            ssl=self._ssl_context,
            backlog=self._backlog,
            ssl_handshake_timeout=timeout_s,
        )


async def _listen(server: web.Server, listen: Listen) -> tuple[web.ServerRunner, str]:
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
    tls = listen.tls.context() if listen.tls is not None else None
    site = _Site(runner, bound, backlog=BACKLOG, ssl_context=tls)
    await site.start()
    host = f"[{listen.host}]" if ":" in listen.host else listen.host
    return runner, f"{'http' if tls is None else 'https'}://{host}:{bound.getsockname()[1]}"
