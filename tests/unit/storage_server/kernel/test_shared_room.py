"""A caller has at most its share of what all requests use, and callers that wait come in turn."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest

from descriptors.errors import ServerError
from objectcache.adapters.caller import CALLER
from storage_server.kernel import shared_room
from storage_server.kernel.shared_room import Held, SharedRoom


class Request:
    """One request of a caller, which holds what it took until `end`."""

    def __init__(self, room: SharedRoom, caller: str, amount: int) -> None:
        self._ended = asyncio.Event()
        self.has = asyncio.Event()
        self.task = asyncio.create_task(self._hold(room, caller, amount))

    async def _hold(self, room: SharedRoom, caller: str, amount: int) -> None:
        CALLER.set(caller)
        async with room.holding() as held:
            await held.at_least(amount)
            self.has.set()
            await self._ended.wait()

    async def end(self) -> None:
        self._ended.set()
        await self.task


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_a_caller_beyond_its_share_keeps_no_other_waiting() -> None:
    room = SharedRoom(10, 5, "none left")
    first, second, other = Request(room, "a", 4), Request(room, "a", 4), Request(room, "b", 5)
    await settled()
    assert (first.has.is_set(), second.has.is_set(), other.has.is_set()) == (True, False, True)
    await first.end()
    await second.has.wait()
    await second.end()
    await other.end()


async def test_small_wishes_do_not_pass_a_large_one() -> None:
    room = SharedRoom(10, 9, "none left")
    first, large, small = Request(room, "a", 4), Request(room, "b", 9), Request(room, "c", 1)
    await settled()
    assert (large.has.is_set(), small.has.is_set()) == (False, False)
    await first.end()
    await large.has.wait()
    await small.has.wait()
    await large.end()
    await small.end()


async def test_those_that_give_up_leave_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    room = SharedRoom(10, 10, "none left")
    first = Request(room, "a", 8)
    await first.has.wait()
    cancelled, behind = Request(room, "b", 9), Request(room, "c", 2)
    await settled()
    assert not behind.has.is_set()
    cancelled.task.cancel()
    await behind.has.wait()
    monkeypatch.setattr(shared_room, "PATIENCE_S", 0.0)
    late = Request(room, "d", 1)
    with pytest.raises(ServerError, match="none left"):
        await late.task
    await first.end()
    await behind.end()
    whole = Request(room, "e", 10)
    await whole.has.wait()
    await whole.end()


async def test_more_than_a_share_counts_as_the_share() -> None:
    room = SharedRoom(10, 5, "none left")
    async with AsyncExitStack() as stack:
        held: Held = await stack.enter_async_context(room.holding())
        await held.at_least(100)
        await held.at_least(3)
        assert held.amount == 5


async def test_more_than_some_requests_of_a_caller_do_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands of them took seconds of the event loop when they ended together."""
    monkeypatch.setattr(shared_room, "WAITING_MAX", 2)
    room = SharedRoom(10, 5, "none left")
    first, waiting = Request(room, "a", 5), [Request(room, "a", 1) for _ in range(2)]
    await settled()
    with pytest.raises(ServerError, match="none left"):
        await Request(room, "a", 1).task
    other = Request(room, "b", 5)
    await other.has.wait()
    await first.end()
    for each in (*waiting, other):
        await each.has.wait()
        await each.end()
