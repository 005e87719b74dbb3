"""What goes wrong while bytes go past HTTP: nothing is stored or told that is not so, and everything is given back."""

from __future__ import annotations

import hashlib
import http.client
import json
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest

from descriptors.descriptor import Delivery, Descriptor, RdmaTarget
from descriptors.descriptor_codec import encode_binary
from descriptors.errors import CallerError, ErrorCode, ObjectCacheError
from descriptors.layout import ChunkLayout
from descriptors.rdma_token import TOKEN_HEADER, ObjectPath, RdmaToken, encode_token
from nixl_client import objects
from tests.support import OWNER, LocalStack, Reply, Stack, eventually, make_chunks, repository, request, signed, stack

MIB = 1 << 20
WAYS = [objects.Path.DIRECT, objects.Path.BUFFER]


@pytest.fixture
def paths(tmp_path: Path) -> Iterator[LocalStack]:
    """Four slots of a MiB for everything, so that a few MiB need each several times."""
    settings = {
        "aggregation_bytes": MIB,
        "window_bytes": 4 * MIB,
        "staging_bytes": 4 * MIB,
        "rdma_buffer_bytes": 4 * MIB,
    }
    with LocalStack(tmp_path / "data", stall_timeout_s=5.0, **settings) as running:
        running.call(running.storage.create_bucket(OWNER[0], "chunks"))
        yield running


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


class HeldEngine:
    """Lets `allowed` reads and writes of the engine through and holds the rest back until `release`: they are in
    flight as far as anybody else can tell.
    """

    def __init__(self, local: LocalStack, allowed: int) -> None:
        self._loop = local._loop
        self._engine = local.storage.registrar.engine
        self._calls = (self._engine.read, self._engine.write)
        self._lock = threading.Lock()
        self._left = allowed
        self._held: list[Callable[[], None]] = []
        self._engine.read, self._engine.write = (self._gated(call) for call in self._calls)

    def _gated(self, call: Callable[..., None]) -> Callable[..., None]:
        def gated(*arguments: Any) -> None:
            with self._lock:
                if self._left <= 0:
                    self._held.append(lambda: call(*arguments))
                    return
                self._left -= 1
            call(*arguments)

        return gated

    @property
    def held_count(self) -> int:
        return len(self._held)

    def release(self) -> None:
        with self._lock:
            self._left = 1 << 60
            held, self._held = self._held, []
        for call in held:
            self._loop.call_soon_threadsafe(call)


def is_idle(local: LocalStack) -> bool:
    storage = local.storage
    return (
        storage.requests.active_count == 0
        and storage._objects._moves._admission.active_count == 0
        and storage.staging.free_count == storage.staging.slot_count
        and _buffer_is_free(storage._ucx.staging)
        and storage.store.files.pinned_count == 0
        and storage.registrar.engine.in_flight_count == 0
        and _buffer_is_free(storage._objects._moves._buffer._pool)
    )


def _buffer_is_free(pool: Any) -> bool:
    return pool is None or pool.free_count == pool.slot_count


def is_stored(local: LocalStack, key: str) -> bool:
    return request(local.url, "HEAD", f"/chunks/{key}").status == 200


def data_of(nbytes: int) -> np.ndarray:
    return np.random.default_rng(8).integers(0, 256, nbytes, dtype=np.uint8)


@pytest.mark.parametrize("path", WAYS)
def test_a_cancelled_put_stores_nothing_and_is_over_when_it_is_answered(
    paths: LocalStack, threads: ThreadPoolExecutor, path: objects.Path
) -> None:
    """After the answer to the cancellation the buffer may be used again: no read of it is under way."""
    held = HeldEngine(paths, 1)
    with paths.client("chunks", "ucx") as client:
        buffer = data_of(4 * MIB)
        putting = threads.submit(client.objects.put_object, "cancelled", buffer, path=path)
        assert eventually(lambda: held.held_count > 0)
        ((_, request_id),) = paths.storage.requests._active
        cancelling = threads.submit(request, paths.url, "DELETE", f"/_objectcache/requests/{request_id}")
        with pytest.raises(TimeoutError):
            cancelling.result(0.3)
        held.release()
        assert cancelling.result(20).status == 204
        with pytest.raises(CallerError) as cancelled:
            putting.result(20)
        assert cancelled.value.code is ErrorCode.CANCELLED
        assert eventually(lambda: is_idle(paths))
        assert not is_stored(paths, "cancelled")
        assert client.objects.put_object("cancelled", buffer, path=path).etag == hashlib.md5(buffer).hexdigest()


