"""Prefaulted memory on huge pages, where there are any, for peers and for the copy rate."""

from __future__ import annotations

import mmap

import numpy as np

from bench.content import Bytes


def huge_page_memory(nbytes: int, fill: int = 0xFF) -> Bytes:
    """Anonymous private memory, written once."""
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    array = np.frombuffer(memory, dtype=np.uint8)
    array.fill(fill)
    return array
