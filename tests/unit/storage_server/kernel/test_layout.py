"""Where a prefix comes to lie: near itself, in few files, and again so when others that lay between have gone."""

from __future__ import annotations

import asyncio
import itertools
import zlib
from pathlib import Path

from storage_server.home.embedded import EmbeddedStore
from storage_server.kernel.data.segments import SEGMENT_EXTENTS_MAX
from tests.support.faulty_disk import FaultyDisk
from tests.support.store_bed import content, get, opened, put

CHUNKS = 512
NBYTES = 8192
WRITERS = 8
"""As many puts of a client are under way at once."""


def content_of(key: str) -> bytes:
    return content(NBYTES, zlib.crc32(key.encode()) % 1000)


async def put_prefix(store: EmbeddedStore, name: str, count: int) -> list[str]:
    """A client's `put_chunks`: in order, several at a time."""
    keys = [f"{name}-{index}" for index in range(count)]
    waiting = iter(keys)

    async def writer() -> None:
        for key in waiting:
            await put(store, key, content_of(key))

    await asyncio.gather(*(writer() for _ in range(WRITERS)))
    return keys


def places(store: EmbeddedStore, keys: list[str]) -> list[tuple[str, int]]:
    sql = "SELECT key, file_id, file_offset FROM objects JOIN extents USING (version)"
    found = {
        key: (file_id, offset) for key, file_id, offset in store.reader.here(lambda db: db.execute(sql).fetchall())
    }
    return [found[key] for key in keys]


async def test_512_chunks_of_one_client_lie_in_two_files_each_near_the_one_before(tmp_path: Path) -> None:
    """A cold delivery opens two files, reads them from front to back, and the next one opens none."""
    disk = FaultyDisk()
    store = await opened(tmp_path, disk)
    await store.objects.create_bucket("k", "bbb")
    keys = await put_prefix(store, "prefix", CHUNKS)
    found = places(store, keys)
    assert len({file_id for file_id, _ in found}) == CHUNKS // SEGMENT_EXTENTS_MAX
    near = [a[0] == b[0] and abs(a[1] - b[1]) <= WRITERS * NBYTES for a, b in itertools.pairwise(found)]
    assert sum(near) >= 0.9 * CHUNKS
    disk.diary.clear()
    for _ in range(2):
        for key in keys:
            await get(store, key)
    assert [call for call, _ in disk.diary].count("open") == 2
    store.close()


async def test_a_prefix_lies_together_again_when_what_lay_between_has_gone(tmp_path: Path) -> None:
    store = await opened(tmp_path)
    await store.objects.create_bucket("k", "bbb")
    kept, gone = ([f"{name}-{index}" for index in range(CHUNKS // 2)] for name in ("kept", "gone"))
    for pair in zip(kept, gone, strict=True):  # one after the other, so that each file has as many of both
        for key in pair:
            await put(store, key, content_of(key))
    store.segments.close()
    assert len({file_id for file_id, _ in places(store, kept)}) == 2
    await store.objects.delete_objects("k", "bbb", gone)
    await store.compactor.compact()
    found = sorted(places(store, kept))
    assert len({file_id for file_id, _ in found}) == 1
    assert [offset for _, offset in found] == [NBYTES * index for index in range(len(kept))]
    for key in kept:
        assert await get(store, key) == content_of(key)
    store.close()
