"""What `GET /_objectcache/metrics` tells, and whom."""

from __future__ import annotations

import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from descriptors.descriptor import Delivery
from descriptors.metrics import GATEWAY, STORAGE
from descriptors.version import __version__
from tests.support.chunks import LAYOUT, N, make_chunks
from tests.support.requests import OTHER, OWNER, READER, Reply, request
from tests.support.servers import CONFIG, Stack, stack, started
from tests.support.waiting import eventually

TOKEN = "a-token-of-twenty-two"
TARGET = "/_objectcache/metrics"
METERED = CONFIG.replace('secret_key = "other-secret-2"', 'secret_key = "other-secret-2"\nactions = ["GetObject"]', 1)
METERED = f'[gateway]\nmetrics_token = "{TOKEN}"\n{METERED}'
Samples = dict[tuple[str, ...], float]


@pytest.fixture(params=["together", "apart"])
def metered(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Stack]:
    with stack(request.param, tmp_path, METERED) as running:
        running.s3().create_bucket(Bucket="chunks")
        yield running


def scraped(url: str, token: str = TOKEN) -> Reply:
    return request(url, "GET", TARGET, key=None, headers={"Authorization": f"Bearer {token}"})


def samples(url: str, name: str) -> Samples:
    """The samples of one name, by the values of their labels."""
    reply = scraped(url)
    assert reply.status == 200, reply.body
    return {
        tuple(sample.labels[label] for label in sorted(sample.labels)): sample.value
        for family in text_string_to_metric_families(reply.body.decode())
        for sample in family.samples
        if sample.name == name
    }


def total(url: str, name: str) -> float:
    return sum(samples(url, name).values())


@pytest.mark.slow
def test_every_metric_is_there_as_it_is_listed_and_no_other(metered: Stack) -> None:
    """With its help and its kind, once; promtool, where it is installed, finds nothing to say."""
    keys, chunks = make_chunks(N, LAYOUT)
    with metered.client("chunks", "http") as client:
        client.put_chunks(keys, chunks)
        client.fetch(keys, LAYOUT, np.zeros(chunks.nbytes, np.uint8), delivery=Delivery.LAYER_MAJOR).wait(30)
    assert metered.request("GET", "/chunks/none").status == 404
    reply = scraped(metered.url)
    assert reply.headers["content-type"].startswith("text/plain; version=0.0.4")
    families = list(text_string_to_metric_families(reply.body.decode()))
    found = {family.name: (family.type, family.documentation) for family in families}
    assert len(found) == len(families)
    (build,) = (family for family in families if family.name == "objectcache_build_info")
    assert [(each.labels["version"], each.value) for each in build.samples] == [(__version__, 1.0)]
    of_process = {name for name in found if name.startswith("process_")}
    assert {"process_resident_memory_bytes", "process_open_fds", "process_start_time_seconds"} <= of_process
    assert {name: said for name, said in found.items() if name not in {*of_process, build.name}} == {
        metric.name.removesuffix("_total"): (metric.kind.value, metric.meaning) for metric in (*GATEWAY, *STORAGE)
    }
    promtool = shutil.which("promtool")
    if promtool is not None:
        checked = subprocess.run([promtool, "check", "metrics"], input=reply.body, capture_output=True, check=False)
        assert (checked.returncode, checked.stdout + checked.stderr) == (0, b"")


