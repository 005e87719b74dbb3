"""`serve --workers`: all processes together keep the limits of a gateway."""

from __future__ import annotations

import contextlib
import selectors
import socket
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.support.servers import CONFIG, started
from tests.support.small_gateway import head_of, signed_headers
from tests.support.waiting import eventually

MIB = 1 << 20


@contextlib.contextmanager
def workers(directory: Path, count: int, limits: str) -> Iterator[tuple[str | None, int | None]]:
    """The address of a server with so many processes."""
    file = directory / "config.toml"
    file.write_text(f"[internals.gateway]\n{limits}{CONFIG}")
    serve = ("serve", "--data", str(directory / "d"), "--port", "0", "--workers", str(count), "--config", str(file))
    with started(*serve) as (url, _):
        yield urlsplit(url).hostname, urlsplit(url).port


def heard_from(socks: list[socket.socket], wanted: int) -> int:
    """The number of connections that the server has answered or closed, once they are at least `wanted`."""
    with selectors.DefaultSelector() as selector:
        for sock in socks:
            selector.register(sock, selectors.EVENT_READ)
        assert eventually(lambda: len(selector.select(0)) >= wanted), len(selector.select(0))
        return len(selector.select(0))


@pytest.mark.slow
def test_workers_share_the_limit_on_connections(tmp_path: Path) -> None:
    """Each process counts its own connections. Three processes with the whole limit each would allow three times as
    many.
    """
    with workers(tmp_path, 3, "connections_max = 6\n") as address, contextlib.ExitStack() as held:
        socks = [held.enter_context(socket.create_connection(address, timeout=30)) for _ in range(60)]
        assert heard_from(socks, 54) == 54


@pytest.mark.slow
def test_workers_share_the_memory_for_documents(tmp_path: Path) -> None:
    """One access key cannot have as many budgets as there are processes."""
    limits = f"document_bytes = {64 * MIB}\ndocument_key_bytes = {32 * MIB}\ndocument_timeout_s = 600\n"
    head = head_of(
        "POST", "/b?lookup", {**signed_headers("POST", "/b?lookup", {}, "ab" * 32), "Content-Length": str(16 * MIB)}
    )
    with workers(tmp_path, 2, limits) as address, contextlib.ExitStack() as held:
        socks = []
        for _ in range(10):
            sock = held.enter_context(socket.create_connection(address, timeout=30))
            sock.sendall(head)
            with contextlib.suppress(ConnectionError):  # a refusal may come meanwhile
                sock.sendall(b" " * (12 * MIB))
            socks.append(sock)
        assert heard_from(socks, 8) >= 8
