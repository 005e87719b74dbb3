"""Layers that several storage servers write into one buffer: over shm and ucx, and while servers go."""

from __future__ import annotations

import hashlib
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from descriptors.cluster import Member, View
from descriptors.descriptor import Delivery, OnMissing
from descriptors.errors import ChunkUnavailable, ErrorCode, ObjectCacheError
from descriptors.layout import ChunkLayout
from descriptors.placement import Placement
from nixl_client.client import Client
from tests.support.chunks import layer_of, make_chunks
from tests.support.clusters import Cluster, cluster
from tests.support.requests import OWNER, s3_client
from tests.support.servers import LocalStack
from tests.support.waiting import eventually

pytestmark = pytest.mark.needs_server
LAYOUT, N = ChunkLayout(8, 16, 64 * 1024), 48
KEYS, CHUNKS = make_chunks(N, LAYOUT)
WAIT_S = 60.0


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStack]:
    with LocalStack(tmp_path_factory.mktemp("home")) as running:
        yield running


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory, home: LocalStack) -> Iterator[Cluster]:
    with cluster(tmp_path_factory.mktemp("calm"), home.url, storage_options=("--ucx",)) as running:
        yield running


@pytest.fixture
def kv(tmp_path: Path, home: LocalStack) -> Iterator[Cluster]:
    with cluster(tmp_path, home.url, storage_options=("--ucx",)) as running:
        yield running


@pytest.fixture
def bucket(home: LocalStack, request: pytest.FixtureRequest) -> str:
    """At home, with all chunks."""
    name = f"chunks-{hashlib.sha256(request.node.name.encode()).hexdigest()[:16]}"
    s3_client(home.url).create_bucket(Bucket=name)
    with home.client(name, "http") as client:
        client.put_chunks(KEYS, list(CHUNKS))
    return name


def client_of(running: Cluster, bucket: str, transport: str, gateway: int = 0, **options: Any) -> Client:
    url = running.gateways[gateway].url
    return Client(url, bucket, access_key=OWNER[0], secret_key=OWNER[1], transport=transport, **options)


def check(fetch: Any, count: int = N) -> None:
    """Every layer, as it becomes ready."""
    for layer_index in range(LAYOUT.num_layers):
        layer = fetch.wait_layer(layer_index, WAIT_S)
        assert layer.chunk_count == count
        assert np.array_equal(layer.data, layer_of(CHUNKS[:count], LAYOUT, layer_index))
    fetch.wait(WAIT_S)


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["shm", "ucx"])
@pytest.mark.parametrize("delivery", [Delivery.LAYER_MAJOR, Delivery.CHUNK_MAJOR])
def test_every_server_writes_its_slices_of_every_layer(
    calm: Cluster, bucket: str, transport: str, delivery: Delivery
) -> None:
    """Cold, then from their caches; through either gateway."""
    for gateway in (0, 1):
        with client_of(calm, bucket, transport, gateway) as client:
            buffer = client.allocate_buffer(LAYOUT.delivery_bytes(N))
            for _ in range(2):
                buffer[:] = 0
                fetch = client.fetch(KEYS, LAYOUT, buffer, delivery=delivery)
                check(fetch)
                assert fetch.is_settled
                assert fetch.wait(WAIT_S).transferred_bytes == LAYOUT.delivery_bytes(N)


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["shm", "ucx"])
def test_a_prefix_with_a_gap_ends_before_it_for_all_servers(calm: Cluster, bucket: str, transport: str) -> None:
    keys = [*KEYS[:20], "f" * 64, *KEYS[20:]]
    with client_of(calm, bucket, transport) as client:
        buffer = client.allocate_buffer(LAYOUT.delivery_bytes(N + 1))
        check(client.fetch(keys, LAYOUT, buffer, delivery=Delivery.LAYER_MAJOR, on_missing=OnMissing.PREFIX), 20)
        with pytest.raises(ChunkUnavailable) as missing:
            client.fetch(keys, LAYOUT, buffer, delivery=Delivery.LAYER_MAJOR).wait(WAIT_S)
        assert missing.value.index == 20
        check(client.fetch(KEYS, LAYOUT, buffer, delivery=Delivery.LAYER_MAJOR))


