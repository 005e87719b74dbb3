"""A service upstream whose answers are absurd: it is played with plain sockets."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import closing, suppress
from typing import Any

import pytest

from descriptors.errors import CallerError, ErrorCode, ServerError
from descriptors.objects import ListRequest, ReadRequest, UploadListRequest, UploadRef
from objectcache.adapters.caller import CALLER
from storage_server.home import buckets, objects
from storage_server.home.objects import UpstreamObjects
from storage_server.home.s3 import connection
from storage_server.home.s3.connection import Upstream
from storage_server.home.s3.sent_body import SentBody
from storage_server.home.uploads import UpstreamUploads
from storage_server.settings import UpstreamSettings
from tests.support.chunks import BytesBody

WELL = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"
BUSY = b"HTTP/1.1 503 x\r\nContent-Length: 0\r\n\r\n"
ENTRY = (
    b"<Contents><Key>k%d</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified><ETag>&quot;e&quot;</ETag>"
    b"<Size>1</Size></Contents>"
)

SCOPE = ("", "bucket")
"""The scope of a request that no caller's task makes."""
LIST = b"<ListBucketResult>%b</ListBucketResult>"


def document(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body


class Service:
    """Gives every request `answer`, or the next of `answers` while there are some, and counts the requests."""

    def __init__(self) -> None:
        self.answer = WELL
        self.answers: list[bytes] = []
        self.asked_count = 0
        self.hangs_up = False
        """Whether the connection ends where an answer is due."""
        self._bound = socket.create_server(("127.0.0.1", 0))
        self.settings = UpstreamSettings(f"http://127.0.0.1:{self._bound.getsockname()[1]}", "key", "secret")
        threading.Thread(target=self._serve, daemon=True).start()

    def close(self) -> None:
        with suppress(OSError):
            self._bound.shutdown(socket.SHUT_RDWR)
        self._bound.close()

    def _serve(self) -> None:
        with suppress(OSError):
            while True:
                connected, _ = self._bound.accept()
                threading.Thread(target=self._converse, args=(connected,), daemon=True).start()

    def _converse(self, connected: socket.socket) -> None:
        with connected, suppress(OSError):
            while b"\r\n\r\n" in connected.recv(65536):
                self.asked_count += 1
                if self.hangs_up:
                    return
                connected.sendall(self.answers.pop(0) if self.answers else self.answer)


@pytest.fixture
def service() -> Iterator[Service]:
    with closing(Service()) as running:
        yield running


@pytest.fixture
async def upstream(service: Service, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Upstream]:
    """A way to the service that is broken off after one failure, and tried again at once."""
    monkeypatch.setattr(connection, "FAILURES_MAX", 1)
    monkeypatch.setattr(connection, "PAUSE_S_MIN", 0.0)
    monkeypatch.setattr(connection, "PAUSE_S_MAX", 0.0)
    made = Upstream(service.settings)
    await made.start()
    yield made
    await made.close()


async def delete(upstream: Upstream, key: str = "k") -> None:
    await upstream.call("DeleteObject", Bucket="bucket", Key=key)


async def failed_once(service: Service, upstream: Upstream) -> None:
    """From now on one request at a time tries whether the service is well."""
    service.answer = BUSY
    with pytest.raises(ServerError):
        await delete(upstream)
    service.answer = WELL


@pytest.mark.parametrize("answer", [BUSY, BUSY.replace(b"503", b"429"), BUSY.replace(b"503", b"502"), b""])
async def test_what_a_caller_meets_in_a_bucket_stops_nobody_else(
    service: Service, monkeypatch: pytest.MonkeyPatch, answer: bytes
) -> None:
    """The service may limit the rate of a bucket, and a proxy fail at an object that a tenant has made."""
    monkeypatch.setattr(connection, "FAILURES_MAX", 1)
    made = Upstream(service.settings)
    await made.start()
    service.answer, service.hangs_up = answer, not answer
    CALLER.set("first")
    with pytest.raises(ServerError):
        await delete(made)
    service.answer, service.hangs_up = WELL, False
    with pytest.raises(ServerError, match="asked again in a while"):
        await delete(made)
    await made.call("DeleteObject", Bucket="other", Key="k")
    CALLER.set("second")
    await delete(made)
    assert service.asked_count == 3
    await made.close()


async def test_a_pause_of_many_digits_is_none(service: Service, upstream: Upstream) -> None:
    await failed_once(service, upstream)
    service.answer = b"HTTP/1.1 503 x\r\nRetry-After: " + b"9" * 5_000 + b"\r\nContent-Length: 0\r\n\r\n"
    with pytest.raises(ServerError) as refused:
        await delete(upstream)
    assert (refused.value.code, refused.value.retry_after_s) == (ErrorCode.SLOW_DOWN, None)
    service.answer = WELL
    await delete(upstream)


async def test_the_service_is_asked_again_whatever_a_try_ended_with(
    service: Service, upstream: Upstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    await failed_once(service, upstream)

    def broken(*_: Any) -> Exception:
        raise ArithmeticError("a fault of ours")

    service.answer = BUSY
    with monkeypatch.context() as patch:
        patch.setattr(connection, "refusal", broken)
        with pytest.raises(ArithmeticError):
            await delete(upstream)
    service.answer = WELL
    await delete(upstream)
    assert service.asked_count == 3


async def test_a_key_that_is_refused_here_tells_nothing_of_the_service(service: Service, upstream: Upstream) -> None:
    """The breaker stays as it was: one request at a time tries, also while that one is under way."""
    await failed_once(service, upstream)
    for refused in (
        lambda: delete(upstream, "a/../b"),
        lambda: upstream.call("DeleteObjects", Bucket="bucket", Delete={"Objects": [{"Key": "\0"}]}),
        lambda: upstream.open("HEAD", "bucket", "a/../b", {}).__aenter__(),
    ):
        with pytest.raises(CallerError):
            await refused()
    assert upstream.health.failure_count(SCOPE) == 1
    assert service.asked_count == 1
    await delete(upstream)
    assert upstream.health.failure_count(SCOPE) == 0


async def test_long_answers_are_read_beside_the_event_loop_one_at_a_time(
    service: Service, upstream: Upstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads, at_once = [], []
    reading = objects.list_page

    def seen(found: dict[str, Any]) -> Any:
        threads.append(threading.current_thread())
        at_once.append(1)
        try:
            assert len(at_once) == 1
            return reading(found)
        finally:
            at_once.pop()

    monkeypatch.setattr(objects, "list_page", seen)
    listing = UpstreamObjects(upstream, 1 << 30)
    request = ListRequest("bucket")
    service.answer = document(LIST % (ENTRY % 0))
    assert len((await listing.list_objects("key", request)).objects) == 1
    assert threads.pop() is threading.current_thread()
    service.answer = document(LIST % b"".join(ENTRY % each for each in range(100)))
    pages = await asyncio.gather(*(listing.list_objects("key", request) for _ in range(4)))
    assert [len(page.objects) for page in pages] == [100] * 4
    assert threading.current_thread() not in threads


async def test_long_requests_are_written_beside_the_event_loop(
    service: Service, upstream: Upstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = []
    writing = connection.call_of

    def seen(*arguments: Any) -> Any:
        threads.append(threading.current_thread())
        return writing(*arguments)

    monkeypatch.setattr(connection, "call_of", seen)
    service.answer = document(b"<DeleteResult/>")
    for count, is_here in ((2, True), (500, False)):
        assert await UpstreamObjects(upstream, 1).delete_objects("key", "bucket", [f"{k}" for k in range(count)]) == []
        assert (threads.pop() is threading.current_thread()) is is_here


@pytest.mark.parametrize(
    "entries",
    [b"<Contents/>" * 190_000, (ENTRY % 1) * 1_001, b"<Contents/>"],
    ids=["too many elements", "more keys than a page has", "an entry without a key"],
)
async def test_a_list_that_no_service_sends_is_refused(service: Service, upstream: Upstream, entries: bytes) -> None:
    service.answer = document(LIST % entries)
    with pytest.raises(ServerError) as refused:
        await UpstreamObjects(upstream, 1).list_objects("key", ListRequest("bucket"))
    assert refused.value.code is ErrorCode.INTERNAL_ERROR


MORE_TO_COME = b"<IsTruncated>true</IsTruncated>"


async def test_a_page_that_is_not_the_last_says_where_the_next_one_begins(service: Service, upstream: Upstream) -> None:
    objects = UpstreamObjects(upstream, 1)
    uploads = UpstreamUploads(upstream, objects, 1)
    upload = UploadRef("bucket", "k", "id")
    asked = {
        b"ListBucketResult": lambda: objects.list_objects("key", ListRequest("bucket")),
        b"ListMultipartUploadsResult": lambda: uploads.list_uploads("key", UploadListRequest("bucket")),
        b"ListPartsResult": lambda: uploads.list_parts("key", upload, 0, 1000),
    }
    for root, ask in asked.items():
        service.answer = document(b"<%b>%b</%b>" % (root, MORE_TO_COME, root))
        with pytest.raises(ServerError) as refused:
            await ask()
        assert refused.value.code is ErrorCode.INTERNAL_ERROR


PARTS = (
    b"<GetObjectAttributesResponse><ObjectParts><IsTruncated>true</IsTruncated>"
    b"<NextPartNumberMarker>1</NextPartNumberMarker>%b</ObjectParts></GetObjectAttributesResponse>"
)
PART = b"<Part><PartNumber>1</PartNumber><Size>1</Size></Part>"
BUCKETS_PAGE = b"<ListAllMyBucketsResult><Buckets>%b</Buckets>%b</ListAllMyBucketsResult>"
MORE = b"<ContinuationToken>more</ContinuationToken>"
BUCKETS = BUCKETS_PAGE.replace(b"%b</List", MORE + b"</List")
BUCKET = b"<Bucket><Name>b</Name></Bucket>"


@pytest.mark.parametrize("most", ["pages", "entries"])
@pytest.mark.parametrize(
    ("ask", "body", "entry"),
    [
        (lambda listing: listing.object_parts("key", "bucket", "k"), PARTS, PART),
        (lambda listing: listing.list_buckets("key"), BUCKETS, BUCKET),
    ],
    ids=["parts", "buckets"],
)
async def test_lists_without_end_are_given_up(
    service: Service,
    upstream: Upstream,
    monkeypatch: pytest.MonkeyPatch,
    ask: Callable[[UpstreamObjects], Any],
    body: bytes,
    entry: bytes,
    most: str,
) -> None:
    for module, name in ((objects, "PART"), (buckets, "BUCKET")):
        monkeypatch.setattr(module, f"{name}_PAGES_MAX", 3 if most == "pages" else 1_000)
        monkeypatch.setattr(module, f"{name}S_MAX", 1_000 if most == "pages" else 3)
    service.answer = document(body % entry)
    with pytest.raises(ServerError, match="no end"):
        await ask(UpstreamObjects(upstream, 1))
    assert service.asked_count == (3 if most == "pages" else 4)


async def test_a_bucket_among_too_many_has_no_date(
    service: Service, upstream: Upstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(buckets, "BUCKETS_MAX", 1)
    service.answer = document(BUCKETS % BUCKET)
    monkeypatch.setattr(UpstreamObjects, "require_bucket", lambda *_: asyncio.sleep(0))
    assert (await UpstreamObjects(upstream, 1).head_bucket("key", "b")).created_at == 0.0


async def test_buckets_of_many_pages_are_in_order(service: Service, upstream: Upstream) -> None:
    for names, token in ((b"db", MORE), (b"ca", b"")):
        named = b"".join(b"<Bucket><Name>%c</Name></Bucket>" % name for name in names)
        service.answers.append(document(BUCKETS_PAGE % (named, token)))
    found = await UpstreamObjects(upstream, 1).list_buckets("key")
    assert [bucket.name for bucket in found] == ["a", "b", "c", "d"]


class SlowBody(BytesBody):
    """A body that stops in its middle."""

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for piece in super().__aiter__():
            yield piece
            yield piece
            await asyncio.Event().wait()


async def test_a_body_that_is_cut_off_tells_nothing_of_the_service(service: Service, upstream: Upstream) -> None:
    """One tenant's slow PUTs, or PUTs to a bucket that is not there, would have all others told to slow down."""
    service.hangs_up = True
    with pytest.raises(ServerError) as refused:
        await upstream.put("bucket", "k", {}, "", SentBody(SlowBody(bytes(1000)), 1000, None))
    assert refused.value.code is ErrorCode.SLOW_DOWN
    assert upstream.health.failure_count(SCOPE) == 0
    with pytest.raises(ServerError):
        await delete(upstream)
    assert upstream.health.failure_count(SCOPE) == 1


@pytest.mark.parametrize(("encoding", "key"), [(b"<EncodingType>url</EncodingType>", "a b%"), (b"", "a+b%25")])
async def test_names_are_decoded_where_the_page_says_that_they_are_encoded(
    service: Service, upstream: Upstream, encoding: bytes, key: str
) -> None:
    """A service that takes no encoding-type writes a plus as it is."""
    service.answer = document(LIST % (encoding + ENTRY.replace(b"k%d", b"a+b%25")))
    page = await UpstreamObjects(upstream, 1).list_objects("key", ListRequest("bucket"))
    assert [info.key for info in page.objects] == [key]
    uploads = b"<ListMultipartUploadsResult>%b<Upload><Key>a+b%%25</Key><UploadId>1</UploadId></Upload>%b"
    service.answer = document(uploads % (encoding, b"</ListMultipartUploadsResult>"))
    listing = UpstreamUploads(upstream, UpstreamObjects(upstream, 1), 1)
    found = await listing.list_uploads("key", UploadListRequest("bucket"))
    assert [upload.key for upload in found.uploads] == [key]


@pytest.mark.parametrize(("count", "value_bytes"), [(51, 1), (10, 2000)])
async def test_an_object_with_more_tags_than_any_service_keeps_is_refused(
    service: Service, upstream: Upstream, count: int, value_bytes: int
) -> None:
    """Each copy in the cache has them in its row."""
    tag = b"<Tag><Key>%d</Key><Value>%b</Value></Tag>"
    tags = b"".join(tag % (index, b"v" * value_bytes) for index in range(count))
    head = b'HTTP/1.1 200 OK\r\nContent-Length: 0\r\nETag: "e"\r\nx-amz-tagging-count: 1\r\n\r\n'
    service.answers = [head, document(b"<Tagging><TagSet>" + tags + b"</TagSet></Tagging>")]
    with pytest.raises(ServerError) as refused:
        await UpstreamObjects(upstream, 1).head_object("key", ReadRequest("bucket", "k"))
    assert refused.value.code is ErrorCode.INTERNAL_ERROR
