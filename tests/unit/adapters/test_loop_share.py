"""Blocks of work take turns on the event loop."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from objectcache.adapters import loop_share
from objectcache.adapters.loop_share import LoopShare


class Clock:
    """A clock that only blocks move on."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(loop_share.time, "perf_counter", made)
    return made


async def _passes(share: LoopShare, clock: Clock, block_s: float, count: int) -> list[int]:
    """The pass of the loop in which each of `count` blocks has run, all of which have begun in the first one."""
    passes, now = [], 0
    is_over = False

    def count_passes() -> None:
        nonlocal now
        now += 1
        if not is_over:
            asyncio.get_running_loop().call_soon(count_passes)

    async def block() -> None:
        async with share.turn():
            clock.now_s += block_s
            passes.append(now)

    asyncio.get_running_loop().call_soon(count_passes)
    await asyncio.gather(*(block() for _ in range(count)))
    is_over = True
    return passes


async def test_no_pass_of_the_loop_has_more_than_its_time_of_blocks(clock: Clock) -> None:
    passes = await _passes(LoopShare(), clock, loop_share.TURN_S / 2, 100)
    assert len(passes) == 100
    assert max(passes.count(each) for each in passes) <= 3  # the time, and one block more


async def test_long_blocks_run_in_one_pass_each(clock: Clock) -> None:
    passes = await _passes(LoopShare(), clock, 4 * loop_share.TURN_S, 30)
    assert len(set(passes)) == 30


async def test_short_blocks_do_not_wait(clock: Clock) -> None:
    passes = await _passes(LoopShare(), clock, loop_share.TURN_S / 1000, 500)
    assert len(set(passes)) == 1


async def test_a_block_whose_task_has_gone_keeps_nobody_waiting(clock: Clock) -> None:
    share = LoopShare()

    async def block() -> None:
        async with share.turn():
            clock.now_s += loop_share.TURN_S

    tasks = [asyncio.create_task(block()) for _ in range(10)]
    await asyncio.sleep(0)
    tasks[1].cancel()
    tasks[2].cancel()
    ended = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(each) for each in ended].count(asyncio.CancelledError) == 2
    async with share.turn():
        pass


@pytest.mark.parametrize("others", [1, 2, 5, 20, 100])
async def test_whoever_has_waited_longest_runs_next(others: int, clock: Clock) -> None:
    """Those that found no time put themselves back in the opposite order, and others ran before them for ever."""
    share, is_over = LoopShare(), asyncio.Event()
    ran: list[int] = []

    async def again_and_again() -> None:
        while not is_over.is_set():
            async with share.turn():
                clock.now_s += 2 * loop_share.TURN_S

    async def once(number: int) -> None:
        async with share.turn():
            clock.now_s += 2 * loop_share.TURN_S
            ran.append(number)

    crowd = [asyncio.create_task(again_and_again()) for _ in range(others)]
    await asyncio.sleep(0)
    async with asyncio.timeout(30):
        await asyncio.gather(*(once(number) for number in range(40)))
    assert ran == list(range(40))
    is_over.set()
    await asyncio.gather(*crowd)


async def test_a_caller_with_many_blocks_does_not_stand_in_front_of_others(clock: Clock) -> None:
    """One with four thousand of some milliseconds kept another one's block waiting for half a minute."""
    share = LoopShare()
    ran: list[str] = []

    async def block(caller: str) -> None:
        async with share.turn(caller):
            clock.now_s += 2 * loop_share.TURN_S
            ran.append(caller)

    crowd = [asyncio.create_task(block("a")) for _ in range(1000)]
    await asyncio.sleep(0)
    await asyncio.gather(block("b"), block("c"))
    assert len(ran) <= 8
    await asyncio.gather(*crowd)
    assert len(ran) == 1002


@pytest.mark.parametrize("others", [1, 3, 100])
async def test_callers_whose_blocks_follow_each_other_take_turns(others: int, clock: Clock) -> None:
    """A caller that has one block at a time must not run before the many of another one for ever."""
    share, is_over = LoopShare(), asyncio.Event()
    counts: Counter[str] = Counter()

    async def again_and_again(caller: str) -> None:
        while not is_over.is_set():
            async with share.turn(caller):
                clock.now_s += 2 * loop_share.TURN_S
                counts[caller] += 1

    tasks = [asyncio.create_task(again_and_again("a")) for _ in range(others)]
    tasks.append(asyncio.create_task(again_and_again("b")))
    async with asyncio.timeout(30):
        while counts.total() < 400:  # noqa: ASYNC110 - the blocks tell nobody
            await asyncio.sleep(0)
    is_over.set()
    await asyncio.gather(*tasks)
    assert min(counts["a"], counts["b"]) >= 150
