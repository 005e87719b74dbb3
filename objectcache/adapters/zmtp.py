"""Messages of a ZMQ socket of somebody who may be hostile (ZMTP 3.0, RFC 23, without a security mechanism).

libzmq bounds a frame and counts messages, but never adds up the frames of one message: whoever reaches a socket fills
its memory with one message that has no end. Here the frames of a message have bounds, each by its place, and nothing
is read ahead: whoever sends more than is taken waits for TCP.

    greeting and READY in both directions, then frames:   flags (1 byte) | length (1 or 8 bytes) | body
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import socket
import struct
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final
from weakref import WeakKeyDictionary

from objectcache.adapters.name_lookups import NameLookups

SIGNATURE: Final = b"\xff" + bytes(8) + b"\x7f"
GREETING: Final = SIGNATURE + b"\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
READY_BYTES_MAX: Final = 4096
COMMANDS_MAX: Final = 100
"""In a row. A peer of this version has none to send once it is ready."""
HANDSHAKE_S: Final = 5.0
CONNECT_S: Final = 5.0
MORE, LONG, COMMAND = 1, 2, 4
_KEEPALIVE: Final = ((socket.TCP_KEEPIDLE, 30), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 3))
"""A host that vanishes without a word is noticed after a minute."""
PUBLISHER_NAMES_MAX: Final = 64
"""So many names of publishers may be slow before others wait. They have places of their own, since engines choose them,
and connections to engines must not wait for those.
"""
_lookups: WeakKeyDictionary[asyncio.AbstractEventLoop, NameLookups] = WeakKeyDictionary()
_log = logging.getLogger(__name__)


class ZmtpError(ConnectionError):
    """The peer speaks something else, or more than it may."""


@dataclass(frozen=True, slots=True)
class FrameLimits:
    """The most bytes of each frame of a message, from the first one on; a message with more frames is refused."""

    nbytes: tuple[int, ...]


class ZmtpConnection:
    """A connection to one peer. Used by one task at a time."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self.is_trusted = False
        """Whether the peer has shown who it is: then it keeps its place."""

    @property
    def origin(self) -> str:
        """The host that the peer is on; for IPv6 its network, of which one host may have many addresses."""
        peer = self._writer.get_extra_info("peername")
        if not isinstance(peer, tuple):
            return ""
        address = ipaddress.ip_address(str(peer[0]).partition("%")[0])
        return str(address) if address.version == 4 else str(ipaddress.ip_network((address, 64), strict=False))

    async def shake_hands(self, kind: str, peers: Sequence[str]) -> None:
        """Greet as a socket of this kind; the peer must be one of `peers`. Raises ZmtpError, OSError."""
        try:
            async with asyncio.timeout(HANDSHAKE_S):
                self._writer.write(GREETING)
                greeting = await self._exactly(len(GREETING))
                if greeting[0] != 0xFF or greeting[9] != 0x7F or greeting[10] < 3:
                    raise ZmtpError("the peer does not speak ZMTP 3")
                if greeting[12:32].rstrip(b"\0") != b"NULL":
                    raise ZmtpError("the peer wants a security mechanism")
                body = b"\x05READY" + _property("Socket-Type", kind.encode())
                self._writer.write(bytes((COMMAND, len(body))) + body)
                flags, nbytes = await self._head()
                if not flags & COMMAND or nbytes > READY_BYTES_MAX:
                    raise ZmtpError("the peer does not say what it is")
                said = await self._exactly(nbytes)
                if not any(_property("Socket-Type", peer.encode()) in said for peer in peers):
                    raise ZmtpError(f"the peer is none of {', '.join(peers)}")
        except TimeoutError:
            raise ZmtpError("the peer does not greet") from None

    async def send(self, frames: Sequence[bytes]) -> None:
        """One message. Raises OSError."""
        last = len(frames) - 1
        for place, frame in enumerate(frames):
            more = MORE if place < last else 0
            long = len(frame) > 255
            head = struct.pack(">BQ", more | LONG, len(frame)) if long else bytes((more, len(frame)))
            self._writer.write(head + frame)
        await self._writer.drain()

    async def subscribe(self, topic: bytes) -> None:
        """Ask a PUB or XPUB for the messages whose first frame begins so. Raises OSError."""
        await self.send((b"\x01" + topic,))

    async def receive(self, limits: FrameLimits, may_go_on: Callable[[bytes], bool] | None = None) -> list[bytes]:
        """The next message. `may_go_on` says by its first frame whether the rest is read; else it is passed over, and
        the list has that frame only. Raises ZmtpError, OSError.
        """
        frames: list[bytes] = []
        command_count = 0
        is_wanted = True
        place = 0
        while True:
            flags, nbytes = await self._head()
            if flags & COMMAND:
                command_count += 1
                if command_count > COMMANDS_MAX or nbytes > READY_BYTES_MAX:
                    raise ZmtpError("too many commands, or too long ones")
                await self._exactly(nbytes)
                continue
            if place >= len(limits.nbytes):
                raise ZmtpError(f"a message of more than {len(limits.nbytes)} frames")
            if nbytes > limits.nbytes[place]:
                raise ZmtpError(f"frame {place} has {nbytes} bytes, of at most {limits.nbytes[place]}")
            frame = await self._exactly(nbytes)
            if is_wanted:
                frames.append(frame)
            if place == 0 and may_go_on is not None:
                is_wanted = may_go_on(frame)
            place += 1
            if not flags & MORE:
                return frames

    def close(self) -> None:
        """End the connection at once."""
        self._writer.transport.abort()

    async def _head(self) -> tuple[int, int]:
        """Flags and length of the next frame."""
        flags = (await self._exactly(1))[0]
        if flags & ~(MORE | LONG | COMMAND):
            raise ZmtpError("the peer sends frames with unknown flags")
        return flags, int.from_bytes(await self._exactly(8 if flags & LONG else 1), "big")

    async def _exactly(self, nbytes: int) -> bytes:
        try:
            return await self._reader.readexactly(nbytes)
        except asyncio.IncompleteReadError:
            raise ZmtpError("the peer has hung up") from None


