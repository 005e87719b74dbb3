"""The store's calls of the operating system, in one class, so that a store can be given another disk."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
from pathlib import Path

from descriptors.errors import ErrorCode, ServerError
from objectcache.adapters.beneath import Beneath

_PUNCH_HOLE = 0x02 | 0x01  # FALLOC_FL_PUNCH_HOLE, FALLOC_FL_KEEP_SIZE (linux/falloc.h)
_fallocate = ctypes.CDLL(None, use_errno=True).fallocate
_fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


class Disk:
    """Plain files. Methods run in worker threads and raise OSError."""

    def create(self, place: Beneath) -> int:
        """Make a new file for writing and return its descriptor. The file must not exist."""
        return place.open(os.O_WRONLY | os.O_CREAT | os.O_EXCL)

    def write(self, fd: int, view: memoryview, offset: int) -> int:
        """Write some of `view` at `offset`; returns how many bytes were written."""
        return os.pwrite(fd, view, offset)

    def write_all(self, fd: int, view: memoryview, offset: int) -> None:
        """Write all of `view` at `offset`."""
        while view:
            count = self.write(fd, view, offset)
            if count == 0:
                raise OSError(errno.EIO, "the disk took no bytes")
            view, offset = view[count:], offset + count

    def sync(self, fd: int) -> None:
        """Make the file's bytes and its size survive power loss. A file that somebody has deleted does not survive."""
        os.fdatasync(fd)
        if not os.fstat(fd).st_nlink:
            raise OSError(errno.ESTALE, "the file was deleted while it was written")

    def sync_directory(self, place: Beneath) -> None:
        """Make the names in a directory survive power loss."""
        place.sync()

    def unlink(self, place: Beneath) -> None:
        """Remove a file; no error when it does not exist."""
        with contextlib.suppress(FileNotFoundError):
            place.unlink()

    def punch(self, place: Beneath, offset: int, nbytes: int) -> bool:
        """Give the space of whole file system blocks back; they read as zeros from then on. False, with nothing done,
        where the file system cannot.
        """
        fd = place.open(os.O_WRONLY)
        try:
            if _fallocate(fd, _PUNCH_HOLE, offset, nbytes) == 0:
                return True
            if ctypes.get_errno() == errno.EOPNOTSUPP:
                return False
            raise OSError(ctypes.get_errno(), "the space could not be given back")
        finally:
            os.close(fd)

    def size(self, place: Beneath) -> int:
        """The length of a file in bytes."""
        return place.status().st_size

    def free_bytes(self, path: Path) -> int:
        """The free bytes of the file system that `path` is on."""
        found = os.statvfs(path)
        return found.f_bavail * found.f_frsize

    def drop_cached(self, fd: int) -> None:
        """Drop the file's synced pages from the page cache, where the system can, so that reads go to the disk."""
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def open(self, place: Beneath) -> int:
        """Open a file for reading and return its descriptor. Raises UnsafeFileError."""
        return place.open(os.O_RDONLY)

    def read(self, fd: int, view: memoryview, offset: int) -> int:
        """Read some bytes at `offset` into `view`; 0 at the end of the file."""
        return os.preadv(fd, [view], offset)

    def read_cached(self, fd: int, view: memoryview, offset: int) -> int:
        """Read as `read` does, but only from memory. Raises BlockingIOError where the disk must be waited for."""
        try:
            return os.preadv(fd, [view], offset, os.RWF_NOWAIT)
        except OSError as error:
            if error.errno == errno.EOPNOTSUPP:  # tmpfs, and file systems that cannot tell
                raise BlockingIOError(errno.EAGAIN, "it may have to be waited for") from error
            raise


def disk_error(error: OSError, what: str) -> ServerError:
    """The ServerError for an operating-system error in the data directory; `what` says what was being done."""
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return ServerError(ErrorCode.SLOW_DOWN, "too many files are open", retryable=True)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return ServerError(
            ErrorCode.INSUFFICIENT_STORAGE, f"no space left while {what}: its file system is full", retryable=True
        )
    return ServerError(ErrorCode.INTERNAL_ERROR, f"the disk failed while {what}", retryable=True)
