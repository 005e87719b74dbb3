"""Tracing through real servers: one id from client to storage server, and where each request's time went."""

from __future__ import annotations

import http.client
import json
import logging
import re
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path as FilePath
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest

from descriptors.descriptor import Descriptor, RdmaTarget
from descriptors.descriptor_codec import encode_binary
from descriptors.errors import ChunkUnavailable
from descriptors.peer_auth import AUTH_HEADER, PeerSecrets
from descriptors.rdma_token import TOKEN_HEADER, RdmaToken, encode_token
from descriptors.tracing import (
    PEER_REQUEST_ID_HEADER,
    REQUEST_ID_HEADER,
    TIMING_HEADER,
    ServerTiming,
    parse_timing,
)
from gateway.app import GatewaySettings
from gateway.s3.credentials import Credential
from gateway.storage_client import RemoteStorage
from nixl_client.objects import Path
from nixl_client.session.timing import Timing
from nixl_client.transports.shared_memory import allocate
from objectcache.cli.listening import Listen
from objectcache.cli.serve import GatewayServer, StorageServer
from storage_server.settings import StorageSettings
from tests.support.chunks import LAYOUT, N, make_chunks
from tests.support.requests import OWNER, Reply, request, s3_client, signed
from tests.support.servers import UCX, LocalStack, Stack
from tests.support.waiting import eventually

HEADER = re.compile(r"gateway;dur=\d+\.\d{3}, storage;dur=\d+\.\d{3}, transfer;dur=\d+\.\d{3}\Z")
ROUNDING_S = 3e-6
LARGE_BYTES = 3 << 20
SECRET = PeerSecrets(b"s" * 32)
HOSTILE_IDS = ("short", "x" * 65, "sixteen characters?", "0123456\t89abcdef", "0123456789abcdé!", "")


class Apart:
    """Gateway and storage server in one process, joined by HTTP, so that both ends' logs can be read."""

    def __init__(self, settings: StorageSettings) -> None:
        self._settings = settings
        self._servers: list[Any] = []

    async def start(self) -> None:
        behind = StorageServer(self._settings, SECRET, Listen())
        await behind.start()
        front = GatewayServer(RemoteStorage(behind.url, SECRET), GatewaySettings(), [Credential(*OWNER)], Listen())
        await front.start()
        self._servers = [front, behind]
        self.storage, self.url, self.storage_url = behind.storage, front.url, behind.url

    async def close(self) -> None:
        for server in self._servers:
            await server.close()


class LocalApart(LocalStack):
    async def _start(self) -> Any:
        server = Apart(self._settings)
        await server.start()
        return server


@pytest.fixture(params=["together", "apart"])
def logged(
    request: pytest.FixtureRequest, tmp_path: FilePath, caplog: pytest.LogCaptureFixture
) -> Iterator[LocalStack]:
    """Servers in this process, whose request lines `caplog` has."""
    kind = LocalApart if request.param == "apart" else LocalStack
    with kind(tmp_path / "data", ucx=UCX, stall_timeout_s=30.0) as running:
        running.call(running.storage.objects.create_bucket("OWNERKEY", "chunks"))
        caplog.set_level(logging.INFO, "objectcache.requests")
        yield running


def lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, str]]:
    """The words of each request line; values never have a space here."""
    messages = [record.getMessage() for record in caplog.records if record.name == "objectcache.requests"]
    return [dict(word.split("=", 1) for word in message.split(" ")) for message in messages]


def line_of(caplog: pytest.LogCaptureFixture, by: str, operation: str) -> dict[str, str]:
    """The one line; an answer with a body can be read to its end before its line is written."""

    def found() -> list[dict[str, str]]:
        return [line for line in lines(caplog) if (line["by"], line["operation"]) == (by, operation)]

    assert eventually(lambda: len(found()) > 0), lines(caplog)
    (line,) = found()
    return line


def is_apart(stack: LocalStack) -> bool:
    return isinstance(stack, LocalApart)


@contextmanager
def within() -> Iterator[list[float]]:
    """Collects sums of a request's parts, none of which may exceed the time the block took."""
    sums: list[float] = []
    began_s = time.monotonic()
    yield sums
    total_s = time.monotonic() - began_s
    assert sums
    assert max(sums) <= total_s + ROUNDING_S


