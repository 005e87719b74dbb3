"""In front of another S3 service, here a second ObjectCache: prefixes come from there while they are delivered."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import quote

import numpy as np
import pytest
from aiohttp import web

from descriptors.descriptor import Delivery
from descriptors.errors import ChunkUnavailable, ObjectCacheError, ServerError
from descriptors.layout import ChunkLayout
from nixl_client.session.retries import Retries
from storage_server.home import chunks as chunks_module
from storage_server.home.claim import WrongDirectoryError, claim
from storage_server.home.fetch import fetches as fetches_module
from storage_server.home.rules import groups as groups_module
from storage_server.settings import UpstreamSettings
from tests.support.chunks import layer_of, make_chunks
from tests.support.faulty_upstream import Fault, FaultyUpstream, start_of_range
from tests.support.requests import OWNER, request, s3_client
from tests.support.servers import CONFIG, LocalStack, is_idle, started
from tests.support.tree import repository
from tests.support.waiting import eventually

LAYOUT = ChunkLayout(6, 16, 70_000)
N = 9


def ran(*arguments: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """A command that ends by itself."""
    command = [sys.executable, "-m", "objectcache", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=30, cwd=repository(), env={**os.environ, **environment}
    )


@pytest.fixture(autouse=True)
def requests_cost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that small chunks, too, come in groups of layers where there are more of them than connections."""
    monkeypatch.setattr(groups_module, "REQUEST_BYTES", 0)
    monkeypatch.setattr(groups_module, "LATER_BYTES_MIN", 1)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStack]:
    """The service upstream. Tests use keys of their own, and leave those of `stored` alone."""
    with LocalStack(tmp_path_factory.mktemp("home")) as running:
        running.call(running.storage.objects.create_bucket(OWNER[0], "chunks"))
        yield running


@pytest.fixture
def front(home: LocalStack, tmp_path: Path) -> Iterator[LocalStack]:
    """Us, in front of it."""
    with LocalStack(tmp_path / "front", upstream=UpstreamSettings(home.url, *OWNER)) as running:
        yield running


@pytest.mark.parametrize("transport", ["http", "shm"])
@pytest.mark.parametrize("delivery", [Delivery.LAYER_MAJOR, Delivery.CHUNK_MAJOR])
def test_a_prefix_that_is_only_upstream_is_delivered_and_then_cached(
    home: LocalStack, front: LocalStack, transport: str, delivery: Delivery
) -> None:
    keys, chunks = make_chunks(N, LAYOUT, seed=3)
    with home.client("chunks", "http") as client:
        client.put_chunks(keys, list(chunks))
    with front.client("chunks", transport) as client:
        assert client.lookup([*keys, "0" * 64]) == N
        buffer = client.allocate_buffer(chunks.nbytes)
        for _ in range(2):
            buffer[:] = 0
            client.fetch(keys, LAYOUT, buffer, delivery=delivery).wait(30)
            wanted = chunks.reshape(N, LAYOUT.num_layers, -1)
            wanted = wanted.transpose(1, 0, 2) if delivery is Delivery.LAYER_MAJOR else wanted
            assert np.array_equal(buffer, wanted.ravel())
        assert eventually(lambda: front.storage.upstream.fetches.running_count == 0)


@pytest.fixture
def upstream(home: LocalStack) -> Iterator[FaultyUpstream]:
    """The way from us to the service."""
    with FaultyUpstream(home.url) as running:
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


WAYS: dict[str, dict[str, int]] = {
    "whole": {},
    "groups": {"fetches_max": 4},
    "straight into files": {"fetches_max": 4, "landing_bytes": 0},
    "patiently": {"read_timeout_s": 30},
}
"""How chunks come: each in one request, or in groups of layers since there are more chunks than connections."""


