"""Lines of a process that somebody else may control."""

from __future__ import annotations

import asyncio

import pytest

from objectcache.adapters.lines import LINES_AT_ONCE, lines_of


async def test_others_run_between_the_lines_of_a_flood() -> None:
    """A reader that has lines does not wait for the next one: megabytes of them would stop the loop."""
    reader = asyncio.StreamReader()
    reader.feed_data(b"x\n" * (4 * LINES_AT_ONCE))
    reader.feed_eof()
    between: list[int] = []
    count = 0

    async def other() -> None:
        while not between or between[-1] < 4 * LINES_AT_ONCE:
            between.append(count)
            await asyncio.sleep(0)

    running = asyncio.create_task(other())
    async for line in lines_of(reader):
        assert line == b"x\n"
        count += 1
    await running
    assert {LINES_AT_ONCE, 2 * LINES_AT_ONCE, 3 * LINES_AT_ONCE} <= {*between}


async def test_a_line_without_end_is_refused() -> None:
    reader = asyncio.StreamReader(limit=100)
    reader.feed_data(b"x" * 1_000)
    with pytest.raises(ValueError, match="limit"):
        async for _ in lines_of(reader):
            pass
