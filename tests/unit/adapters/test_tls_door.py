"""The places of TLS handshakes count by callers."""

from __future__ import annotations

import contextlib
import socket
import ssl

import pytest
from aiohttp import web

from objectcache.adapters import tls_door
from objectcache.adapters.deadlines import ConnectionLimits
from objectcache.adapters.limited_server import LimitedServer
from objectcache.adapters.tls_door import TlsDoor
from tests.support.waiting import LIMIT_S, until


async def answered(_: web.BaseRequest) -> web.Response:
    return web.Response()


async def test_all_addresses_of_one_ipv6_network_are_one_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    """One host has 2^64 of them, and 512 addresses with a handshake each kept everybody else out."""
    monkeypatch.setattr(tls_door, "HANDSHAKES_MAX", 2)
    monkeypatch.setattr(tls_door, "GREETING_S", LIMIT_S)
    server = LimitedServer(answered, lambda _: web.Response(status=400), ConnectionLimits())
    door = TlsDoor(server, ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))
    ends = [socket.socketpair() for _ in range(5)]
    addresses = [*(f"2001:db8::{number}" for number in range(4)), "2001:db9::1"]
    with contextlib.ExitStack() as held:
        for (accepted, other), address in zip(ends, addresses, strict=True):
            held.enter_context(other)
            accepted.setblocking(False)
            door._begin(accepted, address)
        assert ends[0][1].recv(1) == b""  # its place is the newcomer's of another network
        assert (door.handshake_count, door.waiting_count) == (2, 2)
    await until(lambda: (door.handshake_count, door.waiting_count) == (0, 0))
    await server.shutdown()


async def test_a_full_server_ends_no_handshake_for_a_caller_that_has_as_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """A crowd whose connections fill the server ended the one handshake of everybody else with each newcomer."""
    monkeypatch.setattr(tls_door, "GREETING_S", LIMIT_S)
    server = LimitedServer(answered, lambda _: web.Response(status=400), ConnectionLimits(connections_max=1))
    door = TlsDoor(server, ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))
    ends = [socket.socketpair() for _ in range(2)]
    with contextlib.ExitStack() as held:
        for (accepted, other), address in zip(ends, ("10.0.0.1", "10.0.0.2"), strict=True):
            held.enter_context(other)
            other.setblocking(False)
            accepted.setblocking(False)
            door._begin(accepted, address)
        assert ends[1][1].recv(1) == b""
        with pytest.raises(BlockingIOError):
            ends[0][1].recv(1)
        assert (door.handshake_count, door.waiting_count) == (1, 0)
    await until(lambda: door.handshake_count == 0)
    await server.shutdown()
