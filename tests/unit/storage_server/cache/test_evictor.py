"""The evictor's own life. What it evicts is tried in tests/integration/test_caches.py."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest

from descriptors.errors import ErrorCode, ServerError
from descriptors.messages import LEASE_S_MAX
from descriptors.objects import ListRequest, PutRequest, ReadRequest
from descriptors.units import KIB, MIB
from storage_server.cache import evictor, former_objects, news, written_uses
from storage_server.cache.rules.entry import Victim
from storage_server.cache.rules.unwritten import Unwritten
from storage_server.home.embedded import EmbeddedStore
from storage_server.kernel import slow_readers
from storage_server.kernel.data import bound as bound_module
from storage_server.kernel.data import space
from storage_server.kernel.index import queries, transaction
from storage_server.kernel.index.schema import connect_current
from storage_server.kernel.index.transaction import Transaction
from storage_server.kernel.rules.rows import KeyUse
from storage_server.settings import CacheSettings, StorageSettings
from tests.support.chunks import BytesBody
from tests.support.waiting import until


class WatchedEvent(asyncio.Event):
    """Knows how often somebody has begun to wait for it."""

    waited_count = 0

    async def wait(self) -> Literal[True]:
        self.waited_count += 1
        return await super().wait()


@pytest.mark.parametrize("turns", range(6))
async def test_a_stop_that_comes_with_a_call_for_room_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, turns: int
) -> None:
    """The server's stop waits for the evictor; a cancellation that got lost would make it wait for ever."""
    monkeypatch.setattr(evictor, "TICK_S", 60.0)
    cache = CacheSettings("cached", 4 * MIB)
    store = EmbeddedStore(StorageSettings(data_dir=tmp_path, caches=(cache,), disk_bytes=64 * MIB))
    await store.start()
    wake = store.evictor._wake = WatchedEvent()
    running = asyncio.create_task(store.evictor.run())
    try:
        await until(lambda: wake.waited_count > 0)  # for something to do
        call_for_room = store.bound.wants
        assert call_for_room is not None
        call_for_room()
        for _ in range(turns):
            await asyncio.sleep(0)
        running.cancel()
        ended, _ = await asyncio.wait((running,), timeout=30)
        assert ended
        assert running.cancelled()
    finally:
        running.cancel()
        await asyncio.wait((running,), timeout=30)
        store.close()


async def test_what_could_not_be_evicted_is_evicted_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All victims of a step whose change is refused are known afterwards, those of later changes, too."""
    monkeypatch.setattr(evictor, "VICTIMS_PER_CHANGE", 2)
    monkeypatch.setattr(evictor, "TICK_S", 0.05)
    store = EmbeddedStore(StorageSettings(data_dir=tmp_path, caches=(CacheSettings("cached", ttl_s=60.0),)))
    await store.start()
    await store.objects.create_bucket("k", "cached")
    for number in range(12):
        await store.objects.put_object("k", PutRequest("cached", f"key-{number}", 5), BytesBody(b"bytes"))
    change, refusals = store.evictor.evictions._change, [1, 1]

    async def refusing(what: Callable[[Transaction], Any]) -> Any:
        if refusals:
            refusals.pop()
            raise ServerError(ErrorCode.SLOW_DOWN, "played", retryable=True)
        return await change(what)

    store.evictor.evictions._change = refusing
    later = SimpleNamespace(time=lambda: time.time() + 60.0, monotonic=time.monotonic)
    monkeypatch.setattr(evictor, "time", later)  # the time of all of them has come
    running = asyncio.create_task(store.evictor.run())
    await until(lambda: not store.reader.here(lambda db: db.execute("SELECT 1 FROM objects").fetchall()))
    running.cancel()
    await asyncio.wait((running,))
    assert (await store.objects.list_objects("k", ListRequest("cached"))).objects == []
    assert refusals == []
    store.close()


async def test_a_clock_that_leaps_ahead_deletes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All objects of a bucket with `ttl_s` would be gone; they are deleted when their time has passed."""
    monkeypatch.setattr(evictor, "TICK_S", 0.01)
    store = EmbeddedStore(StorageSettings(data_dir=tmp_path, caches=(CacheSettings("cached", ttl_s=3600.0),)))
    await store.start()
    await store.objects.create_bucket("k", "cached")
    await store.objects.put_object("k", PutRequest("cached", "old", 5), BytesBody(b"bytes"))
    played = SimpleNamespace(time=lambda: time.time() + 30 * 86_400.0, monotonic=time.monotonic)
    monkeypatch.setattr(evictor, "time", played)
    running = asyncio.create_task(store.evictor.run())
    await store.objects.put_object("k", PutRequest("cached", "new", 5), BytesBody(b"bytes"))
    looks = store.evictor._kept
    looked = []
    monkeypatch.setattr(store.evictor, "_kept", lambda: looked.append(1) or looks())
    await until(lambda: len(looked) >= 3)
    page = await store.objects.list_objects("k", ListRequest("cached"))
    assert [entry.key for entry in page.objects] == ["new", "old"]
    played.time = lambda: time.time() + 30 * 86_400.0 + 3601.0  # an hour later by both clocks
    played.monotonic = lambda: time.monotonic() + 3601.0
    await until(lambda: not store.reader.here(lambda db: db.execute("SELECT 1 FROM objects").fetchall()))
    running.cancel()
    await asyncio.wait((running,))
    store.close()


