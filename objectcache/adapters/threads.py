"""Running work in threads, and waiting for it even when the caller is cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar
from weakref import WeakKeyDictionary

from descriptors.units import KIB
from objectcache.adapters.caller import CallerTurns

HERE_BYTES_MAX = 64 * KIB
"""A document up to this size is parsed in less time than a hand-over to a thread takes."""
HERE_ITEMS_MAX = 2_048
"""The event loop handles this many chunks or extents in a millisecond or two."""
COMPUTED_AT_ONCE = 2
"""Long work holds the interpreter's lock: more of it at once would only keep the event loop waiting longer. One caller
has half.
"""
_T = TypeVar("_T")
_turns: WeakKeyDictionary[asyncio.AbstractEventLoop, CallerTurns] = WeakKeyDictionary()


async def parsed(parse: Callable[[bytes], _T], document: bytes) -> _T:
    """`parse(document)`, in a thread where the document is large, so that the event loop goes on."""
    return await computed(lambda: parse(document), is_long=len(document) > HERE_BYTES_MAX)


async def computed(work: Callable[[], _T], *, is_long: bool) -> _T:
    """`work()`, in a thread where it is long, so that the event loop goes on. Callers take turns for the threads, so
    that one's many large requests do not stand in front of another's. Work that has begun has ended when this returns,
    even when its task is cancelled. Work whose task is cancelled before its turn is never begun: see `carried_out`.
    """
    if not is_long:
        return work()
    loop = asyncio.get_running_loop()
    turns = _turns.get(loop)
    if turns is None:
        turns = _turns[loop] = CallerTurns(COMPUTED_AT_ONCE, COMPUTED_AT_ONCE // 2)
    async with turns.turn():
        return await to_end(loop.run_in_executor(None, work))


async def carried_out(work: Callable[[], _T], *, is_long: bool) -> _T:
    """`work()` as `computed` does it, without a turn: for work that gives something back, and must be done even when
    its task is cancelled, and for work that waits for a lock.
    """
    if not is_long:
        return work()
    return await to_end(asyncio.get_running_loop().run_in_executor(None, work))


def in_parts(items: Sequence[_T]) -> Iterator[tuple[int, Sequence[_T]]]:
    """`items` in parts of HERE_ITEMS_MAX, each with its start: `await let_others_run(start)` before each."""
    for start in range(0, len(items), HERE_ITEMS_MAX):
        yield start, items[start : start + HERE_ITEMS_MAX]


async def let_others_run(start: int) -> None:
    """Let other tasks run between two parts. Before the first part, at 0, there is no wait."""
    if start:
        await asyncio.sleep(0)


async def finished(future: asyncio.Future[_T]) -> None:
    """Wait until `future` is done, with a result or an error, however often the caller is cancelled meanwhile."""
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
    """Await `future` to its end even when cancelled meanwhile, because the thread uses memory until it is done."""
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
