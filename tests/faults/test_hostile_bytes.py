"""Bytes that cost more to parse than to send: a connection's turn is short, and whatever is right still comes whole."""

from __future__ import annotations

import asyncio
import contextlib
import io
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import aiohttp
import pytest
from aiohttp import web

from descriptors.errors import ObjectCacheError
from objectcache.adapters import pieces
from objectcache.adapters.deadlines import ConnectionLimits
from objectcache.adapters.limited_server import Connection, LimitedServer
from objectcache.adapters.pieces import ANSWERS_MAX, PIECE_BYTES, ParsingTurns, careful
from tests.support.waiting import until

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
BODY = bytes(range(256)) * 16_384  # 4 MiB


def refused(error: ObjectCacheError) -> web.Response:
    return web.Response(status=error.http_status, text=error.code.value)


@asynccontextmanager
async def echoing() -> AsyncIterator[tuple[str, int, LimitedServer]]:
    """A server that answers with what it got, except at /refused, where it reads nothing."""

    async def handle(http: web.BaseRequest) -> web.Response:
        if http.path == "/refused":
            return web.Response(status=401)
        try:
            return web.Response(body=await http.content.read())
        except web.RequestPayloadError as error:
            return web.Response(status=400, text=str(error))

    server = LimitedServer(handle, refused, ConnectionLimits())
    runner = web.ServerRunner(server)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    try:
        yield host, port, server
    finally:
        await runner.cleanup()