@pytest.mark.parametrize("path", WAYS)
def test_a_cancelled_get_is_over_when_it_is_answered(
    paths: LocalStack, threads: ThreadPoolExecutor, path: objects.Path
) -> None:
    held = HeldEngine(paths, 1)
    with paths.client("chunks", "ucx") as client:
        buffer = data_of(4 * MIB)
        client.objects.put_object("got", buffer, path=objects.Path.TCP)
        getting = threads.submit(client.objects.get_object, "got", buffer, path=path)
        assert eventually(lambda: held.held_count > 0)
        ((_, request_id),) = paths.storage.requests._active
        cancelling = threads.submit(request, paths.url, "DELETE", f"/_objectcache/requests/{request_id}")
        with pytest.raises(TimeoutError):
            cancelling.result(0.3)
        held.release()
        assert cancelling.result(20).status == 204
        with pytest.raises(CallerError):
            getting.result(20)
        assert eventually(lambda: is_idle(paths))


@pytest.mark.parametrize("method", ["GET", "PUT"])
def test_a_dropped_connection_stops_and_drains(paths: LocalStack, threads: ThreadPoolExecutor, method: str) -> None:
    """The connection's end is the request's end; what was posted ends first."""
    with paths.client("chunks", "ucx") as client:
        buffer = data_of(4 * MIB)
        client.objects.put_object("old", buffer, path=objects.Path.TCP)
        registered = client.objects._register(buffer)
        registered.link.listen("keeps-the-receiver-polling", lambda _: None)
        token = RdmaToken(registered.session.agent_id(), registered.region_id, 0, 4 * MIB, uuid.uuid4().hex)
        held = HeldEngine(paths, 1)
        target = "/chunks/old" if method == "GET" else "/chunks/dropped"
        headers = signed(paths.url, method, target, b"", {TOKEN_HEADER: encode_token(token)}, OWNER)
        lines = [f"{method} {target} HTTP/1.1", f"Host: {urlsplit(paths.url).netloc}", "Content-Length: 0"]
        lines += [
            f"{name}: {value}" for name, value in headers.items() if name.lower() not in ("host", "content-length")
        ]
        address = urlsplit(paths.url)
        with socket.create_connection((address.hostname, address.port), timeout=10) as sock:
            sock.sendall("\r\n".join([*lines, "", ""]).encode())
            assert eventually(lambda: held.held_count > 0)
        held.release()
        assert eventually(lambda: is_idle(paths), 5)
        assert not is_stored(paths, "dropped")


def test_renewing_without_a_region_stops_puts_out_of_it(paths: LocalStack, threads: ThreadPoolExecutor) -> None:
    """Released memory is not read any more when the release returns."""
    held = HeldEngine(paths, 1)
    with paths.client("chunks", "ucx") as client:
        kept, released = data_of(1000), data_of(3 * MIB)
        client.objects._register(kept)
        putting = threads.submit(client.objects.put_object, "released", released)
        assert eventually(lambda: held.held_count > 0)
        releasing = threads.submit(client.release_buffer, released)
        with pytest.raises(TimeoutError):
            releasing.result(0.3)
        held.release()
        releasing.result(20)
        with pytest.raises(ObjectCacheError):
            putting.result(20)
        assert eventually(lambda: is_idle(paths))
        assert not is_stored(paths, "released")


