"""One connection with TLS, of a server or a client. Its records are decrypted a few at a time, in turns with those of
other connections, in whatever state the connection is.

The TLS of event loops decrypts whatever has come. The peer decides how much work that is: a record of one byte costs as
much as one of a kilobyte, a record that changes keys gives no byte at all, and a connection that was closed here is
read on until the peer closes it, too. Here a piece has RECORDS_MAX records, all connections together have a part of
each pass of the loop (`adapters.pieces`), and a connection that was closed here decrypts nothing more.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import time
from collections.abc import Callable
from typing import Any, Final, cast

from objectcache.adapters.pieces import ParsingTurns

RECORDS_MAX: Final = 64
"""A piece has so many records. Each costs up to 20 µs."""
PIECE_BYTES: Final = 64 << 10
"""No record begins behind so many bytes of a piece."""
WRITTEN_BYTES: Final = 64 << 10
"""So much is encrypted at once. The memory of OpenSSL's buffer never shrinks: a connection has the memory of its
largest piece as long as it lives.
"""
ANSWERS_BYTES_MAX: Final = 64 << 10
"""TLS itself may have said so much, in its handshake and to keys that change, that the peer has not taken."""
CONNECTING_S: Final = 60.0
"""A server has so long for its part of a handshake, as with the loop's own TLS."""
_HEAD_BYTES: Final = 5
"""A record's type, version and length (RFC 8446, section 5.1)."""


class WaitingRecords:
    """The bytes of a connection that wait to be decrypted. Pure."""

    def __init__(self) -> None:
        self._data = b""
        self._rest = 0
        """The bytes that are still to come of the last record that was given."""

    def add(self, data: bytes) -> None:
        """Take bytes that have come."""
        self._data += data

    def piece(self) -> bytes:
        """The next records, as far as their bytes are there; empty where not even the head of one is."""
        data, end, count = self._data, self._rest, 0
        while count < RECORDS_MAX and end < PIECE_BYTES and end + _HEAD_BYTES <= len(data):
            end += _HEAD_BYTES + int.from_bytes(data[end + 3 : end + _HEAD_BYTES])
            count += 1
        taken = min(end, len(data))
        self._rest = end - taken
        self._data = data[taken:]
        return data[:taken]

    @property
    def has_piece(self) -> bool:
        """Whether `piece` gives something now."""
        return len(self._data) >= (1 if self._rest else _HEAD_BYTES)


