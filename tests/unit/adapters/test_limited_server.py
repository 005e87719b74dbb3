"""Callers share the turns in which bytes are parsed, and the places for connections."""

from __future__ import annotations

import asyncio
import math
from typing import cast

import pytest
from aiohttp import web

from descriptors.errors import ObjectCacheError
from objectcache.adapters import limited_server
from objectcache.adapters.deadlines import ConnectionLimits
from objectcache.adapters.limited_server import Connection, LimitedServer
from objectcache.adapters.pieces import PIECE_BYTES
from tests.support.waiting import until


class Wire(asyncio.Transport):
    """A connection from `peer`, to which nothing is sent."""

    def __init__(self, peer: object) -> None:
        super().__init__()
        self.peer = peer
        self.is_cut = False

    def get_extra_info(self, name: str, default: object = None) -> object:
        return self.peer if name == "peername" else default

    def is_closing(self) -> bool:
        return self.is_cut

    def abort(self) -> None:
        self.is_cut = True

    def close(self) -> None:
        self.is_cut = True

    def get_write_buffer_size(self) -> int:
        return 0

    def write(self, data: bytes | bytearray | memoryview) -> None: ...

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


def refused(error: ObjectCacheError) -> web.Response:
    return web.Response(status=error.http_status)


async def handled(http: web.BaseRequest) -> web.Response:
    await http.content.read()
    return web.Response()


async def posting(
    server: LimitedServer, address: str, body: bytes = b"", form: bytes = b"Content-Length: 100"
) -> tuple[Connection, Wire]:
    """A connection from the address. It has sent the head of a request, and so much of its body of 100 bytes."""
    connection, wire = cast(Connection, server()), Wire((address, 1))
    connection.connection_made(wire)
    if not wire.is_cut:
        connection.data_received(b"POST / HTTP/1.1\r\nHost: h\r\n" + form + b"\r\n\r\n" + body)
    await until(lambda: wire.is_cut or connection not in server.idle)
    return connection, wire


def ended(connection: Connection, wire: Wire) -> None:
    wire.is_cut = True
    connection.connection_lost(None)


async def test_a_caller_with_many_connections_has_one_turn_beside_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a client whose thousand connections each have bytes to parse lets everybody wait for a thousand of its
    pieces, again and again.
    """
    parsed: list[object] = []
    monkeypatch.setattr(Connection, "_parse", lambda self, data: parsed.append(self.transport.peer))
    server = LimitedServer(handled, refused, ConnectionLimits())
    peers = [*(("10.0.0.1", port) for port in range(3)), ("2001:db8::1", 1, 0, 0), ("2001:db8::2", 1, 0, 0)]
    peers += [("::ffff:10.0.0.1", 9, 0, 0), ("10.0.0.2", 1)]
    for peer in [*peers, "", ""]:
        connection = cast(Connection, server())
        connection.connection_made(Wire(peer))
        connection.data_received(bytes(PIECE_BYTES + 1))
    for _ in range(len(peers)):
        await asyncio.sleep(0)
    first_round = ["10.0.0.1", "2001:db8::1", "10.0.0.2", "", ""]
    assert [peer[0] if peer else peer for peer in parsed[: len(first_round)]] == first_round


async def test_the_caller_with_most_bodies_under_way_gives_a_place_to_one_with_few() -> None:
    """Otherwise a client keeps everybody else out with requests whose bodies it holds back: for seconds none of them is
    slow, and a new request begins anew.
    """
    server = LimitedServer(handled, refused, ConnectionLimits(connections_max=4))
    crowd = [await posting(server, "10.0.0.1", bytes(count)) for count in (3, 1, 2, 4)]
    _, sibling = await posting(server, "10.0.0.1")
    assert sibling.is_cut
    assert not any(wire.is_cut for _, wire in crowd)
    for connection, _ in crowd:
        connection._body_since_s = 0.0  # the machine may have stopped between two of them
    other = await posting(server, "10.0.0.2")
    assert [wire.is_cut for _, wire in crowd] == [False, True, False, False]  # the slowest one
    assert not other[1].is_cut
    _, second = await posting(server, "10.0.0.2")  # it has as many as is few by now
    assert second.is_cut
    for connection, wire in (*crowd, other):
        ended(connection, wire)
    assert len(server.awaited) == 0


async def test_bytes_that_wait_to_be_parsed_keep_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client may send so many small chunks that they wait for long, and is waited for no more."""
    server = LimitedServer(handled, refused, ConnectionLimits(connections_max=2))
    crowd = [await posting(server, "10.0.0.1", form=b"Transfer-Encoding: chunked") for _ in range(2)]
    monkeypatch.setattr(server.turns, "has_time", lambda: False)
    for connection, _ in crowd:
        connection.data_received(b"1\r\nx\r\n")
    connection, other = cast(Connection, server()), Wire(("10.0.0.2", 1))
    connection.connection_made(other)
    assert (other.is_cut, [wire.is_cut for _, wire in crowd]) == (False, [True, False])
    for each in (*crowd, (connection, other)):
        ended(*each)


async def test_a_caller_with_many_bodies_under_way_pushes_nobody_out_who_has_just_connected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A client that has connected has no request for a moment, and would be the only one without."""
    monkeypatch.setattr(limited_server, "FRESH_S", math.inf)
    server = LimitedServer(handled, refused, ConnectionLimits(connections_max=3))
    crowd = [await posting(server, "10.0.0.1") for _ in range(2)]
    idle, wire = cast(Connection, server()), Wire(("10.0.0.2", 1))
    idle.connection_made(wire)
    _, sibling = await posting(server, "10.0.0.1")
    assert (sibling.is_cut, wire.is_cut) == (True, False)
    _, other = await posting(server, "10.0.0.3")
    assert (other.is_cut, wire.is_cut, [each.is_cut for _, each in crowd]) == (False, False, [True, False])
    ended(*crowd.pop(0))
    monkeypatch.setattr(limited_server, "FRESH_S", 0.0)
    later = await posting(server, "10.0.0.1")
    assert (later[1].is_cut, wire.is_cut) == (False, True)
    for connection, each in (*crowd, later, (idle, wire)):
        ended(connection, each)


async def test_a_body_that_has_come_whole_makes_no_place() -> None:
    server = LimitedServer(handled, refused, ConnectionLimits(connections_max=4))
    crowd = [await posting(server, "10.0.0.1", bytes(99)) for _ in range(4)]
    for connection, _ in crowd[:3]:
        connection.data_received(b"x")
    await until(lambda: len(server.awaited) == 1)
    _, other = await posting(server, "10.0.0.2")
    assert other.is_cut
    for connection, wire in crowd:
        ended(connection, wire)
