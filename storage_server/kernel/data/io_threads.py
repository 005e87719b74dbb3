"""Threads for work that may wait for the disk."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from objectcache.adapters.caller import CALLER
from objectcache.adapters.threads import to_end
from storage_server.kernel.data.disk import disk_error
from storage_server.kernel.data.replaceable_threads import ReplaceableThreads, SlowCalls, ThreadCall
from storage_server.kernel.rules.thread_turns import ThreadTurns, TurnBounds

_T = TypeVar("_T")


class IoThreads:
    """Threads for work that may wait for the disk, or is long enough to hold the event loop up. So much slow work as
    there are spare threads keeps nobody's place, and one access key's slow work takes half of these. Without spare
    threads at most `count` actions run at once, whatever happens. Reads of files that may hang have
    `storage_server.kernel.data.file_threads`.
    """

    def __init__(self, count: int, spare_count: int = 0) -> None:
        of_caller = count + spare_count // 2
        turns: ThreadTurns[ThreadCall] = ThreadTurns(TurnBounds(count, of_caller, of_caller))
        self._threads = ReplaceableThreads(count, "store-io", turns)
        self._slow = SlowCalls(self._threads, spare_count)

    def close(self) -> None:
        """Finish running work."""
        self._threads.close()

    async def run(self, action: Callable[[], _T], undo: Callable[[_T], None] | None = None) -> _T:
        """Run the action to its end, even when the caller is cancelled; `undo` is then called with the result. An
        OSError becomes a ServerError.
        """
        call = ThreadCall(f"caller {CALLER.get()}", action)
        self._threads.submit(call)
        self._slow.watch()
        future: asyncio.Future[_T] = asyncio.wrap_future(call.result)
        try:
            return await to_end(future)
        except OSError as error:
            raise disk_error(error, "serving the request") from error
        except asyncio.CancelledError:
            if undo is not None and not future.cancelled() and future.exception() is None:
                undo(future.result())
            raise
