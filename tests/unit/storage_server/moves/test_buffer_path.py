"""Memory for objects that are staged whole."""

from __future__ import annotations

import asyncio

from storage_server.delivery.gather.staging import StagingPool
from storage_server.delivery.transport.ucx_memory import WHOLE_SLOT_BYTES
from storage_server.moves.buffer_path import BufferStaging
from tests.support.waiting import settled


async def test_nobody_waits_for_another_one_whose_own_share_is_in_use() -> None:
    """Its clients may be silent, so that it is in use for as long as a transfer may stand still."""
    staging = BufferStaging(StagingPool(WHOLE_SLOT_BYTES, 8))
    assert staging.nbytes == 4 * WHOLE_SLOT_BYTES, "one access key has half"
    may_end, order = asyncio.Event(), list[str]()

    async def stage(key: str, count: int) -> None:
        async with staging.lent(key, count * WHOLE_SLOT_BYTES) as slots:
            order.append(f"{key} {len(slots)}")
            await may_end.wait()

    tasks = [asyncio.create_task(stage("silent", 4)), asyncio.create_task(stage("silent", 3))]
    await settled()
    tasks += [asyncio.create_task(stage("other", count)) for count in (1, 3)]
    await settled()
    assert order == ["silent 4", "other 1", "other 3"]
    may_end.set()
    await asyncio.gather(*tasks)
    assert order[3:] == ["silent 3"]


async def test_without_memory_nothing_is_staged() -> None:
    staging = BufferStaging(None)
    assert staging.nbytes == 0
    async with staging.lent("key", 0) as slots:
        assert slots == []
