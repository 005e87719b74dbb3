"""What goes wrong while bytes go past HTTP: nothing is stored or told that is not so, and everything is given back."""

from __future__ import annotations

import asyncio
import contextlib
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
import time
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
from storage_server.moves.region_body import RegionBody
from tests.support.chunks import make_chunks
from tests.support.requests import OWNER, Reply, request, signed
from tests.support.servers import UCX, LocalStack, Stack, is_idle, stack
from tests.support.tree import repository
from tests.support.waiting import eventually

MIB = 1 << 20
pytestmark = pytest.mark.with_ucx
WAYS = [objects.Path.DIRECT, objects.Path.BUFFER]


@pytest.fixture
def paths(tmp_path: Path) -> Iterator[LocalStack]:
    """One access key has four slots of a MiB for everything, so that a few MiB need each several times."""
    settings = {
        "aggregation_bytes": MIB,
        "window_bytes": 4 * MIB,
        "staging_bytes": 4 * MIB,
        "rdma_buffer_bytes": 8 * MIB,
    }
    with LocalStack(tmp_path / "data", ucx=UCX, stall_timeout_s=5.0, **settings) as running:
        running.call(running.storage.objects.create_bucket(OWNER[0], "chunks"))
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
        self._loop = local.loop
        self._engine = local.storage.ucx.engine
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


def running_id(local: LocalStack) -> str:
    """The id of the only request that moves bytes of the only agent."""
    (agent,) = local.storage.agents.table.agents
    (active,) = local.storage.requests.active_for_agent(agent.agent_id)
    return str(active.request_id)


def token_of(local: LocalStack, nbytes: int, path: ObjectPath = ObjectPath.DIRECT) -> RdmaToken:
    """A token for the only region of the only agent."""
    (agent,) = local.storage.agents.table.agents
    (region,) = agent.regions
    return RdmaToken(agent.agent_id, region.region_id, 0, nbytes, uuid.uuid4().hex, path)


def is_stored(local: LocalStack, key: str) -> bool:
    return request(local.url, "HEAD", f"/chunks/{key}").status == 200


def data_of(nbytes: int) -> np.ndarray:
    return np.random.default_rng(8).integers(0, 256, nbytes, dtype=np.uint8)


@pytest.mark.slow
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
        request_id = running_id(paths)
        cancelling = threads.submit(request, paths.url, "DELETE", f"/_objectcache/requests/{request_id}")
        with pytest.raises(TimeoutError):
            cancelling.result(0.3)
        held.release()
        assert cancelling.result(60).status == 204
        with pytest.raises(CallerError) as cancelled:
            putting.result(60)
        assert cancelled.value.code is ErrorCode.CANCELLED
        assert eventually(lambda: is_idle(paths))
        assert not is_stored(paths, "cancelled")
        assert client.objects.put_object("cancelled", buffer, path=path).etag == hashlib.md5(buffer).hexdigest()


@pytest.mark.slow
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
        request_id = running_id(paths)
        cancelling = threads.submit(request, paths.url, "DELETE", f"/_objectcache/requests/{request_id}")
        with pytest.raises(TimeoutError):
            cancelling.result(0.3)
        held.release()
        assert cancelling.result(60).status == 204
        with pytest.raises(CallerError):
            getting.result(60)
        assert eventually(lambda: is_idle(paths))


@pytest.mark.slow
@pytest.mark.parametrize("method", ["GET", "PUT"])
def test_a_dropped_connection_stops_and_drains(paths: LocalStack, threads: ThreadPoolExecutor, method: str) -> None:
    """The connection's end is the request's end; what was posted ends first."""
    request(paths.url, "PUT", "/chunks/old", body=bytes(4 * MIB))
    with contextlib.closing(Child(paths.url, 4 * MIB)) as child:
        token = RdmaToken(child.agent_id, "kv", 0, 4 * MIB, uuid.uuid4().hex)
        held = HeldEngine(paths, 1)
        target = "/chunks/old" if method == "GET" else "/chunks/dropped"
        headers = signed(paths.url, method, target, b"", {TOKEN_HEADER: encode_token(token)}, OWNER)
        lines = [f"{method} {target} HTTP/1.1", f"Host: {urlsplit(paths.url).netloc}", "Content-Length: 0"]
        lines += [
            f"{name}: {value}" for name, value in headers.items() if name.lower() not in ("host", "content-length")
        ]
        address = urlsplit(paths.url)
        with socket.create_connection((address.hostname, address.port), timeout=60) as sock:
            sock.sendall("\r\n".join([*lines, "", ""]).encode())
            assert eventually(lambda: held.held_count > 0)
        held.release()
        assert eventually(lambda: is_idle(paths))
        assert not is_stored(paths, "dropped")


