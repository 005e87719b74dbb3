"""Remote DRAM: what it keeps, and that nothing it does wrong is believed or waited for."""

from __future__ import annotations

import asyncio
import ctypes
import errno
import math
import os
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from descriptors.objects import Attributes, ObjectInfo
from objectcache.adapters.beneath import Beneath
from objectcache.adapters.memory_area import SharedArea
from storage_server.delivery.gather.landing import Landed, Landing
from storage_server.home.remote_dram import joined_store, mooncake_process
from storage_server.home.remote_dram import remote_dram as module
from storage_server.home.remote_dram.mooncake_process import RemoteDramError
from storage_server.home.remote_dram.remote_dram import RemoteDram
from storage_server.home.remote_dram.removed_file import RemovedFile
from storage_server.home.rules import removed_chunks
from storage_server.home.rules.proof import make_proof
from storage_server.home.rules.remote_entry import ENTRY_BYTES, RemoteEntry, decode_entry, encode_entry
from storage_server.home.rules.removed_chunks import RemovedChunks
from storage_server.planning.block_checksums import BlockChecksums
from storage_server.settings import RemoteDramSettings, UpstreamSettings
from tests.support.played_mooncake import NO_MASTER, PlayedMooncake
from tests.support.waiting import settled, until
from tests.unit.played_time import PlayedTime

SETTINGS = RemoteDramSettings("mooncake://127.0.0.1:1")
NBYTES = 100_000
KEY = "a" * 64


def entry_of(data: bytes, key: str = KEY, seen_at: float | None = None) -> RemoteEntry:
    blocks = BlockChecksums()
    blocks.update(memoryview(data))
    info = ObjectInfo(key, len(data), "e" * 32, 5.0, Attributes({"content-type": "x"}, {"a": "b"}))
    return RemoteEntry("bucket", info, make_proof(len(data), blocks.packed()), seen_at or time.time())


class PlayedClock:
    """The clock of remote DRAM where threads of the store are waited for: only the test moves it."""

    time = staticmethod(time.time)

    def __init__(self) -> None:
        self.now_s = 1000.0

    def monotonic(self) -> float:
        return self.now_s


class Bed:
    """Remote DRAM over a played store, and landing memory."""

    def __init__(self, remote: RemoteDram, store: PlayedMooncake, landing: Landing) -> None:
        self.remote, self.store, self.landing = remote, store, landing

    def landed(self, data: bytes | None = None) -> Landed:
        landed = self.landing.take("bucket", NBYTES)
        assert landed is not None
        if data is not None:
            landed.view[:] = data
        return landed

    async def admitted(self, data: bytes, key: str = KEY, seen_at: float | None = None) -> None:
        landed = self.landed(data)
        before = self.remote.admitted_bytes
        self.remote.admit(entry_of(data, key, seen_at), landed)
        landed.release()
        await until(lambda: self.remote.admitted_bytes > before or not self.remote._admits)

    async def read(self, key: str = KEY) -> bytes | None:
        landed = self.landed()
        try:
            entry = await self.remote.read("bucket", key, landed)
            return None if entry is None else bytes(landed.view)
        finally:
            landed.release()


@asynccontextmanager
async def made(
    keep_s: float = 3600.0,
    namespace: str = "home",
    joined: PlayedMooncake | None = None,
    file: RemovedFile | None = None,
) -> AsyncIterator[Bed]:
    store = joined or PlayedMooncake()

    async def connect(_: RemoteDramSettings, areas: Sequence[SharedArea]) -> PlayedMooncake:
        return store

    remote = RemoteDram(SETTINGS, namespace, keep_s, connect, file)
    landing = remote.landing(8 << 20)
    await remote.start()
    await until(lambda: remote.store.is_usable)
    yield Bed(remote, store, landing)
    await remote.close()
    assert landing.used_bytes == 0


