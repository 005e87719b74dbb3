"""Reads that last long, while others lack the room that they withhold."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from descriptors.errors import ErrorCode, ServerError
from storage_server.kernel import slow_readers
from storage_server.kernel.slow_readers import ReadUnderWay, SlowReaders, to_end
from storage_server.planning.extent import Extent


def readings(*given: tuple[str, int, float]) -> list[tuple[ReadUnderWay, int]]:
    return [(ReadUnderWay(access_key, (), began_s, None), nbytes) for access_key, nbytes, began_s in given]


@pytest.mark.parametrize(
    ("given", "ended"),
    [
        ([], []),
        ([("a", 10, 0.0), ("a", 10, 1.0)], []),
        ([("a", 30, 0.0), ("a", 30, 1.0), ("a", 30, 2.0)], [0, 1]),
        ([("a", 100, 97.0), ("a", 100, 98.0)], []),
        ([("a", 100, 0.0), ("b", 40, 0.0)], [0]),
        ([("b", 30, 3.0), ("a", 60, 2.0), ("b", 30, 1.0), ("b", 30, 0.0)], [3, 2, 1]),
        ([("a", 0, 0.0), ("a", 60, 1.0), ("a", 0, 2.0)], [1]),
    ],
)
def test_the_longest_reads_end_of_keys_that_withhold_more_than_their_share(
    given: list[tuple[str, int, float]], ended: list[int]
) -> None:
    all_readings = readings(*given)
    assert to_end(all_readings, 50.0, 100.0) == [all_readings[index][0] for index in ended]


def extents(nbytes: int) -> list[Extent]:
    return [Extent("0" * 32, 0, nbytes, b"")]


class Lacking:
    """The room of a directory of 100 bytes."""

    lacks_room = False
    withholds = True

    def readers(self) -> SlowReaders:
        return SlowReaders(lambda: 100, lambda: self.lacks_room, self.withheld_bytes)

    def withheld_bytes(self, read: Sequence[Extent]) -> int:
        return sum(each.nbytes for each in read) if self.withholds else 0


async def wait_in(readers: SlowReaders, nbytes: int, begun: asyncio.Event) -> None:
    with readers.reading("key", extents(nbytes)):
        begun.set()
        await asyncio.Event().wait()


async def begin(readers: SlowReaders, nbytes: int) -> asyncio.Task[None]:
    begun = asyncio.Event()
    task = asyncio.create_task(wait_in(readers, nbytes, begun))
    await begun.wait()
    return task


async def end(*tasks: asyncio.Task[None]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    assert all(task.cancelled() for task in tasks)


async def test_a_slow_read_ends_with_an_error_when_somebody_lacks_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slow_readers, "SLOW_S", 0.05)
    given = Lacking()
    readers = given.readers()
    slow = await begin(readers, 60)
    await asyncio.wait((slow,), timeout=0.2)
    assert not slow.done(), "nobody lacks room"
    given.lacks_room = True
    with pytest.raises(ServerError) as ended:
        await slow
    assert (ended.value.code, ended.value.retryable) == (ErrorCode.SLOW_DOWN, True)
    assert readers.ended_count == 1
    assert not slow.cancelled()


async def test_a_read_that_withholds_nothing_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its bytes are stored in any case, so that its end would give nobody room."""
    monkeypatch.setattr(slow_readers, "SLOW_S", 0.05)
    given = Lacking()
    given.lacks_room, given.withholds = True, False
    readers = given.readers()
    plain = await begin(readers, 60)
    await asyncio.wait((plain,), timeout=0.3)
    assert not plain.done()
    assert not readers.keep_others_out()
    given.withholds = True
    with pytest.raises(ServerError):
        await plain


async def test_readers_keep_others_out_when_a_key_withholds_more_than_its_share() -> None:
    readers = Lacking().readers()
    assert not readers.keep_others_out()
    first = await begin(readers, 20)
    assert not readers.keep_others_out()
    second = await begin(readers, 20)
    assert readers.keep_others_out()
    await end(first, second)
    assert not readers.keep_others_out()


async def test_a_read_that_somebody_else_cancels_stays_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slow_readers, "SLOW_S", 0.05)
    given = Lacking()
    readers = given.readers()
    given.lacks_room = True
    await end(await begin(readers, 10))
    assert readers.ended_count == 0
