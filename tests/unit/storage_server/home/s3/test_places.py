"""The connections upstream are shared by access keys, and by kinds of requests."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

from descriptors.errors import ErrorCode, ServerError
from objectcache.adapters.caller import CALLER
from storage_server.home.s3.places import RequestPlaces

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
