"""Memory that a storage server on the same host can fill directly: it has a file descriptor, which is handed over."""

from __future__ import annotations

import fcntl
import mmap
import os
import weakref
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from nixl_client.transports.buffers import Buffer, as_buffer
from objectcache.adapters.nixl_memory import Memory

_allocated: dict[int, SharedMemory] = {}
"""By file descriptor: while one mapping goes, another may get its address before the finalizer has run. No lock: a
finalizer may run in the midst of anything, and single operations of a dict are atomic.
"""


@dataclass(frozen=True, slots=True)
class SharedMemory:
    """The memfd `fd`, mapped at `address`. It exists as long as an array over it does."""

    address: int
    nbytes: int
    fd: int
    mapping: weakref.ref[mmap.mmap]

    @property
    def buffer(self) -> Buffer:
        """All of it, which lives as long as the buffer does."""
        mapping = self.mapping()
        if mapping is None:
            raise RuntimeError("the memory is gone")
        return as_buffer(mapping)

    def holds(self, memory: Memory) -> bool:
        """Whether all of `memory` is in it."""
        end = self.address + self.nbytes
        return memory.device == "cpu" and self.address <= memory.address and memory.address + memory.nbytes <= end


def allocate(nbytes: int) -> npt.NDArray[np.uint8]:
    """`nbytes` zeroed bytes, every page in place; freed with the last array over them. Raises OSError when there is not
    that much memory.
    """
    if nbytes < 1:
        raise ValueError("a buffer has at least one byte")
    size = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    fd = os.memfd_create("objectcache", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.posix_fallocate(fd, 0, size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        mapping = mmap.mmap(fd, size, mmap.MAP_SHARED | mmap.MAP_POPULATE)
    except BaseException:
        os.close(fd)
        raise
    return _known(fd, mapping, nbytes)


def adopt(fd: int, mapping: mmap.mmap) -> npt.NDArray[np.uint8]:
    """An array over memory that somebody else has made: `mapping` maps the memfd `fd` from its first byte on. Servers
    take it as they take memory of `allocate` if all its pages are in place. Both stay the caller's; the memory is known
    as long as the mapping lives. Raises ValueError for what is no memfd sealed against shrinking.
    """
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        seals = 0
    if not seals & fcntl.F_SEAL_SHRINK:
        raise ValueError("the memory is no memfd sealed against shrinking")
    return _known(fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 0), mapping, len(mapping))


def _known(fd: int, mapping: mmap.mmap, nbytes: int) -> npt.NDArray[np.uint8]:
    """The array; `fd` is closed with the mapping."""
    array = np.frombuffer(mapping, dtype=np.uint8, count=nbytes)
    address = int(array.ctypes.data)
    _allocated[fd] = SharedMemory(address, len(mapping), fd, weakref.ref(mapping))
    weakref.finalize(mapping, _forget, fd)
    return array


def find(memory: Memory) -> SharedMemory | None:
    """The allocation `memory` lies in; None for memory of another kind."""
    there = (shared for shared in list(_allocated.values()) if shared.mapping() is not None)
    return next((shared for shared in there if shared.holds(memory)), None)


def _forget(fd: int) -> None:
    del _allocated[fd]  # before the descriptor may be another's
    os.close(fd)
