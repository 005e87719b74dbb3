"""GETs through plain sockets: the cheapest way to receive an object, with HTTP or without."""

from __future__ import annotations

import socket
import threading
from urllib.parse import urlsplit

import numpy as np
from botocore.auth import S3SigV4QueryAuth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

from bench.child import BaselineError
from bench.jobs import BUCKET, REGION, REQUEST_TIMEOUT_S, Job, Kind
from bench.objects import ObjectContent, object_key

PRESIGNED_FOR_S = 3600


class Receiver:
    """GET through a plain socket into memory that is there already, with a URL signed beforehand; or no HTTP at all.

    The receiving half is the same for both, so their ratio is what the server and HTTP cost.
    """

    def __init__(self, job: Job, content: ObjectContent) -> None:
        self._job, self._content = job, content
        self._slots = np.full((job.count_max, job.nbytes), 0xFF, dtype=np.uint8)
        self._numbers: dict[int, int] = {}
        self._local = threading.local()
        url = urlsplit(job.target.url)
        address = (url.hostname or "", url.port or 80)
        numbers = {job.number(index) for index in range(job.count_max)}
        self._heads = {number: self._head(number) for number in numbers}
        self._connections = [socket.create_connection(address, REQUEST_TIMEOUT_S) for _ in range(job.in_flight)]
        self._free = list(self._connections)

    def request(self, index: int, number: int) -> int:
        connection: socket.socket | None = getattr(self._local, "connection", None)
        if connection is None:
            connection = self._local.connection = self._free.pop()
        connection.sendall(self._heads[number])
        slot = self._slots[index].data
        received = 0 if self._job.kind is Kind.RAW else self._start_of_body(connection, slot)
        while received < len(slot):
            nbytes = connection.recv_into(slot[received:])
            if not nbytes:
                raise BaselineError("the server closed the connection early")
            received += nbytes
        self._numbers[index] = number
        return 1

    def problem(self) -> str | None:
        for connection in self._connections:
            connection.close()
        for index, number in self._numbers.items():
            if not self._content.holds(self._slots[index], number, self._job.nbytes):
                return f"{object_key(self._job.group, self._job.nbytes, number)}: wrong bytes"
        return None

    def _head(self, number: int) -> bytes:
        if self._job.kind is Kind.RAW:
            return b"%d %d\n" % (self._job.nbytes, number)
        key = object_key(self._job.group, self._job.nbytes, number)
        url = urlsplit(_presign(self._job, key))
        return f"GET {url.path}?{url.query} HTTP/1.1\r\nHost: {url.netloc}\r\n\r\n".encode()

    def _start_of_body(self, connection: socket.socket, slot: memoryview) -> int:
        """Read the head of an answer; bytes of the body that came with it go into the slot."""
        head = b""
        while b"\r\n\r\n" not in head:
            some = connection.recv(4096)
            if not some:
                raise BaselineError("the server closed the connection early")
            head += some
        head, _, body = head.partition(b"\r\n\r\n")
        if head.split(b" ", 2)[1] != b"200" or f"content-length: {self._job.nbytes}".encode() not in head.lower():
            raise BaselineError(f"unexpected answer: {head[:80]!r}")
        slot[: len(body)] = body
        return len(body)


def _presign(job: Job, key: str) -> str:
    """A URL that is good for an hour, signed by botocore."""
    request = AWSRequest(method="GET", url=f"{job.target.url}/{BUCKET}/{key}")
    credentials = Credentials(job.target.access_key, job.target.secret_key)
    S3SigV4QueryAuth(credentials, "s3", REGION, expires=PRESIGNED_FOR_S).add_auth(request)
    return str(request.url)
