"""What a hostile or unlucky client, or a second server, must not be able to do."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
import uuid
from pathlib import Path
from typing import Any
from unittest import mock
from urllib.parse import urlsplit

import numpy as np
import pytest
import uvloop

from descriptors.descriptor import Delivery, Descriptor, RdmaTarget
from descriptors.descriptor_codec import encode_binary, encode_json
from descriptors.errors import ObjectCacheError
from descriptors.layout import ChunkLayout
from descriptors.messages import AgentRegistration, Region, registration_body
from descriptors.objects import ListRequest, PutRequest
from nixl_client.transports.http import UnansweredError
from nixl_client.transports.ucx import NixlThread
from objectcache.adapters.nixl_memory import Memory
from objectcache.adapters.response_sink import abort_connection
from storage_server.home.embedded import EmbeddedStore
from storage_server.settings import StorageSettings
from tests.support.chunks import LAYOUT, BytesBody, N, layer_of, make_chunks
from tests.support.cut_proxy import cut_proxy
from tests.support.requests import OTHER, OWNER, descriptor_request, request, signed
from tests.support.servers import LocalStack, has_stopped, is_idle, stack
from tests.support.waiting import eventually


def send_and_hang_up(url: str, method: str, target: str, body: bytes) -> None:
    """A signed request whose sender does not wait for the answer."""
    headers = {**signed(url, method, target, body, {}, OWNER), "Content-Length": str(len(body))}
    head = "".join(f"{name}: {value}\r\n" for name, value in headers.items() if name.lower() != "host")
    address = urlsplit(url)
    with socket.create_connection((address.hostname, address.port), timeout=60) as sock:
        sock.sendall(f"{method} {target} HTTP/1.1\r\nHost: {address.netloc}\r\n{head}\r\n".encode() + body)


@pytest.mark.slow
@pytest.mark.with_ucx
def test_registrations_whose_sender_hangs_up_leave_the_engine_running(local: LocalStack, keys: list[str]) -> None:
    """One dropped connection must not end the thread that serves everybody."""
    receiver = NixlThread()
    buffer = np.zeros(4096, dtype=np.uint8)
    registration = receiver.register(Memory(int(buffer.ctypes.data), buffer.nbytes))
    region = Region("kv", int(buffer.ctypes.data), buffer.nbytes)
    body = registration_body(AgentRegistration(receiver.metadata(), (region,), 60.0))
    for _ in range(20):
        send_and_hang_up(local.url, "POST", "/_objectcache/agents", body)
    target = np.zeros(LAYOUT.delivery_bytes(N), dtype=np.uint8)
    with local.client("chunks", "ucx") as client:
        assert client.fetch(keys, LAYOUT, target).wait(30).chunk_count == N
    receiver.deregister(registration)
    receiver.stop()


@pytest.mark.slow
def test_nothing_written_to_a_buffer_after_abort_reaches_the_old_client() -> None:
    """A slot goes to another delivery right after an abort; uvloop would still try its queue once."""

    async def trial() -> bytes:
        loop = asyncio.get_running_loop()
        with socket.create_server(("127.0.0.1", 0)) as listener:
            reader = socket.create_connection(listener.getsockname())
            reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65_536)
            accepted, _ = listener.accept()
        got, is_reading = bytearray(), threading.Event()

        def read() -> None:
            is_reading.wait()
            with contextlib.suppress(OSError):
                while piece := reader.recv(1 << 18):
                    got.extend(piece)

        thread = threading.Thread(target=read)
        thread.start()
        accepted.setblocking(False)
        transport, _ = await loop.connect_accepted_socket(asyncio.Protocol, accepted)
        transport.set_write_buffer_limits(high=0)
        slot = bytearray(b"A" * (4 << 20))
        transport.write(memoryview(slot))
        await asyncio.sleep(0.01)  # what the socket takes is written meanwhile, and the rest waits
        is_reading.set()
        time.sleep(0.002)  # noqa: ASYNC251 - the loop is busy elsewhere while the client drains the socket
        abort_connection(mock.Mock(transport=transport))
        slot[:] = b"B" * len(slot)
        await asyncio.to_thread(thread.join, 60)
        reader.close()
        return bytes(got)

    for make_loop in (uvloop.new_event_loop, asyncio.new_event_loop):
        with asyncio.Runner(loop_factory=make_loop) as runner:
            for _ in range(10):
                assert b"B" not in runner.run(trial())


def test_a_read_that_fails_midway_is_cut_short_and_never_padded_with_an_error(local: LocalStack) -> None:
    """A 200 with the announced length whose last bytes are an error message would be wrong bytes."""
    body = os.urandom((2 << 20) + 300)
    with contextlib.closing(local.http()) as http:
        http.request("PUT", "/chunks/cut", body=body)
        local.damage("chunks", "cut", (1 << 20) + 5)
        with pytest.raises(UnansweredError):
            http.request("GET", "/chunks/cut").body.decode()


@pytest.mark.slow
def test_a_second_server_on_the_same_directory_refuses_to_start(tmp_path: Path) -> None:
    """Its sweep would take the first one's unfinished objects for leftovers."""
    with stack("together", tmp_path) as running:
        command = [sys.executable, "-m", "objectcache", "serve", "--data", str(running.data_dir), "--port", "0"]
        second = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert second.returncode == 1
        assert "in use by another server" in second.stderr
        running.s3().create_bucket(Bucket="still-here")


