"""Reads of files that hang keep their threads, and nobody else."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator

import pytest

from descriptors.errors import ErrorCode, ServerError
from storage_server.kernel.data import file_threads
from storage_server.kernel.data.file_threads import FileThreads
from storage_server.kernel.data.replaceable_threads import ReplaceableThreads
from storage_server.planning.extent import Extent, in_one_file
from tests.support.waiting import until

COUNT = 2
AT_THREADS = COUNT * file_threads.AHEAD


class Reads:
    """Reads in `threads`, of which those of files in `hanging` have no end until `answers` is set."""

    def __init__(self, threads: FileThreads) -> None:
        self.threads = threads
        self.hanging = {"bad"}
        self.answers = threading.Event()
        self.begun = list[str]()

    def begin(self, *files: str) -> asyncio.Task[str]:
        return asyncio.create_task(self.threads.run_on(files, lambda: self._read(files)))

    def _read(self, files: tuple[str, ...]) -> str:
        self.begun.append(" ".join(files))
        if not self.hanging.isdisjoint(files):
            self.answers.wait(60)
        return " ".join(files)


@pytest.fixture
async def reads() -> AsyncIterator[Reads]:
    reads = Reads(FileThreads(COUNT, COUNT))
    try:
        yield reads
    finally:
        reads.answers.set()
        reads.threads.close()


@pytest.fixture
def hangs_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_threads, "HANGS_S", 0.0)


def never_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on, however slow this machine is."""
    monkeypatch.setattr(file_threads, "HANGS_S", 600.0)


async def slow_down(read: asyncio.Task[str]) -> bool:
    with pytest.raises(ServerError) as refused:
        await read
    return refused.value.code is ErrorCode.SLOW_DOWN and refused.value.retryable


async def hang(reads: Reads, *files: str) -> list[asyncio.Task[str]]:
    """Reads of these files, which are found to hang."""
    before = len(reads.begun)
    hanging = [reads.begin(each) for each in files]
    await until(lambda: len(reads.begun) == before + len(files))
    for each in {*files}:
        for read in list(reads.threads._owners[each].running):
            if read.has_begun:
                read.progress.at_s -= file_threads.HANGS_S
                reads.threads._look_at(read)
    return hanging


async def test_reads_that_hang_give_their_places_to_others(reads: Reads, monkeypatch: pytest.MonkeyPatch) -> None:
    never_hangs(monkeypatch)
    hanging = await hang(reads, *["bad"] * COUNT)
    assert await reads.begin("good") == "good"
    reads.answers.set()
    assert await asyncio.gather(*hanging) == ["bad"] * COUNT


