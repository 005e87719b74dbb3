"""`cold_reads = "direct"`: chunks are read past the page cache, to their place in the DRAM tier and the payload."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from descriptors.descriptor import Delivery
from descriptors.errors import ObjectCacheError
from descriptors.layout import ChunkLayout
from descriptors.units import KIB, MIB
from storage_server.settings import ColdReads
from tests.support.chunks import make_chunks
from tests.support.servers import LocalStack
from tests.support.waiting import eventually

LAYOUT = ChunkLayout(num_layers=8, chunk_tokens=16, per_layer_chunk_bytes=64 * KIB)
N = 12
DRAM_BYTES = 16 * MIB


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[LocalStack]:
    with LocalStack(tmp_path / "data", cold_reads=ColdReads.DIRECT, dram_bytes=DRAM_BYTES) as running:
        running.call(running.storage.objects.create_bucket("OWNERKEY", "chunks"))
        yield running


class Prefix:
    """Stored chunks, of which neither DRAM tier nor page cache has anything."""

    def __init__(self, stack: LocalStack, tmp_path: Path, transport: str) -> None:
        self.keys, self.chunks = make_chunks(N, LAYOUT)
        self.folder = tmp_path / "data" / "extents"
        self.transport = transport
        self.client = stack.client("chunks", transport)
        self.client.put_chunks(self.keys, list(self.chunks))
        self.buffer = self.client.allocate_buffer(LAYOUT.delivery_bytes(N))
        self.make_cold()

    def make_cold(self) -> None:
        for path in self.folder.glob("*/*"):
            fd = os.open(path, os.O_RDONLY)
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)

    def fetch(self, delivery: Delivery) -> None:
        """Fetch all and compare every byte."""
        self.buffer[:] = 0
        self.client.fetch(self.keys, LAYOUT, self.buffer, delivery=delivery).wait(30)
        chunks = self.chunks.reshape(N, LAYOUT.num_layers, -1)
        expected = chunks if delivery is Delivery.CHUNK_MAJOR else chunks.swapaxes(0, 1)
        assert np.array_equal(self.buffer, expected.reshape(-1))


@pytest.fixture(params=["http", "shm"])
def prefix(request: pytest.FixtureRequest, stack: LocalStack, tmp_path: Path) -> Iterator[Prefix]:
    made = Prefix(stack, tmp_path, request.param)
    with made.client:
        yield made


@pytest.mark.parametrize("delivery", [Delivery.LAYER_MAJOR, Delivery.CHUNK_MAJOR])
def test_cold_chunks_arrive_whole_and_stay_in_memory(stack: LocalStack, prefix: Prefix, delivery: Delivery) -> None:
    """The next delivery reads no file."""
    prefix.fetch(delivery)
    assert eventually(lambda: stack.storage.dram.residency.resident_count == N)
    read = stack.storage.store.files.open.lent
    stack.storage.store.files.open.lent = None
    prefix.fetch(delivery)
    stack.storage.store.files.open.lent = read


def test_a_prefix_larger_than_the_memory_arrives_again_and_again(tmp_path: Path) -> None:
    """Some chunks get a place, others do not, and some are evicted while they come."""
    settings = {"cold_reads": ColdReads.DIRECT, "dram_bytes": 5 * LAYOUT.chunk_bytes}
    with LocalStack(tmp_path / "data", **settings) as stack:
        stack.call(stack.storage.objects.create_bucket("OWNERKEY", "chunks"))
        made = Prefix(stack, tmp_path, "shm")
        with made.client:
            for _ in range(4):
                made.fetch(Delivery.LAYER_MAJOR)
                made.make_cold()
            assert 0 < stack.storage.dram.residency.resident_count <= 5


def test_damage_is_told_with_its_chunk_and_layer_and_stays_out_of_memory(stack: LocalStack, prefix: Prefix) -> None:
    stack.damage("chunks", prefix.keys[4], 3 * 64 * KIB + 5)
    prefix.make_cold()
    with pytest.raises(ObjectCacheError) as failed:
        prefix.client.fetch(prefix.keys, LAYOUT, prefix.buffer, delivery=Delivery.LAYER_MAJOR).wait(30)
    if prefix.transport != "http":
        assert (failed.value.index, failed.value.layer) == (4, 3)
    assert eventually(lambda: stack.storage.dram.residency.resident_count == N - 1)
    assert prefix.client.lookup(prefix.keys) == 4


@pytest.mark.slow
def test_what_was_overwritten_meanwhile_is_not_served(stack: LocalStack, prefix: Prefix) -> None:
    prefix.fetch(Delivery.LAYER_MAJOR)
    prefix.chunks = prefix.chunks.copy()
    prefix.chunks[:3] = make_chunks(N, LAYOUT, seed=7)[1][:3]
    prefix.client.put_chunks(prefix.keys[:3], list(prefix.chunks[:3]))
    prefix.make_cold()
    prefix.fetch(Delivery.LAYER_MAJOR)
    assert eventually(lambda: stack.storage.store.files.pinned_count == 0)
