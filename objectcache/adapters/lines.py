"""The lines of a process that somebody else may control by now."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

LINES_AT_ONCE = 64
"""The event loop takes so many in well under a millisecond."""


async def lines_of(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """The lines until the end. A reader that has lines does not wait for the next one, so others are let run between.
    Raises ValueError for a line that is longer than the reader's limit, OSError.
    """
    while True:
        for _ in range(LINES_AT_ONCE):
            line = await reader.readline()
            if not line:
                return
            yield line
        await asyncio.sleep(0)
