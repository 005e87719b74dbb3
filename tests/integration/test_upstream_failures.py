"""A service upstream that is slow, breaks off or is gone, here a second ObjectCache behind a proxy."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest
from aiohttp import web
from botocore.exceptions import ClientError

from descriptors.descriptor import Delivery, Descriptor
from descriptors.descriptor_codec import encode_json
from descriptors.errors import ObjectCacheError
from descriptors.layout import ChunkLayout
from descriptors.units import MIB
from storage_server.home.rules import groups as groups_module
from storage_server.settings import UpstreamSettings
from tests.support.chunks import make_chunks
from tests.support.faulty_upstream import Fault, FaultyUpstream, start_of_range
from tests.support.requests import OWNER, descriptor_request, request, s3_client, signed
from tests.support.servers import LocalStack
from tests.support.waiting import eventually

LAYOUT = ChunkLayout(6, 16, 70_000)
N = 9
WAYS: dict[str, dict[str, Any]] = {
    "whole": {},
    "groups": {"fetches_max": 4},
    "straight into files": {"fetches_max": 4, "landing_bytes": 0},
}
"""How chunks come: each in one request, or in groups of layers since there are more chunks than connections."""


@pytest.fixture(autouse=True)
def requests_cost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that small chunks, too, come in groups of layers where there are more of them than connections."""
    monkeypatch.setattr(groups_module, "REQUEST_BYTES", 0)
    monkeypatch.setattr(groups_module, "LATER_BYTES_MIN", 1)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStack]:
    """The service upstream."""
    with LocalStack(tmp_path_factory.mktemp("home")) as running:
        running.call(running.storage.objects.create_bucket(OWNER[0], "chunks"))
        yield running


@pytest.fixture(scope="module")
def stored(home: LocalStack, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], np.ndarray]:
    """Chunks that were put through another server of ours, so that they carry their proof, and are upstream alone."""
    keys, chunks = make_chunks(N, LAYOUT)
    with (
        LocalStack(tmp_path_factory.mktemp("writer"), upstream=UpstreamSettings(home.url, *OWNER)) as writer,
        writer.client("chunks", "http") as client,
    ):
        client.put_chunks(keys, list(chunks))
    return keys, chunks


@pytest.fixture
def upstream(home: LocalStack) -> Iterator[FaultyUpstream]:
    """The way from us to the service."""
    with FaultyUpstream(home.url) as running:
        yield running


@pytest.fixture
def cold(request: pytest.FixtureRequest, upstream: FaultyUpstream, tmp_path: Path) -> Iterator[LocalStack]:
    """Us, with nothing in the cache. The parameter is one of WAYS. A busy machine must not make reads time out that
    are asked for once.
    """
    options = {"connect_timeout_s": 3.0, "read_timeout_s": 5.0, **WAYS[getattr(request, "param", "whole")]}
    with LocalStack(tmp_path / "cold", upstream=UpstreamSettings(upstream.url, *OWNER, **options)) as running:
        yield running


Stored = tuple[list[str], np.ndarray]


@pytest.mark.slow
@pytest.mark.parametrize("cold", WAYS, indirect=True)
@pytest.mark.parametrize("fault", [Fault.DRIPPING, Fault.TRUNCATED])
def test_what_breaks_off_or_drips_is_asked_for_again_from_where_it_ended(
    upstream: FaultyUpstream, stored: Stored, cold: LocalStack, fault: Fault
) -> None:
    """The delivery does not hear of it. What has been received is not asked for again."""
    keys, chunks = stored
    failed = set[tuple[str, str]]()

    def once(request: web.Request) -> Fault | None:
        asked = request.path, request.headers.get("Range", "")
        if request.method != "GET" or start_of_range(request) is None or request.path in dict(failed):
            return None
        failed.add(asked)
        return fault

    upstream.choose = once
    with cold.client("chunks", "http") as client:
        buffer = np.zeros(chunks.nbytes, np.uint8)
        client.fetch(keys, LAYOUT, buffer, delivery=Delivery.CHUNK_MAJOR).wait(60)
        assert np.array_equal(buffer, chunks.ravel())
    assert len(failed) == N
    assert eventually(lambda: cold.storage.upstream.fetches.running_count == 0)
    assert cold.storage.upstream.fetches.fetched_bytes == chunks.nbytes
    for key in keys:
        gets = [asked for method, path, asked in upstream.seen if method == "GET" and path.endswith(key)]
        ranges = [asked for asked in gets if asked]  # tags are got without one
        starts = [int(asked.removeprefix("bytes=").split("-")[0]) for asked in ranges]
        assert starts == sorted(starts)
        if len(starts) == 2:  # one request for all, and one for the rest of it
            assert starts[1] > 0


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_a_service_that_drips_for_ever_holds_nobody_up_for_ever(
    upstream: FaultyUpstream, stored: Stored, tmp_path: Path, way: str
) -> None:
    """A byte comes long before each time limit of a read ends."""
    keys, chunks = stored
    upstream.choose = lambda request: Fault.DRIPPING if start_of_range(request) is not None else None
    buffer = np.zeros(chunks.nbytes, np.uint8)
    hasty = UpstreamSettings(upstream.url, *OWNER, read_timeout_s=1.0, **WAYS[way])
    with LocalStack(tmp_path / "cold", upstream=hasty) as cold, cold.client("chunks", "http") as client:
        with pytest.raises(ObjectCacheError):
            client.fetch(keys, LAYOUT, buffer, delivery=Delivery.CHUNK_MAJOR).wait(60)
        assert eventually(lambda: cold.storage.upstream.fetches.running_count == 0)
    upstream.release()
    patient = UpstreamSettings(upstream.url, *OWNER, **WAYS[way])
    with LocalStack(tmp_path / "cold", upstream=patient) as cold, cold.client("chunks", "http") as client:
        client.fetch(keys, LAYOUT, buffer, delivery=Delivery.CHUNK_MAJOR).wait(60)
        assert np.array_equal(buffer, chunks.ravel())


