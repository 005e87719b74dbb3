"""Reads of files that are slow, or hang, keep their threads, and nobody else."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator

import pytest

from descriptors.errors import ErrorCode, ServerError
from objectcache.adapters.caller import work_for
from storage_server.kernel.data import file_threads, replaceable_threads
from storage_server.kernel.data.file_threads import FileThreads
from storage_server.kernel.data.io_threads import IoThreads
from storage_server.kernel.data.replaceable_threads import CallProgress, ReplaceableThreads, SlowCalls, ThreadCall
from storage_server.kernel.rules.thread_turns import ThreadTurns, TurnBounds
from storage_server.planning.extent import Extent, in_one_file
from tests.support.waiting import until

COUNT = 2


class Reads:
    """Reads in `threads`, of which those of files in `hanging` have no end until `answers` is set. None is slow before
    `grow_quiet` says so, however slow this machine is.
    """

    def __init__(self, threads: FileThreads) -> None:
        self.threads = threads
        self.hanging = {"bad"}
        self.answers = threading.Event()
        self.begun = list[str]()

    def begin(self, *files: str, progress: CallProgress | None = None) -> asyncio.Task[str]:
        return asyncio.create_task(self.threads.run_on(files, lambda: self._read(files), progress))

    def _read(self, files: tuple[str, ...]) -> str:
        self.begun.append(" ".join(files))
        if not self.hanging.isdisjoint(files):
            self.answers.wait(60)
        return " ".join(files)

    async def begun_bad(self, *files: str) -> list[asyncio.Task[str]]:
        """Reads of these files, which have begun."""
        before = len(self.begun)
        reads = [self.begin(each) for each in files]
        await until(lambda: len(self.begun) == before + len(files))
        return reads

    def grow_quiet(self, quiet_s: float) -> None:
        """Every read that runs has brought nothing for so much longer."""
        for call in self.threads._threads.running():
            call.progress.at_s -= quiet_s
        self.threads._slow.look()


SLOW_S, HANGS_S = 600.0, 6000.0


@pytest.fixture(autouse=True)
def never_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replaceable_threads, "SLOW_S", SLOW_S)
    monkeypatch.setattr(file_threads, "HANGS_S", HANGS_S)


@pytest.fixture
async def reads() -> AsyncIterator[Reads]:
    reads = Reads(FileThreads(COUNT, COUNT))
    try:
        yield reads
    finally:
        reads.answers.set()
        reads.threads.close()


@pytest.fixture
async def shared_reads() -> AsyncIterator[Reads]:
    """Reads of files of which the first letter says whose they are."""
    reads = Reads(FileThreads(2 * COUNT, COUNT, lambda file_id: file_id[0]))
    try:
        yield reads
    finally:
        reads.answers.set()
        reads.threads.close()


async def slow_down(read: asyncio.Task[str]) -> bool:
    with pytest.raises(ServerError) as refused:
        await read
    return refused.value.code is ErrorCode.SLOW_DOWN and refused.value.retryable


async def test_slow_reads_give_their_places_to_others(reads: Reads) -> None:
    """They are not told to slow down: they bring something in the end."""
    slow = await reads.begun_bad(*["bad"] * COUNT)
    waiting = [reads.begin("bad"), reads.begin("good")]
    await until(lambda: reads.threads._threads.waiting_count == len(waiting))
    reads.grow_quiet(SLOW_S)
    assert await waiting[1] == "good"
    reads.answers.set()
    assert await asyncio.gather(*slow, waiting[0]) == ["bad"] * (COUNT + 1)


async def test_reads_of_one_file_do_not_stand_in_front_of_all_others(reads: Reads) -> None:
    """Each file has its turn, however many reads of the first one wait."""
    reads.hanging = {"first"}
    running = await reads.begun_bad(*["first"] * COUNT)
    reads.hanging.clear()
    waiting = [reads.begin("bad") for _ in range(10 * COUNT)]
    await until(lambda: reads.threads._threads.waiting_count == len(waiting))
    other = reads.begin("good")
    await until(lambda: reads.threads._threads.waiting_count == len(waiting) + 1)
    reads.answers.set()
    await asyncio.gather(*running, *waiting, other)
    assert reads.begun.index("good") <= 2 * COUNT


async def test_a_slow_file_has_no_more_threads_than_any_other(reads: Reads) -> None:
    slow = await reads.begun_bad(*["bad"] * COUNT)
    reads.grow_quiet(SLOW_S)
    waiting = [reads.begin("bad") for _ in range(COUNT)]
    assert await reads.begin("good") == "good"
    assert reads.begun.count("bad") == COUNT
    reads.answers.set()
    assert await asyncio.gather(*slow, *waiting) == ["bad"] * 2 * COUNT


async def test_further_reads_of_a_file_that_hangs_are_told_to_slow_down(reads: Reads) -> None:
    """Also those that wait already: they keep what others need."""
    hanging = await reads.begun_bad(*["bad"] * COUNT)
    waiting = [reads.begin("bad") for _ in range(COUNT)]
    await until(lambda: reads.threads.has_queue)
    reads.grow_quiet(HANGS_S)
    assert all([await slow_down(read) for read in waiting])
    assert await slow_down(reads.begin("bad"))
    assert await reads.begin("good") == "good"
    reads.answers.set()
    assert await asyncio.gather(*hanging) == ["bad"] * COUNT
    assert await reads.begin("bad") == "bad"


async def test_one_file_that_hangs_stops_no_other_file_of_its_owner(shared_reads: Reads) -> None:
    reads = shared_reads
    reads.hanging = {"a1"}
    hanging = await reads.begun_bad(*["a1"] * COUNT)
    reads.grow_quiet(HANGS_S)
    assert await slow_down(reads.begin("a1"))
    assert await asyncio.gather(*(reads.begin(f"a{number}") for number in range(2, 9)))
    reads.answers.set()
    await asyncio.gather(*hanging)


async def test_an_owner_of_whose_files_several_hang_is_refused(
    shared_reads: Reads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may all lie on one disk; others go on."""
    monkeypatch.setattr(file_threads, "OWNER_FILES_MAX", 2)
    reads = shared_reads
    reads.hanging = {"a1", "a2"}
    hanging = await reads.begun_bad("a1", "a2")
    reads.grow_quiet(HANGS_S)
    assert await slow_down(reads.begin("a3"))
    assert await reads.begin("b1") == "b1"
    reads.answers.set()
    await asyncio.gather(*hanging)
    assert await reads.begin("a3") == "a3"


