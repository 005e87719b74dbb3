"""TCP proxies on loopback: one lets only so many bytes a second through to the client, one loses its rate."""

from __future__ import annotations

import contextlib
import math
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Iterator
from urllib.parse import urlsplit

PIECE_S = 0.05


@contextlib.contextmanager
def slow_proxy(endpoint: str, bytes_per_s: float) -> Iterator[str]:
    """The endpoint to use in place of `endpoint`. Each connection has the rate for itself."""
    piece_bytes = max(1, int(bytes_per_s * PIECE_S))

    def answer(server: socket.socket, client: socket.socket) -> None:
        while data := server.recv(piece_bytes):
            client.sendall(data)
            time.sleep(len(data) / bytes_per_s)  # the rate of the link

    with _proxy(endpoint, answer) as url:
        yield url


class FailingLink:
    """A link as fast as the host, until it has carried so many more bytes of answers. From then on, and until
    `recover`, each connection carries a byte every PIECE_S.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._left_bytes: float = math.inf

    def lose_rate_after(self, nbytes: int) -> None:
        self._left_bytes = nbytes

    def recover(self) -> None:
        self._left_bytes = math.inf

    @property
    def has_lost_rate(self) -> bool:
        """Whether it has carried the bytes, and has not recovered."""
        return self._left_bytes <= 0

    def carry(self, server: socket.socket, client: socket.socket) -> None:
        """Answers of one connection, to its end."""
        while data := server.recv(1 if self.has_lost_rate else 65536):
            with self._lock:
                self._left_bytes -= len(data)
            client.sendall(data)
            if self.has_lost_rate:
                time.sleep(PIECE_S)  # the rate that is left


@contextlib.contextmanager
def failing_proxy(endpoint: str) -> Iterator[tuple[str, FailingLink]]:
    """The endpoint to use in place of `endpoint`, and the link to it."""
    link = FailingLink()
    with _proxy(endpoint, link.carry) as url:
        yield url, link


@contextlib.contextmanager
def _proxy(endpoint: str, answer: Callable[[socket.socket, socket.socket], None]) -> Iterator[str]:
    """A proxy of which `answer` carries the answers of each connection from the server to the client."""
    address = urlsplit(endpoint)

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            client: socket.socket = self.request
            with contextlib.suppress(OSError), socket.create_connection((address.hostname, address.port)) as server:
                asking = threading.Thread(target=_pump, args=(client, server), daemon=True)
                asking.start()
                answer(server, client)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler, bind_and_activate=True) as proxy:
        proxy.daemon_threads = True
        threading.Thread(target=proxy.serve_forever, args=(0.05,), daemon=True).start()
        try:
            yield f"http://127.0.0.1:{proxy.server_address[1]}"
        finally:
            proxy.shutdown()


def _pump(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)
