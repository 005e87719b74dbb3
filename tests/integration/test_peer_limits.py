"""A storage server that listens on TCP: connections of strangers are bounded in time and number."""

from __future__ import annotations

import contextlib
import http.client
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from descriptors.peer_auth import PeerSecrets
from objectcache.adapters.deadlines import ConnectionLimits
from objectcache.cli.listening import Listen
from objectcache.cli.serve import StorageServer
from storage_server.service import http_api
from tests.support.servers import LocalStack
from tests.support.waiting import eventually

HEAD = b"POST /v1/objects.head_object HTTP/1.1\r\nHost: h\r\n"
CONNECTIONS_MAX = 3


class LocalStorageServer(LocalStack):
    """A storage server without a gateway."""

    async def _start(self) -> Any:
        server = StorageServer(self._settings, PeerSecrets(b"s" * 32), Listen())
        await server.start()
        return server


@contextlib.contextmanager
def bounded(directory: Path, limits: ConnectionLimits) -> Iterator[tuple[str | None, int | None]]:
    """The address of a storage server with other limits for its peers."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(http_api, "PEER_LIMITS", limits)
        with LocalStorageServer(directory) as running:
            yield urlsplit(running.url).hostname, urlsplit(running.url).port


def is_closed(sock: socket.socket) -> bool:
    """Whether the server ends the connection by itself."""
    try:
        return sock.recv(1) == b""
    except ConnectionResetError:
        return True


def is_healthy(address: tuple[str | None, int | None]) -> bool:
    connection = http.client.HTTPConnection(str(address[0]), address[1], timeout=30)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


@pytest.mark.parametrize("begun", [HEAD, b"", HEAD[:5]], ids=["half a head", "nothing", "half a line"])
def test_a_connection_that_sends_no_whole_head_is_cut(tmp_path: Path, begun: bytes) -> None:
    """It would stay for ever, and hold one of the places."""
    limits = replace(http_api.PEER_LIMITS, header_timeout_s=0.3, keepalive_timeout_s=0.6)
    with bounded(tmp_path, limits) as address, socket.create_connection(address, timeout=60) as sock:
        sock.sendall(begun)
        assert is_closed(sock)
        assert is_healthy(address)


def test_idle_connections_beyond_the_bound_give_their_places_up(tmp_path: Path) -> None:
    """Strangers would otherwise lock gateways out."""
    limits = replace(http_api.PEER_LIMITS, connections_max=CONNECTIONS_MAX)
    with bounded(tmp_path, limits) as address, contextlib.ExitStack() as held:
        socks = [held.enter_context(socket.create_connection(address, timeout=60)) for _ in range(CONNECTIONS_MAX)]
        for sock in socks:
            sock.sendall(b"GET /health HTTP/1.1\r\nHost: h\r\n\r\n")
            assert sock.recv(4096).startswith(b"HTTP/1.1 200")
        assert is_healthy(address)
        assert eventually(lambda: is_closed(socks[0]))  # its answer may have come in two pieces


def test_there_are_limits_for_peers() -> None:
    assert 0 < http_api.PEER_LIMITS.header_timeout_s <= 60
    assert 0 < http_api.PEER_LIMITS.connections_max <= 16_384
