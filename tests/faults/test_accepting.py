"""Connections are accepted many at a time."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from objectcache.adapters.accepting import ACCEPTED_MAX, Door, accept
from objectcache.adapters.name_lookups import ServerLoop
from tests.support.waiting import LIMIT_S

COUNT = 2 * ACCEPTED_MAX + 5


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    """A socket at which COUNT clients wait."""
    with socket.create_server(("127.0.0.1", 0), backlog=2 * COUNT) as made, ExitStack() as clients:
        made.setblocking(False)
        for _ in range(COUNT):
            clients.enter_context(socket.create_connection(made.getsockname()))
        yield made


def test_a_pass_of_the_loop_accepts_many(listener: socket.socket) -> None:
    """One was accepted in each: eight hundred connections of one client kept the next one waiting for 15 s."""
    accepted_in = list[int]()
    passes = 0

    async def all_accepted() -> None:
        nonlocal passes
        with ExitStack() as stack:

            def begin(each: socket.socket, address: str) -> None:
                stack.enter_context(each)
                assert (address, each.getblocking()) == ("127.0.0.1", False)
                accepted_in.append(passes)

            accepting = asyncio.create_task(accept(listener, begin))
            async with asyncio.timeout(LIMIT_S):
                while len(accepted_in) < COUNT:
                    passes += 1
                    await asyncio.sleep(0)
            accepting.cancel()
            await asyncio.gather(accepting, return_exceptions=True)

    with asyncio.Runner(loop_factory=ServerLoop) as runner:
        runner.run(all_accepted())
    assert sorted({accepted_in.count(each) for each in accepted_in}) == [5, ACCEPTED_MAX]


async def test_a_door_makes_a_protocol_for_each_connection(listener: socket.socket) -> None:
    all_lost, lost_count = asyncio.Event(), 0

    class Greeted(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            transport.close()

        def connection_lost(self, _: Exception | None) -> None:
            nonlocal lost_count
            lost_count += 1
            if lost_count == COUNT:
                all_lost.set()

    serving = asyncio.create_task(Door(Greeted).serve(listener))
    async with asyncio.timeout(LIMIT_S):
        await all_lost.wait()
    assert lost_count == COUNT
    serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)
