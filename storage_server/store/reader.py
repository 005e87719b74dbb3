"""Index reads, where they run: short ones where they are asked for, long ones in threads of their own."""

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

from adapters.threads import HERE_ITEMS_MAX, computed, to_end
from descriptors.errors import ErrorCode, ServerError
from storage_server.store.committer import index_error
from storage_server.store.disk import disk_error
from storage_server.store.extents import Extent, ExtentFiles, PinSet
from storage_server.store.schema import connect

READ_THREADS = 2
REREADS_MAX = 64
_T = TypeVar("_T")
Query = Callable[[sqlite3.Connection], _T]


class IndexReader:
    """Read-only access for one event loop."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._here = connect(path)
        self._local = threading.local()
        self._opened: list[sqlite3.Connection] = []
        self._threads = ThreadPoolExecutor(READ_THREADS, "index-reader")
        everyone = threading.Barrier(READ_THREADS)
        for opening in [self._threads.submit(self._open_one, everyone) for _ in range(READ_THREADS)]:
            opening.result()

    def close(self) -> None:
        """Wait for what is running, then close every connection."""
        self._threads.shutdown()
        for connection in (self._here, *self._opened):
            connection.close()

    def here(self, query: Query[_T]) -> _T:
        """A query of a few rows, in the caller's thread: a lookup costs less than handing it over."""
        return _translated(query, self._here)

    async def threaded(self, query: Query[_T]) -> _T:
        """A query of many rows, in a thread of ours."""
        loop = asyncio.get_running_loop()
        return await to_end(loop.run_in_executor(self._threads, lambda: _translated(query, self._local.connection)))

    def _open_one(self, everyone: threading.Barrier) -> None:
        """Each thread opens its connection now, so that no request pays for it."""
        self._local.connection = connect(self._path)
        self._opened.append(self._local.connection)
        everyone.wait()


@asynccontextmanager
async def pinned(
    files: ExtentFiles, find: Callable[[], Awaitable[tuple[_T, Sequence[Extent]]]]
) -> AsyncIterator[tuple[_T, Sequence[Extent]]]:
    """What `find` found, with the files of its extents readable until the block ends.

    A file that went between the look and the pin, or gave space back, means that the index has changed: it is asked
    again.
    """
    pins = PinSet(files)
    try:
        for _ in range(REREADS_MAX):
            before = files.punch_count
            found, extents = await find()
            is_long = len(extents) > HERE_ITEMS_MAX
            if await computed(partial(_kept, pins, files, extents, before), is_long=is_long):
                break
        else:
            raise ServerError(ErrorCode.SLOW_DOWN, "the object changes faster than it can be read", retryable=True)
        yield found, extents
    finally:
        await computed(pins.release, is_long=pins.count > HERE_ITEMS_MAX)


def _kept(pins: PinSet, files: ExtentFiles, extents: Sequence[Extent], before: int) -> bool:
    """Whether the extents are pinned, and none of their files has given space back since `before`."""
    try:
        return pins.keep(extents) and not files.is_punched(extents, before)
    except OSError as error:
        raise disk_error(error, "opening the object") from error


def _translated(query: Query[_T], connection: sqlite3.Connection) -> _T:
    """Run a query whose statements all see one committed state."""
    try:
        connection.execute("BEGIN")
        try:
            return query(connection)
        finally:
            connection.execute("COMMIT")
    except sqlite3.Error as error:
        raise index_error(error) from error
