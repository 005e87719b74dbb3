"""A prefix is looked up in queries of bounded work, whatever its objects are made of, and callers take turns."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from descriptors.errors import CallerError, ChunkUnavailable, ServerError
from descriptors.objects import (
    ClaimedPart,
    CompleteRequest,
    PartRequest,
    PutRequest,
    ReadRequest,
    UploadRef,
    UploadRequest,
)
from objectcache.adapters.caller import CALLER, CallerTurns
from objectcache.adapters.threads import computed
from storage_server.home.embedded import EmbeddedStore
from storage_server.kernel import prefix_reads, reads, shared_room
from storage_server.kernel.index import queries, reader, upload_changes
from storage_server.kernel.shared_room import SharedRoom
from storage_server.planning.extent import Extent
from tests.support.chunks import BytesBody
from tests.support.faulty_disk import FaultyDisk
from tests.support.sources import resolved
from tests.support.store_bed import opened


@pytest.fixture
async def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[EmbeddedStore]:
    monkeypatch.setattr(upload_changes, "PART_BYTES_MIN", 1)
    made = await opened(tmp_path / "data", FaultyDisk())
    await made.objects.create_bucket("k", "bbb")
    yield made
    made.close()


async def put_in_parts(store: EmbeddedStore, key: str, count: int) -> None:
    upload = UploadRef("bbb", key, await store.uploads.create_upload("k", UploadRequest("k", "bbb", key)))
    claimed = []
    for number in range(1, count + 1):
        part = await store.uploads.put_part("k", PartRequest(upload, number, 4), BytesBody(f"{number:4}".encode()))
        claimed.append(ClaimedPart(number, part.etag))
    await store.uploads.complete_upload("k", CompleteRequest(upload, claimed))


async def test_a_query_ends_at_the_bound_of_extents(store: EmbeddedStore) -> None:
    keys = [f"key {number}" for number in range(6)]
    for key in keys:
        await put_in_parts(store, key, 3)

    def looked_up(*wanted: str, extents_max: int) -> list[int | None]:
        found = store.reader.here(lambda db: queries.prefix(db, "bbb", wanted, extents_max))
        return [None if each is None else len(each) for each in found]

    assert looked_up(*keys, extents_max=7) == [3, 3, 3]
    assert looked_up(*keys, extents_max=6) == [3, 3]
    assert looked_up(*keys, extents_max=1) == [3]
    assert looked_up("none", keys[0], "none", extents_max=9) == [None, 3, None]
    assert looked_up(*keys, extents_max=100) == [3] * 6


@pytest.mark.parametrize("remembers", [True, False])
async def test_a_prefix_of_many_parts_is_found_in_several_queries(
    store: EmbeddedStore, monkeypatch: pytest.MonkeyPatch, remembers: bool
) -> None:
    monkeypatch.setattr(prefix_reads, "EXTENTS_AT_ONCE", 4)
    if not remembers:
        monkeypatch.setattr(store.objects.prefixes, "_resolved", None)
    keys = [f"key {number}" for number in range(6)]
    for key in keys:
        await put_in_parts(store, key, 3)
    assert await store.objects.prefixes.matched("bbb", keys[::2]) == 3
    assert store.objects.damaged.count == 0
    for _ in range(2):
        assert await store.objects.prefixes.matched("bbb", [*keys, "none"]) == 6
        found = await resolved(store.objects.prefixes, "bbb", [*keys, "none", keys[0]])
        assert [None if each is None else len(each) for each in found] == [3] * 6 + [None, 3]
    async with store.objects.prefixes.open("bbb", keys, 12, prefix_only=False) as chunks:
        assert [[extent.object_offset for extent in chunk] for chunk in chunks] == [[0, 4, 8]] * 6


async def test_an_object_of_too_many_parts_is_no_chunk(store: EmbeddedStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queries, "CHUNK_EXTENTS_MAX", 2)
    for key, count in (("one", 2), ("many", 3), ("other", 2)):
        await put_in_parts(store, key, count)
    keys = ["one", "many", "other"]
    found = await resolved(store.objects.prefixes, "bbb", keys)
    assert [None if each is None else len(each) for each in found] == [2, None, 2]
    assert await store.objects.prefixes.matched("bbb", keys) == 1
    with pytest.raises(ChunkUnavailable, match=r"chunk_keys\[1\] is not stored as a chunk"):
        async with store.objects.prefixes.open("bbb", keys, 8, prefix_only=False):
            pass


async def test_the_chunks_of_a_request_have_so_many_parts_together(
    store: EmbeddedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefix_reads, "PREFIX_EXTENTS_MAX", 5)
    keys = ["one", "other"]
    for key in keys:
        await put_in_parts(store, key, 3)
    with pytest.raises(CallerError, match="store each in one PUT"):
        async with store.objects.prefixes.open("bbb", keys, 12, prefix_only=False):
            pass
    assert await store.objects.prefixes.matched("bbb", keys) == 2


async def test_callers_take_turns() -> None:
    """A caller that asks a hundred times waits behind itself; another one waits only for the turn that is held."""
    turns = CallerTurns(1)
    order: list[str] = []

    async def ask(caller: str, name: str) -> None:
        CALLER.set(caller)
        async with turns.turn():
            order.append(name)
            await asyncio.sleep(0)

    tasks = [asyncio.ensure_future(ask("many", f"many {number}")) for number in range(100)]
    await asyncio.sleep(0)
    tasks += [asyncio.ensure_future(ask("few", f"few {number}")) for number in range(2)]
    gone = asyncio.ensure_future(ask("gone", "gone"))
    await asyncio.sleep(0)
    gone.cancel()
    await asyncio.gather(*tasks)
    assert gone.cancelled()
    assert order.index("few 0") <= 3
    assert order.index("few 1") <= 5
    assert [name for name in order if name.startswith("many")] == [f"many {number}" for number in range(100)]
    async with turns.turn():  # nobody kept one
        pass


async def test_few_parts_of_lookups_are_in_work_at_once(store: EmbeddedStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """The event loop would stand still for as many parts as a caller has connections."""
    await put_in_parts(store, "key", 1)
    running = most = 0
    resolve = store.objects.prefixes._resolve

    async def counted(bucket: str, keys: Sequence[str]) -> list[list[Extent] | None]:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1
        return await resolve(bucket, keys)

    monkeypatch.setattr(store.objects.prefixes, "_resolve", counted)
    assert (
        await asyncio.gather(*(store.objects.prefixes.matched("bbb", ["key", "none"]) for _ in range(20))) == [1] * 20
    )
    assert most == prefix_reads.PARTS_AT_ONCE


async def test_a_turn_that_comes_as_its_caller_leaves_goes_to_the_next() -> None:
    turns = CallerTurns(1)
    entered = asyncio.Event()

    async def wait() -> None:
        async with turns.turn():
            entered.set()

    async with turns.turn():
        leaving, staying = (asyncio.ensure_future(wait()) for _ in range(2))
        await asyncio.sleep(0)
    leaving.cancel()
    await asyncio.gather(leaving, staying, return_exceptions=True)
    assert leaving.cancelled()
    assert entered.is_set()


async def test_the_store_still_takes_an_object_of_many_parts(store: EmbeddedStore) -> None:
    """Chunks are bounded, objects are not: any S3 client reads it."""
    await put_in_parts(store, "many", queries.CHUNK_EXTENTS_MAX + 1)
    await store.objects.put_object("k", PutRequest("bbb", "next", 4), BytesBody(b"data"))
    assert await store.objects.prefixes.matched("bbb", ["next", "many"]) == 1
    found = store.objects.stored("bbb", "many")
    assert found is not None
    assert found.info.nbytes == 4 * (queries.CHUNK_EXTENTS_MAX + 1)


async def test_checksums_of_large_chunks_are_read_for_deliveries_alone(
    store: EmbeddedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An object of 1 GiB has 256 KiB of checksums: 800 of them named in a lookup took hundreds of MB."""
    body, keys = bytes(queries.CHECKED_EXTENT_BYTES_MAX + 1), ["large", "other", "small"]
    for key in keys[:2]:
        await store.objects.put_object("k", PutRequest("bbb", key, len(body)), BytesBody(body))
    await store.objects.put_object("k", PutRequest("bbb", "small", 4), BytesBody(b"1234"))
    for _ in range(2):
        found = await resolved(store.objects.prefixes, "bbb", keys)
        assert [[extent.has_checksums for extent in each or ()] for each in found] == [[False], [False], [True]]
    monkeypatch.setattr(prefix_reads, "CHECKSUMS_AT_ONCE_BYTES", 1)
    async with store.objects.prefixes.open("bbb", keys[:2], len(body), prefix_only=False) as chunks:
        assert [[extent.has_checksums for extent in each] for each in chunks] == [[True], [True]]
    assert not any(extent.checksums for extent in store.objects.locations("bbb", "large"))


