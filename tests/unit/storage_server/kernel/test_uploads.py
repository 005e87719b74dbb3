"""Multipart uploads, copies and lifecycle rules in the embedded store."""

from __future__ import annotations

import hashlib
import time
from dataclasses import replace

import pytest

from descriptors.errors import CallerError
from descriptors.lifecycle import DAY_S, LifecycleRule
from descriptors.objects import (
    Attributes,
    ChecksumAlgorithm,
    ClaimedPart,
    CompleteRequest,
    CopyRequest,
    ListRequest,
    ObjectInfo,
    PartCopyRequest,
    PartRequest,
    PutRequest,
    RangeSpec,
    ReadRequest,
    UploadRef,
    UploadRequest,
)
from descriptors.units import MIB
from storage_server.home.embedded import EmbeddedStore
from storage_server.kernel import objects as objects_module
from storage_server.kernel import removal
from storage_server.kernel.index import queries
from storage_server.kernel.index.transaction import find_object
from storage_server.kernel.removal import remove_versions
from tests.support.chunks import BytesBody
from tests.support.store_bed import (
    LARGE,
    SMALL,
    content,
    get,
    named_files,
    put,
    settled,
)


async def multipart(store: EmbeddedStore, key: str, parts: dict[int, bytes]) -> ObjectInfo:
    upload = UploadRef("bbb", key, await store.uploads.create_upload("k", UploadRequest("k", "bbb", key)))
    sent = [
        await store.uploads.put_part("k", PartRequest(upload, number, len(data)), BytesBody(data))
        for number, data in sorted(parts.items(), reverse=True)
    ]
    claimed = [ClaimedPart(part.part_number, part.etag) for part in sorted(sent, key=lambda part: part.part_number)]
    return await store.uploads.complete_upload("k", CompleteRequest(upload, claimed))


async def test_multipart_objects_read_as_one_and_by_part(store: EmbeddedStore) -> None:
    parts = {1: content(5 * MIB, 1), 4: content(5 * MIB + 3, 4), 9: content(100, 9)}
    whole = b"".join(parts.values())
    info = await multipart(store, "key", parts)
    assert (info.nbytes, info.part_count, info.etag[-2:]) == (len(whole), 3, "-3")
    assert await get(store, "key") == whole
    edge = 5 * MIB
    assert await get(store, "key", RangeSpec(first=edge - 7, last=edge + 7)) == whole[edge - 7 : edge + 8]
    for number, data in enumerate(parts.values(), start=1):
        assert await get(store, "key", part=number) == data
    with pytest.raises(CallerError, match="InvalidPartNumber"):
        await get(store, "key", part=4)
    await store.objects.delete_object("k", "bbb", "key")
    await settled(store)


async def test_aborted_uploads_and_replaced_parts_leave_nothing(store: EmbeddedStore) -> None:
    upload = UploadRef("bbb", "key", await store.uploads.create_upload("k", UploadRequest("k", "bbb", "key")))
    for seed in range(3):
        await store.uploads.put_part("k", PartRequest(upload, 1, LARGE), BytesBody(content(LARGE, seed)))
    await settled(store)
    assert len(await named_files(store)) == 1
    await store.uploads.abort_upload("k", upload)
    with pytest.raises(CallerError, match="NoSuchUpload"):
        await store.uploads.abort_upload("k", upload)
    await settled(store)
    assert await named_files(store) == set()


async def test_a_completion_repeated_after_a_lost_answer_answers_the_same(store: EmbeddedStore) -> None:
    upload = UploadRef("bbb", "key", await store.uploads.create_upload("k", UploadRequest("k", "bbb", "key")))
    part = await store.uploads.put_part("k", PartRequest(upload, 1, SMALL), BytesBody(content(SMALL)))
    request = CompleteRequest(upload, [ClaimedPart(1, part.etag)])
    first = await store.uploads.complete_upload("k", request)
    assert await store.uploads.complete_upload("k", request) == first


async def test_copies_share_bytes_and_outlive_their_source(store: EmbeddedStore) -> None:
    await put(store, "source", content(LARGE))
    request = CopyRequest(ReadRequest("bbb", "source"), "bbb", "copy", checksum=ChecksumAlgorithm.CRC32C)
    info = await store.objects.copy_object("k", request)
    assert info.checksum is not None
    assert len(await named_files(store)) == 1
    await store.objects.delete_object("k", "bbb", "source")
    await settled(store)
    assert await get(store, "copy") == content(LARGE)
    await store.objects.copy_object("k", replace(request, source=ReadRequest("bbb", "copy"), checksum=None))
    assert await get(store, "copy") == content(LARGE)
    await store.objects.delete_object("k", "bbb", "copy")
    await settled(store)


async def test_a_part_copied_from_a_range_is_that_range(store: EmbeddedStore) -> None:
    data = content(LARGE)
    await put(store, "source", data)
    upload = UploadRef("bbb", "key", await store.uploads.create_upload("k", UploadRequest("k", "bbb", "key")))
    source = ReadRequest("bbb", "source", RangeSpec(first=100, last=70_000))
    part = await store.uploads.copy_part("k", PartCopyRequest(upload, 1, source))
    assert part.etag == hashlib.md5(data[100:70_001]).hexdigest()
    await store.uploads.complete_upload("k", CompleteRequest(upload, [ClaimedPart(1, part.etag)]))
    assert await get(store, "key") == data[100:70_001]