def parts_of(reply: Reply) -> ServerTiming:
    assert HEADER.match(reply.headers[TIMING_HEADER]), reply.headers
    return parse_timing(reply.headers[TIMING_HEADER])


def sum_of(timing: ServerTiming | Timing) -> float:
    client_s = timing.client_s if isinstance(timing, Timing) else 0.0
    return client_s + timing.gateway_s + timing.storage_s + timing.transfer_s


def put_chunks(stack: Stack | LocalStack) -> list[str]:
    keys, chunks = make_chunks(N, LAYOUT, seed=44)
    with stack.client("chunks", "http") as client:
        client.put_chunks(keys, list(chunks))
    return keys


def test_a_fetch_says_where_its_time_went(servers: Stack, transport: str) -> None:
    keys = put_chunks(servers)
    buffer = allocate(LAYOUT.delivery_bytes(N))
    with servers.client("chunks", transport) as client:
        client.register_buffer(buffer)
        for _ in range(2):
            with within() as sums:
                timing = client.fetch(keys, LAYOUT, buffer).wait(30).timing
                sums.append(sum_of(timing))
            assert min(timing.client_s, timing.gateway_s, timing.storage_s, timing.transfer_s) > 0


@pytest.mark.parametrize("path", list(Path))
def test_a_moved_object_says_where_its_time_went(servers: Stack, path: Path) -> None:
    if path is Path.BUFFER and len(servers.processes) == 2:
        path = Path.DIRECT  # a gateway apart has no memory to stage in
    buffer = np.arange(300_000, dtype=np.int64).view(np.uint8)
    with servers.client("chunks", "ucx") as client:
        for move in (client.objects.put_object, client.objects.get_object):
            with within() as sums:
                moved = move(f"moved-{path.value}", buffer, path=path)
                sums.append(sum_of(moved.timing))
            assert (moved.path, moved.headers[REQUEST_ID_HEADER]) == (path, moved.request_id)
            assert min(moved.timing.gateway_s, moved.timing.storage_s, moved.timing.transfer_s) > 0


def test_every_answer_carries_the_split(servers: Stack) -> None:
    """Put, get (in one piece and by a thread), head, list, delete, a descriptor GET with a body, and refusals."""
    keys = put_chunks(servers)
    descriptor = encode_binary(Descriptor(tuple(keys), 6, 16, 20_000))
    for method, target, body, status in (
        ("PUT", "/chunks/small", b"s" * 4096, 200),
        ("PUT", "/chunks/large", b"l" * LARGE_BYTES, 200),
        ("GET", "/chunks/small", b"", 200),
        ("GET", "/chunks/large", b"", 200),
        ("HEAD", "/chunks/small", b"", 200),
        ("GET", "/chunks?list-type=2", b"", 200),
        ("POST", "/chunks?layerwise", descriptor, 200),
        ("DELETE", "/chunks/small", b"", 204),
        ("GET", "/chunks/absent", b"", 404),
        ("GET", "/no-such-bucket/key", b"", 404),
    ):
        with within() as sums:
            reply = servers.request(method, target, body=body)
            parts = parts_of(reply)
            sums.append(sum_of(parts))
        assert reply.status == status
        assert min(parts.gateway_s, parts.storage_s) > 0, (method, target)
    unsigned = parts_of(servers.request("GET", "/chunks/large", key=None))
    assert (unsigned.storage_s, unsigned.transfer_s) == (0, 0)
    assert unsigned.gateway_s > 0


def test_a_named_request_is_answered_with_its_name(servers: Stack) -> None:
    """Errors too, even of those who may do nothing; the gateway's own id stays what S3 calls the request id."""
    named = {REQUEST_ID_HEADER: "tracing.test-0001"}
    for method, target, key, status in (
        ("PUT", "/chunks/named", OWNER, 200),
        ("GET", "/chunks/named", OWNER, 200),
        ("GET", "/chunks/absent", OWNER, 404),
        ("GET", "/chunks/named", None, 403),
    ):
        reply = servers.request(method, target, headers=named, key=key)
        assert (reply.status, reply.headers[REQUEST_ID_HEADER]) == (status, "tracing.test-0001")
        assert re.fullmatch("[0-9A-F]{16}", reply.headers["x-amz-request-id"])
    again = servers.request("GET", "/chunks/named", headers=named)
    assert again.status == 200, "an id in the header names a request; it is not used up"


