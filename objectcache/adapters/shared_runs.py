"""SharedRuns: work that many ask for at once is done once for all who ask before it begins."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable


class SharedRuns:
    """Runs `work`, one run at a time. A caller needs a run that begins after its call, since one under way may have
    read too early. So all who call during a run share the next one, and each waits for two runs at most. Used on one
    event loop.
    """

    def __init__(self, work: Callable[[], Awaitable[None]]) -> None:
        self._work = work
        self._running: asyncio.Task[None] | None = None
        self._next: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Wait for a run that begins after this call. Raises what the work raises."""
        if self._next is None:
            self._next = asyncio.get_running_loop().create_task(self._run_after(self._running))
        await asyncio.shield(self._next)

    async def close(self) -> None:
        """End what is under way; those who wait are cancelled."""
        tasks = [task for task in (self._next, self._running) if task is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def _run_after(self, before: asyncio.Task[None] | None) -> None:
        if before is not None:
            await asyncio.wait([before])
        self._running, self._next = self._next, None
        await self._work()
