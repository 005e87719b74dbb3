"""Chunks of another store that find no room in the cache. A delivery brings their bytes by itself, in windows of a few
layers, and nothing of them is kept: a cache that is too small serves all that its home has, only more slowly.

    A lies in a file, B passes: layers 0 to 3 of B come into memory, are sent and forgotten; then come layers 4 to 7
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from descriptors.errors import ChunkUnavailable, ErrorCode, ObjectCacheError
from descriptors.units import MIB
from storage_server.planning.block_checksums import BLOCK_BYTES, checksum_bytes
from storage_server.planning.extent import Extent
from storage_server.planning.plan import Payload
from storage_server.planning.rows import RESIDENT, SourceColumn, SourceTable

WINDOWS_BYTES = 16 * MIB
"""The memory of one delivery for the windows of payloads under way, and as much for what later payloads need."""
DELIVERIES_MAX = 8
"""Deliveries at a time that have it; one access key has half of them."""
Read = Callable[[int, int, memoryview], Awaitable[None]]
"""Brings bytes of a chunk, from the start on, into the view, and proves them; the first argument is the chunk's place
in the prefix, earlier ones go first. Raises ObjectCacheError.
"""


@dataclass(frozen=True, slots=True)
class PassingExtent(Extent):
    """A whole chunk that lies in no file here. `read` takes ranges that begin and end at multiples of `unit_bytes`, or
    at the chunk's end.
    """

    unit_bytes: int = BLOCK_BYTES
    read: Read | None = field(default=None, compare=False, repr=False)

    @staticmethod
    def of(name: str, nbytes: int, unit_bytes: int, read: Read) -> PassingExtent:
        """`name` is unique, and no file's."""
        return PassingExtent(name, 0, nbytes, bytes(checksum_bytes(nbytes)), unit_bytes=unit_bytes, read=read)


@dataclass(frozen=True, eq=False, slots=True)
class _Window:
    """Bytes [start, end) of a chunk in memory."""

    start: int
    end: int
    memory: npt.NDArray[np.uint8]


class Brought:
    """The windows of one payload. `release` them when it has been gathered."""

    def __init__(self, nbytes: int, on_release: Callable[[int], None]) -> None:
        self.windows: Sequence[_Window] = ()
        self._nbytes = nbytes
        self._on_release = on_release

    def release_after(self, gathered: asyncio.Future[None] | None) -> None:
        """Release it when this is done; at once where there is nothing to wait for."""
        if gathered is None:
            self.release()
        else:
            gathered.add_done_callback(lambda _: self.release())

    def release(self) -> None:
        """Forget it. Later calls do nothing."""
        self.windows = ()
        nbytes, self._nbytes = self._nbytes, 0
        self._on_release(nbytes)


NOTHING: Final = Brought(0, lambda _: None)
"""Where nothing passes."""


