"""Chunks of the embedded store: the ChunkSource over its index and its files."""

from __future__ import annotations

import errno
import os
from collections.abc import AsyncGenerator, Sequence
from contextlib import AbstractAsyncContextManager

import numpy as np

from descriptors.layout import ChunkLayout
from descriptors.presence import Presence
from objectcache.adapters import native
from storage_server.kernel.data.disk import disk_error
from storage_server.kernel.data.extents import ExtentFiles, PinSet
from storage_server.kernel.reads import Reads
from storage_server.planning.extent import Extent, MissingFileError
from storage_server.planning.forms import Takes
from storage_server.planning.rows import RESIDENT, Row, Rows, SourceTable
from storage_server.planning.source import RowFailure, RowOutcome


class EmbeddedChunks:
    """Implements storage_server.planning.source.ChunkSource."""

    def __init__(self, reads: Reads, files: ExtentFiles) -> None:
        self._reads = reads
        self._files = files

    def open_chunks(
        self, bucket: str, keys: Sequence[str], layout: ChunkLayout, *, prefix_only: bool, reader: Takes | None = None
    ) -> AbstractAsyncContextManager[list[list[Extent]]]:
        """Look the chunks up in the index and pin their files."""
        return self._reads.prefixes.open(bucket, keys, layout.chunk_bytes, prefix_only=prefix_only, reader=reader)

    async def matched(self, bucket: str, keys: Sequence[str], lease_s: float = 0.0, reader: Takes | None = None) -> int:
        """Count the leading keys that are stored; their extents are remembered for the descriptor that follows."""
        return await self._reads.prefixes.matched(bucket, keys, lease_s, reader)

    async def present(
        self, bucket: str, keys: Sequence[str], lease_s: float = 0.0, reader: Takes | None = None
    ) -> tuple[Presence, bool]:
        """Look all keys up in the index."""
        return await self._reads.prefixes.present(bucket, keys, lease_s, reader), True

    def resolve(self, bucket: str, keys: Sequence[str]) -> AsyncGenerator[list[list[Extent] | None], None]:
        """Look the chunks up in the index; damaged ones are not here."""
        return self._reads.prefixes.resolve(bucket, keys)

    def is_cut_off(self, bucket: str) -> bool:
        """Never: the store is the home."""
        return False

    @property
    def generation(self) -> int:
        """The number of holes punched so far."""
        return self._files.punch_count

    def keep(self, extents: Sequence[Extent], since: int) -> PinSet | None:
        """Pin the files of the extents."""
        pins = PinSet(self._files)
        if pins.keep(extents, since):
            return pins
        pins.release()
        return None

    def read_rows(self, table: SourceTable, rows: Rows, address: int, *, past_cache: bool) -> RowFailure | None:
        """Make one call of the native gather, with open descriptors of the rows' files."""
        if table.is_resident:
            return _row_failure(native.gather(rows, table.words, address, past_cache, 0))
        numbers = np.unique(rows[:, Row.SOURCE])
        numbers = numbers[numbers != RESIDENT]
        try:
            with self._files.open.lent([table.files[number] for number in numbers]) as descriptors:
                opened = _opened(rows, numbers, descriptors)
                failure = native.gather(opened, table.words, address, past_cache, self._files.open.direct_files_max)
                rows[:, Row.LANDING] = opened[:, Row.LANDING]
                return _row_failure(failure)
        except OSError as error:
            raise disk_error(error, "reading a chunk") from error
        except MissingFileError as error:
            index = int(np.argmax(rows[:, Row.SOURCE] == table.files.index(error.file_id)))
            return RowFailure(index, 0, RowOutcome.CORRUPT)

    def read_extent(self, extent: Extent, view: memoryview, start: int = 0) -> None:
        """Read and prove bytes of the extent from its file."""
        self._files.open.read_into(extent, start, view)

    def note_damage(self, bucket: str, key: str, extents: Sequence[Extent]) -> None:
        """Remember the damage until the process ends, or until the object has other extents."""
        self._reads.damaged.note(bucket, key, extents)


def _opened(rows: Rows, numbers: Rows, descriptors: list[int]) -> Rows:
    """The rows with open descriptors in place of the files' numbers."""
    if not len(numbers):
        return rows
    opened = rows.copy()
    by_number = np.full(int(numbers[-1]) + 2, RESIDENT, dtype=np.int64)  # the last entry is for RESIDENT itself
    by_number[numbers] = descriptors
    opened[:, Row.SOURCE] = by_number[rows[:, Row.SOURCE]]
    return opened


def _row_failure(failure: tuple[int, int, int, int] | tuple[()]) -> RowFailure | None:
    """The failure that the native gather returned. Raises ServerError(SlowDown) where the system has no memory or
    descriptors left.
    """
    if not failure:
        return None
    row_index, failed_at, outcome, error_number = failure
    if outcome == RowOutcome.FAILED and error_number in (errno.ENOMEM, errno.EMFILE, errno.ENFILE):
        raise disk_error(OSError(error_number, os.strerror(error_number)), "reading a chunk")
    return RowFailure(row_index, failed_at, RowOutcome(outcome), error_number)
