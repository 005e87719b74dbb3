"""A gateway over a storage side that is a dictionary, on an event loop of its own: for what happens before storage."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import http.client
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock
from urllib.parse import urlsplit
from xml.etree import ElementTree

import uvloop
from aiohttp import web
from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

from descriptors.errors import CallerError, ErrorCode
from descriptors.messages import Transports
from descriptors.objects import ByteRange, ObjectInfo, PutRequest, ReadHead, ReadRequest
from descriptors.storage_api import Body, ObjectRead, Piece
from gateway.app import Gateway
from gateway.s3.credentials import Credential, CredentialBook
from gateway.s3.upload import check_digests
from gateway.settings import GatewaySettings
from objectcache.adapters.document_budget import DocumentBudget
from objectcache.adapters.limited_server import LimitedServer

KEY = ("OWNERKEY", "owner-secret-1")
PIECE_BYTES = 1 << 20


@dataclass
class DictStorage:
    """As much of a StorageApi as putting and getting objects needs; `failures` are raised for their keys."""

    stored: dict[tuple[str, str], bytes] = field(default_factory=dict)
    failures: dict[str, Exception] = field(default_factory=dict)
    puts: list[PutRequest] = field(default_factory=list)

    @property
    def objects(self) -> DictStorage:
        return self

    uploads = prefixes = agents = status = objects

    async def put_object(self, access_key: str, request: PutRequest, body: Body) -> ObjectInfo:
        data = b"".join([bytes(piece) async for piece in body])
        self.puts.append(request)
        check_digests(data, request.checksum, body.digests())
        if len(data) != request.nbytes:
            raise CallerError(ErrorCode.INCOMPLETE_BODY, "short")
        self.stored[request.bucket, request.key] = data
        return self._info(request.bucket, request.key)

    @contextlib.asynccontextmanager
    async def open_object(self, access_key: str, request: ReadRequest) -> AsyncIterator[ObjectRead]:
        data = memoryview(self._find(request.bucket, request.key))

        async def pieces() -> AsyncIterator[Piece]:
            for at in range(0, len(data), PIECE_BYTES):
                yield data[at : at + PIECE_BYTES]

        info = self._info(request.bucket, request.key)
        yield ObjectRead(ReadHead(info, ByteRange(0, len(data))), pieces())

    async def head_object(self, access_key: str, request: ReadRequest) -> ReadHead:
        info = self._info(request.bucket, request.key)
        return ReadHead(info, ByteRange(0, info.nbytes))

    async def transports(self, access_key: str) -> Transports:
        return Transports(False, None)

    async def own_lifecycle(self, access_key: str, bucket: str) -> list[Any]:
        return []

    def _find(self, bucket: str, key: str) -> bytes:
        if key in self.failures:
            raise self.failures[key]
        if (bucket, key) not in self.stored:
            raise CallerError(ErrorCode.NO_SUCH_KEY, "there is no such object", field="key")
        return self.stored[bucket, key]

    def _info(self, bucket: str, key: str) -> ObjectInfo:
        data = self._find(bucket, key)
        return ObjectInfo(key, len(data), hashlib.md5(data).hexdigest(), 1.0)


@dataclass
class SmallGateway:
    """Where it listens, and what it stores into."""

    port: int
    storage: DictStorage
    server: LimitedServer
    documents: DocumentBudget
    held_forms: DocumentBudget
    thread_id: int
    """The thread that its event loop runs in."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def connect(self, receive_bytes: int | None = None) -> socket.socket:
        sock = socket.socket()
        if receive_bytes is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        sock.settimeout(30)
        sock.connect(("127.0.0.1", self.port))
        return sock


@contextlib.contextmanager
def small_gateway(**settings: Any) -> Iterator[SmallGateway]:
    """A gateway on uvloop in a thread, until the block ends."""
    storage = DictStorage()
    book = CredentialBook([Credential(*KEY)])
    started, stop = threading.Event(), mock.Mock()
    found: list[tuple[int, LimitedServer, DocumentBudget, DocumentBudget]] = []

    async def serve() -> None:
        gateway = Gateway(storage, book, GatewaySettings(**settings))  # type: ignore[arg-type]
        server = gateway.server()
        assert isinstance(server, LimitedServer)
        runner = web.ServerRunner(server, shutdown_timeout=0.1)
        await runner.setup()
        with socket.create_server(("127.0.0.1", 0), backlog=4096) as bound:
            site = web.SockSite(runner, bound, backlog=4096)
            await site.start()
            found.append((bound.getsockname()[1], server, gateway.documents, gateway.held_forms))
            ended, loop = asyncio.Event(), asyncio.get_running_loop()
            stop.now = lambda: loop.call_soon_threadsafe(ended.set)
            started.set()
            await ended.wait()
            await runner.cleanup()

    def run() -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve())

    thread = threading.Thread(target=run)
    thread.start()
    assert started.wait(10)
    try:
        port, server, documents, held_forms = found[0]
        yield SmallGateway(port, storage, server, documents, held_forms, thread.ident or 0)
    finally:
        stop.now()
        thread.join(20)


class FormAuth(S3SigV4Auth):
    """botocore's signer with the payload hash given to it."""

    def __init__(self, payload_hash: str) -> None:
        super().__init__(Credentials(*KEY), "s3", "us-east-1")
        self._payload_hash = payload_hash

    def payload(self, request: Any) -> str:
        return self._payload_hash


@dataclass(frozen=True)
class Answer:
    """One answer: `code` is S3's error code, where it is an error."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def code(self) -> str | None:
        return ElementTree.fromstring(self.body).findtext("Code") if self.body.startswith(b"<?xml") else None


def signed_headers(
    method: str, target: str, headers: dict[str, str], payload_hash: str = "UNSIGNED-PAYLOAD", host: str = "h"
) -> dict[str, str]:
    """All headers to send, signed."""
    aws = AWSRequest(method=method, url=f"http://{host}{target}", headers=dict(headers))
    FormAuth(payload_hash).add_auth(aws)
    return {"Host": host, **dict(aws.headers.items())}


def head_of(method: str, target: str, headers: dict[str, str]) -> bytes:
    """A request's head."""
    return "\r\n".join(
        [f"{method} {target} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items()), "", ""]
    ).encode()


def signed_head(method: str, target: str, body_bytes: int = 0, **headers: str) -> bytes:
    """A signed request's head, for a body that is not signed."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return head_of(method, target, {**signed_headers(method, target, named), "Content-Length": str(body_bytes)})


def answer(sock: socket.socket, method: str = "GET") -> Answer:
    """The next answer."""
    reply = http.client.HTTPResponse(sock, method=method)
    reply.begin()
    return Answer(reply.status, {name.lower(): value for name, value in reply.getheaders()}, reply.read())


def sent(url: str, head: bytes, body: bytes) -> Answer:
    """The answer to these bytes."""
    address = urlsplit(url)
    with socket.create_connection((address.hostname, address.port), timeout=30) as sock:
        sock.sendall(head + body)
        return answer(sock)
