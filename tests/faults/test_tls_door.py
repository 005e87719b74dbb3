"""Hostile clients before and behind a TLS handshake, on both event loops."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest
import uvloop
from aiohttp import web

from objectcache.adapters import tls_connection, tls_door
from objectcache.adapters.deadlines import ConnectionLimits
from objectcache.adapters.limited_server import LimitedServer
from objectcache.adapters.name_lookups import ServerLoop
from objectcache.adapters.pieces import ParsingTurns
from objectcache.adapters.tls_connection import ANSWERS_BYTES_MAX, RECORDS_MAX, TlsConnection, WaitingRecords
from objectcache.adapters.tls_door import TlsDoor
from tests.support.certificates import certificate
from tests.support.key_updates import KeyUpdates
from tests.support.waiting import LIMIT_S, until

LOOPS = pytest.mark.parametrize("make_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
MakeLoop = Callable[[], asyncio.AbstractEventLoop]
RECORD_BYTES = 5 + 1 + 1 + 16
"""A record of one byte in TLS 1.3 has a head, the byte, its type and a tag."""
LIMITS = ConnectionLimits(30.0, 75.0, 60.0, 64)


@dataclass
class Bed:
    """A server that answers each request with the bytes that came."""

    door: TlsDoor
    server: LimitedServer
    port: int
    trust: ssl.SSLContext

    def url(self, path: str = "/") -> str:
        return f"https://127.0.0.1:{self.port}{path}"


async def echo(http: web.BaseRequest) -> web.Response:
    return web.Response(body=await http.read())


def context(folder: Path, name: str) -> ssl.SSLContext:
    made = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    made.load_cert_chain(*certificate(folder, name, "127.0.0.1"))
    return made


@asynccontextmanager
async def bed(folder: Path) -> AsyncIterator[Bed]:
    server = LimitedServer(echo, lambda error: web.Response(status=400, text=str(error)), LIMITS)
    door = TlsDoor(server, context(folder, "door"))
    with socket.create_server(("127.0.0.1", 0), backlog=512) as listener:
        listener.setblocking(False)
        accepting = asyncio.create_task(door.serve(listener))
        trust = ssl.create_default_context(cafile=str(folder / "door.pem"))
        yield Bed(door, server, listener.getsockname()[1], trust)
        accepting.cancel()
        await asyncio.gather(accepting, return_exceptions=True)
    await server.shutdown(1.0)


def run(make_loop: MakeLoop, folder: Path, story: Callable[[Bed], Awaitable[None]]) -> None:
    async def told() -> None:
        async with bed(folder) as made:
            await story(made)

    with asyncio.Runner(loop_factory=make_loop) as runner:
        runner.run(told())


@LOOPS
def test_large_bodies_come_and_go_whole(make_loop: MakeLoop, tmp_path: Path) -> None:
    async def story(made: Bed) -> None:
        body = bytes(range(256)) * 4000
        async with aiohttp.ClientSession() as http:

            async def once(at: int) -> bytes:
                async with http.put(made.url(), data=body + bytes([at]), ssl=made.trust) as answer:
                    return await answer.read()

            assert await asyncio.gather(*map(once, range(8))) == [body + bytes([at]) for at in range(8)]

    run(make_loop, tmp_path, story)


@LOOPS
def test_records_of_one_byte_do_not_stop_the_loop(
    make_loop: MakeLoop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A quarter of a megabyte of them was read in one pass of the loop, by each connection."""
    pieces: list[int] = []
    given = WaitingRecords.piece

    def counted(records: WaitingRecords) -> bytes:
        piece = given(records)
        pieces.append(len(piece))
        return piece

    monkeypatch.setattr(WaitingRecords, "piece", counted)

    async def story(made: Bed) -> None:
        head = b"PUT / HTTP/1.1\r\nHost: h\r\nContent-Length: 6000\r\n\r\n"
        answers = await asyncio.gather(*(asyncio.to_thread(_in_records_of_one, made, head, 6000) for _ in range(8)))
        assert answers == [b"x" * 6000] * 8

    run(make_loop, tmp_path, story)
    assert sum(pieces) > 8 * 6000 * RECORD_BYTES
    assert max(pieces) <= RECORDS_MAX * 2 * RECORD_BYTES  # beside records of one byte there are some of the handshake


