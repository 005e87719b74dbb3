"""The previous commit's servers beside this one's, as while a cluster is upgraded server by server."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from descriptors.descriptor import Delivery
from tests.support.chunks import LAYOUT, N, make_chunks
from tests.support.clusters import Cluster, Process, cluster
from tests.support.requests import request, s3_client
from tests.support.servers import LocalStack
from tests.support.tree import repository

pytestmark = [pytest.mark.needs_server, pytest.mark.timeout(240)]
KEYS, CHUNKS = make_chunks(N, LAYOUT)
LAYERS = CHUNKS.reshape(N, LAYOUT.num_layers, -1).transpose(1, 0, 2).tobytes()
PREVIOUS = os.environ.get("OBJECTCACHE_PREVIOUS", "HEAD^")
"""The commit beside which this one runs."""
WAIT_S = 30.0


@pytest.fixture(scope="module")
def previous(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout of the previous commit, with its native code built."""
    tree = tmp_path_factory.mktemp("previous")
    archive = subprocess.run(["git", "archive", PREVIOUS], cwd=repository(), capture_output=True, check=False)
    if archive.returncode:
        pytest.skip(f"the history of this checkout has no {PREVIOUS}")
    subprocess.run(["tar", "-x", "-C", str(tree)], input=archive.stdout, check=True)
    build = [sys.executable, "-c", "import setuptools; setuptools.setup()", "build_ext", "--inplace"]
    subprocess.run(build, cwd=tree, check=True, capture_output=True)
    return tree


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStack]:
    with LocalStack(tmp_path_factory.mktemp("home")) as running:
        yield running


def run_again(process: Process, tree: Path) -> None:
    """Stop a server, and start it from another checkout on what it has."""
    process.kill()
    process.tree = tree
    process.start()


def work(running: Cluster, bucket: str, number: int) -> None:
    """Clients use both gateways for everything that has a form of its own between a gateway and storage servers."""
    for gateway in range(2):
        s3 = s3_client(running.gateways[gateway].url)
        s3.put_object(Bucket=bucket, Key=f"o{number}", Body=b"first", Metadata={"a": "b"})
        s3.put_object(Bucket=bucket, Key=f"o{number}", Body=b"second", ContentType="text/plain")
        assert s3.get_object(Bucket=bucket, Key=f"o{number}", Range="bytes=1-3")["Body"].read() == b"eco"
        s3.copy_object(Bucket=bucket, Key=f"c{number}", CopySource=f"{bucket}/o{number}")
        upload = s3.create_multipart_upload(Bucket=bucket, Key=f"m{number}")["UploadId"]
        part = s3.upload_part(Bucket=bucket, Key=f"m{number}", UploadId=upload, PartNumber=1, Body=b"part")
        parts = {"Parts": [{"PartNumber": 1, "ETag": part["ETag"]}]}
        s3.complete_multipart_upload(Bucket=bucket, Key=f"m{number}", UploadId=upload, MultipartUpload=parts)
        listed = [each["Key"] for each in s3.list_objects_v2(Bucket=bucket, Prefix="m")["Contents"]]
        assert f"m{number}" in listed
        s3.delete_object(Bucket=bucket, Key=f"o{number}")
        for transport in ("http", "shm"):
            options = {"bucket": bucket, "gateway": gateway, "transport": transport}
            with running.client(**options) as client:
                assert client.lookup(KEYS) == N
                buffer = client.allocate_buffer(LAYOUT.delivery_bytes(N))
                client.fetch(KEYS, LAYOUT, buffer, delivery=Delivery.LAYER_MAJOR).wait(WAIT_S)
                assert buffer.tobytes() == LAYERS
        assert request(running.gateways[gateway].url, "GET", "/_objectcache/metrics").status == 200


@pytest.mark.slow
def test_a_cluster_is_upgraded_server_by_server(tmp_path: Path, home: LocalStack, previous: Path) -> None:
    """At every step everything works, with old gateways before new storage servers and the other way round."""
    bucket = "upgrade"
    s3_client(home.url).create_bucket(Bucket=bucket)
    with cluster(tmp_path, home.url) as running:
        servers, gateways = list(running.members.values()), list(running.gateways)
        for process in [*servers, *gateways]:
            run_again(process, previous)
        with running.client(bucket) as client:
            for key, chunk in zip(KEYS, CHUNKS, strict=True):
                client.put_chunks([key], [chunk])
        work(running, bucket, 0)
        order = [gateways[0], *servers, gateways[1]]
        for number, process in enumerate(order, 1):
            run_again(process, repository())
            work(running, bucket, number)
