"""Memory that is allocated once and cut up by its users: the staging pools and the DRAM tier."""

from __future__ import annotations

import mmap
from typing import Protocol

import numpy as np


class Area(Protocol):
    """Memory that a pool lies in: page-aligned, `nbytes` bytes from `address` on."""

    @property
    def address(self) -> int: ...

    @property
    def map(self) -> mmap.mmap: ...


class PrivateArea:
    """Memory of this process alone, in huge pages where there are any. The system provides a page at its first use."""

    def __init__(self, nbytes: int) -> None:
        # shared anonymous memory, the default, gets no huge pages
        self.map = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self.map.madvise(mmap.MADV_HUGEPAGE)
        self.address = int(np.frombuffer(self.map, dtype=np.uint8).ctypes.data)