@pytest.mark.slow
def test_auto_takes_shared_memory_where_all_servers_are_on_this_host(calm: Cluster, bucket: str) -> None:
    with client_of(calm, bucket, "auto") as client:
        buffer = client.allocate_buffer(LAYOUT.delivery_bytes(N))
        fetch = client.fetch(KEYS, LAYOUT, buffer)
        fetch.wait(WAIT_S)
        assert fetch.transport.value == "shm"


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["shm", "ucx"])
def test_a_server_that_is_killed_is_replaced_in_the_same_delivery(kv: Cluster, bucket: str, transport: str) -> None:
    with client_of(kv, bucket, transport) as client:
        buffer = client.allocate_buffer(LAYOUT.delivery_bytes(N))
        check(client.fetch(KEYS, LAYOUT, buffer, delivery=Delivery.LAYER_MAJOR))
        kv.members["b"].kill()
        buffer[:] = 0
        check(client.fetch(KEYS, LAYOUT, buffer, delivery=Delivery.LAYER_MAJOR))
        kv.members["b"].start()
        for _ in range(2):
            buffer[:] = 0
            check(client.fetch(KEYS, LAYOUT, buffer, delivery=Delivery.LAYER_MAJOR))


@pytest.mark.slow
def test_a_server_that_is_killed_in_the_middle_is_replaced_and_the_buffer_comes_back(kv: Cluster, bucket: str) -> None:
    """Its end closes the client's connection, so the client knows that it writes no more."""
    for victim in ("a", "b", "c"):
        with client_of(kv, bucket, "shm") as client:
            buffer = client.allocate_buffer(LAYOUT.delivery_bytes(N))
            check(client.fetch(KEYS, LAYOUT, buffer, delivery=Delivery.LAYER_MAJOR))
            buffer[:] = 0
            fetch = client.fetch(KEYS, LAYOUT, buffer, delivery=Delivery.LAYER_MAJOR)
            kv.members[victim].kill()
            check(fetch)
            buffer[:] = 0
            check(client.fetch(KEYS, LAYOUT, buffer, delivery=Delivery.LAYER_MAJOR))
        kv.members[victim].start()


@pytest.mark.slow
def test_a_server_that_has_restarted_learns_the_client_s_memory(kv: Cluster, bucket: str) -> None:
    """From the next heartbeat; until then the others bring its chunks."""
    with client_of(kv, bucket, "shm", agent_lifetime_s=1.5) as client:
        buffer = client.allocate_buffer(LAYOUT.delivery_bytes(N))
        check(client.fetch(KEYS, LAYOUT, buffer, delivery=Delivery.LAYER_MAJOR))
        kv.members["c"].kill()
        kv.members["c"].start()
        kv.add_member("d", "--ucx")
        kv.write_members(["a", "b", "c", "d"])
        kv.members["d"].start()
        kv.reread()

        def brought() -> bool:
            buffer[:] = 0
            check(client.fetch(KEYS, LAYOUT, buffer, delivery=Delivery.LAYER_MAJOR))
            return all(delivered_bytes(kv, name) > 0 for name in ("c", "d"))

        assert eventually(brought)


def delivered_bytes(running: Cluster, name: str) -> float:
    """A member's own count of the bytes that it has delivered since its start."""
    return summed(running, name, "objectcache_delivery_sent_bytes_total")


def running_deliveries(running: Cluster, name: str) -> float:
    return summed(running, name, "objectcache_scheduler_active_flows")


def summed(running: Cluster, name: str, metric_name: str) -> float:
    """One of a member's metrics over all its labels."""
    lines = [line for line in running.metrics(name).splitlines() if line.startswith(metric_name)]
    return sum(float(line.rpartition(" ")[2]) for line in lines)


