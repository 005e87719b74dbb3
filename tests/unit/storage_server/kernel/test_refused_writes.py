"""A write that ends without a row gives its bytes and its room back at once, however it ends."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from descriptors.conditions import NO_WRITE_CONDITION, WriteCondition
from descriptors.errors import CallerError, ErrorCode, ObjectCacheError, ServerError
from descriptors.objects import (
    CACHE_BYTES_MIN,
    BodyDigests,
    BucketCache,
    CopyRequest,
    ListRequest,
    PartRequest,
    PutRequest,
    ReadRequest,
    UploadRef,
    UploadRequest,
)
from storage_server.home.embedded import EmbeddedStore
from storage_server.kernel.data import arriving_bodies, bound
from storage_server.settings import CacheSettings
from tests.support.chunks import BytesBody
from tests.support.store_bed import LARGE, SMALL, content, opened

ANY_TIME, ABSENT = NO_WRITE_CONDITION, WriteCondition(if_absent=True)
SIZES = [1000, SMALL, LARGE]


class HeldBody(BytesBody):
    """A body that ends when it may."""

    def __init__(self, data: bytes, digests: BodyDigests | None = None) -> None:
        super().__init__(data, digests=digests)
        self.has_begun, self.may_end = asyncio.Event(), asyncio.Event()

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for piece in super().__aiter__():
            self.has_begun.set()
            await self.may_end.wait()
            yield bytes(piece)


async def put(
    store: EmbeddedStore, key: str, data: bytes, body: BytesBody | None = None, condition: WriteCondition = ANY_TIME
) -> None:
    request = PutRequest("bbb", key, len(data), condition=condition)
    await store.objects.put_object("k", request, body or BytesBody(data))


async def stored(store: EmbeddedStore, nbytes: int) -> None:
    await put(store, f"key-{nbytes}", content(nbytes))


async def lost_race(store: EmbeddedStore, nbytes: int) -> None:
    """Both are told before their bodies that the key is free; one commits first."""
    data = content(nbytes, 1)
    body = HeldBody(data)
    await store.objects.delete_object("k", "bbb", "raced")
    late = asyncio.create_task(put(store, "raced", data, body, ABSENT))
    await body.has_begun.wait()
    await put(store, "raced", b"first", None, ABSENT)
    body.may_end.set()
    with pytest.raises(CallerError) as refused:
        await late
    assert refused.value.code is ErrorCode.PRECONDITION_FAILED


async def aborted(store: EmbeddedStore, nbytes: int) -> None:
    """The upload is aborted while a part of it arrives."""
    upload = UploadRef("bbb", "upload", await store.uploads.create_upload("k", UploadRequest("k", "bbb", "upload")))
    body = HeldBody(content(nbytes, 2))
    part = asyncio.create_task(store.uploads.put_part("k", PartRequest(upload, 1, nbytes), body))
    await body.has_begun.wait()
    await store.uploads.abort_upload("k", upload)
    body.may_end.set()
    with pytest.raises(CallerError):
        await part


async def left(store: EmbeddedStore, nbytes: int) -> None:
    """The client goes in the middle of its body."""
    body = HeldBody(content(nbytes, 3))
    task = asyncio.create_task(put(store, "left", content(nbytes, 3), body))
    await body.has_begun.wait()
    task.cancel()
    await asyncio.wait((task,))
    assert task.cancelled()


async def left_at_the_end(store: EmbeddedStore, nbytes: int) -> None:
    """The client goes when its body is there: it is stored, or not."""
    body = HeldBody(content(nbytes, 4))
    task = asyncio.create_task(put(store, "end", content(nbytes, 4), body))
    await body.has_begun.wait()
    body.may_end.set()
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait((task,))


async def damaged(store: EmbeddedStore, nbytes: int) -> None:
    body = BytesBody(content(nbytes, 5), digests=BodyDigests(md5="0" * 32))
    with pytest.raises(ObjectCacheError):
        await put(store, "damaged", content(nbytes, 5), body)


async def without_bucket(store: EmbeddedStore, nbytes: int) -> None:
    """The bucket is gone when the body is there."""
    await store.objects.create_bucket("k", "gone")
    body = HeldBody(content(nbytes, 6))
    task = asyncio.create_task(store.objects.put_object("k", PutRequest("gone", "key", nbytes), body))
    await body.has_begun.wait()
    await store.objects.delete_bucket("k", "gone")
    body.may_end.set()
    with pytest.raises(CallerError):
        await task


async def with_another_bucket(store: EmbeddedStore, nbytes: int) -> None:
    """The bucket is gone, and made anew, when the body is there: it came into room of other bounds."""
    await store.objects.create_bucket("k", "anew")
    body = HeldBody(content(nbytes, 7))
    task = asyncio.create_task(store.objects.put_object("k", PutRequest("anew", "key", nbytes), body))
    await body.has_begun.wait()
    await store.objects.delete_bucket("k", "anew")
    await store.objects.create_bucket("k", "anew")
    body.may_end.set()
    with pytest.raises(ServerError, match="made anew"):
        await task
    await store.objects.delete_bucket("k", "anew")


async def deleted(store: EmbeddedStore, nbytes: int) -> None:
    for key in ("raced", "end", *(f"key-{size}" for size in SIZES)):
        await store.objects.delete_object("k", "bbb", key)


ENDINGS: list[Callable[[EmbeddedStore, int], Awaitable[None]]] = [
    stored, lost_race, aborted, left, left_at_the_end, damaged, without_bucket, with_another_bucket,
    deleted,
]  # fmt: skip


MAP_BYTES = 4096
"""A file whose blocks lie in many pieces has another one for its map."""


def files_of(store: EmbeddedStore) -> list[Path]:
    return [path for path in (store.settings.data_dir / "extents").glob("*/*") if path.is_file()]


def allocated(store: EmbeddedStore) -> int:
    """What the file system has given to extents, but for maps of blocks."""
    return sum(path.stat().st_blocks * 512 - MAP_BYTES for path in files_of(store))


def data_bytes(path: Path) -> int:
    """The bytes of a file that are no holes, in whole blocks."""
    nbytes = end = 0
    with path.open("rb") as file, suppress(OSError):  # ENXIO: no data behind
        while True:
            start = os.lseek(file.fileno(), end, os.SEEK_DATA)
            end = os.lseek(file.fileno(), start, os.SEEK_HOLE)
            nbytes += -(-end // 4096) * 4096 - start
    return nbytes


def named_bytes(store: EmbeddedStore) -> int:
    """What rows name, in whole blocks of the file system."""
    rows = store.reader.here(lambda db: db.execute("SELECT nbytes FROM extents WHERE file_id <> ''").fetchall())
    return sum(-(-nbytes // 4096) * 4096 for (nbytes,) in rows)


@pytest.mark.slow
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.sampled_from(ENDINGS), st.sampled_from(SIZES)), min_size=1, max_size=8))
def test_what_no_row_names_takes_no_space(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[Callable[[EmbeddedStore, int], Awaitable[None]], int]]
) -> None:
    """48 lost creates of 5 MiB took 253 of 300 MB until the next start."""

    async def carry_out(path: Path) -> None:
        store = await opened(path)
        await store.objects.create_bucket("k", "bbb")
        for ending, nbytes in steps:
            await ending(store, nbytes)
        for _ in range(2):  # the committer gives back what a change freed before it takes the next one
            await store.change(lambda tx: None, frees=True)
        store.files.given_back.settle()
        assert store.space.extent_bytes == named_bytes(store)
        assert sum(map(data_bytes, files_of(store))) <= named_bytes(store)
        assert allocated(store) <= named_bytes(store)
        for entry in (await store.objects.list_objects("k", ListRequest("bbb"))).objects:
            assert entry.key in ("raced", "end", *(f"key-{size}" for size in SIZES))
        store.close()

    asyncio.run(carry_out(tmp_path_factory.mktemp("store")))


async def test_a_copy_does_not_come_into_a_bucket_that_was_made_anew_with_another_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy has room of the bucket that is gone: the new one would have more than its bound."""
    store = await opened(tmp_path)
    await store.objects.create_bucket("k", "bbb")
    await store.objects.create_bucket("k", "anew")
    await put(store, "source", bytes(CACHE_BYTES_MIN + 1))
    change = store.objects._change

    async def change_later(*arguments: Any, **named: Any) -> Any:
        monkeypatch.setattr(store.objects, "_change", change)
        await store.objects.delete_bucket("k", "anew")
        await store.objects.create_bucket("k", "anew", BucketCache(CACHE_BYTES_MIN))
        return await change(*arguments, **named)

    monkeypatch.setattr(store.objects, "_change", change_later)
    copy = CopyRequest(ReadRequest("bbb", "source"), "anew", "copy")
    with pytest.raises(ServerError, match="made anew"):
        await store.objects.copy_object("k", copy)
    with pytest.raises(ServerError, match="smaller than the object"):
        await store.objects.copy_object("k", copy)
    store.close()