def asked_ranges(upstream: FaultyUpstream) -> list[tuple[str, str]]:
    return [(path, asked) for method, path, asked in upstream.seen if method == "GET" and asked]


@pytest.mark.slow
def test_the_deadline_of_the_first_asker_does_not_end_the_fetch_for_another_one(
    upstream: FaultyUpstream, stored: Stored, tmp_path: Path
) -> None:
    keys, chunks = stored
    upstream.choose = lambda request: Fault.STALLED if start_of_range(request) is not None else None
    settings = UpstreamSettings(upstream.url, *OWNER, read_timeout_s=60.0)
    with (
        LocalStack(tmp_path / "cold", upstream=settings) as cold,
        cold.client("chunks", "http", fetch_timeout_s=3.0) as hasty,
        cold.client("chunks", "http") as patient,
    ):
        first, second = (np.zeros(chunks.nbytes, np.uint8) for _ in range(2))
        given_up = hasty.fetch(keys, LAYOUT, first, delivery=Delivery.CHUNK_MAJOR)
        assert eventually(lambda: len(asked_ranges(upstream)) == N)
        waiting = patient.fetch(keys, LAYOUT, second, delivery=Delivery.CHUNK_MAJOR)
        with pytest.raises(ObjectCacheError):
            given_up.wait(30)
        assert cold.storage.upstream.fetches.running_count == N
        upstream.release()
        waiting.wait(60)
        assert np.array_equal(second, chunks.ravel())
    assert len(asked_ranges(upstream)) == N


@pytest.mark.slow
def test_slow_reading_of_the_first_asker_does_not_slow_the_fetch_for_another_one(
    upstream: FaultyUpstream, home: LocalStack, tmp_path: Path
) -> None:
    """It takes a few bytes of an answer that no socket holds, and stops."""
    layout = ChunkLayout(8, 16, MIB)
    keys, chunks = make_chunks(6, layout, seed=7)
    with home.client("chunks", "http") as direct:
        direct.put_chunks(keys, list(chunks))
    wanted = Descriptor(tuple(keys), layout.num_layers, layout.chunk_tokens, layout.per_layer_chunk_bytes)
    settings = UpstreamSettings(upstream.url, *OWNER, read_timeout_s=60.0)
    with (
        LocalStack(tmp_path / "cold", upstream=settings) as cold,
        contextlib.closing(socket.socket()) as slow,
        cold.client("chunks", "http") as client,
    ):
        place = urlsplit(cold.url)
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.connect((place.hostname, place.port))
        slow.sendall(descriptor_request(cold.url, encode_json(wanted)))
        assert slow.recv(100).startswith(b"HTTP/1.1 200")
        buffer = np.zeros(chunks.nbytes, np.uint8)
        client.fetch(keys, layout, buffer, delivery=Delivery.CHUNK_MAJOR).wait(60)
        assert np.array_equal(buffer, chunks.ravel())
        assert eventually(lambda: cold.storage.upstream.fetches.running_count == 0)
        assert cold.storage.requests.active_count == 1, "the slow one is still at it"
        assert cold.storage.upstream.fetches.fetched_bytes == chunks.nbytes
    asked = asked_ranges(upstream)
    assert len(asked) == len(set(asked))


