"""Spans of memory as NIXL names them. Pure."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Spans = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Memory:
    """A span of memory: `device` is cpu or cuda:N."""

    address: int
    nbytes: int
    device: str = "cpu"

    @property
    def nixl_type(self) -> str:
        """NIXL's name for this kind of memory."""
        return "VRAM" if self.device.startswith("cuda") else "DRAM"

    @property
    def device_index(self) -> int:
        """N of cuda:N, 0 for cpu."""
        return int(self.device.partition(":")[2] or 0)


def paired(ours: Spans, theirs: Spans) -> tuple[Spans, Spans]:
    """Two lists of spans, rows of (address, nbytes) with the same bytes in all, cut so that piece i of one goes to
    piece i of the other.
    """
    ends = [np.cumsum(spans[:, 1]) for spans in (ours, theirs)]
    cuts = np.union1d(*ends)
    starts = np.concatenate(([0], cuts[:-1]))
    pieces = []
    for spans, end in zip((ours, theirs), ends, strict=True):
        at = np.searchsorted(end, starts, side="right")
        pieces.append(np.stack((spans[at, 0] + starts - (end[at] - spans[at, 1]), cuts - starts), axis=1))
    return pieces[0], pieces[1]