@pytest.mark.parametrize("what", ["a bounded cache", "a bounded directory", "a bounded bucket"])
async def test_a_body_that_drips_gives_its_room_up_when_others_need_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """Two PUTs that announced 120 MiB, and sent nothing, had everybody else answered 507 for as long as they liked."""
    monkeypatch.setattr(bound, "SLOW_S", 0.0)
    monkeypatch.setattr(arriving_bodies, "SLOW_S", 0.0)
    caches = {
        "a bounded cache": (CacheSettings(None),),
        "a bounded directory": (),
        "a bounded bucket": (CacheSettings("bbb", 32 << 20),),
    }
    disk_bytes = (256 if what == "a bounded bucket" else 64) << 20
    store = await opened(tmp_path, disk_bytes=disk_bytes, caches=caches[what])
    await store.objects.create_bucket("k", "bbb")
    if caches[what]:
        await put(store, "before", content(LARGE))
    running = asyncio.create_task(store.evictor.run())
    room = 32 << 20 if what == "a bounded bucket" else store.space.extent_bytes_max
    assert room is not None
    data = bytes(room - 2 * LARGE)
    body = HeldBody(data)
    drips = asyncio.create_task(put(store, "drips", data, body))
    await body.has_begun.wait()
    await put(store, "other", bytes(4 * LARGE))
    with pytest.raises(ServerError, match="too slowly") as ended:
        await drips
    assert ended.value.code is ErrorCode.SLOW_DOWN
    running.cancel()
    await asyncio.wait((running,))
    page = await store.objects.list_objects("k", ListRequest("bbb"))
    assert "other" in [entry.key for entry in page.objects]
    store.close()


