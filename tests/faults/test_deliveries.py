"""What goes wrong in mid-transfer: nothing is announced that is not there, and everything is given back."""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest

from descriptors.descriptor import Delivery, Descriptor
from descriptors.descriptor_codec import encode_binary
from descriptors.errors import CallerError, ChunkUnavailable, ErrorCode, ObjectCacheError, ServerError
from descriptors.layout import ChunkLayout
from nixl_client.client import Client
from nixl_client.fetch.layer_fetch import LayerFetch
from nixl_client.session.retries import Retries
from nixl_client.transports.shared_memory import allocate
from storage_server.agents.rules import used_ids
from tests.support.chunks import LAYOUT, N, layer_of, make_chunks
from tests.support.cut_proxy import cut_proxy
from tests.support.requests import OWNER, descriptor_request
from tests.support.servers import UCX, LocalStack, Stack, has_stopped, is_idle, stack
from tests.support.tree import repository
from tests.support.waiting import eventually


def begin(local: LocalStack, client: Any, keys: list[str], buffer: np.ndarray) -> LayerFetch:
    fetch = client.fetch(keys, LAYOUT, buffer, delivery=Delivery.LAYER_MAJOR)
    fetch.wait_layer(1, 30)
    assert not is_idle(local)
    return fetch


@pytest.mark.slow
def test_cancel_drains_and_gives_everything_back(local: LocalStack, keys: list[str], transport: str) -> None:
    """After `cancel` returns the buffer is the caller's: not one byte changes any more."""
    released = local.hold_from_layer(2)
    buffer = allocate(LAYOUT.delivery_bytes(N))
    with local.client("chunks", transport) as client:
        fetch = begin(local, client, keys, buffer)
        fetch.cancel()
        assert fetch.is_settled
        assert eventually(lambda: is_idle(local))
        after = buffer.copy()
        released.set()
        assert client.fetch(keys, LAYOUT, allocate(LAYOUT.delivery_bytes(N))).wait(30).chunk_count == N
        assert np.array_equal(buffer, after)
        fetch.wait_layer(1, 30)
        with pytest.raises(ObjectCacheError):
            fetch.wait_layer(2, 30)
        assert client.fetch(keys, LAYOUT, buffer).wait(30).chunk_count == N


def test_a_dropped_connection_frees_everything_at_once(local: LocalStack, keys: list[str]) -> None:
    """The plain HTTP reader goes away in mid-body."""
    local.hold_from_layer(3)
    body = encode_binary(Descriptor(tuple(keys), 6, 16, 20_000, Delivery.LAYER_MAJOR))
    address = urlsplit(local.url)
    with socket.create_connection((address.hostname, address.port), timeout=60) as sock:
        sock.sendall(descriptor_request(local.url, body))
        assert sock.recv(100).startswith(b"HTTP/1.1 200")
        assert not is_idle(local)
    assert eventually(lambda: is_idle(local))


@pytest.mark.slow
@pytest.mark.with_ucx
def test_a_dropped_control_connection_stops_the_writes(local: LocalStack, keys: list[str]) -> None:
    """Over ucx the data goes past the connection, but its end is the request's end."""
    local.hold_from_layer(2)
    buffer = allocate(LAYOUT.delivery_bytes(N))
    with cut_proxy(local.url) as proxy, local.client("chunks", "ucx", url=proxy.url) as client:
        fetch = begin(local, client, keys, buffer)
        proxy.cut()
        proxy.mend()
        with pytest.raises(ServerError):
            fetch.wait(30)
        fetch.wait_settled(30)
        assert eventually(lambda: is_idle(local))


@pytest.mark.slow
def test_a_flipped_bit_fails_its_layer_and_is_never_announced(
    local: LocalStack, keys: list[str], transport: str
) -> None:
    """The layers before stay good, the rest is an error with the chunk's index."""
    released = local.hold_from_layer(3)
    chunks = make_chunks(N, LAYOUT)[1]
    buffer = allocate(LAYOUT.delivery_bytes(N))
    with local.client("chunks", transport) as client:
        fetch = begin(local, client, keys, buffer)
        fetch.wait_layer(2, 30)
        local.damage("chunks", keys[5], 70_000)  # in layer 3, and in no checksum block of the layers before
        released.set()
        with pytest.raises(ObjectCacheError) as failed:
            fetch.wait_layer(3, 30)
        if transport != "http":
            assert isinstance(failed.value, ChunkUnavailable)
            assert (failed.value.code, failed.value.index, failed.value.layer) == (ErrorCode.CHUNK_CORRUPT, 5, 3)
        fetch.wait_settled(30)
        for layer_index in range(3):
            assert np.array_equal(fetch.wait_layer(layer_index, 30).data, layer_of(chunks, LAYOUT, layer_index))
        with pytest.raises(ObjectCacheError):
            fetch.wait(30)
    assert eventually(lambda: is_idle(local))