@pytest.mark.slow
def test_readers_that_stop_reading_are_dropped_and_others_served(tmp_path: Path) -> None:
    """More stalled readers than the pool has memory for: each is cut off after the stall limit."""
    layout = ChunkLayout(4, 16, 1 << 20)
    settings = {"aggregation_bytes": 1 << 20, "window_bytes": 2 << 20, "staging_bytes": 4 << 20, "stall_timeout_s": 2.0}
    with LocalStack(tmp_path / "data", **settings) as local, contextlib.ExitStack() as held:
        local.call(local.storage.objects.create_bucket("OWNERKEY", "chunks"))
        keys, chunks = make_chunks(4, layout)
        with local.client("chunks", "http") as client:
            client.put_chunks(keys, list(chunks))
            body = encode_binary(Descriptor(tuple(keys), 4, 16, 1 << 20, Delivery.LAYER_MAJOR))
            address = urlsplit(local.url)
            for _ in range(6):
                sock = held.enter_context(socket.socket())
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                sock.connect((address.hostname, address.port))
                sock.sendall(descriptor_request(local.url, body))
            assert eventually(lambda: local.storage.staging.free_count == 2), "one key's half"
            buffer = np.zeros(layout.delivery_bytes(4), dtype=np.uint8)
            client.fetch(keys, layout, buffer, delivery=Delivery.LAYER_MAJOR).wait(60)
        assert np.array_equal(buffer[: layout.layer_bytes(4)], layer_of(chunks, layout, 0).ravel())


class RawAgent:
    """A client agent driven by hand."""

    def __init__(self, local: LocalStack, nbytes: int) -> None:
        self.local = local
        self.receiver = NixlThread()
        self.buffer = np.zeros(nbytes, dtype=np.uint8)
        self.registration = self.receiver.register(Memory(int(self.buffer.ctypes.data), nbytes))
        self.receiver.listen("keeps-the-receiver-polling", lambda _: None)

    def body(self, length: int | None = None) -> bytes:
        region = Region("kv", int(self.buffer.ctypes.data), length or self.buffer.nbytes)
        return registration_body(AgentRegistration(self.receiver.metadata(), (region,), 60.0))

    def register(self) -> str:
        reply = request(self.local.url, "POST", "/_objectcache/agents", body=self.body())
        return str(json.loads(reply.body)["agent_id"])

    def close(self) -> None:
        self.receiver.deregister(self.registration)
        self.receiver.stop()


@pytest.fixture
def raw(local: LocalStack) -> Any:
    agent = RawAgent(local, LAYOUT.delivery_bytes(N))
    yield agent
    agent.close()


def start_delivery(local: LocalStack, agent_id: str, keys: list[str]) -> threading.Thread:
    wanted = Descriptor(
        tuple(keys), 6, 16, 20_000, Delivery.LAYER_MAJOR, request_id=uuid.uuid4().hex,
        rdma_target=RdmaTarget(agent_id, "kv", 0, LAYOUT.delivery_bytes(N)),
    )  # fmt: skip
    thread = threading.Thread(target=lambda: request(local.url, "POST", "/chunks?layerwise", body=encode_json(wanted)))
    thread.start()
    assert eventually(lambda: local.storage.requests.active_count == 1)
    return thread


