"""ObjectMoves over a played store: one access key cannot hold every place."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from descriptors.descriptor import Descriptor
from descriptors.errors import ErrorCode, ServerError
from descriptors.notices import Mode
from descriptors.objects import BodyDigests, ByteRange, ObjectInfo, PutRequest, ReadHead, ReadRequest
from descriptors.storage_api import ObjectRead
from storage_server.delivery.gather.staging import StagingPool
from storage_server.home.embedded import EmbeddedStore
from storage_server.moves.object_moves import ObjectMoves
from storage_server.settings import StorageSettings

NBYTES = 1000
READ = ReadRequest("b", "k")
PUT = PutRequest("b", "k", NBYTES)
CHUNKS = Descriptor(("k",), 1, 1, NBYTES)


class PlayedObjects:
    """A store that has one object."""

    head = ReadHead(ObjectInfo("k", NBYTES, "etag", 1.0), ByteRange(0, NBYTES))

    @contextlib.asynccontextmanager
    async def open_extents(self, _: ReadRequest) -> AsyncIterator[tuple[ReadHead, list[Any]]]:
        yield self.head, []

    @contextlib.asynccontextmanager
    async def open_object(self, _: str, __: ReadRequest) -> AsyncIterator[ObjectRead]:
        async def pieces() -> AsyncIterator[bytes]:
            yield bytes(NBYTES)

        yield ObjectRead(self.head, pieces())


class Door:
    """Opens one-sided transfers, which hang: each move stays under way until it is cancelled."""

    def __init__(self) -> None:
        self._opened = asyncio.Semaphore(0)

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[Any]:
        self._opened.release()
        await asyncio.Event().wait()
        yield None

    async def opened(self, count: int) -> None:
        """Wait for so many more."""
        async with asyncio.timeout(30):
            for _ in range(count):
                await self._opened.acquire()


Move = Callable[[ObjectMoves, str, Any], Awaitable[Any]]
MOVES: dict[str, Move] = {
    "get direct": lambda moves, key, opening: moves.get_direct(key, opening, READ, NBYTES),
    "get staged": lambda moves, key, opening: moves.get_staged(key, opening, READ, NBYTES),
    "put direct": lambda moves, key, opening: moves.put_direct(key, opening, PUT, BodyDigests()),
    "put staged": lambda moves, key, opening: moves.put_staged(key, opening, PUT, BodyDigests()),
    "put chunks": lambda moves, key, opening: moves.put_chunks(
        key, opening, "b", CHUNKS, Mode.CHUNK_MAJOR, cast(Any, None)
    ),
}


@pytest.mark.parametrize("move", MOVES.values(), ids=MOVES)
async def test_one_access_key_gets_half_of_the_places(tmp_path: Path, move: Move) -> None:
    """And another key a place at once."""
    settings = StorageSettings(
        data_dir=tmp_path, deliveries_max=4, aggregation_bytes=4096, window_bytes=4096, staging_bytes=65_536
    )
    pools = [StagingPool(4096, 16) for _ in range(2)]
    store = cast(EmbeddedStore, SimpleNamespace(objects=PlayedObjects(), files=None))
    moves, door = ObjectMoves(settings, store, *pools), Door()
    async with asyncio.TaskGroup() as tasks:
        held = [tasks.create_task(_run(move, moves, "greedy", door)) for _ in range(2)]
        await door.opened(2)
        with pytest.raises(ServerError) as refused:
            async with asyncio.timeout(10):
                await move(moves, "greedy", door.open)
        assert refused.value.code is ErrorCode.SLOW_DOWN
        held.append(tasks.create_task(_run(move, moves, "modest", door)))
        await door.opened(1)
        assert moves.active_count == 3
        for task in held:
            task.cancel()
    assert moves.active_count == 0
    moves.close()


async def _run(move: Move, moves: ObjectMoves, access_key: str, door: Door) -> None:
    await move(moves, access_key, door.open)
