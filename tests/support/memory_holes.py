"""Holes in memory files."""

from __future__ import annotations

import ctypes
import os

_KEEP_SIZE_PUNCH_HOLE = 3  # linux/falloc.h
_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


def punch(fd: int, offset: int, nbytes: int) -> None:
    """Give the pages back. Raises OSError."""
    if _libc.fallocate(fd, _KEEP_SIZE_PUNCH_HOLE, offset, nbytes):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