def test_many_objects_at_once_share_four_slots(paths: LocalStack, threads: ThreadPoolExecutor) -> None:
    """More in the making than memory for all: they wait for each other, and none for ever."""
    with paths.client("chunks", "ucx") as client:
        sizes = [3 * MIB + 5, 100, 4 * MIB, 70_000, MIB, 2 * MIB, 4 * MIB, 3 * MIB]
        buffers = [data_of(size) for size in sizes]
        ways = [WAYS[index % 2] for index in range(len(sizes))]
        puts = [
            threads.submit(client.objects.put_object, f"many-{index}", buffer, path=way)
            for index, (buffer, way) in enumerate(zip(buffers, ways, strict=True))
        ]
        assert [put.result(60).etag for put in puts] == [hashlib.md5(buffer).hexdigest() for buffer in buffers]
        into = [np.zeros_like(buffer) for buffer in buffers]
        gets = [
            threads.submit(client.objects.get_object, f"many-{index}", buffer, path=way)
            for index, (buffer, way) in enumerate(zip(into, reversed(ways), strict=True))
        ]
        assert [get.result(60).path for get in gets] == list(reversed(ways))
        assert all(np.array_equal(one, two) for one, two in zip(buffers, into, strict=True))
        layout = ChunkLayout(3, 16, MIB + 1)
        keys, chunks = make_chunks(4, layout)
        for delivery in (Delivery.CHUNK_MAJOR, Delivery.LAYER_MAJOR):
            payload = np.ascontiguousarray(chunks if delivery is Delivery.CHUNK_MAJOR else layered(chunks, layout))
            etags = client.objects.put_chunks(keys, layout, payload, delivery=delivery)
            assert etags == [hashlib.md5(chunk).hexdigest() for chunk in chunks]
    assert eventually(lambda: is_idle(paths))


def layered(chunks: np.ndarray, layout: ChunkLayout) -> np.ndarray:
    return chunks.reshape(len(chunks), layout.num_layers, layout.per_layer_chunk_bytes).transpose(1, 0, 2)


def test_slots_smaller_than_the_stores_pieces_do(local: LocalStack) -> None:
    """Such pieces are copied, since the store keeps them past the next."""
    with local.client("chunks", "ucx") as client:
        buffer = data_of(3_000_001)
        put = client.objects.put_object("small-slots", buffer)
        assert put.etag == hashlib.md5(buffer).hexdigest()
        into = np.zeros_like(buffer)
        client.objects.get_object("small-slots", into)
        assert np.array_equal(into, buffer)


def test_what_does_not_fit_the_gateways_buffer_is_declined(paths: LocalStack) -> None:
    """A GET comes with its body, a PUT creates nothing, and neither id is used up."""
    with paths.client("chunks", "ucx") as client:
        buffer = data_of(4 * MIB + 1)
        client.objects.put_object("large", buffer)
        got = client.objects.get_object("large", buffer, path=objects.Path.BUFFER)
        assert (got.path, got.nbytes) == (objects.Path.TCP, 4 * MIB + 1)
        with pytest.raises(CallerError) as declined:
            client.objects.put_object("staged", buffer, path=objects.Path.BUFFER)
        assert declined.value.code is ErrorCode.NOT_IMPLEMENTED
        assert not is_stored(paths, "staged")
        registered = client.objects._register(buffer)
        token = RdmaToken(
            registered.session.agent_id(), registered.region_id, 0, len(buffer), uuid.uuid4().hex, ObjectPath.BUFFER
        )
        for _ in range(2):
            reply = request(paths.url, "GET", "/chunks/large", headers={TOKEN_HEADER: encode_token(token)})
            assert (reply.status, len(reply.body)) == (200, 4 * MIB + 1)


@pytest.mark.parametrize("path", WAYS)
def test_damaged_bytes_are_never_a_success(paths: LocalStack, path: objects.Path) -> None:
    """Every block is proved before it is written; what was written before is told to be nothing."""
    with paths.client("chunks", "ucx") as client:
        buffer = data_of(3 * MIB)
        client.objects.put_object("damaged", buffer)
        paths.damage("chunks", "damaged", 2 * MIB + 100)
        with pytest.raises(ObjectCacheError) as failed:
            client.objects.get_object("damaged", buffer, path=path)
        assert failed.value.code is ErrorCode.INTERNAL_ERROR
        assert client.objects.get_object("damaged", buffer, path=path, byte_range=(0, MIB - 1)).nbytes == MIB
    assert eventually(lambda: is_idle(paths))