async def test_a_chunk_that_was_kept_comes_back_with_what_home_said_of_it() -> None:
    data = os.urandom(NBYTES)
    async with made() as bed:
        assert await bed.read() is None
        await bed.admitted(data)
        landed = bed.landed()
        entry = await bed.remote.read("bucket", KEY, landed)
        assert entry is not None
        assert entry.info == entry_of(data).info
        assert bytes(landed.view) == data
        landed.release()
        assert await bed.read("b" * 64) is None
        assert (bed.remote.hit_count, bed.remote.miss_count, bed.remote.store.failed_count) == (1, 2, 0)


async def test_a_removed_chunk_is_gone_and_a_newer_one_takes_its_place() -> None:
    async with made() as bed:
        await bed.admitted(b"1" * NBYTES)
        await bed.remote.remove("bucket", [KEY])
        assert bed.store.stored == {}
        assert await bed.read() is None
        await bed.admitted(b"2" * NBYTES)
        await bed.admitted(b"3" * NBYTES)
        assert await bed.read() == b"3" * NBYTES


async def test_a_chunk_that_waits_to_be_written_is_not_when_it_was_removed() -> None:
    async with made() as bed:
        with bed.store.held():
            for key in (KEY, "b" * 64):
                landed = bed.landed(b"1" * NBYTES)
                bed.remote.admit(entry_of(b"1" * NBYTES, key), landed)
                landed.release()
            await until(lambda: bed.remote._written is not None)
            removing = asyncio.create_task(bed.remote.remove("bucket", [KEY, "b" * 64]))
            await settled()  # the removal waits for the first one, whose write the store holds
        await removing
        await until(lambda: not bed.remote.store.calls)
        assert bed.store.stored == {}


async def test_what_waits_to_be_written_holds_a_quarter_of_landing_memory() -> None:
    async with made() as bed:
        with bed.store.held():
            for number in range(40):
                landed = bed.landed(b"1" * NBYTES)
                bed.remote.admit(entry_of(b"1" * NBYTES, f"{number:064x}"), landed)
                landed.release()
            assert 0.2 < bed.landing.used_bytes / (8 << 20) <= module.ADMITS_FRACTION + 0.01
        await until(lambda: bed.landing.used_bytes == 0)
        assert len(bed.store.stored) == (8 << 20) * module.ADMITS_FRACTION // NBYTES


async def test_an_old_chunk_is_not_read() -> None:
    async with made(keep_s=10.0) as bed:
        await bed.admitted(b"1" * NBYTES, seen_at=time.time() - 11.0)
        await bed.admitted(b"1" * NBYTES, "b" * 64, seen_at=time.time() + 60.0)
        assert await bed.read() is None
        assert await bed.read("b" * 64) is None


async def test_a_chunk_that_could_not_be_removed_is_not_read_here() -> None:
    async with made() as bed:
        await bed.admitted(b"1" * NBYTES)
        bed.store.fails = NO_MASTER
        await bed.remote.remove("bucket", [KEY])
        bed.store.fails = 0
        bed.remote.store._breaker.succeeded()
        assert bed.store.stored
        assert await bed.read() is None
        await bed.admitted(b"2" * NBYTES)
        assert await bed.read() == b"2" * NBYTES


class GoneMooncake(PlayedMooncake):
    """A store whose client takes each removal, and does not carry it out."""

    async def remove(self, keys: Sequence[str]) -> list[int]:
        raise ConnectionError("gone")


class WritingMooncake(PlayedMooncake):
    """A store in which another server is writing all chunks."""

    async def remove(self, keys: Sequence[str]) -> list[int]:
        return [module.NOT_READY] * len(keys)