class HeldBody(BytesBody):
    """A body that ends when it may."""

    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        self.may_end = asyncio.Event()
        self.has_begun = False

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for piece in super().__aiter__():
            self.has_begun = True
            await self.may_end.wait()
            yield bytes(piece)


async def test_a_write_waits_for_what_is_on_its_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of a full cache is being written: nothing can leave yet, but soon it can."""
    monkeypatch.setattr(evictor, "TICK_S", 0.05)
    monkeypatch.setattr(bound_module, "PATIENCE_S", 60.0)
    store = EmbeddedStore(StorageSettings(data_dir=tmp_path, caches=(CacheSettings("cached", 16 * MIB),)))
    await store.start()
    await store.objects.create_bucket("k", "cached")
    step, step_count = store.evictor._step, 0

    async def counted() -> None:
        nonlocal step_count
        await step()
        step_count += 1

    monkeypatch.setattr(store.evictor, "_step", counted)
    running = asyncio.create_task(store.evictor.run())
    bodies = [HeldBody(bytes([number]) * (5 * MIB)) for number in range(3)]

    def put(key: str, body: BytesBody, nbytes: int) -> asyncio.Task[Any]:
        return asyncio.create_task(store.objects.put_object("k", PutRequest("cached", key, nbytes), body))

    under_way = [put(f"key-{number}", body, 5 * MIB) for number, body in enumerate(bodies)]
    await until(lambda: all(body.has_begun for body in bodies))
    late = put("late", BytesBody(bytes(8 * MIB)), 8 * MIB)
    bound = store.evictor.caches.buckets["cached"].bound
    assert bound is not None
    await until(lambda: bound.waiting_bytes > 0)
    before = step_count
    await until(lambda: step_count >= before + 4)
    assert not late.done()
    for body in bodies:
        body.may_end.set()
    await asyncio.gather(*under_way, late)
    listed = (await store.objects.list_objects("k", ListRequest("cached"))).objects
    assert sum(each.nbytes for each in listed) <= 16 * MIB
    running.cancel()
    await asyncio.wait((running,))
    store.close()


@pytest.mark.parametrize("caches", [(CacheSettings("cached"),), ()])
async def test_writes_get_the_room_that_a_slow_reader_withholds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caches: tuple[CacheSettings, ...]
) -> None:
    """A writer into a cache waits for it. Where nobody makes room, it is told to come again, and then there is room."""
    monkeypatch.setattr(slow_readers, "SLOW_S", 0.2)
    monkeypatch.setattr(evictor, "TICK_S", 0.02)
    store = EmbeddedStore(StorageSettings(data_dir=tmp_path, caches=caches, disk_bytes=64 * MIB))
    await store.start()
    await store.objects.create_bucket("k", "cached")
    running = asyncio.create_task(store.evictor.run())
    body = bytes(30 * MIB)
    await store.objects.put_object("k", PutRequest("cached", "first", len(body)), BytesBody(body))
    begun = asyncio.Event()

    async def read_slowly() -> None:
        async with store.objects.open_object("reader", ReadRequest("cached", "first")):
            begun.set()
            await asyncio.Event().wait()

    reading = asyncio.create_task(read_slowly())
    await begun.wait()
    await store.objects.delete_object("k", "cached", "first")
    assert store.space.extent_bytes >= len(body), "the reader keeps them"
    if not caches:
        with pytest.raises(ServerError) as refused:
            await store.objects.put_object("k", PutRequest("cached", "second", len(body)), BytesBody(body))
        assert refused.value.code is ErrorCode.INSUFFICIENT_STORAGE
        await until(lambda: store.space.extent_bytes < len(body))
    await store.objects.put_object("k", PutRequest("cached", "second", len(body)), BytesBody(body))
    with pytest.raises(ServerError) as ended:
        await reading
    assert ended.value.code is ErrorCode.SLOW_DOWN
    running.cancel()
    await asyncio.wait((running,))
    store.close()


async def test_a_lease_is_on_the_disk_soon_and_many_share_one_write(tmp_path: Path) -> None:
    """A server that is killed must know whose chunks it has promised; a write for each lookup would be too dear."""
    store = EmbeddedStore(StorageSettings(data_dir=tmp_path, caches=(CacheSettings("cached", 16 * MIB),)))
    await store.start()
    await store.objects.create_bucket("k", "cached")
    for key in "abc":
        await store.objects.put_object("k", PutRequest("cached", key, 5), BytesBody(b"bytes"))
    running = asyncio.create_task(store.evictor.run())
    try:
        await _noted(store, lambda noted: True)
        before, asked_s, began_s = store.committer.change_count, time.time(), time.monotonic()
        for _ in range(200):
            assert await store.chunks.matched("cached", ["a", "b", "x"], 60.0) == 2
        noted = await _noted(store, lambda noted: {"a", "b"} <= set(noted))
        assert min(noted["a"], noted["b"]) >= asked_s + 60
        assert "c" not in noted
        writes_max = (
            4 + (time.monotonic() - began_s) // written_uses.LEASE_SAVE_S
        )  # where lookups take long there are more
        assert store.committer.change_count <= before + writes_max
    finally:
        running.cancel()
        await asyncio.wait((running,))
        store.close()


async def test_the_lease_of_a_chunk_that_comes_later_is_on_the_disk_soon_after_it_has_come(tmp_path: Path) -> None:
    """In front of another service a lookup leases what is on its way."""
    store = EmbeddedStore(StorageSettings(data_dir=tmp_path, caches=(CacheSettings(None, 16 * MIB),)))
    await store.start()
    await store.objects.create_bucket("k", "cached")
    write_down, written = store.evictor.written._write_down, list[object]()

    async def noting(what: Any) -> None:
        await write_down(what)
        written.append(what)

    store.evictor.written._write_down = noting  # type: ignore[method-assign]
    running = asyncio.create_task(store.evictor.run())
    try:
        await _noted(store, lambda noted: True)
        asked_s = time.time()
        assert store.evictor.note_lookup("cached", ["a"], 1, store.evictor.before_lookup(), 60.0) == 1
        await until(lambda: Unwritten.leased in written)  # all leases that were known are written down
        await store.objects.put_object("k", PutRequest("cached", "a", 5), BytesBody(b"bytes"))
        noted = await _noted(store, lambda noted: "a" in noted)
        assert noted["a"] >= asked_s + 60
    finally:
        running.cancel()
        await asyncio.wait((running,))
        store.close()


async def test_leases_end_by_the_clock_on_the_disk_and_outlive_a_restart_after_a_leap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next process follows the clock, wherever that is. Leases of before the leap, and of chunks that come during
    it, count too; a clock that is set back must not make them last for the leap.
    """
    monkeypatch.setattr(evictor, "TICK_S", 0.01)
    settings = StorageSettings(data_dir=tmp_path, caches=(CacheSettings(None, 16 * MIB),))
    played = SimpleNamespace(time=time.time, monotonic=time.monotonic)
    monkeypatch.setattr(evictor, "time", played)
    store = EmbeddedStore(settings)
    await store.start()
    await store.objects.create_bucket("k", "cached")
    await store.objects.put_object("k", PutRequest("cached", "a", 5), BytesBody(b"bytes"))
    running = asyncio.create_task(store.evictor.run())
    month_s = 30 * 86_400.0
    try:
        asked_s = time.time()
        store.evictor.note_lookup("cached", ["a", "b"], 2, store.evictor.before_lookup(), 60.0)
        assert (await _noted(store, lambda noted: "a" in noted))["a"] < asked_s + month_s
        played.time = lambda: time.time() + month_s
        monkeypatch.setattr("storage_server.kernel.objects.time", played)
        await store.objects.put_object("k", PutRequest("cached", "b", 5), BytesBody(b"bytes"))
        noted = await _noted(store, lambda noted: len(noted) == 2 and noted["a"] > asked_s + month_s)
        assert all(asked_s + month_s + 50 < end < asked_s + month_s + 600 for end in noted.values())
    finally:
        running.cancel()
        await asyncio.wait((running,))
        store.close()
    for now, end_max in ((played.time, asked_s + month_s + 600), (time.time, time.time() + 2 * LEASE_S_MAX)):
        played.time = now
        async with _running(settings) as again:
            noted = await _noted(again, lambda noted, end=end_max: len(noted) == 2 and max(noted.values()) < end)
            assert min(noted.values()) > played.time()
            entries = again.evictor.caches.all()[0].books._entries
            assert {entry.is_held for entry in entries.values()} == {True}