@pytest.mark.slow
def test_a_server_that_stops_in_mid_copy_and_goes_on_later_harms_no_later_fetch(
    tmp_path: Path, home: LocalStack, bucket: str
) -> None:
    """Its slices come from another server. It may write them once more when it goes on, so the buffer is not filled
    with anything else before it has drained. The link is slow, so that there is a middle.
    """
    placement = Placement(View("kv", 1, tuple(Member(name, f"http://{name}:1") for name in "abc")))
    victim = placement.members[int(placement.keepers(bucket, KEYS[:1])[0])].name
    slow = "[scheduler]\nlink_bytes_per_s = 8000000\n"
    with cluster(tmp_path, home.url, config=slow) as kv, client_of(kv, bucket, "shm") as client:
        buffer, other = (client.allocate_buffer(LAYOUT.delivery_bytes(N)) for _ in range(2))
        check(client.fetch(KEYS, LAYOUT, buffer, delivery=Delivery.LAYER_MAJOR))
        buffer[:] = 0
        fetch = client.fetch(KEYS, LAYOUT, buffer, delivery=Delivery.LAYER_MAJOR)
        fetch.wait_layer(0, WAIT_S)
        kv.members[victim].send(signal.SIGSTOP)
        try:
            check(fetch)
            assert fetch.given_up.startswith(f"{victim}.")
            assert not fetch.is_settled
            with pytest.raises(ObjectCacheError) as refused:
                client.fetch(KEYS[:8], LAYOUT, buffer, delivery=Delivery.LAYER_MAJOR).wait(WAIT_S)
            assert refused.value.code is ErrorCode.TARGET_UNREACHABLE
            check(client.fetch(KEYS[:8], LAYOUT, other, delivery=Delivery.LAYER_MAJOR), 8)
        finally:
            kv.members[victim].send(signal.SIGCONT)
        assert eventually(lambda: running_deliveries(kv, victim) == 0)
        assert np.array_equal(fetch.wait_layer(3, WAIT_S).data, layer_of(CHUNKS, LAYOUT, 3))
        check(client.fetch(KEYS[:8], LAYOUT, buffer, delivery=Delivery.LAYER_MAJOR), 8)
        assert fetch.is_settled


DOWNLINK_BYTES_PER_S = 20e6


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["shm", "ucx"])
def test_all_servers_together_write_no_faster_than_the_client_s_downlink(
    kv: Cluster, bucket: str, transport: str
) -> None:
    """They ask the agent's keeper. Bytes and order are as always, and one of them may be killed, be it the keeper."""
    with client_of(kv, bucket, transport, downlink_bytes_per_s=DOWNLINK_BYTES_PER_S) as client:
        buffer = client.allocate_buffer(LAYOUT.delivery_bytes(N))
        for killed in (None, "a"):
            buffer[:] = 0
            began_s = time.monotonic()
            fetch = client.fetch(KEYS, LAYOUT, buffer, delivery=Delivery.LAYER_MAJOR)
            if killed is not None:
                fetch.wait_layer(0, WAIT_S)
                kv.members[killed].kill()
            check(fetch)
            assert time.monotonic() - began_s >= buffer.nbytes / (1.5 * DOWNLINK_BYTES_PER_S)
            if killed is None:
                assert eventually(lambda: sum(delivered_bytes(kv, name) for name in "abc") == buffer.nbytes)
                writers = [
                    name for name in "abc" if delivered_bytes(kv, name)
                ]  # not one that a gateway takes for stopped
                asked = [summed(kv, name, "objectcache_downlink_asked_requests_total") for name in writers]
                assert sum(count == 0 for count in asked) <= 1 < len(writers)  # all but the keeper
                failed = sum(summed(kv, name, "objectcache_downlink_failed_requests_total") for name in writers)
                assert failed < sum(asked) / 2
        kv.members["a"].start()
