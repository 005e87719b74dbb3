"""Deduplication: equal bytes of one tenant are stored once, and every key shows what it showed."""

from __future__ import annotations

import asyncio
import math
import sqlite3
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import pytest

from descriptors.errors import ErrorCode, ServerError
from descriptors.objects import (
    ClaimedPart,
    CompleteRequest,
    CopyRequest,
    PartRequest,
    PutRequest,
    ReadRequest,
    UploadRef,
    UploadRequest,
)
from descriptors.units import MIB
from storage_server.cache import evictor
from storage_server.home.embedded import EmbeddedStore
from storage_server.kernel.data.extents import extent_place
from storage_server.kernel.index import queries
from storage_server.kernel.upkeep import dedup, dedup_rows
from storage_server.kernel.upkeep.scrub import scrub
from storage_server.planning.block_checksums import BlockChecksums
from storage_server.planning.durability import Durability
from storage_server.planning.extent import Extent
from storage_server.settings import Dedup, StorageSettings, UpstreamSettings
from tests.support.chunks import BytesBody
from tests.support.sources import resolved
from tests.support.store_bed import LARGE, SMALL, content, get, opened, put
from tests.support.waiting import until

Location = tuple[str, int]


async def store_with_bucket(directory: Path, **options: object) -> EmbeddedStore:
    store = await opened(directory, **options)
    await store.objects.create_bucket("k", "bbb")
    return store


def locations(store: EmbeddedStore) -> list[Location]:
    """Where the extents lie, by the age of their rows."""
    sql = "SELECT file_id, file_offset FROM extents WHERE file_id <> '' ORDER BY version, part_number"
    return store.reader.here(lambda db: db.execute(sql).fetchall())


async def share(store: EmbeddedStore) -> None:
    await store.deduplicator.share_new(math.inf)


async def put_in(store: EmbeddedStore, bucket: str, key: str, data: bytes) -> None:
    await store.objects.put_object("k", PutRequest(bucket, key, len(data)), BytesBody(data))


@pytest.mark.parametrize("nbytes", [1, SMALL, LARGE, 3 * dedup.STEP_BYTES + 5])
async def test_equal_bytes_lie_in_one_place(tmp_path: Path, nbytes: int) -> None:
    store = await store_with_bucket(tmp_path)
    data = content(nbytes)
    for key in ("one", "two", "three"):
        await put(store, key, data)
    await put(store, "other", content(nbytes, 1))
    before_bytes = store.space.kept_bytes
    first, *_, other = locations(store)
    await share(store)
    assert locations(store) == [first, first, first, other]
    assert [await get(store, key) for key in ("one", "two", "three", "other")] == [data] * 3 + [content(nbytes, 1)]
    assert store.deduplicator.shared_count == 2
    assert before_bytes - store.space.kept_bytes == store.deduplicator.shared_bytes > 0
    await store.deduplicator.count()
    found = store.deduplicator.stored
    assert (found.named_bytes, found.stored_bytes, found.ratio) == (4 * nbytes, 2 * nbytes, 2.0)
    assert all(checked.damage is None for checked in scrub(tmp_path))
    store.close()


@pytest.mark.parametrize("way", ["shared", "deleted"])
async def test_space_in_a_segment_that_is_still_written_comes_back(tmp_path: Path, way: str) -> None:
    """For a moment no row names the segment; then it gets new ones. What was freed must not count as dying for ever."""
    store = await store_with_bucket(tmp_path)
    await put(store, "first", content(4096))
    store.segments.close()
    keys = [f"key-{index}" for index in range(5)]
    for key in keys:
        await put(store, key, content(4096))
    if way == "shared":
        await share(store)
    else:
        await store.objects.delete_objects("k", "bbb", keys)
    await put(store, "late", content(4096, 1))
    await until(lambda: not store.space.dying_bytes)
    assert (store.space.dying_bytes, store.space.extent_bytes) == (0, 2 * 4096)
    assert [await get(store, key) for key in ("first", "late")] == [content(4096), content(4096, 1)]
    store.close()