@pytest.mark.slow
def test_renewing_without_a_region_stops_puts_out_of_it(paths: LocalStack, threads: ThreadPoolExecutor) -> None:
    """Released memory is not read any more when the release returns."""
    held = HeldEngine(paths, 1)
    with paths.client("chunks", "ucx") as client:
        kept, released = data_of(1000), data_of(3 * MIB)
        client.register_buffer(kept)
        putting = threads.submit(client.objects.put_object, "released", released)
        assert eventually(lambda: held.held_count > 0)
        releasing = threads.submit(client.release_buffer, released)
        with pytest.raises(TimeoutError):
            releasing.result(0.3)
        held.release()
        releasing.result(60)
        with pytest.raises(ObjectCacheError):
            putting.result(60)
        assert eventually(lambda: is_idle(paths))
        assert not is_stored(paths, "released")


@pytest.mark.slow
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


@pytest.mark.slow
def test_slots_smaller_than_the_stores_pieces_do(local: LocalStack) -> None:
    """Such pieces are copied, since the store keeps them past the next."""
    with local.client("chunks", "ucx") as client:
        buffer = data_of(3_000_001)
        put = client.objects.put_object("small-slots", buffer)
        assert put.etag == hashlib.md5(buffer).hexdigest()
        into = np.zeros_like(buffer)
        client.objects.get_object("small-slots", into)
        assert np.array_equal(into, buffer)


@pytest.mark.slow
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
        token = token_of(paths, len(buffer), ObjectPath.BUFFER)
        for _ in range(2):
            reply = request(paths.url, "GET", "/chunks/large", headers={TOKEN_HEADER: encode_token(token)})
            assert (reply.status, len(reply.body)) == (200, 4 * MIB + 1)


@pytest.mark.slow
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
from objectcache.adapters.nixl_memory import Memory
from descriptors.messages import AgentRegistration, Region, registration_body
from nixl_client.session.signed_http import SignedHttp
from nixl_client.transports.ucx import NixlThread
url, nbytes = sys.argv[1], int(sys.argv[2])
receiver = NixlThread()
buffer = np.full(nbytes, 7, dtype=np.uint8)
receiver.register(Memory(int(buffer.ctypes.data), nbytes))
receiver.listen("keeps-the-receiver-polling", lambda _: None)
region = Region("kv", int(buffer.ctypes.data), nbytes)
body = registration_body(AgentRegistration(receiver.metadata(), (region,), 60.0))
http = SignedHttp(url, "OWNERKEY", "owner-secret-1", "us-east-1", 60.0)
print(http.request("POST", "/_objectcache/agents", body=body).json()["agent_id"], flush=True)
time.sleep(600)  # until it is killed
"""


class Child:
    """A client in a process of its own, whose memory others ask the server to use."""

    def __init__(self, url: str, nbytes: int, environment: dict[str, str] | None = None) -> None:
        command = [sys.executable, "-c", CHILD, url, str(nbytes)]
        env = {**os.environ, **(environment or {})}
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=repository(), env=env)
        assert self.process.stdout is not None
        self.agent_id = self.process.stdout.readline().strip()

    def close(self) -> None:
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
        child.close()
        held.release()
    return asking.result(30)


MANY_LAYOUT = ChunkLayout(2, 16, MIB)
MANY = [f"many-{index}" for index in range(6)]
MANY_BYTES = MANY_LAYOUT.delivery_bytes(len(MANY))


def put_many(local: LocalStack, threads: ThreadPoolExecutor, agent_id: str) -> Future[Reply]:
    """Begin to store six chunks of two slots each out of the child's memory."""
    descriptor = Descriptor(
        tuple(MANY),
        MANY_LAYOUT.num_layers,
        MANY_LAYOUT.chunk_tokens,
        MANY_LAYOUT.per_layer_chunk_bytes,
        Delivery.LAYER_MAJOR,
        rdma_target=RdmaTarget(agent_id, "kv", 0, MANY_BYTES),
        request_id=uuid.uuid4().hex,
    )
    return threads.submit(request, local.url, "PUT", "/chunks?layerwise", body=encode_binary(descriptor))