@pytest.mark.parametrize("harm", ["no master", "gone", "is written", "pause"])
async def test_a_chunk_that_could_not_be_removed_is_not_read_after_a_restart(
    tmp_path: Path, harm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An overwrite or a DELETE was acknowledged, and the same server brought the old bytes again."""
    monkeypatch.setattr(module, "REMOVE_AGAIN_S", 0.001)
    file = RemovedFile(Beneath(tmp_path, "removed"))
    store = {"gone": GoneMooncake, "is written": WritingMooncake}.get(harm, PlayedMooncake)()
    async with made(joined=store, file=file) as bed:
        await bed.admitted(b"1" * NBYTES)
        if harm == "no master":
            store.fails = NO_MASTER
        elif harm == "pause":
            bed.remote.store.failed("played")
        await bed.remote.remove("bucket", [KEY])
        store.fails = 0
    assert store.stored
    async with made(joined=store, file=file) as bed:
        assert await bed.read() is None
        await bed.admitted(b"2" * NBYTES)
        assert await bed.read() == b"2" * NBYTES


async def test_a_restart_reads_on_where_all_removals_were_carried_out(tmp_path: Path) -> None:
    store, file = PlayedMooncake(), RemovedFile(Beneath(tmp_path, "removed"))
    async with made(joined=store, file=file) as bed:
        await bed.admitted(b"1" * NBYTES)
        await bed.remote.remove("bucket", ["b" * 64])
        await bed.remote.remove("bucket", [])
    async with made(joined=store, file=file) as bed:
        assert await bed.read() == b"1" * NBYTES


async def test_what_another_server_puts_there_after_a_removal_is_not_read_after_a_restart(tmp_path: Path) -> None:
    """The other one had read it from home before: the removal found nothing to remove."""
    store, file = PlayedMooncake(), RemovedFile(Beneath(tmp_path, "removed"))
    async with made(joined=store, file=file) as bed:
        header = encode_entry(entry_of(b"1" * NBYTES, seen_at=time.time()))
        assert header is not None
        await bed.remote.remove("bucket", [KEY])
        store.stored[bed.remote._key("bucket", KEY)] = header + b"1" * NBYTES
        assert await bed.read() is None
    async with made(joined=store, file=file) as bed:
        assert await bed.read() is None


async def test_after_a_crash_no_copy_of_before_it_is_read(tmp_path: Path) -> None:
    """Nobody knows which chunks were removed."""
    store, place = PlayedMooncake(), Beneath(tmp_path, "removed")
    async with made(joined=store, file=RemovedFile(place)) as bed:
        await bed.admitted(b"1" * NBYTES)
        at_the_crash = place.read(1000)
    place.write(at_the_crash)
    async with made(joined=store, file=RemovedFile(place)) as bed:
        assert await bed.read() is None
        await bed.admitted(b"2" * NBYTES)
        assert await bed.read() == b"2" * NBYTES


@pytest.mark.parametrize(
    "text", ["", "running", "[]", "5", '{"keep_s": 3600, "before_s": "nan", "removed": []}',
             '{"before_s": 1, "removed": []}', '{"keep_s": 3600, "before_s": 1, "removed": [["b", "k"]]}',
             '{"keep_s": 3600, "before_s": 1, "removed": [["b", "k", Infinity]]}', "[" * 100_000]
)  # fmt: skip
def test_a_file_that_makes_no_sense_covers_all_before_the_start(tmp_path: Path, text: str) -> None:
    (tmp_path / "removed").write_text(text)
    removed = RemovedChunks(3600.0)
    RemovedFile(Beneath(tmp_path, "removed")).take(removed, 100.0)
    assert removed.before_s == 100.0


def test_what_a_run_before_the_last_removed_is_not_taken_for_all_where_no_mark_could_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk was full at the start, and the server crashed."""

    def write(self: Beneath, data: bytes) -> None:
        raise OSError(errno.ENOSPC, "no space left on device")

    file = RemovedFile(Beneath(tmp_path, "removed"))
    file.keep(RemovedChunks(3600.0), 100.0)
    with monkeypatch.context() as full:
        full.setattr(Beneath, "write", write)
        file.take(RemovedChunks(3600.0), 150.0)
    after = RemovedChunks(3600.0)
    file.take(after, 200.0)
    assert after.before_s == 200.0


def test_after_a_run_that_knew_of_no_removals_no_copy_of_before_is_believed(tmp_path: Path) -> None:
    """A run without remote DRAM, in between, removes nothing there."""
    before, after, file = RemovedChunks(3600.0), RemovedChunks(3600.0), RemovedFile(Beneath(tmp_path, "removed"))
    file.keep(before, 100.0)
    file.doubt()
    file.take(after, 200.0)
    assert after.before_s == 200.0


def test_removals_of_a_run_that_kept_copies_for_another_time_are_not_all_there_are() -> None:
    """It wrote down only those that copies could be old enough for, by its own setting."""
    before, after = RemovedChunks(50.0), RemovedChunks(3600.0)
    before.note("bucket", [KEY], 100.0)
    after.load(before.dump(200.0), 200.0)
    assert not after.is_believed(entry_of(b"1" * NBYTES, seen_at=90.0), 210.0)
    assert after.is_believed(entry_of(b"1" * NBYTES, seen_at=205.0), 210.0)


def test_copies_that_a_clock_ahead_saw_before_a_removal_are_not_believed_after_it_is_set_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The chunk was changed at 5,000 of a clock that is then set back to 200, and changed again."""
    before, after, file = RemovedChunks(0.0), RemovedChunks(0.0), RemovedFile(Beneath(tmp_path, "removed"))
    before.note("bucket", [KEY], 5000.0)
    file.keep(before, 200.0)
    file.take(after, 200.0)
    after.note("bucket", [KEY], 210.0)
    assert not after.is_believed(entry_of(b"1" * NBYTES, seen_at=4990.0), 300.0)
    assert not after.is_believed(entry_of(b"1" * NBYTES, seen_at=4990.0), 6000.0)
    assert after.is_believed(entry_of(b"1" * NBYTES, seen_at=205.0, key="other"), 300.0)
    assert "the clock was 4800 s ahead" in caplog.text


@given(st.dictionaries(st.text(min_size=1), st.floats(0, 200), max_size=20), st.sampled_from([0.0, 50.0]))
def test_removals_come_back_as_they_were_told(times: dict[str, float], keep_s: float) -> None:
    before, after = RemovedChunks(keep_s), RemovedChunks(keep_s)
    for key, removed_s in sorted(times.items(), key=lambda each: each[1]):
        before.note("bucket", [key], removed_s)
    after.load(before.dump(200.0), 200.0)
    for key in times:
        entry = entry_of(b"1" * NBYTES, seen_at=190.0, key=key)
        assert after.is_believed(entry, 200.0) == before.is_believed(entry, 200.0)


async def test_a_store_that_fails_is_left_alone_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    played = PlayedClock()
    monkeypatch.setattr(joined_store, "time", played)
    async with made() as bed:
        await bed.admitted(b"1" * NBYTES)
        bed.store.fails = NO_MASTER
        assert await bed.read() is None
        assert not bed.remote.store.is_usable
        bed.store.fails = 0
        played.now_s += joined_store.PAUSE_S_MIN - 0.1
        assert await bed.read() is None
        played.now_s += 0.2
        assert bed.remote.store.is_usable
        assert await bed.read() == b"1" * NBYTES


async def test_a_store_that_hangs_is_not_waited_for_and_its_memory_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "READ_WAIT_S", 0.05)
    monkeypatch.setattr(joined_store, "time", PlayedClock())  # the pause after the failure does not end
    async with made() as bed:
        await bed.admitted(b"1" * NBYTES)
        with bed.store.held():
            assert await bed.read() is None
            assert bed.landing.used_bytes > 0  # the call may still write there
            assert not bed.remote.store.is_usable
        await until(lambda: bed.landing.used_bytes == 0)


class LateMooncake:
    """Reads of `store` end with an error after a minute, as Mooncake's do where an owner is slow; its bytes come later,
    with `late`.
    """

    def __init__(self, clock: PlayedClock, took_s: float = 60.0) -> None:
        self._clock, self._took_s = clock, took_s
        self._spans: list[tuple[int, int]] = []

    async def get(self, _: str, spans: Sequence[tuple[int, int]]) -> int:
        self._clock.now_s += self._took_s
        self._spans += spans[1:]
        return -800

    def come(self) -> None:
        for address, nbytes in self._spans:
            ctypes.memset(address, ord("!"), nbytes)


async def test_memory_that_late_bytes_may_come_into_is_given_to_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "time", clock := PlayedClock())
    async with made() as bed:
        late = LateMooncake(clock)
        monkeypatch.setattr(bed.store, "get", late.get)
        assert await bed.read() is None
        other = bed.landed(b"2" * NBYTES)
        late.come()
        assert bytes(other.view) == b"2" * NBYTES
        other.release()
        assert bed.landing.used_bytes > 0


@pytest.mark.parametrize(("code", "took_s"), [(-800, 1.0), (-704, 60.0), (-703, 60.0), (-200, 60.0)])
async def test_memory_is_free_at_once_where_nothing_moves_any_more(
    code: int, took_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "time", clock := PlayedClock())

    async def get(*_: object) -> int:
        clock.now_s += took_s
        return code

    async with made() as bed:
        monkeypatch.setattr(bed.store, "get", get)
        assert await bed.read() is None
        await until(lambda: bed.landing.used_bytes == 0)


async def test_a_client_that_late_bytes_take_much_memory_from_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "time", clock := PlayedClock())
    async with made() as bed:
        monkeypatch.setattr(bed.store, "get", LateMooncake(clock).get)

        async def close() -> None:
            bed.store.is_running = False

        monkeypatch.setattr(bed.store, "close", close)
        bound_bytes = module.KEPT_FRACTION * (8 << 20)
        while bed.remote.store.kept_bytes <= bound_bytes:
            assert bed.store.is_running
            bed.remote.store._breaker.succeeded()
            assert await bed.read() is None
        await until(lambda: not bed.store.is_running)
        bed.remote.store._breaker.succeeded()
        assert not bed.remote.store.is_usable  # and joins again
        await until(lambda: bed.landing.used_bytes == 0)


async def test_no_chunk_waits_for_its_turn_behind_a_read_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pause after the failure is short, and Mooncake may hang for two minutes."""
    monkeypatch.setattr(module, "READ_WAIT_S", 0.05)
    monkeypatch.setattr(module, "TURN_WAIT_S", 3600.0)
    clock = PlayedClock()
    monkeypatch.setattr(joined_store, "time", clock)
    async with made() as bed:
        await bed.admitted(b"1" * NBYTES)
        with bed.store.held():
            assert await bed.read() is None
            clock.now_s += 100.0
            assert bed.remote.store.is_usable
            assert not bed.remote.may_have("bucket", KEY)
            async with asyncio.timeout(60):
                assert await bed.read() is None
        await until(lambda: bed.landing.used_bytes == 0)
        assert bed.remote.may_have("bucket", KEY)
        assert await bed.read() == b"1" * NBYTES


async def test_a_store_whose_process_ends_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    async with made() as bed:
        await bed.admitted(b"1" * NBYTES)

        async def broken(*_: object) -> list[int]:
            raise ConnectionError("broken")

        monkeypatch.setattr(bed.store, "get", broken)
        monkeypatch.setattr(bed.store, "remove", broken)
        assert await bed.read() is None
        assert not bed.remote.store.is_usable
        bed.remote.store._breaker.succeeded()
        await bed.remote.remove("bucket", [KEY])
        assert not bed.remote.store.is_usable


async def test_a_chunk_of_another_size_is_a_miss_and_no_failure() -> None:
    """Whoever asks for a wrong layout must not close the store for others."""
    async with made() as bed:
        await bed.admitted(b"1" * NBYTES)
        landed = bed.landing.take("bucket", NBYTES // 2)
        assert landed is not None
        assert await bed.remote.read("bucket", KEY, landed) is None
        landed.release()
        assert bed.remote.store.is_usable
        assert await bed.read() == b"1" * NBYTES


async def test_a_full_store_takes_no_more_and_is_no_failure() -> None:
    async with made() as bed:
        bed.store.capacity_bytes = 150_000
        await bed.admitted(b"1" * NBYTES)
        await bed.admitted(b"2" * NBYTES, "b" * 64)
        assert len(bed.store.stored) == 1
        assert bed.remote.store.is_usable


async def test_a_store_that_is_not_there_is_asked_again_later(monkeypatch: pytest.MonkeyPatch) -> None:
    store, calls = PlayedMooncake(), list[int]()

    async def connect(_: RemoteDramSettings, areas: Sequence[SharedArea]) -> PlayedMooncake:
        calls.append(1)
        if len(calls) == 1:
            raise ConnectionError("not yet")
        return store

    remote = RemoteDram(SETTINGS, "home", 3600.0, connect)
    landing = remote.landing(8 << 20)
    await remote.start()
    bed = Bed(remote, store, landing)
    await until(lambda: remote.store.failed_count == 1)
    assert await bed.read() is None
    remote.store._breaker.succeeded()
    await until(lambda: remote.store.is_usable)
    assert len(calls) == 2
    await bed.admitted(b"1" * NBYTES)
    assert await bed.read() == b"1" * NBYTES
    await remote.close()


async def test_without_its_client_the_start_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mooncake_process.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RemoteDramError, match="pip install mooncake-transfer-engine"):
        await RemoteDram(SETTINGS, "home", 1.0).start()


async def test_when_too_many_were_removed_what_is_older_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(removed_chunks, "REMOVED_MAX", 3)
    async with made() as bed:
        await bed.admitted(b"1" * NBYTES)
        await bed.remote.remove("other", ["1", "2", "3", "4"])
        assert await bed.read() is None
        await bed.admitted(b"2" * NBYTES)
        assert await bed.read() == b"2" * NBYTES


async def test_a_chunk_that_another_server_puts_there_late_is_not_believed() -> None:
    """It had fetched it before this server removed it."""
    async with made() as bed:
        before_s = time.time()
        await bed.remote.remove("bucket", [KEY])
        entry = entry_of(b"1" * NBYTES, seen_at=before_s)
        header = encode_entry(entry)
        assert header is not None
        bed.store.stored[bed.remote._key("bucket", KEY)] = header + b"1" * NBYTES
        assert await bed.read() is None


async def test_two_homes_do_not_see_each_others_chunks() -> None:
    async with made() as bed:
        await bed.admitted(b"1" * NBYTES)
        async with made(namespace="another home", joined=bed.store) as other:
            assert await other.read() is None
            assert await bed.read() is not None


async def test_a_chunk_that_is_being_written_is_a_miss_and_its_removal_is_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "REMOVE_AGAIN_S", 0.01)
    async with made() as bed:
        await bed.admitted(b"1" * NBYTES)
        answers, remove = [module.NOT_READY] * 2, bed.store.remove

        async def not_ready(*_: object) -> int:
            return module.NOT_READY

        async def later(keys: Sequence[str]) -> list[int]:
            return [answers.pop()] if answers else await remove(keys)

        monkeypatch.setattr(bed.store, "get", not_ready)
        monkeypatch.setattr(bed.store, "remove", later)
        assert await bed.read() is None
        await bed.remote.remove("bucket", [KEY])
        assert bed.store.stored == {}
        assert bed.remote.store.is_usable
        assert bed.remote.store.failed_count == 0


