"""Chunks that are written back: answered when they are durable here, and uploaded behind."""

from __future__ import annotations

import asyncio
import errno
import http.client
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractContextManager, suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from botocore.exceptions import ClientError

from descriptors.conditions import WriteCondition
from descriptors.descriptor import Delivery
from descriptors.errors import CallerError, ErrorCode, ObjectCacheError
from descriptors.layout import ChunkLayout
from descriptors.objects import Attributes, PutRequest
from descriptors.units import KIB, MIB
from storage_server.home import upstream as home_module
from storage_server.home import write_back
from storage_server.settings import UpstreamSettings, Write
from tests.support.chunks import BytesBody, make_chunks
from tests.support.faulty_disk import FaultyDisk
from tests.support.faulty_upstream import Fault, FaultyUpstream, start_of_range
from tests.support.requests import OWNER, request, s3_client
from tests.support.servers import LocalStack
from tests.support.waiting import eventually, until

LAYOUT = ChunkLayout(4, 16, 50_000)


def key_of(name: str) -> str:
    return sha256(name.encode()).hexdigest()


def content(name: str, nbytes: int = 200_000) -> bytes:
    return (sha256(name.encode()).digest() * (nbytes // 32 + 1))[:nbytes]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStack]:
    """The service upstream. Each test has a bucket of its own."""
    with LocalStack(tmp_path_factory.mktemp("home")) as running:
        yield running


@pytest.fixture
def upstream(home: LocalStack) -> Iterator[FaultyUpstream]:
    """The way from us to the service."""
    with FaultyUpstream(home.url) as running:
        yield running


@pytest.fixture
def bucket(home: LocalStack, request: pytest.FixtureRequest) -> str:
    name = "test-" + key_of(request.node.name)[:20]
    home.call(home.storage.objects.create_bucket(OWNER[0], name))
    return name


class Front:
    """Our server in front, which can be stopped and started again over its directory."""

    def __init__(self, directory: Path, upstream: FaultyUpstream) -> None:
        self._directory = directory
        self._settings = UpstreamSettings(
            upstream.url, *OWNER, connect_timeout_s=30.0, read_timeout_s=30.0, write=Write.BACK
        )

    def started(self, **settings: Any) -> AbstractContextManager[LocalStack]:
        chosen = {"dram_bytes": 0, "shm": False, **settings}
        return LocalStack(self._directory, upstream=self._settings, **chosen)


@pytest.fixture
def front(tmp_path: Path, upstream: FaultyUpstream) -> Front:
    return Front(tmp_path / "front", upstream)


def put(s3: Any, bucket: str, name: str, **options: Any) -> str:
    answer = s3.put_object(Bucket=bucket, Key=key_of(name), Body=content(name), **options)
    return str(answer["ETag"])


def get(s3: Any, bucket: str, name: str) -> bytes:
    return bytes(s3.get_object(Bucket=bucket, Key=key_of(name))["Body"].read())


def keys(s3: Any, bucket: str, **options: Any) -> list[str]:
    return [each["Key"] for each in s3.list_objects_v2(Bucket=bucket, **options).get("Contents", [])]


def refusal(error: pytest.ExceptionInfo[ClientError]) -> str:
    return str(error.value.response["Error"]["Code"])


def dirty(running: LocalStack) -> Any:
    return running.storage.upstream.write_back.status


def is_clean(running: LocalStack) -> bool:
    return bool(dirty(running).dirty_chunks == 0)


def test_a_dirty_chunk_is_answered_like_others_and_goes_upstream(home: LocalStack, front: Front, bucket: str) -> None:
    """Read, headed, listed, fetched by descriptor, before upstream has any of it."""
    names, chunks = make_chunks(3, LAYOUT)
    with front.started() as running:
        s3, there = s3_client(running.url, OWNER), s3_client(home.url, OWNER)
        running.storage.upstream.write_back.pause()
        with running.client(bucket, "http") as client:
            client.put_chunks(names, list(chunks))
            etag = put(s3, bucket, "a", Metadata={"model": "m"}, Tagging="t=1", ContentType="application/x-kv")
            assert dirty(running).dirty_chunks == 4
            assert keys(there, bucket) == []
            assert sorted(keys(s3, bucket)) == sorted([*names, key_of("a")])
            assert get(s3, bucket, "a") == content("a")
            head = s3.head_object(Bucket=bucket, Key=key_of("a"))
            assert (head["ETag"], head["Metadata"], head["ContentType"]) == (etag, {"model": "m"}, "application/x-kv")
            assert client.lookup(names) == 3
            buffer = client.allocate_buffer(chunks.nbytes)
            client.fetch(names, LAYOUT, buffer, delivery=Delivery.LAYER_MAJOR).wait(30)
            wanted = chunks.reshape(3, LAYOUT.num_layers, -1).transpose(1, 0, 2)
            assert np.array_equal(buffer, wanted.ravel())
        running.storage.upstream.write_back.resume()
        assert eventually(lambda: is_clean(running))
        assert sorted(keys(there, bucket)) == sorted([*names, key_of("a")])
        head = there.head_object(Bucket=bucket, Key=key_of("a"))
        assert (head["ETag"], head["Metadata"]["model"]) == (etag, "m")
        assert head["ContentType"] == "application/x-kv"
        assert "objectcache-proof" in head["Metadata"]
        assert there.get_object_tagging(Bucket=bucket, Key=key_of("a"))["TagSet"] == [{"Key": "t", "Value": "1"}]
        assert get(there, bucket, "a") == content("a")


@pytest.mark.slow
def test_a_copy_takes_the_time_that_its_object_has_upstream(home: LocalStack, front: Front, bucket: str) -> None:
    """Otherwise its time would depend on who answers, us or upstream, and a condition on it, too."""
    with front.started() as running:
        s3, there = s3_client(running.url, OWNER), s3_client(home.url, OWNER)
        running.storage.upstream.write_back.pause()
        put(s3, bucket, "a")
        put_at = s3.head_object(Bucket=bucket, Key=key_of("a"))["LastModified"]
        assert eventually(lambda: time.time() >= put_at.timestamp() + 1)  # S3's times are whole seconds
        running.storage.upstream.write_back.resume()
        assert eventually(lambda: is_clean(running))
        stored = running.storage.upstream.cache.objects.stored(bucket, key_of("a"))
        sent_at = there.head_object(Bucket=bucket, Key=key_of("a"))["LastModified"]
        assert stored.info.modified_at == sent_at.timestamp() > put_at.timestamp()


@pytest.mark.slow
def test_what_is_dirty_survives_a_restart_without_upstream(
    home: LocalStack, upstream: FaultyUpstream, front: Front, bucket: str
) -> None:
    with front.started() as running:
        s3 = s3_client(running.url, OWNER)
        put(s3, bucket, "known-bucket")
        assert eventually(lambda: is_clean(running))
        upstream.choose = lambda request: Fault.RESET
        for name in ("a", "b"):
            put(s3, bucket, name)
    with front.started() as running:
        assert dirty(running).dirty_chunks == 2
        s3 = s3_client(running.url, OWNER)
        assert get(s3, bucket, "b") == content("b")
        put(s3, bucket, "new")
        assert dirty(running).dirty_chunks == 3
        with pytest.raises(ClientError, match="SlowDown"):
            put(s3, "unknown-bucket", "new")
        upstream.release()
        assert eventually(lambda: is_clean(running))
    assert get(s3_client(home.url, OWNER), bucket, "a") == content("a")
    assert get(s3_client(home.url, OWNER), bucket, "new") == content("new")


def test_an_overwrite_and_a_delete_are_the_last_word(
    home: LocalStack, upstream: FaultyUpstream, front: Front, bucket: str
) -> None:
    """Also where the upload of what they replace is under way, and ends behind them."""
    there = s3_client(home.url, OWNER)
    with front.started() as running:
        s3 = s3_client(running.url, OWNER)
        upstream.choose = lambda request: Fault.HANGING if request.method == "PUT" else None
        put(s3, bucket, "gone")
        put(s3, bucket, "again")
        assert eventually(lambda: sum(method == "PUT" for method, *_ in upstream.seen) == 2)
        s3.put_object(Bucket=bucket, Key=key_of("again"), Body=content("newer"))
        upstream.release()
        s3.delete_object(Bucket=bucket, Key=key_of("gone"))
        assert eventually(lambda: is_clean(running))
        assert get(s3, bucket, "again") == content("newer")
        for each in (s3, there):
            assert keys(each, bucket) == [key_of("again")]
    assert get(there, bucket, "again") == content("newer")


def test_what_needs_a_chunk_upstream_brings_it_there_first(
    home: LocalStack, upstream: FaultyUpstream, front: Front, bucket: str
) -> None:
    """Conditions, copies and tags are upstream's to judge."""
    there = s3_client(home.url, OWNER)
    with front.started() as running:
        running.storage.upstream.write_back.pause()
        s3 = s3_client(running.url, OWNER)
        for name in ("a", "b", "c"):
            put(s3, bucket, name)
        with pytest.raises(ClientError) as refused:
            s3.put_object(Bucket=bucket, Key=key_of("a"), Body=b"other", IfNoneMatch="*")
        assert refusal(refused) == "PreconditionFailed"
        s3.copy_object(Bucket=bucket, Key="copy", CopySource={"Bucket": bucket, "Key": key_of("b")})
        s3.put_object_tagging(Bucket=bucket, Key=key_of("c"), Tagging={"TagSet": [{"Key": "t", "Value": "2"}]})
        assert is_clean(running)
        assert sorted(keys(there, bucket)) == sorted([key_of("a"), key_of("b"), key_of("c"), "copy"])
        assert there.get_object(Bucket=bucket, Key="copy")["Body"].read() == content("b")
        for each in (s3, there):
            assert each.get_object_tagging(Bucket=bucket, Key=key_of("c"))["TagSet"] == [{"Key": "t", "Value": "2"}]


def test_a_bucket_with_dirty_chunks_is_not_empty_and_one_that_is_not_there_is_refused(
    home: LocalStack, front: Front, bucket: str
) -> None:
    with front.started() as running:
        running.storage.upstream.write_back.pause()
        s3 = s3_client(running.url, OWNER)
        put(s3, bucket, "a")
        for call, code in (
            (lambda: s3.delete_bucket(Bucket=bucket), "BucketNotEmpty"),
            (lambda: put(s3, "nowhere", "a"), "NoSuchBucket"),
        ):
            with pytest.raises(ClientError) as refused:
                call()
            assert refusal(refused) == code
        assert dirty(running).dirty_chunks == 1


def test_a_chunk_that_upstream_refuses_stays_and_status_says_so(
    home: LocalStack, front: Front, bucket: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(write_back, "REFUSED_AGAIN_S", 0.3)
    with front.started() as running:
        s3, there = s3_client(running.url, OWNER), s3_client(home.url, OWNER)
        put(s3, bucket, "known-bucket")
        assert eventually(lambda: is_clean(running))
        there.delete_object(Bucket=bucket, Key=key_of("known-bucket"))
        there.delete_bucket(Bucket=bucket)
        put(s3, bucket, "a")
        assert eventually(lambda: dirty(running).refused_chunks == 1)
        assert get(s3, bucket, "a") == content("a")
        assert f"{bucket}/{key_of('a')} stays here alone: NoSuchBucket" in caplog.text
        metrics = request(running.url, "GET", "/_objectcache/metrics")
        assert b"objectcache_upstream_refused_chunks 1" in metrics.body
        there.create_bucket(Bucket=bucket)
        assert eventually(lambda: is_clean(running))
        assert get(there, bucket, "a") == content("a")


@pytest.mark.slow
def test_what_could_never_go_upstream_is_refused_and_not_kept(
    upstream: FaultyUpstream, front: Front, bucket: str, tmp_path: Path
) -> None:
    """It was answered as stored, stayed here alone for ever, and could not be deleted."""
    keys_of = [f"a/../{key_of('up')}", f"./{key_of('here')}", f"a%3F/../{key_of('asked')}"]
    with front.started() as running:
        replies = [request(running.url, "PUT", f"/{bucket}/{key}", body=b"bytes") for key in keys_of]
        assert [(reply.status, reply.code) for reply in replies] == [(400, "InvalidArgument")] * 3
        assert dirty(running).dirty_chunks == 0
    shared = tmp_path / "shared"
    shared.mkdir()
    settings = UpstreamSettings(f"file://{shared}", write=Write.BACK)
    with LocalStack(tmp_path / "cache", upstream=settings, dram_bytes=0, shm=False) as running:
        s3_client(running.url, OWNER).create_bucket(Bucket=bucket)
        long = {f"x-amz-meta-{'n' * 300}": "v"}
        for key, headers in ((key_of("long"), long), (f"a%00/{key_of('nul')}", {})):
            reply = request(running.url, "PUT", f"/{bucket}/{key}", body=b"bytes", headers=headers)
            assert (reply.status, reply.code) == (400, "InvalidArgument")
        assert dirty(running).dirty_chunks == 0


def test_dirty_chunks_are_not_evicted_and_leave_room_for_others(
    home: LocalStack, upstream: FaultyUpstream, front: Front, bucket: str
) -> None:
    """Past their part of the bound, chunks are written through."""
    there = s3_client(home.url, OWNER)
    with front.started(disk_bytes=64 * MIB) as running:
        running.storage.upstream.write_back.pause()
        s3 = s3_client(running.url, OWNER)
        limit_bytes = running.storage.store.space.extent_bytes_max
        names = [f"chunk-{number}" for number in range(120)]
        for name in names:
            s3.put_object(Bucket=bucket, Key=key_of(name), Body=content(name, 512 * KIB))
        status = dirty(running)
        assert 0 < status.dirty_bytes <= write_back.DIRTY_FRACTION * limit_bytes
        assert len(keys(there, bucket)) == len(names) - status.dirty_chunks
        for name in names:
            assert get(s3, bucket, name) == content(name, 512 * KIB)
        assert dirty(running).dirty_chunks == status.dirty_chunks
        assert running.storage.store.evictor.evictions.evicted_count > 0


def test_a_damaged_dirty_chunk_is_never_uploaded_and_lookups_stop_before_it(
    home: LocalStack, front: Front, bucket: str
) -> None:
    names, chunks = make_chunks(2, LAYOUT)
    with front.started() as running:
        held = running.storage.upstream.write_back
        held.pause()
        with running.client(bucket, "http") as client:
            client.put_chunks(names, list(chunks))
            running.damage(bucket, names[1], 100_000)
            held.resume()
            assert eventually(lambda: dirty(running).refused_chunks == 1)
            assert eventually(lambda: dirty(running).dirty_chunks == 1)
            assert keys(s3_client(home.url, OWNER), bucket) == [names[0]]
            assert client.lookup(names) == 1
            client.put_chunks(names[1:], list(chunks[1:]))
            assert eventually(lambda: is_clean(running))
            assert client.lookup(names) == 2


def test_a_damaged_dirty_chunk_is_not_answered_with_an_older_version(
    home: LocalStack, front: Front, bucket: str
) -> None:
    """The newer version was acknowledged."""
    [name], [old, new] = make_chunks(1, LAYOUT)[0], make_chunks(2, LAYOUT)[1]
    with front.started() as running, running.client(bucket, "http") as client:
        s3 = s3_client(running.url, OWNER)
        client.put_chunks([name], [old])
        assert eventually(lambda: is_clean(running))
        running.storage.upstream.write_back.pause()
        client.put_chunks([name], [new])
        running.damage(bucket, name, 100_000)
        with suppress(http.client.IncompleteRead):  # the first read finds the damage
            assert request(running.url, "GET", f"/{bucket}/{name}").status == 500
        assert request(running.url, "GET", f"/{bucket}/{name}").status == 500
        with pytest.raises(ClientError, match="500"):
            s3.head_object(Bucket=bucket, Key=name)
        assert client.lookup([name]) == 0
        buffer = client.allocate_buffer(new.nbytes)
        with pytest.raises(ObjectCacheError):
            client.fetch([name], LAYOUT, buffer).wait(30)
        client.put_chunks([name], [new])
        assert request(running.url, "GET", f"/{bucket}/{name}").body == new.tobytes()


FLAG = {"x-amz-objectcache-chunk": "true"}


class SlowBody(BytesBody):
    """A body that stops in its middle until `rest` is set."""

    def __init__(self, data: bytes) -> None:
        super().__init__(data, 2)
        self.has_begun, self.rest = asyncio.Event(), asyncio.Event()

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for piece in super().__aiter__():
            yield piece
            self.has_begun.set()
            await self.rest.wait()


def flagged(bucket: str, nbytes: int) -> PutRequest:
    return PutRequest(bucket, "name", nbytes, Attributes(FLAG))


def test_a_put_that_nothing_must_precede_sees_a_chunk_that_came_while_its_body_did(
    home: LocalStack, front: Front, bucket: str
) -> None:
    """The chunk was acknowledged, and would be lost."""
    only = WriteCondition(if_absent=True)
    with front.started() as running:
        objects = running.storage.objects
        running.storage.upstream.write_back.pause()

        async def both() -> None:
            body = SlowBody(b"plain " * 1000)
            putting = asyncio.ensure_future(
                objects.put_object(OWNER[0], PutRequest(bucket, "name", 6000, condition=only), body)
            )
            await body.has_begun.wait()
            await objects.put_object(OWNER[0], flagged(bucket, 5), BytesBody(b"chunk"))
            body.rest.set()
            with pytest.raises(CallerError) as refused:
                await putting
            assert refused.value.code is ErrorCode.PRECONDITION_FAILED

        running.call(both())
        assert s3_client(running.url, OWNER).get_object(Bucket=bucket, Key="name")["Body"].read() == b"chunk"
        assert s3_client(home.url, OWNER).get_object(Bucket=bucket, Key="name")["Body"].read() == b"chunk"


def test_a_plain_put_waits_for_the_upload_of_a_chunk_of_its_key(
    home: LocalStack, upstream: FaultyUpstream, front: Front, bucket: str
) -> None:
    """An upload that comes behind it would be shown for ever."""
    with front.started() as running:
        objects = running.storage.objects
        has_begun = threading.Event()

        def choose(at: web.Request) -> Fault | None:
            if "x-amz-meta-objectcache-chunk" not in at.headers:
                return None
            has_begun.set()
            return Fault.HANGING

        upstream.choose = choose

        async def both() -> None:
            body = SlowBody(b"plain " * 1000)
            putting = asyncio.ensure_future(objects.put_object(OWNER[0], PutRequest(bucket, "name", 6000), body))
            await body.has_begun.wait()
            await objects.put_object(OWNER[0], flagged(bucket, 5), BytesBody(b"chunk"))
            await until(has_begun.is_set)
            body.rest.set()
            assert (await asyncio.wait([putting], timeout=0.2))[1], "it was answered before the chunk was there"
            upstream.release()
            await putting

        running.call(both())
        assert eventually(lambda: is_clean(running))
        assert s3_client(home.url, OWNER).get_object(Bucket=bucket, Key="name")["Body"].read()[:6] == b"plain "


def test_a_sender_that_leaves_a_slow_put_leaves_its_key_free(home: LocalStack, front: Front, bucket: str) -> None:
    with front.started() as running:
        objects = running.storage.objects

        async def both() -> None:
            body = SlowBody(b"plain " * 1000)
            putting = asyncio.ensure_future(objects.put_object(OWNER[0], PutRequest(bucket, "name", 6000), body))
            await body.has_begun.wait()
            await objects.put_object(OWNER[0], PutRequest(bucket, "name", 5), BytesBody(b"other"))
            putting.cancel()
            await asyncio.wait([putting])
            await objects.delete_object(OWNER[0], bucket, "name")

        running.call(both())
        assert keys(s3_client(home.url, OWNER), bucket) == []


@pytest.mark.slow
def test_a_put_that_is_cancelled_is_uploaded_or_was_never_there(home: LocalStack, front: Front, bucket: str) -> None:
    """At whatever step its caller goes."""
    with front.started() as running:
        held = running.storage.upstream.write_back
        held.pause()

        names = [f"{attempt}-{turns}" for attempt in range(10) for turns in range(16)]

        async def cancelled_after(name: str, turns: int) -> None:
            request = PutRequest(bucket, key_of(name), 200_000)
            putting = asyncio.create_task(
                running.storage.objects.put_object(OWNER[0], request, BytesBody(content(name)))
            )
            if turns == 15:
                await asyncio.wait([putting])
            for _ in range(turns):
                await asyncio.sleep(0.0002)  # it goes on meanwhile: the moments to cancel it at are what is tried
            putting.cancel()
            await asyncio.wait([putting])

        for name in names:
            running.call(cancelled_after(name, int(name.partition("-")[2])))
        listed = set(keys(s3_client(running.url, OWNER), bucket))
        assert {key_of(name) for name in names if held.is_dirty(bucket, key_of(name))} == listed
        held.resume()
        assert eventually(lambda: is_clean(running))
        assert set(keys(s3_client(home.url, OWNER), bucket)) == listed
        assert 0 < len(listed) < len(names)


def test_a_fetch_of_what_was_there_before_does_not_outlive_an_overwrite(
    home: LocalStack, upstream: FaultyUpstream, front: Front, bucket: str
) -> None:
    """The overwrite is answered and uploaded while older bytes are on their way."""
    names, chunks = make_chunks(1, LAYOUT)
    newer = bytes(reversed(chunks[0].tobytes()))
    with home.client(bucket, "http") as direct:
        direct.put_chunks(names, list(chunks))
    with front.started() as running, running.client(bucket, "http") as client:
        upstream.choose = lambda request: Fault.STALLED if start_of_range(request) == 0 else None
        buffer = client.allocate_buffer(LAYOUT.chunk_bytes)
        fetch = client.fetch(names, LAYOUT, buffer)
        assert eventually(lambda: any(seen[2].startswith("bytes=0-") for seen in upstream.seen))
        s3 = s3_client(running.url, OWNER)
        s3.put_object(Bucket=bucket, Key=names[0], Body=newer)
        assert eventually(lambda: is_clean(running))
        upstream.release()
        with pytest.raises(ObjectCacheError):
            fetch.wait(30)
        assert s3.get_object(Bucket=bucket, Key=names[0])["Body"].read() == newer
        assert running.storage.upstream.fetches.running_count == 0


def test_many_puts_of_one_key_are_one_upload(upstream: FaultyUpstream, front: Front, bucket: str) -> None:
    with front.started() as running:
        held = running.storage.upstream.write_back
        held.pause()
        s3 = s3_client(running.url, OWNER)
        for _ in range(20):
            put(s3, bucket, "a")
        held.resume()
        assert eventually(lambda: is_clean(running))
        assert sum(method == "PUT" for method, *_ in upstream.seen) == 1


@pytest.mark.slow
def test_a_chunk_that_fails_again_and_again_holds_no_other_up(
    home: LocalStack, upstream: FaultyUpstream, front: Front, bucket: str
) -> None:
    bad = key_of("bad")
    upstream.choose = lambda request: Fault.FAILED if request.method == "PUT" and request.path.endswith(bad) else None
    with front.started() as running:
        s3 = s3_client(running.url, OWNER)
        for name in ("bad", *map(str, range(20))):
            put(s3, bucket, name)
        assert eventually(lambda: dirty(running).dirty_chunks == 1)
        assert len(keys(s3_client(home.url, OWNER), bucket)) == 20
        upstream.release()
        assert eventually(lambda: is_clean(running))


@pytest.mark.slow
@pytest.mark.slow
def test_a_bucket_that_the_service_is_too_busy_for_holds_no_other_one_up(
    home: LocalStack, upstream: FaultyUpstream, front: Front, bucket: str
) -> None:
    """The service may limit the rate of a bucket. Its dirty chunks wait alone."""
    other = bucket[::-1].replace("-", "0")
    home.call(home.storage.objects.create_bucket(OWNER[0], other))
    with front.started() as running:
        s3 = s3_client(running.url, OWNER)
        for name in (bucket, other):
            put(s3, name, "first")
        assert eventually(lambda: is_clean(running))
        upstream.choose = lambda asked: Fault.BUSY if asked.path.startswith(f"/{bucket}/") else None
        for number in range(40):
            put(s3, bucket, f"of-the-busy-bucket-{number}")
        put(s3, other, "of-another")
        assert eventually(lambda: key_of("of-another") in keys(s3_client(home.url, OWNER), other), 20)
        assert dirty(running).dirty_chunks == 40
        upstream.choose = lambda _: None
        assert eventually(lambda: is_clean(running))


def test_pages_show_what_is_here_and_what_is_there(home: LocalStack, front: Front, bucket: str) -> None:
    """With and without a delimiter, whatever the size of a page."""
    there = s3_client(home.url, OWNER)
    with front.started() as running:
        running.storage.upstream.write_back.pause()
        s3 = s3_client(running.url, OWNER)
        wanted = []
        for number in range(24):
            key = f"{'abc'[number % 3]}/{number % 2}/{key_of(str(number))}"
            (s3 if number % 4 else there).put_object(Bucket=bucket, Key=key, Body=b"x" * 100)
            wanted.append(key)
        wanted.sort()
        assert dirty(running).dirty_chunks == 18
        for size in (1, 2, 5, 7, 24, 1000):
            pages = s3.get_paginator("list_objects_v2").paginate(Bucket=bucket, PaginationConfig={"PageSize": size})
            assert [each["Key"] for page in pages for each in page["Contents"]] == wanted
            for prefix, groups in (("", ["a/", "b/", "c/"]), ("a/", ["a/0/", "a/1/"])):
                pages = s3.get_paginator("list_objects_v2").paginate(
                    Bucket=bucket, Prefix=prefix, Delimiter="/", PaginationConfig={"PageSize": size}
                )
                assert [each["Prefix"] for page in pages for each in page.get("CommonPrefixes", [])] == groups


@pytest.mark.parametrize("write", list(Write), ids=lambda write: write.value)
def test_a_full_disk_lets_writes_pass(
    home: LocalStack, bucket: str, tmp_path: Path, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The body that met it is refused; those that follow go upstream without a copy, and reads go on."""
    disk = FaultyDisk()
    settings = UpstreamSettings(home.url, *OWNER, write=write)
    with LocalStack(tmp_path / "front", disk=disk, upstream=settings, dram_bytes=0, shm=False) as running:
        s3, there = s3_client(running.url, OWNER), s3_client(home.url, OWNER)
        put(s3, bucket, "before")
        assert eventually(lambda: is_clean(running))
        disk.fail["write"] = errno.ENOSPC
        monkeypatch.setattr(home_module, "FULL_S", 600.0)
        with pytest.raises(ClientError) as refused:
            put(s3, bucket, "met")
        assert refusal(refused) == "InsufficientStorage"
        for name in ("after", "later"):
            put(s3, bucket, name)
            assert get(there, bucket, name) == get(s3, bucket, name) == content(name)
        assert get(s3, bucket, "before") == content("before")
        assert is_clean(running)
        disk.fail.clear()
        monkeypatch.setattr(home_module, "FULL_S", 0.0)

        def is_kept() -> bool:
            put(s3, bucket, "again")
            return running.storage.upstream.copy_of(bucket, key_of("again")) is not None

        assert eventually(is_kept)


def test_each_key_of_a_delete_has_its_own_outcome_in_the_words_of_upstream(
    upstream: FaultyUpstream, front: Front, bucket: str
) -> None:
    """What upstream keeps is not lost here, where it may be the only copy."""
    with front.started() as running:
        s3 = s3_client(running.url, OWNER)
        running.storage.upstream.write_back.pause()
        kept, gone = f"kept/{key_of('kept')}", key_of("gone")
        for key in (kept, gone):
            s3.put_object(Bucket=bucket, Key=key, Body=content(key))
        upstream.choose = lambda request: Fault.KEPT_KEYS if "delete" in request.query_string else None
        named = {"Objects": [{"Key": kept}, {"Key": gone}, {"Key": "kept/plain"}]}
        answer = s3.delete_objects(Bucket=bucket, Delete=named)
        assert [each["Key"] for each in answer["Deleted"]] == [gone]
        told = ("ObjectLocked", "until the audit is over")
        assert [(each["Key"], each["Code"], each["Message"]) for each in answer["Errors"]] == [
            (kept, *told),
            ("kept/plain", *told),
        ]
        assert s3.get_object(Bucket=bucket, Key=kept)["Body"].read() == content(kept)
        assert dirty(running).dirty_chunks == 1
        upstream.release()
        running.storage.upstream.write_back.resume()
        assert eventually(lambda: is_clean(running))
        assert keys(s3, bucket) == [kept]


def test_conditional_deletes_that_were_carried_out_are_told_where_upstream_fails_then(
    upstream: FaultyUpstream, front: Front, bucket: str
) -> None:
    with front.started() as running:
        s3 = s3_client(running.url, OWNER)
        etag = s3.put_object(Bucket=bucket, Key="first", Body=b"x")["ETag"]
        upstream.choose = lambda request: Fault.FAILED if "delete" in request.query_string else None
        named = {"Objects": [{"Key": "first", "ETag": etag}, {"Key": "second"}]}
        answer = s3.delete_objects(Bucket=bucket, Delete=named)
        assert [each["Key"] for each in answer["Deleted"]] == ["first"]
        assert [(each["Key"], each["Code"]) for each in answer["Errors"]] == [("second", "InternalError")]
        with pytest.raises(ClientError) as refused:  # nothing was carried out: the client may try again
            s3.delete_objects(Bucket=bucket, Delete={"Objects": [{"Key": "second"}]})
        assert refusal(refused) == "InternalError"