async def _noted(store: EmbeddedStore, is_so: Callable[[dict[str, float]], bool]) -> dict[str, float]:
    """The ends of leases that the index knows, when they are so."""
    noted: dict[str, float] = {}

    def is_there() -> bool:
        rows = store.reader.here(lambda db: queries.cached(db, None, ("", ""), 100))
        noted.clear()
        noted.update({row.key: row.leased_until for row in rows if row.leased_until is not None})
        return store.evictor.news.is_restored and is_so(noted)

    await until(is_there)
    return noted


async def test_no_lookup_is_answered_as_if_its_lease_had_been_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the evictor is far behind; a lookup without a lease loses nothing. Changes that wait do not count: while a
    restart's objects come back, they refused everybody.
    """
    monkeypatch.setattr(news, "NEWS_MAX", 2)
    store = EmbeddedStore(StorageSettings(data_dir=tmp_path, caches=(CacheSettings("cached", 16 * MIB),)))
    await store.start()
    await store.objects.create_bucket("k", "cached")
    for key in "abc":
        await store.objects.put_object("k", PutRequest("cached", key, 5), BytesBody(b"bytes"))
    assert await store.chunks.matched("cached", ["a", "b"]) == 2
    assert await store.chunks.matched("cached", ["x"], 60.0) == 0
    assert await store.chunks.matched("cached", ["a", "b"], 60.0) == 2
    with pytest.raises(ServerError) as refused:
        await store.chunks.matched("cached", ["a", "b"], 60.0)
    assert refused.value.code is ErrorCode.SLOW_DOWN
    store.close()


async def test_lookups_that_wait_to_be_noted_are_bounded_in_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A READER's lookups of long keys took gigabytes within seconds."""
    monkeypatch.setattr(news, "NEWS_BYTES_MAX", 10_000)
    store = EmbeddedStore(StorageSettings(data_dir=tmp_path, caches=(CacheSettings("cached"),)))
    await store.start()
    store.evictor.news.is_restored = True
    keys = ["x" * 936 for _ in range(6)]  # 1,000 bytes each
    assert store.evictor.news.note(news.AskedPrefix("cached", keys, 0.0))
    assert not store.evictor.news.note(news.AskedPrefix("cached", keys, 0.0))
    assert store.evictor.news.note(news.AskedPrefix("cached", keys[:4], 0.0))
    store.evictor.news.take_over()
    assert store.evictor.news.note(news.AskedPrefix("cached", keys * 3, 0.0))  # alone it may be larger
    assert not store.evictor.news.note(news.AskedPrefix("cached", keys[:1], 0.0))
    store.close()