async def test_a_delivery_is_not_larger_than_the_memory_for_its_checksums(store: EmbeddedStore) -> None:
    async with store.objects.prefixes.reserving() as held:
        with pytest.raises(CallerError, match="one delivery has"):
            await store.objects.prefixes.reserve(held, 1 << 16, 1 << 30)
        assert held.amount == 0
        await store.objects.prefixes.reserve(held, 1 << 9, 1 << 30)
        assert held.amount == reads.CHECKSUMS_BYTES_MAX // 4


async def test_a_read_of_a_large_object_holds_memory_for_its_checksums(
    store: EmbeddedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reads, "CHECKSUMS_HERE_BYTES", 4)
    body = bytes(3 * 16_384)
    await store.objects.put_object("k", PutRequest("bbb", "key", len(body)), BytesBody(body))
    monkeypatch.setattr(store.objects, "_checksums", SharedRoom(100, 12, "none left"))
    monkeypatch.setattr(shared_room, "PATIENCE_S", 0.0)
    async with store.objects.open_object("k", ReadRequest("bbb", "key")) as first:
        assert b"".join([bytes(piece) async for piece in first.body]) == body
        with pytest.raises(ServerError, match="none left"):
            async with store.objects.open_object("k", ReadRequest("bbb", "key")):
                raise AssertionError
        async with store.objects.open_object("other", ReadRequest("bbb", "key")) as second:
            assert b"".join([bytes(piece) async for piece in second.body]) == body
    async with store.objects.open_stored("bbb", "key") as (_, extents):
        assert [extent.has_checksums for extent in extents] == [True]


