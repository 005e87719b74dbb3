"""The cheapest senders the load can talk to: `python -m bench.beds.canned http|tcp SEED NBYTES_MAX LISTED`.

The HTTP server stores nothing, checks no signature, and answers a GET with the very bytes a PUT of that key would have
brought. What the load reaches against it is the load's own limit on this machine. Over plain TCP an object is sent for
each line "NBYTES NUMBER".
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
import threading
from collections.abc import Callable
from functools import cache, partial
from typing import cast
from urllib.parse import parse_qs, unquote

import uvloop

from bench.beds.processes import say
from bench.beds.s3_jobs import LIST_NBYTES, Group, ObjectContent, make_object_content, object_key, parse_key

CONNECTIONS_MAX = 1024
PAGE_KEYS = 1000
RECEIVE_BYTES = 1 << 20
SEND_BYTES_MAX = 1 << 20
JOINED_BYTES_MAX = 1 << 16
"""A body up to this size goes out with its head, in one call."""
_HEAD_END = b"\r\n\r\n"
_HEAD = (
    b'HTTP/1.1 200 OK\r\nContent-Length: %d\r\nContent-Type: %s\r\nETag: "0"\r\n'
    b"Last-Modified: Wed, 21 Oct 2015 07:28:00 GMT\r\n\r\n"
)


class Connection(asyncio.BufferedProtocol):
    """One client: the head of its request, and bytes of a body still to come. All receive into the same memory."""

    def __init__(self, scratch: memoryview, answer: Callable[[bytes], list[memoryview]]) -> None:
        self._scratch, self._answer = scratch, answer
        self._head, self._body_left = b"", 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._scratch

    def buffer_updated(self, nbytes: int) -> None:
        if self._body_left:
            self._body_left -= nbytes
        else:
            self._head += self._scratch[:nbytes]
            head, end, body = self._head.partition(_HEAD_END)
            if not end:
                return
            self._head, self._body_left = head, _content_length(head) - len(body)
        if not self._body_left:
            self._transport.writelines(self._answer(self._head))
            self._head = b""


def serve(listener: socket.socket, content: ObjectContent, listed: int) -> None:
    """Serve for ever, in one thread."""

    async def run() -> None:
        connect = partial(Connection, memoryview(bytearray(RECEIVE_BYTES)), partial(_answer, content, listed))
        loop = asyncio.get_running_loop()
        server = await loop.create_server(connect, sock=listener, backlog=CONNECTIONS_MAX)
        await server.serve_forever()

    uvloop.run(run())


def _answer(content: ObjectContent, listed: int, head: bytes) -> list[memoryview]:
    """The pieces of the answer to a request's head."""
    method, target, _ = head.split(b"\r\n", 1)[0].decode("latin-1").split(" ")
    if method != "GET":
        return [memoryview(b'HTTP/1.1 200 OK\r\nContent-Length: 0\r\nETag: "0"\r\n\r\n')]
    path, _, query = target.partition("?")
    fields = parse_qs(query)
    if "list-type" in fields:
        page = _list_page(int(fields.get("continuation-token", ["0"])[0]), listed)
        return _reply(b"application/xml", memoryview(page))
    nbytes, number = parse_key(unquote(path).split("/", 2)[2])
    return _reply(b"application/octet-stream", content.window(number, nbytes).data)


def _reply(content_type: bytes, body: memoryview) -> list[memoryview]:
    head = _HEAD % (len(body), content_type)
    return [memoryview(head + body)] if len(body) <= JOINED_BYTES_MAX else [memoryview(head), body]


def _content_length(head: bytes) -> int:
    lowered = head.lower()
    start = lowered.find(b"\r\ncontent-length:")
    return int(lowered[start + 17 :].split(b"\r\n", 1)[0]) if start >= 0 else 0


@cache
def _list_page(first: int, listed: int) -> bytes:
    """A page of ListObjectsV2; the continuation token is the number of the next key."""
    last = min(first + PAGE_KEYS, listed)
    entries = "".join(
        f"<Contents><Key>{object_key(Group.LIST, LIST_NBYTES, number)}</Key>"
        f'<LastModified>2015-10-21T07:28:00.000Z</LastModified><ETag>"0"</ETag><Size>{LIST_NBYTES}</Size>'
        "<StorageClass>STANDARD</StorageClass></Contents>"
        for number in range(first, last)
    )
    more = f"<NextContinuationToken>{last}</NextContinuationToken>" if last < listed else ""
    return (
        '<?xml version="1.0" encoding="UTF-8"?><ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
        f"<Name>bench</Name><KeyCount>{last - first}</KeyCount><MaxKeys>{PAGE_KEYS}</MaxKeys>"
        f"<IsTruncated>{'true' if more else 'false'}</IsTruncated>{more}{entries}</ListBucketResult>"
    ).encode()


def send(listener: socket.socket, content: ObjectContent, _: int) -> None:
    """Send objects for ever, in one thread for each connection: send calls leave the interpreter lock."""
    while True:
        connection, _address = listener.accept()
        threading.Thread(target=_send_to, args=(connection, content), daemon=True).start()


def _send_to(connection: socket.socket, content: ObjectContent) -> None:
    with connection, contextlib.suppress(ConnectionError), connection.makefile("rb") as lines:
        for line in lines:
            nbytes, number = map(int, line.split())
            view = content.window(number, nbytes).data
            for first in range(0, nbytes, SEND_BYTES_MAX):
                connection.sendall(view[first : first + SEND_BYTES_MAX])


def main() -> None:
    """Serve until standard input ends; says "ready PORT" first."""
    seed, nbytes_max, listed = map(int, sys.argv[2:])
    content = make_object_content(nbytes_max, seed)
    with socket.create_server(("127.0.0.1", 0), backlog=CONNECTIONS_MAX) as listener:
        say(f"ready {listener.getsockname()[1]}")
        answer = serve if sys.argv[1] == "http" else send
        threading.Thread(target=answer, args=(listener, content, listed), daemon=True).start()
        sys.stdin.read()


if __name__ == "__main__":
    main()
