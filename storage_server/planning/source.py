"""ChunkSource, the interface to stored chunks that the pipeline, the gather and the DRAM tier are written against.
`storage_server.kernel.chunks` implements it over the embedded store, `storage_server.home.chunks` over a cache
before another home. tests/contract/store/chunk_rules.py has the rules that every implementation keeps.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

from descriptors.layout import ChunkLayout
from descriptors.presence import Presence
from storage_server.planning.extent import Extent
from storage_server.planning.forms import Takes
from storage_server.planning.rows import Rows, SourceTable


class RowOutcome(IntEnum):
    """Why a row failed, as adapters/native.c numbers it."""

    CORRUPT = 1
    SHORT = 2
    FAILED = 3


@dataclass(frozen=True, slots=True)
class RowFailure:
    """The first row that failed: its index, the failing byte of it, and the reason. With FAILED, `error_number` is the
    system's errno.
    """

    row_index: int
    failed_at: int
    outcome: RowOutcome
    error_number: int = 0


class Pins(Protocol):
    """Extents that stay readable until `release`."""

    def release(self) -> None: ...


class ChunkSource(Protocol):
    """Chunks by bucket and key. A chunk is one or more extents. An extent never changes: new bytes are new extents."""

    def open_chunks(
        self, bucket: str, keys: Sequence[str], layout: ChunkLayout, *, prefix_only: bool, reader: Takes | None = None
    ) -> AbstractAsyncContextManager[list[list[Extent]]]:
        """The extents of each chunk of a descriptor, in order. They stay readable until the context ends. With
        `prefix_only` the list ends before the first chunk that is missing or does not have the layout's size. A chunk
        that is stored encoded counts as missing, unless the reader takes it.

        Raises CallerError(NoSuchBucket), ChunkUnavailable, ServerError(SlowDown).
        """

    async def matched(self, bucket: str, keys: Sequence[str], lease_s: float = 0.0, reader: Takes | None = None) -> int:
        """How many of the keys, from the first, are stored without a gap and not known to be damaged. They are not
        evicted for `lease_s`, as far as the store has room for leases. Encoded chunks count if the reader takes them.
        """

    async def present(
        self, bucket: str, keys: Sequence[str], lease_s: float = 0.0, reader: Takes | None = None
    ) -> tuple[Presence, bool]:
        """Which of the keys, each by itself, `matched` would count; and whether the home of the chunks was asked about
        all the others.
        """

    def resolve(self, bucket: str, keys: Sequence[str]) -> AsyncGenerator[list[list[Extent] | None], None]:
        """The extents of each chunk that is here, in parts, None for the others. They are not pinned, and their
        checksums may not be there.
        """

    def is_cut_off(self, bucket: str) -> bool:
        """Whether the home of the chunks has not answered CALLER about this bucket of late, so that `matched` counts
        what is here alone.
        """

    @property
    def generation(self) -> int:
        """A number that grows whenever bytes of an unpinned extent may have been removed."""

    def keep(self, extents: Sequence[Extent], since: int) -> Pins | None:
        """Pin extents that were readable at generation `since`; None where one of them may have been removed since."""

    def read_rows(self, table: SourceTable, rows: Rows, address: int, *, past_cache: bool) -> RowFailure | None:
        """Read and prove rows of the table into memory at `address`. May run in any thread. Resident rows are copied.
        Where a row's bytes do not lie at its landing afterwards, its landing becomes 0.
        Raises ServerError(SlowDown) where too many files are open.
        """

    def read_extent(self, extent: Extent, view: memoryview, start: int = 0) -> None:
        """Read and prove bytes of a pinned extent, from `start` on, into `view`. May run in any thread. Raises
        CorruptExtentError, OSError.
        """

    def note_damage(self, bucket: str, key: str, extents: Sequence[Extent]) -> None:
        """Remember that these extents of the chunk are damaged: from now on a lookup stops before this chunk, or the
        next delivery brings the chunk from where it can be had again.
        """
