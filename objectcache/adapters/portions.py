"""Calls that thousands of requests have coming at once, some of them in each pass of the event loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final

PORTION: Final = 64
"""A task that is woken or cancelled takes some 0.1 ms."""


class Portions:
    """Makes calls in the order in which they come, of which one pass of the loop makes PORTION at most. Used on one
    event loop. A call must not raise.
    """

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], object]] = deque()
        self._made_count = 0
        self._is_scheduled = False

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, call: Callable[[], object]) -> None:
        """Make a call, now or soon."""
        if self._waiting or self._made_count >= PORTION:
            self._waiting.append(call)
        else:
            self._made_count += 1
            call()
        self._schedule()

    def _schedule(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._next_pass)

    def _next_pass(self) -> None:
        self._is_scheduled, self._made_count = False, min(PORTION, len(self._waiting))
        if self._waiting:
            self._schedule()
        for _ in range(self._made_count):
            self._waiting.popleft()()
