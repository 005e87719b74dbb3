"""The addresses that servers listen at, and their TLS, whose files are read anew while they run."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
import ssl
from dataclasses import dataclass, replace
from pathlib import Path

from aiohttp import web

from objectcache.adapters.accepting import Door
from objectcache.adapters.limited_server import LimitedServer
from objectcache.adapters.tls_door import CONNECTION_BYTES, TlsDoor
from objectcache.cli.config import ConfigError
from objectcache.cli.rereading import Apply

BACKLOG = 4096
SHUTDOWN_S = 5.0
TLS_PART = 8
"""Connections with TLS have this part of the host's memory at most."""
PORT_WAIT_S = 5.0
"""The kernel takes a while to end the workers of a killed server: a start waits so long for their port."""
PORT_TRY_S = 0.1
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


async def refuse_taken(listen: Listen) -> None:
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


_doors: list[tuple[Tls, TlsDoor]] = []
"""The TLS doors of this process, with the files that their contexts were made from."""


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


def renewed_tls() -> Apply[object]:
    """New connections get what the files have now: a context that was changed would go on to have its old key beside a
    new one of another kind. Raises OSError.
    """
    renewed = [(door, _fresh(tls, door.context)) for tls, door in _doors]

    def renew(_: object) -> None:
        for door, context in renewed:
            door.context = context

    return renew


def _fresh(tls: Tls, before: ssl.SSLContext) -> ssl.SSLContext:
    context = tls.context()
    if tls.client_ca is not None and context.get_ca_certs(True) != before.get_ca_certs(True):
        raise OSError(f"{tls.client_ca} has other certificates: start anew, so that those before count no more")
    return context