async def test_the_scan_finds_duplicates_in_any_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It goes by key, and the newer object may have the smaller one."""
    monkeypatch.setattr(dedup, "VERSIONS_AT_ONCE", 1)
    store = await store_with_bucket(tmp_path, dedup=Dedup.OFF)
    for key in ("b", "a", "c"):
        await put(store, key, content(SMALL))
    store.close()
    store = await opened(tmp_path)
    await share(store)
    assert len(set(locations(store))) == 1
    store.close()


async def test_the_bytes_stay_until_their_last_key_goes(tmp_path: Path) -> None:
    store = await store_with_bucket(tmp_path)
    data = content(LARGE)
    await put(store, "one", data)
    await put(store, "two", data)
    await share(store)
    await store.objects.delete_object("k", "bbb", "one")
    assert await get(store, "two") == data
    await put(store, "two", b"something else")
    assert await get(store, "two") == b"something else"
    await until(lambda: store.space.extent_bytes < LARGE)
    store.close()


async def test_a_tenant_shares_with_nobody_else(tmp_path: Path) -> None:
    """Two buckets of one owner share, and two owners do not; nor do buckets, where that is the scope."""
    data = content(SMALL)
    for scope, expected in ((Dedup.OWNER, [0, 0, 2]), (Dedup.BUCKET, [0, 1, 2])):
        store = await opened(tmp_path / scope.value, dedup=scope)
        for owner, bucket in (("k", "aaa"), ("k", "bbb"), ("other", "ccc")):
            await store.objects.create_bucket(owner, bucket)
            await put_in(store, bucket, "key", data)
        before = locations(store)
        await share(store)
        assert locations(store) == [before[at] for at in expected]
        store.close()


async def test_switched_off_it_only_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dedup, "TICK_S", 0.01)
    store = await store_with_bucket(tmp_path, dedup=Dedup.OFF)
    await put(store, "one", content(SMALL))
    await put(store, "two", content(SMALL))
    await store.objects.copy_object("k", CopyRequest(ReadRequest("bbb", "one"), "bbb", "copy"))
    running = asyncio.create_task(store.deduplicator.run(math.inf))
    await until(lambda: store.deduplicator.stored.named_bytes > 0)
    running.cancel()
    await asyncio.wait([running])
    assert store.deduplicator.stored.ratio == 1.5
    assert len(set(locations(store))) == 2
    store.close()


def with_equal_checksum(data: bytes, offset: int) -> bytes:
    """Other bytes of the same CRC-32C: its polynomial, added anywhere, changes nothing."""
    polynomial = 0x11EDC6F41
    delta = bytearray(5)
    for index in range(33):
        delta[index // 8] |= (polynomial >> (32 - index) & 1) << index % 8
    changed = bytearray(data)
    for index, value in enumerate(delta):
        changed[offset + index] ^= value
    return bytes(changed)


def checksums(data: bytes) -> bytes:
    words = BlockChecksums()
    words.update(data)
    return words.packed()


async def test_bytes_of_equal_checksums_are_compared(tmp_path: Path) -> None:
    store = await store_with_bucket(tmp_path)
    data = content(SMALL)
    forged = with_equal_checksum(data, 1234)
    assert forged != data
    assert checksums(forged) == checksums(data)
    await put(store, "one", data)
    await put(store, "two", forged)
    await share(store)
    assert len(set(locations(store))) == 2
    assert (await get(store, "one"), await get(store, "two")) == (data, forged)
    store.close()


@pytest.mark.parametrize("damaged", [0, 1], ids=["old", "new"])
async def test_damaged_bytes_are_not_shared(tmp_path: Path, damaged: int) -> None:
    store = await store_with_bucket(tmp_path)
    data = content(LARGE)
    await put(store, "one", data)
    await put(store, "two", data)
    file_id, offset = locations(store)[damaged]
    with extent_place(tmp_path, file_id).path.open("r+b") as file:
        file.seek(offset + 100_000)
        file.write(b"garbage")
    await share(store)
    assert len(set(locations(store))) == 2
    assert await get(store, ["two", "one"][damaged]) == data
    with pytest.raises(ServerError):
        await get(store, ["one", "two"][damaged])
    store.close()


async def test_what_was_stored_before_is_shared_after_a_restart(tmp_path: Path) -> None:
    """More than is looked at in one go; a second start finds nothing to do."""
    store = await store_with_bucket(tmp_path, dedup=Dedup.OFF)
    count = dedup.VERSIONS_AT_ONCE + 10
    await asyncio.gather(*(put(store, f"key-{index:03}", content(100, index % 5)) for index in range(count)))
    store.close()
    store = await opened(tmp_path)
    await share(store)
    assert len(set(locations(store))) == 5
    assert [await get(store, f"key-{index:03}") for index in range(20)] == [content(100, at % 5) for at in range(20)]
    store.close()
    store = await opened(tmp_path)
    await share(store)
    assert store.deduplicator.shared_count == 0
    store.close()


async def test_an_object_of_many_parts_is_shared_in_several_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A transaction over all parts of many uploads would hold up every writer."""
    monkeypatch.setattr(dedup_rows, "EXTENTS_AT_ONCE", 3)
    store = await store_with_bucket(tmp_path)
    bodies = [content(5 * MIB, 1), content(5 * MIB, 2), content(5 * MIB, 3), content(100)]
    for key in ("one", "two"):
        upload_id = await store.uploads.create_upload("k", UploadRequest("k", "bbb", key))
        ref = UploadRef("bbb", key, upload_id)
        claimed = []
        for number, data in enumerate(bodies, 1):
            info = await store.uploads.put_part("k", PartRequest(ref, number, len(data)), BytesBody(data))
            claimed.append(ClaimedPart(number, info.etag))
        await store.uploads.complete_upload("k", CompleteRequest(ref, claimed))
    await share(store)
    found = locations(store)
    assert found[:4] == found[4:]
    assert store.deduplicator.shared_count == 4
    assert await get(store, "two") == b"".join(bodies)
    store.close()


