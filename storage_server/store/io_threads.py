"""Threads for what may wait for the disk."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from storage_server.store.disk import disk_error
from storage_server.threads import to_end

_T = TypeVar("_T")


class IoThreads:
    """A pool of threads for what may wait for the disk, or is long enough to hold the event loop up."""

    def __init__(self, count: int) -> None:
        self._pool = ThreadPoolExecutor(count, "store-io")

    def close(self) -> None:
        """Finish running work."""
        self._pool.shutdown()

    async def run(self, action: Callable[[], _T], undo: Callable[[_T], None] | None = None) -> _T:
        """Run to its end even when the caller is cancelled; `undo` then gets the result nobody else will have. Disk
        errors become ours.
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