@pytest.mark.slow
def test_a_lookup_stops_at_what_was_found_damaged_until_it_is_written_again(
    local: LocalStack, keys: list[str], transport: str
) -> None:
    """Over http a client may not learn which chunk it was: it must not be sent there again and again."""
    local.damage("chunks", keys[5], 70_000)
    buffer = allocate(LAYOUT.delivery_bytes(N))
    with local.client("chunks", transport) as client:
        assert client.lookup(keys) == N
        with pytest.raises(ObjectCacheError):
            client.fetch(keys, LAYOUT, buffer).wait(30)
        assert client.lookup(keys) == 5
        client.put_chunks(keys[5:6], [make_chunks(N, LAYOUT)[1][5]])
        assert client.lookup(keys) == N


def test_a_bit_flipped_in_the_first_layer_is_a_clean_500(local: LocalStack, keys: list[str]) -> None:
    """Nothing was sent yet, so http can still say what is wrong."""
    local.damage("chunks", keys[0], 5)
    with local.client("chunks", "http") as client, pytest.raises(ChunkUnavailable) as failed:
        client.fetch(keys, LAYOUT, np.zeros(LAYOUT.delivery_bytes(N), np.uint8), delivery=Delivery.LAYER_MAJOR).wait(30)
    assert (failed.value.code, failed.value.index, failed.value.layer) == (ErrorCode.CHUNK_CORRUPT, 0, 0)


@pytest.mark.slow
@pytest.mark.with_ucx
def test_deleting_the_agent_stops_its_deliveries_first(local: LocalStack, keys: list[str]) -> None:
    local.hold_from_layer(2)
    buffer = allocate(LAYOUT.delivery_bytes(N))
    client = local.client("chunks", "ucx")
    fetch = begin(local, client, keys, buffer)
    client.release_buffer(buffer)
    assert has_stopped(local)
    with pytest.raises(CallerError) as cancelled:
        fetch.wait(30)
    assert cancelled.value.code is ErrorCode.CANCELLED
    client.close()
    assert len(local.storage.agents.table) == 0


@pytest.mark.slow
@pytest.mark.with_ucx
def test_releasing_one_buffer_leaves_fetches_into_others_alone(local: LocalStack, keys: list[str]) -> None:
    released = local.hold_from_layer(2)
    first, second = (allocate(LAYOUT.delivery_bytes(N)) for _ in range(2))
    with local.client("chunks", "ucx") as client:
        client.register_buffer(second)
        fetch = begin(local, client, keys, first)
        client.release_buffer(second)
        released.set()
        assert fetch.wait(30).chunk_count == N


def test_more_deliveries_than_allowed_are_told_to_slow_down(tmp_path: Path) -> None:
    with LocalStack(tmp_path / "data", deliveries_max=1, aggregation_bytes=8192) as local:
        local.call(local.storage.objects.create_bucket("OWNERKEY", "chunks"))
        keys, chunks = make_chunks(N, LAYOUT)
        released = local.hold_from_layer(2)
        with local.client("chunks", "http", retries=Retries(1)) as client:
            client.put_chunks(keys, list(chunks))
            first = client.fetch(
                keys, LAYOUT, np.zeros(LAYOUT.delivery_bytes(N), np.uint8), delivery=Delivery.LAYER_MAJOR
            )
            first.wait_layer(1, 30)
            with pytest.raises(ServerError) as slow:
                client.fetch(keys, LAYOUT, np.zeros(LAYOUT.delivery_bytes(N), np.uint8)).wait(30)
            assert slow.value.code is ErrorCode.SLOW_DOWN
            assert slow.value.retryable
            released.set()
            first.wait(30)


@pytest.mark.slow
def test_a_full_pool_shares_memory_between_deliveries(local: LocalStack, keys: list[str], transport: str) -> None:
    """More deliveries than staging slots: all finish, none holds more than its window."""
    buffers = [allocate(LAYOUT.delivery_bytes(N)) for _ in range(12)]
    expected = make_chunks(N, LAYOUT)[1].ravel()
    with local.client("chunks", transport) as client:
        fetches = [client.fetch(keys, LAYOUT, buffer, delivery=Delivery.CHUNK_MAJOR) for buffer in buffers]
        for fetch, buffer in zip(fetches, buffers, strict=True):
            fetch.wait(60)
            assert np.array_equal(buffer, expected)
    assert eventually(lambda: is_idle(local))