async def test_sharing_forgets_only_what_it_moved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where every other key lies stays in memory."""
    store = await store_with_bucket(tmp_path)
    for key, seed in (("one", 1), ("two", 1), ("other", 2)):
        await put(store, key, content(SMALL, seed))
    keys = ["one", "two", "other"]
    await resolved(store.objects.prefixes, "bbb", keys)
    await share(store)
    looked_up: list[str] = []
    prefix = queries.prefix

    def recorded(
        db: sqlite3.Connection, bucket: str, keys: Sequence[str], extents_max: int
    ) -> list[list[Extent] | None]:
        looked_up.extend(keys)
        return prefix(db, bucket, keys, extents_max)

    monkeypatch.setattr(queries, "prefix", recorded)
    one, two, _ = await resolved(store.objects.prefixes, "bbb", keys)
    assert one == two
    assert looked_up == ["two"]
    store.close()


async def test_what_comes_too_fast_is_found_in_the_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dedup, "NEWS_MAX", 2)
    monkeypatch.setattr(dedup, "SCAN_INTERVAL_S", 0.0)
    store = await store_with_bucket(tmp_path)
    await share(store)
    await asyncio.gather(*(put(store, f"key-{index}", content(SMALL)) for index in range(9)))
    await share(store)
    assert len(set(locations(store))) == 1
    store.close()


async def test_parts_of_uploads_share_when_the_upload_is_complete(tmp_path: Path) -> None:
    store = await store_with_bucket(tmp_path)
    part = content(5 << 20)
    await put(store, "whole", part)
    upload_id = await store.uploads.create_upload("k", UploadRequest("k", "bbb", "parts"))
    ref = UploadRef("bbb", "parts", upload_id)
    claimed = []
    for number, data in ((1, part), (2, b"end")):
        info = await store.uploads.put_part("k", PartRequest(ref, number, len(data)), BytesBody(data))
        claimed.append(ClaimedPart(number, info.etag))
    await share(store)
    assert len(set(locations(store))) == 3
    await store.uploads.complete_upload("k", CompleteRequest(ref, claimed))
    await share(store)
    first, second, third = locations(store)
    assert first == second != third
    assert await get(store, "parts") == part + b"end"
    assert await get(store, "parts", part=2) == b"end"
    store.close()


async def test_a_copy_shares_its_place_from_the_start(tmp_path: Path) -> None:
    store = await store_with_bucket(tmp_path)
    await put(store, "older", content(SMALL))
    await put(store, "one", content(SMALL))
    await store.objects.copy_object("k", CopyRequest(ReadRequest("bbb", "one"), "bbb", "copy"))
    await share(store)
    assert len(set(locations(store))) == 1
    assert await get(store, "copy") == content(SMALL)
    store.close()


async def test_unsynced_bytes_wait(tmp_path: Path) -> None:
    """Under relaxed durability a row must not name bytes that a power cut may take, in place of bytes that are safe."""
    store = await store_with_bucket(tmp_path, durability=Durability.RELAXED)
    await put(store, "one", content(SMALL))
    await put(store, "two", content(SMALL))
    await share(store)
    assert len(set(locations(store))) == 2
    store.committer.sync_soon()
    await until(
        lambda: not store.reader.here(lambda db: db.execute("SELECT 1 FROM extents WHERE synced = 0").fetchall())
    )
    await share(store)
    assert len(set(locations(store))) == 1
    store.close()


async def test_a_reader_of_the_new_bytes_reads_to_the_end(tmp_path: Path) -> None:
    store = await store_with_bucket(tmp_path)
    data = content(4 << 20)
    await put(store, "one", data)
    await put(store, "two", data)
    async with store.objects.open_object("k", ReadRequest("bbb", "two")) as read:
        pieces = aiter(read.body)
        begun = bytes(await anext(pieces))
        await share(store)
        assert len(set(locations(store))) == 1
        assert begun + b"".join([bytes(piece) async for piece in pieces]) == data
    store.close()


async def deleted(store: EmbeddedStore, key: str) -> None:
    await store.objects.delete_object("k", "bbb", key)


async def overwritten(store: EmbeddedStore, key: str) -> None:
    await put(store, key, b"new")


async def compacted(store: EmbeddedStore, _: str) -> None:
    store.segments.close()
    await store.compactor.compact()


@pytest.mark.parametrize("change", [deleted, overwritten, compacted])
@pytest.mark.parametrize("key", ["old", "new"])
async def test_what_changes_while_bytes_are_compared_stays_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[EmbeddedStore, str], Awaitable[None]], key: str
) -> None:
    store = await store_with_bucket(tmp_path)
    data = {name: content(SMALL) for name in ("old", "new")}
    for name in data:
        await put(store, name, data[name])
    await put(store, "beside", content(SMALL, 1))
    compare = dedup.Deduplicator._are_equal

    async def compare_and_change(
        self: dedup.Deduplicator, extents: Sequence[Extent], since: int, bytes_per_s: float
    ) -> bool:
        are_equal = await compare(self, extents, since, bytes_per_s)
        await change(store, key)
        return are_equal

    monkeypatch.setattr(dedup.Deduplicator, "_are_equal", compare_and_change)
    await share(store)
    if change is not compacted:
        data[key] = b"new" if change is overwritten else b""
    expected = {name: each for name, each in data.items() if each}
    assert {name: await get(store, name) for name in expected} == expected
    assert await get(store, "beside") == content(SMALL, 1)
    assert all(checked.damage is None for checked in scrub(tmp_path))
    store.close()


async def test_compaction_keeps_the_ids(tmp_path: Path) -> None:
    store = await store_with_bucket(tmp_path, compact_live_fraction_max=0.9)
    await put(store, "one", content(SMALL))
    await put(store, "gap", content(SMALL, 1))
    await share(store)
    await store.objects.delete_object("k", "bbb", "gap")
    await compacted(store, "")
    await put(store, "two", content(SMALL))
    await share(store)
    assert len(set(locations(store))) == 1
    assert await get(store, "one") == await get(store, "two") == content(SMALL)
    store.close()


@pytest.mark.slow
async def test_a_full_cache_keeps_more_keys_than_it_has_bytes_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its bound is on what the files take."""
    monkeypatch.setattr(evictor, "TICK_S", 0.01)
    upstream = UpstreamSettings("http://127.0.0.1:9", "k", "s")
    store = await store_with_bucket(tmp_path, upstream=upstream, disk_bytes=64 * MIB, packed_bytes_max=8 * MIB)
    step, used = store.evictor._step, list[int]()

    async def noting() -> None:
        await step()
        used.append(store.space.used_bytes)

    monkeypatch.setattr(store.evictor, "_step", noting)
    running = asyncio.create_task(store.evictor.run())
    data = content(4 * MIB)
    for index in range(30):
        await put(store, f"key-{index:02}", data)
        await share(store)
    await put(store, "last", content(8 * MIB, 1))
    used.clear()
    await until(lambda: len(used) >= 20)
    assert max(used) <= 64 * MIB
    assert store.evictor.evictions.evicted_count == 0
    assert [await get(store, f"key-{index:02}") for index in (0, 15, 29)] == [data] * 3
    running.cancel()
    await asyncio.wait([running])
    store.close()