@pytest.fixture
def cold(request: pytest.FixtureRequest, upstream: FaultyUpstream, tmp_path: Path) -> Iterator[LocalStack]:
    """Us, with nothing in the cache, and a way upstream that can go wrong. The parameter is one of WAYS. A test without
    one does not wait for the end of a time limit.
    """
    way = WAYS[getattr(request, "param", "groups")]
    options = {"connect_timeout_s": 30.0, "read_timeout_s": 4.0 if hasattr(request, "param") else 30.0, **way}
    settings = UpstreamSettings(upstream.url, *OWNER, **options)
    with LocalStack(tmp_path / "cold", upstream=settings) as running:
        yield running
        assert eventually(lambda: is_idle(running))
        assert eventually(lambda: running.storage.upstream.fetches.landed_bytes == 0)


Stored = tuple[list[str], np.ndarray]


@pytest.mark.parametrize(
    ("cold", "fault"),
    [("groups", Fault.HANGING), ("straight into files", Fault.HANGING), ("patiently", Fault.STALLED)],
    indirect=["cold"],
)
def test_layers_are_delivered_while_later_ones_have_not_come(
    upstream: FaultyUpstream, stored: Stored, cold: LocalStack, fault: Fault
) -> None:
    """Layer 0 is told first, be it by itself or as the beginning of the whole chunk."""
    keys, chunks = stored

    def choose(request: web.Request) -> Fault | None:
        is_meant = fault is Fault.STALLED or (start_of_range(request) or 0) > 0
        return fault if request.method == "GET" and is_meant else None

    upstream.choose = choose
    with cold.client("chunks", "http") as client:
        buffer = np.zeros(chunks.nbytes, np.uint8)
        fetch = client.fetch(keys, LAYOUT, buffer, delivery=Delivery.LAYER_MAJOR)
        assert np.array_equal(fetch.wait_layer(0, 30).data, layer_of(chunks, LAYOUT, 0))
        with pytest.raises(TimeoutError):
            fetch.wait_layer(1, 0.3)
        upstream.release()
        for layer_index in range(LAYOUT.num_layers):
            assert np.array_equal(fetch.wait_layer(layer_index, 30).data, layer_of(chunks, LAYOUT, layer_index))
        fetch.wait(30)


GROUPS = [(way, group) for way in ("groups", "straight into files") for group in ("first", "later")]
HARMLESS = (Fault.HANGING, Fault.DRIPPING, Fault.KEPT_KEYS, Fault.ENCRYPTED)
FAULTS = [fault for fault in Fault if fault not in HARMLESS]
WAITED_FOR = {Fault.STALLED: pytest.mark.slow}
WHOLE_FAULTS = [fault for fault in FAULTS if fault is not Fault.OTHER_ETAG]
"""One answer cannot contradict itself: that its ETag is wrong cannot be told, and the bytes are right."""


@pytest.mark.parametrize(
    ("cold", "group", "fault"),
    [
        pytest.param(way, group, fault, marks=WAITED_FOR.get(fault, ()))
        for way, group, faults in [("whole", "first", WHOLE_FAULTS), *((*group, FAULTS) for group in GROUPS)]
        for fault in faults
    ],
    indirect=["cold"],
)
def test_no_wrong_byte_is_told_whatever_upstream_does(
    upstream: FaultyUpstream, stored: Stored, cold: LocalStack, fault: Fault, group: str
) -> None:
    """The delivery ends with an error that the caller can act on, and the next one is whole."""
    keys, chunks = stored
    bad = keys[4]

    def choose(request: web.Request) -> Fault | None:
        start = start_of_range(request)
        is_meant = start is not None and request.path.endswith(bad) and (start > 0 or group == "first")
        return fault if is_meant else None

    upstream.choose = choose
    told: list[int] = []
    with cold.client("chunks", "http", retries=Retries(1)) as asks_once, cold.client("chunks", "http") as client:
        buffer = np.zeros(chunks.nbytes, np.uint8)
        fetch = asks_once.fetch(keys, LAYOUT, buffer, delivery=Delivery.LAYER_MAJOR)

        def take_all() -> None:
            for layer_index in range(LAYOUT.num_layers):
                layer = fetch.wait_layer(layer_index, 30).data
                assert np.array_equal(layer, layer_of(chunks, LAYOUT, layer_index))
                told.append(layer_index)

        with pytest.raises(ObjectCacheError):
            take_all()
        assert len(told) < LAYOUT.num_layers
        assert eventually(lambda: cold.storage.upstream.fetches.running_count == 0)
        upstream.release()
        buffer[:] = 0
        client.fetch(keys, LAYOUT, buffer, delivery=Delivery.CHUNK_MAJOR).wait(30)
        assert np.array_equal(buffer, chunks.ravel())


