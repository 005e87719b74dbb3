"""Connections of a server are parsed in turns of the callers that they are of."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest
from aiohttp import web

from descriptors.errors import ObjectCacheError
from objectcache.adapters.deadlines import ConnectionLimits
from objectcache.adapters.limited_server import Connection, LimitedServer
from objectcache.adapters.pieces import PIECE_BYTES


class Wire(asyncio.Transport):
    """A connection from `peer`, to which nothing is sent."""

    def __init__(self, peer: object) -> None:
        super().__init__()
        self.peer = peer

    def get_extra_info(self, name: str, default: object = None) -> object:
        return self.peer if name == "peername" else default

    def is_closing(self) -> bool:
        return False

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


def refused(error: ObjectCacheError) -> web.Response:
    return web.Response(status=error.http_status)


async def handled(_: web.BaseRequest) -> web.Response:
    return web.Response()


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
