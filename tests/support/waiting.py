"""Waiting for events. A test waits for what it needs, not for a time; a limit is there to end a test that fails."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

LIMIT_S = 60.0
"""A loaded machine keeps this limit."""
ROUNDS = 100


def eventually(is_true: Callable[[], bool], timeout_s: float = LIMIT_S) -> bool:
    """Wait for a state that another process or thread reaches on its own; whether it did."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if is_true():
            return True
        time.sleep(0.02)  # nobody tells of it
    return is_true()


async def until(is_true: Callable[[], bool], timeout_s: float = LIMIT_S) -> None:
    """Wait on the event loop for a state that tasks, threads or other processes reach. Raises TimeoutError."""
    async with asyncio.timeout(timeout_s):
        while not is_true():  # noqa: ASYNC110 - nobody tells of it
            await asyncio.sleep(0.005)


async def settled() -> None:
    """Let every task of this event loop run until it waits for something that no task of the loop brings: a thread, a
    socket, the clock.
    """
    for _ in range(ROUNDS):
        await asyncio.sleep(0)
