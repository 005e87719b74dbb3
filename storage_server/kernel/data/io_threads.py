"""Threads for work that may wait for the disk."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from objectcache.adapters.threads import to_end
from storage_server.kernel.data.disk import disk_error

_T = TypeVar("_T")


class IoThreads:
    """A pool of threads for work that may wait for the disk, or is long enough to hold the event loop up. Reads of
    files that may hang have `storage_server.kernel.data.file_threads`.
    """

    def __init__(self, count: int) -> None:
        self._pool = ThreadPoolExecutor(count, "store-io")

    def close(self) -> None:
        """Finish running work."""
        self._pool.shutdown()

    async def run(self, action: Callable[[], _T], undo: Callable[[_T], None] | None = None) -> _T:
        """Run the action to its end, even when the caller is cancelled; `undo` is then called with the result. An
        OSError becomes a ServerError.
        """
        future = asyncio.get_running_loop().run_in_executor(self._pool, action)
        try:
            return await to_end(future)
        except OSError as error:
            raise disk_error(error, "serving the request") from error
        except asyncio.CancelledError:
            if undo is not None and not future.cancelled() and future.exception() is None:
                undo(future.result())
            raise
