"""Buckets that are caches, and a bounded directory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from descriptors.errors import CallerError, ErrorCode, ServerError
from descriptors.layout import ChunkLayout
from descriptors.objects import (
    BucketCache,
    ClaimedPart,
    CompleteRequest,
    CopyRequest,
    ListRequest,
    PartRequest,
    PutRequest,
    ReadRequest,
    UploadRef,
    UploadRequest,
)
from descriptors.units import MIB
from storage_server.cache.policies.choice import Eviction
from storage_server.kernel.data import space as space_module
from storage_server.kernel.data.disk import Disk
from storage_server.kernel.index import committer, transaction
from storage_server.planning.durability import Durability
from storage_server.service.storage import EmbeddedStorage
from storage_server.settings import CacheSettings, StorageSettings
from tests.faults.bounds import allocated
from tests.support.chunks import BytesBody
from tests.support.waiting import LIMIT_S

KEY = "OWNER"
NBYTES = 256 * 1024
CAPACITY_BYTES = 4 * MIB
CACHE = CacheSettings("cached", CAPACITY_BYTES, Eviction.LRU)
LAYOUT = ChunkLayout(4, 16, NBYTES // 4)


def content(key: str, nbytes: int = NBYTES) -> bytes:
    return (key.encode() * (nbytes // len(key) + 1))[:nbytes]


@asynccontextmanager
async def opened(folder: Path, **settings: Any) -> AsyncIterator[EmbeddedStorage]:
    chosen = {"caches": (CACHE,), "dram_bytes": 0, "shm": False, **settings}
    storage = EmbeddedStorage(StorageSettings(data_dir=folder / "data", **chosen))
    await storage.start()
    try:
        for bucket in ("cached", "kept"):
            try:
                await storage.objects.create_bucket(KEY, bucket)
            except CallerError as error:
                if error.code is not ErrorCode.BUCKET_ALREADY_OWNED:
                    raise
        yield storage
    finally:
        await storage.close()


async def put(storage: EmbeddedStorage, bucket: str, key: str, nbytes: int = NBYTES, **tags: str) -> None:
    request = PutRequest(bucket, key, nbytes)
    await storage.objects.put_object(KEY, request, BytesBody(content(key, nbytes)))
    if tags:
        await storage.objects.set_tags(KEY, bucket, key, {name.replace("_", "-"): tags[name] for name in tags})


async def put_until_full(storage: EmbeddedStorage, folder: Path) -> int:
    """Put objects of a mebibyte into a bucket that is no cache, until one is refused; returns how many were put."""
    for stored in range(64):
        try:
            await put(storage, "kept", f"kept-{stored:02}", MIB)
        except ServerError as error:
            if error.code is not ErrorCode.INSUFFICIENT_STORAGE:
                raise
            return stored
        assert allocated(folder / "data") <= 64 * MIB
    raise AssertionError("nothing was refused")


async def get(storage: EmbeddedStorage, bucket: str, key: str) -> bytes | None:
    try:
        async with storage.objects.open_object(KEY, ReadRequest(bucket, key)) as read:
            return b"".join([bytes(piece) async for piece in read.body])
    except CallerError:
        return None


async def keys_of(storage: EmbeddedStorage, bucket: str) -> list[str]:
    return [info.key for info in (await storage.objects.list_objects(KEY, ListRequest(bucket))).objects]


async def until(is_so: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not await is_so():  # noqa: ASYNC110 - nobody tells of it
            await asyncio.sleep(0)


async def bytes_of(storage: EmbeddedStorage, bucket: str) -> int:
    page = await storage.objects.list_objects(KEY, ListRequest(bucket))
    return sum(info.nbytes for info in page.objects)


async def test_a_bucket_with_a_capacity_never_takes_more(tmp_path: Path) -> None:
    async with opened(tmp_path) as storage:
        for number in range(64):
            await put(storage, "cached", f"key-{number:02}")
            assert await bytes_of(storage, "cached") <= CAPACITY_BYTES
        left = await keys_of(storage, "cached")
        assert 8 <= len(left) <= 16
        assert await get(storage, "cached", "key-63") == content("key-63")
        for key in left:
            assert await get(storage, "cached", key) in (content(key), None)  # None: evicted since

        async def all_are_counted() -> bool:
            return storage.store.evictor.evictions.evicted_count == 64 - len(await keys_of(storage, "cached"))

        await until(all_are_counted)


async def test_parts_of_open_uploads_count_until_they_are_an_object_or_aborted(tmp_path: Path) -> None:
    """They took room without a bound. Parts that are replaced count once, also after a restart."""

    async def put_part(storage: EmbeddedStorage, upload: UploadRef, number: int, nbytes: int = MIB) -> ClaimedPart:
        part = await storage.uploads.put_part(KEY, PartRequest(upload, number, nbytes), BytesBody(bytes(nbytes)))
        return ClaimedPart(number, part.etag)

    async with opened(tmp_path) as storage:
        for number in range(12):
            await put(storage, "cached", f"key-{number:02}")
        open_id = await storage.uploads.create_upload(KEY, UploadRequest(KEY, "cached", "open"))
        upload = UploadRef("cached", "open", open_id)
        for number in (1, 2, 3, 3, 3):
            await put_part(storage, upload, number, MIB // 2)
        assert await bytes_of(storage, "cached") <= CAPACITY_BYTES - 3 * MIB // 2
        with pytest.raises(ServerError, match="the half of the bucket cached"):
            await put_part(storage, upload, 4)
        await put(storage, "cached", "others go on", 2 * MIB)
    async with opened(tmp_path) as storage:
        with pytest.raises(ServerError, match="the half of the bucket cached"):
            await put_part(storage, upload, 4)
        await storage.uploads.abort_upload(KEY, upload)
        open_id = await storage.uploads.create_upload(KEY, UploadRequest(KEY, "cached", "whole"))
        upload = UploadRef("cached", "whole", open_id)
        part = await put_part(storage, upload, 1, 2 * MIB)
        await storage.uploads.complete_upload(KEY, CompleteRequest(upload, [part]))
        assert "whole" in await keys_of(storage, "cached")
        await put(storage, "cached", "other", 3 * MIB)
        assert await keys_of(storage, "cached") == ["other"]
        await storage.objects.delete_object(KEY, "cached", "other")
        open_id = await storage.uploads.create_upload(KEY, UploadRequest(KEY, "cached", "gone with its bucket"))
        await put_part(storage, UploadRef("cached", "gone with its bucket", open_id), 1, 2 * MIB)
        await storage.objects.delete_bucket(KEY, "cached")
        await storage.objects.create_bucket(KEY, "cached")
        await put(storage, "cached", "again", 3 * MIB)


@pytest.mark.parametrize("capacity_bytes", [None, 64 * MIB])
async def test_parts_of_all_caches_together_take_half_of_the_directory(
    tmp_path: Path, capacity_bytes: int | None
) -> None:
    """Parts in caches that only the directory bounds evicted all objects of the others, and then closed it to all."""
    caches = tuple(CacheSettings(bucket, capacity_bytes, Eviction.LRU) for bucket in ("cached", "other", "third"))
    async with opened(tmp_path, caches=caches, disk_bytes=64 * MIB) as storage:

        async def put_parts(bucket: str, count: int) -> UploadRef:
            open_id = await storage.uploads.create_upload(KEY, UploadRequest(KEY, bucket, "open"))
            upload = UploadRef(bucket, "open", open_id)
            for number in range(1, count + 1):
                await storage.uploads.put_part(KEY, PartRequest(upload, number, MIB), BytesBody(bytes(MIB)))
            return upload

        for bucket in ("other", "third"):
            await storage.objects.create_bucket(KEY, bucket)
        for number in range(8):
            await put(storage, "third", f"key-{number}", MIB)
        first = await put_parts("cached", 15)
        with pytest.raises(ServerError, match="the half of the directory that parts"):
            await put_parts("other", 15)
        assert len(await keys_of(storage, "third")) == 8
        await storage.uploads.abort_upload(KEY, first)
        await put_parts("other", 8)


async def test_copies_and_uploads_of_many_count_too(tmp_path: Path) -> None:
    async with opened(tmp_path) as storage:
        await put(storage, "kept", "source", MIB)
        for number in range(12):
            request = CopyRequest(ReadRequest("kept", "source"), "cached", f"copy-{number:02}")
            await storage.objects.copy_object(KEY, request)
            assert await bytes_of(storage, "cached") <= CAPACITY_BYTES
        assert await get(storage, "kept", "source") == content("source", MIB)


@pytest.mark.slow
async def test_room_that_is_waited_for_comes_before_the_next_sync_is_due(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Relaxed durability gives deleted bytes back once their deletion is durable."""
    monkeypatch.setattr(committer, "RELAXED_SYNC_INTERVAL_S", 1000.0)
    cache = CacheSettings("cached", None, Eviction.LRU)
    settings = {"caches": (cache,), "disk_bytes": 64 * MIB, "durability": Durability.RELAXED}
    async with opened(tmp_path, **settings) as storage:
        for number in range(120):
            await put(storage, "cached", f"key-{number:03}", MIB)
        assert storage.store.evictor.evictions.evicted_count > 60


