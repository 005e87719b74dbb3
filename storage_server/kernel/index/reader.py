"""Reads of the index: short ones run in the caller's thread, long ones in threads of their own."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TypeVar

from descriptors.errors import ErrorCode, ServerError
from objectcache.adapters.caller import CallerTurns
from objectcache.adapters.threads import HERE_ITEMS_MAX, carried_out, to_end
from storage_server.kernel.data.disk import disk_error
from storage_server.kernel.data.extents import ExtentFiles, PinSet
from storage_server.kernel.index.committer import index_error
from storage_server.kernel.index.schema import connect, connect_current
from storage_server.planning.extent import Extent

READ_THREADS = 2
REREADS_MAX = 64
_T = TypeVar("_T")
Query = Callable[[sqlite3.Connection], _T]


class IndexReader:
    """Read-only access for one event loop. Callers take turns in the threads, so a long request is made of short
    queries. Raises SchemaError for an index of another release's schema.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._here = connect_current(path)
        self._local = threading.local()
        self._opened: list[sqlite3.Connection] = []
        self._threads = ThreadPoolExecutor(READ_THREADS, "index-reader")
        self._turns = CallerTurns(READ_THREADS)
        everyone = threading.Barrier(READ_THREADS)
        for opening in [self._threads.submit(self._open_one, everyone) for _ in range(READ_THREADS)]:
            opening.result()

    def close(self) -> None:
        """Wait for running queries, then close every connection."""
        self._threads.shutdown()
        for connection in (self._here, *self._opened):
            connection.close()

    def here(self, query: Query[_T]) -> _T:
        """Run a query of a few rows in the caller's thread, since a hand-over to another thread would cost more."""
        return _translated(query, self._here)

    async def threaded(self, query: Query[_T]) -> _T:
        """Run a query of many rows in a thread of its own, when it is the turn of this task's CALLER."""
        loop = asyncio.get_running_loop()
        async with self._turns.turn():
            return await to_end(loop.run_in_executor(self._threads, lambda: _translated(query, self._local.connection)))

    def _open_one(self, everyone: threading.Barrier) -> None:
        """Open this thread's connection now, so that no request pays for it."""
        self._local.connection = connect(self._path)
        self._opened.append(self._local.connection)
        everyone.wait()


@asynccontextmanager
async def pinned(
    files: ExtentFiles, find: Callable[[], Awaitable[tuple[_T, Sequence[Extent]]]]
) -> AsyncIterator[tuple[_T, Sequence[Extent]]]:
    """The result of `find`, with its extents readable until the block ends.

    If one of them was deleted between `find` and the pin, the index has changed, and `find` runs again.
    """
    pins = PinSet(files)
    try:
        for _ in range(REREADS_MAX):
            before = files.punch_count
            found, extents = await find()
            is_long = files.waits or len(extents) > HERE_ITEMS_MAX
            if await carried_out(partial(_kept, pins, extents, before), is_long=is_long):
                break
        else:
            raise ServerError(ErrorCode.SLOW_DOWN, "the object changes faster than it can be read", retryable=True)
        yield found, extents
    finally:
        await carried_out(pins.release, is_long=pins.count > HERE_ITEMS_MAX)


def _kept(pins: PinSet, extents: Sequence[Extent], before: int) -> bool:
    """Pin the extents; whether that worked and none of them was given back since `before`."""
    try:
        return pins.keep(extents, before)
    except OSError as error:
        raise disk_error(error, "opening the object") from error


def _translated(query: Query[_T], connection: sqlite3.Connection) -> _T:
    """Run a query, all of whose statements see one committed state. SQLite's errors become ours."""
    try:
        connection.execute("BEGIN")
        try:
            return query(connection)
        finally:
            connection.execute("COMMIT")
    except sqlite3.Error as error:
        raise index_error(error) from error