def stored_of_many(local: LocalStack, reply: Reply, code: str) -> int:
    """How many chunks the answer says are stored: these are there, and the others are not, because of `code`."""
    answer = json.loads(reply.body)
    stored = [put["key"] for put in answer["chunks"] if "etag" in put]
    assert (reply.status, answer["stored"]) == (200, len(stored))
    assert [put["key"] for put in answer["chunks"]] == MANY
    assert {put["code"] for put in answer["chunks"] if "etag" not in put} <= {code}
    assert [key for key in MANY if is_stored(local, key)] == stored
    return len(stored)


@pytest.mark.slow
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
    assert eventually(lambda: len(paths.storage.agents.table) == 0)
    assert is_stored(paths, "killed") is (method == "GET")
    with paths.client("chunks", "ucx") as client:
        buffer = data_of(nbytes)
        assert client.objects.put_object("next", buffer).etag == hashlib.md5(buffer).hexdigest()


def lost_in_the_middle(paths: LocalStack, ask: Callable[[str], Future[Reply]], nbytes: int, allowed: int) -> Reply:
    """The answer to a request whose client's agent is swept while bytes are in flight, after `allowed` moves."""
    child = Child(paths.url, nbytes)
    held = HeldEngine(paths, allowed)
    try:
        asking = ask(child.agent_id)
        assert eventually(lambda: held.held_count > 0)
        agents = paths.storage.agents

        async def lose_the_client() -> None:
            agents.peer_lost(agents.table.owned(OWNER[0], child.agent_id, time.monotonic(), "agent_id").peer)

        paths.call(lose_the_client())
        assert eventually(lambda: len(agents.table) == 0)
        assert not asking.done()
    finally:
        held.release()
        child.close()
    return asking.result(30)


@pytest.mark.slow
def test_a_request_whose_client_is_lost_says_so_also_when_its_agent_is_swept_first(
    paths: LocalStack, threads: ThreadPoolExecutor
) -> None:
    """Nobody cancelled the request: RequestCancelled would send its caller looking for who did."""

    def ask(agent_id: str) -> Future[Reply]:
        token = RdmaToken(agent_id, "kv", 0, 4 * MIB, uuid.uuid4().hex)
        return threads.submit(send, paths.url, "PUT", "swept", token)

    reply = lost_in_the_middle(paths, ask, 4 * MIB, 1)
    assert (reply.status, reply.code) == (500, "TargetUnreachable")
    assert not is_stored(paths, "swept")


@pytest.mark.slow
def test_a_client_killed_in_the_middle_of_many_chunks_has_some_stored(
    paths: LocalStack, threads: ThreadPoolExecutor
) -> None:
    """Each is told apart: what is said to be stored is there and whole, what is not is not there."""
    reply = killed_in_the_middle(paths, threads, lambda agent_id: put_many(paths, threads, agent_id), MANY_BYTES)
    assert 0 <= stored_of_many(paths, reply, "TargetUnreachable") < len(MANY)
    assert eventually(lambda: is_idle(paths))


@pytest.mark.slow
@pytest.mark.parametrize("allowed", [0, 1, 5])
def test_many_chunks_of_a_client_that_is_lost_are_told_apart_also_when_its_agent_is_swept_first(
    paths: LocalStack, threads: ThreadPoolExecutor, allowed: int
) -> None:
    reply = lost_in_the_middle(paths, lambda agent_id: put_many(paths, threads, agent_id), MANY_BYTES, allowed)
    assert stored_of_many(paths, reply, "TargetUnreachable") <= allowed // 2
    assert eventually(lambda: is_idle(paths))