async def test_an_object_larger_than_its_bucket_is_refused(tmp_path: Path) -> None:
    async with opened(tmp_path) as storage:
        with pytest.raises(ServerError, match="the bucket cached") as refused:
            await put(storage, "cached", "key", CAPACITY_BYTES + 1)
        assert refused.value.code is ErrorCode.INSUFFICIENT_STORAGE
        assert await keys_of(storage, "cached") == []


async def test_only_caches_are_evicted_from_a_full_directory(tmp_path: Path) -> None:
    """Other buckets are told that there is no room, and have room again after a delete."""
    cache = CacheSettings("cached", None, Eviction.LRU)
    async with opened(tmp_path, caches=(cache,), disk_bytes=64 * MIB) as storage:
        for number in range(60):
            await put(storage, "cached", f"key-{number:02}", MIB)
            assert allocated(tmp_path / "data") <= 64 * MIB
        held = len(await keys_of(storage, "cached"))
        assert 8 < held < 50
        stored = await put_until_full(storage, tmp_path)
        assert await keys_of(storage, "cached") == []
        assert len(await keys_of(storage, "kept")) == stored > held
        await storage.objects.delete_objects(KEY, "kept", [f"kept-{number:02}" for number in range(8)])
        await put(storage, "kept", "again", MIB)


