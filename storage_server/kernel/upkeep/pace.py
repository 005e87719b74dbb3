"""How fast upkeep reads and writes: slowly while anybody else uses the store."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

BUSY_SLOWDOWN = 16
TICK_S = 0.05


async def wait_turn(nbytes: int, bytes_per_s: float, is_busy: Callable[[], bool]) -> None:
    """Wait for the time that `nbytes` may take, or BUSY_SLOWDOWN times as long while others use the store."""
    left_s = nbytes / bytes_per_s
    while left_s > 0:
        slowdown = BUSY_SLOWDOWN if is_busy() else 1
        slept_s = min(left_s * slowdown, TICK_S)
        await asyncio.sleep(slept_s)
        left_s -= slept_s / slowdown