async def test_checksums_are_counted_while_they_are_looked_up(
    store: EmbeddedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A descriptor of 32,000 copies of a chunk of 16 MiB took 146 MiB before it waited for its share."""
    monkeypatch.setattr(prefix_reads, "HERE_ITEMS_MAX", 1)
    monkeypatch.setattr(prefix_reads, "CHECKSUMS_HERE_BYTES", 0)
    keys = [f"key{number}" for number in range(4)]
    for key in keys:
        await store.objects.put_object("k", PutRequest("bbb", key, 4), BytesBody(b"data"))
    monkeypatch.setattr(store.objects.prefixes, "_checksums", SharedRoom(48, 24, "none left"))
    looked_up = store.objects.prefixes._resolve
    asked = list[str]()

    async def noted(bucket: str, wanted: Sequence[str]) -> list[list[Extent] | None]:
        asked.append(wanted[0])
        return await looked_up(bucket, wanted)

    monkeypatch.setattr(store.objects.prefixes, "_resolve", noted)
    async with store.objects.prefixes.open("bbb", keys[:3], 4, prefix_only=False) as chunks:
        assert len(chunks) == 3
    asked.clear()
    with pytest.raises(CallerError, match="one delivery has at most"):
        async with store.objects.prefixes.open("bbb", [*keys, *keys], 4, prefix_only=False):
            raise AssertionError
    assert asked == keys
    async with store.objects.prefixes.reserving() as held:
        await held.at_least(24)  # nothing is held any more


async def test_one_caller_leaves_a_turn_to_others() -> None:
    turns, entered = CallerTurns(2, 1), list[str]()

    async def ask(caller: str, may_end: asyncio.Event) -> None:
        CALLER.set(caller)
        async with turns.turn():
            entered.append(caller)
            await may_end.wait()

    may_end = asyncio.Event()
    tasks = [asyncio.ensure_future(ask("many", may_end)) for _ in range(3)]
    await asyncio.sleep(0)
    tasks.append(asyncio.ensure_future(ask("other", may_end)))
    await asyncio.sleep(0)
    assert entered == ["many", "other"]
    may_end.set()
    await asyncio.gather(*tasks)
    assert sorted(entered) == ["many", "many", "many", "other"]


async def test_pins_are_given_back_when_a_reader_is_cancelled_again_and_again(
    store: EmbeddedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Releasing many pins waited for a turn, and a second cancellation took it out of the queue."""
    monkeypatch.setattr(reader, "HERE_ITEMS_MAX", 0)
    await store.objects.put_object("k", PutRequest("bbb", "key", 4), BytesBody(b"data"))
    may_end, opened_it = threading.Event(), asyncio.Event()

    async def read() -> None:
        async with store.objects.open_object("k", ReadRequest("bbb", "key")):
            opened_it.set()
            await asyncio.Event().wait()

    reading = asyncio.ensure_future(read())
    await opened_it.wait()
    busy = [asyncio.ensure_future(computed(lambda: may_end.wait(30), is_long=True)) for _ in range(8)]
    await asyncio.sleep(0)
    for _ in range(3):
        reading.cancel()
        await asyncio.sleep(0)
    may_end.set()
    await asyncio.gather(*busy)
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert store.files.pinned_count == 0