class TlsConnection(asyncio.Protocol):
    """Stands between a connection and `protocol`, which is told of the connection when the handshake is done: `on_open`
    is called just before that. `opened` is done when the handshake has ended, with the error of one that failed. A
    client names the server that it expects. Connections for which `group_of` has one name have one turn together. Used
    on one event loop.
    """

    def __init__(
        self,
        context: ssl.SSLContext,
        turns: ParsingTurns,
        protocol: asyncio.Protocol,
        *,
        server_name: str | None = None,
        on_open: Callable[[], None] = lambda: None,
        group_of: Callable[[Any], object] = lambda peer: peer,
    ) -> None:
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._is_client = server_name is not None
        self.tls = context.wrap_bio(
            self._incoming, self._outgoing, server_side=not self._is_client, server_hostname=server_name
        )
        self.app_transport = TlsTransport(self)
        self.opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.transport: asyncio.Transport | None = None
        self.group: object = self
        self._turns = turns
        self._protocol = protocol
        self._on_open = on_open
        self._group_of = group_of
        self._records = WaitingRecords()
        self._answers_bytes = 0
        self._answered_s: float | None = None
        """When TLS itself has last said something, by the loop's clock; None before that."""
        self._error: ssl.SSLError | None = None
        """The failure of TLS that has ended the connection."""
        self._is_queued = self._is_held = self._is_open = self._is_closed = False

    @property
    def is_closing(self) -> bool:
        """Whether nothing is read or written any more."""
        return self._is_closed or self.transport is None or self.transport.is_closing()

    @property
    def is_held(self) -> bool:
        """Whether the protocol takes no bytes now."""
        return self._is_held

    def awaited_since_s(self, began_s: float) -> float | None:
        """Since when the peer of a handshake that began at `began_s` is waited for; None where it waits for its turn
        here. The peer is waited for until all has come of what it has to say next: a byte now and then is no progress.
        """
        if self._is_queued:
            return None
        return began_s if self._answered_s is None else self._answered_s

    @property
    def has_answered(self) -> bool:
        """Whether TLS has said something itself, as it does to a client's greeting when all of it has come."""
        return self._answered_s is not None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = self.app_transport.wire = cast(asyncio.Transport, transport)
        peer = transport.get_extra_info("peername")
        self.group = self._group_of(peer) if peer else self
        if self._is_client:
            self._advance()

    def data_received(self, data: bytes) -> None:
        if self.is_closing:
            return
        self._records.add(data)
        if not self._is_queued and not self._is_held and self._turns.has_time():
            began_s = time.perf_counter()
            self._advance()
            self._turns.spend(began_s)
        if self._is_held or self._records.has_piece:  # nothing more is read while there is something to decrypt
            self._pause()
            self._queue()

    def parse_piece(self) -> bool:
        """Decrypt the next piece of what waits; whether there is more that may be decrypted."""
        self._is_queued = False
        if not self.is_closing and not self._is_held:
            self._advance()
        may_go_on = not self.is_closing and not self._is_held
        self._is_queued = may_go_on and self._records.has_piece
        if may_go_on and not self._is_queued and self.transport is not None:
            self.transport.resume_reading()
        return self._is_queued

    def eof_received(self) -> None:
        """A server that ends its side without TLS's own end has been cut off, or killed: what it has sent may not be
        all (RFC 9112, section 9.8).
        """
        if self._is_client and not self.is_closing:
            self._error = ssl.SSLEOFError(ssl.SSLErrorNumber.SSL_ERROR_EOF, "the server has ended within TLS")

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_closed, self.transport = True, None
        self._end_opening(exc or ConnectionResetError("the peer has hung up within the handshake"))
        if self._is_open:
            self._protocol.connection_lost(exc or self._error)

    def pause_writing(self) -> None:
        if self._is_open:
            self._protocol.pause_writing()

    def resume_writing(self) -> None:
        if self._is_open:
            self._protocol.resume_writing()

    def hold(self, *, is_held: bool) -> None:
        """The protocol takes no bytes now, or takes them again."""
        self._is_held = is_held
        if is_held:
            self._pause()
        elif not self.is_closing:
            self._queue()

    def write(self, data: bytes | bytearray | memoryview[Any]) -> None:
        """Encrypt bytes, and send them."""
        if self.is_closing or not data:
            return
        view = memoryview(data).cast("B")
        while view:
            view = view[self.tls.write(view[:WRITTEN_BYTES]) :]
            self._flush()

    def close(self) -> None:
        """Send what was written, and close the connection, whatever the peer still sends."""
        if self.is_closing or self.transport is None:
            return
        with contextlib.suppress(ssl.SSLError):  # the peer's own end is not waited for
            self.tls.unwrap()
        self._flush()
        self._is_closed = True
        self.transport.close()

    def abort(self) -> None:
        """End the connection at once."""
        self._is_closed = True
        if self.transport is not None:
            self.transport.abort()

    def _advance(self) -> None:
        """Decrypt a piece, and do what it says."""
        self._incoming.write(self._records.piece())
        try:
            if not self._is_open:
                self.tls.do_handshake()
                self._open()
            self._read()
        except ssl.SSLWantReadError:
            self._answer()
        except ssl.SSLError as error:
            self._fail(error)

    def _fail(self, error: ssl.SSLError) -> None:
        """Say why, and end the connection. A peer that takes nothing is not waited for."""
        takes_nothing = self.app_transport.get_write_buffer_size() > 0
        self._flush()
        self._end_opening(error)
        self._error, self._is_closed = error, True
        if self.transport is not None:
            (self.transport.abort if takes_nothing else self.transport.close)()

    def _open(self) -> None:
        self._flush()
        self._is_open = True
        self._on_open()
        self._protocol.connection_made(self.app_transport)
        self._end_opening(None)

    def _read(self) -> None:
        """Give the protocol what was decrypted. Raises ssl.SSLError."""
        found: list[bytes] = []
        try:
            while data := self.tls.read(PIECE_BYTES):
                found.append(data)
        finally:
            if found and not self.is_closing:
                self._protocol.data_received(b"".join(found))
        if not self.is_closing and not self._is_held:  # the peer has closed its side, and the protocol has all bytes
            self._protocol.eof_received()
            self.close()

    def _answer(self) -> None:
        """Send what TLS itself says. A peer that makes it say more and more, and takes none of it, is cut."""
        if self.transport is None:
            return
        if not self.transport.get_write_buffer_size():
            self._answers_bytes = 0
        if self._outgoing.pending:
            self._answered_s = asyncio.get_running_loop().time()
        self._answers_bytes += self._outgoing.pending
        self._flush()
        if self._answers_bytes > ANSWERS_BYTES_MAX:
            self.abort()

    def _flush(self) -> None:
        data = self._outgoing.read()
        if data and self.transport is not None:
            self.transport.write(data)

    def _pause(self) -> None:
        if not self.is_closing and self.transport is not None:
            self.transport.pause_reading()

    def _queue(self) -> None:
        if not self._is_queued and not self._is_held and not self.is_closing:
            self._is_queued = True
            self._turns.add(self)

    def _end_opening(self, error: Exception | None) -> None:
        if self.opened.done():
            return
        if error is None:
            self.opened.set_result(None)
        else:
            self.opened.set_exception(error)
            self.opened.exception()  # nobody may wait for it