@pytest.mark.parametrize("cold", ["whole"], indirect=True)
def test_etags_of_encrypted_objects_prove_nothing_and_break_nothing(
    upstream: FaultyUpstream, home: LocalStack, cold: LocalStack
) -> None:
    """A bucket may have a default key of a key service: its ETags look like MD5s, and are none."""
    keys, chunks = make_chunks(2, LAYOUT, seed=11)
    with home.client("chunks", "http") as client:
        client.put_chunks(keys[:1], list(chunks[:1]))
    upstream.choose = lambda request: Fault.ENCRYPTED if request.method in ("GET", "PUT") else None
    with cold.client("chunks", "http") as client:
        client.put_chunks(keys[1:], list(chunks[1:]))
        assert request(cold.url, "PUT", "/chunks/encrypted", body=b"plain").status == 200
        buffer = np.zeros(chunks.nbytes, np.uint8)
        client.fetch(keys, LAYOUT, buffer, delivery=Delivery.CHUNK_MAJOR).wait(30)
        assert np.array_equal(buffer, chunks.ravel())


@pytest.mark.parametrize("cold", ["whole", "groups", "straight into files"], indirect=True)
def test_a_chunk_without_a_proof_is_told_when_its_etag_has_proved_it(
    upstream: FaultyUpstream, home: LocalStack, cold: LocalStack
) -> None:
    """It was put upstream by somebody else. A bit that is another in its last group keeps its first layer back, too."""
    keys, chunks = make_chunks(N, LAYOUT, seed=2)
    with home.client("chunks", "http") as client:
        client.put_chunks(keys, list(chunks))
    is_whole = cold.storage.upstream.settings.fetches_max > N

    def choose(request: web.Request) -> Fault | None:
        start = start_of_range(request)
        return Fault.CORRUPT if start is not None and (start > 0 or is_whole) else None

    upstream.choose = choose
    with cold.client("chunks", "http") as client:
        buffer = np.zeros(chunks.nbytes, np.uint8)
        fetch = client.fetch(keys, LAYOUT, buffer, delivery=Delivery.LAYER_MAJOR)
        with pytest.raises(ObjectCacheError):
            fetch.wait_layer(0, 30)
        assert eventually(lambda: cold.storage.upstream.fetches.running_count == 0)
        upstream.release()
        client.fetch(keys, LAYOUT, buffer, delivery=Delivery.CHUNK_MAJOR).wait(30)
        assert np.array_equal(buffer, chunks.ravel())


def test_a_chunk_is_fetched_once_for_all_that_ask_and_goes_on_when_the_first_leaves(
    upstream: FaultyUpstream, stored: Stored, cold: LocalStack
) -> None:
    keys, chunks = stored
    upstream.choose = lambda request: Fault.HANGING if (start_of_range(request) or 0) > 0 else None
    with cold.client("chunks", "http") as one, cold.client("chunks", "http") as two:
        first, second = (np.zeros(chunks.nbytes, np.uint8) for _ in range(2))
        leaving = one.fetch(keys, LAYOUT, first, delivery=Delivery.LAYER_MAJOR)
        leaving.wait_layer(0, 30)
        staying = two.fetch(keys, LAYOUT, second, delivery=Delivery.LAYER_MAJOR)
        staying.wait_layer(0, 30)
        leaving.cancel()
        upstream.release()
        staying.wait(30)
    wanted = chunks.reshape(N, LAYOUT.num_layers, -1).transpose(1, 0, 2).ravel()
    assert np.array_equal(second, wanted)
    asked = [(path, text) for method, path, text in upstream.seen if method == "GET" and text]
    assert len(asked) == len(set(asked))


