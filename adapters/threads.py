"""Waiting for work in threads without leaving it behind."""

from __future__ import annotations

import asyncio
from typing import TypeVar

_T = TypeVar("_T")


async def finished(future: asyncio.Future[_T]) -> None:
    """Wait until `future` is done, whatever it brings, and however often the caller is cancelled meanwhile."""
    cancelled: asyncio.CancelledError | None = None
    while not future.done():
        try:
            await asyncio.wait([future])
        except asyncio.CancelledError as error:
            cancelled = error
    if not future.cancelled():
        future.exception()
    if cancelled is not None:
        raise cancelled


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
