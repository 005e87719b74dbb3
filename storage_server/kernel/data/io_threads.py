"""Threads for work that may wait for the disk."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TypeVar

from descriptors.errors import ErrorCode, ServerError
from objectcache.adapters.caller import CallerTurns
from objectcache.adapters.threads import to_end
from storage_server.kernel.data.disk import disk_error

OWNER_WAIT_S = 30.0
"""Work on an owner's files waits so long for other work on them, and is then told to slow down."""
_T = TypeVar("_T")


class IoThreads:
    """A pool of threads for work that may wait for the disk, or is long enough to hold the event loop up.

    Where files have owners, a file of one may hang, and nothing ends a read that hangs: so work on one owner's files
    has at most `owner_max` threads. `owner_of` says whose a file is.
    """

    def __init__(self, count: int, owner_max: int | None = None, owner_of: Callable[[str], str] = str) -> None:
        self._pool = ThreadPoolExecutor(count, "store-io")
        self._count = count
        self._submitted = 0
        self._owner_of = owner_of
        self._turns = None if owner_max is None else CallerTurns(count, owner_max)
        self._waiting_count = 0

    @property
    def has_queue(self) -> bool:
        """Whether work waits for a free thread."""
        return self._submitted > self._count or self._waiting_count > 0

    def close(self) -> None:
        """Finish running work."""
        self._pool.shutdown()

    async def run_on(self, file_id: str, action: Callable[[], _T]) -> _T:
        """Run the action, which works on this file, as `run` does. Raises ServerError(SlowDown) where other work on
        files of its owner does not end.
        """
        async with self._turn(file_id):
            return await self.run(action)

    @asynccontextmanager
    async def _turn(self, file_id: str) -> AsyncIterator[None]:
        if self._turns is None:
            yield
            return
        async with AsyncExitStack() as stack:
            self._waiting_count += 1
            try:
                async with asyncio.timeout(OWNER_WAIT_S):
                    await stack.enter_async_context(self._turns.turn(self._owner_of(file_id)))
            except TimeoutError:
                problem = "the files of another server do not answer"
                raise ServerError(ErrorCode.SLOW_DOWN, problem, retryable=True) from None
            finally:
                self._waiting_count -= 1
            yield

    async def run(self, action: Callable[[], _T], undo: Callable[[_T], None] | None = None) -> _T:
        """Run the action to its end, even when the caller is cancelled; `undo` is then called with the result. An
        OSError becomes a ServerError.
        """
        self._submitted += 1
        future = asyncio.get_running_loop().run_in_executor(self._pool, action)
        future.add_done_callback(self._ended)
        try:
            return await to_end(future)
        except OSError as error:
            raise disk_error(error, "serving the request") from error
        except asyncio.CancelledError:
            if undo is not None and not future.cancelled() and future.exception() is None:
                undo(future.result())
            raise

    def _ended(self, _: object) -> None:
        self._submitted -= 1
