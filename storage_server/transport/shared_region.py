"""Mapping memory a client has handed in: checked, so that writing to it later cannot fail, and in steps and outside the
interpreter, so that neither mapping nor unmapping gigabytes holds anybody up.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import stat
from dataclasses import dataclass

STEP_BYTES = 64 << 20
_MADV_POPULATE_WRITE = 23  # linux/mman.h, Linux 5.14
_FAILED = ctypes.c_void_p(-1).value
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_int64)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class OfferError(ValueError):
    """Memory that cannot be taken; the message says why."""


@dataclass(frozen=True, slots=True)
class SharedRegion:
    """A client's memory as we see it: `address` is ours. Both methods run in worker threads."""

    address: int
    nbytes: int

    @staticmethod
    def map(fd: int, nbytes: int) -> SharedRegion:
        """Map the first `nbytes` of a memfd. Raises OfferError where writing into it could fail, OSError."""
        _check(fd, nbytes)
        address = _libc.mmap(None, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, fd, 0)
        if address is None or address == _FAILED:
            raise OSError(ctypes.get_errno(), "the memory cannot be mapped")
        for start in range(0, nbytes, STEP_BYTES):  # an older kernel does not know how, and faults page by page later
            _libc.madvise(address + start, min(STEP_BYTES, nbytes - start), _MADV_POPULATE_WRITE)
        return SharedRegion(address, nbytes)

    def unmap(self) -> None:
        """Nothing writes into it any more."""
        for start in range(0, self.nbytes, STEP_BYTES):
            _libc.munmap(self.address + start, min(STEP_BYTES, self.nbytes - start))


def _check(fd: int, nbytes: int) -> None:
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode):
        raise OfferError("the descriptor is not of memory")
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError as error:
        raise OfferError("the descriptor is not of a memfd") from error
    if not seals & fcntl.F_SEAL_SHRINK:
        raise OfferError("the memory is not sealed against shrinking")
    if os.fstatvfs(fd).f_bsize != mmap.PAGESIZE:  # a hole in huge pages cannot always be filled again
        raise OfferError("the memory is not of ordinary pages")
    if nbytes > found.st_size:
        raise OfferError(f"the memory has {found.st_size} bytes")
    if os.lseek(fd, 0, os.SEEK_HOLE) < nbytes:
        raise OfferError("the memory is not allocated yet")
