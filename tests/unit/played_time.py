"""The time of an event loop, played: a test takes no longer than its tasks do, and time passes alike on any machine."""

from __future__ import annotations

import asyncio
import time
from typing import Any

BEGAN_S = 1000.0
TURN_S = 1e-7
"""Each turn of the loop takes this long. Otherwise code that waits for a rounding error of time would wait for ever."""


class PlayedTime:
    """The time of the running event loop from now on. It stands all but still while a task can go on; when none can it
    is the time of the next timer at once. Threads are not waited for while a timer runs: it is for tests without them.
    Where a module asks its clock, this stands in for `time` there, too.
    """

    def __init__(self) -> None:
        self._now_s = BEGAN_S
        self._began_unix_s = time.time()
        loop: Any = asyncio.get_running_loop()
        select = loop._selector.select

        def jump(timeout: float | None) -> Any:
            self._now_s += TURN_S
            if not timeout:
                return select(timeout)
            events = select(0)
            if not events:
                self._now_s += timeout
            return events

        loop._selector.select = jump
        loop.time = self.monotonic

    def monotonic(self) -> float:
        """The time, in seconds."""
        return self._now_s

    def time(self) -> float:
        """The time as the system would give it, in Unix seconds."""
        return self._began_unix_s + self._now_s - BEGAN_S

    @staticmethod
    async def passes(seconds: float) -> None:
        """Let so much time pass, and all happen that comes until then."""
        loop = asyncio.get_running_loop()
        is_over = loop.create_future()
        loop.call_later(seconds, is_over.set_result, None)
        await is_over