@pytest.mark.slow
def test_many_chunks_that_are_cancelled_are_told_apart(paths: LocalStack, threads: ThreadPoolExecutor) -> None:
    child = Child(paths.url, MANY_BYTES)
    held = HeldEngine(paths, 5)
    asking = put_many(paths, threads, child.agent_id)
    try:
        assert eventually(lambda: held.held_count > 0)
        request_id = running_id(paths)
        cancelling = threads.submit(request, paths.url, "DELETE", f"/_objectcache/requests/{request_id}")
        with pytest.raises(TimeoutError):
            cancelling.result(0.3)
        held.release()
        assert cancelling.result(60).status == 204
        assert stored_of_many(paths, asking.result(30), "RequestCancelled") <= 2
    finally:
        held.release()
        child.close()


@pytest.mark.slow
def test_chunks_that_are_stored_when_the_stop_comes_are_said_to_be(
    paths: LocalStack, threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stop comes when their bytes are committed and only their memory is still to be given back."""
    exit_body = RegionBody.__aexit__

    async def exit_when_stopped(body: RegionBody, *arguments: object) -> None:
        try:
            task = asyncio.current_task()
            assert task is not None
            if arguments[0] is None and not task.cancelling():  # a chunk that the stop has met holds nothing up
                await asyncio.sleep(60)  # until the stop comes
        finally:
            await exit_body(body, *arguments)

    monkeypatch.setattr(RegionBody, "__aexit__", exit_when_stopped)
    with contextlib.closing(Child(paths.url, MANY_BYTES)) as child:
        asking = put_many(paths, threads, child.agent_id)
        stored = eventually(lambda: sum(is_stored(paths, key) for key in MANY) >= 2)
        assert stored
        assert request(paths.url, "DELETE", f"/_objectcache/requests/{running_id(paths)}").status == 204
        assert stored_of_many(paths, asking.result(30), "RequestCancelled") >= 2
    assert eventually(lambda: is_idle(paths))


@pytest.mark.slow
@pytest.mark.parametrize("method", ["GET", "PUT"])
def test_a_client_that_lets_nothing_move_is_cut_off(tmp_path: Path, threads: ThreadPoolExecutor, method: str) -> None:
    """Its agent is forgotten after the stall limit, which ends what is in flight; a put then stores nothing."""
    with LocalStack(tmp_path / "data", ucx=UCX, stall_timeout_s=0.4) as local:
        local.call(local.storage.objects.create_bucket(OWNER[0], "chunks"))
        request(local.url, "PUT", "/chunks/old", body=bytes(9 * MIB))
        child = Child(local.url, 9 * MIB)
        held = HeldEngine(local, 1)
        token = RdmaToken(child.agent_id, "kv", 0, 9 * MIB, uuid.uuid4().hex)
        asking = threads.submit(send, local.url, method, "old" if method == "GET" else "stalled", token)
        assert eventually(lambda: held.held_count > 0)
        assert eventually(lambda: all(agent.expires_s == -math.inf for agent in local.storage.agents.table.agents))
        assert not asking.done()
        held.release()
        reply = asking.result(60)
        assert (reply.status, reply.code) == (500, "TargetUnreachable")
        assert not is_stored(local, "stalled")
        assert eventually(lambda: is_idle(local))
        child.close()


@pytest.mark.slow
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
                    child.close()
                reply = putting.result(60)
            if not round_number:
                child.close()
                assert reply.status == 200, reply.body
                assert reply.headers["etag"].strip('"') == hashlib.md5(b"\7" * (64 * MIB)).hexdigest()
            else:
                assert reply.code in ("TargetUnreachable", "ExpiredToken", "NoSuchAgent")
        assert not stored_over(running, "tcp-1")


@pytest.mark.slow
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
        child.close()


def stored_over(running: Stack, key: str) -> bool:
    return running.request("HEAD", f"/chunks/{key}").status == 200
