"""Calls that thousands of requests have coming at once, some of them in each pass of the event loop."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Final

PORTION: Final = 64
"""A task that is woken or cancelled takes some 0.1 ms."""
PORTION_S: Final = 0.005
"""A call may itself take a millisecond, for example where it looks at a thousand engines."""


class Portions:
    """Makes calls in the order in which they come. One pass of the loop makes PORTION of them at most, and begins none
    when those before have taken PORTION_S. Used on one event loop. A call must not raise.
    """

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], object]] = deque()
        self._made_count = 0
        self._spent_s = 0.0
        self._is_scheduled = False

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, call: Callable[[], object]) -> None:
        """Make a call, now or soon."""
        if self._waiting or not self._has_time:
            self._waiting.append(call)
        else:
            self._make(call)
        self._schedule()

    @property
    def _has_time(self) -> bool:
        return self._made_count < PORTION and self._spent_s < PORTION_S

    def _make(self, call: Callable[[], object]) -> None:
        began_s = time.perf_counter()
        self._made_count += 1
        call()
        self._spent_s += time.perf_counter() - began_s

    def _schedule(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._next_pass)

    def _next_pass(self) -> None:
        self._is_scheduled, self._made_count, self._spent_s = False, 0, 0.0
        if self._waiting:
            self._schedule()
        while self._waiting and self._has_time:
            self._make(self._waiting.popleft())
