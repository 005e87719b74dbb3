"""Wrappers around a ChunkSource that make it slow, failing, truncated or corrupt.

Each wrapper passes every call on unless its fault is switched on, so that with its fault switched off it keeps the
contract of the source that it wraps (tests/contract/store). Wrappers can be put around each other.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from descriptors.layout import ChunkLayout
from descriptors.presence import Presence
from storage_server.planning.block_checksums import BLOCK_BYTES
from storage_server.planning.extent import CorruptExtentError, Extent
from storage_server.planning.forms import Takes
from storage_server.planning.rows import RESIDENT, Row, Rows, SourceTable
from storage_server.planning.source import ChunkSource, Pins, RowFailure, RowOutcome


class Resolves(Protocol):
    """A ChunkSource, or the reads of a store."""

    def resolve(self, bucket: str, keys: Sequence[str]) -> AsyncGenerator[list[list[Extent] | None], None]: ...


class SourceWrapper:
    """A ChunkSource that passes every call on to another."""

    def __init__(self, source: ChunkSource) -> None:
        self.source = source

    def open_chunks(
        self, bucket: str, keys: Sequence[str], layout: ChunkLayout, *, prefix_only: bool, reader: Takes | None = None
    ) -> AbstractAsyncContextManager[list[list[Extent]]]:
        return self.source.open_chunks(bucket, keys, layout, prefix_only=prefix_only, reader=reader)

    async def matched(self, bucket: str, keys: Sequence[str], lease_s: float = 0.0, reader: Takes | None = None) -> int:
        return await self.source.matched(bucket, keys, lease_s, reader)

    async def present(
        self, bucket: str, keys: Sequence[str], lease_s: float = 0.0, reader: Takes | None = None
    ) -> tuple[Presence, bool]:
        return await self.source.present(bucket, keys, lease_s, reader)

    def resolve(self, bucket: str, keys: Sequence[str]) -> AsyncGenerator[list[list[Extent] | None], None]:
        return self.source.resolve(bucket, keys)

    def is_cut_off(self, bucket: str) -> bool:
        return self.source.is_cut_off(bucket)

    @property
    def generation(self) -> int:
        return self.source.generation

    def keep(self, extents: Sequence[Extent], since: int) -> Pins | None:
        return self.source.keep(extents, since)

    def read_rows(self, table: SourceTable, rows: Rows, address: int, *, past_cache: bool) -> RowFailure | None:
        return self.source.read_rows(table, rows, address, past_cache=past_cache)

    def read_extent(self, extent: Extent, view: memoryview, start: int = 0) -> None:
        self.source.read_extent(extent, view, start)

    def note_damage(self, bucket: str, key: str, extents: Sequence[Extent]) -> None:
        self.source.note_damage(bucket, key, extents)


class SlowSource(SourceWrapper):
    """Every open takes `open_s` seconds longer, and every read `read_s`. Waiting is done by `wait` on the event loop
    and by `block` in a reading thread: a test gives functions that wait for an event instead of sleeping.
    """

    def __init__(
        self,
        source: ChunkSource,
        *,
        open_s: float = 0.0,
        read_s: float = 0.0,
        wait: Callable[[float], Awaitable[object]] = asyncio.sleep,
        block: Callable[[float], object] = time.sleep,
    ) -> None:
        super().__init__(source)
        self.open_s = open_s
        self.read_s = read_s
        self._wait = wait
        self._block = block

    @asynccontextmanager
    async def open_chunks(
        self, bucket: str, keys: Sequence[str], layout: ChunkLayout, *, prefix_only: bool, reader: Takes | None = None
    ) -> AsyncIterator[list[list[Extent]]]:
        if self.open_s:
            await self._wait(self.open_s)
        async with self.source.open_chunks(bucket, keys, layout, prefix_only=prefix_only, reader=reader) as chunks:
            yield chunks

    def read_rows(self, table: SourceTable, rows: Rows, address: int, *, past_cache: bool) -> RowFailure | None:
        if self.read_s:
            self._block(self.read_s)
        return self.source.read_rows(table, rows, address, past_cache=past_cache)

    def read_extent(self, extent: Extent, view: memoryview, start: int = 0) -> None:
        if self.read_s:
            self._block(self.read_s)
        self.source.read_extent(extent, view, start)


class FileSource(SourceWrapper):
    """`block` is called in the thread of each read of the file `file_id`."""

    def __init__(self, source: ChunkSource, block: Callable[[float], object]) -> None:
        super().__init__(source)
        self.file_id = ""
        self._block = block

    def read_rows(self, table: SourceTable, rows: Rows, address: int, *, past_cache: bool) -> RowFailure | None:
        if self.file_id in table.files_of(rows):
            self._block(0.0)
        return self.source.read_rows(table, rows, address, past_cache=past_cache)


class SourceCall(Enum):
    """The calls of a ChunkSource that a FailingSource counts, each by itself."""

    OPEN_CHUNKS = "open_chunks"
    READ_ROWS = "read_rows"
    READ_EXTENT = "read_extent"


class FailingSource(SourceWrapper):
    """The nth call of a kind, counted from 0, raises the error that `failures` has for it."""

    def __init__(self, source: ChunkSource, failures: Mapping[tuple[SourceCall, int], Exception] | None = None) -> None:
        super().__init__(source)
        self._failures = dict(failures or {})
        self._counts = dict.fromkeys(SourceCall, 0)
        self._lock = threading.Lock()

    @asynccontextmanager
    async def open_chunks(
        self, bucket: str, keys: Sequence[str], layout: ChunkLayout, *, prefix_only: bool, reader: Takes | None = None
    ) -> AsyncIterator[list[list[Extent]]]:
        self._count(SourceCall.OPEN_CHUNKS)
        async with self.source.open_chunks(bucket, keys, layout, prefix_only=prefix_only, reader=reader) as chunks:
            yield chunks

    def read_rows(self, table: SourceTable, rows: Rows, address: int, *, past_cache: bool) -> RowFailure | None:
        self._count(SourceCall.READ_ROWS)
        return self.source.read_rows(table, rows, address, past_cache=past_cache)

    def read_extent(self, extent: Extent, view: memoryview, start: int = 0) -> None:
        self._count(SourceCall.READ_EXTENT)
        self.source.read_extent(extent, view, start)

    def _count(self, call: SourceCall) -> None:
        with self._lock:
            index = self._counts[call]
            self._counts[call] += 1
        failure = self._failures.get((call, index))
        if failure is not None:
            raise failure


@dataclass(frozen=True, slots=True)
class _BadSpan:
    """Bytes [start, end) of a file that cannot be read as they were put."""

    start: int
    end: int
    outcome: RowOutcome


class DamagedSource(SourceWrapper):
    """Reads of chosen chunks fail as if the source had found damage: the rows before it are read, and the first
    row that holds damaged bytes is the failure. Resident rows were proved before and do not fail.
    """

    def __init__(self, source: ChunkSource) -> None:
        super().__init__(source)
        self._damage: dict[tuple[str, str], tuple[int, int | None, RowOutcome]] = {}
        self._bad: dict[str, list[_BadSpan]] = {}

    def truncate(self, bucket: str, key: str, nbytes: int) -> None:
        """The chunk ends after `nbytes`: what is behind them is missing."""
        self._damage[bucket, key] = nbytes, None, RowOutcome.SHORT

    def corrupt(self, bucket: str, key: str, offset: int) -> None:
        """The byte at `offset` of the chunk differs from what was put, so its whole block is not proved."""
        start = offset // BLOCK_BYTES * BLOCK_BYTES
        self._damage[bucket, key] = start, start + BLOCK_BYTES, RowOutcome.CORRUPT

    def repair(self) -> None:
        """Switch the fault off."""
        self._damage.clear()
        self._bad.clear()

    @asynccontextmanager
    async def open_chunks(
        self, bucket: str, keys: Sequence[str], layout: ChunkLayout, *, prefix_only: bool, reader: Takes | None = None
    ) -> AsyncIterator[list[list[Extent]]]:
        async with self.source.open_chunks(bucket, keys, layout, prefix_only=prefix_only, reader=reader) as chunks:
            for key, extents in zip(keys, chunks, strict=False):
                self._place(bucket, key, extents)
            yield chunks

    def read_rows(self, table: SourceTable, rows: Rows, address: int, *, past_cache: bool) -> RowFailure | None:
        failure = self._first_failure(table, rows)
        readable = rows if failure is None else rows[: failure.row_index]
        earlier = self.source.read_rows(table, readable, address, past_cache=past_cache) if len(readable) else None
        return earlier or failure

    def read_extent(self, extent: Extent, view: memoryview, start: int = 0) -> None:
        end = extent.offset + extent.nbytes
        if any(bad.start < end and extent.offset < bad.end for bad in self._bad.get(extent.file_id, ())):
            raise CorruptExtentError(f"{extent.file_id} at {extent.offset} is damaged")
        self.source.read_extent(extent, view, start)

    def _place(self, bucket: str, key: str, extents: Sequence[Extent]) -> None:
        """Where the damage of this chunk lies in the files of its extents."""
        if (bucket, key) not in self._damage:
            return
        start, end, outcome = self._damage[bucket, key]
        for extent in extents:
            first = max(start - extent.object_offset, 0)
            last = extent.nbytes if end is None else min(end - extent.object_offset, extent.nbytes)
            if first < last:
                bad = _BadSpan(extent.offset + first, extent.offset + last, outcome)
                self._bad.setdefault(extent.file_id, []).append(bad)

    def _first_failure(self, table: SourceTable, rows: Rows) -> RowFailure | None:
        for row_index, row in enumerate(rows.tolist()):
            if row[Row.SOURCE] == RESIDENT:
                continue
            start = row[Row.OFFSET] + row[Row.START]
            found = [
                (max(bad.start - start, 0), bad.outcome)
                for bad in self._bad.get(table.files[row[Row.SOURCE]], ())
                if bad.start < start + row[Row.NBYTES] and start < bad.end
            ]
            if found:
                failed_at, outcome = min(found)
                return RowFailure(row_index, failed_at, outcome)
        return None


async def resolved(source: Resolves, bucket: str, keys: Sequence[str]) -> list[list[Extent] | None]:
    """All that `resolve` gives in parts."""
    return [extents async for part in source.resolve(bucket, keys) for extents in part]