async def test_held_objects_of_one_cache_leave_the_room_of_the_directory_to_others(tmp_path: Path) -> None:
    """The cache that had most was the only one asked for room, also where pins held all of it."""
    caches = tuple(CacheSettings(bucket, None, Eviction.LRU) for bucket in ("cached", "other", "third"))
    async with opened(tmp_path, caches=caches, disk_bytes=64 * MIB) as storage:
        for bucket in ("other", "third"):
            await storage.objects.create_bucket(KEY, bucket)
        for number in range(18):
            await put(storage, "cached", f"pinned-{number:02}", MIB, objectcache_pin="")
        for number in range(24):
            for bucket in ("other", "third"):
                await put(storage, bucket, f"key-{number:02}", MIB)
        assert len(await keys_of(storage, "cached")) == 18


@pytest.mark.parametrize("capacity_bytes", [None, 64 * MIB])
async def test_pins_in_two_caches_hold_half_of_the_directory_together(
    tmp_path: Path, capacity_bytes: int | None
) -> None:
    """Each cache held half of the directory, so that a third one had no room."""
    caches = tuple(CacheSettings(bucket, capacity_bytes, Eviction.LRU) for bucket in ("cached", "other", "third"))
    async with opened(tmp_path, caches=caches, disk_bytes=64 * MIB) as storage:
        for bucket in ("other", "third"):
            await storage.objects.create_bucket(KEY, bucket)
        for bucket in ("cached", "other"):
            for number in range(30):
                await put(storage, bucket, f"key-{number:02}", MIB, objectcache_pin="")
        for number in range(30):
            await put(storage, "third", f"key-{number:02}", MIB)
        held = [len(await keys_of(storage, bucket)) for bucket in ("cached", "other")]
        assert 20 < sum(held) < 30


