"""The embedded store on disks that fail, fill up and lie, and after a crash."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import sqlite3
import threading
from contextlib import aclosing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from descriptors.errors import ErrorCode, ServerError
from descriptors.objects import (
    ByteRange,
    ListRequest,
    RangeSpec,
)
from descriptors.units import MIB
from objectcache.adapters.beneath import Beneath
from storage_server.home.embedded import EmbeddedStore
from storage_server.kernel.data.bodies import BodyReader
from storage_server.kernel.data.buffers import BufferShare
from storage_server.kernel.data.extents import ExtentFiles
from storage_server.kernel.data.file_threads import FileThreads
from storage_server.kernel.data.open_files import OpenFiles
from storage_server.planning.block_checksums import BLOCK_BYTES, BlockChecksums, first_bad_block
from storage_server.planning.durability import Durability
from storage_server.planning.extent import Extent
from storage_server.settings import StorageSettings
from tests.support import waiting
from tests.support.faulty_disk import FaultyDisk
from tests.support.store_bed import (
    LARGE,
    SMALL,
    content,
    disk_of,
    files_in,
    flip,
    get,
    named_files,
    opened,
    put,
    settled,
)


async def put_many(store: EmbeddedStore) -> None:
    for index in range(400):
        await put(store, f"key-{index}-" + "x" * 900, b"new")


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
    await store.objects.create_bucket("k", "bbb")
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


@pytest.mark.parametrize("set_aside", [True, False])
def test_a_leftover_that_is_deleted_while_leftovers_are_swept_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, set_aside: bool
) -> None:
    """Recovery frees files, and the committer deletes them when it comes to them."""
    leftovers = [tmp_path / "extents" / name[:2] / name for name in ("0" * 32, "1" * 32)]
    for path in leftovers:
        path.parent.mkdir(parents=True)
        path.touch()
    rename, unlink = Beneath.rename, Beneath.unlink

    def delete_first(place: Beneath) -> None:
        if place.path == leftovers[0]:
            place.path.unlink()

    def renamed(place: Beneath, to: Beneath) -> None:
        delete_first(place)
        rename(place, to)

    def unlinked(place: Beneath) -> None:
        delete_first(place)
        unlink(place)

    monkeypatch.setattr(Beneath, "rename", renamed)
    monkeypatch.setattr(Beneath, "unlink", unlinked)
    files = ExtentFiles(tmp_path, 10, FaultyDisk())
    assert files.sweep(set(), set_aside=set_aside) == 2
    assert not any(path.exists() for path in leftovers)
    assert (tmp_path / "set-aside" / leftovers[1].name).exists() is set_aside


async def test_a_sync_that_failed_once_is_never_believed_again(tmp_path: Path) -> None:
    """After a failed fsync the kernel forgets which pages it lost: the segment is left as it is."""
    disk = FaultyDisk()
    store = await opened(tmp_path / "data", disk)
    await store.objects.create_bucket("k", "bbb")
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
    await store.objects.create_bucket("k", "bbb")
    assert store.committer.db.execute("PRAGMA synchronous").fetchone() == (2,)
    for index in range(3):
        disk.diary.clear()
        await put(store, f"key-{index}", content(nbytes, index))
        calls = [call for call, _ in disk.diary]
        assert calls[-1] == "sync"
        if "create" in calls:
            created = calls.index("create")
            assert ("sync_directory", "extents") not in disk.diary[created:]  # its directory is there before
            assert created < calls.index("sync_directory", created) < calls.index("sync")
    store.close()


async def test_puts_that_come_together_share_their_syncs(tmp_path: Path) -> None:
    disk = FaultyDisk()
    store = await opened(tmp_path / "data", disk)
    await store.objects.create_bucket("k", "bbb")
    await asyncio.gather(*(put(store, f"key-{index}", content(3000, index)) for index in range(64)))
    assert [call for call, _ in disk.diary].count("sync") < 40
    for index in range(64):
        assert await get(store, f"key-{index}") == content(3000, index)
    store.close()


async def test_a_full_index_is_an_error_and_what_is_stored_stays(store: EmbeddedStore) -> None:
    await put(store, "key", b"old")
    store.committer.db.execute("PRAGMA max_page_count=1")
    with pytest.raises(ServerError) as failed:
        await put_many(store)
    assert failed.value.code is ErrorCode.INSUFFICIENT_STORAGE
    assert await get(store, "key") == b"old"
    store.committer.db.execute("PRAGMA max_page_count=1000000")
    await put(store, "key", content(LARGE))
    assert await get(store, "key") == content(LARGE)
    await settled(store)


async def test_short_writes_are_continued(store: EmbeddedStore) -> None:
    disk_of(store).write_bytes_max = 777
    for nbytes in (SMALL, LARGE):
        await put(store, "key", content(nbytes))
        assert await get(store, "key") == content(nbytes)


async def test_what_a_crash_left_is_swept(tmp_path: Path) -> None:
    """Files no row names; what is no file of ours is not ours to remove."""
    store = await opened(tmp_path)
    await store.objects.create_bucket("k", "bbb")
    await put(store, "key", b"kept")
    store.close()
    (tmp_path / "extents" / "00").mkdir(exist_ok=True)
    (tmp_path / "extents" / "00" / ("0" * 32)).write_bytes(b"x")
    (tmp_path / "extents" / "zz").mkdir()
    (tmp_path / "extents" / "zz" / "zz-orphan").write_bytes(b"x")
    store = EmbeddedStore(StorageSettings(data_dir=tmp_path))
    assert await store.start() == 1
    assert await get(store, "key") == b"kept"
    assert len(files_in(store)) == 2
    assert (tmp_path / "extents" / "zz" / "zz-orphan").exists()
    store.close()


async def test_unsynced_bytes_lost_in_a_power_cut_are_gone_and_never_wrong(tmp_path: Path) -> None:
    """Relaxed durability: the index may know of bytes that never reached the disk. They go before anyone asks."""
    store = await opened(tmp_path, durability=Durability.RELAXED)
    await store.objects.create_bucket("k", "bbb")
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
    names = [entry.key for entry in (await store.objects.list_objects("k", ListRequest("bbb"))).objects]
    assert names == ["synced", "whole"]
    assert await get(store, "whole") == content(SMALL, 1)
    store.close()


async def test_relaxed_durability_becomes_strict_within_a_second_or_two(tmp_path: Path) -> None:
    store = await opened(tmp_path / "data", FaultyDisk(), durability=Durability.RELAXED)
    await store.objects.create_bucket("k", "bbb")
    await put(store, "key", content(SMALL))
    await waiting.until(
        lambda: not store.reader.here(lambda db: db.execute("SELECT 1 FROM extents WHERE synced = 0").fetchall())
    )
    assert "sync" in [call for call, _ in disk_of(store).diary]
    store.close()


@pytest.mark.parametrize("nbytes", [SMALL, LARGE])
async def test_a_flipped_bit_is_an_error_wherever_it_is_read_and_nowhere_else(tmp_path: Path, nbytes: int) -> None:
    store = await opened(tmp_path / "data")
    await store.objects.create_bucket("k", "bbb")
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
    await store.objects.create_bucket("k", "bbb")
    await put(store, "key", content(SMALL))
    (name,) = files_in(store)
    path = store.settings.data_dir / "extents" / name[:2] / name
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


async def test_puts_cut_off_while_their_place_is_made_leave_no_file_open(tmp_path: Path) -> None:
    store = await opened(tmp_path / "data")
    await store.objects.create_bucket("k", "bbb")
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

    class HeldFiles(OpenFiles):
        """The first read ends at once, the one ahead of it when it may."""

        def __init__(self) -> None:
            self.begun_count = self.filling = 0
            self.may_end = threading.Event()

        def read_into(self, extent: Extent, start: int, view: memoryview) -> None:
            self.begun_count += 1
            if self.begun_count > 1:
                self.filling += 1
                self.may_end.wait(60)
                self.filling -= 1

    files = HeldFiles()
    threads = FileThreads(2, 2)
    reader = BodyReader(files, BufferShare(MIB), threads)

    async def read() -> None:
        async with aclosing(reader.pieces([Extent("f", 0, 8 * MIB, b"")], ByteRange(0, 8 * MIB))) as pieces:
            async for _ in pieces:
                await waiting.until(lambda: files.filling == 1)
                raise ConnectionResetError

    task = asyncio.create_task(read())
    await waiting.until(lambda: files.filling == 1)
    await waiting.settled()  # the connection has failed, and the reader waits for the thread
    task.cancel()
    await waiting.settled()
    assert not task.done()
    files.may_end.set()
    await asyncio.wait([task])
    assert files.filling == 0
    threads.close()


async def test_the_committer_outlives_what_nobody_expected(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One change fails or succeeds; none waits for ever, and the next is carried out."""
    store = await opened(tmp_path / "data")
    await store.objects.create_bucket("k", "bbb")

    def fail(*_: object) -> None:
        raise MemoryError("injected")

    for part, name in ((store.committer._freed, "note_durable"), (store.committer, "_transact")):
        kept = getattr(part, name)
        setattr(part, name, fail)
        with contextlib.suppress(ServerError):
            await asyncio.wait_for(put(store, "key", b"1"), 10)
        setattr(part, name, kept)
        await asyncio.wait_for(put(store, "key", name.encode()), 10)
        assert await get(store, "key") == name.encode()
    assert "injected" in caplog.text
    store.close()
