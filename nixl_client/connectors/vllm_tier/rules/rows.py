"""The bytes of a primary tier's row that a group of layers uses: only these are stored.

All rows are of one size, for the group that needs most; what a group does not use is left from the row's last owner,
which may have been another tenant's request.

    row      |aaaa..|bbbb..|......|pad|        a, b: what two tensors of the group use of their pages
    object   |aaaabbbb|
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
SPANS_MAX = 1 << 20
"""A row has no more spans: 1,024 layers of 1,024 blocks."""


@dataclass(frozen=True, slots=True)
class UsedPages:
    """`count` runs of `nbytes` used bytes, the first at `start` of the row, each `stride` after the one before: one
    tensor's pages.
    """

    start: int
    stride: int
    nbytes: int
    count: int


class RowForm:
    """Where the used bytes of a group's rows lie: `spans` are starts and ends, ascending and apart, int64 of shape
    (n, 2).
    """

    def __init__(self, spans: npt.NDArray[np.int64]) -> None:
        self.spans = spans
        self.nbytes = int((spans[:, 1] - spans[:, 0]).sum())
        """The size of the group's objects."""

    @classmethod
    def of(cls, pages: Sequence[UsedPages], row_bytes: int) -> RowForm:
        """Raises ValueError where they use no byte, or bytes outside the row."""
        if any(min(each.start, each.stride, each.nbytes - 1, each.count - 1) < 0 for each in pages):
            raise ValueError("a page without bytes")
        if not pages or sum(each.count for each in pages) > SPANS_MAX:
            raise ValueError("no pages, or too many")
        starts = np.concatenate([each.start + each.stride * np.arange(each.count, dtype=np.int64) for each in pages])
        sizes = np.repeat([each.nbytes for each in pages], [each.count for each in pages])
        order = np.argsort(starts, kind="stable")
        starts, ends = starts[order], np.maximum.accumulate((starts + sizes)[order])
        if ends[-1] > row_bytes:
            raise ValueError(f"{ends[-1]} bytes are used of a row of {row_bytes}")
        begins = np.concatenate(([True], starts[1:] > ends[:-1]))
        lasts = np.concatenate((begins[1:], [True]))
        return cls(np.stack([starts[begins], ends[lasts]], axis=1))

    @property
    def is_front(self) -> bool:
        """Whether the used bytes are the row's first ones, without a gap: then an object may go as it lies."""
        return len(self.spans) == 1 and int(self.spans[0, 0]) == 0

    def pack(self, rows: Bytes) -> Bytes:
        """The used bytes of these rows, side by side: uint8 of shape (rows, nbytes)."""
        packed = np.empty((len(rows), self.nbytes), dtype=np.uint8)
        for at, start, end in self._places():
            packed[:, at : at + end - start] = rows[:, start:end]
        return packed

    def unpack(self, packed: Bytes, rows: Bytes, slots: npt.NDArray[np.int64]) -> None:
        """Put objects, one a row of `packed`, into these slots of `rows`."""
        for at, start, end in self._places():
            rows[slots, start:end] = packed[:, at : at + end - start]

    def _places(self) -> list[tuple[int, int, int]]:
        """The place in the object, and the start and end in the row, of each span."""
        sizes = self.spans[:, 1] - self.spans[:, 0]
        at = np.cumsum(sizes) - sizes
        return list(zip(at.tolist(), *self.spans.T.tolist(), strict=True))
