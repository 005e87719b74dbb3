"""The embedded store: published whole or not at all, pinned while read, gone when deleted."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import threading
from collections.abc import AsyncIterator, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from descriptors.errors import CallerError, ErrorCode, ObjectCacheError
from descriptors.objects import (
    BodyDigests,
    ByteRange,
    ListRequest,
    PutRequest,
    RangeSpec,
    ReadRequest,
)
from descriptors.units import MIB
from objectcache.adapters.beneath import Beneath
from storage_server.home.embedded import EmbeddedStore
from storage_server.kernel import removal
from storage_server.kernel.data.extents import ExtentFiles, PinSet
from storage_server.kernel.data.space import Space
from storage_server.kernel.rules import pins as pins_module
from storage_server.kernel.rules.pins import joined
from storage_server.planning.block_checksums import BLOCK_BYTES
from storage_server.planning.extent import Extent
from tests.support.chunks import BytesBody
from tests.support.faulty_disk import FaultyDisk
from tests.support.store_bed import (
    LARGE,
    PACKED_BYTES_MAX,
    SMALL,
    content,
    disk_of,
    files_in,
    get,
    opened,
    put,
    settled,
)
from tests.support.waiting import until


@pytest.mark.parametrize("nbytes", [0, 1, SMALL, PACKED_BYTES_MAX, LARGE, 3 * MIB + 5])
async def test_objects_survive_reopening(tmp_path: Path, nbytes: int) -> None:
    """Packed or in a file of its own, and an empty one."""
    data = content(nbytes)
    for is_first in (True, False):
        store = await opened(tmp_path)
        if is_first:
            await store.objects.create_bucket("k", "bbb")
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
        await store.objects.put_object(
            "k", PutRequest("bbb", "key", nbytes + announced), BytesBody(content(nbytes), digests=digests)
        )
    assert refused.value.code is code
    assert await get(store, "key") == b"old"
    await settled(store)


async def test_a_body_that_breaks_off_leaves_nothing(store: EmbeddedStore) -> None:
    class Broken(BytesBody):
        async def __aiter__(self) -> AsyncIterator[bytes]:
            yield b"12"
            raise CallerError(ErrorCode.INCOMPLETE_BODY, "gone", field="body")

    for nbytes in (5, LARGE):
        with pytest.raises(CallerError):
            await store.objects.put_object("k", PutRequest("bbb", "key", nbytes), Broken(b""))
    await settled(store)
    assert (await store.objects.list_objects("k", ListRequest("bbb"))).objects == []


async def test_a_cancelled_put_is_either_stored_whole_or_gone(store: EmbeddedStore) -> None:
    disk, loop = disk_of(store), asyncio.get_running_loop()
    about_to = disk.about_to
    for calls in range(-1, 6):  # of the disk, before the put is cut off; -1 is at its beginning
        for nbytes in (SMALL, LARGE):
            task = asyncio.create_task(put(store, f"key-{calls}-{nbytes}", content(nbytes)))
            left = count(calls, -1)

            def cut(call: str, name: str, task: asyncio.Task[Any] = task, left: Iterator[int] = left) -> None:
                if next(left) == 0:
                    loop.call_soon_threadsafe(task.cancel)
                about_to(call, name)

            disk.about_to = cut  # type: ignore[method-assign]
            if calls < 0:
                await asyncio.sleep(0)
                task.cancel()
            await asyncio.wait([task])
    disk.about_to = about_to  # type: ignore[method-assign]
    for entry in (await store.objects.list_objects("k", ListRequest("bbb"))).objects:
        assert await get(store, entry.key) == content(entry.nbytes)
    await settled(store)


@pytest.mark.parametrize("nbytes", [SMALL, 3 * MIB])
async def test_an_open_version_outlives_overwrite_and_delete(store: EmbeddedStore, nbytes: int) -> None:
    await put(store, "key", content(nbytes))
    async with store.objects.open_object("k", ReadRequest("bbb", "key")) as read:
        await put(store, "key", content(nbytes, 1))
        await store.objects.delete_object("k", "bbb", "key")
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
    await store.objects.create_bucket("k", "bbb")
    keys = [f"k{index:03}" for index in range(300)]
    for key in keys:
        await put(store, key, key.encode() * 9)
    assert len(files_in(store)) == 2  # 256 extents share a file (CASCADE, III-D)
    await store.objects.delete_objects("k", "bbb", keys[:255])
    await settled(store)
    assert len(files_in(store)) == 2
    await store.objects.delete_objects("k", "bbb", keys[255:256])
    await settled(store)
    assert len(files_in(store)) == 1
    for key in keys[256:]:
        assert await get(store, key) == key.encode() * 9
    await store.objects.delete_objects("k", "bbb", keys)
    store.close()
    store = await opened(tmp_path / "data")
    assert files_in(store) == set()
    store.close()


async def test_open_files_are_bounded_and_reads_go_on(tmp_path: Path) -> None:
    store = await opened(tmp_path, open_files_max=2)
    await store.objects.create_bucket("k", "bbb")
    keys = [f"k{i}" for i in range(6)]
    for index, key in enumerate(keys):
        await put(store, key, content(LARGE, index))
    async with store.objects.prefixes.open("bbb", keys, LARGE, prefix_only=False) as chunks:
        for index, (extent,) in enumerate(chunks):
            view = bytearray(8)
            store.files.open.read_into(extent, 0, memoryview(view))
            assert bytes(view) == content(8, index)
        assert store.files.open.count == 2
    store.close()


def extents_at(*places: tuple[str, int]) -> list[Extent]:
    return [Extent(file_id, offset, 4096, b"\0" * 4) for file_id, offset in places]


def test_pins_are_counted(tmp_path: Path) -> None:
    files = ExtentFiles(tmp_path, 10, FaultyDisk())
    files.add("f")
    first, second = PinSet(files), PinSet(files)
    for pins in (first, second):
        assert pins.keep(extents_at(("f", 0), ("f", 4096)), files.punch_count)
    assert not PinSet(files).keep(extents_at(("f", 0), ("gone", 0)), files.punch_count)
    first.release()
    first.release()
    assert files.pinned_count == 1
    second.release()
    assert files.pinned_count == 0


def test_a_hole_waits_for_the_readers_of_its_place_only(tmp_path: Path) -> None:
    """A segment is nearly always read somewhere: space would never come back if a hole waited for all of it."""
    punched: list[int] = []

    class Punching(FaultyDisk):
        def punch(self, place: Beneath, offset: int, nbytes: int) -> bool:
            punched.append(offset)
            return True

    def punched_by(files: ExtentFiles) -> list[int]:
        files.given_back.settle()
        return punched

    files = ExtentFiles(tmp_path, 10, Punching())
    files.add("f")
    readers = [PinSet(files), PinSet(files)]
    for reader in readers:
        assert reader.keep(extents_at(("f", 0)), files.punch_count)
    assert files.pin(["f"])
    files.punch([("f", 0, 4096)])
    files.punch([("f", 8192, 4096)])
    assert punched_by(files) == []
    files.unpin(["f"])
    files.punch([("f", 4096, 4096)])
    assert punched_by(files) == [8192, 4096]
    readers[0].release()
    assert punched_by(files) == [8192, 4096]
    readers[1].release()
    assert punched_by(files) == [8192, 4096, 0]
    assert files.pinned_count == 0


def test_holes_that_touch_are_one_call_of_the_file_system() -> None:
    assert joined([("b", 0, 10), ("a", 8192, 4096), ("a", 0, 4000), ("a", 4096, 1), ("a", 20480, 5000)]) == [
        ("a", 0, 12288), ("a", 20480, 8192), ("b", 0, 4096)
    ]  # fmt: skip


def test_a_reader_that_ends_waits_for_no_file_system(tmp_path: Path) -> None:
    """It ends on the event loop, and to delete a large file takes long."""
    may_go = threading.Event()

    class Waiting(FaultyDisk):
        def unlink(self, place: Beneath) -> None:
            may_go.wait()
            super().unlink(place)

    space = Space(tmp_path, None)
    files = ExtentFiles(tmp_path, 10, Waiting(), space)
    files.start()
    space.take("f" * 32, 4096)
    place = files.place("f" * 32)
    place.parent.make_folder()
    place.path.write_bytes(b"data")
    files.add("f" * 32)
    assert files.pin(["f" * 32])
    files.dispose("f" * 32)
    files.unpin(["f" * 32])
    assert place.path.exists()
    assert (space.dying_bytes, space.kept_bytes) == (4096, 0), "writers may wait for it"
    may_go.set()
    files.given_back.settle()
    assert (space.dying_bytes, space.extent_bytes) == (0, 0)
    assert not place.path.exists()


def test_a_reader_reads_the_index_again_where_its_own_places_were_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not where others were; and where too many were to be remembered, to be sure."""
    monkeypatch.setattr(pins_module, "PUNCHED_MAX", 3)
    files = ExtentFiles(tmp_path, 10, FaultyDisk())
    files.add("f")
    before = files.punch_count
    files.punch([("f", 4096, 4096)])
    assert PinSet(files).keep(extents_at(("f", 0)), before)
    assert not PinSet(files).keep(extents_at(("f", 0), ("f", 4096)), before)
    for offset in range(8192, 8192 + 4 * 4096, 4096):
        files.punch([("f", offset, 4096)])
    assert not PinSet(files).keep(extents_at(("f", 0)), before)
    assert PinSet(files).keep(extents_at(("f", 0)), files.punch_count)