@asynccontextmanager
async def answering(serve: Serve) -> AsyncIterator[tuple[aiohttp.ClientSession, str]]:
    """A client of ours, and the address of somebody who answers as he likes."""

    writers: set[asyncio.StreamWriter] = set()
    ended = asyncio.Condition()

    async def served(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.add(writer)
        try:
            await serve(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()
            async with ended:
                writers.discard(writer)
                ended.notify_all()

    server = await asyncio.start_server(served, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    try:
        async with aiohttp.ClientSession(connector=careful(aiohttp.TCPConnector())) as session:
            yield session, f"http://{host}:{port}/"
    finally:
        server.close()
        for writer in list(writers):
            writer.transport.abort()
        async with ended:
            await ended.wait_for(lambda: not writers)


async def test_connections_take_turns_and_others_run_between_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "TURN_S", 0.0)
    seen: list[str] = []

    class Asking:
        def __init__(self, name: str, count: int, group: str = "") -> None:
            self.name, self.count, self.group = name, count, group or name

        def parse_piece(self) -> bool:
            seen.append(self.name)
            self.count -= 1
            return self.count > 0

    monkeypatch.setattr(pieces.time, "perf_counter", iter(range(1000)).__next__)
    monkeypatch.setattr(pieces, "TURN_S", 1.5)  # seconds of that clock: one piece for each turn of the loop
    turns = ParsingTurns()
    for asking in (Asking("a", 3), Asking("b", 1), Asking("c", 2)):
        turns.add(asking)  # type: ignore[arg-type]
    assert not turns.has_time()
    for _ in range(8):
        await asyncio.sleep(0)
        seen.append("-")
    order = "".join(seen)
    assert order.replace("-", "") == "abcaca"
    assert all(len(each) <= 1 for each in order.split("-"))
    assert turns.has_time()
    seen.clear()
    for asking in (*(Asking("x", 3, "one") for _ in range(4)), Asking("y", 2, "other")):
        turns.add(asking)  # type: ignore[arg-type]
    for _ in range(20):
        await asyncio.sleep(0)
    assert "".join(seen) == "xyxy" + "x" * 10


@pytest.mark.parametrize("is_chunked", [False, True])
async def test_a_body_comes_whole_and_so_does_its_answer(is_chunked: bool) -> None:
    async with (
        echoing() as (host, port, server),
        aiohttp.ClientSession(connector=careful(aiohttp.TCPConnector())) as http,
    ):

        async def parts() -> AsyncIterator[bytes]:
            for start in range(0, len(BODY), 100_001):
                yield BODY[start : start + 100_001]

        for _ in range(2):  # on the same connection
            async with http.post(f"http://{host}:{port}/", data=parts() if is_chunked else io.BytesIO(BODY)) as answer:
                assert await answer.read() == BODY
            assert len(server.connections) == 1


async def test_an_idle_connection_keeps_nothing_of_its_last_answer() -> None:
    """A listing of 3 MB stayed with each of ten thousand connections until their next requests."""
    made: list[web.Response] = []

    async def handle(http: web.BaseRequest) -> web.Response:
        made.append(web.Response(body=BODY))
        return made[-1]

    server = LimitedServer(handle, refused, ConnectionLimits())
    runner = web.ServerRunner(server)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    async with aiohttp.ClientSession() as http:
        async with http.get("http://{}:{}/".format(*runner.addresses[0][:2])) as answer:
            assert await answer.read() == BODY
        await until(lambda: made[0].body is None)
        assert server.open_count == 1
    await runner.cleanup()


@pytest.mark.parametrize("comes_with_the_head", [False, True])
async def test_an_idle_connection_keeps_nothing_of_a_body_that_nobody_has_read(
    comes_with_the_head: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A body that had come whole was not read to its end: 4,000 connections kept 0.9 GB."""
    kept: list[aiohttp.StreamReader] = []
    begun = Connection.request_begun

    def noted(connection: Connection, http: web.BaseRequest) -> None:
        kept.append(http.content)
        begun(connection, http)

    monkeypatch.setattr(Connection, "request_begun", noted)
    async with echoing() as (host, port, _):
        reader, writer = await asyncio.open_connection(host, port)
        head, body = b"POST /refused HTTP/1.1\r\nHost: h\r\nContent-Length: 8192\r\n\r\n", bytes(8192)
        writer.write(head + body[: 8192 if comes_with_the_head else 4096])
        assert b" 401 " in await reader.readuntil(b"\r\n\r\n")
        writer.write(b"" if comes_with_the_head else body[4096:])
        await until(kept[0].at_eof)
        writer.write(b"GET /refused HTTP/1.1\r\nHost: h\r\n\r\n")
        assert b" 401 " in await reader.readuntil(b"\r\n\r\n")
        writer.close()
        await writer.wait_closed()


@pytest.mark.parametrize(("header_bytes", "is_kept"), [(4_000, True), (6_000, False)])
async def test_a_connection_ends_behind_a_request_with_a_large_head(header_bytes: int, is_kept: bool) -> None:
    """aiohttp keeps a request until the next one of its connection: 4,000 idle connections kept 0.8 GB of heads."""
    headers = {f"x-{number}": "a" * header_bytes for number in range(3)}
    async with (
        echoing() as (host, port, _),
        aiohttp.ClientSession() as http,
        http.post(f"http://{host}:{port}/", data=b"me", headers=headers) as answer,
    ):
        assert await answer.read() == b"me"
        assert answer.headers.get("Connection") == (None if is_kept else "close")


@pytest.mark.parametrize("is_begun", [False, True])
async def test_an_exchange_that_is_broken_off_keeps_no_port_to_the_peer(is_begun: bool) -> None:
    """The port of a connection that ends in order is taken for a minute: of 470 clients a second that leave, 28,232
    ports would be taken, and nobody could reach the peer.
    """
    asked, ends = asyncio.Event(), asyncio.Queue[str]()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        if is_begun:
            writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n")
        asked.set()
        try:
            ends.put_nowait("in order" if await reader.read(1) == b"" else "with more")
        except ConnectionResetError:
            ends.put_nowait("reset")

    async with answering(serve) as (session, url):

        async def ask() -> None:
            async with session.get(url) as answer:
                await answer.read()

        asking = asyncio.create_task(ask())
        await asked.wait()
        asking.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asking
        assert await ends.get() == "reset"


async def test_a_peer_that_answers_and_reads_nothing_of_the_request_keeps_no_connection() -> None:
    """An orderly end waited for ever for a peer that reads: the descriptor and the body stayed, for each request."""
    left, ends = asyncio.Event(), asyncio.Queue[str]()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
        await left.wait()
        try:
            while await reader.read(1 << 20):
                pass
            ends.put_nowait("in order")
        except ConnectionResetError:
            ends.put_nowait("reset")

    async def parts() -> AsyncIterator[bytes]:
        for _ in range(32):  # more than the kernel takes
            yield BODY

    async with answering(serve) as (session, url):
        async with session.post(url, data=parts()) as answer:
            assert await answer.read() == b"ok"
        left.set()
        assert await ends.get() == "reset"


async def test_a_request_behind_another_may_have_a_body_of_any_size() -> None:
    """Its head comes while the request before is answered, and its body before its own handler has begun."""
    body = BODY[: 1 << 20]
    both = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" + b"PUT / HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
    async with echoing() as (host, port, _):
        reader, writer = await asyncio.open_connection(host, port)
        for _ in range(20):
            writer.write(both + body)
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
            assert await reader.readexactly(len(body)) == body
        writer.close()


async def test_small_chunks_behind_a_request_come_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """They lie together while they wait, and what aiohttp's parser has kept back waits its turn, too."""
    body = bytes(range(256)) * 400
    first = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
    head = b"PUT / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    chunks = b"".join(b"1\r\n" + bytes((each,)) + b"\r\n" for each in body)
    for turn_s in (pieces.TURN_S, 1e-6):
        monkeypatch.setattr(pieces, "TURN_S", turn_s)
        async with echoing() as (host, port, _):
            reader, writer = await asyncio.open_connection(host, port)
            for _ in range(3):
                writer.write(first + head + chunks + b"0\r\n\r\n")
                assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
                assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
                assert await reader.readexactly(len(body)) == body
            writer.close()


async def test_nothing_is_parsed_behind_a_request_for_another_protocol() -> None:
    head = b"GET / HTTP/1.1\r\nHost: x\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n"
    async with echoing() as (host, port, server):
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(head + b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 100)
        answer = await reader.read()
        assert answer.count(b"HTTP/1.1 200") == 1
        assert not server.connections
        writer.close()


async def test_small_chunks_come_whole_however_they_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "PIECE_BYTES", 7)
    body = bytes(range(256)) * 4
    head = b"PUT / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    chunks = b"".join(b"1\r\n" + bytes((each,)) + b"\r\n" for each in body)
    async with echoing() as (host, port, _):
        reader, writer = await asyncio.open_connection(host, port)
        for _ in range(2):
            writer.write(head + chunks + b"0\r\n\r\n")
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
            assert await reader.readexactly(len(body)) == body
        writer.close()


async def test_a_connection_that_fails_keeps_no_other_from_its_turn(caplog: pytest.LogCaptureFixture) -> None:
    class Failing:
        transport = None
        group = "failing"

        def parse_piece(self) -> bool:
            raise RuntimeError("a fault of ours")

    seen = asyncio.Event()

    class Asking:
        group = "asking"

        def parse_piece(self) -> bool:
            seen.set()
            return False

    turns = ParsingTurns()
    for asking in (Failing(), Asking()):
        turns.add(asking)  # type: ignore[arg-type]
    await seen.wait()
    assert "a fault of ours" in caplog.text


async def test_garbage_within_a_chunked_body_is_refused_once() -> None:
    async with echoing() as (host, port, server):
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(b"PUT / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n")
        await until(lambda: bool(server.connections) and not server.idle)
        (connection,) = server.connections
        assert isinstance(connection, Connection)
        writer.write(b"no chunk\r\n" * 100_000)
        said = b""
        while not said.endswith(b"not well-formed"):
            assert connection.unanswered_count <= 2
            part = await reader.read(1 << 16)
            assert part
            said += part
        assert b" 400 " in said
        writer.close()


@pytest.mark.parametrize("path", [b"/", b"/refused"])
@pytest.mark.parametrize("garbage", [b"ZZ\r\n", b"0\r\nno colon\r\n\r\n"])
async def test_garbage_within_a_refused_body_ends_the_connection_and_is_not_logged(
    path: bytes, garbage: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """A stranger had 440 bytes written into the log for each 86 bytes."""
    async with echoing() as (host, port, server):
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(b"PUT " + path + b" HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n")
        if path == b"/refused":
            said = await reader.readuntil(b"\r\n\r\n")
        else:
            await until(lambda: bool(server.connections) and not server.idle)
            said = b""
        writer.write(garbage)
        said += await reader.read()
        assert said.count(b"HTTP/1.") == 1
        writer.close()
        await until(lambda: not server.connections)
        assert "Unhandled exception" not in caplog.text


async def test_garbage_behind_a_request_is_refused_once_and_kept_nowhere() -> None:
    """aiohttp made an error of each read, with a copy of what was wrong, before anybody could refuse the first."""
    async with echoing() as (host, port, server):
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(b"PUT / HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\n\r\n" + b"a" * (4 << 20))
        (connection,) = server.connections
        assert isinstance(connection, Connection)
        said = b""
        while not said.endswith(b"InvalidRequest"):
            assert connection.unanswered_count <= 2
            assert connection.held_bytes <= 1 << 20
            said += await reader.read(1 << 16)
        assert said.count(b"HTTP/1.") == 1
        writer.close()


async def test_answers_without_an_end_to_one_request_end_it() -> None:
    async def endless(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        while True:
            writer.write(b"HTTP/1.1 100 \r\n\r\n" * 1000)
            await writer.drain()

    async with answering(endless) as (http, url):
        with pytest.raises(aiohttp.ClientError, match="more answers"):
            await http.get(url)


@pytest.mark.parametrize("status", [b"200 OK", b"204 No Content"])
async def test_answers_that_nobody_asked_for_end_the_connection_and_no_request(status: bytes) -> None:
    begun: list[bool] = []
    ended: list[bool] = []

    async def more(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        begun.append(True)
        await reader.readuntil(b"\r\n\r\n")
        length = b"" if status.startswith(b"204") else b"Content-Length: 0\r\n"
        writer.write(b"HTTP/1.1 " + status + b"\r\n" + length + b"\r\n")
        await writer.drain()
        try:
            while True:
                writer.write((b"HTTP/1.1 " + status + b"\r\n" + length + b"\r\n") * 1000)
                await writer.drain()
        finally:
            ended.append(True)

    async with answering(more) as (http, url):
        for number in range(1, 4):
            async with http.get(url) as answer:
                assert answer.status in (200, 204)
            await until(lambda wanted=number: len(ended) == wanted)
            assert len(begun) == number


@pytest.mark.parametrize("is_one_write", [True, False])
async def test_an_answer_too_many_is_not_the_next_requests(is_one_write: bool) -> None:
    """A tenant got what an engine had answered another one a second time."""
    sent: list[bool] = []

    async def doubled(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            name = head.split()[1].lstrip(b"/")
            answer = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(name), name)
            if is_one_write:
                writer.write(answer + answer)
            else:
                writer.write(answer)
                await writer.drain()
                writer.write(answer)
            await writer.drain()
            sent.append(True)

    async with answering(doubled) as (http, url):
        for number in range(12):
            with contextlib.suppress(aiohttp.ClientError):
                async with http.get(f"{url}/{number}") as answer:
                    assert await answer.text() == str(number)
    assert sent


async def test_interim_answers_of_an_honest_server_are_passed_over() -> None:
    async def patient(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in range(3):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 102 Processing\r\n\r\n" * (ANSWERS_MAX - 1))
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
            await writer.drain()

    async with answering(patient) as (http, url):
        for _ in range(3):
            async with http.get(url) as answer:
                assert await answer.read() == b"ok"


@pytest.mark.parametrize("head", [b"", b"Content-Type: text/event-stream\r\n"])
async def test_garbage_within_a_chunked_answer_ends_it_and_is_told_to_nobody(head: bytes) -> None:
    """aiohttp closed the connection and told no reader: the request never ended, whatever its timeouts were."""
    has_begun = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\n" + head + b"Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n")
        await writer.drain()
        await has_begun.wait()
        writer.write(b"2\r\nno more than SECRET bytes\r\n")
        await writer.drain()
        await reader.read()

    async with answering(serve) as (client, url), client.get(url) as answer:
        assert await answer.content.readany() == b"abc"
        has_begun.set()
        with pytest.raises(aiohttp.ClientPayloadError) as raised:
            await answer.content.read()
        assert "SECRET" not in f"{raised.value!r}{raised.value.__cause__!r}"


async def test_a_head_that_is_none_is_quoted_to_nobody() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b'{"text": "SECRET of somebody else"}\r\n\r\n')
        await writer.drain()
        await reader.read()

    async with answering(serve) as (client, url):
        with pytest.raises(aiohttp.ClientResponseError, match="not well-formed") as raised:
            await client.get(url)
        assert "SECRET" not in f"{raised.value!r}{raised.value.__cause__!r}"


async def test_a_body_that_ends_with_the_connection_comes_whole() -> None:
    async def closing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + BODY[: 40 * PIECE_BYTES + 3])
        await writer.drain()

    async with answering(closing) as (http, url), http.get(url) as answer:
        assert await answer.read() == BODY[: 40 * PIECE_BYTES + 3]


async def test_an_answer_without_a_length_is_not_whole_where_its_connection_is_reset() -> None:
    """The client has all that came by then, and cannot know that it is not all."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\n\r\nthe beginning")
        await writer.drain()
        await began.wait()
        wire = writer.get_extra_info("socket")
        wire.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()

    began = asyncio.Event()
    async with answering(serve) as (session, url), session.get(url) as answer:
        assert await answer.content.readany() == b"the beginning"
        began.set()
        with pytest.raises(aiohttp.ClientPayloadError):
            await answer.content.readany()