async def test_small_bodies_that_drip_give_the_room_of_their_bucket_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They took none of the directory yet, so nobody ended them: all other writes to the bucket got 507."""
    monkeypatch.setattr(bound, "SLOW_S", 0.0)
    monkeypatch.setattr(arriving_bodies, "SLOW_S", 0.0)
    store = await opened(tmp_path, disk_bytes=256 << 20, caches=(CacheSettings("bbb", 8 << 20),))
    await store.objects.create_bucket("k", "bbb")
    running = asyncio.create_task(store.evictor.run())
    data = bytes(60_000)
    bodies = [HeldBody(data) for _ in range(134)]
    drips = [asyncio.create_task(put(store, f"drip-{at}", data, body)) for at, body in enumerate(bodies)]
    await asyncio.gather(*(body.has_begun.wait() for body in bodies))
    await put(store, "other", bytes(4 << 20))
    for body in bodies:
        body.may_end.set()
    assert any(isinstance(ended, ServerError) for ended in await asyncio.gather(*drips, return_exceptions=True))
    running.cancel()
    await asyncio.wait((running,))
    store.close()


async def test_a_slow_body_goes_on_while_there_is_room_for_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any large PUT ended the slow ones."""
    monkeypatch.setattr(bound, "SLOW_S", 0.0)
    monkeypatch.setattr(arriving_bodies, "SLOW_S", 0.0)
    store = await opened(tmp_path, disk_bytes=64 << 20)
    await store.objects.create_bucket("k", "bbb")
    data = bytes(8 * LARGE)
    body = HeldBody(data)
    drips = asyncio.create_task(put(store, "drips", data, body))
    await body.has_begun.wait()
    for number in range(4):
        await put(store, f"other-{number}", bytes(8 * LARGE))
    body.may_end.set()
    await drips
    store.close()
