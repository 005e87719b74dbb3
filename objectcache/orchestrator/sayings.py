"""The words of engines are read in turns: each engine decides how long that takes, and hundreds may speak at once."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final, TypeVar

from objectcache.adapters.loop_share import LoopShare
from objectcache.adapters.threads import computed

HERE_BYTES_MAX: Final = 1 << 14
"""So much is read on the event loop: it takes up to 20 ms. A thread reads what is longer."""
_T = TypeVar("_T")


class Sayings:
    """Documents and events of all engines. Together they take a small part of each pass of the event loop. Engines take
    turns, and one with 64 ranks has one turn. Used on one event loop.
    """

    def __init__(self) -> None:
        self._share = LoopShare()

    async def read(self, engine: str, said: bytes, reading: Callable[[bytes], _T]) -> _T:
        """`reading(said)`, when it is the engine's turn. Raises what `reading` raises."""
        if len(said) > HERE_BYTES_MAX:
            return await computed(partial(reading, said), is_long=True)
        async with self._share.turn(engine):
            return reading(said)
