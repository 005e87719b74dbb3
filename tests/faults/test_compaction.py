"""Compaction on disks that fail at any step, and cut off at any step: nothing that was stored is lost, or wrong."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from descriptors.errors import ErrorCode, ServerError
from objectcache.adapters.beneath import Beneath
from storage_server.home.embedded import EmbeddedStore
from storage_server.planning.durability import Durability
from tests.faults.crash.audit import audit
from tests.faults.crash.power_disk import Loss, PowerDisk, extents_after_cut
from tests.faults.crash.power_index import WatchedIndex, copy_index, log_position, no_commits
from tests.support.faulty_disk import FaultyDisk
from tests.support.store_bed import content, files_in, get, named_files, opened, put, settled
from tests.support.waiting import LIMIT_S, until

MEMORY = Path("/dev/shm")
STEPS_MAX = 60
SMALL = 20_000
KEYS = 12
LEFT = {f"key-{index}": content(SMALL, index) for index in range(0, KEYS, 4)}


@pytest.fixture
def memory_path(tmp_path: Path) -> Iterator[Path]:
    """In memory where there is such a thing: many stores are made, and their syncs are of no interest."""
    if not MEMORY.is_dir():
        yield tmp_path
        return
    path = Path(tempfile.mkdtemp(dir=MEMORY, prefix="objectcache-test-"))
    yield path
    shutil.rmtree(path)


async def sparse(directory: Path, disk: Any, **options: object) -> EmbeddedStore:
    """Two closed segments, of which little is left."""
    store = await opened(directory, disk, **options)
    await store.objects.create_bucket("k", "bbb")
    for start in (0, KEYS // 2):
        for index in range(start, KEYS if start else KEYS // 2):
            await put(store, f"key-{index}", content(SMALL, index))
        store.segments.close()
    await store.objects.delete_objects("k", "bbb", [f"key-{index}" for index in range(KEYS) if index % 4])
    await synced(store)
    return store


async def synced(store: EmbeddedStore) -> None:
    """Until the segments there are, are closed: under relaxed durability when they have been synced."""
    await until(lambda: not store.segments.written_count and not store.committer.is_dirty)


async def put_many(store: EmbeddedStore) -> None:
    for index in range(400):
        await put(store, f"more-{index}-" + "x" * 900, b"new")


async def shown(store: EmbeddedStore) -> dict[str, bytes]:
    keys = store.reader.here(lambda db: [row[0] for row in db.execute("SELECT key FROM objects")])
    return {key: await get(store, key) for key in keys}


class FailingAt(FaultyDisk):
    """The `at`-th operation after `arm` fails, and with `is_lasting` all of its kind from then on."""

    def __init__(self) -> None:
        super().__init__()
        self.at = 0
        self.failed = ""

    def arm(self, at: int, error: int, *, is_lasting: bool) -> None:
        self.at, self.error, self.is_lasting = at, error, is_lasting

    def about_to(self, call: str, name: str) -> None:
        if self.at:
            self.at -= 1
            if not self.at:
                self.failed = call
                if self.is_lasting:
                    self.fail[call] = self.error
                raise OSError(self.error, f"injected {call}")
        super().about_to(call, name)


@pytest.mark.slow
@pytest.mark.parametrize("is_lasting", [False, True], ids=["once", "lasting"])
@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO])
async def test_a_disk_that_fails_at_any_step_costs_nothing_that_is_stored(
    memory_path: Path, error: int, is_lasting: bool
) -> None:
    """Also when even clearing up fails. What was begun is gone afterwards, and the next attempt succeeds."""
    failed = set()
    for step in range(1, STEPS_MAX):
        disk = FailingAt()
        store = await sparse(memory_path / str(step), disk)
        for index in range(256):  # whichever the new file's is: each attempt takes the same steps
            store.segments.make_directory(Beneath(memory_path / str(step)) / "extents" / f"{index:02x}")
        disk.arm(step, error, is_lasting=is_lasting)
        with contextlib.suppress(ServerError):
            await store.compactor.compact()
        async with asyncio.timeout(LIMIT_S):  # the old files go a moment later
            while not disk.failed and files_in(store) != await named_files(store):  # noqa: ASYNC110 - nobody tells of it
                await asyncio.sleep(0)
        disk.at = 0
        disk.fail.clear()
        failed.add(disk.failed)
        assert await shown(store) == LEFT
        if disk.failed != "unlink":
            await settled(store)
        await store.compactor.compact()
        assert await shown(store) == LEFT
        assert store.files.pinned_count == 0
        store.close()
        store = await opened(memory_path / str(step))
        assert await shown(store) == LEFT
        assert audit(memory_path / str(step)) == []
        store.close()
        shutil.rmtree(memory_path / str(step))
        if not disk.failed:
            break
    assert failed == {"create", "sync_directory", "open", "read", "write", "sync", "unlink", ""}


async def test_short_writes_are_continued(memory_path: Path) -> None:
    disk = FaultyDisk()
    store = await sparse(memory_path, disk)
    disk.write_bytes_max = 777
    assert (await store.compactor.compact()).segments_read == 2
    assert await shown(store) == LEFT
    store.close()


class Lying(FaultyDisk):
    """Takes every byte, and keeps some of them wrong."""

    is_lying = False

    def write(self, fd: int, view: memoryview, offset: int) -> int:
        wrong = bytearray(view)
        wrong[len(wrong) // 2] ^= self.is_lying
        return super().write(fd, memoryview(wrong), offset)


async def test_a_copy_that_does_not_read_as_it_was_written_is_never_used(memory_path: Path) -> None:
    disk = Lying()
    store = await sparse(memory_path, disk)
    before = await named_files(store)
    disk.is_lying = True
    with pytest.raises(ServerError):
        await store.compactor.compact()
    await settled(store)
    assert await named_files(store) == files_in(store) == before
    assert await shown(store) == LEFT
    store.close()


class FailingCommit:
    """A connection whose COMMIT fails, before or after SQLite has done its part."""

    def __init__(self, db: sqlite3.Connection, *, is_done: bool) -> None:
        self._db = db
        self._is_done = is_done
        self.is_failing = True

    def execute(self, sql: str, *arguments: Any) -> sqlite3.Cursor:
        if sql == "COMMIT" and self.is_failing:
            if self._is_done:
                self._db.execute(sql)
            raise sqlite3.OperationalError("injected")
        return self._db.execute(sql, *arguments)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._db, name)


@pytest.mark.parametrize("is_done", [False, True])
async def test_a_commit_that_failed_leaves_whichever_file_the_index_names(memory_path: Path, is_done: bool) -> None:
    store = await sparse(memory_path, FaultyDisk())
    failing = FailingCommit(store.committer.db, is_done=is_done)
    store.committer.db = failing  # type: ignore[assignment]
    with pytest.raises(ServerError):
        await store.compactor.compact()
    assert await shown(store) == LEFT
    assert await named_files(store) <= files_in(store)
    failing.is_failing = False
    await put(store, "key-0", content(SMALL))
    assert await shown(store) == LEFT
    store.close()
    store = await opened(memory_path)
    assert await shown(store) == LEFT
    assert audit(memory_path) == []
    store.close()


async def test_a_full_index_stops_compaction_and_nothing_else(memory_path: Path) -> None:
    store = await sparse(memory_path, FaultyDisk())
    store.committer.db.execute("PRAGMA max_page_count=1")
    for _ in range(3):
        with pytest.raises(ServerError) as refused:
            await put_many(store)
        assert refused.value.code is ErrorCode.INSUFFICIENT_STORAGE
        with contextlib.suppress(ServerError):
            await store.compactor.compact()
        assert LEFT.items() <= (await shown(store)).items()
    store.committer.db.execute("PRAGMA max_page_count=1000000")
    await settled(store)
    store.close()


async def test_compaction_that_is_cancelled_anywhere_leaves_nothing_behind(memory_path: Path) -> None:
    """A server that stops does not wait for it."""
    store = await sparse(memory_path, FaultyDisk())
    before = open_extents(memory_path)
    is_over = False
    turns = 0
    while not is_over:
        turns += 1
        task = asyncio.create_task(store.compactor.compact(bytes_per_s=1e7))
        for _ in range(turns):
            await asyncio.sleep(0.0005)  # it goes on meanwhile: the moments to cancel it at are what is tried
        is_over = task.done()
        task.cancel()
        await asyncio.wait([task])
        assert await shown(store) == LEFT
        assert store.files.pinned_count == 0
        await settled(store)
        assert open_extents(memory_path) <= before + 2
    store.close()


def open_extents(folder: Path) -> int:
    """The files of extents that this process has open: threads open the index when they first read it."""
    found = 0
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile
            found += descriptor.readlink().is_relative_to(folder / "extents")
    return found


@pytest.mark.slow
@pytest.mark.parametrize("durability", Durability)
async def test_a_power_cut_at_any_step_leaves_every_object(memory_path: Path, durability: Durability) -> None:
    """Before each operation of the disk: what no sync covers is gone, wholly or in part, and so are index frames."""
    rng = Random(durability.value)
    source, graveyard = memory_path / "data", memory_path / "graveyard"
    graveyard.mkdir()
    cuts: list[Path] = []
    disk = PowerDisk(graveyard)
    store = await sparse(source, disk, durability=durability)
    store.committer.db.execute("PRAGMA wal_autocheckpoint=0")
    if durability is Durability.RELAXED:
        await put(store, "key-0", content(SMALL))  # in a segment of its own; and everything is synced then
        store.segments.close()
        await synced(store)
    durable = [log_position(source)]
    store.committer.db = WatchedIndex(store.committer.db, lambda: durable.append(log_position(source)))  # type: ignore[assignment]

    def cut(_: int) -> None:
        with no_commits(source):
            for loss in (Loss.EVERYTHING, Loss.TORN, Loss.TORN):
                target = memory_path / f"cut-{len(cuts)}"
                target.mkdir()
                extents_after_cut(source, graveyard, disk.states, target, loss, rng)
                end = log_position(source).frames
                kept = durable[-1].frames if loss is Loss.EVERYTHING else rng.randint(durable[-1].frames, end)
                copy_index(source, target, kept if durability is Durability.RELAXED else end)
                cuts.append(target)

    disk.on_operation = cut
    assert (await store.compactor.compact()).segments_written == 1
    await settled(store)
    disk.on_operation = lambda _: None
    store.close()
    assert len(cuts) >= 3 * 8
    for target in cuts:
        left = await opened(target, PowerDisk(Path(tempfile.mkdtemp(dir=memory_path))))  # type: ignore[arg-type]
        assert await shown(left) == LEFT
        assert audit(target) == []
        await left.compactor.compact()
        assert await shown(left) == LEFT
        left.close()
