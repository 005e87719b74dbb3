"""Compaction: every object shows what it showed, whatever happens meanwhile, and its bytes lie together."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import sqlite3
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from random import Random

import pytest

from descriptors.errors import CallerError, ErrorCode, ServerError
from descriptors.objects import (
    Attributes,
    ClaimedPart,
    CompleteRequest,
    CopyRequest,
    PartRequest,
    ReadRequest,
    UploadRef,
    UploadRequest,
)
from objectcache.cli.compact import run as run_command
from storage_server.home.embedded import EmbeddedStore
from storage_server.kernel.beside import StoreBeside
from storage_server.kernel.data.extents import extent_place
from storage_server.kernel.data.segments import SEGMENT_EXTENTS_MAX
from storage_server.kernel.upkeep import compaction, pace
from storage_server.kernel.upkeep.compaction_rows import FileUse
from storage_server.kernel.upkeep.scrub import scrub
from storage_server.planning.durability import Durability
from storage_server.planning.extent import ALIGNMENT_BYTES
from storage_server.settings import StorageSettings
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
    named_files,
    opened,
    put,
    settled,
)
from tests.support.waiting import until

KEYS = 24
Action = Callable[[EmbeddedStore], Awaitable[None]]


def roll(store: EmbeddedStore) -> None:
    """What comes next goes into another segment; this one is closed."""
    store.segments.close()


async def sparse(directory: Path, disk: FaultyDisk | None = None, **options: object) -> EmbeddedStore:
    """A closed segment of 24 objects, of which every fourth is left; and one of its own file."""
    store = await opened(directory, disk, **options)
    await store.objects.create_bucket("k", "bbb")
    await put(store, "key-00", content(SMALL))
    await asyncio.gather(*(put(store, f"key-{index:02}", content(SMALL, index)) for index in range(1, KEYS)))
    await put(store, "large", content(LARGE))
    await store.objects.delete_objects("k", "bbb", [f"key-{index:02}" for index in range(KEYS) if index % 4])
    roll(store)
    if options.get("durability") is Durability.RELAXED:  # a segment is closed when it is synced
        await until(lambda: not store.segments._writing)
    return store


LEFT = {f"key-{index:02}": content(SMALL, index) for index in range(0, KEYS, 4)} | {"large": content(LARGE)}


async def shown(store: EmbeddedStore) -> dict[str, bytes]:
    keys = store.reader.here(lambda db: [row[0] for row in db.execute("SELECT key FROM objects")])
    return {key: await get(store, key) for key in keys}


def places(store: EmbeddedStore) -> list[tuple[str, int, int]]:
    """The places of packed extents, in the order of versions."""
    sql = "SELECT file_id, file_offset, nbytes FROM extents WHERE nbytes < ? ORDER BY version, object_offset"
    return store.reader.here(lambda db: db.execute(sql, (LARGE,)).fetchall())


def assert_neighbours(found: list[tuple[str, int, int]]) -> None:
    for (file_id, offset, nbytes), following in itertools.pairwise(found):
        assert following[:2] == (file_id, offset + -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES)


async def test_live_extents_of_a_sparse_segment_lie_together_in_a_new_one(tmp_path: Path) -> None:
    store = await sparse(tmp_path)
    before = await named_files(store)
    tally = await store.compactor.compact()
    assert (tally.segments_read, tally.segments_written, tally.extents, tally.rows) == (1, 1, 6, 6)
    assert await shown(store) == LEFT
    found = places(store)
    assert_neighbours(found)
    assert found[0][1] == 0
    await settled(store)
    assert len(files_in(store) & before) == 1, "the large object's file stays, the segment goes"
    assert len(files_in(store)) == 2
    assert (await store.compactor.compact()).segments_read == 0
    store.close()


async def test_small_segments_become_one_and_objects_stay_in_the_order_they_came(tmp_path: Path) -> None:
    """Each restart begins a segment; a prefix stored across several lies in one piece afterwards."""
    store = await opened(tmp_path)
    await store.objects.create_bucket("k", "bbb")
    for index in range(9):
        await put(store, f"key-{index % 3}{index}", content(5000, index))
        store.close()
        store = await opened(tmp_path)
    assert len(files_in(store)) == 9
    tally = await store.compactor.compact()
    assert (tally.segments_read, tally.segments_written) == (9, 1)
    assert_neighbours(places(store))
    assert await shown(store) == {f"key-{index % 3}{index}": content(5000, index) for index in range(9)}
    store.close()


async def test_a_segment_holds_at_most_256_extents_after_compaction_too(tmp_path: Path) -> None:
    store = await opened(tmp_path)
    await store.objects.create_bucket("k", "bbb")
    for group in range(12):
        await asyncio.gather(*(put(store, f"key-{group}-{index}", b"x") for index in range(60)))
        roll(store)
    await store.compactor.compact()
    sql = "SELECT count(*) FROM extents GROUP BY file_id"
    counts = store.reader.here(lambda db: [row[0] for row in db.execute(sql)])
    assert sorted(counts) == [240, 240, 240]
    assert max(counts) <= SEGMENT_EXTENTS_MAX
    store.close()


async def test_copies_and_parts_move_with_the_bytes_they_share(tmp_path: Path) -> None:
    """Rows that name the same bytes go on naming the same bytes: nothing is stored twice."""
    store = await sparse(tmp_path)
    await store.objects.copy_object("k", CopyRequest(ReadRequest("bbb", "key-04"), "bbb", "copy"))
    upload = await begun(store, "parts")
    for number, seed in ((3, 103), (1, 101)):
        body = content(SMALL, seed)
        sent = await store.uploads.put_part("k", PartRequest(upload, number, SMALL), BytesBody(body))
    roll(store)
    tally = await store.compactor.compact()
    assert (tally.extents, tally.rows) == (8, 9)
    assert await shown(store) == LEFT | {"copy": LEFT["key-04"]}
    named = store.reader.here(
        lambda db: db.execute(
            "SELECT count(*), count(DISTINCT file_offset) FROM extents WHERE nbytes = ?", (SMALL,)
        ).fetchone()
    )
    assert named == (9, 8)
    await store.uploads.complete_upload("k", CompleteRequest(upload, [ClaimedPart(3, sent_etag(store, upload, 3))]))
    assert sent.part_number == 1
    assert await get(store, "parts") == content(SMALL, 103)
    store.close()


async def begun(store: EmbeddedStore, key: str) -> UploadRef:
    return UploadRef("bbb", key, await store.uploads.create_upload("k", UploadRequest("k", "bbb", key, Attributes())))


def sent_etag(store: EmbeddedStore, upload: UploadRef, number: int) -> str:
    sql = "SELECT etag FROM extents JOIN uploads USING (version) WHERE upload_id = ? AND part_number = ?"
    return store.reader.here(lambda db: str(db.execute(sql, (upload.upload_id, number)).fetchone()[0]))


async def test_what_is_still_written_and_what_has_its_own_file_is_left_alone(tmp_path: Path) -> None:
    store = await opened(tmp_path)
    await store.objects.create_bucket("k", "bbb")
    for index in range(8):
        await put(store, f"key-{index}", content(SMALL, index))
        await put(store, f"large-{index}", content(LARGE, index))
    await store.objects.delete_objects("k", "bbb", [f"key-{index}" for index in range(1, 8)])
    assert (await store.compactor.compact()).segments_read == 0
    store.close()


def between_proof_and_commit(store: EmbeddedStore, action: Action) -> None:
    """Have something happen when the new bytes are ready and the index knows nothing of them."""
    prove = store.compactor._prove

    async def proved_then(*arguments: object) -> None:
        await prove(*arguments)  # type: ignore[arg-type]
        await action(store)

    store.compactor._prove = proved_then  # type: ignore[method-assign]


async def delete_one(store: EmbeddedStore) -> None:
    await store.objects.delete_object("k", "bbb", "key-08")


async def overwrite_one(store: EmbeddedStore) -> None:
    await put(store, "key-08", b"newer")


async def copy_one(store: EmbeddedStore) -> None:
    await store.objects.copy_object("k", CopyRequest(ReadRequest("bbb", "key-08"), "bbb", "copy"))


async def rename_one(store: EmbeddedStore) -> None:
    await copy_one(store)
    await delete_one(store)


async def overwrite_by_copy(store: EmbeddedStore) -> None:
    await store.objects.copy_object("k", CopyRequest(ReadRequest("bbb", "key-08"), "bbb", "key-12"))


async def delete_all(store: EmbeddedStore) -> None:
    await store.objects.delete_objects("k", "bbb", list(LEFT))


MEANWHILE: list[tuple[Action, dict[str, bytes | None]]] = [
    (delete_one, {"key-08": None}),
    (overwrite_one, {"key-08": b"newer"}),
    (copy_one, {"copy": LEFT["key-08"]}),
    (rename_one, {"copy": LEFT["key-08"], "key-08": None}),
    (overwrite_by_copy, {"key-12": LEFT["key-08"]}),
    (delete_all, dict.fromkeys(LEFT)),
]


@pytest.mark.parametrize("durability", Durability)
@pytest.mark.parametrize(("action", "changes"), MEANWHILE, ids=lambda value: getattr(value, "__name__", ""))
async def test_what_changes_before_the_commit_wins(
    tmp_path: Path, action: Action, changes: dict[str, bytes | None], durability: Durability
) -> None:
    """The rows there are at the commit are moved, not those there were when the bytes were read."""
    store = await sparse(tmp_path, durability=durability)
    between_proof_and_commit(store, action)
    await store.compactor.compact()
    expected = {key: data for key, data in (LEFT | changes).items() if data is not None}
    assert await shown(store) == expected
    await settled(store)
    assert files_in(store) == await named_files(store) | (
        {store.segments._current.file_id} if written(store) else set()
    )
    store.close()
    store = await opened(tmp_path)
    assert await shown(store) == expected
    assert all(checked.damage is None for checked in scrub(tmp_path))
    store.close()


def written(store: EmbeddedStore) -> bool:
    return store.segments._current is not None


async def test_the_new_place_of_what_was_deleted_meanwhile_is_given_back(tmp_path: Path) -> None:
    store = await sparse(tmp_path)
    between_proof_and_commit(store, delete_one)
    await store.compactor.compact()
    await settled(store)
    (name,) = {file_id for file_id, _, _ in places(store)}
    path = extent_place(tmp_path, name).path
    await until(lambda: path.stat().st_blocks * 512 < path.stat().st_size - SMALL // 2)
    assert await shown(store) == {key: data for key, data in LEFT.items() if key != "key-08"}
    store.close()


async def test_a_reader_keeps_the_old_file_until_it_is_done(tmp_path: Path) -> None:
    store = await sparse(tmp_path)
    before = places(store)[0][0]
    async with store.objects.open_object("k", ReadRequest("bbb", "key-04")) as read:
        assert (await store.compactor.compact()).segments_read == 1
        assert before in files_in(store)
        assert b"".join([bytes(piece) async for piece in read.body]) == LEFT["key-04"]
    await settled(store)
    assert before not in files_in(store)
    assert store.files.pinned_count == 0
    store.close()


async def test_a_reader_in_another_process_sees_every_object_all_the_time(tmp_path: Path) -> None:
    """It opens files by the index's word; one that has gone means asking the index again, one it holds stays."""
    store = await sparse(tmp_path)
    beside = StoreBeside(tmp_path, 64, 1 << 20)
    await beside.start()
    read_count = 0
    is_over = False

    async def read_on() -> None:
        nonlocal read_count
        while not is_over:
            for key, data in LEFT.items():
                async with beside.reads.open_object("k", ReadRequest("bbb", key)) as read:
                    await asyncio.sleep(0)
                    assert b"".join([bytes(piece) async for piece in read.body]) == data
                    read_count += 1

    readers = [asyncio.create_task(read_on()) for _ in range(3)]
    for index in range(12):
        await put(store, f"passing-{index}", content(SMALL, index))
        roll(store)
        await store.objects.delete_object("k", "bbb", f"passing-{index - 1}")
        await store.compactor.compact()
    is_over = True
    await asyncio.gather(*readers)
    assert read_count > 12
    await beside.close()
    store.close()


