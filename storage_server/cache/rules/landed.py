"""Which bytes of the DRAM tier deliveries have read to their place. Pure state: no clock, no memory.

The unit is 4 KiB: extents in the tier and rows that are read past the page cache begin at its multiples.
"""

from __future__ import annotations

import numpy as np

from storage_server.planning.extent import ALIGNMENT_BYTES, aligned
from storage_server.planning.rows import Rows


class LandedUnits:
    """The units of a memory of `nbytes`. `add` may be called from several threads, for different bytes."""

    def __init__(self, nbytes: int) -> None:
        self._is_landed = np.zeros(aligned(nbytes) // ALIGNMENT_BYTES, dtype=np.bool_)

    def clear(self, offset: int, nbytes: int) -> None:
        """Forget the bytes of a place that an extent is about to get."""
        self._is_landed[offset // ALIGNMENT_BYTES : aligned(offset + nbytes) // ALIGNMENT_BYTES] = False

    def add(self, offsets: Rows, nbytes: Rows) -> None:
        """Note that bytes lie there: arrays of offsets and lengths, multiples of the unit but for an extent's end."""
        first = offsets // ALIGNMENT_BYTES
        counts = -(-(offsets + nbytes) // ALIGNMENT_BYTES) - first
        before = np.cumsum(counts) - counts  # units of the rows before
        self._is_landed[np.repeat(first - before, counts) + np.arange(counts.sum())] = True

    def missing(self, offset: int, nbytes: int) -> list[tuple[int, int]]:
        """The parts of an extent at `offset` that do not lie there, as starts and ends within the extent."""
        first = offset // ALIGNMENT_BYTES
        is_missing = ~self._is_landed[first : first + aligned(nbytes) // ALIGNMENT_BYTES]
        edges = np.flatnonzero(np.diff(np.concatenate(([False], is_missing, [False])).astype(np.int8)))
        bounds = np.minimum(edges * ALIGNMENT_BYTES, nbytes).reshape(-1, 2).tolist()
        return [(start, end) for start, end in bounds]