@LOOPS
def test_a_connection_that_was_closed_here_is_closed_whatever_its_client_sends(
    make_loop: MakeLoop, tmp_path: Path
) -> None:
    """It was read on for 30 s, whatever came: one connection stopped the loop for three seconds, again and again."""

    async def story(made: Bed) -> None:
        head = b"GET / HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n"
        async with asyncio.timeout(15.0):
            await asyncio.to_thread(_goes_on_sending, made, head)
        await until(lambda: made.server.open_count == 0)

    run(make_loop, tmp_path, story)


def _goes_on_sending(made: Bed, head: bytes) -> None:
    """Send records of one byte behind a request, without an answer to the server's end, until the connection ends."""
    tls, outgoing, sock, _ = _shaken(made)
    with sock, contextlib.suppress(ConnectionError):
        tls.write(head)
        while True:
            tls.write(b"x")
            sock.sendall(outgoing.read())


def _in_records_of_one(made: Bed, head: bytes, count: int) -> bytes:
    """The body of the answer to a request whose body came one byte in each record, all at once."""
    tls, outgoing, sock, incoming = _shaken(made)
    with sock:
        tls.write(head)
        for _ in range(count):
            tls.write(b"x")
        sock.sendall(outgoing.read())
        said = b""
        while not said.endswith(b"x" * count):
            try:
                said += tls.read(1 << 16)
            except ssl.SSLWantReadError:
                incoming.write(sock.recv(1 << 16))
    return said.partition(b"\r\n\r\n")[2]


def _shaken(made: Bed) -> tuple[ssl.SSLObject, ssl.MemoryBIO, socket.socket, ssl.MemoryBIO]:
    """A client whose records are its own business: what it writes waits in the first buffer."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = made.trust.wrap_bio(incoming, outgoing, server_hostname="127.0.0.1")
    sock = socket.create_connection(("127.0.0.1", made.port), timeout=60)
    while True:
        try:
            tls.do_handshake()
            return tls, outgoing, sock, incoming
        except ssl.SSLWantReadError:
            sock.sendall(outgoing.read())
            incoming.write(sock.recv(1 << 16))


@LOOPS
def test_a_crowd_of_handshakes_of_one_address_keeps_no_other_out(
    make_loop: MakeLoop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They counted nowhere: each held a descriptor and its memory for 10 s."""
    monkeypatch.setattr(tls_door, "HANDSHAKES_MAX", 8)

    async def story(made: Bed) -> None:
        with contextlib.ExitStack() as held:
            for _ in range(40):
                hostile = held.enter_context(socket.socket())
                hostile.bind(("127.0.0.9", 0))
                hostile.connect(("127.0.0.1", made.port))
            await until(lambda: made.door.handshake_count == 8)
            async with aiohttp.ClientSession() as http, http.put(made.url(), data=b"me", ssl=made.trust) as answer:
                assert await answer.read() == b"me"
            assert made.door.handshake_count <= 8
        await until(lambda: made.door.handshake_count == 0)

    run(make_loop, tmp_path, story)