@pytest.mark.slow
def test_requests_are_counted_by_what_they_were_and_how_they_ended(metered: Stack) -> None:
    s3 = metered.s3()
    s3.put_object(Bucket="chunks", Key="one", Body=b"x" * 1000)
    for _ in range(3):
        s3.get_object(Bucket="chunks", Key="one")["Body"].read()
    assert metered.request("GET", "/chunks/none").status == 404

    def requests() -> Samples:
        return samples(metered.url, "objectcache_gateway_requests_total")

    # a request is counted when it has been answered
    wanted = {("get_object", "200"): 3, ("get_object", "404"): 1, ("put_object", "200"): 1}
    assert eventually(lambda: wanted.items() <= requests().items()), requests()
    assert samples(metered.url, "objectcache_gateway_errors_total")["NoSuchKey",] == 1
    moved = samples(metered.url, "objectcache_gateway_moved_bytes_total")
    assert (moved["get_object",], moved["put_object",]) == (3000, 1000)
    assert samples(metered.url, "objectcache_gateway_request_duration_seconds_count")["get_object",] == 4
    assert eventually(lambda: samples(metered.url, "objectcache_gateway_active_requests") == {(): 1}), "who asks"
    assert total(metered.url, "objectcache_store_changes_total") >= 2


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["http", "shm", "ucx"])
def test_deliveries_are_counted_by_transport_order_and_end(metered: Stack, transport: str) -> None:
    keys, chunks = make_chunks(N, LAYOUT)
    with metered.client("chunks", transport) as client:
        client.put_chunks(keys, chunks)
        buffer = client.allocate_buffer(chunks.nbytes)
        for delivery in (Delivery.LAYER_MAJOR, Delivery.LAYER_MAJOR, Delivery.CHUNK_MAJOR):
            client.fetch(keys, LAYOUT, buffer, delivery=delivery).wait(30)
        with pytest.raises(Exception, match="NoSuchChunk"):
            client.fetch(["0" * 64], LAYOUT, buffer[: LAYOUT.chunk_bytes]).wait(30)
        assert client.lookup([*keys, "0" * 64]) == N
        if transport != "http":
            assert total(metered.url, "objectcache_agents_registered_agents") == 1
            assert total(metered.url, "objectcache_agents_registered_regions") >= 1

    def ended() -> Samples:
        return samples(metered.url, "objectcache_delivery_requests_total")

    assert eventually(lambda: sum(ended().values()) == 4)
    assert ended() == {
        ("layer-major", "done", transport): 2,
        ("chunk-major", "done", transport): 1,
        ("none", "NoSuchChunk", transport): 1,
    }
    assert samples(metered.url, "objectcache_delivery_sent_bytes_total") == {(transport,): 3 * chunks.nbytes}
    assert samples(metered.url, "objectcache_delivery_first_layer_seconds_count") == {(transport,): 2}
    assert samples(metered.url, "objectcache_delivery_duration_seconds_count") == {(transport,): 4}
    first = samples(metered.url, "objectcache_delivery_first_layer_phase_seconds_total")
    assert set(first) == {(phase, transport) for phase in ("plan", "wait", "gather", "transfer")}
    phases = samples(metered.url, "objectcache_delivery_phase_seconds_total")
    assert set(phases) == {("plan",), ("wait",), ("gather",), ("transfer",)}
    assert total(metered.url, "objectcache_lookup_asked_chunks_total") == N + 1
    assert total(metered.url, "objectcache_lookup_matched_chunks_total") == N
    assert eventually(lambda: total(metered.url, "objectcache_delivery_active_requests") == 0)
    extents = total(metered.url, "objectcache_dram_hit_extents_total")
    assert extents + total(metered.url, "objectcache_dram_missed_extents_total") == 3 * N
    assert total(metered.url, "objectcache_ucx_starts_total") == 1


@pytest.mark.slow
def test_damage_that_was_found_is_told(metered: Stack) -> None:
    keys, chunks = make_chunks(1, LAYOUT)
    with metered.client("chunks", "http") as client:
        client.put_chunks(keys, chunks)
        assert total(metered.url, "objectcache_store_damaged_objects") == 0
        (file,) = [path for path in (metered.data_dir / "extents").glob("*/*") if path.is_file()]
        with file.open("r+b") as opened:
            opened.seek(100)
            opened.write(b"\0\xff\0\xff")
        with pytest.raises(Exception, match="ChunkCorrupt"):
            client.fetch(keys, LAYOUT, np.zeros(chunks.nbytes, np.uint8)).wait(30)
    assert eventually(lambda: total(metered.url, "objectcache_store_damaged_objects") == 1)