def _property(name: str, value: bytes) -> bytes:
    return bytes((len(name),)) + name.encode() + struct.pack(">I", len(value)) + value


def place_of(endpoint: str) -> tuple[str, int] | str:
    """Host and port of `tcp://host:port`, or the path of `ipc://path`. Raises ValueError."""
    kind, separator, rest = endpoint.partition("://")
    if kind == "ipc" and separator and rest:
        return rest
    host, colon, port = rest.rpartition(":")
    if kind != "tcp" or not colon or not host or not port.isdecimal() or not 0 < int(port) < 65_536:
        raise ValueError(f"{endpoint[:200]!r} is no endpoint: tcp://HOST:PORT or ipc://PATH")
    return host.removeprefix("[").removesuffix("]"), int(port)


@contextlib.asynccontextmanager
async def connected(endpoint: str, kind: str, peers: Sequence[str]) -> AsyncIterator[ZmtpConnection]:
    """A connection to a peer, until the block ends. Raises ZmtpError, OSError, ValueError."""
    place = place_of(endpoint)
    try:
        async with asyncio.timeout(CONNECT_S):
            if isinstance(place, str):
                reader, writer = await asyncio.open_unix_connection(place)
            else:
                reader, writer = await asyncio.open_connection(await _address_of(*place), place[1])
                _keep_alive(writer)
    except TimeoutError:
        raise ZmtpError(f"{endpoint} does not answer") from None
    connection = ZmtpConnection(reader, writer)
    try:
        await connection.shake_hands(kind, peers)
        yield connection
    finally:
        connection.close()


@contextlib.asynccontextmanager
async def bound(
    endpoint: str, serve: Callable[[ZmtpConnection], Coroutine[Any, Any, None]], connections_max: int
) -> AsyncIterator[None]:
    """Peers may connect to this endpoint until the block ends. Where there are `connections_max` of them, one that has
    not shown who it is gives its place up to a newcomer. `serve` greets a peer and listens to it. Raises OSError,
    ValueError.
    """
    place = place_of(endpoint)
    served_by: dict[asyncio.Task[None], ZmtpConnection] = {}

    async def served(connection: ZmtpConnection) -> None:
        try:
            await serve(connection)
        except OSError as error:
            _log.debug("a peer of %s: %s", endpoint, error)
        finally:
            connection.close()

    def on_connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = ZmtpConnection(reader, writer)
        if len(served_by) >= connections_max:
            leaving = _leaving(served_by)
            if leaving is None:
                connection.close()
                return
            served_by.pop(leaving).close()
            leaving.cancel()
        if not isinstance(place, str):
            _keep_alive(writer)
        task = asyncio.create_task(served(connection))
        served_by[task] = connection
        task.add_done_callback(lambda ended: served_by.pop(ended, None))

    if isinstance(place, str):
        server = await asyncio.start_unix_server(on_connected, place)
    else:
        server = await asyncio.start_server(on_connected, place[0].replace("*", ""), place[1])
    try:
        yield
    finally:
        server.close()
        tasks = list(served_by)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _leaving(served_by: Mapping[asyncio.Task[None], ZmtpConnection]) -> asyncio.Task[None] | None:
    """The one that waits longest of the host that has most connections which have not shown who they are; None where
    all have. A host pushes only its own connections out, as long as it has more of them than others.
    """
    unknown = [(task, connection.origin) for task, connection in served_by.items() if not connection.is_trusted]
    counts = Counter(origin for _, origin in unknown)
    return next((task for task, origin in unknown if counts[origin] == max(counts.values())), None)


async def _address_of(host: str, port: int) -> str:
    """Names are looked up in threads of their own: a name server that does not answer must not hold up other work."""
    with contextlib.suppress(ValueError):
        return str(ipaddress.ip_address(host))
    loop = asyncio.get_running_loop()
    lookups = _lookups.get(loop)
    if lookups is None:
        lookups = _lookups[loop] = NameLookups(PUBLISHER_NAMES_MAX)
    found = await lookups.find(host, port, kind=socket.SOCK_STREAM)
    return str(found[0][4][0])


def _keep_alive(writer: asyncio.StreamWriter) -> None:
    wire = writer.get_extra_info("socket")
    if wire is not None:
        wire.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEPALIVE:
            wire.setsockopt(socket.IPPROTO_TCP, name, value)
