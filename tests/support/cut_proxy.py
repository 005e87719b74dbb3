"""A TCP proxy on loopback whose connections can be cut, as a network that fails would."""

from __future__ import annotations

import contextlib
import socket
import socketserver
import threading
from collections.abc import Iterator
from urllib.parse import urlsplit


class CutProxy:
    """Passes bytes on, both ways, between whoever connects to `url` and the server at `endpoint`."""

    def __init__(self, endpoint: str) -> None:
        address = urlsplit(endpoint)
        self._server = (address.hostname, address.port)
        self._lock = threading.Lock()
        self._clients: list[socket.socket] = []
        self._is_cut = False
        self.url = ""

    def cut(self) -> None:
        """End every connection, and each new one at once, until `mend`."""
        with self._lock:
            self._is_cut = True
            clients, self._clients = self._clients, []
        for client in clients:
            with contextlib.suppress(OSError):
                client.shutdown(socket.SHUT_RDWR)

    def mend(self) -> None:
        """Pass new connections on again."""
        with self._lock:
            self._is_cut = False

    def serve(self, client: socket.socket) -> None:
        """Pass one connection on until either side ends it."""
        with self._lock:
            if self._is_cut:
                return
            self._clients.append(client)
        with contextlib.suppress(OSError), socket.create_connection(self._server) as server:
            asking = threading.Thread(target=_pump, args=(client, server), daemon=True)
            asking.start()
            _pump(server, client)
            asking.join()


def _pump(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            target.sendall(data)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def cut_proxy(endpoint: str) -> Iterator[CutProxy]:
    """A proxy for `endpoint`, until the block ends."""
    proxy = CutProxy(endpoint)

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            proxy.serve(self.request)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        proxy.url = f"http://127.0.0.1:{server.server_address[1]}"
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        try:
            yield proxy
        finally:
            proxy.cut()
            server.shutdown()
