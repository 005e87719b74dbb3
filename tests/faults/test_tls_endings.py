"""One side of a TLS connection sends, and is told, the right things. The other side is in memory."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from pathlib import Path
from typing import cast

import pytest

from objectcache.adapters.pieces import ParsingTurns
from objectcache.adapters.tls_connection import WRITTEN_BYTES, TlsConnection
from tests.support.certificates import certificate
from tests.support.waiting import until


class Wire(asyncio.Transport):
    """The connection without TLS. It keeps the parts that were written."""

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[bytes] = []
        self.is_closed = False

    def get_extra_info(self, name: str, default: object = None) -> object:
        return default

    def get_write_buffer_size(self) -> int:
        return 0

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.parts.append(bytes(data))

    def is_closing(self) -> bool:
        return self.is_closed

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    def close(self) -> None:
        self.is_closed = True

    def abort(self) -> None:
        self.is_closed = True


class Heard(asyncio.Protocol):
    """Notes what it is told. It reads nothing more behind the first bytes, until it is told to go on."""

    def __init__(self) -> None:
        self.said: list[object] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self.said.append(data)
        self.transport.pause_reading()

    def eof_received(self) -> None:
        self.said.append("end")

    def connection_lost(self, exc: BaseException | None) -> None:
        self.said.append(type(exc))


class Pair:
    """A connection of a server, and its client in memory."""

    def __init__(self, folder: Path) -> None:
        own = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        own.load_cert_chain(*certificate(folder, "wire", "127.0.0.1"))
        trust = ssl.create_default_context(cafile=str(folder / "wire.pem"))
        self.wire, self.heard = Wire(), Heard()
        self.connection = TlsConnection(own, ParsingTurns(), self.heard)
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.client = trust.wrap_bio(self._incoming, self._outgoing, server_hostname="127.0.0.1")
        self.connection.connection_made(self.wire)

    @classmethod
    async def opened(cls, folder: Path) -> Pair:
        """A pair that has shaken hands. On a slow machine the records wait for a later pass of the event loop."""
        pair = cls(folder)
        while not pair.connection.opened.done():
            with contextlib.suppress(ssl.SSLWantReadError):
                pair.client.do_handshake()
            pair.send()
            pair.take()
            await asyncio.sleep(0)
        return pair

    def send(self, more: bytes = b"") -> None:
        """Give the server what the client has written, and `more` behind it."""
        self.connection.data_received(self._outgoing.read() + more)

    def take(self) -> None:
        """Give the client what the server has written."""
        self._incoming.write(b"".join(self.wire.parts))
        self.wire.parts.clear()


async def test_a_long_answer_is_encrypted_a_piece_at_a_time(tmp_path: Path) -> None:
    """A listing of 3 MB left each connection, also one that was idle, with 6 MB of OpenSSL's buffer."""
    pair, answer = await Pair.opened(tmp_path), bytes(range(256)) * 4096
    pair.connection.write(memoryview(answer).cast("H"))
    assert max(map(len, pair.wire.parts)) < 1.1 * WRITTEN_BYTES
    pair.take()
    came = b""
    while len(came) < len(answer):
        came += pair.client.read(1 << 20)
    assert came == answer


async def test_the_end_is_told_when_the_protocol_takes_bytes_again(tmp_path: Path) -> None:
    """A protocol that was told of the end within its pause dropped the bytes that it had not parsed."""
    pair = await Pair.opened(tmp_path)
    pair.client.write(b"the last bytes")
    with contextlib.suppress(ssl.SSLWantReadError):
        pair.client.unwrap()
    pair.send()
    await until(lambda: bool(pair.heard.said))
    assert pair.heard.said == [b"the last bytes"]
    assert not pair.wire.is_closed
    pair.heard.transport.resume_reading()
    await until(lambda: pair.wire.is_closed)
    assert pair.heard.said == [b"the last bytes", "end"]


async def test_a_protocol_is_told_that_bytes_were_no_tls(tmp_path: Path) -> None:
    """An answer without a length ended as if it were whole."""
    pair = await Pair.opened(tmp_path)
    pair.send(b"\x17\x03\x03\x00\x28" + bytes(40))
    await until(lambda: pair.wire.is_closed)
    pair.connection.connection_lost(None)
    assert len(pair.heard.said) == 1
    assert issubclass(cast(type, pair.heard.said[0]), ssl.SSLError)


@pytest.mark.parametrize("has_end", [True, False])
async def test_a_client_is_told_that_its_server_has_ended_without_the_end_of_tls(tmp_path: Path, has_end: bool) -> None:
    """An answer without a length, of an engine that was killed, was taken for a whole one."""
    own = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    own.load_cert_chain(*certificate(tmp_path, "wire", "127.0.0.1"))
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    server = own.wrap_bio(incoming, outgoing, server_side=True)
    trust = ssl.create_default_context(cafile=str(tmp_path / "wire.pem"))
    wire, heard = Wire(), Heard()
    connection = TlsConnection(trust, ParsingTurns(), heard, server_name="127.0.0.1")
    connection.connection_made(wire)
    while not connection.opened.done() or wire.parts:
        incoming.write(b"".join(wire.parts))
        wire.parts.clear()
        with contextlib.suppress(ssl.SSLWantReadError):
            server.do_handshake()
        connection.data_received(outgoing.read())
        await asyncio.sleep(0)
    if has_end:
        with contextlib.suppress(ssl.SSLWantReadError):
            server.unwrap()
        connection.data_received(outgoing.read())
        await until(lambda: wire.is_closed)
    connection.eof_received()
    connection.connection_lost(None)
    assert heard.said == (["end", type(None)] if has_end else [ssl.SSLEOFError])