CHILD = """
import json, sys, time
import numpy as np
from adapters.nixl_agent import Memory
from descriptors.messages import AgentRegistration, Region, registration_body
from nixl_client.http import SignedHttp
from nixl_client.receiver import Receiver
url, nbytes = sys.argv[1], int(sys.argv[2])
receiver = Receiver()
buffer = np.full(nbytes, 7, dtype=np.uint8)
receiver.register(Memory(int(buffer.ctypes.data), nbytes))
receiver.listen("keeps-the-receiver-polling", lambda _: None)
region = Region("kv", int(buffer.ctypes.data), nbytes)
body = registration_body(AgentRegistration(receiver.metadata(), (region,), 60.0))
http = SignedHttp(url, "OWNERKEY", "owner-secret-1", "us-east-1", 60.0)
print(http.request("POST", "/_objectcache/agents", body=body).json()["agent_id"], flush=True)
time.sleep(600)
"""


class Child:
    """A client in a process of its own, whose memory others ask the server to use."""

    def __init__(self, url: str, nbytes: int, environment: dict[str, str] | None = None) -> None:
        command = [sys.executable, "-c", CHILD, url, str(nbytes)]
        env = {**os.environ, **(environment or {})}
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=repository(), env=env)
        assert self.process.stdout is not None
        self.agent_id = self.process.stdout.readline().strip()

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(30)
        assert self.process.stdout is not None
        self.process.stdout.close()


def send(url: str, method: str, key: str, token: RdmaToken) -> Reply:
    return request(url, method, f"/chunks/{key}", headers={TOKEN_HEADER: encode_token(token)})


def killed_in_the_middle(
    paths: LocalStack, threads: ThreadPoolExecutor, ask: Callable[[str], Future[Reply]], nbytes: int
) -> Reply:
    child = Child(paths.url, nbytes)
    held = HeldEngine(paths, 1)
    try:
        asking = ask(child.agent_id)
        assert eventually(lambda: held.held_count > 0)
    finally:
        child.kill()
        held.release()
    return asking.result(30)


@pytest.mark.parametrize("path", list(ObjectPath))
@pytest.mark.parametrize("method", ["GET", "PUT"])
def test_a_client_killed_in_the_middle_fails_its_object(
    paths: LocalStack, threads: ThreadPoolExecutor, method: str, path: ObjectPath
) -> None:
    """Half of it was read; nothing is stored. The agent is forgotten, and the next client is served."""
    nbytes = 4 * MIB

    def ask(agent_id: str) -> Future[Reply]:
        token = RdmaToken(agent_id, "kv", 0, nbytes, uuid.uuid4().hex, path)
        return threads.submit(send, paths.url, method, "killed", token)

    if method == "GET":
        request(paths.url, "PUT", "/chunks/killed", body=bytes(nbytes))
    reply = killed_in_the_middle(paths, threads, ask, nbytes)
    assert (reply.status, reply.code) == (500, "TargetUnreachable")
    assert eventually(lambda: is_idle(paths))
    assert eventually(lambda: len(paths.storage.agents) == 0)
    assert is_stored(paths, "killed") is (method == "GET")
    with paths.client("chunks", "ucx") as client:
        buffer = data_of(nbytes)
        assert client.objects.put_object("next", buffer).etag == hashlib.md5(buffer).hexdigest()


def test_a_client_killed_in_the_middle_of_many_chunks_has_some_stored(
    paths: LocalStack, threads: ThreadPoolExecutor
) -> None:
    """Each is told apart: what is said to be stored is there and whole, what is not is not there."""
    layout, keys = ChunkLayout(2, 16, MIB), [f"many-{index}" for index in range(6)]
    nbytes = layout.payload_bytes(6)

    def ask(agent_id: str) -> Future[Reply]:
        target = RdmaTarget(agent_id, "kv", 0, nbytes)
        descriptor = Descriptor(
            tuple(keys), 2, 16, MIB, Delivery.LAYER_MAJOR, rdma_target=target, request_id=uuid.uuid4().hex
        )
        return threads.submit(request, paths.url, "PUT", "/chunks?layerwise", body=encode_binary(descriptor))

    reply = killed_in_the_middle(paths, threads, ask, nbytes)
    answer = json.loads(reply.body)
    stored = [put["key"] for put in answer["chunks"] if "etag" in put]
    assert (reply.status, answer["stored"]) == (200, len(stored))
    assert len(stored) < 6
    assert {put["code"] for put in answer["chunks"] if "etag" not in put} == {"TargetUnreachable"}
    assert [key for key in keys if is_stored(paths, key)] == stored
    assert eventually(lambda: is_idle(paths))