async def test_duplicates_are_looked_up_in_the_index(tmp_path: Path) -> None:
    """A scan of all extents for each new one would take minutes in a large store."""
    store = await store_with_bucket(tmp_path)
    queries: list[str] = []

    def plan_of(db: sqlite3.Connection) -> list[str]:
        db.set_trace_callback(queries.append)
        extent = Extent("f", 0, 10, b"abcd")
        dedup_rows.older_duplicates(db, [dedup_rows.NewExtent("bbb", "key", 5, 1, extent, bytes(16))])
        db.set_trace_callback(None)
        return [row[3] for query in queries for row in db.execute(f"EXPLAIN QUERY PLAN {query}")]

    (plan,) = store.reader.here(plan_of)
    assert "USING INDEX extents_by_content (content=?" in plan
    store.close()


async def test_a_failing_index_costs_nothing_but_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dedup, "TICK_S", 0.01)
    monkeypatch.setattr(dedup, "SCAN_INTERVAL_S", 0.0)
    store = await store_with_bucket(tmp_path)
    await put(store, "one", content(SMALL))
    await put(store, "two", content(SMALL))
    settle, failures = dedup.settle, [ServerError(ErrorCode.SLOW_DOWN, "busy"), RuntimeError("a fault")]

    def failing(*arguments: object, **options: object) -> tuple[int, int]:
        if failures:
            raise failures.pop()
        return settle(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(dedup, "settle", failing)
    running = asyncio.create_task(store.deduplicator.run(math.inf))
    await until(lambda: len(set(locations(store))) == 1)
    assert not failures
    await put(store, "three", content(SMALL))
    await until(lambda: len(set(locations(store))) == 1)
    running.cancel()
    await asyncio.wait([running])
    assert len(set(locations(store))) == 1
    assert await get(store, "three") == content(SMALL)
    store.close()


def test_ids_depend_on_scope_length_and_checksums() -> None:
    extent = Extent("f", 0, 100, b"abcd")
    ids = {
        dedup_rows.content_id(scope, each)
        for scope in ("owner a", "bucket a", "owner b")
        for each in (extent, Extent("f", 0, 101, b"abcd"), Extent("f", 0, 100, b"abce"))
    }
    assert len(ids) == 9
    assert {len(each) for each in ids} == {dedup_rows.CONTENT_ID_BYTES}
    assert dedup_rows.content_id("owner a", Extent("g", 4096, 100, b"abcd")) in ids


def test_a_wrong_rate_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="dedup_bytes_per_s"):
        StorageSettings(data_dir=tmp_path, dedup_bytes_per_s=0)


