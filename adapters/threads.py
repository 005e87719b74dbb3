"""Waiting for work in threads without leaving it behind."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from descriptors.units import KIB

HERE_BYTES_MAX = 64 * KIB
"""A document of this size is parsed in less time than handing it to a thread takes."""
_T = TypeVar("_T")


async def parsed(parse: Callable[[bytes], _T], document: bytes) -> _T:
    """`parse(document)`, in a thread where the document is large: the event loop goes on meanwhile."""
    if len(document) <= HERE_BYTES_MAX:
        return parse(document)
    return await to_end(asyncio.get_running_loop().run_in_executor(None, parse, document))


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
