"""The embedded store: published whole or not at all, pinned while read, clean after a crash, honest about bad bytes."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import os
import sqlite3
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from descriptors.errors import CallerError, ErrorCode, ObjectCacheError, ServerError
from descriptors.lifecycle import DAY_S, LifecycleRule
from descriptors.objects import (
    Attributes,
    BodyDigests,
    ByteRange,
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
from storage_server.lifecycle import carry_out
from storage_server.settings import StorageSettings
from storage_server.store.block_checksums import BLOCK_BYTES, BlockChecksums, first_bad_block
from storage_server.store.bodies import BodyReader
from storage_server.store.buffers import BufferShare
from storage_server.store.durability import Durability
from storage_server.store.embedded import EmbeddedStore
from storage_server.store.extents import Extent, ExtentFiles, PinSet
from storage_server.store.io_threads import IoThreads
from storage_server.store.transaction import find_object, remove_versions
from tests.faulty_disk import FaultyDisk
from tests.support import BytesBody

PACKED_BYTES_MAX = 64 * 1024
SMALL, LARGE = 50_000, 200_000


async def opened(directory: Path, disk: FaultyDisk | None = None, **options: object) -> EmbeddedStore:
    chosen = {"packed_bytes_max": PACKED_BYTES_MAX, **options}
    store = EmbeddedStore(StorageSettings(data_dir=directory, **chosen), disk)  # type: ignore[arg-type]
    await store.start()
    return store


@pytest.fixture(params=["strict", "relaxed"])
async def store(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[EmbeddedStore]:
    made = await opened(tmp_path / "data", FaultyDisk(), durability=Durability(request.param))
    await made.create_bucket("k", "bbb")
    yield made
    assert made.files.pinned_count == 0
    made.close()


def disk_of(store: EmbeddedStore) -> FaultyDisk:
    disk = store.files._disk
    assert isinstance(disk, FaultyDisk)
    return disk


async def put(store: EmbeddedStore, key: str, data: bytes, digests: BodyDigests | None = None) -> ObjectInfo:
    return await store.put_object(PutRequest("bbb", key, len(data)), BytesBody(data, digests=digests))


async def get(store: EmbeddedStore, key: str, span: RangeSpec | None = None, part: int | None = None) -> bytes:
    async with store.reads.open_object(ReadRequest("bbb", key, span, part)) as read:
        return b"".join([bytes(piece) async for piece in read.body])


def content(nbytes: int, seed: int = 0) -> bytes:
    return hashlib.shake_128(seed.to_bytes(4, "little")).digest(nbytes)


def files_in(store: EmbeddedStore) -> set[str]:
    return {path.name for path in (store._settings.data_dir / "extents").rglob("*") if path.is_file()}


async def named_files(store: EmbeddedStore) -> set[str]:
    return {row[0] for row in store.reader.here(lambda db: db.execute("SELECT file_id FROM extents").fetchall())}


async def settled(store: EmbeddedStore) -> None:
    """Until only named files, and the segment being written, are left; relaxed durability lets go once a second."""
    for _ in range(400):
        spare = files_in(store) - await named_files(store)
        if all(store._segments.is_written(name) for name in spare):
            return
        await asyncio.sleep(0.02)
    raise AssertionError(f"{spare} are nobody's")


@pytest.mark.parametrize("nbytes", [0, 1, SMALL, PACKED_BYTES_MAX, LARGE, 3 * MIB + 5])
async def test_objects_survive_reopening(tmp_path: Path, nbytes: int) -> None:
    """Packed or in a file of its own, and an empty one."""
    data = content(nbytes)
    for is_first in (True, False):
        store = await opened(tmp_path)
        if is_first:
            await store.create_bucket("k", "bbb")
            info = await put(store, "key", data)
            assert info.etag == hashlib.md5(data).hexdigest()
        assert await get(store, "key") == data
        store.close()


@pytest.mark.parametrize("nbytes", [SMALL, LARGE])
@pytest.mark.parametrize(
    ("digests", "announced", "code"),
    [
        (BodyDigests(sha256="0" * 64), 0, ErrorCode.X_AMZ_CONTENT_SHA256_MISMATCH),
        (BodyDigests(md5="0" * 32), 0, ErrorCode.BAD_DIGEST),
        (None, -1, ErrorCode.INCOMPLETE_BODY),
        (None, 1, ErrorCode.INCOMPLETE_BODY),
        (None, 6 << 30, ErrorCode.ENTITY_TOO_LARGE),
    ],
)
async def test_a_refused_put_leaves_the_old_object_and_no_file(
    store: EmbeddedStore, nbytes: int, digests: BodyDigests | None, announced: int, code: ErrorCode
) -> None:
    await put(store, "key", b"old")
    with pytest.raises(CallerError) as refused:
        await store.put_object(
            PutRequest("bbb", "key", nbytes + announced), BytesBody(content(nbytes), digests=digests)
        )
    assert refused.value.code is code
    assert await get(store, "key") == b"old"
    await settled(store)


@pytest.mark.parametrize("nbytes", [SMALL, LARGE, 2 * MIB])
@pytest.mark.parametrize(
    ("call", "error", "code"),
    [
        ("write", errno.ENOSPC, ErrorCode.INSUFFICIENT_STORAGE),
        ("write", errno.EIO, ErrorCode.INTERNAL_ERROR),
        ("sync", errno.EIO, ErrorCode.INTERNAL_ERROR),
        ("sync", errno.ENOSPC, ErrorCode.INSUFFICIENT_STORAGE),
    ],
)
async def test_a_failing_disk_is_an_error_and_nothing_is_half_written(
    tmp_path: Path, nbytes: int, call: str, error: int, code: ErrorCode
) -> None:
    """The full disk, the failing sync: the client hears of it, the old object stays, and the next put works."""
    disk = FaultyDisk()
    store = await opened(tmp_path / "data", disk)
    await store.create_bucket("k", "bbb")
    await put(store, "key", b"old")
    disk.fail[call] = error
    with pytest.raises(ServerError) as failed:
        await put(store, "key", content(nbytes))
    assert failed.value.code is code
    assert failed.value.retryable
    assert await get(store, "key") == b"old"
    disk.fail.clear()
    await put(store, "other", content(nbytes, 1))
    assert await get(store, "other") == content(nbytes, 1)
    assert await get(store, "key") == b"old"
    await settled(store)
    store.close()


@pytest.mark.parametrize(
    ("call", "error", "code"),
    [
        ("create", errno.EMFILE, ErrorCode.SLOW_DOWN),
        ("create", errno.ENOSPC, ErrorCode.INSUFFICIENT_STORAGE),
        ("sync_directory", errno.EIO, ErrorCode.INTERNAL_ERROR),
    ],
)
async def test_a_file_that_cannot_be_made_is_an_error(
    store: EmbeddedStore, call: str, error: int, code: ErrorCode
) -> None:
    disk_of(store).fail[call] = error
    with pytest.raises(ServerError) as failed:
        await put(store, "key", content(LARGE))
    disk_of(store).fail.clear()
    assert failed.value.code is code
    assert files_in(store) == set()
    await put(store, "key", content(LARGE))


async def test_a_sync_that_failed_once_is_never_believed_again(tmp_path: Path) -> None:
    """After a failed fsync the kernel forgets which pages it lost: the segment is left as it is."""
    disk = FaultyDisk()
    store = await opened(tmp_path / "data", disk)
    await store.create_bucket("k", "bbb")
    await put(store, "before", content(SMALL))
    (first,) = await named_files(store)
    disk.fail["sync"] = errno.EIO
    with pytest.raises(ServerError):
        await put(store, "lost", content(SMALL, 1))
    disk.fail.clear()
    await put(store, "after", content(SMALL, 2))
    assert len(await named_files(store) - {first}) == 1
    assert await get(store, "before") == content(SMALL)
    store.close()


@pytest.mark.parametrize("nbytes", [SMALL, LARGE, 2 * MIB])
async def test_nothing_is_answered_before_its_bytes_and_its_name_are_synced(tmp_path: Path, nbytes: int) -> None:
    """Directory entry, then bytes, then the commit; SQLite syncs its log itself (synchronous=FULL)."""
    disk = FaultyDisk()
    store = await opened(tmp_path / "data", disk)
    await store.create_bucket("k", "bbb")
    assert store._committer.db.execute("PRAGMA synchronous").fetchone() == (2,)
    for index in range(3):
        disk.diary.clear()
        await put(store, f"key-{index}", content(nbytes, index))
        calls = [call for call, _ in disk.diary]
        assert calls[-1] == "sync"
        if "create" in calls:
            assert calls.index("create") < calls.index("sync_directory") < calls.index("sync")
    store.close()


async def test_puts_that_come_together_share_their_syncs(tmp_path: Path) -> None:
    disk = FaultyDisk()
    store = await opened(tmp_path / "data", disk)
    await store.create_bucket("k", "bbb")
    await asyncio.gather(*(put(store, f"key-{index}", content(3000, index)) for index in range(64)))
    assert [call for call, _ in disk.diary].count("sync") < 40
    for index in range(64):
        assert await get(store, f"key-{index}") == content(3000, index)
    store.close()


async def put_many(store: EmbeddedStore) -> None:
    for index in range(400):
        await put(store, f"key-{index}-" + "x" * 900, b"new")


async def test_a_full_index_is_an_error_and_what_is_stored_stays(store: EmbeddedStore) -> None:
    await put(store, "key", b"old")
    store._committer.db.execute("PRAGMA max_page_count=1")
    with pytest.raises(ServerError) as failed:
        await put_many(store)
    assert failed.value.code is ErrorCode.INSUFFICIENT_STORAGE
    assert await get(store, "key") == b"old"
    store._committer.db.execute("PRAGMA max_page_count=1000000")
    await put(store, "key", content(LARGE))
    assert await get(store, "key") == content(LARGE)
    await settled(store)


async def test_short_writes_are_continued(store: EmbeddedStore) -> None:
    disk_of(store).write_bytes_max = 777
    for nbytes in (SMALL, LARGE):
        await put(store, "key", content(nbytes))
        assert await get(store, "key") == content(nbytes)


async def test_a_body_that_breaks_off_leaves_nothing(store: EmbeddedStore) -> None:
    class Broken(BytesBody):
        async def __aiter__(self) -> AsyncIterator[bytes]:
            yield b"12"
            raise CallerError(ErrorCode.INCOMPLETE_BODY, "gone", field="body")

    for nbytes in (5, LARGE):
        with pytest.raises(CallerError):
            await store.put_object(PutRequest("bbb", "key", nbytes), Broken(b""))
    await settled(store)
    assert (await store.reads.list_objects(ListRequest("bbb"))).objects == []


async def test_a_cancelled_put_is_either_stored_whole_or_gone(store: EmbeddedStore) -> None:
    for delay in (0, 0.001, 0.004, 0.01):
        for nbytes in (SMALL, LARGE):
            task = asyncio.create_task(put(store, f"key-{delay}-{nbytes}", content(nbytes)))
            await asyncio.sleep(delay)
            task.cancel()
            await asyncio.wait([task])
    for entry in (await store.reads.list_objects(ListRequest("bbb"))).objects:
        assert await get(store, entry.key) == content(entry.nbytes)
    await settled(store)


@pytest.mark.parametrize("nbytes", [SMALL, 3 * MIB])
async def test_an_open_version_outlives_overwrite_and_delete(store: EmbeddedStore, nbytes: int) -> None:
    await put(store, "key", content(nbytes))
    async with store.reads.open_object(ReadRequest("bbb", "key")) as read:
        await put(store, "key", content(nbytes, 1))
        await store.delete_object("bbb", "key")
        assert b"".join([bytes(piece) async for piece in read.body]) == content(nbytes)
    await settled(store)
    with pytest.raises(CallerError, match="NoSuchKey"):
        await get(store, "key")


async def test_reads_race_with_overwrites_and_never_mix_versions(store: EmbeddedStore) -> None:
    """A file that goes between the index read and the pin sends the reader back to the index."""
    versions = [content(LARGE, seed) for seed in range(30)]
    await put(store, "key", versions[0])

    async def overwrite() -> None:
        for data in versions[1:]:
            await put(store, "key", data)

    writing = asyncio.create_task(overwrite())
    while not writing.done():
        assert await get(store, "key") in versions
    await writing


async def test_segments_are_shared_and_go_with_their_last_object(tmp_path: Path) -> None:
    store = await opened(tmp_path / "data")
    await store.create_bucket("k", "bbb")
    keys = [f"k{index:03}" for index in range(300)]
    for key in keys:
        await put(store, key, key.encode() * 9)
    assert len(files_in(store)) == 2  # 256 extents share a file (CASCADE, III-D)
    await store.delete_objects("bbb", keys[:255])
    await settled(store)
    assert len(files_in(store)) == 2
    await store.delete_objects("bbb", keys[255:256])
    await settled(store)
    assert len(files_in(store)) == 1
    for key in keys[256:]:
        assert await get(store, key) == key.encode() * 9
    await store.delete_objects("bbb", keys)
    store.close()
    store = await opened(tmp_path / "data")
    assert files_in(store) == set()
    store.close()


async def test_what_a_crash_left_is_swept(tmp_path: Path) -> None:
    """Files no row names, and what lies beside them."""
    store = await opened(tmp_path)
    await store.create_bucket("k", "bbb")
    await put(store, "key", b"kept")
    store.close()
    (tmp_path / "extents" / "00" / ("0" * 32)).write_bytes(b"x")
    (tmp_path / "extents" / "zz").mkdir()
    (tmp_path / "extents" / "zz" / "zz-orphan").write_bytes(b"x")
    store = EmbeddedStore(StorageSettings(data_dir=tmp_path))
    assert await store.start() == 2
    assert await get(store, "key") == b"kept"
    assert len(files_in(store)) == 1
    store.close()


async def test_unsynced_bytes_lost_in_a_power_cut_are_gone_and_never_wrong(tmp_path: Path) -> None:
    """Relaxed durability: the index may know of bytes that never reached the disk. They go before anyone asks."""
    store = await opened(tmp_path, durability=Durability.RELAXED)
    await store.create_bucket("k", "bbb")
    await put(store, "synced", content(SMALL))
    store.close()
    store = await opened(tmp_path, durability=Durability.RELAXED)
    await put(store, "whole", content(SMALL, 1))
    await put(store, "torn", content(SMALL, 2))
    for statement in ("SELECT version FROM objects WHERE key = 'torn'",):
        version = store.reader.here(lambda db, sql=statement: db.execute(sql).fetchone()[0])
    row = store.reader.here(
        lambda db: db.execute("SELECT file_id, file_offset FROM extents WHERE version = ?", (version,)).fetchone()
    )
    store.close()
    with sqlite3.connect(tmp_path / "index.sqlite3") as connection:
        connection.execute("UPDATE extents SET synced = 0 WHERE file_id = ?", (row[0],))
    connection.close()
    with (tmp_path / "extents" / row[0][:2] / row[0]).open("r+b") as file:
        file.seek(row[1])
        file.write(bytes(4096))
    store = await opened(tmp_path)
    names = [entry.key for entry in (await store.reads.list_objects(ListRequest("bbb"))).objects]
    assert names == ["synced", "whole"]
    assert await get(store, "whole") == content(SMALL, 1)
    store.close()


async def test_relaxed_durability_becomes_strict_within_a_second_or_two(tmp_path: Path) -> None:
    store = await opened(tmp_path / "data", FaultyDisk(), durability=Durability.RELAXED)
    await store.create_bucket("k", "bbb")
    await put(store, "key", content(SMALL))
    for _ in range(400):
        if not store.reader.here(lambda db: db.execute("SELECT 1 FROM extents WHERE synced = 0").fetchall()):
            break
        await asyncio.sleep(0.02)
    else:
        raise AssertionError("never synced")
    assert "sync" in [call for call, _ in disk_of(store).diary]
    store.close()


def flip(store: EmbeddedStore, offset: int) -> None:
    """One bit of the only file."""
    (name,) = files_in(store)
    path = store._settings.data_dir / "extents" / name[:2] / name
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 0x10]))


@pytest.mark.parametrize("nbytes", [SMALL, LARGE])
async def test_a_flipped_bit_is_an_error_wherever_it_is_read_and_nowhere_else(tmp_path: Path, nbytes: int) -> None:
    store = await opened(tmp_path / "data")
    await store.create_bucket("k", "bbb")
    data = content(nbytes)
    await put(store, "key", data)
    at = 2 * BLOCK_BYTES + 77
    flip(store, at)
    for spec in (None, RangeSpec(first=at, last=at), RangeSpec(first=2 * BLOCK_BYTES, last=2 * BLOCK_BYTES)):
        with pytest.raises(ServerError) as failed:
            await get(store, "key", spec)
        assert failed.value.code is ErrorCode.INTERNAL_ERROR
    before = RangeSpec(first=5, last=2 * BLOCK_BYTES - 1)
    assert await get(store, "key", before) == data[5 : 2 * BLOCK_BYTES]
    assert await get(store, "key", RangeSpec(first=3 * BLOCK_BYTES)) == data[3 * BLOCK_BYTES :]
    store.close()


@pytest.mark.parametrize("damage", ["truncated", "missing"])
async def test_a_file_cut_short_or_gone_is_an_error(tmp_path: Path, damage: str) -> None:
    store = await opened(tmp_path / "data")
    await store.create_bucket("k", "bbb")
    await put(store, "key", content(SMALL))
    (name,) = files_in(store)
    path = store._settings.data_dir / "extents" / name[:2] / name
    if damage == "truncated":
        os.truncate(path, 100)
    else:
        path.unlink()
    with pytest.raises(ServerError) as failed:
        await get(store, "key")
    assert failed.value.code is ErrorCode.INTERNAL_ERROR
    assert not failed.value.retryable
    store.close()


@given(
    nbytes=st.integers(1, 5 * BLOCK_BYTES + 3),
    cuts=st.lists(st.integers(1, 3 * BLOCK_BYTES), max_size=6),
    flipped=st.integers(0, 2**31),
)
@settings(max_examples=100, deadline=None)
def test_block_checksums_do_not_depend_on_pieces_and_find_any_flipped_bit(
    nbytes: int, cuts: list[int], flipped: int
) -> None:
    data = content(nbytes)
    blocks = BlockChecksums()
    at = 0
    for step in [*cuts, nbytes]:
        blocks.update(data[at : at + step])
        at += step
    packed = blocks.packed()
    assert len(packed) == 4 * -(-nbytes // BLOCK_BYTES)
    assert first_bad_block(memoryview(data), packed, 0) is None
    damaged = bytearray(data)
    damaged[flipped % nbytes] ^= 1 << (flipped % 8)
    assert first_bad_block(memoryview(damaged), packed, 0) == flipped % nbytes // BLOCK_BYTES


async def test_open_files_are_bounded_and_reads_go_on(tmp_path: Path) -> None:
    store = await opened(tmp_path, open_files_max=2)
    await store.create_bucket("k", "bbb")
    keys = [f"k{i}" for i in range(6)]
    for index, key in enumerate(keys):
        await put(store, key, content(LARGE, index))
    async with store.reads.open_prefix("bbb", keys, LARGE, prefix_only=False) as chunks:
        for index, (extent,) in enumerate(chunks):
            view = bytearray(8)
            store.files.read_into(extent, 0, memoryview(view))
            assert bytes(view) == content(8, index)
        assert store.files.open_count == 2
    store.close()


def test_pins_are_counted(tmp_path: Path) -> None:
    files = ExtentFiles(tmp_path, 10, FaultyDisk())
    files.add("f")
    first, second = PinSet(files), PinSet(files)
    for pins in (first, second):
        assert files.pin(["f"])
        pins._file_ids = ["f"]
    assert not files.pin(["f", "gone"])
    first.release()
    first.release()
    assert files.pinned_count == 1
    second.release()
    assert files.pinned_count == 0


async def test_unknown_schema_versions_are_not_opened(tmp_path: Path) -> None:
    (await opened(tmp_path)).close()
    with sqlite3.connect(tmp_path / "index.sqlite3") as connection:
        connection.execute("PRAGMA user_version=99")
    connection.close()
    with pytest.raises(RuntimeError, match="schema 99"):
        EmbeddedStore(StorageSettings(data_dir=tmp_path))


async def test_ranges_of_an_object(store: EmbeddedStore) -> None:
    data = content(LARGE)
    await put(store, "key", data)
    for first, last in ((10, 19), (BLOCK_BYTES - 1, BLOCK_BYTES), (0, LARGE), (BLOCK_BYTES, 3 * BLOCK_BYTES - 1)):
        assert await get(store, "key", RangeSpec(first=first, last=last)) == data[first : last + 1]
    assert await get(store, "key", RangeSpec(suffix=5)) == data[-5:]
    for spec in (RangeSpec(first=LARGE), RangeSpec(suffix=0)):
        with pytest.raises(ObjectCacheError, match="InvalidRange"):
            await get(store, "key", spec)


async def multipart(store: EmbeddedStore, key: str, parts: dict[int, bytes]) -> ObjectInfo:
    upload = UploadRef("bbb", key, await store.uploads.create_upload(UploadRequest("k", "bbb", key)))
    sent = [
        await store.uploads.put_part(PartRequest(upload, number, len(data)), BytesBody(data))
        for number, data in sorted(parts.items(), reverse=True)
    ]
    claimed = [ClaimedPart(part.part_number, part.etag) for part in sorted(sent, key=lambda part: part.part_number)]
    return await store.uploads.complete_upload(CompleteRequest(upload, claimed))


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
    await store.delete_object("bbb", "key")
    await settled(store)


async def test_aborted_uploads_and_replaced_parts_leave_nothing(store: EmbeddedStore) -> None:
    upload = UploadRef("bbb", "key", await store.uploads.create_upload(UploadRequest("k", "bbb", "key")))
    for seed in range(3):
        await store.uploads.put_part(PartRequest(upload, 1, LARGE), BytesBody(content(LARGE, seed)))
    await settled(store)
    assert len(await named_files(store)) == 1
    await store.uploads.abort_upload(upload)
    with pytest.raises(CallerError, match="NoSuchUpload"):
        await store.uploads.abort_upload(upload)
    await settled(store)
    assert await named_files(store) == set()


async def test_a_completion_repeated_after_a_lost_answer_answers_the_same(store: EmbeddedStore) -> None:
    upload = UploadRef("bbb", "key", await store.uploads.create_upload(UploadRequest("k", "bbb", "key")))
    part = await store.uploads.put_part(PartRequest(upload, 1, SMALL), BytesBody(content(SMALL)))
    request = CompleteRequest(upload, [ClaimedPart(1, part.etag)])
    first = await store.uploads.complete_upload(request)
    assert await store.uploads.complete_upload(request) == first


async def test_copies_share_bytes_and_outlive_their_source(store: EmbeddedStore) -> None:
    await put(store, "source", content(LARGE))
    request = CopyRequest(ReadRequest("bbb", "source"), "bbb", "copy", checksum=ChecksumAlgorithm.CRC32C)
    info = await store.copy_object(request)
    assert info.checksum is not None
    assert len(await named_files(store)) == 1
    await store.delete_object("bbb", "source")
    await settled(store)
    assert await get(store, "copy") == content(LARGE)
    await store.copy_object(replace(request, source=ReadRequest("bbb", "copy"), checksum=None))
    assert await get(store, "copy") == content(LARGE)
    await store.delete_object("bbb", "copy")
    await settled(store)


async def test_a_part_copied_from_a_range_is_that_range(store: EmbeddedStore) -> None:
    data = content(LARGE)
    await put(store, "source", data)
    upload = UploadRef("bbb", "key", await store.uploads.create_upload(UploadRequest("k", "bbb", "key")))
    source = ReadRequest("bbb", "source", RangeSpec(first=100, last=70_000))
    part = await store.uploads.copy_part(PartCopyRequest(upload, 1, source))
    assert part.etag == hashlib.md5(data[100:70_001]).hexdigest()
    await store.uploads.complete_upload(CompleteRequest(upload, [ClaimedPart(1, part.etag)]))
    assert await get(store, "key") == data[100:70_001]


async def test_a_head_says_which_bytes_a_get_would_bring(store: EmbeddedStore) -> None:
    await put(store, "key", content(1000))
    head = await store.reads.head_object(ReadRequest("bbb", "key", RangeSpec(suffix=10)))
    assert (head.info.nbytes, head.range) == (1000, ByteRange(990, 10))


async def test_a_bucket_with_objects_stays_and_one_with_uploads_goes(store: EmbeddedStore) -> None:
    await put(store, "key", content(LARGE))
    with pytest.raises(CallerError, match="BucketNotEmpty"):
        await store.delete_bucket("bbb")
    await store.delete_object("bbb", "key")
    upload = UploadRef("bbb", "key", await store.uploads.create_upload(UploadRequest("k", "bbb", "key")))
    await store.uploads.put_part(PartRequest(upload, 1, LARGE), BytesBody(content(LARGE)))
    await store.delete_bucket("bbb")
    with pytest.raises(CallerError, match="NoSuchBucket"):
        await store.reads.head_bucket("bbb")
    await settled(store)
    assert await named_files(store) == set()


async def test_lifecycle_rules_are_carried_out_and_spare_what_they_do_not_name(store: EmbeddedStore) -> None:
    """Objects by age, tag and size, uploads by age; and nothing before its day has ended."""
    for key, tags in (("logs/old", {}), ("logs/kept", {"keep": "yes"}), ("data/old", {})):
        request = PutRequest("bbb", key, 10, Attributes(tags=tags))
        await store.put_object(request, BytesBody(b"x" * 10))
    upload = UploadRef("bbb", "logs/up", await store.uploads.create_upload(UploadRequest("k", "bbb", "logs/up")))
    await store.uploads.put_part(PartRequest(upload, 1, LARGE), BytesBody(content(LARGE)))
    rules = [
        LifecycleRule("logs", prefix="logs/", smaller_than=11, tags={}, expire_days=2),
        LifecycleRule("tagged", tags={"keep": "no"}, expire_days=1),
        LifecycleRule("off", enabled=False, expire_days=1),
        LifecycleRule("uploads", prefix="logs/", abort_days=1),
    ]
    await store.set_lifecycle("bbb", rules)
    assert await store.reads.get_lifecycle("bbb") == rules
    now_s = time.time()
    assert await carry_out(store, "bbb", rules, now_s + 1.0 * DAY_S, DAY_S) == (0, 0)
    assert await carry_out(store, "bbb", rules, now_s + 2.0 * DAY_S, DAY_S) == (0, 1)
    assert await carry_out(store, "bbb", rules, now_s + 3.0 * DAY_S, DAY_S) == (2, 0)
    assert [entry.key for entry in (await store.reads.list_objects(ListRequest("bbb"))).objects] == ["data/old"]
    await settled(store)


async def test_an_object_overwritten_during_the_sweep_stays(store: EmbeddedStore) -> None:
    """What expires is the version that was looked at."""
    await put(store, "key", b"old")
    row = store.reader.here(lambda db: find_object(db, "bbb", "key"))
    assert row is not None
    await put(store, "key", b"new")
    assert await store.change(lambda tx: remove_versions(tx, "bbb", {"key": row.version})) == 0
    assert await get(store, "key") == b"new"


async def test_a_deleted_neighbours_space_is_free_at_once_and_its_readers_go_on(tmp_path: Path) -> None:
    """Within a segment that lives on; and so is the space of a body that failed."""
    store = await opened(tmp_path / "data")
    await store.create_bucket("k", "bbb")
    for index in range(8):
        await put(store, f"key-{index}", content(SMALL, index))
    (name,) = files_in(store)
    path = tmp_path / "data" / "extents" / name[:2] / name
    full = path.stat().st_blocks
    async with store.reads.open_object(ReadRequest("bbb", "key-0")) as read:
        await store.delete_objects("bbb", [f"key-{index}" for index in range(6)])
        assert b"".join([bytes(piece) async for piece in read.body]) == content(SMALL)
    for _ in range(200):
        if path.stat().st_blocks < full / 2:
            break
        await asyncio.sleep(0.01)
    left = path.stat().st_blocks
    assert left < full / 2
    with pytest.raises(CallerError):
        await put(store, "refused", content(PACKED_BYTES_MAX), BodyDigests(md5="0" * 32))
    assert path.stat().st_blocks <= left
    for index in (6, 7):
        assert await get(store, f"key-{index}") == content(SMALL, index)
    store.close()


async def test_a_copied_objects_space_stays_while_the_copy_does(store: EmbeddedStore) -> None:
    await put(store, "source", content(SMALL))
    await put(store, "other", content(SMALL, 1))
    await store.copy_object(CopyRequest(ReadRequest("bbb", "source"), "bbb", "copy"))
    await store.delete_object("bbb", "source")
    await put(store, "another", b"a batch later")
    assert await get(store, "copy") == content(SMALL)


async def test_puts_cut_off_while_their_place_is_made_leave_no_file_open(tmp_path: Path) -> None:
    store = await opened(tmp_path / "data")
    await store.create_bucket("k", "bbb")
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    for _ in range(60):
        task = asyncio.create_task(put(store, "key", content(LARGE)))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
    await settled(store)
    assert len(os.listdir("/proc/self/fd")) <= before + 2  # noqa: PTH208
    store.close()


async def test_a_buffer_is_lent_again_only_when_no_thread_fills_it_any_more() -> None:
    """A reader that is cancelled twice, once by its connection and once by its handler."""

    class SlowFiles(ExtentFiles):
        def __init__(self) -> None:
            self.filling = 0

        def read_into(self, extent: Extent, start: int, view: memoryview) -> None:
            self.filling += 1
            time.sleep(0.1)
            self.filling -= 1

    files = SlowFiles()
    io = IoThreads(2)
    reader = BodyReader(files, BufferShare(MIB), io)

    async def read() -> None:
        async with aclosing(reader.pieces([Extent("f", 0, 8 * MIB, b"")], ByteRange(0, 8 * MIB))) as pieces:
            async for _ in pieces:
                raise ConnectionResetError

    task = asyncio.create_task(read())
    await asyncio.sleep(0.15)
    task.cancel()
    await asyncio.wait([task])
    assert files.filling == 0
    io.close()


async def test_the_committer_outlives_what_nobody_expected(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One change fails or succeeds; none waits for ever, and the next is carried out."""
    store = await opened(tmp_path / "data")
    await store.create_bucket("k", "bbb")

    def fail(*_: object) -> None:
        raise MemoryError("injected")

    for name in ("_dispose_dead", "_transact"):
        kept = getattr(store._committer, name)
        setattr(store._committer, name, fail)
        with contextlib.suppress(ServerError):
            await asyncio.wait_for(put(store, "key", b"1"), 10)
        setattr(store._committer, name, kept)
        await asyncio.wait_for(put(store, "key", name.encode()), 10)
        assert await get(store, "key") == name.encode()
    assert "injected" in caplog.text
    store.close()
