"""Which access key the next staging slot goes to."""

from __future__ import annotations

import asyncio
import contextlib

from storage_server.delivery.gather.staging import StagingPool


async def test_slots_go_to_the_key_that_holds_the_fewest() -> None:
    pool = StagingPool(4096, 4)
    busy, modest = pool.window("busy", 9), pool.window("modest", 9)
    held = [await busy.take() for _ in range(2)]
    waiting = [asyncio.create_task(window.take()) for window in (busy, modest, modest)]
    await asyncio.sleep(0)
    assert [task.done() for task in waiting] == [False, True, True], "busy has its half"
    held[0].release()
    await asyncio.sleep(0)
    assert waiting[0].done()
    for slot in (held[1], *[task.result() for task in waiting]):
        slot.release()
    assert pool.free_count == 4


async def test_windows_and_pool_bound_what_is_held_and_serve_in_order() -> None:
    """First come, first served; a cancelled waiter loses nothing."""
    pool = StagingPool(100, 2)
    window = pool.window("key", 1)
    first = await window.take()
    second = asyncio.create_task(window.take())
    await asyncio.sleep(0)
    assert pool.free_count == 1
    first.release()
    first.release()
    other = await second
    assert pool.free_count == 1
    wide = pool.window("key", 5)
    held = await wide.take()
    waiting = [asyncio.create_task(wide.take()) for _ in range(2)]
    await asyncio.sleep(0)
    waiting[0].cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await waiting[0]
    held.release()
    third = await waiting[1]
    for slot in (other, third):
        slot.release()
    assert pool.free_count == 2