async def test_a_bounded_directory_without_a_cache_refuses_at_once(tmp_path: Path) -> None:
    async with opened(tmp_path, caches=(), disk_bytes=64 * MIB) as storage:
        assert 8 < await put_until_full(storage, tmp_path) < 60
        assert await get(storage, "kept", "kept-00") == content("kept-00", MIB)


async def test_objects_without_bytes_cannot_pass_the_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They take space in the index alone. What was stored stays readable, and can be deleted."""
    monkeypatch.setattr(space_module, "ROOM_BYTES", 2 * 54 * MIB)  # so that the index may have 2 MiB

    async def put_nothing() -> None:
        for number in range(5000):
            await put(storage, "kept", f"{number:04}" + "x" * 1000, 0)
            assert allocated(tmp_path / "data") <= 12 * MIB

    async with opened(tmp_path, caches=(), disk_bytes=64 * MIB) as storage:
        with pytest.raises(ServerError, match="no room for the index"):
            await put_nothing()
        assert await get(storage, "kept", "0000" + "x" * 1000) == b""
        await storage.objects.delete_object(KEY, "kept", "0000" + "x" * 1000)


async def test_a_restart_knows_what_was_used(tmp_path: Path) -> None:
    """A chunk that was read last stays although it was put first."""
    async with opened(tmp_path) as storage:
        for number in range(10):
            await put(storage, "cached", f"key-{number}")
        async with storage.store.chunks.open_chunks("cached", ["key-0"], LAYOUT, prefix_only=False):
            pass
        assert await get(storage, "cached", "key-1") is not None
    async with opened(tmp_path) as storage:
        for number in range(10, 18):
            await put(storage, "cached", f"key-{number}")
        await until(lambda: _is_gone(storage, "key-2"))
        left = await keys_of(storage, "cached")
        assert {"key-0", "key-1"} <= set(left)


async def _is_gone(storage: EmbeddedStorage, key: str) -> bool:
    return key not in await keys_of(storage, "cached")


async def test_parents_outlive_children(tmp_path: Path) -> None:
    async with opened(tmp_path) as storage:
        for key in ("d", "c", "b", "a"):
            await put(storage, "cached", key)
        async with storage.store.chunks.open_chunks("cached", ["a", "b", "c", "d"], LAYOUT, prefix_only=False):
            pass
        for number in range(40):
            await put(storage, "cached", f"key-{number}")
            left = set(await keys_of(storage, "cached")) & set("abcd")
            assert left == set("abcd"[: len(left)])
        assert left == set()


async def test_pinned_objects_stay_also_after_a_restart(tmp_path: Path) -> None:
    async with opened(tmp_path) as storage:
        await put(storage, "cached", "pinned", objectcache_pin="")
        for number in range(30):
            await put(storage, "cached", f"key-{number}")
    async with opened(tmp_path) as storage:
        for number in range(30):
            await put(storage, "cached", f"again-{number}")
        assert await get(storage, "cached", "pinned") == content("pinned")
        await storage.objects.set_tags(KEY, "cached", "pinned", {})
        for number in range(30):
            await put(storage, "cached", f"last-{number}")
        assert await get(storage, "cached", "pinned") is None


async def test_objects_of_a_bucket_expire(tmp_path: Path) -> None:
    cache = CacheSettings("cached", ttl_s=0.5)
    async with opened(tmp_path, caches=(cache,)) as storage:
        await put(storage, "cached", "key")
        await put(storage, "kept", "key")
        await until(lambda: _is_gone(storage, "key"))
        assert await get(storage, "kept", "key") == content("key")


async def test_space_comes_back_while_a_reader_holds_what_left(tmp_path: Path) -> None:
    """What is being read keeps its bytes until the reader is done, and the bound holds meanwhile."""
    cache = CacheSettings("cached", None, Eviction.LRU)
    async with opened(tmp_path, caches=(cache,), disk_bytes=64 * MIB) as storage:
        await put(storage, "cached", "read", 9 * MIB)
        async with storage.objects.open_object(KEY, ReadRequest("cached", "read")) as read:
            for number in range(60):
                await put(storage, "cached", f"key-{number:02}", MIB)
                assert allocated(tmp_path / "data") <= 64 * MIB
            assert "read" not in await keys_of(storage, "cached")
            assert b"".join([bytes(piece) async for piece in read.body]) == content("read", 9 * MIB)


async def test_leased_chunks_stay_also_after_a_restart(tmp_path: Path) -> None:
    """A lookup that asks for a lease is a promise; half of the cache can be promised."""
    async with opened(tmp_path) as storage:
        for key in ("a", "b", "x"):
            await put(storage, "cached", key)
        assert await storage.store.chunks.matched("cached", ["a", "b", "c"], 60.0) == 2
        for number in range(30):
            await put(storage, "cached", f"key-{number}")
        assert {"a", "b"} <= set(await keys_of(storage, "cached"))
        assert "x" not in await keys_of(storage, "cached")
    async with opened(tmp_path) as storage:
        for number in range(30):
            await put(storage, "cached", f"again-{number}")
        assert {"a", "b"} <= set(await keys_of(storage, "cached"))


async def test_a_server_ends_also_where_uses_cannot_be_written_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with opened(tmp_path) as storage:
        await put(storage, "cached", "key")
        assert await get(storage, "cached", "key") == content("key")

        def fail(*_: object, **__: object) -> None:
            raise ServerError(ErrorCode.INSUFFICIENT_STORAGE, "no space left on the disk", retryable=True)

        monkeypatch.setattr(transaction, "note_uses", fail)
    assert "not written down" in caplog.text
    monkeypatch.undo()
    async with opened(tmp_path) as storage:
        assert await get(storage, "cached", "key") == content("key")


async def test_a_cache_without_a_size_in_the_settings_keeps_the_one_that_it_was_made_with(
    tmp_path: Path,
) -> None:
    async with opened(tmp_path, caches=()) as storage:
        await storage.objects.create_bucket(KEY, "asked", BucketCache(CAPACITY_BYTES))
    for said_bytes, bytes_then in ((None, CAPACITY_BYTES), (2 * CAPACITY_BYTES, 2 * CAPACITY_BYTES)):
        settings = (CacheSettings("asked", said_bytes), CacheSettings("cached", CAPACITY_BYTES))
        async with opened(tmp_path, caches=settings) as storage:
            assert storage.store.evictor.caches.capacities()["asked"] == bytes_then
            await put(storage, "asked", "chunk")
            assert len(await keys_of(storage, "asked")) == 1
    async with opened(tmp_path, caches=(CacheSettings("asked"),)) as storage:
        for key in await keys_of(storage, "asked"):
            await storage.objects.delete_object(KEY, "asked", key)
        await storage.objects.delete_bucket(KEY, "asked")
        await storage.objects.create_bucket(KEY, "asked")
        assert storage.store.evictor.caches.capacities()["asked"] != CAPACITY_BYTES


async def test_a_bucket_that_a_client_makes_as_a_cache_is_one_from_its_first_object_on(tmp_path: Path) -> None:
    """Also after a restart, until it is deleted; a bucket of its name is then what it is made as."""
    async with opened(tmp_path, caches=()) as storage:
        await storage.objects.create_bucket(KEY, "asked", BucketCache(CAPACITY_BYTES))
        for number in range(32):
            await put(storage, "asked", f"chunk-{number:02}")
            await put(storage, "kept", f"chunk-{number:02}")
            assert await bytes_of(storage, "asked") <= CAPACITY_BYTES
        assert len(await keys_of(storage, "asked")) < 32
        assert len(await keys_of(storage, "kept")) == 32
    async with opened(tmp_path, caches=()) as storage:
        assert (await storage.objects.head_bucket(KEY, "asked")).cache == BucketCache(CAPACITY_BYTES)
        assert storage.store.evictor.caches.capacities() == {"asked": CAPACITY_BYTES}
        for number in range(32, 48):
            await put(storage, "asked", f"chunk-{number:02}")
            assert await bytes_of(storage, "asked") <= CAPACITY_BYTES
        assert await get(storage, "asked", "chunk-47") == content("chunk-47")
        for key in await keys_of(storage, "asked"):
            await storage.objects.delete_object(KEY, "asked", key)
        await storage.objects.delete_bucket(KEY, "asked")
        assert storage.store.evictor.caches.capacities() == {}
        await storage.objects.create_bucket(KEY, "asked")
        for number in range(32):
            await put(storage, "asked", f"chunk-{number:02}")
        assert len(await keys_of(storage, "asked")) == 32
        assert (await storage.objects.head_bucket(KEY, "asked")).cache is None


async def test_a_cache_without_a_size_has_what_the_file_system_offers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It gives room up that others take there, and keeps nobody else from the rest."""
    free_bytes = 10 * MIB
    monkeypatch.setattr(Disk, "free_bytes", lambda self, path: free_bytes)
    async with opened(tmp_path, caches=()) as storage:
        await storage.objects.create_bucket(KEY, "asked", BucketCache())
        assert storage.store.evictor.caches.capacities() == {"asked": 8 * MIB}
        assert storage.store.space.bound_bytes is None
        for number in range(12):
            await put(storage, "asked", f"chunk-{number:02}")
        free_bytes = 2 * MIB
        await put(storage, "asked", "last")
        assert (storage.store.evictor.caches.capacities()["asked"] or 0) <= 0.8 * (3.25 + 2) * MIB
        free_bytes = 0

        async def has_given_up() -> bool:
            return await bytes_of(storage, "asked") <= 3 * MIB

        await until(has_given_up)
    async with opened(tmp_path, caches=(), disk_bytes=64 * MIB) as storage:
        assert storage.store.evictor.caches.capacities() == {"asked": None}, "disk_bytes bounds it"