async def test_an_owner_has_some_of_the_places(shared_reads: Reads) -> None:
    reads = shared_reads
    reads.hanging = {"a1", "a2"}
    running = await reads.begun_bad("a1", "a2")
    waiting = reads.begin("a3")
    assert await reads.begin("b1") == "b1"
    assert not waiting.done()
    reads.answers.set()
    assert await asyncio.gather(*running, waiting) == ["a1", "a2", "a3"]


async def test_reads_wait_while_others_are_not_slow(reads: Reads) -> None:
    running = await reads.begun_bad(*["bad"] * COUNT)
    waiting = [reads.begin(name) for name in ("bad", "good")]
    await until(lambda: reads.threads.has_queue)
    reads.answers.set()
    assert await asyncio.gather(*running, *waiting) == ["bad", "bad", "bad", "good"]
    assert not reads.threads.has_queue


async def test_a_long_read_that_goes_on_does_not_hang(reads: Reads) -> None:
    """It says when it has brought something."""
    progress = CallProgress()
    reading = reads.begin("bad", progress=progress)
    await until(lambda: bool(reads.begun))
    progress.note(pause_s=HANGS_S)
    reads.grow_quiet(HANGS_S)
    assert not reads.threads.may_hang(["bad"])
    reads.grow_quiet(HANGS_S)
    assert reads.threads.may_hang(["bad"])
    reads.answers.set()
    assert await reading == "bad"


async def test_a_read_that_has_just_ended_does_not_hang(reads: Reads, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its thread still counts it, and whoever has waited for it has gone: nobody would note that it has ended."""
    (reading,) = await reads.begun_bad("bad")
    running = reads.threads._threads.running()
    reads.answers.set()
    assert await reading == "bad"
    monkeypatch.setattr(reads.threads._threads, "running", lambda: running)
    reads.grow_quiet(HANGS_S)
    assert not reads.threads.may_hang(["bad"])
    assert await reads.begin("bad") == "bad"


async def test_a_read_of_many_places_may_take_longer(reads: Reads) -> None:
    """Each may be a seek of a disk that spins, and nothing is said in between."""
    reading = reads.threads.begin(("bad",), lambda: reads._read(("bad",)), CallProgress(first_s=HANGS_S))
    assert reading is not None
    await until(lambda: bool(reads.begun))
    for may_hang in (False, True):
        reads.grow_quiet(HANGS_S)
        assert reads.threads.may_hang(["bad"]) == may_hang
    reads.answers.set()
    assert await reading == "bad"


async def test_a_reader_of_several_files_learns_that_one_of_them_may_hang(reads: Reads) -> None:
    """It reads them one after the other then: nobody else's reads of the good one are told to slow down."""
    several = [reads.begin("good", "bad") for _ in range(2 * COUNT)]
    await until(lambda: len(reads.begun) == COUNT)
    reads.grow_quiet(HANGS_S)
    await until(lambda: len(reads.begun) == len(several))
    assert reads.threads.may_hang(["good"])
    assert not reads.threads.may_hang(["other"])
    assert reads.threads.begin(("other",), lambda: "other") is None
    reads.answers.set()
    await asyncio.gather(*several)
    assert not reads.threads.may_hang(["good", "bad"])
    assert await reads.begin("good") == "good"


async def test_a_reader_that_goes_while_it_waits_is_not_kept(reads: Reads) -> None:
    """Nor are its bytes."""
    running = await reads.begun_bad(*["bad"] * COUNT)
    going, staying = reads.begin("bad"), reads.begin("bad")
    await until(lambda: reads.threads._threads.waiting_count == 2)
    going.cancel()
    await asyncio.wait([going])
    assert reads.threads._threads.waiting_count == 1
    reads.answers.set()
    assert await asyncio.gather(*running, staying) == ["bad"] * (COUNT + 1)
    assert len(reads.begun) == COUNT + 1


async def test_all_is_told_to_slow_down_when_all_threads_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replaceable_threads, "SPARE_THREADS", 0)
    reads = Reads(FileThreads(COUNT, COUNT))
    try:
        reads.hanging = {"bad", "worse"}
        hanging = await reads.begun_bad("bad", "worse")
        reads.grow_quiet(HANGS_S)
        assert await slow_down(reads.begin("good"))
        reads.answers.set()
        await asyncio.gather(*hanging)
        assert await reads.begin("good") == "good"
    finally:
        reads.answers.set()
        reads.threads.close()