async def test_a_busy_store_is_not_waited_for_and_does_not_count_as_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TURN_WAIT_S", 0.1)
    monkeypatch.setattr(module, "READ_WAIT_S", 60.0)  # however long the others take to give up, the first one waits
    async with made() as bed:
        await bed.admitted(b"1" * NBYTES)
        with bed.store.held():
            reading = [asyncio.create_task(bed.read()) for _ in range(8)]
            await until(lambda: sum(task.done() for task in reading) >= 7)
            assert sum(task.done() for task in reading) == 7
        assert sorted(found is None for found in await asyncio.gather(*reading)) == [False] + [True] * 7
        assert bed.remote.store.failed_count == 0
        assert bed.remote.store.is_usable


async def test_nothing_waits_behind_a_removal_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    async with made() as bed:
        played = PlayedTime()
        monkeypatch.setattr(joined_store, "time", played)
        hold = asyncio.Event()

        async def hang(keys: Sequence[str]) -> list[int]:
            await hold.wait()
            return [0] * len(keys)

        monkeypatch.setattr(bed.store, "remove", hang)
        start_s = played.monotonic()
        for number in range(20):
            await bed.remote.remove("bucket", [f"{number:064x}"])
        assert played.monotonic() - start_s < 1.5 * module.REMOVE_WAIT_S
        hold.set()


