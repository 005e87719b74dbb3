"""Waiting for work in threads without leaving it behind."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from descriptors.units import KIB

HERE_BYTES_MAX = 64 * KIB
"""A document of this size is parsed in less time than handing it to a thread takes."""
HERE_ITEMS_MAX = 2_048
"""So many chunks or extents are gone through in a millisecond or two."""
_T = TypeVar("_T")


async def parsed(parse: Callable[[bytes], _T], document: bytes) -> _T:
    """`parse(document)`, in a thread where the document is large: the event loop goes on meanwhile."""
    return await computed(lambda: parse(document), is_long=len(document) > HERE_BYTES_MAX)


async def computed(work: Callable[[], _T], *, is_long: bool) -> _T:
    """`work()`, in a thread where it is long: the event loop goes on meanwhile. It ends before this does, even when the
    caller is cancelled.
    """
    if not is_long:
        return work()
    return await to_end(asyncio.get_running_loop().run_in_executor(None, work))


def in_parts(items: Sequence[_T]) -> Iterator[tuple[int, Sequence[_T]]]:
    """`items` in parts of HERE_ITEMS_MAX, each with its start: `await others(start)` before each."""
    for start in range(0, len(items), HERE_ITEMS_MAX):
        yield start, items[start : start + HERE_ITEMS_MAX]


async def others(start: int) -> None:
    """Between parts whatever else waits has the event loop; before the first, at 0, nothing is waited for."""
    if start:
        await asyncio.sleep(0)


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