async def test_caches_are_few_and_one_key_has_a_part_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each commit looks at all of them."""
    monkeypatch.setattr(transaction, "CACHES_MAX", 3)
    monkeypatch.setattr(transaction, "CACHES_OF_KEY_MAX", 2)
    async with opened(tmp_path, caches=()) as storage:

        async def make(key: str, bucket: str) -> str:
            try:
                await storage.objects.create_bucket(key, bucket, BucketCache())
            except CallerError as error:
                return error.code.value
            return "made"

        made = [await make(*each) for each in (("A", "a1"), ("A", "a2"), ("A", "a3"), ("B", "b1"), ("C", "c1"))]
        assert made == ["made", "made", "TooManyBuckets", "made", "TooManyBuckets"]
        await storage.objects.create_bucket("C", "c1")
        await storage.objects.delete_bucket("A", "a1")
        assert await make("A", "a3") == "made"
        assert sorted(storage.store.evictor.caches.capacities()) == ["a2", "a3", "b1"]


async def test_settings_hold_for_a_bucket_whatever_a_client_says_of_it(tmp_path: Path) -> None:
    async with opened(tmp_path) as storage:
        await storage.objects.delete_bucket(KEY, "cached")
        await storage.objects.create_bucket(KEY, "cached", BucketCache(CAPACITY_BYTES * 100))
        assert storage.store.evictor.caches.capacities() == {"cached": CAPACITY_BYTES}