async def test_ranges_of_an_object(store: EmbeddedStore) -> None:
    data = content(LARGE)
    await put(store, "key", data)
    for first, last in ((10, 19), (BLOCK_BYTES - 1, BLOCK_BYTES), (0, LARGE), (BLOCK_BYTES, 3 * BLOCK_BYTES - 1)):
        assert await get(store, "key", RangeSpec(first=first, last=last)) == data[first : last + 1]
    assert await get(store, "key", RangeSpec(suffix=5)) == data[-5:]
    for spec in (RangeSpec(first=LARGE), RangeSpec(suffix=0)):
        with pytest.raises(ObjectCacheError, match="InvalidRange"):
            await get(store, "key", spec)


async def test_a_head_says_which_bytes_a_get_would_bring(store: EmbeddedStore) -> None:
    await put(store, "key", content(1000))
    head = await store.objects.head_object("k", ReadRequest("bbb", "key", RangeSpec(suffix=10)))
    assert (head.info.nbytes, head.range) == (1000, ByteRange(990, 10))


async def test_a_deleted_neighbours_space_is_free_at_once_and_its_readers_go_on(tmp_path: Path) -> None:
    """Within a segment that lives on; and so is the space of a body that failed."""
    store = await opened(tmp_path / "data")
    await store.objects.create_bucket("k", "bbb")
    for index in range(8):
        await put(store, f"key-{index}", content(SMALL, index))
    (name,) = files_in(store)
    path = tmp_path / "data" / "extents" / name[:2] / name
    full = path.stat().st_blocks
    async with store.objects.open_object("k", ReadRequest("bbb", "key-0")) as read:
        await store.objects.delete_objects("k", "bbb", [f"key-{index}" for index in range(6)])
        assert b"".join([bytes(piece) async for piece in read.body]) == content(SMALL)
    await until(lambda: path.stat().st_blocks < full / 2)
    left = path.stat().st_blocks
    with pytest.raises(CallerError):
        await put(store, "refused", content(PACKED_BYTES_MAX), BodyDigests(md5="0" * 32))
    assert path.stat().st_blocks <= left
    for index in (6, 7):
        assert await get(store, f"key-{index}") == content(SMALL, index)
    store.close()


