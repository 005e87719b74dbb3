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
    array = np.frombuffer(mapping, dtype=np.uint8, count=nbytes)
    address = int(array.ctypes.data)
    _allocated[fd] = SharedMemory(address, size, fd, weakref.ref(mapping))
    weakref.finalize(mapping, _forget, fd)
    return array


def find(memory: Memory) -> SharedMemory | None:
    """The allocation `memory` lies in; None for memory of another kind."""
    there = (shared for shared in list(_allocated.values()) if shared.mapping() is not None)
    return next((shared for shared in there if shared.holds(memory)), None)


def _forget(fd: int) -> None:
    del _allocated[fd]  # before the descriptor may be another's
    os.close(fd)
