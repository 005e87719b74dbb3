"""The few things the store asks of the operating system. One seam, so that tests can make a disk fail or lie."""

from __future__ import annotations

import ctypes
import errno
import os
from pathlib import Path

from descriptors.errors import ErrorCode, ServerError

_PUNCH_HOLE = 0x02 | 0x01  # FALLOC_FL_PUNCH_HOLE, FALLOC_FL_KEEP_SIZE (linux/falloc.h)
_fallocate = ctypes.CDLL(None, use_errno=True).fallocate
_fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


class Disk:
    """Plain files. Methods run in worker threads and raise OSError."""

    def create(self, path: Path) -> int:
        """A new file for writing; it must not exist."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)

    def write(self, fd: int, view: memoryview, offset: int) -> int:
        """Write some of `view` at `offset`; how many bytes it was."""
        return os.pwrite(fd, view, offset)

    def write_all(self, fd: int, view: memoryview, offset: int) -> None:
        """Write all of `view` at `offset`."""
        while view:
            count = self.write(fd, view, offset)
            if count == 0:
                raise OSError(errno.EIO, "the disk took no bytes")
            view, offset = view[count:], offset + count

    def sync(self, fd: int) -> None:
        """The file's bytes, and the size that leads to them, survive power loss after this."""
        os.fdatasync(fd)

    def sync_directory(self, path: Path) -> None:
        """The names in a directory survive power loss after this."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def unlink(self, path: Path) -> None:
        """Remove a file; fine when it is gone."""
        path.unlink(missing_ok=True)

    def punch(self, path: Path, offset: int, nbytes: int) -> None:
        """Give a range's space back; it reads as zeros from then on. Where the file system cannot, nothing happens."""
        fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            if _fallocate(fd, _PUNCH_HOLE, offset, nbytes) != 0 and ctypes.get_errno() != errno.EOPNOTSUPP:
                raise OSError(ctypes.get_errno(), "the space could not be given back")
        finally:
            os.close(fd)

    def size(self, path: Path) -> int:
        """A file's length."""
        return path.stat().st_size

    def free_bytes(self, path: Path) -> int:
        """What the file system of `path` still takes."""
        found = os.statvfs(path)
        return found.f_bavail * found.f_frsize

    def drop_cached(self, fd: int) -> None:
        """Read from the disk next time, where the file system can do that; what is not synced yet stays."""
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def open(self, path: Path) -> int:
        """A file for reading."""
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def read(self, fd: int, view: memoryview, offset: int) -> int:
        """Read some bytes at `offset` into `view`; 0 at the end of the file."""
        return os.preadv(fd, [view], offset)

    def read_cached(self, fd: int, view: memoryview, offset: int) -> int:
        """As `read`, but only what is in memory: raises BlockingIOError where the disk would have to be waited for."""
        try:
            return os.preadv(fd, [view], offset, os.RWF_NOWAIT)
        except OSError as error:
            if error.errno == errno.EOPNOTSUPP:  # tmpfs, and file systems that cannot tell
                raise BlockingIOError(errno.EAGAIN, "it may have to be waited for") from error
            raise


def disk_error(error: OSError, what: str) -> ServerError:
    """The answer for an operating-system error on the data directory."""
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return ServerError(ErrorCode.SLOW_DOWN, "too many files are open", retryable=True)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return ServerError(ErrorCode.INSUFFICIENT_STORAGE, f"no space left while {what}", retryable=True)
    return ServerError(ErrorCode.INTERNAL_ERROR, f"the disk failed while {what}", retryable=True)
