"""Every ChunkSource keeps the rules: the embedded store's, those of caches before a home, and the wrappers with their
faults switched off.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from descriptors.layout import ChunkLayout
from descriptors.objects import PutRequest
from storage_server.delivery.gather.coming import ComingExtent
from storage_server.home.embedded import EmbeddedStore
from storage_server.kernel.data.extents import extent_place
from storage_server.planning.extent import Extent
from storage_server.planning.forms import Takes
from storage_server.planning.source import ChunkSource
from storage_server.service.storage import EmbeddedStorage
from storage_server.settings import UpstreamSettings
from tests.contract.store.chunk_rules import BUCKET, LAYOUT, CachedSourceRules, ChunkSourceRules, SourceBed
from tests.support.chunks import BytesBody
from tests.support.requests import OWNER
from tests.support.servers import LocalStack
from tests.support.sources import DamagedSource, FailingSource, SlowSource, SourceWrapper
from tests.support.store_bed import opened
from tests.support.stores import embedded_storage
from tests.support.waiting import until

KEY = "OWNERKEY"


class EmbeddedBed:
    """The ChunkSource of an embedded store; `packed_bytes_max` decides whether chunks share a segment."""

    def __init__(self, store: EmbeddedStore) -> None:
        self._store = store
        self.source: ChunkSource = store.chunks

    async def put(self, key: str, data: bytes) -> None:
        await self._store.objects.put_object(KEY, PutRequest(BUCKET, key, len(data)), BytesBody(data))

    async def delete(self, keys: Sequence[str]) -> None:
        await self._store.objects.delete_objects(KEY, BUCKET, list(keys))

    async def rearrange(self) -> None:
        self._store.segments.close()  # a segment that is still written is not compacted
        await self._store.compactor.compact()

    async def damage(self, key: str, offset: int) -> None:
        async with self.source.open_chunks(BUCKET, [key], LAYOUT, prefix_only=False) as (extents,):
            await asyncio.to_thread(change_byte, self._store, extents, offset)


class HomeBed:
    """The ChunkSource of a cache before a home. Chunks are put through this server, and are in its cache."""

    def __init__(self, storage: EmbeddedStorage) -> None:
        assert storage.upstream is not None
        self.home, self.store = storage.upstream, storage.store
        self.source: ChunkSource = self.home.chunks

    async def put(self, key: str, data: bytes) -> None:
        await self.home.objects.put_object(KEY, PutRequest(BUCKET, key, len(data)), BytesBody(data))

    async def delete(self, keys: Sequence[str]) -> None:
        await self.home.objects.delete_objects(KEY, BUCKET, list(keys))

    async def rearrange(self) -> None:
        self.store.segments.close()
        await self.store.compactor.compact()

    async def damage(self, key: str, offset: int) -> None:
        async with self.source.open_chunks(BUCKET, [key], LAYOUT, prefix_only=False) as (extents,):
            await asyncio.to_thread(change_byte, self.store, extents, offset)


class FetchedBed(HomeBed):
    """The same where the cache is empty when a delivery opens its chunks: they come from the home."""

    def __init__(self, storage: EmbeddedStorage) -> None:
        super().__init__(storage)
        self.source = Arrived(self.home.chunks)

    async def put(self, key: str, data: bytes) -> None:
        await super().put(key, data)
        await self.home.forget(BUCKET, [key])

    async def damage(self, key: str, offset: int) -> None:
        """Bring the chunk into the cache, and change it there."""
        async with self.source.open_chunks(BUCKET, [key], LAYOUT, prefix_only=False):
            pass
        await until(lambda: self.home.copy_of(BUCKET, key) is not None)
        await super().damage(key, offset)


class Arrived(SourceWrapper):
    """Chunks are opened when all of them have come. A change of a chunk that is still coming ends its delivery."""

    @asynccontextmanager
    async def open_chunks(
        self, bucket: str, keys: Sequence[str], layout: ChunkLayout, *, prefix_only: bool, reader: Takes | None = None
    ) -> AsyncIterator[list[list[Extent]]]:
        async with self.source.open_chunks(bucket, keys, layout, prefix_only=prefix_only, reader=reader) as chunks:
            arrivals = [each.arrival for chunk in chunks for each in chunk if isinstance(each, ComingExtent)]
            await until(lambda: all(each.is_whole for each in arrivals) or any(each.failure for each in arrivals))
            assert all(each.is_whole for each in arrivals)
            yield chunks


def change_byte(store: EmbeddedStore, extents: Sequence[Extent], offset: int) -> None:
    """Change one byte of a chunk in the file that it lies in."""
    extent = next(e for e in extents if e.object_offset <= offset < e.object_offset + e.nbytes)
    with extent_place(store.settings.data_dir, extent.file_id).path.open("r+b") as file:
        file.seek(extent.offset + offset - extent.object_offset)
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([byte ^ 0x40]))


class TestEmbedded(ChunkSourceRules):
    """Chunks in a segment that they share, and in files of their own."""

    @pytest.fixture(params=[1, LAYOUT.chunk_bytes + 1], ids=["own files", "shared segment"])
    async def bed(self, tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[SourceBed]:
        store = await opened(tmp_path, packed_bytes_max=request.param, compact_live_fraction_max=0.9)
        await store.objects.create_bucket(KEY, BUCKET)
        yield EmbeddedBed(store)
        assert store.files.pinned_count == 0
        store.close()


class TestWrapped(ChunkSourceRules):
    """All wrappers with their faults off, one around the other."""

    @pytest.fixture
    async def bed(self, tmp_path: Path) -> AsyncIterator[SourceBed]:
        store = await opened(tmp_path, packed_bytes_max=LAYOUT.chunk_bytes + 1, compact_live_fraction_max=0.9)
        await store.objects.create_bucket(KEY, BUCKET)
        bed = EmbeddedBed(store)
        bed.source = SlowSource(FailingSource(DamagedSource(store.chunks)))
        yield bed
        assert store.files.pinned_count == 0
        store.close()


@asynccontextmanager
async def before_home(directory: Path, settings: UpstreamSettings, kind: type[HomeBed]) -> AsyncIterator[HomeBed]:
    """A cache before this home."""
    async with embedded_storage(directory, upstream=settings, packed_bytes_max=LAYOUT.chunk_bytes + 1) as storage:
        assert storage.upstream is not None
        await storage.upstream.objects.create_bucket(KEY, BUCKET)
        yield kind(storage)
        files, landing = storage.store.files, storage.upstream.fetches.landing
        await until(lambda: not files.pinned_count and not landing.used_bytes)  # files are written behind deliveries


class TestSharedDirectory(CachedSourceRules):
    """A cache before a directory on a shared file system."""

    @pytest.fixture(params=[HomeBed, FetchedBed], ids=["cached", "fetched"])
    async def bed(self, tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[SourceBed]:
        (tmp_path / "shared").mkdir()
        settings = UpstreamSettings(f"file://{tmp_path}/shared")
        async with before_home(tmp_path / "front", settings, request.param) as bed:
            yield bed


@pytest.mark.needs_server
class TestUpstream(CachedSourceRules):
    """A cache before another S3 service, here another ObjectCache; with landing memory, and without."""

    @pytest.fixture(
        params=[(HomeBed, 0), (FetchedBed, 0), (FetchedBed, 1 << 20)],
        ids=["cached", "fetched into files", "fetched into memory"],
    )
    async def bed(self, tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[SourceBed]:
        kind, landing_bytes = request.param
        with LocalStack(tmp_path / "data") as service:
            settings = UpstreamSettings(service.url, *OWNER, landing_bytes=landing_bytes)
            async with before_home(tmp_path / "front", settings, kind) as bed:
                yield bed