@pytest.mark.slow
@pytest.mark.with_ucx
def test_registering_a_name_again_stops_what_writes_under_the_old_one(
    local: LocalStack, keys: list[str], raw: RawAgent
) -> None:
    """Else deleting the new agent would be answered while the old one's writes are in flight."""
    local.hold_from_layer(2)
    thread = start_delivery(local, raw.register(), keys)
    raw.register()
    assert has_stopped(local)
    thread.join(60)
    assert len(local.storage.agents.table) == 1


@pytest.mark.slow
@pytest.mark.with_ucx
def test_renewing_with_other_memory_under_the_same_region_stops_its_deliveries(
    local: LocalStack, keys: list[str], raw: RawAgent
) -> None:
    """A region is its address and length, not its name."""
    local.hold_from_layer(2)
    agent_id = raw.register()
    thread = start_delivery(local, agent_id, keys)
    fields = json.loads(raw.body(length=4096))
    reply = request(local.url, "POST", f"/_objectcache/agents/{agent_id}", body=json.dumps(fields).encode())
    assert reply.status == 200, reply.body
    assert has_stopped(local)
    thread.join(60)


@pytest.mark.slow
def test_a_gateway_that_lost_its_storage_server_gives_no_answer_to_a_ucx_fetch(tmp_path: Path) -> None:
    """An answer would say that the buffer is free; the storage server may still be writing."""
    layout = ChunkLayout(64, 16, 65536)
    with stack("apart", tmp_path) as running:
        running.s3().create_bucket(Bucket="chunks")
        keys, chunks = make_chunks(64, layout)
        client = running.client("chunks", "ucx")
        client.put_chunks(keys, list(chunks))
        buffer = np.zeros(layout.delivery_bytes(64), np.uint8)
        client.register_buffer(buffer)
        running.processes[0].send_signal(19)  # SIGSTOP: it can neither finish nor answer
        fetch = client.fetch(keys, layout, buffer)
        time.sleep(1.0)  # the request comes as far as the storage server, which cannot say so
        running.processes[0].kill()
        with pytest.raises(ObjectCacheError) as failed:
            fetch.wait(30)
        assert isinstance(failed.value, UnansweredError)
        assert not fetch.is_settled
        with pytest.raises(ObjectCacheError):
            client.close()


def test_an_id_stays_used_across_a_restart(tmp_path: Path) -> None:
    """A signature outlives the process that carried it out."""
    body = encode_json(Descriptor(("0" * 64,), 6, 16, 20_000, request_id="used-before-restart"))
    for expected in ("NoSuchBucket", "RequestReplayed", "RequestReplayed"):
        with LocalStack(tmp_path / "data", shm=False) as running:
            assert request(running.url, "POST", "/nowhere?layerwise=", body=body).code == expected
            other = request(running.url, "POST", "/nowhere?layerwise=", body=body, key=OTHER)
            assert other.code == expected, "the other key's own"


@pytest.mark.slow
def test_a_clock_that_leaps_expires_no_agent(local: LocalStack, monkeypatch: pytest.MonkeyPatch) -> None:
    """Time of day is set by people and NTP; how long a registration lasts is not theirs to change."""
    with local.client("chunks", "shm") as client:
        client.register_buffer(client.allocate_buffer(4096))
        real = time.time
        monkeypatch.setattr(time, "time", lambda: real() + 10 * 365 * 86_400)
        table, sweeps = local.storage.agents.table, list[float]()
        expired = table.expired

        def counted(now_s: float) -> Any:
            sweeps.append(now_s)
            return expired(now_s)

        monkeypatch.setattr(table, "expired", counted)
        assert eventually(lambda: len(sweeps) >= 2)
        assert len(expired(time.monotonic())) == 0
        assert len(table) == 1
        monkeypatch.undo()