@pytest.mark.slow
def test_what_is_cached_is_served_while_upstream_is_gone(
    upstream: FaultyUpstream, stored: Stored, cold: LocalStack
) -> None:
    keys, chunks = stored
    with cold.client("chunks", "http", retries=Retries(2)) as client:
        buffer = np.zeros(chunks.nbytes, np.uint8)
        client.fetch(keys, LAYOUT, buffer).wait(30)
        assert eventually(lambda: cold.storage.upstream.fetches.running_count == 0)
        upstream.choose = lambda _: Fault.RESET
        buffer[:] = 0
        assert client.lookup(keys) == N
        client.fetch(keys, LAYOUT, buffer, delivery=Delivery.CHUNK_MAJOR).wait(30)
        assert np.array_equal(buffer, chunks.ravel())
        reply = request(cold.url, "PUT", "/chunks/plain", body=b"data")
        assert (reply.status, reply.code) == (503, "SlowDown")
        with pytest.raises(ServerError):
            client.fetch(["f" * 64], LAYOUT, buffer[: LAYOUT.chunk_bytes]).wait(30)


@pytest.mark.parametrize("change", ["overwrite", "delete"])
def test_a_change_through_us_is_seen_at_once(cold: LocalStack, change: str) -> None:
    """Its copy is removed before the change is answered."""
    keys, chunks = make_chunks(1, LAYOUT, seed=4)
    other = make_chunks(1, LAYOUT, seed=5)[1]
    with cold.client("chunks", "http") as client:
        client.put_chunks(keys, list(chunks))
        buffer = np.zeros(LAYOUT.chunk_bytes, np.uint8)
        client.fetch(keys[:1], LAYOUT, buffer).wait(30)
        if change == "overwrite":
            client.put_chunks(keys[:1], list(other))
            client.fetch(keys[:1], LAYOUT, buffer).wait(30)
            assert np.array_equal(buffer, other[0])
        else:
            assert request(cold.url, "DELETE", f"/chunks/{keys[0]}").status == 204
            assert client.lookup(keys[:1]) == 0
            with pytest.raises(ChunkUnavailable):
                client.fetch(keys[:1], LAYOUT, buffer).wait(30)


def test_a_change_past_us_is_seen_in_time(home: LocalStack, tmp_path: Path) -> None:
    """A chunk that is as it was stays cached."""
    keys, chunks = make_chunks(3, LAYOUT, seed=6)
    other = make_chunks(1, LAYOUT, seed=7)[1]
    upstream = UpstreamSettings(home.url, *OWNER, chunk_revalidate_s=0.4)
    with LocalStack(tmp_path / "front", upstream=upstream) as front, front.client("chunks", "http") as client:
        client.put_chunks(keys, list(chunks))
        with home.client("chunks", "http") as direct:
            direct.put_chunks(keys[:1], list(other))
        assert request(home.url, "DELETE", f"/chunks/{keys[1]}").status == 204
        revalidation = front.storage.upstream.revalidation
        assert eventually(lambda: revalidation.stale_count == 2)
        assert eventually(lambda: client.lookup(keys[1:2]) == 0)
        buffer = np.zeros(LAYOUT.chunk_bytes, np.uint8)
        client.fetch(keys[:1], LAYOUT, buffer).wait(30)
        assert np.array_equal(buffer, other[0])
        client.fetch(keys[2:], LAYOUT, buffer).wait(30)
        assert np.array_equal(buffer, chunks[2])
        assert revalidation.stale_count == 2


