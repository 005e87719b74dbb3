"""Nothing acknowledged is lost: a few rounds of the crash harness, and power cuts. `make crash` runs many rounds."""

from __future__ import annotations

import asyncio
import math
import secrets
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from descriptors.objects import PutRequest, ReadRequest
from storage_server.kernel.data.segments import SEGMENT_EXTENTS_MAX
from storage_server.kernel.index.schema import connect, create
from storage_server.planning.durability import Durability
from storage_server.service.storage import EmbeddedStorage
from storage_server.settings import StorageSettings
from tests.faults.crash.model import History, Write
from tests.faults.crash.power import run_cuts
from tests.faults.crash.power_index import LogPosition, WatchedIndex, log_position
from tests.faults.crash.rounds import Mode, Tally, run_rounds
from tests.faults.crash.versions import Version
from tests.support.chunks import BytesBody
from tests.support.waiting import until

ROUNDS = 10
MACHINES = 9
CUTS_PER_MACHINE = 6
MEMORY = Path("/dev/shm")


@pytest.fixture
def memory_path(tmp_path: Path) -> Iterator[Path]:
    """A directory in memory where there is one: power cuts are only simulated, and real syncs are slow."""
    if not MEMORY.is_dir():
        yield tmp_path
        return
    path = Path(tempfile.mkdtemp(dir=MEMORY, prefix="objectcache-test-"))
    yield path
    shutil.rmtree(path)


@pytest.mark.slow
def test_a_killed_server_keeps_what_it_acknowledged_and_shows_nothing_half_written(tmp_path: Path) -> None:
    """SIGKILL in the middle of a mixed load, in every mode; a failure names its seed."""
    tally = Tally()
    for _ in run_rounds(tmp_path, secrets.randbelow(1 << 30), ROUNDS, tally, ROUNDS // len(Mode)):
        pass
    assert tally.rounds == ROUNDS
    assert tally.acknowledged > 0
    assert tally.by_mode.keys() == {mode.value for mode in Mode}


@pytest.mark.slow
@pytest.mark.parametrize("durability", Durability)
async def test_a_power_cut_takes_no_more_than_the_mode_allows(memory_path: Path, durability: Durability) -> None:
    """Bytes, names and index frames that nothing had synced are lost at random; also after a kill and a restart."""
    cuts = 0
    for _ in range(MACHINES):
        directory = Path(tempfile.mkdtemp(dir=memory_path))
        cuts += await run_cuts(directory, secrets.randbelow(1 << 30), durability, CUTS_PER_MACHINE)
        shutil.rmtree(directory)
    assert cuts >= MACHINES


@pytest.fixture
async def relaxed(tmp_path: Path) -> AsyncIterator[EmbeddedStorage]:
    storage = EmbeddedStorage(StorageSettings(data_dir=tmp_path, durability=Durability.RELAXED, ucx=()))
    await storage.start()
    await storage.objects.create_bucket("k", "bbb")
    yield storage
    await storage.close()


@pytest.mark.slow
async def test_a_segment_that_was_empty_for_a_moment_keeps_what_came_later(relaxed: EmbeddedStorage) -> None:
    """Relaxed durability deletes files up to a second after their last row went: there may be new rows by then."""

    async def put(key: str) -> None:
        await relaxed.objects.put_object("k", PutRequest("bbb", key, 3), BytesBody(b"abc"))

    await put("first")
    await relaxed.objects.delete_object("k", "bbb", "first")
    keys = [f"key-{index}" for index in range(SEGMENT_EXTENTS_MAX + 10)]
    await asyncio.gather(*(put(key) for key in keys))
    await until(lambda: not relaxed.store.committer.is_dirty)
    await put("last")  # carried out when the files are gone that nothing is left of
    for key in keys:
        async with relaxed.objects.open_object("k", ReadRequest("bbb", key)) as read:
            assert b"".join([bytes(piece) async for piece in read.body]) == b"abc"


async def test_relaxed_changes_that_bring_no_bytes_become_durable_too(relaxed: EmbeddedStorage, tmp_path: Path) -> None:
    """Tags, deletes of copies, empty objects, buckets: no file is written, and still the index must be synced."""
    committer = relaxed.store.committer
    synced = [LogPosition()]
    watched = WatchedIndex(committer.db, lambda: synced.append(log_position(tmp_path)))
    committer.db = watched  # type: ignore[assignment]
    await relaxed.objects.put_object("k", PutRequest("bbb", "empty", 0), BytesBody(b""))
    await until(lambda: synced[-1] == log_position(tmp_path))


def test_opening_an_index_syncs_what_a_killed_server_left_in_its_log(tmp_path: Path) -> None:
    """The start deletes files that no row names; the change that freed them may not be synced in relaxed mode."""
    killed, opened = (connect(tmp_path / "index.sqlite3") for _ in range(2))
    create(killed)
    killed.execute("PRAGMA synchronous=NORMAL")
    killed.execute("INSERT INTO buckets (name, owner, created_at) VALUES ('bbb', 'k', 0)")
    left = log_position(tmp_path)
    synced: list[LogPosition] = []
    create(WatchedIndex(opened, lambda: synced.append(log_position(tmp_path))))  # type: ignore[arg-type]
    assert synced[-1].salt == left.salt
    assert synced[-1].frames > left.frames
    for connection in (killed, opened):
        connection.close()


def version(number: int) -> Version:
    return Version((), str(number))


def test_a_key_may_show_what_overlaps_the_read_and_nothing_surely_replaced() -> None:
    """The harness's own rule, on the cases it is made of: done, overlapping, unanswered."""
    done, overlapping, unanswered = version(1), version(2), version(3)
    history = History([Write(None, -1, -1), Write(done, 0, 10), Write(overlapping, 5, 20), Write(unanswered, 30)])
    assert history.allowed(0, 1) == [done, None]
    assert history.allowed(12, 15) == [overlapping, done]
    assert history.allowed(25, 26) == [overlapping, done]
    assert history.allowed(25, 31) == [unanswered, overlapping, done]
    history.writes.append(Write(None, 40, 50))
    assert history.allowed(60, 60) == [None, unanswered]


@given(
    order=st.permutations(range(5)),
    gaps=st.lists(st.integers(0, 3), min_size=5, max_size=5),
    answered=st.lists(st.booleans(), min_size=5, max_size=5),
)
def test_what_a_server_could_have_done_is_always_allowed(
    order: list[int], gaps: list[int], answered: list[bool]
) -> None:
    """Each write takes effect at a point of its own, between its request and its answer: the last point's shows."""
    history = History()
    shown = None
    for point, number in enumerate(order):
        at = 10 * point
        ended = at + gaps[number] * 4 if answered[number] else math.inf
        history.writes.append(Write(version(number), at - gaps[number] * 4, ended))
        shown = version(number)
    end = 10 * len(order) + 100
    assert shown in history.allowed(end, end)