def test_a_request_id_table_full_of_live_ids_says_slow_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(used_ids, "IDS_MAX", 6)
    with LocalStack(tmp_path / "data") as local:
        for _ in range(3):
            local.call(local.storage.prefixes.cancel("K", uuid.uuid4().hex))
        with pytest.raises(ServerError, match="SlowDown"):
            local.call(local.storage.prefixes.cancel("K", uuid.uuid4().hex))


CLIENT = """
import sys, time
import numpy as np
from descriptors.descriptor import Delivery
from descriptors.layout import ChunkLayout
from nixl_client.client import Client
url, count, slice_bytes, transport = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
layout = ChunkLayout(16, 16, slice_bytes)
keys = [f"{9:08x}{index:056x}" for index in range(count)]
client = Client(url, "chunks", access_key="OWNERKEY", secret_key="owner-secret-1", transport=transport,
                            agent_lifetime_s=3)
buffer = client.allocate_buffer(layout.delivery_bytes(count))
client.register_buffer(buffer)
print("registered", flush=True)
while True:
    fetch = client.fetch(keys, layout, buffer, delivery=Delivery.LAYER_MAJOR)
    fetch.wait_layer(0, 60)
    print("layer 0", flush=True)
    fetch.wait(60)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "tls"), [("together", ""), pytest.param("apart", "tcp", marks=pytest.mark.slow)])
def test_clients_killed_in_mid_transfer_leave_nothing_behind(tmp_path: Path, kind: str, tls: str) -> None:
    """SIGKILL over shared memory and over TCP, SIGSTOP past the stall limit: the server lives, serves the next client,
    and its files, threads and memory are where they were.
    """
    layout = ChunkLayout(16, 16, 65536)
    count = 64
    config = Path(repository() / "tests" / "data" / "faults.toml").read_text()
    environment = {"UCX_TLS": tls} if tls else {}
    with stack(kind, tmp_path, config, **environment) as running:
        running.s3().create_bucket(Bucket="chunks")
        keys, chunks = make_chunks(count, layout, seed=9)
        with running.client("chunks", "http") as client:
            client.put_chunks(keys, list(chunks))
        for transport in ("ucx", "shm", "http"):
            end_client(running, transport, signal.SIGKILL, count, environment)
        before, rss_before = settled_footprint(running), running.rss_bytes()
        for transport in ("ucx", "shm", "http", "ucx", "shm", "http"):
            end_client(running, transport, signal.SIGKILL, count, environment)
        end_client(running, "ucx", signal.SIGSTOP, count, environment)
        # UCX opens one connection to itself, two descriptors, at a moment of its own; five leaks would be more
        assert eventually(lambda: settled_footprint(running) <= before + 2), (settled_footprint(running), before)
        assert running.rss_bytes() < rss_before + (64 << 20)
        serve_the_next_client(running, keys, chunks, layout, environment)


def end_client(running: Stack, transport: str, number: int, count: int, environment: dict[str, str]) -> None:
    command = [sys.executable, "-c", CLIENT, running.url, str(count), "65536", transport]
    client = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, cwd=repository(), env={**os.environ, **environment}
    )
    assert client.stdout is not None
    for wanted in ("registered", "layer 0"):
        assert client.stdout.readline().strip() == wanted
    client.send_signal(number)
    if number == signal.SIGSTOP:
        time.sleep(4)  # longer than the server's stall limit, and than the agent lives without its heartbeat
        client.kill()
    client.wait(30)
    client.stdout.close()


def settled_footprint(running: Stack) -> int:
    """Open descriptors once idle: what a delivery opened is closed again. Registered agents expire on their own."""
    idle = b"\nobjectcache_delivery_active_requests 0"
    assert eventually(lambda: idle in running.request("GET", "/_objectcache/metrics", key=OWNER).body)
    return running.footprint()[0]


def serve_the_next_client(
    running: Stack, keys: list[str], chunks: np.ndarray, layout: ChunkLayout, environment: dict[str, str]
) -> None:
    program = CLIENT.replace("while True:", "for _ in range(1):") + "import hashlib\n"
    program += "client.close()\nprint(hashlib.sha256(buffer).hexdigest(), flush=True)\n"
    command = [sys.executable, "-c", program, running.url, str(len(keys)), "65536", "ucx"]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=60,
        cwd=repository(),
        env={**os.environ, **environment},
        check=False,
    )

    expected = hashlib.sha256(chunks.reshape(len(keys), layout.num_layers, -1).transpose(1, 0, 2).tobytes()).hexdigest()
    assert done.stdout.split()[-1] == expected, done.stderr
    assert done.returncode == 0


@pytest.mark.slow
def test_a_server_killed_in_mid_transfer_ends_the_fetch_with_an_error(tmp_path: Path, transport: str) -> None:
    """The client hears of it within its deadline; an engine falls back to recomputing."""
    layout = ChunkLayout(64, 16, 65536)
    with stack("together", tmp_path) as running:
        running.s3().create_bucket(Bucket="chunks")
        keys, chunks = make_chunks(64, layout)
        client = running.client("chunks", transport)
        client.put_chunks(keys, list(chunks))
        buffer = allocate(layout.delivery_bytes(64))
        fetch = client.fetch(keys, layout, buffer, delivery=Delivery.LAYER_MAJOR)
        fetch.wait_layer(0, 30)
        running.processes[0].kill()
        running.processes[0].wait(30)
        with pytest.raises(ServerError) as failed:
            fetch_until_it_fails(client, fetch, keys, layout, buffer)
        assert failed.value.retryable
        for call in (fetch.cancel, client.close):
            try:
                call()
            except ServerError:
                continue


def fetch_until_it_fails(
    client: Any, fetch: LayerFetch, keys: list[str], layout: ChunkLayout, buffer: np.ndarray
) -> None:
    """The kill may come after the last byte: then the next fetch meets it."""
    fetch.wait(30)
    client.fetch(keys, layout, buffer).wait(30)


@pytest.mark.slow
@pytest.mark.with_ucx
def test_a_client_the_server_forgot_registers_anew(local: LocalStack, keys: list[str]) -> None:
    """A suspended client, or a restarted server: refused before anything is planned, so it is safe to ask again."""
    buffer = allocate(LAYOUT.delivery_bytes(N))
    with local.client("chunks", "ucx") as client:
        client.register_buffer(buffer)
        (agent,) = local.storage.agents.table.agents
        local.call(local.storage.agents.delete_agent("OWNERKEY", agent.agent_id))
        client.fetch(keys, LAYOUT, buffer, delivery=Delivery.CHUNK_MAJOR).wait(30)
        assert np.array_equal(buffer, make_chunks(N, LAYOUT)[1].ravel())


@pytest.mark.slow
@pytest.mark.with_ucx
def test_the_heartbeat_keeps_an_idle_client_registered(tmp_path: Path) -> None:
    with LocalStack(tmp_path / "data", ucx=UCX) as local:
        client = Client(local.url, "b", access_key=OWNER[0], secret_key=OWNER[1], transport="ucx", agent_lifetime_s=2.0)
        client.register_buffer(np.zeros(4096, np.uint8))
        (first,) = local.storage.agents.table.agents
        time.sleep(2.5)  # longer than an agent lives without its heartbeat
        assert [agent.agent_id for agent in local.storage.agents.table.agents] == [first.agent_id]
        client.close()
        assert len(local.storage.agents.table) == 0


async def test_a_slow_reader_holds_no_more_than_its_window(local: LocalStack, keys: list[str]) -> None:
    """A reader that stops reading stops its own delivery only."""
    body = encode_binary(Descriptor(tuple(keys), 6, 16, 20_000, Delivery.LAYER_MAJOR))
    address = urlsplit(local.url)
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.connect((address.hostname, address.port))
    sock.sendall(descriptor_request(local.url, body))
    try:
        await asyncio.to_thread(sock.recv, 1, socket.MSG_PEEK)  # its delivery has begun
        assert local.storage.staging.slot_count - local.storage.staging.free_count <= 4
        buffer = allocate(LAYOUT.delivery_bytes(N))

        def fetch() -> None:
            with local.client("chunks", "http") as client:
                client.fetch(keys, LAYOUT, buffer, delivery=Delivery.CHUNK_MAJOR).wait(30)

        await asyncio.to_thread(fetch)
        assert np.array_equal(buffer, make_chunks(N, LAYOUT)[1].ravel())
        assert eventually(lambda: local.storage.staging.slot_count - local.storage.staging.free_count <= 4)
    finally:
        sock.close()
    assert await asyncio.to_thread(eventually, lambda: is_idle(local))
    assert threading.active_count() < 100
