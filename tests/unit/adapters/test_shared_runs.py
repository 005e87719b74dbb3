"""Many who ask for the same at once get it from one run that begins after they have asked."""

from __future__ import annotations

import asyncio

import pytest

from objectcache.adapters.shared_runs import SharedRuns
from tests.support.waiting import settled


class Work:
    """Counts runs, which the test lets end."""

    def __init__(self) -> None:
        self.begun_count = 0
        self.may_end = asyncio.Event()
        self.fails = False

    async def __call__(self) -> None:
        self.begun_count += 1
        await self.may_end.wait()
        if self.fails:
            raise ValueError("played")


async def test_a_thousand_calls_wait_for_two_runs_at_most() -> None:
    """One after the other, each would wait for all before it: with an etcd that hangs, for hours."""
    work = Work()
    shared = SharedRuns(work)
    first = [asyncio.ensure_future(shared.run()) for _ in range(500)]
    await settled()
    assert work.begun_count == 1
    second = [asyncio.ensure_future(shared.run()) for _ in range(500)]
    await settled()
    assert work.begun_count == 1  # the run under way may have read before these were asked
    work.may_end.set()
    await asyncio.gather(*first, *second)
    assert work.begun_count == 2
    await shared.run()
    assert work.begun_count == 3


async def test_a_caller_that_leaves_ends_the_run_of_nobody_else() -> None:
    work = Work()
    shared = SharedRuns(work)
    leaving, staying = (asyncio.ensure_future(shared.run()) for _ in range(2))
    await settled()
    leaving.cancel()
    await settled()
    work.may_end.set()
    await staying
    assert work.begun_count == 1


async def test_an_error_is_told_to_all_who_waited_and_to_nobody_later() -> None:
    work = Work()
    work.fails = True
    work.may_end.set()
    shared = SharedRuns(work)
    results = await asyncio.gather(*(shared.run() for _ in range(3)), return_exceptions=True)
    assert [type(result) for result in results] == [ValueError] * 3
    work.fails = False
    await shared.run()


async def test_closing_ends_the_run() -> None:
    work = Work()
    shared = SharedRuns(work)
    waiting = asyncio.ensure_future(shared.run())
    await settled()
    await shared.close()
    with pytest.raises(asyncio.CancelledError):
        await waiting