async def test_a_restart_reads_no_rows_of_what_was_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only where something came that was not is everything looked through."""
    monkeypatch.setattr(dedup, "MARK_INTERVAL_S", 0.0)
    looked: list[object] = []
    real = dedup_rows.unknown_versions

    def counted(db: sqlite3.Connection, after: tuple[str, str], limit: int) -> object:
        looked.append(after)
        return real(db, after, limit)

    monkeypatch.setattr(dedup, "unknown_versions", counted)
    store = await store_with_bucket(tmp_path)
    data = content(SMALL)
    await put(store, "one", data)
    for _ in range(3):
        await share(store)
    store.close()
    looked.clear()
    store = await opened(tmp_path)
    await share(store)
    assert looked == []
    store.close()
    store = await opened(tmp_path)
    await put(store, "two", data)
    store.close()  # before anybody looked at it
    store = await opened(tmp_path)
    await share(store)
    assert looked
    assert len(set(locations(store))) == 1
    store.close()


async def test_an_open_upload_is_not_taken_as_looked_at(tmp_path: Path) -> None:
    """Its parts have an old version when it is completed."""
    store = await store_with_bucket(tmp_path)
    before = store.reader.here(dedup_rows.newest_version)
    await store.uploads.create_upload("k", UploadRequest("k", "bbb", "large"))
    await put(store, "one", content(SMALL))
    assert store.reader.here(dedup_rows.newest_version) == before
    store.close()
