"""Reads that last long, while others wait for the room that they keep."""

from __future__ import annotations

import asyncio

import pytest

from storage_server.store import slow_readers
from storage_server.store.slow_readers import Reading, SlowReaders, to_end


def readings(*given: tuple[str, int, float]) -> list[Reading]:
    return [Reading(*each, None) for each in given]


@pytest.mark.parametrize(
    ("given", "ended"),
    [
        ([], []),
        ([("a", 10, 0.0), ("a", 10, 1.0)], []),
        ([("a", 30, 0.0), ("a", 30, 1.0), ("a", 30, 2.0)], [0, 1]),
        ([("a", 100, 97.0), ("a", 100, 98.0)], []),
        ([("a", 100, 0.0), ("b", 40, 0.0)], [0]),
        ([("b", 30, 3.0), ("a", 60, 2.0), ("b", 30, 1.0), ("b", 30, 0.0)], [3, 2, 1]),
    ],
)
def test_the_longest_reads_end_of_keys_that_read_more_than_their_share(
    given: list[tuple[str, int, float]], ended: list[int]
) -> None:
    all_readings = readings(*given)
    assert to_end(all_readings, 50.0, 100.0) == [all_readings[index] for index in ended]


async def test_a_slow_read_ends_when_somebody_waits_for_room_and_a_quick_one_never(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(slow_readers, "SLOW_S", 0.05)
    waited = False
    readers = SlowReaders(lambda: 100, lambda: waited)
    begun = asyncio.Event()

    async def read() -> None:
        with readers.reading("key", 60):
            begun.set()
            await asyncio.Event().wait()

    async def read_quickly() -> None:
        with readers.reading("other", 10):
            await asyncio.Event().wait()

    slow, quick = asyncio.create_task(read()), asyncio.create_task(read_quickly())
    await begun.wait()
    await asyncio.wait((slow,), timeout=0.2)
    assert not slow.done(), "nobody waits"
    waited = True
    with pytest.raises(asyncio.CancelledError):
        await slow
    assert not quick.done()
    assert readers.ended_count == 1
    quick.cancel()
    await asyncio.wait((quick,))
