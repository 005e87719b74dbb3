"""A TCP proxy on loopback that lets only so many bytes a second through to the client."""

from __future__ import annotations

import contextlib
import socket
import socketserver
import threading
import time
from collections.abc import Iterator
from urllib.parse import urlsplit

PIECE_S = 0.05


@contextlib.contextmanager
def slow_proxy(endpoint: str, bytes_per_s: float) -> Iterator[str]:
    """The endpoint to use in place of `endpoint`. Each connection has the rate for itself."""
    address = urlsplit(endpoint)
    piece_bytes = max(1, int(bytes_per_s * PIECE_S))

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            client: socket.socket = self.request
            with contextlib.suppress(OSError), socket.create_connection((address.hostname, address.port)) as server:
                asking = threading.Thread(target=_pump, args=(client, server), daemon=True)
                asking.start()
                while data := server.recv(piece_bytes):
                    client.sendall(data)
                    time.sleep(len(data) / bytes_per_s)

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