@pytest.mark.slow
def test_a_service_that_is_gone_is_left_alone_until_it_is_back(
    upstream: FaultyUpstream, stored: Stored, home: LocalStack, cold: LocalStack
) -> None:
    """Requests do not go out for each caller, cached chunks are served all the while, and service comes back by
    itself.
    """
    keys, chunks = stored
    others, _ = make_chunks(60, LAYOUT, seed=11)
    buffer = np.zeros(chunks.nbytes, np.uint8)
    with cold.client("chunks", "http") as client:
        client.fetch(keys, LAYOUT, buffer, delivery=Delivery.CHUNK_MAJOR).wait(30)
        assert eventually(lambda: cold.storage.upstream.fetches.running_count == 0)
        upstream.choose = lambda _: Fault.RESET
        for key in others[:10]:
            assert request(cold.url, "GET", f"/chunks/{key}").status == 503
        before = len(upstream.seen)
        for key in others[10:]:
            reply = request(cold.url, "GET", f"/chunks/{key}")
            assert (reply.status, reply.code) == (503, "SlowDown")
            assert int(reply.headers["retry-after"]) >= 1
        assert len(upstream.seen) - before < 25, "without a breaker, three for each key"
        buffer[:] = 0
        assert client.lookup(keys) == N
        client.fetch(keys, LAYOUT, buffer, delivery=Delivery.CHUNK_MAJOR).wait(30)
        assert np.array_equal(buffer, chunks.ravel())
        assert request(cold.url, "GET", f"/chunks/{keys[0]}").body == chunks[0].tobytes()
        upstream.release()
        assert request(home.url, "PUT", "/chunks/back", body=b"again").status == 200
        assert eventually(lambda: request(cold.url, "GET", "/chunks/back").body == b"again")
        seen = len(upstream.seen)
        assert request(cold.url, "GET", "/chunks/back").status == 200
        assert len(upstream.seen) > seen


def test_a_change_whose_answer_is_lost_is_not_made_again(
    home: LocalStack, upstream: FaultyUpstream, cold: LocalStack
) -> None:
    """Neither by us nor by the HTTP library: its own condition would refuse it, and the client would believe that."""
    s3, there = s3_client(cold.url), s3_client(home.url)
    s3.put_object(Bucket="chunks", Key="source", Body=b"data")  # its connection is kept alive
    upstream.seen.clear()
    upstream.choose = lambda request: Fault.LOST if request.method == "PUT" else None
    with pytest.raises(ClientError) as lost:
        s3.copy_object(Bucket="chunks", Key="copied once", CopySource="chunks/source", IfNoneMatch="*")
    assert lost.value.response["Error"]["Code"] == "SlowDown"
    assert [method for method, path, _ in upstream.seen if path.endswith("once")] == ["PUT"]
    assert there.get_object(Bucket="chunks", Key="copied once")["Body"].read() == b"data"


@pytest.mark.slow
@pytest.mark.parametrize("how", ["put", "copy", "upload"])
def test_a_write_is_answered_with_its_own_object_whatever_others_do_next(
    home: LocalStack, upstream: FaultyUpstream, cold: LocalStack, how: str
) -> None:
    """Another client deletes it at once, or puts another one: before we could ask upstream what the key shows."""
    s3, there = s3_client(cold.url), s3_client(home.url)
    there.put_object(Bucket="chunks", Key="source", Body=b"data")

    def written() -> str:
        at = {"Bucket": "chunks", "Key": f"written-{how}"}
        if how == "put":
            return str(s3.put_object(**at, Body=b"data")["ETag"])
        if how == "copy":
            return str(s3.copy_object(**at, CopySource="chunks/source")["CopyObjectResult"]["ETag"])
        upload_id = s3.create_multipart_upload(**at)["UploadId"]
        part = s3.upload_part(**at, UploadId=upload_id, PartNumber=1, Body=b"data")
        parts = {"Parts": [{"PartNumber": 1, "ETag": part["ETag"]}]}
        return str(s3.complete_multipart_upload(**at, UploadId=upload_id, MultipartUpload=parts)["ETag"])

    def interfered(request: web.Request) -> None:
        if request.method == "HEAD" and "written" in request.path:
            interfere(Bucket="chunks", Key=f"written-{how}")

    wanted = written()
    for interfere in (there.delete_object, lambda **at: there.put_object(**at, Body=b"another")):  # noqa: B007
        upstream.choose = interfered  # type: ignore[assignment]
        assert written() == wanted
        upstream.choose = lambda _: None