async def test_a_damaged_segment_stays_where_it_is_and_is_named(tmp_path: Path) -> None:
    """No copy of its bytes could be proved; what is sound in it goes on being served, and so do all others."""
    store = await sparse(tmp_path)
    (damaged,) = {file_id for file_id, _, _ in places(store)}
    for index in range(3):
        await put(store, f"other-{index}", content(SMALL, 50 + index))
        roll(store)
    offset = places(store)[1][1] + 20_000
    with extent_place(tmp_path, damaged).path.open("r+b") as file:
        file.seek(offset)
        file.write(b"\x00\xff")
    tally = await store.compactor.compact()
    assert [one.file_id for one in tally.damaged] == [damaged]
    assert "checksum" in tally.damaged[0].reason
    assert (tally.segments_read, tally.segments_written) == (3, 1)
    others = {f"other-{index}": content(SMALL, 50 + index) for index in range(3)}
    for key, data in (LEFT | others).items():
        if key != "key-04":
            assert await get(store, key) == data
    with pytest.raises(ServerError):
        await get(store, "key-04")
    await settled(store)
    assert [checked.damage.key for checked in scrub(tmp_path) if checked.damage] == ["key-04"]
    assert (await store.compactor.compact()).damaged == [], "it is not read again and again"
    await store.objects.delete_object("k", "bbb", "key-04")
    store.close()
    store = await opened(tmp_path)
    assert (await store.compactor.compact()).damaged == []
    assert await shown(store) == {key: data for key, data in (LEFT | others).items() if key != "key-04"}
    store.close()