@pytest.mark.slow
def test_metrics_are_for_the_token_and_for_keys_that_may(metered: Stack) -> None:
    """The token opens nothing else; a key that is limited to some buckets would read about the others."""
    assert scraped(metered.url).status == 200
    assert metered.request("GET", TARGET, key=OWNER).status == 200
    assert metered.request("GET", TARGET, key=OTHER).code == "AccessDenied"
    assert metered.request("GET", TARGET, key=READER).code == "AccessDenied"
    assert metered.request("POST", TARGET, key=OWNER).status == 405
    for authorization in (
        None,
        "Bearer ",
        f"Bearer {TOKEN}x",
        f"Bearer {TOKEN[:-1]}",
        f"bearer {TOKEN}",
        TOKEN,
        "Bearer \xff\xfe",
    ):
        headers = {} if authorization is None else {"Authorization": authorization}
        assert request(metered.url, "GET", TARGET, key=None, headers=headers).status in (400, 403), authorization
    bearer = {"Authorization": f"Bearer {TOKEN}"}
    for method, target in (("GET", "/"), ("GET", "/chunks"), ("PUT", "/chunks/x"), ("GET", "/_objectcache/scheduler")):
        refused = request(metered.url, method, target, key=None, headers=bearer)
        assert (refused.status, refused.code) == (403, "AccessDenied"), target


@pytest.mark.slow
def test_without_a_token_none_is_taken(tmp_path: Path) -> None:
    with stack("together", tmp_path) as running:
        for token in ("", "None", TOKEN):
            assert scraped(running.url, token).status in (400, 403)
        assert running.request("GET", TARGET, key=OWNER).status == 200


@pytest.mark.slow
def test_workers_are_added_up_and_what_an_ended_one_has_counted_stays(tmp_path: Path) -> None:
    """Whichever of them is asked."""
    (tmp_path / "config.toml").write_text(METERED)
    arguments = ("--data", str(tmp_path / "data"), "--port", "0", "--workers", "3", "--config")
    with started("serve", *arguments, str(tmp_path / "config.toml")) as (url, process):
        for _ in range(30):  # each on a connection of its own: the kernel shares them out
            assert request(url, "GET", "/_objectcache/health", key=None).status == 200

        def counted() -> float:
            return samples(url, "objectcache_gateway_requests_total")["health", "200"]

        assert eventually(lambda: counted() == 30)
        assert [counted() for _ in range(6)] == [30] * 6
        children = [child for child in psutil.Process(process.pid).children() if "worker" in " ".join(child.cmdline())]
        assert len(children) == 2
        assert listener_count(url) == 3
        children[0].send_signal(signal.SIGKILL)
        assert eventually(lambda: listener_count(url) == 2), "until then the kernel shares connections to the dead"
        assert [counted() for _ in range(6)] == [30] * 6
        assert eventually(lambda: total(url, "objectcache_gateway_active_requests") == 1)


def listener_count(url: str) -> int:
    """How many sockets listen on the server's port: one of each of its processes."""
    port = urlsplit(url).port
    return sum(
        found.status == psutil.CONN_LISTEN and found.laddr.port == port for found in psutil.net_connections("tcp")
    )


@pytest.mark.slow
def test_a_gateway_tells_its_own_while_the_storage_server_is_away(tmp_path: Path) -> None:
    with stack("apart", tmp_path, METERED) as running:
        storage = running.processes[0]
        assert "objectcache_store_commits_total" in scraped(running.url).body.decode()
        storage.send_signal(signal.SIGTERM)
        assert storage.wait(30) == 0
        reply = scraped(running.url)
        assert reply.status == 200
        assert "objectcache_gateway_requests_total" in reply.body.decode()
        assert "objectcache_store" not in reply.body.decode()
