"""The embedded store: published whole or not at all, pinned while read, clean after a crash."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from descriptors.errors import CallerError, ErrorCode, ObjectCacheError, ServerError
from descriptors.storage_api import ListRequest, ObjectInfo, PutRequest, RangeSpec
from storage_server.leases import LeaseTable
from storage_server.settings import StorageSettings
from storage_server.store.embedded import EmbeddedStore
from storage_server.store.extents import ExtentFiles, PinSet
from storage_server.store.listing import list_page, successor


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[EmbeddedStore]:
    made = EmbeddedStore(StorageSettings(data_dir=tmp_path / "data"))
    await made.start()
    await made.create_bucket("k", "bbb")
    yield made
    assert made.files.open_count == 0
    assert made.files.pinned_count == 0
    made.close()


async def body_of(data: bytes, pieces: int = 3) -> AsyncIterator[bytes]:
    step = max(1, -(-len(data) // pieces))
    for start in range(0, len(data), step):
        yield data[start : start + step]


async def put(store: EmbeddedStore, key: str, data: bytes, **options: object) -> ObjectInfo:
    request = PutRequest("bbb", key, len(data), {}, **options)  # type: ignore[arg-type]
    return await store.put_object(request, body_of(data))


async def get(store: EmbeddedStore, key: str, span: RangeSpec | None = None) -> bytes:
    async with store.open_object("bbb", key, span) as read:
        return b"".join([bytes(piece) async for piece in read.body])


def files_in(store: EmbeddedStore) -> list[Path]:
    data_dir = store._settings.data_dir
    return [path for name in ("tmp", "extents") for path in (data_dir / name).rglob("*") if path.is_file()]


async def test_objects_survive_reopening(tmp_path: Path) -> None:
    settings_ = StorageSettings(data_dir=tmp_path)
    for is_first in (True, False):
        store = EmbeddedStore(settings_)
        assert await store.start() == 0
        if is_first:
            await store.create_bucket("k", "bbb")
            info = await put(store, "key", b"bytes" * 1000)
            assert info.etag == hashlib.md5(b"bytes" * 1000).hexdigest()
        assert await get(store, "key") == b"bytes" * 1000
        store.close()


@pytest.mark.parametrize(
    ("options", "nbytes", "code"),
    [
        ({"sha256": "0" * 64}, None, ErrorCode.X_AMZ_CONTENT_SHA256_MISMATCH),
        ({"md5": "0" * 32}, None, ErrorCode.BAD_DIGEST),
        ({}, 4, ErrorCode.INCOMPLETE_BODY),
        ({}, 6, ErrorCode.INCOMPLETE_BODY),
        ({}, 6 << 30, ErrorCode.ENTITY_TOO_LARGE),
    ],
)
async def test_a_refused_put_leaves_the_old_object_and_no_file(
    store: EmbeddedStore, options: dict[str, str], nbytes: int | None, code: ErrorCode
) -> None:
    await put(store, "key", b"old")
    request = PutRequest("bbb", "key", nbytes or 5, {}, **options)
    with pytest.raises(CallerError) as refused:
        await store.put_object(request, body_of(b"fresh"))
    assert refused.value.code is code
    assert await get(store, "key") == b"old"
    assert len(files_in(store)) == 1


@pytest.mark.parametrize(
    ("call", "error", "code"),
    [
        ("write", errno.ENOSPC, ErrorCode.INSUFFICIENT_STORAGE),
        ("fsync", errno.EIO, ErrorCode.INTERNAL_ERROR),
        ("rename", errno.ENOSPC, ErrorCode.INSUFFICIENT_STORAGE),
        ("open", errno.EMFILE, ErrorCode.SLOW_DOWN),
        ("open", errno.EACCES, ErrorCode.INTERNAL_ERROR),
    ],
)
async def test_a_failing_disk_is_an_error_and_nothing_is_half_written(
    store: EmbeddedStore, call: str, error: int, code: ErrorCode
) -> None:
    """The full disk, the failing sync: the client hears of it, the old object stays readable."""
    await put(store, "key", b"old")
    with (
        mock.patch(f"storage_server.store.extents.os.{call}", side_effect=OSError(error, "injected")),
        pytest.raises(ServerError) as failed,
    ):
        await put(store, "key", b"new")
    assert failed.value.code is code
    assert failed.value.retryable
    assert await get(store, "key") == b"old"
    assert len(files_in(store)) == 1


async def put_many(store: EmbeddedStore) -> None:
    for index in range(200):
        await put(store, f"key-{index}-" + "x" * 900, b"new")


async def test_a_full_index_is_an_error_and_the_extent_goes(store: EmbeddedStore) -> None:
    await put(store, "key", b"old")

    def fill_up() -> None:
        store._index._connection().execute("PRAGMA max_page_count=1")

    await asyncio.get_running_loop().run_in_executor(store._index._writer, fill_up)
    with pytest.raises(ServerError) as failed:
        await put_many(store)
    assert failed.value.code is ErrorCode.INSUFFICIENT_STORAGE
    assert await get(store, "key") == b"old"
    names = (await store.list_objects(ListRequest("bbb"))).objects
    assert len(files_in(store)) == len(names)


async def test_short_writes_are_continued(store: EmbeddedStore) -> None:
    real = os.write
    with mock.patch("storage_server.store.extents.os.write", side_effect=lambda fd, data: real(fd, data[:7])):
        await put(store, "key", b"0123456789" * 20)
    assert await get(store, "key") == b"0123456789" * 20


async def test_a_body_that_breaks_off_leaves_nothing(store: EmbeddedStore) -> None:
    async def broken() -> AsyncIterator[bytes]:
        yield b"12"
        raise CallerError(ErrorCode.INCOMPLETE_BODY, "gone", field="body")

    with pytest.raises(CallerError):
        await store.put_object(PutRequest("bbb", "key", 5, {}), broken())
    assert files_in(store) == []


async def test_a_cancelled_put_is_either_stored_whole_or_gone(store: EmbeddedStore) -> None:
    for delay in (0, 0.001, 0.004, 0.01):
        task = asyncio.create_task(put(store, f"key-{delay}", b"x" * 300_000))
        await asyncio.sleep(delay)
        task.cancel()
        await asyncio.wait([task])
    names = {entry.key for entry in (await store.list_objects(ListRequest("bbb"))).objects}
    for name in names:
        assert await get(store, name) == b"x" * 300_000
    assert len(files_in(store)) == len(names)


async def test_a_pinned_version_outlives_overwrite_and_delete(store: EmbeddedStore) -> None:
    await put(store, "key", b"first" * 300_000)
    async with store.open_object("bbb", "key", None) as read:
        await put(store, "key", b"second")
        await store.delete_object("bbb", "key")
        assert b"".join([bytes(piece) async for piece in read.body]) == b"first" * 300_000
        assert len(files_in(store)) == 1
    assert files_in(store) == []


async def test_what_a_crash_left_is_swept(tmp_path: Path) -> None:
    """Unfinished files and extents whose index row never came."""
    store = EmbeddedStore(StorageSettings(data_dir=tmp_path))
    await store.start()
    await store.create_bucket("k", "bbb")
    await put(store, "key", b"kept")
    store.close()
    (tmp_path / "tmp" / "half").write_bytes(b"x")
    (tmp_path / "extents" / "zz").mkdir()
    (tmp_path / "extents" / "zz" / "zz-orphan").write_bytes(b"x")
    store = EmbeddedStore(StorageSettings(data_dir=tmp_path))
    assert await store.start() == 2
    assert await get(store, "key") == b"kept"
    assert len(files_in(store)) == 1
    store.close()


async def test_open_files_are_bounded_and_reads_go_on(tmp_path: Path) -> None:
    store = EmbeddedStore(StorageSettings(data_dir=tmp_path, open_files_max=2))
    await store.create_bucket("k", "bbb")
    keys = [f"k{i}" for i in range(6)]
    for key in keys:
        await put(store, key, key.encode() * 4)
    async with store.open_prefix("bbb", keys, 8, prefix_only=False) as extents:
        for extent, key in zip(extents, keys, strict=True):
            view = bytearray(8)
            store.files.read_into(extent.file_id, 0, memoryview(view))
            assert bytes(view) == key.encode() * 4
        assert store.files.open_count == 2
    assert store.files.open_count == 0
    store.close()


def test_pins_are_counted(tmp_path: Path) -> None:
    files = ExtentFiles(tmp_path, 10)
    first, second = PinSet(files), PinSet(files)
    for pins in (first, second):
        files.pin(["f"])
        pins._file_ids = ["f"]
    first.release()
    first.release()
    assert files.pinned_count == 1
    second.release()
    assert files.pinned_count == 0


async def test_unknown_schema_versions_are_not_opened(tmp_path: Path) -> None:
    import sqlite3

    store = EmbeddedStore(StorageSettings(data_dir=tmp_path))
    store.close()
    with sqlite3.connect(tmp_path / "index.sqlite3") as connection:
        connection.execute("PRAGMA user_version=99")
    connection.close()
    with pytest.raises(RuntimeError, match="schema 99"):
        EmbeddedStore(StorageSettings(data_dir=tmp_path))


KEY = st.text(st.sampled_from("ab/.\u00e9\ud7ff\ue000\U0010ffff"), min_size=1, max_size=5)


@given(keys=st.sets(KEY, max_size=25), prefix=st.sampled_from(["", "a", "a/", "/"]), size=st.integers(1, 4),
       delimiter=st.sampled_from(["", "/", "/a"]))  # fmt: skip
@settings(max_examples=150)
def test_pages_together_are_the_listing(keys: set[str], prefix: str, size: int, delimiter: str) -> None:
    """Against the definition: sort by UTF-8 bytes, roll up, cut into pages."""
    ordered = sorted(keys, key=str.encode)

    async def fetch(start: str, inclusive: bool, limit: int) -> list[ObjectInfo]:
        after = [k for k in ordered if k.encode() > start.encode() or (inclusive and k == start)]
        rows = []
        for key in after[:limit]:
            if not key.startswith(prefix):
                break
            rows.append(ObjectInfo(key, 0, "", 0.0))
        return rows

    expected_objects, expected_groups = [], []
    for key in ordered:
        if not key.startswith(prefix):
            continue
        at = key.find(delimiter, len(prefix)) if delimiter else -1
        if at < 0:
            expected_objects.append(key)
        elif (group := key[: at + len(delimiter)]) not in expected_groups:
            expected_groups.append(group)

    async def collect() -> tuple[list[str], list[str]]:
        objects, groups, after = [], [], ""
        for _ in range(100):
            page = await list_page(ListRequest("b", prefix, delimiter, after, size), fetch)
            assert len(page.objects) + len(page.common_prefixes) <= size
            objects += [info.key for info in page.objects]
            groups += page.common_prefixes
            if page.next_after is None:
                return objects, groups
            after = page.next_after
        raise AssertionError("the listing does not end")

    assert asyncio.run(collect()) == (expected_objects, expected_groups)


@given(KEY, KEY)
def test_successor_is_above_everything_with_the_prefix(prefix: str, tail: str) -> None:
    above = successor(prefix)
    if above is None:
        assert set(prefix) == {"\U0010ffff"}
    else:
        assert (prefix + tail).encode() < above.encode()
        assert above.encode() > prefix.encode()


def test_leases_run_out_and_are_bounded() -> None:
    leases = LeaseTable(keys_max=3)
    leases.grant("b", ["x", "y"], 0.0, 10.0)
    leases.grant("b", ["x"], 1.0, 2.0)
    assert leases.is_leased("b", "x", 9.0)
    assert not leases.is_leased("b", "x", 10.0)
    assert not leases.is_leased("other", "x", 1.0)
    leases.grant("b", ["p", "q", "r"], 5.0, 100.0)
    assert [leases.is_leased("b", key, 6.0) for key in "xypqr"] == [False, False, True, True, True]


async def test_ranges_of_an_object(store: EmbeddedStore) -> None:
    await put(store, "key", bytes(range(100)))
    assert await get(store, "key", RangeSpec(first=10, last=19)) == bytes(range(10, 20))
    assert await get(store, "key", RangeSpec(suffix=5)) == bytes(range(95, 100))
    for spec in (RangeSpec(first=100), RangeSpec(suffix=0)):
        with pytest.raises(ObjectCacheError, match="InvalidRange"):
            await get(store, "key", spec)


@pytest.fixture(autouse=True)
def _no_leftovers(tmp_path: Path) -> Iterator[None]:
    yield
    assert not list(tmp_path.rglob("tmp/*"))