@LOOPS
def test_of_a_crowd_of_one_address_that_comes_at_once_all_come_in(
    make_loop: MakeLoop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each newcomer ended the handshake that would have been done next: of 3,000 clients none came in for 24 s."""
    monkeypatch.setattr(tls_door, "HANDSHAKES_MAX", 4)
    monkeypatch.setattr(tls_door, "GREETING_S", LIMIT_S)

    async def story(made: Bed) -> None:
        made.server.connections_max = 400

        async def once(at: int) -> bytes:
            async with aiohttp.ClientSession() as http, http.put(made.url(), data=b"%d" % at, ssl=made.trust) as answer:
                return await answer.read()

        assert await asyncio.gather(*map(once, range(40))) == [b"%d" % at for at in range(40)]
        await until(lambda: (made.door.handshake_count, made.door.waiting_count) == (0, 0))

    run(make_loop, tmp_path, story)


@LOOPS
def test_a_handshake_that_is_silent_gives_its_place_to_its_own_address(
    make_loop: MakeLoop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tls_door, "HANDSHAKES_MAX", 4)
    monkeypatch.setattr(tls_door, "GREETING_S", 0.0)

    async def story(made: Bed) -> None:
        with contextlib.ExitStack() as held:
            for _ in range(4):
                held.enter_context(socket.create_connection(("127.0.0.1", made.port)))
            await until(lambda: made.door.handshake_count == 4)
            async with aiohttp.ClientSession() as http, http.put(made.url(), data=b"me", ssl=made.trust) as answer:
                assert await answer.read() == b"me"

    run(make_loop, tmp_path, story)


@LOOPS
def test_silent_handshakes_of_many_addresses_keep_nobody_out(
    make_loop: MakeLoop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each address had one place, so none had more than a newcomer: 512 addresses kept everybody else out."""
    monkeypatch.setattr(tls_door, "HANDSHAKES_MAX", 4)
    monkeypatch.setattr(tls_door, "HANDSHAKE_S", LIMIT_S)

    async def story(made: Bed) -> None:
        with contextlib.ExitStack() as held:
            for number in range(4):
                hostile = held.enter_context(socket.socket())
                hostile.bind((f"127.0.0.{10 + number}", 0))
                hostile.connect(("127.0.0.1", made.port))
            await until(lambda: made.door.handshake_count == 4)
            async with aiohttp.ClientSession() as http, http.put(made.url(), data=b"me", ssl=made.trust) as answer:
                assert await answer.read() == b"me"

    run(make_loop, tmp_path, story)


@LOOPS
def test_a_greeting_that_comes_byte_by_byte_is_as_late_as_none(
    make_loop: MakeLoop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A byte each 1.5 s kept a place for 10 s, and behind a load balancer all clients have one address."""
    monkeypatch.setattr(tls_door, "HANDSHAKES_MAX", 4)
    monkeypatch.setattr(tls_door, "HANDSHAKE_S", LIMIT_S)

    async def story(made: Bed) -> None:
        with contextlib.ExitStack() as held:
            hostile = [held.enter_context(socket.create_connection(("127.0.0.1", made.port))) for _ in range(4)]

            async def drip() -> None:
                for byte in b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc" + bytes(500):
                    for each in hostile:
                        with contextlib.suppress(OSError):
                            each.send(bytes([byte]))
                    await asyncio.sleep(0.05)  # each byte comes alone

            await until(lambda: made.door.handshake_count == 4)
            dripping = asyncio.create_task(drip())
            async with aiohttp.ClientSession() as http, http.put(made.url(), data=b"me", ssl=made.trust) as answer:
                assert await answer.read() == b"me"
            dripping.cancel()

    run(make_loop, tmp_path, story)


@LOOPS
def test_a_line_is_no_longer_than_its_bound_and_lets_other_addresses_pass(
    make_loop: MakeLoop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tls_door, "HANDSHAKES_MAX", 2)
    monkeypatch.setattr(tls_door, "WAITING_MAX", 3)
    monkeypatch.setattr(tls_door, "GREETING_S", LIMIT_S)

    async def story(made: Bed) -> None:
        with contextlib.ExitStack() as held:
            crowd = [held.enter_context(socket.socket()) for _ in range(20)]
            for each in crowd:
                each.bind(("127.0.0.9", 0))
                each.connect(("127.0.0.1", made.port))
            await until(lambda: sum(map(_has_ended, crowd)) == 15)
            assert (made.door.handshake_count, made.door.waiting_count) == (2, 3)
            async with aiohttp.ClientSession() as http, http.put(made.url(), data=b"me", ssl=made.trust) as answer:
                assert await answer.read() == b"me"
        await until(lambda: (made.door.handshake_count, made.door.waiting_count) == (0, 0))

    run(make_loop, tmp_path, story)


@LOOPS
def test_handshakes_and_connections_together_are_no_more_than_the_server_takes(
    make_loop: MakeLoop, tmp_path: Path
) -> None:
    async def story(made: Bed) -> None:
        made.server.connections_max = 6
        with contextlib.ExitStack() as held:
            crowd = [held.enter_context(socket.create_connection(("127.0.0.1", made.port))) for _ in range(30)]
            await until(lambda: sum(map(_has_ended, crowd)) == 24)
            assert made.door.handshake_count == 6

    run(make_loop, tmp_path, story)


@LOOPS
def test_where_all_places_are_taken_the_longest_idle_connection_gives_its_own_up(
    make_loop: MakeLoop, tmp_path: Path
) -> None:
    """Each accept ended the handshake before it, and with a crowd of them nobody came in."""

    async def story(made: Bed) -> None:
        made.server.connections_max = 6
        async with contextlib.AsyncExitStack() as idle:
            for _ in range(6):
                _, writer = await asyncio.open_connection(
                    "127.0.0.1", made.port, ssl=made.trust, server_hostname="127.0.0.1"
                )
                idle.callback(writer.close)
            await until(lambda: made.server.open_count == 6)
            for _ in range(3):
                async with aiohttp.ClientSession() as http, http.put(made.url(), data=b"me", ssl=made.trust) as answer:
                    assert await answer.read() == b"me"

    run(make_loop, tmp_path, story)


@LOOPS
def test_new_connections_have_the_context_that_is_there_now(make_loop: MakeLoop, tmp_path: Path) -> None:
    """A context whose files were loaded again kept its old key beside one of another kind, and served the old one."""

    async def story(made: Bed) -> None:
        made.door.context = context(tmp_path, "renewed")
        given = await asyncio.to_thread(ssl.get_server_certificate, ("127.0.0.1", made.port))
        assert given.strip() == (tmp_path / "renewed.pem").read_text().strip()

    run(make_loop, tmp_path, story)


def test_a_server_that_ends_ends_its_handshakes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    socks: list[socket.socket] = []

    async def story(made: Bed) -> None:
        socks.append(socket.create_connection(("127.0.0.1", made.port)))
        await until(lambda: made.door.handshake_count == 1)

    run(uvloop.new_event_loop, tmp_path, story)
    with socks[0] as sock:
        sock.settimeout(30)
        assert sock.recv(1) == b""
    assert "Task was destroyed" not in caplog.text


def _has_ended(sock: socket.socket) -> bool:
    """Whether the other side has hung up."""
    sock.setblocking(False)
    try:
        return sock.recv(1, socket.MSG_PEEK) == b""
    except BlockingIOError:
        return False
    except ConnectionError:
        return True


def test_a_server_that_never_shakes_hands_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tls_connection, "CONNECTING_S", 0.05)

    async def story(port: int) -> None:
        async with aiohttp.ClientSession() as http:
            with pytest.raises(aiohttp.ClientConnectionError):
                await http.post(f"https://127.0.0.1:{port}/", ssl=ssl.create_default_context())

    with socket.create_server(("127.0.0.1", 0)) as silent, asyncio.Runner(loop_factory=ServerLoop) as runner:
        runner.run(story(silent.getsockname()[1]))


class Unread(asyncio.Transport):
    """A connection whose other side takes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.said = b""
        self.is_taken = True
        self.is_aborted = False

    def get_extra_info(self, name: str, default: object = None) -> object:
        return default

    def get_write_buffer_size(self) -> int:
        return 0 if self.is_taken else len(self.said)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.said += bytes(data)

    def is_closing(self) -> bool:
        return self.is_aborted

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    def abort(self) -> None:
        self.is_aborted = True


async def test_a_client_that_asks_for_keys_and_takes_no_answer_is_cut(tmp_path: Path) -> None:
    """Each message of 27 bytes that asks for new keys brings one of as many, which lay in memory without a bound."""
    wire, client = Unread(), KeyUpdates()
    connection = TlsConnection(context(tmp_path, "door"), ParsingTurns(), asyncio.Protocol())
    connection.connection_made(wire)
    done = client.shake()
    while not done:
        connection.data_received(client.given())
        await asyncio.sleep(0)  # on a loaded machine the rest has its turn in the next pass
        done, wire.said = client.shake(wire.said), b""
    connection.data_received(client.given())
    await until(connection.opened.done)
    wire.said, wire.is_taken = b"", False
    updates = 0
    while not wire.is_aborted:
        client.update(RECORDS_MAX)
        connection.data_received(client.given())
        await asyncio.sleep(0)
        updates += RECORDS_MAX
    assert len(wire.said) <= ANSWERS_BYTES_MAX + RECORDS_MAX * 64
    assert updates > ANSWERS_BYTES_MAX // 64
