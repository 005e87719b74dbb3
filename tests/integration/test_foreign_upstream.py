"""In front of services of others' making: moto, and the one that OBJECTCACHE_TEST_S3_ENDPOINT names."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from descriptors.descriptor import Delivery
from descriptors.layout import ChunkLayout
from descriptors.units import MIB
from nixl_client.client import Client
from storage_server.settings import UpstreamSettings
from tests.faults.bounds import allocated
from tests.support.chunks import layer_of, make_chunks
from tests.support.foreign_services import moto_service, named_service, needs_named_service
from tests.support.requests import s3_client
from tests.support.servers import LocalStack
from tests.support.waiting import eventually

BUCKET = "objectcache-test-upstream"
LAYOUT = ChunkLayout(6, 16, 70_000)
N = 9
pytestmark = [pytest.mark.needs_server, pytest.mark.environments, pytest.mark.timeout(300)]


@pytest.fixture(scope="module", params=["moto", pytest.param("named", marks=needs_named_service)])
def service(request: pytest.FixtureRequest) -> Iterator[UpstreamSettings]:
    with contextlib.ExitStack() as stack:
        yield stack.enter_context(moto_service()) if request.param == "moto" else named_service()


@pytest.fixture
def direct(service: UpstreamSettings) -> Iterator[Any]:
    """The service itself, with an empty bucket of ours."""
    s3 = s3_client(service.endpoint, (service.access_key, service.secret_key))
    with contextlib.suppress(s3.exceptions.BucketAlreadyOwnedByYou, s3.exceptions.BucketAlreadyExists):
        s3.create_bucket(Bucket=BUCKET)
    for each in s3.list_objects_v2(Bucket=BUCKET).get("Contents", []):
        s3.delete_object(Bucket=BUCKET, Key=each["Key"])
    yield s3
    s3.close()


@pytest.fixture
def front(service: UpstreamSettings, tmp_path: Path) -> Iterator[LocalStack]:
    with LocalStack(tmp_path / "front", upstream=service) as running:
        yield running


def fetched(client: Client, keys: list[str], chunks: np.ndarray) -> None:
    """Every layer of the prefix is delivered, in order, with its own bytes."""
    buffer = np.zeros(chunks.nbytes, np.uint8)
    fetch = client.fetch(keys, LAYOUT, buffer, delivery=Delivery.LAYER_MAJOR)
    for layer_index in range(LAYOUT.num_layers):
        assert np.array_equal(fetch.wait_layer(layer_index, 60).data, layer_of(chunks, LAYOUT, layer_index))
    fetch.wait(60)


def test_chunks_that_others_have_put_are_delivered(direct: Any, front: LocalStack) -> None:
    keys, chunks = make_chunks(N, LAYOUT, seed=7)
    for key, chunk in zip(keys, chunks, strict=True):
        direct.put_object(Bucket=BUCKET, Key=key, Body=chunk.tobytes())
    with front.client(BUCKET, "http") as client:
        assert client.lookup([*keys, "0" * 64]) == N
        for _ in range(2):
            fetched(client, keys, chunks)


def test_chunks_that_are_put_through_us_are_plain_objects_there(
    direct: Any, service: UpstreamSettings, front: LocalStack, tmp_path: Path
) -> None:
    """Another server of ours, with nothing cached, delivers them, too."""
    keys, chunks = make_chunks(N, LAYOUT, seed=8)
    with front.client(BUCKET, "http") as client:
        client.put_chunks(keys, list(chunks))
        fetched(client, keys, chunks)
    for key, chunk in zip(keys, chunks, strict=True):
        assert direct.get_object(Bucket=BUCKET, Key=key)["Body"].read() == chunk.tobytes()
    with LocalStack(tmp_path / "other", upstream=service) as other, other.client(BUCKET, "http") as client:
        fetched(client, keys, chunks)
    s3_client(front.url).delete_object(Bucket=BUCKET, Key=keys[3])
    with front.client(BUCKET, "http") as client:
        assert client.lookup(keys) == 3
    assert keys[3] not in [each["Key"] for each in direct.list_objects_v2(Bucket=BUCKET)["Contents"]]


def test_ordinary_objects_pass_through(direct: Any, front: LocalStack) -> None:
    s3 = s3_client(front.url, retries={"max_attempts": 2})  # a service that knows no trailers is found out once
    s3.put_object(Bucket=BUCKET, Key="a/plain", Body=b"data", ContentType="text/x-plain", Metadata={"one": "two"})
    upload = s3.create_multipart_upload(Bucket=BUCKET, Key="parts")["UploadId"]
    parts = []
    for number, data in ((1, b"x" * 5 * MIB), (2, b"y" * 1000)):
        each = s3.upload_part(Bucket=BUCKET, Key="parts", UploadId=upload, PartNumber=number, Body=data)
        parts.append({"PartNumber": number, "ETag": each["ETag"]})
    s3.complete_multipart_upload(Bucket=BUCKET, Key="parts", UploadId=upload, MultipartUpload={"Parts": parts})
    s3.copy_object(Bucket=BUCKET, Key="copied", CopySource={"Bucket": BUCKET, "Key": "a/plain"})
    assert direct.get_object(Bucket=BUCKET, Key="copied")["Body"].read() == b"data"
    found = s3.get_object(Bucket=BUCKET, Key="parts", Range="bytes=5242879-5242881")
    assert found["Body"].read() == b"xyy"
    head = s3.head_object(Bucket=BUCKET, Key="a/plain")
    assert (head["ContentType"], head["Metadata"]) == ("text/x-plain", {"one": "two"})
    listed = s3.list_objects_v2(Bucket=BUCKET, Delimiter="/")
    assert [each["Key"] for each in listed["Contents"]] == ["copied", "parts"]
    assert [each["Prefix"] for each in listed["CommonPrefixes"]] == ["a/"]
    direct.put_object(Bucket=BUCKET, Key="a/plain", Body=b"changed there")
    assert s3.get_object(Bucket=BUCKET, Key="a/plain")["Body"].read() == b"changed there"
    s3.delete_objects(Bucket=BUCKET, Delete={"Objects": [{"Key": "copied"}, {"Key": "parts"}, {"Key": "a/plain"}]})
    assert "Contents" not in direct.list_objects_v2(Bucket=BUCKET)


@pytest.mark.slow
def test_a_cache_smaller_than_what_is_there_serves_all_of_it(
    direct: Any, service: UpstreamSettings, tmp_path: Path
) -> None:
    """What leaves the cache is fetched again, and the directory never takes more than its bound."""
    layout, count = ChunkLayout(4, 16, MIB // 4), 60
    keys, chunks = make_chunks(count, layout, seed=9)
    with LocalStack(tmp_path / "small", upstream=service, disk_bytes=64 * MIB, dram_bytes=0) as small:
        with small.client(BUCKET, "http") as client:
            client.put_chunks(keys, list(chunks))
            buffer = np.zeros(10 * layout.chunk_bytes, np.uint8)
            for start in (*range(0, count, 10), *range(0, count, 10)):
                client.fetch(keys[start : start + 10], layout, buffer, delivery=Delivery.CHUNK_MAJOR).wait(60)
                assert np.array_equal(buffer, chunks[start : start + 10].ravel())
                assert allocated(tmp_path / "small") <= 64 * MIB
        assert small.storage.store.evictor.evictions.evicted_count > count
        assert eventually(lambda: small.storage.upstream.fetches.running_count == 0)