SIZES_BYTES = {"bucket": 256 * KIB, "directory": 3 * MIB}
"""The size of objects: the bucket or directory has room for 32 or so."""


def _bounded(tmp_path: Path, what: str) -> StorageSettings:
    if what == "directory":
        return StorageSettings(data_dir=tmp_path, caches=(CacheSettings(None),), disk_bytes=128 * MIB)
    return StorageSettings(data_dir=tmp_path, caches=(CacheSettings("cached", 8 * MIB),))


@asynccontextmanager
async def _running(settings: StorageSettings) -> AsyncIterator[EmbeddedStore]:
    store = EmbeddedStore(settings)
    await store.start()
    running = asyncio.create_task(store.evictor.run())
    try:
        yield store
    finally:
        running.cancel()
        await asyncio.wait((running,))
        store.close()


async def _keys(store: EmbeddedStore) -> list[str]:
    return [each.key for each in (await store.objects.list_objects("k", ListRequest("cached"))).objects]


@pytest.mark.parametrize("what", ["bucket", pytest.param("directory", marks=pytest.mark.slow)])
async def test_a_full_cache_takes_objects_before_it_knows_all_that_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """With 10^5 objects all puts were refused for half a minute. What was used longest ago leaves, also by reads that
    have not been noted yet; what is leased meanwhile stays, too.
    """
    monkeypatch.setattr(evictor, "TICK_S", 0.01)
    monkeypatch.setattr(former_objects, "OLDEST_COUNT", 8)
    monkeypatch.setattr(former_objects, "SLICE_COUNT", 1)
    settings, nbytes = _bounded(tmp_path, what), SIZES_BYTES[what]

    async def put(key: str) -> None:
        await store.objects.put_object("k", PutRequest("cached", key, nbytes), BytesBody(bytes(nbytes)))

    async with _running(settings) as store:
        await store.objects.create_bucket("k", "cached")
        for number in range(40):
            await put(f"former-{number:02}")
        await until(lambda: not store.evictor.caches.is_short() and not store.evictor.news)
        before = await _keys(store)
    reading, going_on = queries.cached, threading.Event()

    def slowly(*arguments: Any, **named: Any) -> Any:
        going_on.wait()
        return reading(*arguments, **named)

    monkeypatch.setattr(queries, "cached", slowly)
    async with _running(settings) as store:
        try:
            read, leased = before[2], before[-1]
            store.evictor.note_read("cached", [read])
            assert await store.chunks.matched("cached", [leased], 60.0) == 1
            for number in range(12):
                await put(f"new-{number:02}")
            going_on.set()
            await until(lambda: store.evictor.news.is_restored)
            keys = await _keys(store)
            assert {read, leased} <= set(keys)
            assert len(keys) < len(before) + 12 - 8
            assert set(keys) - set(before) == {f"new-{number:02}" for number in range(12)}
            for number in range(12, 60):
                await put(f"new-{number:02}")
            assert leased in await _keys(store)
        finally:
            going_on.set()


