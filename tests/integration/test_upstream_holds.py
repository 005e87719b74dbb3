"""Leases and pins of chunks that lie in another S3 service, here a second ObjectCache, and come from there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from descriptors.descriptor import Delivery
from descriptors.layout import ChunkLayout
from descriptors.units import MIB
from storage_server.cache.policies.choice import Eviction
from storage_server.settings import UpstreamSettings
from tests.support.chunks import make_chunks
from tests.support.faulty_upstream import Fault, FaultyUpstream
from tests.support.requests import OWNER, s3_client
from tests.support.servers import LocalStack
from tests.support.waiting import eventually

LAYOUT = ChunkLayout(4, 16, MIB // 4)
N = 8


@pytest.fixture
def home(tmp_path: Path) -> Iterator[LocalStack]:
    """The service upstream."""
    with LocalStack(tmp_path / "home") as running:
        running.call(running.storage.objects.create_bucket(OWNER[0], "chunks"))
        yield running


@pytest.fixture
def upstream(home: LocalStack) -> Iterator[FaultyUpstream]:
    """The way from us to the service."""
    with FaultyUpstream(home.url) as running:
        yield running


@pytest.fixture
def front(upstream: FaultyUpstream, tmp_path: Path) -> Iterator[LocalStack]:
    """Us, with a small cache."""
    settings = UpstreamSettings(upstream.url, *OWNER)
    with LocalStack(
        tmp_path / "front", upstream=settings, disk_bytes=64 * MIB, eviction=Eviction.LRU, dram_bytes=0
    ) as running:
        yield running


@pytest.mark.slow
def test_leased_chunks_that_come_later_stay_for_their_descriptor(
    home: LocalStack, upstream: FaultyUpstream, front: LocalStack
) -> None:
    """The lookup's lease is older than the chunks in the cache, and holds all the same."""
    keys, chunks = make_chunks(N, LAYOUT, seed=5)
    others, bodies = make_chunks(100, LAYOUT, seed=6)
    with home.client("chunks", "http") as direct, front.client("chunks", "http") as client:
        direct.put_chunks(keys, list(chunks))
        assert client.lookup(keys, lease_s=60.0) == N
        assert eventually(lambda: front.storage.upstream.fetches.fetched_bytes == chunks.nbytes)
        assert eventually(lambda: front.storage.upstream.fetches.running_count == 0)
        client.put_chunks(others, list(bodies))
        assert eventually(lambda: front.storage.store.evictor.evictions.evicted_count >= 40)
        upstream.choose = lambda _: Fault.RESET
        buffer = client.allocate_buffer(chunks.nbytes)
        client.fetch(keys, LAYOUT, buffer, delivery=Delivery.CHUNK_MAJOR).wait(30)
        assert np.array_equal(buffer, chunks.ravel())


@pytest.mark.slow
@pytest.mark.parametrize("hidden", [frozenset(), frozenset({"x-amz-tagging-count"})], ids=["counted", "not counted"])
def test_a_pin_that_was_set_upstream_holds_the_copy(
    home: LocalStack, upstream: FaultyUpstream, front: LocalStack, hidden: frozenset[str]
) -> None:
    """RGW 16 does not say how many tags an object has."""
    upstream.hidden_headers = hidden
    keys, chunks = make_chunks(N, LAYOUT, seed=8)
    others, bodies = make_chunks(100, LAYOUT, seed=9)
    direct_s3, tag = s3_client(home.url, OWNER), [{"Key": "objectcache-pin", "Value": ""}]
    with home.client("chunks", "http") as direct, front.client("chunks", "http") as client:
        direct.put_chunks(keys, list(chunks))
        for key in keys[:4]:
            direct_s3.put_object_tagging(Bucket="chunks", Key=key, Tagging={"TagSet": tag})
        buffer = client.allocate_buffer(chunks.nbytes)
        client.fetch(keys, LAYOUT, buffer, delivery=Delivery.CHUNK_MAJOR).wait(30)
        assert eventually(lambda: pinned_count(front, keys) == 4)
        client.put_chunks(others, list(bodies))
        assert eventually(lambda: front.storage.store.evictor.evictions.evicted_count >= 40)
        assert [front.storage.store.objects.stored("chunks", key) is not None for key in keys] == [True] * 4 + [
            False
        ] * 4
        front_s3 = s3_client(front.url, OWNER)
        front_s3.delete_object_tagging(Bucket="chunks", Key=keys[0])
        assert eventually(lambda: pinned_count(front, keys) == 3)


def pinned_count(front: LocalStack, keys: list[str]) -> int:
    found = [front.storage.store.objects.stored("chunks", key) for key in keys]
    return sum("objectcache-pin" in stored.info.attributes.tags for stored in found if stored is not None)
