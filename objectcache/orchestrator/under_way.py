"""The requests that are being answered, so that a stop can wait for them and tell the rest."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from objectcache.orchestrator.answers import Refusal

TOLD_S = 2.0
"""The time in which clients whose answers are cut off are told so."""
_log = logging.getLogger(__name__)


def stopping() -> Refusal:
    """The answer to a request that comes, or goes on, too late."""
    return Refusal(503, "the orchestrator is stopping; send the request again", code="stopping", retry_after_s=1)


class UnderWay:
    """Used on one event loop."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[object]] = set()
        self._none = asyncio.Event()
        self.is_stopping = False
        """New requests are refused."""
        self.is_over = False
        """Requests that are cancelled now are so by the stop, and tell their clients."""

    @contextmanager
    def one(self) -> Iterator[None]:
        """A request, in this task. Raises Refusal when no more are taken."""
        if self.is_stopping:
            raise stopping()
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            yield
        finally:
            self._tasks.discard(task)
            if not self._tasks:
                self._none.set()

    def caught(self) -> bool:
        """Whether a cancellation that this task has caught is the stop's; it then counts as answered."""
        task = asyncio.current_task()
        if not self.is_over or task is None:
            return False
        task.uncancel()
        return True

    async def stop(self, drain_s: float) -> None:
        """Take no more, let those that run go on for `drain_s`, and cut the rest off."""
        self.is_stopping = True
        if not self._tasks:
            return
        _log.info("%d requests have %.0f s to end", len(self._tasks), drain_s)
        await self._all_end(drain_s)
        self.is_over = True
        if self._tasks:
            _log.warning("%d requests are cut off", len(self._tasks))
        for task in self._tasks:
            task.cancel()
        await self._all_end(TOLD_S)

    async def _all_end(self, within_s: float) -> None:
        self._none.clear()
        if self._tasks:
            with suppress(TimeoutError):
                async with asyncio.timeout(within_s):
                    await self._none.wait()