def test_errors_of_descriptors_and_tokens_carry_their_ids(servers: Stack) -> None:
    request_id = uuid.uuid4().hex
    missing = Descriptor(("absent",), 1, 16, 100, request_id=request_id)
    reply = servers.request("POST", "/chunks?layerwise", body=encode_binary(missing))
    assert (reply.code, reply.headers[REQUEST_ID_HEADER]) == ("NoSuchChunk", request_id)
    nowhere = Descriptor(("absent",), 1, 16, 100, rdma_target=RdmaTarget("nobody", "r", 0, 100), request_id=request_id)
    reply = servers.request("PUT", "/chunks?layerwise", body=encode_binary(nowhere))
    assert (reply.status, reply.headers[REQUEST_ID_HEADER]) == (400, request_id)
    token = encode_token(RdmaToken("nobody", "r", 0, 100, request_id))
    reply = servers.request("GET", "/chunks/absent", headers={TOKEN_HEADER: token})
    assert (reply.code, reply.headers[REQUEST_ID_HEADER]) == ("NoSuchAgent", request_id)


@pytest.mark.parametrize("hostile", HOSTILE_IDS)
def test_what_is_no_request_id_is_ignored(servers: Stack, hostile: str) -> None:
    """It would end up in headers and logs of two processes."""
    reply = servers.request("PUT", "/chunks/hostile", headers={REQUEST_ID_HEADER: hostile.encode().decode("latin-1")})
    assert reply.status in (200, 403), "botocore signs no blank at a value's end"
    assert REQUEST_ID_HEADER not in reply.headers


@pytest.mark.slow
def test_a_fetchs_id_is_in_the_logs_of_every_process(
    logged: LocalStack, transport: str, caplog: pytest.LogCaptureFixture
) -> None:
    keys = put_chunks(logged)
    caplog.clear()
    buffer = allocate(LAYOUT.delivery_bytes(N))
    with logged.client("chunks", transport) as client:
        fetch = client.fetch(keys, LAYOUT, buffer)
        fetch.wait(30)
        line = line_of(caplog, "gateway", "layerwise")
        assert (line["request"], line["status"], line["bytes"]) == (fetch.request_id, "200", str(buffer.nbytes))
        assert min(float(line[f"{part}_ms"]) for part in ("gateway", "storage", "transfer")) > 0
        assert len(line["trace"]) == 16
        if is_apart(logged):
            line = line_of(caplog, "storage", "deliver")
            assert (line["request"], line["status"], line["bytes"]) == (fetch.request_id, "200", str(buffer.nbytes))
            assert min(float(line[f"{part}_ms"]) for part in ("storage", "transfer")) > 0


def test_plain_requests_are_logged_under_the_clients_id_or_ours(
    logged: LocalStack, caplog: pytest.LogCaptureFixture
) -> None:
    named = {REQUEST_ID_HEADER: "tracing.test-0002"}
    request(logged.url, "PUT", "/chunks/a", body=b"x" * 5000, headers=named)
    reply = request(logged.url, "GET", "/chunks/a")
    trace_id = reply.headers["x-amz-request-id"]
    for operation, call, request_id in (
        ("put_object", "put_object", "tracing.test-0002"),
        ("get_object", "open_object", trace_id),
    ):
        line = line_of(caplog, "gateway", operation)
        assert (line["request"], line["status"], line["bytes"]) == (request_id, "200", "5000")
        assert (line["bucket"], line["key"]) == ('"chunks"', '"a"')
        if is_apart(logged):
            line = line_of(caplog, "storage", call)
            assert (line["request"], line["status"], line["bytes"]) == (request_id, "200", "5000")


@pytest.mark.slow
def test_a_large_body_is_accounted_for(logged: LocalStack, caplog: pytest.LogCaptureFixture) -> None:
    """Sent by a thread or relayed: what follows the head is in the log."""
    request(logged.url, "PUT", "/chunks/large", body=b"x" * LARGE_BYTES)
    assert len(request(logged.url, "GET", "/chunks/large").body) == LARGE_BYTES
    line = line_of(caplog, "gateway", "get_object")
    assert line["bytes"] == str(LARGE_BYTES)
    assert float(line["transfer_ms"]) > 0


