"""The interface of a keeper: it decides what the DRAM tier has in memory, and in which form, and makes the bytes.

The tier (storage_server.cache.dram) lends memory and copies in what is to come; a keeper says what that is. There are
two: one for exact chunks, and one that encodes.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from objectcache.adapters.threads import in_parts, let_others_run, to_end
from storage_server.cache.rules.residency import Key, Residency
from storage_server.planning.extent import CorruptExtentError, Extent
from storage_server.planning.forms import Encoded, Reading
from storage_server.planning.source import ChunkSource

Copy = tuple[Extent, int]
"""An extent that comes into memory, and the offset of its span."""
Span = tuple[int, int]
"""Bytes of an extent that are missing: from where to where."""
_T = TypeVar("_T")
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TierMemory:
    """The memory of a tier, what lies in it, and where that comes from. Policies are asked in one thread, `books`."""

    view: memoryview
    residency: Residency
    source: ChunkSource
    books: ThreadPoolExecutor

    async def in_books(self, call: Callable[[], _T]) -> _T:
        """The result of a call in the thread of the books."""
        return await to_end(asyncio.get_running_loop().run_in_executor(self.books, call))

    async def evict(self, keys: Sequence[Key]) -> None:
        """Carry out that these extents go."""
        for start, part in in_parts(keys):
            await let_others_run(start)
            self.residency.evict(part)


class Keeper(ABC):
    """The keeper of one memory. All but `read` is called in the event loop, one decision after the other."""

    def __init__(self, memory: TierMemory) -> None:
        self._memory = memory

    @property
    @abstractmethod
    def decided_bytes(self) -> int:
        """The bytes of all chunks that are to be in memory."""

    @property
    def encoded_bytes(self) -> int:
        """Bytes of exact chunks that have been encoded."""
        return 0

    @property
    def encoding_s(self) -> float:
        """The time that this has taken."""
        return 0.0

    @abstractmethod
    async def decide(self, known: Mapping[Key, Extent], reading: Reading | None) -> list[Copy]:
        """Decide what is to be in memory after a use of these extents, and carry it out but for the copying. Returns
        those that are to come.
        """

    @abstractmethod
    async def forget(self, keys: Sequence[Key]) -> None:
        """Note that these are not in memory after all."""

    def read(self, extent: Extent, offset: int, missing: Sequence[Span]) -> bool:
        """Copy what is missing of an extent to its place, in a thread; whether that went well."""
        view, source = self._memory.view, self._memory.source
        try:
            for start, end in missing:
                source.read_extent(extent, view[offset + start : offset + end], start)
        except (CorruptExtentError, OSError) as error:
            _log.warning("an extent was not taken into memory: %s", error)
            return False
        return True

    def form_of_copy(self, extent: Extent, offset: int) -> Encoded | None:
        """The form in which `read` has written the extent at this offset; None for exact. It is asked for once."""
        return None

    def drop(self, coming: Sequence[Copy]) -> None:  # noqa: B027 - only some keepers remember
        """Note that these do not come after all; `forget` is called for them, too."""

    def stop(self) -> None:  # noqa: B027 - as `drop`
        """Begin nothing more."""

    def close(self) -> None:  # noqa: B027 - as `drop`
        """End the threads: all that was under way is done."""
