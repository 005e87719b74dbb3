"""Every ChunkSource keeps the rules: the embedded store's, and the wrappers with their faults switched off."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from descriptors.objects import PutRequest
from storage_server.gather.source import ChunkSource
from storage_server.store.data.extents import extent_path
from storage_server.store.embedded import EmbeddedStore
from tests.contract.store.chunk_rules import BUCKET, LAYOUT, ChunkSourceRules, SourceBed
from tests.support.chunks import BytesBody
from tests.support.sources import DamagedSource, FailingSource, SlowSource
from tests.support.store_bed import opened

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
        opening = self._store.chunks.open_chunks(BUCKET, [key], LAYOUT, prefix_only=False)
        async with opening as (extents,):
            extent = next(e for e in extents if e.object_offset <= offset < e.object_offset + e.nbytes)
            path = extent_path(self._store.settings.data_dir, extent.file_id)
            with path.open("r+b") as file:
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