@pytest.mark.slow
def test_moved_objects_are_logged_under_their_tokens_id(logged: LocalStack, caplog: pytest.LogCaptureFixture) -> None:
    buffer = np.ones(70_000, dtype=np.uint8)
    with logged.client("chunks", "ucx") as client:
        put = client.objects.put_object("moved", buffer)
        got = client.objects.get_object("moved", buffer)
    for moved, operation, call in ((put, "put_object", "put_object_from"), (got, "get_object", "get_object_into")):
        processes = {"gateway": operation} | ({"storage": call} if is_apart(logged) else {})
        for by, name in processes.items():
            line = line_of(caplog, by, name)
            assert (line["request"], line["bytes"]) == (moved.request_id, "70000")
            assert float(line["transfer_ms"]) > 0


@pytest.mark.slow
def test_failures_are_logged_with_their_code_and_no_bytes(logged: LocalStack, caplog: pytest.LogCaptureFixture) -> None:
    request(logged.url, "GET", "/chunks/absent")
    with logged.client("chunks", "http") as client, pytest.raises(ChunkUnavailable):
        client.fetch(["absent"], LAYOUT, np.zeros(LAYOUT.chunk_bytes, np.uint8)).wait(30)
    line = line_of(caplog, "gateway", "get_object")
    assert (line["status"], line["code"], line["bytes"]) == ("404", "NoSuchKey", "0")
    line = line_of(caplog, "gateway", "layerwise")
    assert (line["status"], line["code"]) == ("404", "NoSuchChunk")
    if is_apart(logged):
        line = line_of(caplog, "storage", "deliver")
        assert (line["status"], line["code"], line["bytes"]) == ("404", "NoSuchChunk", "0")


@pytest.mark.slow
def test_a_request_cut_off_is_logged_as_unanswered(logged: LocalStack, caplog: pytest.LogCaptureFixture) -> None:
    """By an end in mid-upload: nobody is there to be answered."""
    address = urlsplit(logged.url)
    connection = http.client.HTTPConnection(address.netloc)
    headers = signed(logged.url, "PUT", "/chunks/cut", b"x" * 1000, {}, OWNER)
    connection.request("PUT", "/chunks/cut", body=b"", headers={**headers, "content-length": "1000"})
    connection.close()
    line = line_of(caplog, "gateway", "put_object")
    assert (line["status"], line["code"]) in (("0", "ClientGone"), ("400", "IncompleteBody"))


@pytest.mark.slow
def test_no_name_breaks_a_line_and_no_signature_is_in_one(logged: LocalStack, caplog: pytest.LogCaptureFixture) -> None:
    """Keys are the client's to choose; a presigned URL is a credential."""
    s3 = s3_client(logged.url)
    key = 'a b="c"\n\r\x1b[31m\u2028é' + "k" * 300
    s3.put_object(Bucket="chunks", Key=key, Body=b"1")
    url = s3.generate_presigned_url("get_object", Params={"Bucket": "chunks", "Key": key})
    connection = http.client.HTTPConnection(urlsplit(url).netloc)
    connection.request("GET", url[url.index("/chunks") :])
    assert connection.getresponse().read() == b"1"
    connection.close()
    assert eventually(lambda: "operation=get_object" in caplog.text)
    messages = [record.getMessage() for record in caplog.records if record.name == "objectcache.requests"]
    assert len([message for message in messages if "by=gateway" in message]) == 2
    for message in messages:
        assert message.isascii()
        assert message.isprintable()
        assert "ignature" not in message
        assert OWNER[1] not in message
    name = messages[-1].partition(" key=")[2] if " key=" in messages[-1] else messages[0].partition(" key=")[2]
    assert json.loads(name) == key[:128] + "..."


def test_a_storage_server_logs_no_id_that_is_none(tmp_path: FilePath, caplog: pytest.LogCaptureFixture) -> None:
    """Calls that are not a gateway's are refused, and logged without what they say of themselves."""
    with LocalApart(tmp_path / "data") as running:
        caplog.set_level(logging.INFO, "objectcache.requests")
        url = running.server.storage_url
        for sent, said in (("0123456789abcdef", "0123456789abcdef"), ("evil id with blanks", "-"), ("x" * 65, "-")):
            caplog.clear()
            reply = request(
                url, "POST", "/v1/evil", headers={PEER_REQUEST_ID_HEADER: sent, AUTH_HEADER: "v1"}, key=None
            )
            assert reply.status == 403
            line = line_of(caplog, "storage", "-")
            assert (line["request"], line["status"], line["code"]) == (said, "403", "AccessDenied")
