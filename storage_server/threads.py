"""Waiting for work in threads without leaving it behind."""

from __future__ import annotations

import asyncio
from typing import TypeVar

_T = TypeVar("_T")


async def to_end(future: asyncio.Future[_T]) -> _T:
    """Await `future` to its end even when cancelled meanwhile: what the thread uses stays ours until it is done."""
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        while not future.done():
            try:
                await asyncio.wait([future])
            except asyncio.CancelledError:
                continue
        if not future.cancelled():
            future.exception()
        raise