def test_layerwise_requests_cannot_be_presigned(local: LocalStack, keys: list[str]) -> None:
    """A URL that is valid for days would outlive what the server remembers of request ids."""
    from botocore.auth import S3SigV4QueryAuth
    from botocore.awsrequest import AWSRequest
    from botocore.credentials import Credentials

    body = encode_json(Descriptor(tuple(keys), 6, 16, 20_000))
    aws = AWSRequest("POST", f"{local.url}/chunks?layerwise=", data=body)
    S3SigV4QueryAuth(Credentials(*OWNER), "s3", "us-east-1", 3600).add_auth(aws)
    reply = request(local.url, "POST", aws.url.removeprefix(local.url), body=body, key=None)
    assert (reply.status, reply.code, reply.named_field) == (403, "AccessDenied", "X-Amz-Signature")


@pytest.mark.parametrize(
    ("method", "target", "headers", "code"),
    [
        ("GET", "/chunks?list-type=2&max-keys=" + "0" * 4000 + "9" * 400, {}, "InvalidArgument"),
        ("GET", "//chunks/key", {}, "InvalidURI"),
        ("PUT", "/chunks/k", {"content-disposition": "x" * 9000}, "MetadataTooLarge"),
        ("PUT", "/chunks/k", {"x-amz-meta-a": "x" * 2049}, "MetadataTooLarge"),
        ("PUT", "/chunks/" + "k" * 1025, {}, "KeyTooLongError"),
    ],
)
def test_odd_requests_are_the_callers_error(
    local: LocalStack, method: str, target: str, headers: dict[str, str], code: str
) -> None:
    reply = request(local.url, method, target, headers=headers)
    assert (reply.status, reply.code) == (400, code)


def test_header_bytes_that_are_no_text_fail_the_signature(local: LocalStack) -> None:
    """Never a 500."""
    reply = request(local.url, "GET", "/chunks/k", change=lambda headers: headers.update({"X-Amz-Date": "\u00ff" * 16}))
    assert reply.status in (400, 403)
    spoil = lambda h: h.update({"Authorization": h["Authorization"][:-4] + "\u00ff\u00fe"})  # noqa: E731
    assert request(local.url, "GET", "/chunks/k", change=spoil).code == "SignatureDoesNotMatch"


async def test_puts_cancelled_while_they_queue_leave_no_descriptor(tmp_path: Path) -> None:
    store = EmbeddedStore(StorageSettings(data_dir=tmp_path))
    await store.objects.create_bucket("k", "bbb")
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208

    requests = [PutRequest("bbb", f"k{i}", 1000) for i in range(40)]
    tasks = [
        asyncio.create_task(store.objects.put_object("k", request, BytesBody(b"x" * 1000))) for request in requests
    ]
    await asyncio.sleep(0.002)  # some of them have begun
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    assert len(os.listdir("/proc/self/fd")) <= before + 2  # noqa: PTH208 - one segment, written and read
    kept = {entry.key for entry in (await store.objects.list_objects("k", ListRequest("bbb"))).objects}
    assert kept >= {request.key for request, task in zip(requests, tasks, strict=True) if not task.cancelled()}
    store.close()


async def test_leaving_fetch_layers_before_its_first_layer_stops_the_fetch(local: LocalStack, keys: list[str]) -> None:
    """A deadline around the first layer is enough to get here; nothing may write into the buffer later."""
    await asyncio.to_thread(local.hold_from_layer, 1)
    buffer = np.zeros(LAYOUT.delivery_bytes(N), dtype=np.uint8)
    client = local.client("chunks", "ucx")
    layers = client.fetch_layers(keys, LAYOUT, buffer, delivery=Delivery.LAYER_MAJOR)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(anext(layers), 0.005)
    await layers.aclose()
    assert await asyncio.to_thread(eventually, lambda: is_idle(local))
    await asyncio.to_thread(client.close)


@pytest.mark.slow
@pytest.mark.with_ucx
def test_a_release_that_failed_is_not_taken_for_done(local: LocalStack) -> None:
    """The buffer would be reused while the server still holds its key."""
    buffer = np.zeros(4096, dtype=np.uint8)
    with cut_proxy(local.url) as proxy, local.client("chunks", "ucx", url=proxy.url) as client:
        client.register_buffer(buffer)
        proxy.cut()
        for _ in range(2):
            with pytest.raises(UnansweredError):
                client.release_buffer(buffer)
        proxy.mend()
        client.release_buffer(buffer)
        assert len(local.storage.agents.table) == 0
