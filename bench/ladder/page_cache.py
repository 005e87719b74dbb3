"""Making file bytes cold, and seeing whether they are."""

from __future__ import annotations

import ctypes
import mmap
import os

import numpy as np

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)


def drop(fd: int) -> None:
    """Write a file's dirty pages and let the kernel forget all of its pages. Raises OSError."""
    os.fdatasync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


def resident_share(fd: int) -> float:
    """How much of a file is in the page cache, 0 to 1. Raises OSError."""
    nbytes = os.fstat(fd).st_size
    if nbytes == 0:
        return 0.0
    pages = np.zeros(-(-nbytes // mmap.PAGESIZE), dtype=np.uint8)
    with mmap.mmap(fd, nbytes, access=mmap.ACCESS_READ) as mapped:
        view = np.frombuffer(mapped, dtype=np.uint8)
        failed = _libc.mincore(view.ctypes.data, nbytes, pages.ctypes.data)
        del view  # a mapping with a view of it cannot be closed
    if failed:
        raise OSError(ctypes.get_errno(), "mincore")
    return float((pages & 1).mean())