def test_a_file_that_could_not_be_deleted_is_tried_again(tmp_path: Path) -> None:
    """Meanwhile its bytes do not count as about to come back: writers would wait for them for ever."""

    class Failing(FaultyDisk):
        is_failing = True

        def unlink(self, place: Beneath) -> None:
            if self.is_failing:
                raise OSError(errno.EMFILE, "too many files are open")
            super().unlink(place)

    space = Space(tmp_path, None)
    disk = Failing()
    files = ExtentFiles(tmp_path, 10, disk, space)
    files.start()
    names = ["e" * 32, "f" * 32]
    for name in names:
        files.place(name).parent.make_folder()
        files.place(name).path.write_bytes(b"data")
        files.add(name)
        space.take(name, 4096)
    space.doom([(names[0], 0, 4096)])
    files.dispose(names[0])
    files.given_back.settle()
    assert (space.dying_bytes, space.kept_bytes) == (0, 2 * 4096)
    disk.is_failing = False
    files.dispose(names[1])
    files.given_back.settle()
    assert (space.kept_bytes, files.count()) == (0, 0)


async def test_many_objects_are_deleted_in_changes_of_few_rows(
    store: EmbeddedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everybody's writes wait for a change that is under way."""
    monkeypatch.setattr(removal, "EXTENTS_MAX", 3)
    keys = [f"key {number}" for number in range(7)]
    for key in keys:
        await put(store, key, b"data")
    before = store.committer.change_count
    await store.objects.delete_objects("k", "bbb", [*keys, "none"])
    assert store.committer.change_count - before == 3
    assert (await store.objects.delete_objects("k", "bbb", [])) == []
    with pytest.raises(ObjectCacheError, match="NoSuchKey"):
        await get(store, keys[-1])
