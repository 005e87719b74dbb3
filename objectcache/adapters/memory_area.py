"""Memory that is allocated once and cut up by its users: the staging pools, landing memory and the DRAM tier."""

from __future__ import annotations

import fcntl
import mmap
import os
from typing import Protocol

import numpy as np

from descriptors.units import format_bytes

_F_SEAL_FUTURE_WRITE = 0x10  # linux/fcntl.h, Linux 5.1


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
        try:
            self.map = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise OSError(error.errno, f"{format_bytes(nbytes)} of memory cannot be had: {error.strerror}") from None
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self.map.madvise(mmap.MADV_HUGEPAGE)
        self.address = int(np.frombuffer(self.map, dtype=np.uint8).ctypes.data)


class SharedArea:
    """Memory that a child process maps, too: for writing or, with `is_read_only`, for reading. The system provides a
    page at its first use.
    """

    def __init__(self, nbytes: int, *, is_read_only: bool = False) -> None:
        self.nbytes = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self.is_read_only = is_read_only
        self.fd = os.memfd_create("objectcache", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.fd, self.nbytes)
            self.map = mmap.mmap(self.fd, self.nbytes, mmap.MAP_SHARED)
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
            if is_read_only:  # seals the memory: no other process can map it for writing from now on
                seals |= _F_SEAL_FUTURE_WRITE
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, seals | fcntl.F_SEAL_SEAL)
        except BaseException:
            os.close(self.fd)
            raise
        self.address = int(np.frombuffer(self.map, dtype=np.uint8).ctypes.data)

    def close(self) -> None:
        """Close the descriptor, so that no further process gets the memory. Existing mappings stay."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)
