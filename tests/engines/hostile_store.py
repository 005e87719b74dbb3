"""A server on loopback that answers as no store does: too little, too much, nonsense, late, or more than there is."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from enum import Enum
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from descriptors.headers import CHUNKS_HEADER, MODE_HEADER

PIECE = b"\xa5" * 65536
ENDLESS_BYTES = 1 << 40


class Malice(Enum):
    """How it answers."""

    SHORT = "short"
    """A body that ends before its length."""
    LONG = "long"
    """More bytes than were asked for."""
    MORE_PAGES = "more pages"
    """More chunks than were asked for, and as many bytes as that would be."""
    GARBAGE = "garbage"
    """No document, and no payload."""
    NO_HTTP = "no http"
    """Bytes that are no answer."""
    ENDLESS = "endless"
    """A body that would take for ever."""
    SILENT = "silent"
    """Nothing at all, until the test ends."""


@contextlib.contextmanager
def hostile_store(malice: Malice, payload_bytes: int) -> Iterator[str]:
    """Its endpoint. `payload_bytes` is the size of the right answer to a request for layers."""
    is_over = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *arguments: object) -> None:  # noqa: A002 - the standard library's name
            """It keeps no log."""

        def do_GET(self) -> None:
            self._answer()

        do_HEAD = do_PUT = do_POST = do_GET  # noqa: N815

        def _answer(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            is_fetch = "layerwise" in self.path
            right = payload_bytes if is_fetch else 64
            match malice:
                case Malice.SILENT:
                    is_over.wait()
                    self.close_connection = True
                case Malice.NO_HTTP:
                    self.wfile.write(b"\x00\xff garbage\r\n\r\n" * 100)
                    self.close_connection = True
                case Malice.GARBAGE:
                    self._send(b"{]" * 50, {})
                case Malice.SHORT:
                    self._send(PIECE[: right // 2], self._layers(1), length=right)
                    self.close_connection = True
                case Malice.LONG | Malice.MORE_PAGES:
                    many = 1 if malice is Malice.LONG else 1 << 20
                    body = PIECE * (2 * right // len(PIECE) + 1) if is_fetch else _matched(1 << 40)
                    self._send(body, self._layers(many))
                case Malice.ENDLESS:
                    self._send(b"", self._layers(1), length=ENDLESS_BYTES)
                    while not is_over.is_set():
                        self.wfile.write(PIECE)

        def _layers(self, chunk_count: int) -> dict[str, str]:
            return {MODE_HEADER: "chunk-major", CHUNKS_HEADER: str(chunk_count)}

        def _send(self, body: bytes, headers: dict[str, str], length: int | None = None) -> None:
            self.send_response(200)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body) if length is None else length))
            self.end_headers()
            self.wfile.write(body)

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, request: object, client_address: object) -> None:
            """A client that leaves is right to."""

    with Server(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            is_over.set()
            server.shutdown()


def _matched(count: int) -> bytes:
    """A lookup's answer that counts more than was asked for."""
    return json.dumps({"matched": count, "present": "/" * 64}).encode()
