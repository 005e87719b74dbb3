"""The connections upstream are shared by access keys, and by kinds of requests."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest

from descriptors.errors import ErrorCode, ServerError
from objectcache.adapters.caller import CALLER
from storage_server.home.s3.places import RequestPlaces
from storage_server.home.s3.turns import Turns

AT_ONCE_S = 0.0
"""A place that is free is had without a wait."""


async def taken(places: RequestPlaces, held: AsyncExitStack, key: str, *, has_body: bool) -> int:
    """How many places this key gets until it is told to slow down."""
    CALLER.set(key)
    count = 0
    while True:
        try:
            await held.enter_async_context(places.place(has_body=has_body))
        except ServerError as error:
            if error.code is not ErrorCode.SLOW_DOWN:
                raise
            return count
        count += 1


async def test_no_key_has_more_than_half_and_long_ones_leave_a_quarter() -> None:
    """Whoever sends a byte a minute would otherwise keep all others out."""
    places = RequestPlaces(128, 8, AT_ONCE_S)
    async with AsyncExitStack() as held:
        assert await taken(places, held, "slow", has_body=True) == 48
        assert await taken(places, held, "slow", has_body=False) == 16
        assert await taken(places, held, "other", has_body=True) == 48
        assert await taken(places, held, "third", has_body=True) == 0
        assert await taken(places, held, "third", has_body=False) == 16
    async with AsyncExitStack() as held:
        assert await taken(places, held, "third", has_body=False) == 64


async def test_the_servers_own_uploads_have_their_places() -> None:
    places = RequestPlaces(12, 10, AT_ONCE_S)
    async with AsyncExitStack() as held:
        assert await taken(places, held, "", has_body=True) == 10


async def test_a_place_that_becomes_free_is_given_to_who_waits() -> None:
    places = RequestPlaces(2, 1, 60.0)
    first = AsyncExitStack()
    await first.enter_async_context(places.place(has_body=True))
    waiting = asyncio.ensure_future(AsyncExitStack().enter_async_context(places.place(has_body=True)))
    await asyncio.sleep(0)
    assert not waiting.done()
    await first.aclose()
    await waiting


async def test_what_is_asked_in_a_turn_of_fetches_waits_for_no_place() -> None:
    """All callers share the turns: one that waited in its turn for its own slow requests would keep others waiting."""
    places, turns = RequestPlaces(8, 1, AT_ONCE_S), Turns(1)
    async with AsyncExitStack() as held:
        assert await taken(places, held, "slow", has_body=True) == 3
        assert await taken(places, held, "slow", has_body=False) == 1
        for has_body in (True, False):
            async with turns.turn(0, 0, "chunks"), places.place(has_body=has_body), places.place(has_body=False):
                pass
        with pytest.raises(ServerError):
            await held.enter_async_context(places.place(has_body=False))


async def test_a_turn_is_of_the_task_that_waited_for_it() -> None:
    """Another task's requests need places all the same, and so do those of this task afterwards."""
    places, turns = RequestPlaces(2, 1, AT_ONCE_S), Turns(2)
    CALLER.set("slow")
    async with AsyncExitStack() as held:
        await taken(places, held, "slow", has_body=True)
        inside, outside = asyncio.Event(), asyncio.Event()

        async def fetch() -> None:
            async with turns.turn(0, 0, "chunks"):
                inside.set()
                await outside.wait()

        fetching = asyncio.create_task(fetch())
        await inside.wait()
        assert await taken(places, held, "slow", has_body=True) == 0
        outside.set()
        await fetching
        with pytest.raises(ValueError, match="broken off"):
            async with turns.turn(0, 0, "chunks"):
                raise ValueError("broken off")
        assert await taken(places, held, "slow", has_body=True) == 0
