"""The reads of one payload as an array: one row per run of bytes, vectorised over chunks. Pure arithmetic.

A `SourceTable` holds, once per request, where every chunk's bytes lie. The rows of each payload follow from it by a
handful of array operations, however many slices the payload has. `adapters.native.gather` carries the rows out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from storage_server.planning.block_checksums import BLOCK_BYTES
from storage_server.planning.extent import CorruptExtentError, Extent
from storage_server.planning.plan import Payload

Rows = npt.NDArray[np.int64]
RESIDENT = -1
"""Stands in place of a file number: the bytes are in memory, and proved."""


class Row(IntEnum):
    """Columns of a payload's rows, as adapters/native.c reads them. A row reads `NBYTES` bytes, from `START` of the
    extent that lies at `OFFSET` of the file `SOURCE`, to byte `TARGET` of the payload. SOURCE is first a file's number
    in the table, and then the file's descriptor. For RESIDENT bytes OFFSET is a memory address. LANDING is an address
    where the row's bytes are to lie as well, or 0.
    """

    SOURCE = 0
    OFFSET = 1
    START = 2
    NBYTES = 3
    EXTENT_BYTES = 4
    FIRST_WORD = 5
    TARGET = 6
    LANDING = 7


class SourceColumn(IntEnum):
    """Columns of a table's rows, one per extent, chunk after chunk."""

    SOURCE = 0
    OFFSET = 1
    NBYTES = 2
    OBJECT_OFFSET = 3
    FIRST_WORD = 4
    CHUNK = 5


def by_file(rows: Rows) -> list[Rows]:
    """The rows of each file by themselves, and those of memory."""
    return [rows[rows[:, Row.SOURCE] == number] for number in np.unique(rows[:, Row.SOURCE])]


@dataclass(frozen=True, slots=True)
class SourceTable:
    """The sources of a prefix: `files` by number, extents as rows of `SourceColumn`, and the block checksums of all
    extents one after the other. `first_row[i]` is the row of chunk i's first extent; it has one more entry than there
    are chunks. `landings` has one entry for every extent: the address where its bytes are to lie after they have been
    read, or 0. The DRAM tier fills the addresses in while the delivery is under way.
    """

    files: tuple[str, ...]
    extents: Rows
    first_row: Rows
    words: bytes | bytearray
    landings: Rows | None = None

    @property
    def chunk_count(self) -> int:
        """k, the chunks that the delivery brings."""
        return len(self.first_row) - 1

    @property
    def is_resident(self) -> bool:
        """Whether all bytes are in memory, so that no file has to be read."""
        return not self.files

    def files_of(self, rows: Rows) -> list[str]:
        """The files that these rows read."""
        return [self.files[number] for number in np.unique(rows[:, Row.SOURCE]).tolist() if number != RESIDENT]

    def rows(self, payload: Payload) -> Rows:
        """The rows of one payload: int64 of shape (n, 8). Neighbours in file and payload are joined where nothing
        lands.
        """
        chunks = slice(payload.first_chunk, payload.first_chunk + payload.chunk_count)
        of_chunks = slice(self.first_row[chunks.start], self.first_row[chunks.stop])
        extents = self.extents[of_chunks]
        piece_index = extents[:, SourceColumn.CHUNK] - payload.first_chunk
        source, piece_bytes = payload.source_offset, payload.piece_bytes
        source = source if isinstance(source, int) else source[piece_index]
        piece_bytes = piece_bytes if isinstance(piece_bytes, int) else piece_bytes[piece_index]
        first = np.maximum(source - extents[:, SourceColumn.OBJECT_OFFSET], 0)
        end = source + piece_bytes - extents[:, SourceColumn.OBJECT_OFFSET]
        nbytes = np.minimum(end, extents[:, SourceColumn.NBYTES]) - first
        rows = np.empty((len(extents), len(Row)), dtype=np.int64)
        rows[:, Row.SOURCE] = extents[:, SourceColumn.SOURCE]
        rows[:, Row.OFFSET] = extents[:, SourceColumn.OFFSET]
        rows[:, Row.START] = first
        rows[:, Row.NBYTES] = nbytes
        rows[:, Row.EXTENT_BYTES] = extents[:, SourceColumn.NBYTES]
        rows[:, Row.FIRST_WORD] = extents[:, SourceColumn.FIRST_WORD]
        rows[:, Row.TARGET] = (
            payload.piece_starts(piece_index) + extents[:, SourceColumn.OBJECT_OFFSET] + first - source
        )
        rows[:, Row.LANDING] = 0
        if self.landings is not None:
            landings = self.landings[of_chunks]
            rows[:, Row.LANDING] = np.where(landings > 0, landings + first, 0)
        if len(extents) != payload.chunk_count:
            rows = rows[nbytes > 0]
        return joined(rows) if self.landings is None else rows

    def first_word_of(self, chunk_index: int) -> int:
        """Where the checksums of a chunk begin, counted in words."""
        return int(self.extents[self.first_row[chunk_index], SourceColumn.FIRST_WORD])

    @staticmethod
    def target_of(rows: Rows, row_index: int, at: int) -> int:
        """The byte of the payload to which byte `at` of a row goes."""
        return int(rows[row_index, Row.TARGET]) + at


