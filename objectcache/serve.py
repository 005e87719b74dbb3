"""Running gateway and storage server, together or apart, until a signal ends them."""

from __future__ import annotations

import asyncio
import logging
import resource
import signal
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import uvloop
from aiohttp import web

from gateway.app import Gateway, GatewaySettings
from gateway.credentials import Credential, CredentialBook
from gateway.storage_client import RemoteStorage
from storage_server.http_api import StorageHttp
from storage_server.service import EmbeddedStorage
from storage_server.settings import StorageSettings

BACKLOG = 1024
SHUTDOWN_S = 5.0
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Listen:
    """Where to listen: host and port (0 picks a free one), or a Unix socket."""

    host: str = "127.0.0.1"
    port: int = 0
    socket_path: Path | None = None


class Together:
    """Gateway and storage server in one process, joined by a plain call."""

    def __init__(
        self, storage: StorageSettings, gateway: GatewaySettings, credentials: Sequence[Credential], listen: Listen
    ) -> None:
        self.storage = EmbeddedStorage(storage)
        self._gateway = Gateway(self.storage, CredentialBook(credentials), gateway)
        self._listen = listen
        self._runner: web.ServerRunner | None = None
        self.url = ""

    async def start(self) -> None:
        await self.storage.start()
        self._runner, self.url = await _listen(self._gateway.server(), self._listen)

    async def close(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
        await self.storage.close()


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
        endpoint: str,
        secret: bytes,
        gateway: GatewaySettings,
        credentials: Sequence[Credential],
        listen: Listen,
    ) -> None:
        self._storage = RemoteStorage(endpoint, secret)
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


def run(name: str, make_server: Callable[[], Server]) -> None:
    """Build the server on a uvloop event loop, say where it listens, and stop on SIGINT or SIGTERM."""
    raise_file_limit()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_until_signalled(name, make_server))


async def _until_signalled(name: str, make_server: Callable[[], Server]) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    server = make_server()
    try:
        await server.start()
        print(f"{name} is listening on {server.url}", flush=True)
        await stop.wait()
        _log.info("stopping")
    finally:
        await server.close()


def raise_file_limit() -> None:
    """Lift the soft limit on open files to the hard one: a delivery keeps one descriptor per chunk file."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


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
    family = socket.AF_INET6 if ":" in listen.host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    bound.bind((listen.host, listen.port))
    site = web.SockSite(runner, bound, backlog=BACKLOG)
    await site.start()
    host = f"[{listen.host}]" if family is socket.AF_INET6 else listen.host
    return runner, f"http://{host}:{bound.getsockname()[1]}"