async def test_each_step_comes_after_the_one_before(tmp_path: Path) -> None:
    """Name, bytes, proof from the disk; the commit; only then does the old file go."""
    disk = FaultyDisk()
    store = await sparse(tmp_path, disk)
    (old,) = {file_id for file_id, _, _ in places(store)}
    await settled(store)
    disk.diary.clear()
    commit = store.committer._transact

    def transact(batch: object) -> list[str]:
        if batch:
            disk.diary.append(("commit", ""))
        return commit(batch)  # type: ignore[arg-type]

    store.committer._transact = transact  # type: ignore[method-assign, assignment]
    await store.compactor.compact()
    await settled(store)
    (new,) = {file_id for file_id, _, _ in places(store)}
    named = {old: "old", new: "new", new[:2]: "directory", "": ""}
    diary = [(call, named[name]) for call, name in disk.diary if name != "extents"]  # a new directory's name
    assert [pair for pair, _ in itertools.groupby(diary)] == [
        ("create", "new"),
        ("sync_directory", "directory"),
        ("open", "old"),
        ("read", "old"),
        ("write", "new"),
        ("read", "old"),
        ("write", "new"),
        ("read", "old"),
        ("write", "new"),
        ("read", "old"),
        ("write", "new"),
        ("read", "old"),
        ("write", "new"),
        ("read", "old"),
        ("write", "new"),
        ("sync", "new"),
        ("open", "new"),
        ("read", "new"),
        ("commit", ""),
        ("unlink", "old"),
    ]
    store.close()


