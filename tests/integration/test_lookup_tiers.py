"""Which chunks are there, and where: in memory, on the disk, or in the service behind a cache alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from descriptors.tiers import Tier
from storage_server.settings import UpstreamSettings
from tests.support.chunks import LAYOUT, make_chunks
from tests.support.clusters import cluster
from tests.support.requests import OWNER
from tests.support.servers import LocalStack
from tests.support.waiting import eventually

COUNT = 5
KEYS, CHUNKS = make_chunks(COUNT, LAYOUT)


def test_what_was_used_is_in_memory_and_the_rest_on_the_disk(local: LocalStack, keys: list[str]) -> None:
    with local.client("chunks", "http") as client:
        assert client.tiers([]) == ()
        assert client.tiers(["0" * 64]) == ()
        assert client.tiers([*keys, "0" * 64]) == ((Tier.DISK, len(keys)),)
        assert client.present([]) == ()
        assert client.present(["0" * 64, *keys[::-1]], 60.0) == (False, *(True for _ in keys))
        client.fetch(keys[:2], LAYOUT, client.allocate_buffer(LAYOUT.delivery_bytes(2))).wait(30)
        assert eventually(lambda: local.storage.dram.residency.resident_count == 2)
        hits = local.storage.dram.residency.hit_count
        assert client.tiers(keys) == ((Tier.DRAM, 2), (Tier.DISK, len(keys) - 2))
        assert local.storage.dram.residency.hit_count == hits


@pytest.mark.needs_server
def test_what_only_the_service_has_is_told(tmp_path: Path) -> None:
    with LocalStack(tmp_path / "home") as home:
        home.call(home.storage.objects.create_bucket(OWNER[0], "chunks"))
        with home.client("chunks", "http") as client:
            client.put_chunks(KEYS, list(CHUNKS))
        with (
            LocalStack(tmp_path / "front", upstream=UpstreamSettings(home.url, *OWNER)) as front,
            front.client("chunks", "http") as client,
        ):
            assert client.tiers(KEYS) == ((Tier.SERVICE, COUNT),)
            client.fetch(KEYS[:3], LAYOUT, client.allocate_buffer(LAYOUT.delivery_bytes(3))).wait(30)
            assert eventually(lambda: sum(many for tier, many in client.tiers(KEYS) if tier is Tier.SERVICE) == 2)
            assert sum(many for _, many in client.tiers(KEYS)) == COUNT


@pytest.mark.slow
@pytest.mark.needs_server
def test_the_members_of_a_cluster_tell_it_of_their_own(tmp_path: Path) -> None:
    with LocalStack(tmp_path / "home") as home, cluster(tmp_path, home.url) as running:
        home.call(home.storage.objects.create_bucket(OWNER[0], "chunks"))
        with home.client("chunks", "http") as client:
            client.put_chunks(KEYS[:4], list(CHUNKS[:4]))
        with running.client("chunks") as client:
            assert client.tiers(KEYS) == ((Tier.SERVICE, 4),)
            assert client.present([*KEYS[::-1], "0" * 64]) == (False, True, True, True, True, False)
            client.fetch(KEYS[:4], LAYOUT, client.allocate_buffer(LAYOUT.delivery_bytes(4))).wait(30)
            assert eventually(lambda: Tier.SERVICE not in dict(client.tiers(KEYS)))
            assert sum(many for _, many in client.tiers(KEYS)) == 4