def joined(rows: Rows) -> Rows:
    """The rows, with whole extents joined that follow each other in file, checksums and payload alike."""
    if len(rows) < 2 or rows[0, Row.START] or rows[0, Row.NBYTES] != rows[0, Row.EXTENT_BYTES]:
        return rows
    before, after = rows[:-1], rows[1:]
    follows = (
        (before[:, Row.SOURCE] == after[:, Row.SOURCE])
        & (before[:, Row.START] == 0)
        & (before[:, Row.NBYTES] == before[:, Row.EXTENT_BYTES])
        & (after[:, Row.START] == 0)
        & (after[:, Row.NBYTES] == after[:, Row.EXTENT_BYTES])
        & (before[:, Row.EXTENT_BYTES] % BLOCK_BYTES == 0)
        & (before[:, Row.OFFSET] + before[:, Row.EXTENT_BYTES] == after[:, Row.OFFSET])
        & (before[:, Row.FIRST_WORD] + before[:, Row.EXTENT_BYTES] // BLOCK_BYTES == after[:, Row.FIRST_WORD])
        & (before[:, Row.TARGET] + before[:, Row.NBYTES] == after[:, Row.TARGET])
    )
    if not follows.any():
        return rows
    starts = np.flatnonzero(np.concatenate(([True], ~follows)))
    made = rows[starts]
    made[:, Row.NBYTES] = np.add.reduceat(rows[:, Row.NBYTES], starts)
    made[:, Row.EXTENT_BYTES] = np.add.reduceat(rows[:, Row.EXTENT_BYTES], starts)
    return made


def spans_of(rows: Rows) -> Rows:
    """Resident rows as (address, nbytes), in payload order."""
    spans = np.empty((len(rows), 2), dtype=np.int64)
    spans[:, 0] = rows[:, Row.OFFSET] + rows[:, Row.START]
    spans[:, 1] = rows[:, Row.NBYTES]
    return spans


def make_table(
    chunks: Sequence[Sequence[Extent]],
    addresses: Sequence[int | None] | None = None,
    landings: Rows | None = None,
) -> SourceTable:
    """The table of a prefix. `addresses` has one entry for every extent, in order: the address of its bytes in memory,
    or None where they must be read from the file. Raises CorruptExtentError where checksums are missing.
    """
    extents = [extent for chunk in chunks for extent in chunk]
    counts = np.array([len(chunk) for chunk in chunks], dtype=np.int64)
    table = np.empty((len(extents), len(SourceColumn)), dtype=np.int64)
    files: dict[str, int] = {}
    if addresses is None:
        addresses = [None] * len(extents)
    table[:, SourceColumn.SOURCE] = [
        files.setdefault(extent.file_id, len(files)) if address is None else RESIDENT
        for extent, address in zip(extents, addresses, strict=True)
    ]
    table[:, SourceColumn.OFFSET] = [
        extent.offset if address is None else address for extent, address in zip(extents, addresses, strict=True)
    ]
    table[:, SourceColumn.NBYTES] = [extent.nbytes for extent in extents]
    table[:, SourceColumn.OBJECT_OFFSET] = [extent.object_offset for extent in extents]
    word_counts = np.array([len(extent.checksums) // 4 for extent in extents], dtype=np.int64)
    if (word_counts * BLOCK_BYTES < table[:, SourceColumn.NBYTES]).any():
        raise CorruptExtentError("the index has no checksums for all blocks of an extent")
    table[:, SourceColumn.FIRST_WORD] = np.cumsum(word_counts) - word_counts
    table[:, SourceColumn.CHUNK] = np.repeat(np.arange(len(chunks)), counts)
    first_row = np.concatenate(([0], np.cumsum(counts))).astype(np.int64)
    words = b"".join([extent.checksums for extent in extents])
    return SourceTable(tuple(files), table, first_row, words, landings)