async def test_a_bucket_with_objects_stays_and_one_with_uploads_goes(store: EmbeddedStore) -> None:
    await put(store, "key", content(LARGE))
    with pytest.raises(CallerError, match="BucketNotEmpty"):
        await store.objects.delete_bucket("k", "bbb")
    await store.objects.delete_object("k", "bbb", "key")
    upload = UploadRef("bbb", "key", await store.uploads.create_upload("k", UploadRequest("k", "bbb", "key")))
    await store.uploads.put_part("k", PartRequest(upload, 1, LARGE), BytesBody(content(LARGE)))
    await store.objects.delete_bucket("k", "bbb")
    with pytest.raises(CallerError, match="NoSuchBucket"):
        await store.objects.head_bucket("k", "bbb")
    await settled(store)
    assert await named_files(store) == set()


async def test_a_bucket_of_many_uploads_is_deleted_in_small_changes(
    store: EmbeddedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everybody's writes wait for a change that is under way."""
    monkeypatch.setattr(objects_module, "UPLOADS_AT_ONCE", 3)
    for number in range(7):
        await store.uploads.create_upload("k", UploadRequest("k", "bbb", f"key {number % 2}"))
    before = store.committer.change_count
    await store.objects.delete_bucket("k", "bbb")
    assert store.committer.change_count - before == 8
    assert await store.objects.list_buckets("k") == []


async def test_lifecycle_rules_are_carried_out_and_spare_what_they_do_not_name(store: EmbeddedStore) -> None:
    """Objects by age, tag and size, uploads by age; and nothing before its day has ended."""
    for key, tags in (("logs/old", {}), ("logs/kept", {"keep": "yes"}), ("data/old", {})):
        request = PutRequest("bbb", key, 10, Attributes(tags=tags))
        await store.objects.put_object("k", request, BytesBody(b"x" * 10))
    upload = UploadRef("bbb", "logs/up", await store.uploads.create_upload("k", UploadRequest("k", "bbb", "logs/up")))
    await store.uploads.put_part("k", PartRequest(upload, 1, LARGE), BytesBody(content(LARGE)))
    rules = [
        LifecycleRule("logs", prefix="logs/", smaller_than=11, tags={}, expire_days=2),
        LifecycleRule("tagged", tags={"keep": "no"}, expire_days=1),
        LifecycleRule("off", enabled=False, expire_days=1),
        LifecycleRule("uploads", prefix="logs/", abort_days=1),
    ]
    await store.objects.set_lifecycle("k", "bbb", rules)
    assert await store.objects.get_lifecycle("k", "bbb") == rules
    now_s = time.time()
    assert await store.lifecycle.carry_out("bbb", rules, now_s + 1.0 * DAY_S, DAY_S) == (0, 0)
    assert await store.lifecycle.carry_out("bbb", rules, now_s + 2.0 * DAY_S, DAY_S) == (0, 1)
    assert await store.lifecycle.carry_out("bbb", rules, now_s + 3.0 * DAY_S, DAY_S) == (2, 0)
    assert [entry.key for entry in (await store.objects.list_objects("k", ListRequest("bbb"))).objects] == ["data/old"]
    await settled(store)


async def test_an_object_overwritten_during_the_sweep_stays(store: EmbeddedStore) -> None:
    """What expires is the version that was looked at."""
    await put(store, "key", b"old")
    row = store.reader.here(lambda db: find_object(db, "bbb", "key"))
    assert row is not None
    await put(store, "key", b"new")
    assert await remove_versions(store.change, "bbb", {"key": row.version}) == 0
    assert await get(store, "key") == b"new"


async def test_many_objects_leave_in_changes_of_few_rows(store: EmbeddedStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everybody's writes wait for a change that is under way, also where a cache makes room."""
    monkeypatch.setattr(removal, "EXTENTS_MAX", 3)
    keys = [f"key {number}" for number in range(7)]
    for key in keys:
        await put(store, key, content(SMALL))
    rows = store.reader.here(lambda db: queries.objects(db, "bbb", keys))
    versions = {key: row.version for key, row in zip(keys, rows, strict=True) if row is not None}
    before = store.committer.change_count
    assert await removal.remove_versions(store.change, "bbb", versions | {"none": 1}) == 7
    assert store.committer.change_count - before == 3
    assert await removal.remove_versions(store.change, "bbb", versions) == 0


async def test_a_copied_objects_space_stays_while_the_copy_does(store: EmbeddedStore) -> None:
    await put(store, "source", content(SMALL))
    await put(store, "other", content(SMALL, 1))
    await store.objects.copy_object("k", CopyRequest(ReadRequest("bbb", "source"), "bbb", "copy"))
    await store.objects.delete_object("k", "bbb", "source")
    await put(store, "another", b"a batch later")
    assert await get(store, "copy") == content(SMALL)
