"""Answers that all who ask share."""

from __future__ import annotations

import asyncio

from objectcache.adapters.recent_bytes import RecentBytes
from tests.support.waiting import settled


class Maker:
    """Makes other bytes each time, when it may."""

    def __init__(self) -> None:
        self.count = 0
        self.may_make = asyncio.Event()

    async def make(self) -> bytes:
        self.count += 1
        await self.may_make.wait()
        return b"%d" % self.count


async def test_all_who_ask_in_one_period_share_one_answer() -> None:
    maker = Maker()
    recent = RecentBytes(maker.make, 3600.0)
    asking = [asyncio.create_task(recent.get()) for _ in range(100)]
    await settled()
    asking[0].cancel()  # the others have not gone away
    maker.may_make.set()
    assert await asyncio.gather(*asking[1:]) == [b"1"] * 99
    assert await recent.get() == b"1"


async def test_nobody_gets_an_answer_of_an_earlier_period() -> None:
    maker = Maker()
    recent = RecentBytes(maker.make, 0.0)
    asking = [asyncio.create_task(recent.get()) for _ in range(3)]
    await settled()
    maker.may_make.set()
    assert await asyncio.gather(*asking) == [b"1"] * 3  # one that is being made is waited for
    assert [await recent.get(), await recent.get()] == [b"2", b"3"]