@asynccontextmanager
async def with_victims(tmp_path: Path, *keys: str) -> AsyncIterator[tuple[EmbeddedStore, list[Victim]]]:
    """A store whose books have chosen these objects to leave. Its evictor has restored them, and does nothing more."""
    cache = CacheSettings("cached", 16 * MIB)
    store = EmbeddedStore(StorageSettings(data_dir=tmp_path, caches=(cache,)))
    await store.start()
    await store.objects.create_bucket("k", "cached")
    for key in keys:
        await store.objects.put_object("k", PutRequest("cached", key, 5), BytesBody(b"bytes"))
    running = asyncio.create_task(store.evictor.run())
    await until(lambda: store.evictor.news.is_restored)
    running.cancel()
    await asyncio.wait((running,))
    store.evictor.news.take_over()
    found = store.evictor.caches.of("cached")
    assert found is not None
    victims = found.books.leaving(0, time.time())
    assert sorted(victim.key for victim in victims) == sorted(keys)
    try:
        yield store, victims
    finally:
        store.close()


async def _keys(store: EmbeddedStore) -> list[str]:
    return [entry.key for entry in (await store.objects.list_objects("k", ListRequest("cached"))).objects]


async def test_a_pin_that_was_acknowledged_keeps_an_object_that_was_about_to_leave(tmp_path: Path) -> None:
    """Victims are chosen at once, and leave some at a time: 131 of 137 pins kept nothing."""
    async with with_victims(tmp_path, "a", "b") as (store, victims):
        await store.objects.set_tags("k", "cached", "a", {"objectcache-pin": "2099-01-01"})
        await store.evictor.evictions.evict(victims)
        assert await _keys(store) == ["a"]
        store.evictor.news.take_over()
        cache = store.evictor.caches.of("cached")
        assert cache is not None
        assert (cache.books.count, store.evictor.evictions.evicted_count) == (1, 1)
        assert cache.books.leaving(0, time.time()) == [], "the books hold it"