@given(st.binary(max_size=300), st.integers(0, ENTRY_BYTES - 1), st.integers(1, 255))
def test_an_entry_comes_back_and_garbage_is_none(garbage: bytes, at: int, flip: int) -> None:
    entry = entry_of(b"x" * 70_000)
    data = encode_entry(entry)
    assert data is not None
    assert len(data) == ENTRY_BYTES
    assert decode_entry(data, "bucket", KEY) == entry
    assert decode_entry(data, "bucket", "b" * 64) is None
    assert decode_entry(data, "other", KEY) is None
    assert decode_entry(garbage.ljust(ENTRY_BYTES, b"\0"), "bucket", KEY) is None
    changed = bytearray(data)
    changed[at] ^= flip
    assert decode_entry(bytes(changed), "bucket", KEY) in (None, entry)


@pytest.mark.parametrize(
    "changed",
    [
        {"etag": "line\r\nbreak"},
        {"modified_at": math.nan},
        {"modified_at": 1e300},
        {"attributes": Attributes({"x-amz-meta-a": "line\r\nbreak"})},
        {"attributes": Attributes({"A b": "no name of a header"})},
        {"attributes": Attributes(storage_class="<x>")},
        {"part_count": -1},
        {"nbytes": -1},
    ],
    ids=str,
)
def test_an_entry_that_no_answer_could_tell_is_none(changed: dict[str, Any]) -> None:
    """Every host that may write to the pool chooses what is in an entry, its checksum as well."""
    entry = entry_of(b"x" * 70_000)
    data = encode_entry(replace(entry, info=replace(entry.info, **changed)))
    assert data is not None
    assert decode_entry(data, "bucket", KEY) is None


def test_an_entry_with_too_much_to_say_is_not_kept() -> None:
    info = ObjectInfo(KEY, 5, "e", 1.0, Attributes({"x-amz-meta-a": "b" * ENTRY_BYTES}))
    assert encode_entry(RemoteEntry("bucket", info, make_proof(5, bytes(4)), 1.0)) is None


@pytest.mark.parametrize(
    "wrong",
    [
        {"endpoint": "http://127.0.0.1:1"},
        {"endpoint": "mooncake://127.0.0.1"},
        {"endpoint": "mooncake://127.0.0.1:1/x"},
        {"endpoint": "mooncake://127.0.0.1:1", "protocol": "carrier pigeon"},
    ],
)
def test_wrong_settings_are_refused(wrong: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="remote_dram"):
        RemoteDramSettings(**wrong)
    with pytest.raises(ValueError, match="landing_bytes"):
        UpstreamSettings("http://127.0.0.1:1", "a", "b", landing_bytes=0, remote_dram=SETTINGS)