async def test_relaxed_durability_keeps_the_old_file_until_the_move_is_durable(tmp_path: Path) -> None:
    store = await sparse(tmp_path, durability=Durability.RELAXED)
    before = places(store)[0][0]
    is_synced = asyncio.Event()
    sync = store.committer._sync_relaxed
    store.committer._sync_relaxed = lambda: sync() if is_synced.is_set() else None  # type: ignore[method-assign]
    assert (await store.compactor.compact()).segments_read == 1
    await put(store, "another", b"change")
    assert before in files_in(store)
    assert before not in await named_files(store)
    is_synced.set()
    await settled(store)
    assert before not in files_in(store)
    store.close()


async def test_compaction_takes_its_time_and_more_of_it_while_others_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the sum of its pauses: what it moves, twice (it is read back), over the rate; sixteen times that when busy."""
    for is_busy in (False, True):
        store = await sparse(tmp_path / str(is_busy))
        slept_s = 0.0
        sleep = asyncio.sleep

        async def asleep(seconds: float, sleep: Callable[[float], Awaitable[None]] = sleep) -> None:
            nonlocal slept_s
            slept_s += seconds
            await sleep(0)

        monkeypatch.setattr(pace.asyncio, "sleep", asleep)
        store.compactor._is_busy = lambda _, busy=is_busy: busy  # type: ignore[assignment, misc]
        await store.compactor.compact(bytes_per_s=1e6)
        monkeypatch.setattr(pace.asyncio, "sleep", sleep)
        expected_s = 2 * 6 * SMALL / 1e6 * (pace.BUSY_SLOWDOWN if is_busy else 1)
        assert math.isclose(slept_s, expected_s, rel_tol=0.01, abs_tol=2 * pace.TICK_S)
        store.close()


async def test_the_store_is_busy_while_somebody_reads_or_writes_and_compaction_does_not_count(tmp_path: Path) -> None:
    store = await sparse(tmp_path)
    assert not store._is_busy(0)
    assert store.files.pin(list(files_in(store)))
    assert store._is_busy(0)
    assert not store._is_busy(2)
    store.files.unpin(list(files_in(store)))
    async with store.objects.open_object("k", ReadRequest("bbb", "large")):
        assert store._is_busy(0)
    assert not store._is_busy(0)
    store.close()


async def test_compaction_never_takes_the_last_room_of_a_disk(tmp_path: Path) -> None:
    store = await sparse(tmp_path, FaultyDisk())
    disk_of(store).free_bytes = lambda _: compaction.ROOM_BYTES_MIN  # type: ignore[method-assign]
    with pytest.raises(ServerError) as refused:
        await store.compactor.compact()
    assert refused.value.code is ErrorCode.INSUFFICIENT_STORAGE
    await settled(store)
    assert await shown(store) == LEFT
    store.close()


async def test_the_periodic_task_compacts_and_outlives_failures(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = await sparse(tmp_path, FaultyDisk())
    disk_of(store).fail["create"] = 28
    task = asyncio.create_task(store.compactor.run(0.01, math.inf))
    await until(lambda: caplog.text.count("compaction: ") >= 2)
    disk_of(store).fail.clear()
    await until(lambda: places(store)[1][1] < 2 * SMALL)
    task.cancel()
    await asyncio.wait([task])
    assert await shown(store) == LEFT
    store.close()


def test_the_command_compacts_a_store_nobody_serves(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = StorageSettings(data_dir=tmp_path / "data", packed_bytes_max=PACKED_BYTES_MAX)
    assert run_command(settings, None) == 2
    store = asyncio.run(sparse(tmp_path / "data"))
    with pytest.raises(BlockingIOError):
        run_command(settings, None)
    store.close()
    assert run_command(settings, tmp_path / "report") == 0
    report = json.loads((tmp_path / "report").read_text())
    assert (report["segments_read"], report["segments_written"], report["extents"]) == (1, 1, 6)
    assert run_command(settings, None) == 0
    assert "0 segments became 0" in capsys.readouterr().out
    with pytest.raises(CallerError):
        asyncio.run(_missing(settings))


async def _missing(settings: StorageSettings) -> None:
    store = EmbeddedStore(settings)
    await store.start()
    try:
        assert await shown(store) == LEFT
        await get(store, "key-01")
    finally:
        store.close()


@pytest.mark.parametrize(
    "wrong", [{"compact_live_fraction_max": 1.0}, {"compact_live_fraction_max": -0.1}, {"compact_bytes_per_s": 0.0}]
)
def test_settings_that_would_never_end_are_refused(tmp_path: Path, wrong: dict[str, float]) -> None:
    """A full segment rewritten is a full segment again."""
    with pytest.raises(ValueError, match="compact_"):
        StorageSettings(data_dir=tmp_path, **wrong)  # type: ignore[arg-type]


async def test_what_has_not_changed_is_not_looked_at_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = await sparse(tmp_path)
    await store.compactor.compact()
    await settled(store)
    asked: list[str] = []
    file_uses = compaction.file_uses

    def counted(db: sqlite3.Connection, file_ids: Sequence[str]) -> list[FileUse]:
        asked.extend(file_ids)
        return file_uses(db, file_ids)

    monkeypatch.setattr(compaction, "file_uses", counted)
    await store.compactor.compact()
    asked.clear()  # its own file was new to it
    await store.compactor.compact()
    assert asked == []
    [(file_id, _, _)] = set(places(store)[:1])
    await store.objects.delete_objects("k", "bbb", ["key-00"])
    await store.compactor.compact()
    assert set(asked) == {file_id}
    store.close()


@pytest.mark.parametrize("seed", range(4))
async def test_looking_at_what_has_changed_finds_what_looking_at_all_finds(tmp_path: Path, seed: int) -> None:
    random = Random(seed)
    store = await opened(tmp_path)
    await store.objects.create_bucket("k", "bbb")
    keys = [f"key-{index:02}" for index in range(12)]

    async def change() -> None:
        key, other = random.choice(keys), random.choice(keys)
        match random.randrange(5):
            case 0 | 1:
                await put(store, key, content(random.choice([1, 5000, LARGE]), random.randrange(3)))
            case 2:
                await store.objects.delete_objects("k", "bbb", [key])
            case 3:
                with suppress(CallerError):
                    await store.objects.copy_object("k", CopyRequest(ReadRequest("bbb", key), "bbb", other))
            case 4:
                roll(store)

    for _ in range(12):
        for _ in range(random.randrange(8)):
            await change()
        if random.random() < 0.4:
            await store.compactor.compact()
        await store.compactor._look()
        found = dict(store.compactor._candidates)
        store.compactor._changed = None
        await store.compactor._look()
        assert store.compactor._candidates == found
    store.close()