async def test_a_pin_that_is_over_or_had_no_effect_keeps_nothing(tmp_path: Path) -> None:
    async with with_victims(tmp_path, "a", "b") as (store, victims):
        await store.objects.set_tags("k", "cached", "a", {"objectcache-pin": "2001-01-01"})
        await store.objects.set_tags("k", "cached", "b", {"objectcache-pin": "2099-01-01"})
        refused = [replace(each, entry=each.entry._replace(has_idle_pin=each.key == "b")) for each in victims]
        await store.evictor.evictions.evict(refused)
        assert await _keys(store) == []


async def test_a_lease_that_the_books_were_told_of_meanwhile_keeps_a_victim(tmp_path: Path) -> None:
    """Another task of the evictor brings the books up to date between two changes, where chunks are encoded."""
    async with with_victims(tmp_path, "a", "b") as (store, victims):
        assert store.evictor.note_lookup("cached", ["a"], 1, store.evictor.before_lookup(), 60.0) == 1
        store.evictor.news.take_over()
        await store.evictor.evictions.evict(victims)
        assert await _keys(store) == ["a"]


@pytest.mark.parametrize("has_lease", [False, True])
@pytest.mark.parametrize("fails", [False, True])
async def test_a_victim_that_was_deleted_meanwhile_does_not_come_back(
    tmp_path: Path, fails: bool, has_lease: bool
) -> None:
    """The books had an object then that nobody has, and others left for it. The lookup has read the index before."""
    async with with_victims(tmp_path, "a") as (store, victims):
        cache = store.evictor.caches.of("cached")
        assert cache is not None
        cache.books.allow(MIB)
        if has_lease:
            assert store.evictor.note_lookup("cached", ["a"], 1, store.evictor.before_lookup(), 60.0) == 1
        await store.objects.delete_object("k", "cached", "a")
        store.evictor.news.take_over()
        assert store.evictor.note_lookup("cached", ["a"], 1, store.evictor.before_lookup(), 60.0) == 1
        await (store.evictor.evictions.take_back(victims) if fails else store.evictor.evictions.evict(victims))
        assert cache.books.count == 0


