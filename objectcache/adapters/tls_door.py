"""TLS in front of a LimitedServer: handshakes count from their accept on, and nobody's records stop the event loop.

The event loop's own TLS server tells nobody of a connection before its handshake is done, and makes an object of each
record. A client that sends each byte in a record of its own has 11,000 of them in one read, which take 0.2 s. Here each
connection counts from its accept on. Its decrypted bytes go into a buffer whose size follows the time that it
takes to fill it, and all connections together have TURN_S of each pass of the loop to fill theirs.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Final, cast

from objectcache.adapters.accepting import accept
from objectcache.adapters.limited_server import LimitedServer

HANDSHAKE_S: Final = 10.0
HANDSHAKES_MAX: Final = 512
"""A handshake may hold some 600 KiB: a client's first message may be long, and is held thrice."""
CONNECTION_BYTES: Final = 512 << 10
"""The memory that a connection of uvloop with TLS may have: two buffers."""
TURN_S: Final = 0.005
FAST_S, SLOW_S = 0.0003, 0.001
"""A buffer that fills faster doubles; one that takes longer to fill becomes a quarter."""
READ_BYTES_MIN, READ_BYTES_FIRST, READ_BYTES_MAX = 8, 1 << 10, 256 << 10
CHOSEN_MAX = 8
ACCEPTED_MAX = 16
"""So many connections are accepted in one pass of the loop: a handshake takes a millisecond."""
_log = logging.getLogger(__name__)


class TlsDoor:
    """Accepts connections for `server`, whose handshakes have HANDSHAKE_S. New ones use `context`, which may be
    replaced. Used on one event loop.
    """

    def __init__(self, server: LimitedServer, context: ssl.SSLContext) -> None:
        self.context = context
        self._server = server
        self.shares = ReadShares()
        """The share of each connection in the time to decrypt."""
        self._handshakes: dict[str, OrderedDict[asyncio.Task[Any], socket.socket]] = {}
        """By address, the oldest one first."""
        self.handshake_count = 0

    async def serve(self, listener: socket.socket) -> None:
        """Accept connections of a listening socket that does not block, for ever. At the end, no handshake goes on."""
        try:
            await accept(listener, self._begin, ACCEPTED_MAX)
        finally:
            tasks = [task for own in self._handshakes.values() for task in own]
            for own in self._handshakes.values():
                for accepted in own.values():
                    _hang_up(accepted)
            await asyncio.gather(*tasks, return_exceptions=True)

    def _begin(self, accepted: socket.socket, address: str) -> None:
        """Where there are too many handshakes, the oldest of the address that has most ends, so that a crowd of one
        address keeps no other out. Where all places are taken, the longest idle connection gives its place up.
        """
        server = self._server
        is_full = self.handshake_count + server.open_count >= server.connections_max
        if self.handshake_count >= HANDSHAKES_MAX or (
            is_full and not server.makes_place(asyncio.get_running_loop().time()) and self.handshake_count
        ):
            counts = {each: len(own) for each, own in self._handshakes.items()}
            most = max(counts.values())
            crowd = address if counts.get(address, 0) >= most else max(counts, key=lambda each: counts[each])
            oldest, held = next(iter(self._handshakes[crowd].items()))
            self._end(oldest, crowd)
            _hang_up(held)
        handshake = asyncio.get_running_loop().create_task(self._shake(accepted, address))
        self._handshakes.setdefault(address, OrderedDict())[handshake] = accepted
        self.handshake_count += 1
        handshake.add_done_callback(lambda task: self._end(task, address))

    def _end(self, handshake: asyncio.Task[Any] | None, address: str) -> None:
        own = self._handshakes.get(address)
        if own is not None and handshake is not None and handshake in own:
            del own[handshake]
            self.handshake_count -= 1
            if not own:
                del self._handshakes[address]

    async def _shake(self, accepted: socket.socket, address: str) -> None:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()

        def reader() -> DecryptedReader:
            # the handshake counts no more when the connection does
            return DecryptedReader(
                self.shares, cast(asyncio.Protocol, self._server()), lambda: self._end(task, address)
            )

        try:
            await loop.connect_accepted_socket(reader, accepted, ssl=self.context, ssl_handshake_timeout=HANDSHAKE_S)
        except OSError as error:  # SSLError is one
            _log.debug("a TLS handshake has failed: %s", error)


def _hang_up(accepted: socket.socket) -> None:
    """End a connection, whose handshake then fails by itself."""
    with contextlib.suppress(OSError):
        accepted.shutdown(socket.SHUT_RDWR)


class ReadShares:
    """Decides how many bytes a connection may decrypt now. Those that get little have more in one of the next passes of
    the loop, in the order in which they asked.
    """

    def __init__(self) -> None:
        self._buffer = bytearray(READ_BYTES_MAX)
        self._spent_s = 0.0
        self._denied: OrderedDict[DecryptedReader, None] = OrderedDict()
        self._chosen: set[DecryptedReader] = set()
        self._is_called = False

    def buffer(self, reader: DecryptedReader) -> memoryview:
        """The place for the next bytes, which is everybody's: whoever has filled it takes its bytes at once."""
        self._call()
        is_free = not self._denied and not self._chosen and self._spent_s < TURN_S
        if is_free or reader in self._chosen:
            self._chosen.discard(reader)
            return memoryview(self._buffer)[: reader.read_bytes]
        self._denied.setdefault(reader)
        return memoryview(self._buffer)[:READ_BYTES_MIN]

    def take(self, nbytes: int, took_s: float) -> bytes:
        """The bytes that the buffer was filled with, which took so long."""
        self._spent_s += took_s
        return bytes(memoryview(self._buffer)[:nbytes])

    def forget(self, reader: DecryptedReader) -> None:
        """A connection is over."""
        self._denied.pop(reader, None)
        self._chosen.discard(reader)

    def _call(self) -> None:
        if not self._is_called:
            self._is_called = True
            asyncio.get_running_loop().call_soon(self._next_pass)

    def _next_pass(self) -> None:
        self._is_called = False
        self._spent_s = 0.0
        self._chosen = {self._denied.popitem(last=False)[0] for _ in range(min(CHOSEN_MAX, len(self._denied)))}
        if self._chosen:  # those that do not come in this pass ask for nothing
            self._call()


class DecryptedReader(asyncio.BufferedProtocol):
    """Passes the decrypted bytes of a connection on to its protocol."""

    def __init__(self, shares: ReadShares, protocol: asyncio.Protocol, on_made: Callable[[], None]) -> None:
        self._on_made = on_made
        self._shares = shares
        self._protocol = protocol
        self._began_s = 0.0
        self.read_bytes = READ_BYTES_FIRST

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._on_made()
        self._protocol.connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._shares.forget(self)
        self._protocol.connection_lost(exc)

    def pause_writing(self) -> None:
        self._protocol.pause_writing()

    def resume_writing(self) -> None:
        self._protocol.resume_writing()

    def eof_received(self) -> bool | None:
        return self._protocol.eof_received()

    def get_buffer(self, sizehint: int) -> memoryview:
        buffer = self._shares.buffer(self)
        self._began_s = time.perf_counter()
        return buffer

    def buffer_updated(self, nbytes: int) -> None:
        took_s = time.perf_counter() - self._began_s
        data = self._shares.take(nbytes, took_s)
        if took_s > SLOW_S:
            self.read_bytes = max(READ_BYTES_MIN, self.read_bytes // 4)
        elif took_s < FAST_S and nbytes >= self.read_bytes:
            self.read_bytes = min(READ_BYTES_MAX, 2 * self.read_bytes)
        self._protocol.data_received(data)