def test_a_proof_is_no_metadata_of_the_object(stored: Stored, cold: LocalStack, home: LocalStack) -> None:
    """It is upstream's to keep and ours to use."""
    keys, _ = stored
    assert "x-amz-meta-objectcache-proof" in request(home.url, "HEAD", f"/chunks/{keys[0]}").headers
    assert "x-amz-meta-objectcache-proof" not in request(cold.url, "HEAD", f"/chunks/{keys[0]}").headers


class TestCopies:
    """Plain reads of what is in the cache."""

    def test_chunks_are_read_from_the_cache_while_upstream_is_gone(
        self, upstream: FaultyUpstream, stored: Stored, cold: LocalStack
    ) -> None:
        """GET, ranges and HEAD; conditions are kept. Tags are upstream's to say, unless it is gone."""
        keys, chunks = stored
        with cold.client("chunks", "http") as client:
            buffer = client.allocate_buffer(chunks.nbytes)
            client.fetch(keys, LAYOUT, buffer).wait(30)
        assert eventually(lambda: cold.storage.upstream.fetches.running_count == 0)
        upstream.choose = lambda _: Fault.RESET
        path = f"/chunks/{keys[3]}"
        whole = request(cold.url, "GET", path)
        assert (whole.status, whole.body) == (200, chunks[3].tobytes())
        part = request(cold.url, "GET", path, headers={"range": "bytes=1000-1099"})
        assert (part.status, part.body) == (206, chunks[3].tobytes()[1000:1100])
        assert request(cold.url, "HEAD", path).headers["etag"] == whole.headers["etag"]
        assert request(cold.url, "GET", path, headers={"if-none-match": whole.headers["etag"]}).status == 304
        assert request(cold.url, "GET", "/chunks/no-chunk").status == 503

    @pytest.mark.parametrize("nbytes", [420_000, 3000])
    def test_a_damaged_copy_is_noted_and_the_next_read_is_right(
        self, home: LocalStack, cold: LocalStack, nbytes: int
    ) -> None:
        key, data = f"{nbytes:064x}", os.urandom(nbytes)
        s3 = s3_client(cold.url, OWNER)
        s3.put_object(Bucket="chunks", Key=key, Body=data)
        cold.damage("chunks", key, nbytes // 2)
        first = request(cold.url, "GET", f"/chunks/{key}")
        assert first.body != data
        assert (first.status, b"InternalError" in first.body) == (500, True)
        assert request(cold.url, "GET", f"/chunks/{key}").body == data
        with home.client("chunks", "http") as client:
            assert client.lookup([key]) == 1

    def test_a_copy_that_leaves_between_look_and_read_costs_nothing(
        self, home: LocalStack, front: LocalStack, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Played here by a copy that was never there."""
        key, data = f"{'3c' * 32}", os.urandom(5000)
        s3_client(home.url, OWNER).put_object(Bucket="chunks", Key=key, Body=data)
        monkeypatch.setattr(front.storage.upstream, "copy_of", lambda *_: SimpleNamespace(has_doubtful_tags=False))
        monkeypatch.setattr(front.storage.upstream.service.objects, "counts_tags", True)
        assert request(front.url, "GET", f"/chunks/{key}").body == data
        assert request(front.url, "HEAD", f"/chunks/{key}").status == 200


class TestOtherKeys:
    """Keys that are no chunks' may show something else at any time."""

    LAYOUT = ChunkLayout(2, 16, 40_000)

    def fetched(self, front: LocalStack, key: str) -> bytes:
        with front.client("chunks", "http") as client:
            buffer = client.allocate_buffer(self.LAYOUT.chunk_bytes)
            client.fetch([key], self.LAYOUT, buffer).wait(30)
            return bytes(buffer)

    def test_descriptors_compare_the_etag_with_upstream(self, home: LocalStack, front: LocalStack) -> None:
        direct = s3_client(home.url, OWNER)
        for _ in range(3):
            data = os.urandom(self.LAYOUT.chunk_bytes)
            direct.put_object(Bucket="chunks", Key="names/latest", Body=data)
            for _ in range(2):
                assert self.fetched(front, "names/latest") == data
        direct.delete_object(Bucket="chunks", Key="names/latest")
        with front.client("chunks", "http") as client:
            assert client.lookup(["names/latest"]) == 0
            with pytest.raises(ChunkUnavailable):
                client.fetch(["names/latest"], self.LAYOUT, client.allocate_buffer(self.LAYOUT.chunk_bytes)).wait(30)

    def test_a_flag_makes_a_chunk_and_says_so_upstream(
        self, home: LocalStack, upstream: FaultyUpstream, cold: LocalStack, tmp_path: Path
    ) -> None:
        """Another server of ours knows it by its flag, and serves it without asking."""
        data = os.urandom(self.LAYOUT.chunk_bytes)
        path = "/chunks/names/flagged"
        flags = {"x-amz-objectcache-chunk": "true", "x-amz-objectcache-prefix": "true"}
        with LocalStack(tmp_path / "writer", upstream=UpstreamSettings(home.url, *OWNER)) as writer:
            assert request(writer.url, "PUT", path, body=data, headers=flags).status == 200
        assert self.fetched(cold, "names/flagged") == data
        assert eventually(lambda: cold.storage.upstream.fetches.running_count == 0)
        upstream.choose = lambda _: Fault.RESET
        assert self.fetched(cold, "names/flagged") == data
        reply = request(cold.url, "GET", path)
        assert reply.body == data
        assert {name: reply.headers.get(name) for name in flags} == flags
        refused = request(cold.url, "PUT", path, body=data, headers={"x-amz-objectcache-chunk": "yes"})
        assert (refused.status, b"InvalidArgument" in refused.body) == (400, True)


class TestLookups:
    """Lookups of what is upstream alone."""

    def heads(self, upstream: FaultyUpstream) -> int:
        return sum(method == "HEAD" for method, *_ in upstream.seen)

    @pytest.mark.slow
    def test_they_ask_for_few_keys_and_remember(
        self, home: LocalStack, upstream: FaultyUpstream, cold: LocalStack
    ) -> None:
        keys = [f"{'1a' * 16}{index:032x}" for index in range(600)]
        with home.client("chunks", "http") as client:
            client.put_chunks(keys[:500], [b"x"] * 500)
        with cold.client("chunks", "http") as client:
            assert client.lookup(keys) == 500
            assert self.heads(upstream) <= 20
            upstream.seen.clear()
            assert [client.lookup(keys[:500]), client.lookup(keys[:77])] == [500, 77]
            assert self.heads(upstream) == 0
            client.delete([keys[40]])
            assert client.lookup(keys) == 40

    def test_what_turns_out_to_be_gone_is_not_remembered(self, home: LocalStack, cold: LocalStack) -> None:
        layout = ChunkLayout(2, 16, 4096)
        keys = [f"{'2b' * 16}{index:032x}" for index in range(2)]
        with home.client("chunks", "http") as direct, cold.client("chunks", "http") as client:
            direct.put_chunks(keys, [bytes(layout.chunk_bytes)] * 2)
            assert client.lookup(keys) == 2
            direct.delete(keys[1:])
            with pytest.raises(ChunkUnavailable):
                client.fetch(keys, layout, client.allocate_buffer(2 * layout.chunk_bytes)).wait(30)
            assert client.lookup(keys) == 1


class TestPrefetch:
    """A lookup with a lease begins to read what it matched."""

    def test_chunks_come_before_anybody_asks_for_them(
        self, upstream: FaultyUpstream, stored: Stored, cold: LocalStack
    ) -> None:
        keys, chunks = stored
        with cold.client("chunks", "http") as client:
            assert client.lookup(keys, lease_s=60.0) == N
            assert eventually(lambda: cold.storage.upstream.fetches.fetched_bytes == chunks.nbytes)
            assert eventually(lambda: cold.storage.upstream.fetches.running_count == 0)
            upstream.choose = lambda _: Fault.RESET
            buffer = client.allocate_buffer(chunks.nbytes)
            client.fetch(keys, LAYOUT, buffer, delivery=Delivery.LAYER_MAJOR).wait(30)
            assert np.array_equal(buffer, chunks.reshape(N, LAYOUT.num_layers, -1).transpose(1, 0, 2).ravel())

    def test_nothing_comes_without_a_lease(self, stored: Stored, cold: LocalStack) -> None:
        with cold.client("chunks", "http") as client:
            assert client.lookup(stored[0]) == N
            assert cold.storage.upstream.fetches.running_count == 0

    @pytest.mark.slow
    def test_what_nobody_asks_for_is_given_up(
        self, upstream: FaultyUpstream, stored: Stored, cold: LocalStack, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A descriptor that comes in between takes over, and what it waits for is not given up."""
        monkeypatch.setattr(chunks_module, "PREFETCH_WAIT_S", 2.0)
        keys, chunks = stored
        upstream.choose = lambda request: Fault.HANGING if request.method == "GET" else None
        with cold.client("chunks", "http") as client:
            assert client.lookup(keys, lease_s=60.0) == N
            assert cold.storage.upstream.fetches.running_count == N
            buffer = client.allocate_buffer(4 * LAYOUT.chunk_bytes)
            fetch = client.fetch(keys[:4], LAYOUT, buffer, delivery=Delivery.LAYER_MAJOR)
            assert eventually(lambda: cold.storage.upstream.fetches.running_count == 4)
            upstream.release()
            fetch.wait(30)
            wanted = chunks[:4].reshape(4, LAYOUT.num_layers, -1).transpose(1, 0, 2)
            assert np.array_equal(buffer, wanted.ravel())

    @pytest.fixture
    def few_prefetches(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Stands before `cold`, which is made with it."""
        monkeypatch.setattr(fetches_module, "PREFETCHES_MAX", 6)

    def test_a_bucket_has_half_of_all_prefetches(
        self, few_prefetches: None, upstream: FaultyUpstream, stored: Stored, cold: LocalStack
    ) -> None:
        upstream.choose = lambda request: Fault.HANGING if request.method == "GET" else None
        with cold.client("chunks", "http") as client:
            for _ in range(2):
                assert client.lookup(stored[0], lease_s=60.0) == N
                assert cold.storage.upstream.fetches.running_count == 3
        upstream.release()


class TestCommand:
    """`objectcache serve --upstream`."""

    @pytest.mark.slow
    def test_it_serves_what_is_upstream_with_workers(self, home: LocalStack, tmp_path: Path) -> None:
        (tmp_path / "config.toml").write_text(CONFIG)
        arguments = ("--data", str(tmp_path / "cache"), "--port", "0", "--workers", "2", "--upstream", home.url)
        account = {
            "OBJECTCACHE_UPSTREAM_ACCESS_KEY_ID": OWNER[0],
            "OBJECTCACHE_UPSTREAM_SECRET_ACCESS_KEY": OWNER[1],
        }
        config = ("--config", str(tmp_path / "config.toml"))
        with started("serve", *arguments, *config, environment=account) as (url, _):
            s3, direct = s3_client(url, OWNER), s3_client(home.url, OWNER)
            s3.put_object(Bucket="chunks", Key="through", Body=b"data", Metadata={"a": "b"})
            assert direct.get_object(Bucket="chunks", Key="through")["Body"].read() == b"data"
            direct.put_object(Bucket="chunks", Key="direct", Body=b"x" * 100_000)
            for _ in range(8):  # each on a connection of its own: the kernel shares them out
                reply = request(url, "GET", "/chunks/direct")
                assert (reply.status, len(reply.body)) == (200, 100_000)
            found = s3.head_object(Bucket="chunks", Key="through")
            assert found["Metadata"] == {"a": "b"}
            listed = [each["Key"] for each in s3.list_objects_v2(Bucket="chunks")["Contents"]]
            assert {"direct", "through"} <= set(listed)

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            (["--upstream", "http://127.0.0.1:1"], "OBJECTCACHE_UPSTREAM_ACCESS_KEY_ID"),
            (["--upstream", "minio:9000"], "must be http(s)://HOST:PORT or file:///PATH"),
        ],
    )
    def test_what_cannot_be_is_refused(self, tmp_path: Path, arguments: list[str], said: str) -> None:
        account = {"OBJECTCACHE_UPSTREAM_ACCESS_KEY_ID": "a", "OBJECTCACHE_UPSTREAM_SECRET_ACCESS_KEY": "b"}
        environment = {} if "127.0.0.1" in arguments[1] else account
        done = ran("serve", "--data", str(tmp_path / "cache"), "--port", "0", *arguments, environment=environment)
        assert done.returncode == 2
        assert said in done.stderr

    def test_a_directory_is_a_home_or_a_cache_and_never_both(self, home: LocalStack, tmp_path: Path) -> None:
        upstream, other = UpstreamSettings(home.url, *OWNER), UpstreamSettings("http://other:9000", *OWNER)
        with LocalStack(tmp_path / "embedded"):
            pass
        with LocalStack(tmp_path / "cache", upstream=upstream):
            pass
        with pytest.raises(WrongDirectoryError, match="is the home of objects"):
            claim(tmp_path / "embedded", upstream)
        with pytest.raises(WrongDirectoryError, match="is a cache of"):
            claim(tmp_path / "cache", None)
        with pytest.raises(WrongDirectoryError, match="not of http://other"):
            claim(tmp_path / "cache", other)
        claim(tmp_path / "cache", upstream)


def test_keys_of_any_characters_pass_on_and_back(home: LocalStack, front: LocalStack) -> None:
    """A list that folds a character, or a document that does, has another object read or deleted."""
    characters = ("\r", "\n", "\t", "\x01", "\x0b", "\x1f", "\x7f", "\ufffe", "+", "%0D", " ")
    strange = [f"odd/{character}b" for character in characters]
    keys = sorted([*strange, "odd/ab"], key=str.encode)
    front.call(front.storage.objects.create_bucket(OWNER[0], "odd"))
    for key in keys:
        assert request(front.url, "PUT", f"/odd/{quote(key)}", body=key.encode()).status == 200
    s3 = s3_client(front.url, OWNER)
    for list_call, marker in (("list_objects", "Marker"), ("list_objects_v2", "StartAfter")):
        found: list[str] = []
        while True:
            more = {marker: found[-1]} if found else {}
            page = getattr(s3, list_call)(Bucket="odd", MaxKeys=3, **more)
            found += [entry["Key"] for entry in page.get("Contents", ())]
            if not page["IsTruncated"]:
                break
        assert found == keys
    for key in keys:
        assert request(front.url, "GET", f"/odd/{quote(key)}").body == key.encode()
    assert front.call(front.storage.objects.delete_objects(OWNER[0], "odd", strange)) == []
    for url in (front.url, home.url):
        left = s3_client(url, OWNER).list_objects_v2(Bucket="odd")["Contents"]
        assert [entry["Key"] for entry in left] == ["odd/ab"]


@pytest.mark.parametrize("key", ["..", "a/../b", "../other/key", "./a", "a/.", "../../chunks/x"])
def test_keys_that_a_service_might_resolve_are_not_passed_on(home: LocalStack, front: LocalStack, key: str) -> None:
    """A proxy before the service may take them for another bucket's keys."""
    for method, body in (("PUT", b"x"), ("GET", b""), ("DELETE", b"")):
        answer = request(front.url, method, f"/chunks/{quote(key, safe='')}", body=body)
        assert (answer.status, answer.code) == (400, "InvalidArgument"), method
    copied = request(front.url, "PUT", "/chunks/copy", headers={"x-amz-copy-source": f"/chunks/{quote(key, safe='')}"})
    assert (copied.status, copied.code) == (400, "InvalidArgument")