class Passing:
    """The chunks of one delivery that pass. Used on one event loop."""

    def __init__(self, table: SourceTable, extents: Mapping[int, PassingExtent]) -> None:
        """`extents` by the chunk's index in the delivery."""
        self._table = table
        self._extents = extents
        self._indexes = np.array(sorted(extents), dtype=np.int64)
        self._unit_bytes = max(extent.unit_bytes for extent in extents.values())
        share_bytes = WINDOWS_BYTES // 2 // len(extents)
        self._ahead_bytes = share_bytes if share_bytes >= 2 * self._unit_bytes else 0
        """So many bytes of each chunk come at once, if more of it is needed later."""
        self._kept: dict[int, _Window] = {}
        self._under_way_bytes = 0
        self._released = asyncio.Event()

    @staticmethod
    def among(table: SourceTable, chunks: Sequence[Sequence[Extent]]) -> Passing | None:
        """The passing chunks of a delivery with this table; None where there are none."""
        found = {index: each[0] for index, each in enumerate(chunks) if isinstance(each[0], PassingExtent)}
        return Passing(table, found) if found else None

    def payload_bytes_max(self, nbytes: int, slice_bytes: int) -> int:
        """At most `nbytes`, and so few that the windows of one payload take half of the memory."""
        return max(1, min(nbytes, int(WINDOWS_BYTES / 2 / (1 + 2 * self._unit_bytes / slice_bytes))))

    async def bring(self, payload: Payload) -> Brought:
        """Bring what the payload needs, and have the table name its place in memory. Waits while earlier payloads use
        the memory up. Raises ChunkUnavailable with the chunk's index where a chunk cannot be read.
        """
        first, end = np.searchsorted(self._indexes, [payload.first_chunk, payload.first_chunk + payload.chunk_count])
        spans = {index: _span_of(payload, index) for index in self._indexes[first:end].tolist()}
        missing = {index: self._range_of(index, *span) for index, span in spans.items() if not self._has(index, *span)}
        nbytes = 0 if self._ahead_bytes else sum(end - start for start, end in missing.values())
        while self._under_way_bytes and self._under_way_bytes + nbytes > WINDOWS_BYTES:
            self._released.clear()
            await self._released.wait()
        windows = {index: self._kept[index] for index in spans if index not in missing}
        self._under_way_bytes += nbytes
        brought = Brought(nbytes, self._release)
        try:
            async with asyncio.TaskGroup() as tasks:
                for index, (start, stop) in missing.items():
                    windows[index] = _Window(start, stop, np.empty(stop - start, dtype=np.uint8))
                    tasks.create_task(self._read(index, windows[index], payload))
        except BaseExceptionGroup as group:
            brought.release()
            raise group.exceptions[0] from None
        except BaseException:
            brought.release()
            raise
        brought.windows = list(windows.values())
        self._name(windows)
        for index, window in windows.items():
            if self._ahead_bytes and window.end > spans[index][1]:
                self._kept[index] = window
            else:
                self._kept.pop(index, None)
        return brought

    def _has(self, index: int, start: int, end: int) -> bool:
        window = self._kept.get(index)
        return window is not None and window.start <= start and end <= window.end

    def _range_of(self, index: int, start: int, end: int) -> tuple[int, int]:
        """The bytes to read of a chunk where these are needed: some whole pieces, and the units that they lie in."""
        extent, piece_bytes = self._extents[index], end - start
        end = start + max(1, self._ahead_bytes // piece_bytes) * piece_bytes
        start -= start % extent.unit_bytes
        return start, min(extent.nbytes, -(-end // extent.unit_bytes) * extent.unit_bytes)

    async def _read(self, index: int, window: _Window, payload: Payload) -> None:
        read = self._extents[index].read
        assert read is not None
        try:
            await read(index, window.start, window.memory.data)
        except ObjectCacheError as error:
            name = f"chunk_keys[{index}]"
            problem = f"{name} finds no room in the cache, and could not be read to its end: {error.message}"
            raise ChunkUnavailable(
                ErrorCode.NO_SUCH_CHUNK, problem, field=name, index=index, layer=payload.group.index
            ) from error

    def _name(self, windows: Mapping[int, _Window]) -> None:
        """The rows that follow from the table read these windows."""
        rows = self._table.first_row[list(windows)]
        self._table.extents[rows, SourceColumn.SOURCE] = RESIDENT
        self._table.extents[rows, SourceColumn.OFFSET] = [
            window.memory.ctypes.data - window.start for window in windows.values()
        ]

    def _release(self, nbytes: int) -> None:
        self._under_way_bytes -= nbytes
        self._released.set()


def _span_of(payload: Payload, index: int) -> tuple[int, int]:
    """The bytes [start, end) of a chunk that are in the payload."""
    at = index - payload.first_chunk
    source, piece = payload.source_offset, payload.piece_bytes
    start = source if isinstance(source, int) else int(source[at])
    return start, start + (piece if isinstance(piece, int) else int(piece[at]))