@pytest.mark.slow
@pytest.mark.parametrize("fault", [Fault.FAILED, Fault.MOVED, Fault.FULL, Fault.MANY_HEADERS, Fault.ODD_ETAG])
def test_a_service_that_fails_at_one_object_fails_for_no_other(
    upstream: FaultyUpstream, home: LocalStack, cold: LocalStack, fault: Fault
) -> None:
    """A tenant may have made the object, or have it elsewhere: other tenants must not wait for a pause then."""
    for key in ("of-one", "of-another"):
        assert request(home.url, "PUT", f"/chunks/{key}", body=b"bytes").status == 200
    upstream.choose = lambda asked: fault if asked.path.endswith("of-one") else None
    for _ in range(6):
        assert request(cold.url, "HEAD", "/chunks/of-one").status >= 300
    assert request(cold.url, "GET", "/chunks/of-another").body == b"bytes"


@pytest.mark.slow
def test_a_body_that_never_ends_keeps_nobody_from_a_service_that_is_back(
    upstream: FaultyUpstream, home: LocalStack, cold: LocalStack
) -> None:
    """After a pause one request tries whether the service is well, and a client decides how long its body takes."""
    assert request(home.url, "PUT", "/chunks/there", body=b"bytes").status == 200
    upstream.choose = lambda _: Fault.RESET
    said = [request(cold.url, "GET", "/chunks/there").body for _ in range(10)]
    assert b"is asked again in a while" in said[-1]
    upstream.release()
    host = urlsplit(cold.url)
    heads = signed(cold.url, "PUT", "/chunks/slow", b"", {"x-amz-content-sha256": "UNSIGNED-PAYLOAD"}, OWNER)
    head = "".join(f"{name}: {value}\r\n" for name, value in heads.items())
    with contextlib.ExitStack() as stack:
        for _ in range(20):  # whichever of them comes first after the pause
            slow = stack.enter_context(socket.create_connection((host.hostname or "", host.port or 0)))
            slow.sendall(
                f"PUT /chunks/slow HTTP/1.1\r\nHost: {host.netloc}\r\n{head}Content-Length: 1000\r\n\r\nab".encode()
            )
        assert eventually(lambda: request(cold.url, "GET", "/chunks/there").body == b"bytes", 20)


def test_an_etag_that_no_answer_can_have_is_not_kept(upstream: FaultyUpstream, cold: LocalStack) -> None:
    """It was written into the index, and the chunk could not be read any more."""
    key = "ab" * 32
    upstream.choose = lambda asked: Fault.ODD_ETAG if asked.method == "PUT" else None
    assert request(cold.url, "PUT", f"/chunks/{key}", body=b"bytes").status == 500
    upstream.release()
    assert request(cold.url, "GET", f"/chunks/{key}").status in (200, 404)
    assert request(cold.url, "PUT", f"/chunks/{key}", body=b"bytes").status == 200
    assert request(cold.url, "GET", f"/chunks/{key}").body == b"bytes"


def test_slow_requests_of_a_caller_keep_no_turn_of_fetches(
    home: LocalStack, upstream: FaultyUpstream, tmp_path: Path
) -> None:
    """A fetch that waited in its turn for a place among its caller's requests kept the fetches of all others waiting.
    It comes straight into its file here, and its tags are asked for.
    """
    keys, chunks = make_chunks(1, LAYOUT, seed=44)
    with home.client("chunks", "http") as direct:
        direct.put_chunks(keys, list(chunks))
    tag = {"TagSet": [{"Key": "objectcache-pin", "Value": ""}]}
    s3_client(home.url).put_object_tagging(Bucket="chunks", Key=keys[0], Tagging=tag)
    upstream.choose = lambda asked: Fault.HANGING if "/hang" in asked.path else None
    settings = UpstreamSettings(upstream.url, *OWNER, connections_max=16, fetches_max=4, uploads_max=1, landing_bytes=0)
    asked = [("GET", f"/chunks/hang{number}") for number in range(6)]
    asked += [("HEAD", f"/chunks/hang{number}") for number in range(2)]
    with (
        LocalStack(tmp_path / "cold", upstream=settings) as cold,
        cold.client("chunks", "http") as client,
        ThreadPoolExecutor(len(asked)) as threads,
    ):
        hanging = [threads.submit(request, cold.url, method, target) for method, target in asked]
        assert eventually(lambda: sum("/hang" in path for _, path, _ in upstream.seen) == len(asked))
        buffer = client.allocate_buffer(chunks.nbytes)
        client.fetch(keys, LAYOUT, buffer, delivery=Delivery.CHUNK_MAJOR).wait(10)
        assert np.array_equal(buffer, chunks.ravel())
        assert not any(each.done() for each in hanging)
        upstream.release()
