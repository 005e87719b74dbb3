"""A TCP proxy on loopback whose connections can be cut, as a network that fails would, also within an answer."""

from __future__ import annotations

import contextlib
import socket
import socketserver
import threading
from collections.abc import Callable, Iterator
from urllib.parse import urlsplit

Place = Callable[[bytes, int], int]
"""How many bytes of an answer come, by its head with the empty line, and the length of its body."""


class CutProxy:
    """Passes bytes on, both ways, between whoever connects to `url` and the server at `endpoint`."""

    def __init__(self, endpoint: str) -> None:
        address = urlsplit(endpoint)
        self._server = (address.hostname, address.port)
        self._lock = threading.Lock()
        self._clients: list[socket.socket] = []
        self._is_cut = False
        self._breaks: list[Place] = []
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

    def break_at(self, *places: Place) -> None:
        """Break the connection of the next answer at this place, then that of the one after, and so on. Open
        connections end.
        """
        self.cut()
        with self._lock:
            self._breaks = list(places)
        self.mend()

    @property
    def breaks_left(self) -> int:
        """How many answers are still to be broken."""
        with self._lock:
            return len(self._breaks)

    def serve(self, client: socket.socket) -> None:
        """Pass one connection on until either side ends it."""
        with self._lock:
            if self._is_cut:
                return
            self._clients.append(client)
        with contextlib.suppress(OSError), socket.create_connection(self._server) as server:
            asking = threading.Thread(target=_pump, args=(client, server), daemon=True)
            asking.start()
            self._answer(server, client)
            asking.join()

    def _answer(self, server: socket.socket, client: socket.socket) -> None:
        """Pass the server's bytes on, or the first of them where its answer is to be broken."""
        with contextlib.suppress(OSError):
            while data := server.recv(65536):
                with self._lock:
                    place = self._breaks.pop(0) if self._breaks else None
                if place is not None:
                    _pass_to(place, data, server, client)
                    break
                client.sendall(data)
        for end in (client, server):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


def _pass_to(place: Place, answer: bytes, server: socket.socket, client: socket.socket) -> None:
    """Pass an answer on up to a place. `answer` are the first bytes of it."""
    while b"\r\n\r\n" not in answer:
        answer += server.recv(65536)
    head = answer[: answer.index(b"\r\n\r\n") + 4]
    declared = head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0]
    left = place(head, int(declared or 0))
    while len(answer) < left:
        client.sendall(answer)
        left -= len(answer)
        answer = server.recv(65536)
    client.sendall(answer[:left])


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
