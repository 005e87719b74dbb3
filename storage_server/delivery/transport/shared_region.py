"""SharedRegion: memory of a client that is mapped here. It is mapped and unmapped in steps and outside the interpreter,
so that gigabytes of it delay no other thread.

The memory and its pages belong to the client. The client can punch holes into it at any time, and a page that this
process touched in a hole would be charged to this process. So mappings are guarded by a userfaultfd: writing to a
missing page fails.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import stat
from dataclasses import dataclass

from objectcache.adapters import native

STEP_BYTES = 64 << 20
_MADV_POPULATE_WRITE = 23  # linux/mman.h, Linux 5.14
_FAILED = ctypes.c_void_p(-1).value
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_int64)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class OfferError(ValueError):
    """Memory that cannot be accepted; the message says why."""


@dataclass(frozen=True, slots=True)
class SharedRegion:
    """A client's memory, mapped at `address` of this process. Its methods run in worker threads."""

    address: int
    nbytes: int

    def unmap(self) -> None:
        """Unmap the memory. Nothing may write into it any more."""
        for start in range(0, self.nbytes, STEP_BYTES):
            _libc.munmap(self.address + start, min(STEP_BYTES, self.nbytes - start))


class FaultGuard:
    """Maps memory of clients so that this process never owns any of its pages. Raises OSError where the kernel has no
    userfaultfd, or does not let this process have one (in containers: the seccomp profile).
    """

    def __init__(self) -> None:
        self._fd = native.open_guard()

    def map(self, fd: int, nbytes: int) -> SharedRegion:
        """Map the first `nbytes` of a memfd. Raises OfferError where writing into it would fail, OSError."""
        check_offer(fd, nbytes)
        if os.lseek(fd, 0, os.SEEK_HOLE) < nbytes:  # looks at each page: 13 ms for a GiB
            raise OfferError("the memory is not allocated yet")
        length = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        address = _libc.mmap(None, length, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, fd, 0)
        if address is None or address == _FAILED:
            raise OSError(ctypes.get_errno(), "the memory cannot be mapped")
        region = SharedRegion(address, length)
        try:
            native.guard_missing(self._fd, address, length)
            _populate(region)
        except BaseException:
            region.unmap()
            raise
        return region

    def close(self) -> None:
        """Close the guard. Regions must be unmapped first, because they would not be guarded any longer."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def check_offer(fd: int, nbytes: int) -> None:
    """Raises OfferError unless the descriptor is a memfd of ordinary pages, sealed against shrinking. The server relies
    only on the seal and the page size, which a client cannot undo. The other checks tell the client early what is
    missing; whether all pages are allocated is found where the memory is mapped.
    """
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


def _populate(region: SharedRegion) -> None:
    """Enter the existing pages in the page table. Raises OfferError for a hole, which is not filled."""
    for start in range(0, region.nbytes, STEP_BYTES):
        count = min(STEP_BYTES, region.nbytes - start)
        if _libc.madvise(region.address + start, count, _MADV_POPULATE_WRITE) == 0:
            continue
        number = ctypes.get_errno()
        if number == errno.EFAULT:
            raise OfferError("the memory has lost pages")
        if number != errno.EINVAL:  # Linux before 5.14 lacks this call: pages are then entered one by one on access
            raise OSError(number, "the memory's pages cannot be mapped")