async def test_what_waits_is_carried_out_before_the_threads_end(reads: Reads) -> None:
    """Also behind reads that have lost their places, and have all threads of their file."""
    running = await reads.begun_bad(*["bad"] * COUNT)
    reads.grow_quiet(SLOW_S)
    waiting = [reads.begin(name) for name in ("bad", "good")]
    await waiting[1]
    closing = asyncio.create_task(asyncio.to_thread(reads.threads.close))
    await until(lambda: reads.threads._threads._is_closed)
    reads.answers.set()
    assert await asyncio.gather(*running, *waiting) == ["bad", "bad", "bad", "good"]
    await closing


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
async def test_nothing_is_kept_of_files_that_nobody_reads(reads: Reads, is_cancelled: bool) -> None:
    """Whether those that waited for a thread had their turn, or have gone."""
    running = await reads.begun_bad(*["bad"] * COUNT)
    waiting = [reads.begin(f"good-{number}") for number in range(20)]
    await until(lambda: reads.threads._threads.waiting_count == 20)
    if is_cancelled:
        for each in waiting:
            each.cancel()
        await asyncio.wait(waiting)
    reads.answers.set()
    await asyncio.gather(*running)
    await asyncio.wait(waiting)
    turns = reads.threads._threads._turns
    await until(lambda: not reads.threads._threads.running())
    kept = (turns._waiting, turns._places, turns._owner_threads, turns._file_threads, reads.threads._hanging)
    assert not any(kept)
    assert await reads.begin("bad") == "bad"


async def test_slow_writes_of_one_caller_leave_places_to_others() -> None:
    """A write that hangs keeps its thread, and no place."""
    answers, begun = threading.Event(), list[int]()
    threads = IoThreads(COUNT, 2 * COUNT)

    def write(number: int) -> int:
        begun.append(number)
        answers.wait(60)
        return number

    writes = [asyncio.create_task(threads.run(lambda number=number: write(number))) for number in range(9)]  # type: ignore[misc]
    try:
        for count in (COUNT, 2 * COUNT):
            await until(lambda count=count: len(begun) == count)  # type: ignore[misc]
            for call in threads._threads.running():
                call.progress.at_s -= SLOW_S
            threads._slow.look()
        work_for("another")
        assert await threads.run(lambda: "written") == "written"
        assert len(begun) == 2 * COUNT
    finally:
        answers.set()
        assert await asyncio.gather(*writes) == list(range(9))
        threads.close()


def test_a_pool_closes_while_its_threads_leave_by_themselves() -> None:
    """A stop failed where the last one left between two looks."""

    class Leaving(set[threading.Thread]):
        def __iter__(self) -> Iterator[threading.Thread]:
            self.clear()
            return super().__iter__()

    pool = ReplaceableThreads(1, "reads", ThreadTurns(TurnBounds(1, 1, 1)))
    pool._threads = Leaving()
    call = ThreadCall("file", lambda: 1)
    pool.submit(call)
    assert call.result.result() == 1
    pool.close()


def test_a_closed_pool_takes_no_call() -> None:
    """Whoever waited for it would wait for ever, and a stop with it."""
    pool = ReplaceableThreads(1, "reads", ThreadTurns(TurnBounds(1, 1, 1)))
    pool.close()
    with pytest.raises(RuntimeError, match="closed"):
        pool.submit(ThreadCall("file", lambda: 1))


async def test_the_look_at_slow_calls_goes_on_while_a_call_that_has_waited_begins() -> None:
    """A call that began between the two looks was seen by neither, and nobody gave its place away."""

    class Beginning(ReplaceableThreads):
        waiting_count = 1  # type: ignore[assignment]

        def running(self) -> list[ThreadCall]:
            self.waiting_count = 0
            return []

    threads = Beginning(1, "reads", ThreadTurns(TurnBounds(1, 1, 1)))
    assert SlowCalls(threads, 1).look()
    threads.close()