@pytest.mark.parametrize("method", ["GET", "PUT"])
def test_a_client_that_lets_nothing_move_is_cut_off(tmp_path: Path, threads: ThreadPoolExecutor, method: str) -> None:
    """Its agent is forgotten after the stall limit, which ends what is in flight; a put then stores nothing."""
    with LocalStack(tmp_path / "data", stall_timeout_s=0.4) as local:
        local.call(local.storage.create_bucket(OWNER[0], "chunks"))
        request(local.url, "PUT", "/chunks/old", body=bytes(9 * MIB))
        child = Child(local.url, 9 * MIB)
        held = HeldEngine(local, 1)
        token = RdmaToken(child.agent_id, "kv", 0, 9 * MIB, uuid.uuid4().hex)
        asking = threads.submit(send, local.url, method, "old" if method == "GET" else "stalled", token)
        assert eventually(lambda: held.held_count > 0)
        assert eventually(lambda: all(agent.expires_s == -math.inf for agent in local.storage.agents._by_id.values()))
        assert not asking.done()
        held.release()
        reply = asking.result(20)
        assert (reply.status, reply.code) == (500, "TargetUnreachable")
        assert not is_stored(local, "stalled")
        assert eventually(lambda: is_idle(local))
        child.kill()


@pytest.mark.parametrize("kind", ["together", "apart"])
def test_objects_go_past_http_over_tcp_and_survive_killed_clients(tmp_path: Path, kind: str) -> None:
    """Over TCP nothing moves unless both sides are polled; a real server in a process of its own."""
    environment = {"UCX_TLS": "tcp"}
    with stack(kind, tmp_path, **environment) as running:
        running.s3().create_bucket(Bucket="chunks")
        for round_number in range(2):
            child = Child(running.url, 64 * MIB, environment)
            token = RdmaToken(child.agent_id, "kv", 0, 64 * MIB, uuid.uuid4().hex)
            with ThreadPoolExecutor(1) as thread:
                putting = thread.submit(send, running.url, "PUT", f"tcp-{round_number}", token)
                if round_number:
                    child.kill()
                reply = putting.result(60)
            if not round_number:
                child.kill()
                assert reply.status == 200, reply.body
                assert reply.headers["etag"].strip('"') == hashlib.md5(b"\7" * (64 * MIB)).hexdigest()
            else:
                assert reply.code in ("TargetUnreachable", "ExpiredToken", "NoSuchAgent")
        assert not stored_over(running, "tcp-1")


def test_a_storage_server_killed_in_the_middle_leaves_its_put_unanswered(tmp_path: Path) -> None:
    """The gateway cannot know whether the buffer is still read, and an answer would say that it is not."""
    with stack("apart", tmp_path, UCX_TLS="tcp") as running:
        running.s3().create_bucket(Bucket="chunks")
        child = Child(running.url, 256 * MIB, {"UCX_TLS": "tcp"})
        token = RdmaToken(child.agent_id, "kv", 0, 256 * MIB, uuid.uuid4().hex)
        with ThreadPoolExecutor(1) as thread:
            putting = thread.submit(send, running.url, "PUT", "orphan", token)
            extents = running.data_dir / "extents"
            assert eventually(lambda: any(file.stat().st_size > 0 for file in extents.glob("*/*")))
            running.processes[0].kill()
            running.processes[0].wait(30)
            with pytest.raises(http.client.RemoteDisconnected):
                putting.result(30)
        child.kill()


def stored_over(running: Stack, key: str) -> bool:
    return running.request("HEAD", f"/chunks/{key}").status == 200