class TlsTransport(asyncio.Transport):
    """The side of a connection that its protocol sees."""

    def __init__(self, connection: TlsConnection) -> None:
        super().__init__()
        self._connection = connection
        self.wire: asyncio.Transport
        """The connection without TLS."""

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        tls = self._connection.tls
        match name:
            case "sslcontext":
                return tls.context
            case "ssl_object":
                return tls
            case "peercert":
                return tls.getpeercert()
            case "cipher":
                return tls.cipher()
        return self.wire.get_extra_info(name, default)

    def is_closing(self) -> bool:
        return self._connection.is_closing

    def close(self) -> None:
        self._connection.close()

    def abort(self) -> None:
        self._connection.abort()

    def is_reading(self) -> bool:
        return not self._connection.is_held and not self._connection.is_closing

    def pause_reading(self) -> None:
        self._connection.hold(is_held=True)

    def resume_reading(self) -> None:
        self._connection.hold(is_held=False)

    def write(self, data: bytes | bytearray | memoryview[Any]) -> None:
        self._connection.write(data)

    def can_write_eof(self) -> bool:
        return False

    def get_write_buffer_size(self) -> int:
        return self.wire.get_write_buffer_size()

    def get_write_buffer_limits(self) -> tuple[int, int]:
        return self.wire.get_write_buffer_limits()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self.wire.set_write_buffer_limits(high, low)


async def connect_tls(
    sock: Any, context: ssl.SSLContext, turns: ParsingTurns, make: Callable[[], asyncio.Protocol], server_name: str
) -> tuple[asyncio.Transport, asyncio.Protocol]:
    """Shake hands as a client on a connected socket that does not block. Raises OSError, of which ssl.SSLError and
    TimeoutError are such.
    """
    protocol = make()
    connection = TlsConnection(context, turns, protocol, server_name=server_name)
    try:
        async with asyncio.timeout(CONNECTING_S):
            await asyncio.get_running_loop().create_connection(lambda: connection, sock=sock)
            await asyncio.shield(connection.opened)
    except BaseException:
        connection.abort()
        raise
    return connection.app_transport, protocol