async def test_further_reads_of_a_file_that_hangs_are_told_to_slow_down(
    reads: Reads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those that wait already: they keep what others need."""
    never_hangs(monkeypatch)
    running = [reads.begin("worse") for _ in range(COUNT - 1)]
    reads.hanging.add("worse")
    await until(lambda: len(reads.begun) == COUNT - 1)
    begun = asyncio.create_task(hang(reads, "bad"))
    await until(lambda: "bad" in reads.threads._owners)
    waiting = [reads.begin("bad") for _ in range(COUNT)]
    hanging = await begun
    assert all([await slow_down(read) for read in waiting])
    assert await slow_down(reads.begin("bad"))
    reads.answers.set()
    await asyncio.gather(*running, *hanging)
    assert await reads.begin("bad") == "bad"


async def test_an_owner_with_some_of_the_places_has_them_all_before_it_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    never_hangs(monkeypatch)
    reads = Reads(FileThreads(2 * COUNT, COUNT))
    try:
        first = await hang(reads, "bad")
        second = reads.begin("bad")
        await until(lambda: len(reads.begun) == COUNT)
        waiting = reads.begin("bad")
        hanging = [*first, second]
        for read in list(reads.threads._owners["bad"].running):
            if not read.hangs:
                read.progress.at_s -= file_threads.HANGS_S
                reads.threads._look_at(read)
        assert await slow_down(waiting)
        assert await slow_down(reads.begin("bad"))
        reads.answers.set()
        assert await asyncio.gather(*hanging) == ["bad"] * COUNT
    finally:
        reads.answers.set()
        reads.threads.close()


async def test_reads_wait_while_others_do_not_hang(reads: Reads, monkeypatch: pytest.MonkeyPatch) -> None:
    never_hangs(monkeypatch)
    running = [reads.begin("bad") for _ in range(COUNT)]
    waiting = [reads.begin(name) for name in ("bad", "good")]
    await until(lambda: len(reads.begun) == COUNT and reads.threads.has_queue)
    reads.answers.set()
    assert await asyncio.gather(*running, *waiting) == ["bad", "bad", "bad", "good"]
    assert not reads.threads.has_queue


async def test_a_long_read_that_goes_on_does_not_hang(reads: Reads, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says when it has brought something."""
    never_hangs(monkeypatch)
    progress = file_threads.ReadProgress()
    reading = asyncio.create_task(reads.threads.run_on(("bad",), lambda: reads._read(("bad",)), progress))
    await until(lambda: bool(reads.begun))
    (read,) = reads.threads._owners["bad"].running
    reads.threads._look_at(read)
    assert not reads.threads.may_hang(["bad"])
    progress.note(pause_s=file_threads.HANGS_S)
    progress.at_s -= file_threads.HANGS_S
    reads.threads._look_at(read)
    assert not reads.threads.may_hang(["bad"])
    progress.at_s -= file_threads.HANGS_S
    reads.threads._look_at(read)
    assert reads.threads.may_hang(["bad"])
    reads.answers.set()
    assert await reading == "bad"


async def test_a_read_of_many_places_may_take_longer(reads: Reads, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each may be a seek of a disk that spins, and nothing is said in between."""
    never_hangs(monkeypatch)
    progress = file_threads.ReadProgress(first_s=file_threads.HANGS_S)
    reading = reads.threads.begin(("bad",), lambda: reads._read(("bad",)), progress)
    assert reading is not None
    await until(lambda: bool(reads.begun))
    (read,) = reads.threads._owners["bad"].running
    for may_hang in (False, True):
        progress.at_s -= file_threads.HANGS_S
        reads.threads._look_at(read)
        assert reads.threads.may_hang(["bad"]) == may_hang
    reads.answers.set()
    assert await reading == "bad"


async def test_a_reader_of_several_files_learns_that_one_of_them_may_hang(reads: Reads, hangs_at_once: None) -> None:
    """It reads them one after the other then: nobody else's reads of the good one are told to slow down."""
    several = [reads.begin("good", "bad") for _ in range(2 * COUNT)]
    await until(lambda: len(reads.begun) == len(several) and reads.threads.may_hang(["good"]))
    assert not reads.threads.may_hang(["other"])
    reads.answers.set()
    await asyncio.gather(*several)
    assert not reads.threads.may_hang(["good", "bad"])
    assert await reads.begin("good") == "good"


async def test_a_reader_that_goes_while_it_waits_is_not_kept(reads: Reads, monkeypatch: pytest.MonkeyPatch) -> None:
    never_hangs(monkeypatch)
    running = [reads.begin("bad") for _ in range(AT_THREADS)]
    going, staying = reads.begin("bad"), reads.begin("bad")
    await until(lambda: bool(reads.threads._order))
    going.cancel()
    await asyncio.wait([going])
    reads.answers.set()
    assert await asyncio.gather(*running, staying) == ["bad"] * (AT_THREADS + 1)
    assert len(reads.begun) == AT_THREADS + 1


async def test_all_is_told_to_slow_down_when_all_threads_hang(reads: Reads, monkeypatch: pytest.MonkeyPatch) -> None:
    never_hangs(monkeypatch)
    monkeypatch.setattr(file_threads, "SPARE_THREADS", 0)
    reads.hanging = {"bad", "worse"}
    hanging = await hang(reads, "bad", "worse")
    assert await slow_down(reads.begin("good"))
    reads.answers.set()
    await asyncio.gather(*hanging)
    assert await reads.begin("good") == "good"


@pytest.mark.parametrize(
    ("start", "nbytes", "expected"),
    [(0, 10, ("a", 10)), (0, 30, ("a", 20)), (15, 9, ("a", 5)), (20, 5, ("b", 5)), (29, 9, ("b", 9))],
)
def test_bytes_of_one_file_end_where_another_begins(start: int, nbytes: int, expected: tuple[str, int]) -> None:
    extents = [Extent("a", 0, 10, b"", 0), Extent("a", 40, 10, b"", 10), Extent("b", 0, 10, b"", 20)]
    assert in_one_file(extents, start, nbytes) == expected


def test_no_file_has_the_bytes_of_an_empty_object() -> None:
    assert in_one_file([], 0, 0) == ("", 0)


@pytest.mark.parametrize("is_cancelled", [True, False])
async def test_nothing_is_kept_of_files_that_nobody_reads(
    reads: Reads, monkeypatch: pytest.MonkeyPatch, is_cancelled: bool
) -> None:
    """Whether those that waited for a thread had their turn, or have gone."""
    never_hangs(monkeypatch)
    running = [reads.begin("bad") for _ in range(AT_THREADS)]
    waiting = [reads.begin(f"good-{number}") for number in range(20)]
    await until(lambda: len(reads.threads._order) == 20)
    if is_cancelled:
        for each in waiting:
            each.cancel()
        await asyncio.wait(waiting)
    reads.answers.set()
    await asyncio.gather(*running)
    await asyncio.wait(waiting)
    assert (len(reads.threads._order), len(reads.threads._owners)) == (0, 0)
    assert await reads.begin("bad") == "bad"


def test_a_pool_closes_while_its_threads_leave_by_themselves() -> None:
    """A stop failed where the last one left between two looks."""

    class Leaving(set[threading.Thread]):
        def __iter__(self) -> Iterator[threading.Thread]:
            self.clear()
            return super().__iter__()

    pool = ReplaceableThreads(1, "reads")
    pool._threads = Leaving()
    assert pool.submit(lambda: 1).result.result() == 1
    pool.close()
