"""Several storage servers and gateways as one: prefixes, objects, and what becomes of them when servers go."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from descriptors.cluster import Member, View
from descriptors.descriptor import Delivery, Descriptor, OnMissing
from descriptors.descriptor_codec import encode_binary
from descriptors.errors import ChunkUnavailable, ObjectCacheError
from descriptors.placement import Placement
from objectcache.adapters.membership import read_view
from objectcache.cli.main import run
from tests.support.chunks import LAYOUT, N, make_chunks
from tests.support.clusters import Cluster, cluster
from tests.support.etcd import etcd_server
from tests.support.requests import OWNER, request, s3_client
from tests.support.servers import LocalStack
from tests.support.tree import repository
from tests.support.waiting import eventually

pytestmark = pytest.mark.needs_server
KEYS, CHUNKS = make_chunks(N, LAYOUT)
WAIT_S = 30.0


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStack]:
    with LocalStack(tmp_path_factory.mktemp("home")) as running:
        yield running


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory, home: LocalStack) -> Iterator[Cluster]:
    """One whose servers no test harms; each test has a bucket of its own."""
    with cluster(tmp_path_factory.mktemp("calm"), home.url) as running:
        yield running


@pytest.fixture
def kv(tmp_path: Path, home: LocalStack) -> Iterator[Cluster]:
    """One to kill and change."""
    with cluster(tmp_path, home.url) as running:
        yield running


def fetched(client: Any, keys: list[str] = KEYS, delivery: Delivery = Delivery.LAYER_MAJOR, **options: Any) -> bytes:
    buffer = client.allocate_buffer(LAYOUT.delivery_bytes(len(keys)))
    result = client.fetch(keys, LAYOUT, buffer, delivery=delivery, **options).wait(WAIT_S)
    return buffer.tobytes()[: LAYOUT.delivery_bytes(result.chunk_count)]


def expected(chunks: np.ndarray, delivery: Delivery) -> bytes:
    if delivery is Delivery.CHUNK_MAJOR:
        return chunks.tobytes()
    return chunks.reshape(len(chunks), LAYOUT.num_layers, -1).transpose(1, 0, 2).tobytes()


def keepers_of(running: Cluster, bucket: str, keys: list[str] = KEYS) -> list[str]:
    placement = Placement(read_view(running.file))
    return [placement.members[index].name for index in placement.keepers(bucket, keys).tolist()]


@pytest.fixture
def bucket(home: LocalStack, request: pytest.FixtureRequest) -> str:
    """At home, with a name of its own, which spreads KEYS over all three servers."""
    digest = hashlib.sha256(request.node.name.encode()).hexdigest()[:16]
    names = (f"chunks-{digest}-{number}" for number in range(100))
    members = tuple(Member(name, f"http://{name}:1") for name in "abc")
    placement = Placement(View("kv", 1, members))
    name = next(name for name in names if len(set(placement.keepers(name, KEYS).tolist())) == 3)
    s3_client(home.url).create_bucket(Bucket=name)
    return name


@pytest.mark.parametrize("delivery", [Delivery.LAYER_MAJOR, Delivery.CHUNK_MAJOR])
def test_a_prefix_comes_from_all_servers_through_any_gateway(calm: Cluster, bucket: str, delivery: Delivery) -> None:
    assert set(keepers_of(calm, bucket)) == {"a", "b", "c"}
    with calm.client(bucket) as client:
        client.put_chunks(KEYS, list(CHUNKS))
        assert client.lookup(KEYS) == N
    for gateway in (0, 1):
        with calm.client(bucket, gateway) as client:
            assert fetched(client, delivery=delivery) == expected(CHUNKS, delivery)


def test_a_prefix_with_a_gap_ends_before_it(calm: Cluster, bucket: str) -> None:
    with calm.client(bucket) as client:
        client.put_chunks(KEYS[:5], list(CHUNKS[:5]))
        client.put_chunks(KEYS[6:], list(CHUNKS[6:]))
        assert client.lookup(KEYS) == 5
        found = fetched(client, on_missing=OnMissing.PREFIX)
        assert found == expected(CHUNKS[:5], Delivery.LAYER_MAJOR)
        with pytest.raises(ChunkUnavailable) as missing:
            fetched(client)
        assert missing.value.index == 5
        assert "chunk_keys[5]" in missing.value.message


@pytest.mark.slow
def test_a_gateway_that_knows_an_older_view_asks_again_by_itself(kv: Cluster, bucket: str) -> None:
    """Also where the call has a body: no client is told of a change of the members. Each edition reaches the servers
    alone, as a change that a gateway has not heard of yet.
    """
    s3 = s3_client(kv.gateways[0].url)
    chunks = dict(zip(KEYS, CHUNKS, strict=True))
    calls: list[Callable[[], object]] = [
        lambda: [s3.put_object(Bucket=bucket, Key=key, Body=chunk.tobytes()) for key, chunk in chunks.items()],
        lambda: [s3.put_object(Bucket=bucket, Key=f"plain-{size}", Body=b"x" * size) for size in (0, 1, 300_000)],
        lambda: s3.get_object(Bucket=bucket, Key=KEYS[0])["Body"].read(),
        lambda: s3.delete_object(Bucket=bucket, Key=KEYS[1]),
    ]
    for call in calls:
        kv.write_members()
        for name, process in kv.members.items():
            process.send(signal.SIGHUP)
            assert eventually(partial(kv.has_read_members, name))
        call()
    found = s3.list_objects_v2(Bucket=bucket)
    assert {each["Key"] for each in found["Contents"]} == {*KEYS, "plain-0", "plain-1", "plain-300000"} - {KEYS[1]}


@pytest.mark.slow
def test_a_server_that_is_killed_is_missed_by_nobody(kv: Cluster, bucket: str) -> None:
    with kv.client(bucket) as client:
        client.put_chunks(KEYS, list(CHUNKS))
        kv.members["b"].kill()
        assert client.lookup(KEYS) == N
        assert fetched(client) == expected(CHUNKS, Delivery.LAYER_MAJOR)
        s3 = s3_client(kv.gateways[0].url)
        for key, chunk in zip(KEYS, CHUNKS, strict=True):
            assert s3.get_object(Bucket=bucket, Key=key)["Body"].read() == chunk.tobytes()
        kv.members["b"].start()
        assert fetched(client) == expected(CHUNKS, Delivery.LAYER_MAJOR)


@pytest.mark.slow
def test_a_server_that_hangs_is_given_up_and_comes_back(kv: Cluster, bucket: str) -> None:
    with kv.client(bucket) as client:
        client.put_chunks(KEYS, list(CHUNKS))
        kv.members["c"].send(signal.SIGSTOP)
        try:
            assert fetched(client) == expected(CHUNKS, Delivery.LAYER_MAJOR)
        finally:
            kv.members["c"].send(signal.SIGCONT)
        assert fetched(client) == expected(CHUNKS, Delivery.LAYER_MAJOR)


@pytest.mark.slow
def test_members_join_and_leave_while_gateways_run(kv: Cluster, bucket: str) -> None:
    with kv.client(bucket) as client, kv.client(bucket, 1) as other:
        client.put_chunks(KEYS, list(CHUNKS))
        kv.add_member("d")
        kv.write_members(["a", "b", "c", "d"])
        kv.members["d"].start()
        kv.gateways[0].send(signal.SIGHUP)
        assert fetched(client) == expected(CHUNKS, Delivery.LAYER_MAJOR)
        assert fetched(other) == expected(CHUNKS, Delivery.LAYER_MAJOR)
        kv.write_members(["b", "d"])
        kv.reread()
        kv.members["a"].kill()
        kv.members["c"].kill()
        assert fetched(client) == expected(CHUNKS, Delivery.LAYER_MAJOR)
        assert fetched(other) == expected(CHUNKS, Delivery.LAYER_MAJOR)


@pytest.mark.slow
def test_a_member_that_joins_takes_its_chunks_out_of_the_caches_of_others(kv: Cluster, bucket: str) -> None:
    """And not from home again. A member that drains gives its chunks to those that keep them from now on."""
    with kv.client(bucket) as client:
        client.put_chunks(KEYS, list(CHUNKS))
        before = keepers_of(kv, bucket)
        kv.add_member("d")
        kv.write_members()
        kv.members["d"].start()
        kv.reread()
        moved = sum(old != new for old, new in zip(before, keepers_of(kv, bucket), strict=True))
        assert moved
        for name in kv.members:
            assert eventually(partial(kv.has_read_members, name))
        assert eventually(lambda: fetched(client) == expected(CHUNKS, Delivery.LAYER_MAJOR))
        assert eventually(lambda: counted(kv.metrics("d"), "former_keeper_hit_chunks_total") == moved)
        assert counted(kv.metrics("d"), FETCHED) == 0
        assert counted(kv.metrics("d"), "former_keeper_read_bytes_total") == moved * LAYOUT.chunk_bytes


FETCHED = "upstream_fetched_bytes_total"


def counted(metrics: str, name: str) -> float:
    lines = [line for line in metrics.splitlines() if line.startswith(f"objectcache_{name} ")]
    return float(lines[0].rpartition(" ")[2])


@pytest.mark.slow
def test_a_deleted_chunk_is_gone_from_every_server(kv: Cluster, bucket: str) -> None:
    """Also from the one that was its keeper before."""
    with kv.client(bucket) as client, kv.client(bucket, 1) as other:
        client.put_chunks(KEYS, list(CHUNKS))
        assert fetched(client) == expected(CHUNKS, Delivery.LAYER_MAJOR)
        before = keepers_of(kv, bucket)
        kv.add_member("d")
        kv.write_members(["a", "b", "c", "d"])
        kv.members["d"].start()
        kv.reread()
        moved = [
            index for index, (old, new) in enumerate(zip(before, keepers_of(kv, bucket), strict=True)) if old != new
        ]
        gone = moved[0] if moved else 3
        assert fetched(other) == expected(CHUNKS, Delivery.LAYER_MAJOR)
        client.delete([KEYS[gone]])
        kv.write_members(["a", "b", "c"])
        kv.reread()
        assert eventually(lambda: client.lookup(KEYS) == gone and other.lookup(KEYS) == gone)
        with pytest.raises(ObjectCacheError):
            fetched(client)


def test_the_whole_s3_surface_goes_through_any_gateway(calm: Cluster, bucket: str) -> None:
    first, second = (s3_client(gateway.url) for gateway in calm.gateways)
    for index in range(12):
        first.put_object(Bucket=bucket, Key=f"docs/{index}", Body=f"{index}".encode())
    page = second.list_objects_v2(Bucket=bucket, Prefix="docs/")
    assert page["KeyCount"] == 12
    second.put_object(Bucket=bucket, Key="docs/1", Body=b"changed")
    assert first.get_object(Bucket=bucket, Key="docs/1")["Body"].read() == b"changed"
    first.copy_object(Bucket=bucket, Key="copy", CopySource={"Bucket": bucket, "Key": "docs/1"})
    assert second.head_object(Bucket=bucket, Key="copy")["ContentLength"] == 7
    upload = first.create_multipart_upload(Bucket=bucket, Key="big")["UploadId"]
    body = bytes(5 << 20)
    parts = []
    for number, (s3, data) in enumerate([(first, body), (second, b"end")], 1):
        done = s3.upload_part(Bucket=bucket, Key="big", UploadId=upload, PartNumber=number, Body=data)
        parts.append({"PartNumber": number, "ETag": done["ETag"]})
    second.complete_multipart_upload(Bucket=bucket, Key="big", UploadId=upload, MultipartUpload={"Parts": parts})
    assert first.get_object(Bucket=bucket, Key="big", Range="bytes=5242880-")["Body"].read() == b"end"
    keys = [{"Key": f"docs/{index}"} for index in range(12)]
    deleted = second.delete_objects(Bucket=bucket, Delete={"Objects": keys})
    assert len(deleted["Deleted"]) == 12
    assert first.list_objects_v2(Bucket=bucket, Prefix="docs/")["KeyCount"] == 0


@pytest.mark.slow
def test_over_etcd_a_killed_server_leaves_and_its_keys_have_another_keeper(tmp_path: Path, home: LocalStack) -> None:
    """Also for deletes, which wait for the keeper of a chunk until it has left."""
    with (
        etcd_server(tmp_path / "etcd") as etcd,
        cluster(
            tmp_path,
            home.url,
            config="[internals.cluster]\nlease_s = 2\n",
            where=f"{etcd.url.replace('http', 'etcd')}/kv",
        ) as kv,
        kv.client("etcd-chunks") as client,
        kv.client("etcd-chunks", 1) as other,
    ):
        s3_client(kv.gateways[0].url).create_bucket(Bucket="etcd-chunks")
        client.put_chunks(KEYS, list(CHUNKS))
        assert fetched(other) == expected(CHUNKS, Delivery.LAYER_MAJOR)
        kv.members["a"].kill()
        assert fetched(client) == expected(CHUNKS, Delivery.LAYER_MAJOR)
        assert eventually(lambda: deleted(client, KEYS[8:]))
        assert other.lookup(KEYS) == 8
        kv.members["a"].start()
        assert fetched(client, KEYS[:8]) == expected(CHUNKS[:8], Delivery.LAYER_MAJOR)
        kv.add_member("d")
        kv.members["d"].start()
        for each in (client, other):
            assert fetched(each, KEYS[:8]) == expected(CHUNKS[:8], Delivery.LAYER_MAJOR)
        etcd.send(signal.SIGSTOP)
        try:
            assert fetched(client, KEYS[:8]) == expected(CHUNKS[:8], Delivery.LAYER_MAJOR)
        finally:
            etcd.send(signal.SIGCONT)
        kv.members["b"].send(signal.SIGTERM)
        assert fetched(other, KEYS[:8]) == expected(CHUNKS[:8], Delivery.LAYER_MAJOR)


def deleted(client: Any, keys: list[str]) -> bool:
    try:
        client.delete(keys)
    except ObjectCacheError:
        return False
    return True


def test_a_request_id_is_taken_once_in_the_cluster(calm: Cluster, bucket: str) -> None:
    """A descriptor that was carried out through one gateway is refused by the other, which has never seen it."""
    with calm.client(bucket) as client:
        client.put_chunks(KEYS, list(CHUNKS))
    body = encode_binary(Descriptor(tuple(KEYS), LAYOUT.num_layers, 16, 20_000, request_id="once-and-only-once"))
    answers = [
        request(gateway.url, "POST", f"/{bucket}?layerwise", body=body)
        for gateway in (*calm.gateways, calm.gateways[0])
    ]
    assert [answer.status for answer in answers] == [200, 409, 409]
    assert answers[0].body in (expected(CHUNKS, Delivery.LAYER_MAJOR), expected(CHUNKS, Delivery.CHUNK_MAJOR))
    assert b"RequestReplayed" in answers[1].body


def test_a_cancelled_request_is_not_carried_out_later(calm: Cluster, bucket: str) -> None:
    with calm.client(bucket) as client:
        client.put_chunks(KEYS, list(CHUNKS))
    request_id = "cancelled-before-it-came"
    assert request(calm.gateways[0].url, "DELETE", f"/_objectcache/requests/{request_id}").status == 204
    body = encode_binary(Descriptor(tuple(KEYS), LAYOUT.num_layers, 16, 20_000, request_id=request_id))
    assert request(calm.gateways[1].url, "POST", f"/{bucket}?layerwise", body=body).status == 409


def test_strangers_and_other_clusters_are_refused(calm: Cluster, tmp_path: Path) -> None:
    """A gateway of another cluster, which has the secret."""
    (tmp_path / "other.toml").write_text(calm.file.read_text().replace('cluster = "kv"', 'cluster = "other"'))
    other = Cluster(calm.directory, calm.upstream_url, f"file:{tmp_path / 'other.toml'}")
    stranger = other.add_gateway()
    try:
        stranger.start()
        answer = request(stranger.url, "GET", "/")
    finally:
        stranger.kill()
    assert (answer.status, b"cluster" in answer.body) == (403, True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("gateway",), "--storage or --cluster"),
        (("gateway", "--cluster", "etcd://x"), "--cluster etcd://x: must be"),
        (("gateway", "--cluster", "file:/nowhere/members.toml"), "members.toml: No such file"),
        (("storage-server", "--data", "d", "--cluster", "file:y", "--name", "a"), "--cluster needs --upstream"),
    ],
)
def test_what_does_not_fit_is_said_at_the_start(tmp_path: Path, arguments: tuple[str, ...], problem: str) -> None:
    secret = tmp_path / "secret"
    secret.write_text("a secret of gateways and storage servers\n")
    command = [sys.executable, "-m", "objectcache", *arguments, "--peer-secret-file", str(secret)]
    environment = {**os.environ, "AWS_ACCESS_KEY_ID": OWNER[0], "AWS_SECRET_ACCESS_KEY": OWNER[1]}
    environment["PYTHONPATH"] = str(repository())
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=tmp_path, env=environment)
    assert done.returncode in (1, 2)
    assert problem in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_gateway_tells_of_its_cluster_and_of_the_members_that_do_not_answer(
    kv: Cluster, home: LocalStack, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", OWNER[0])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", OWNER[1])
    kv.members["b"].kill()
    assert run(["cluster", "status", kv.gateways[0].url]) == 0
    said = capsys.readouterr().out
    assert "2 of 3 members answer" in said
    assert [line.split()[0] for line in said.splitlines() if "does not answer" in line] == ["b"]
    assert run(["cluster", "status", home.url]) == 1
    assert "a gateway of no cluster" in capsys.readouterr().err