async def test_a_victim_keeps_the_pin_that_the_books_know_where_it_is_leased_too(tmp_path: Path) -> None:
    """The victim is older than the pin: it is not put into the books again."""
    async with with_victims(tmp_path, "a") as (store, victims):
        await store.objects.set_tags("k", "cached", "a", {"objectcache-pin": ""})
        store.evictor.news.take_over()
        assert store.evictor.note_lookup("cached", ["a"], 1, store.evictor.before_lookup(), 60.0) == 1
        await store.evictor.evictions.evict(victims)
        cache = store.evictor.caches.of("cached")
        assert cache is not None
        store.evictor.news.take_over()
        assert cache.books.leaving(0, time.time() + 61.0) == []


async def test_uses_of_what_was_deleted_leave_no_row(tmp_path: Path) -> None:
    """30,000 leases of deleted chunks took 36 MB of the index until the next start."""
    async with with_victims(tmp_path, "a") as (store, _):
        uses = [KeyUse("cached", key, 1.0, 1, None, 2.0) for key in ("a", "gone")]
        await store.change(lambda tx: transaction.note_uses(tx, uses))
        rows = store.reader.here(lambda db: db.execute("SELECT key, use_count, leased_until FROM uses").fetchall())
        assert rows == [("a", 1, 2.0)]


async def test_empty_objects_leave_where_the_index_may_not_grow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They take room in the index alone: with nothing but them, every write was refused for ever."""
    monkeypatch.setattr(evictor, "TICK_S", 0.01)
    settings = StorageSettings(data_dir=tmp_path, caches=(CacheSettings("cached"),), disk_bytes=64 * MIB)
    store = EmbeddedStore(settings)
    await store.start()
    await store.objects.create_bucket("k", "cached")
    for number in range(32):
        await store.objects.put_object("k", PutRequest("cached", f"key-{number}", 0), BytesBody(b""))
    assert len(await _keys(store)) == 32
    monkeypatch.setattr(space.Space, "has_index_room", property(lambda _: objects_in(tmp_path) < 8))
    with pytest.raises(ServerError, match="no room for the index"):  # nothing is evicted yet
        await store.objects.put_object("k", PutRequest("cached", "refused", 0), BytesBody(b""))
    running = asyncio.create_task(store.evictor.run())
    try:
        await until(lambda: objects_in(tmp_path) < 8)
        await store.objects.put_object("k", PutRequest("cached", "taken", 0), BytesBody(b""))
    finally:
        running.cancel()
        await asyncio.wait((running,))
        store.close()


def objects_in(directory: Path) -> int:
    """The objects of the index, by a connection of its own: the evictor asks in a thread, the test in another."""
    with closing(connect_current(directory / "index.sqlite3")) as db:
        return int(db.execute("SELECT count(*) FROM objects").fetchone()[0])


async def test_what_a_restart_takes_over_is_no_work_for_collections(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full collection visited every object of the books, and stopped the event loop for a tenth of a second."""
    noted: list[int] = []
    monkeypatch.setattr(evictor, "note_long_lived", lambda: noted.append(1))
    async with with_victims(tmp_path, "a"):
        pass
    noted.clear()
    store = EmbeddedStore(StorageSettings(data_dir=tmp_path, caches=(CacheSettings("cached", 16 * MIB),)))
    await store.start()
    running = asyncio.create_task(store.evictor.run())
    await until(lambda: store.evictor.news.is_restored)
    assert noted
    running.cancel()
    await asyncio.wait((running,))
    store.close()
