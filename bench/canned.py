"""The cheapest HTTP server the load can talk to: `python -m bench.canned SEED NBYTES_MAX LISTED`, by `peers`.

Stores nothing, checks no signature, and answers a GET with the very bytes a PUT of that key would have brought. What
the load reaches against it is the load's own limit on this machine.
"""

from __future__ import annotations

import select
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from urllib.parse import parse_qs, unquote

from bench.jobs import LIST_NBYTES
from bench.objects import Group, ObjectContent, make_object_content, object_key, parse_key

CONNECTIONS_MAX = 1024
RECEIVE_BYTES = 1 << 20
JOINED_BYTES_MAX = 1 << 16
"""A body up to this size goes out with its head, in one call."""
_HEAD_END = b"\r\n\r\n"
_DATE = b"Wed, 21 Oct 2015 07:28:00 GMT"


class Connection:
    """One client: bytes of a body still to come, and what is still to be sent."""

    def __init__(self, connected: socket.socket, answer: Callable[[bytes], list[memoryview]]) -> None:
        connected.setblocking(False)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = connected
        self._answer = answer
        self._head = b""
        self._body_left = 0
        self._unsent: list[memoryview] = []

    def receive(self, scratch: memoryview) -> None:
        """Take what has come. Raises ConnectionError at its end."""
        nbytes = self.socket.recv_into(scratch)
        if not nbytes:
            raise ConnectionError("closed")
        if self._body_left:
            self._body_left -= nbytes
        else:
            self._head += scratch[:nbytes]
            head, end, body = self._head.partition(_HEAD_END)
            if not end:
                return
            self._head = head
            self._body_left = _content_length(head) - len(body)
        if not self._body_left:
            self._unsent = self._answer(self._head)
            self._head = b""

    def send(self) -> bool:
        """Send what the kernel takes; whether that was all."""
        while self._unsent:
            first = self._unsent[0]
            try:
                nbytes = self.socket.send(first)
            except BlockingIOError:
                return False
            if nbytes == len(first):
                del self._unsent[0]
            else:
                self._unsent[0] = first[nbytes:]
        return True


class Answers:
    """What is answered to a request's head."""

    def __init__(self, content: ObjectContent, listed: int) -> None:
        self._content = content
        self._listed = listed
        self._pages: dict[int, bytes] = {}

    def answer(self, head: bytes) -> list[memoryview]:
        """An answer's pieces."""
        method, target, _ = head.split(b"\r\n", 1)[0].decode("latin-1").split(" ")
        if method != "GET":
            return [memoryview(b'HTTP/1.1 200 OK\r\nContent-Length: 0\r\nETag: "0"\r\n\r\n')]
        path, _, query = target.partition("?")
        fields = parse_qs(query)
        if "list-type" in fields:
            return _reply(b"application/xml", memoryview(self._page(int(fields.get("continuation-token", ["0"])[0]))))
        nbytes, number = parse_key(unquote(path).split("/", 2)[2])
        return _reply(b"application/octet-stream", self._content.window(number, nbytes).data)

    def _page(self, first: int) -> bytes:
        if first not in self._pages:
            self._pages[first] = _list_page(first, self._listed)
        return self._pages[first]


def serve(listener: socket.socket, answers: Answers) -> None:
    """Serve for ever, in one thread."""
    poll = select.epoll()
    poll.register(listener, select.EPOLLIN)
    scratch = memoryview(bytearray(RECEIVE_BYTES))
    connections: dict[int, Connection] = {}
    while True:
        for descriptor, events in poll.poll():
            if descriptor == listener.fileno():
                connected = Connection(listener.accept()[0], answers.answer)
                connections[connected.socket.fileno()] = connected
                poll.register(connected.socket, select.EPOLLIN)
                continue
            connection = connections[descriptor]
            try:
                if events & select.EPOLLOUT:
                    if connection.send():
                        poll.modify(descriptor, select.EPOLLIN)
                    continue
                connection.receive(scratch)
                if not connection.send():
                    poll.modify(descriptor, select.EPOLLOUT)
            except ConnectionError:
                poll.unregister(descriptor)
                connections.pop(descriptor).socket.close()


def main(arguments: Sequence[str]) -> None:
    """Serve until standard input ends; says "ready PORT" first."""
    seed, nbytes_max, listed = map(int, arguments)
    answers = Answers(make_object_content(nbytes_max, seed), listed)
    with socket.create_server(("127.0.0.1", 0), backlog=CONNECTIONS_MAX) as listener:
        print("ready", listener.getsockname()[1], flush=True)
        threading.Thread(target=serve, args=(listener, answers), daemon=True).start()
        sys.stdin.read()


def _reply(content_type: bytes, body: memoryview) -> list[memoryview]:
    head = b'HTTP/1.1 200 OK\r\nContent-Length: %d\r\nContent-Type: %s\r\nETag: "0"\r\nLast-Modified: %s\r\n\r\n' % (
        len(body),
        content_type,
        _DATE,
    )
    if len(body) <= JOINED_BYTES_MAX:
        return [memoryview(head + body)]
    return [memoryview(head), body]


def _content_length(head: bytes) -> int:
    lowered = head.lower()
    start = lowered.find(b"\r\ncontent-length:")
    return int(lowered[start + 17 :].split(b"\r\n", 1)[0]) if start >= 0 else 0


def _list_page(first: int, listed: int) -> bytes:
    """A page of ListObjectsV2; the continuation token is the number of the next key."""
    last = min(first + 1000, listed)
    entries = "".join(
        f"<Contents><Key>{object_key(Group.LIST, LIST_NBYTES, number)}</Key>"
        f'<LastModified>2015-10-21T07:28:00.000Z</LastModified><ETag>"0"</ETag><Size>{LIST_NBYTES}</Size>'
        "<StorageClass>STANDARD</StorageClass></Contents>"
        for number in range(first, last)
    )
    more = f"<NextContinuationToken>{last}</NextContinuationToken>" if last < listed else ""
    return (
        '<?xml version="1.0" encoding="UTF-8"?><ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
        f"<Name>bench</Name><KeyCount>{last - first}</KeyCount><MaxKeys>1000</MaxKeys>"
        f"<IsTruncated>{'true' if more else 'false'}</IsTruncated>{more}{entries}</ListBucketResult>"
    ).encode()


if __name__ == "__main__":
    main(sys.argv[1:])
