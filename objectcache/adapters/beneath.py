"""Files beneath a directory that others may write to.

Between two system calls, another process may put anything in place of a name there: a link to a file of this host, a
FIFO that never answers, a device. So no component of a name is followed when it is a link, no open waits, and only
regular files count. In a directory that everybody may write to, a file must also have a trusted owner: this process's
user, the owner of the directory, or the user as whom a file server makes our files.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import itertools
import os
import secrets
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

_FOLDER = os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NO_NAMES = frozenset({"", ".", ".."})
_SAFE = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_NO_FILE = frozenset({errno.ELOOP, errno.ENOTDIR, errno.ENXIO, errno.EISDIR, errno.ENODEV})
"""The errors of an open when the name is a link, a folder, a FIFO, a socket, or a device that is not there."""


class UnsafeFileError(OSError):
    """Something else has the name of a file: a link, a FIFO, a device, a folder, or a file of another user."""


@dataclass(frozen=True, slots=True)
class Beneath:
    """The place of a file or folder beneath `root`, which is trusted. The parts of `relative` have "/" between them,
    and are not trusted. Methods raise OSError; UnsafeFileError where something else has the name.
    """

    root: Path
    relative: str = ""

    def __post_init__(self) -> None:
        if self.relative and not _NO_NAMES.isdisjoint(self.relative.split("/")):
            raise ValueError(f"{self.relative!r} is no name beneath a directory")

    def __truediv__(self, name: str) -> Beneath:
        return Beneath(self.root, f"{self.relative}/{name}" if self.relative else name)

    def __str__(self) -> str:
        return str(self.path)

    @property
    def path(self) -> Path:
        """The path, to show it, or for those that trust the directory."""
        return self.root / self.relative

    @property
    def name(self) -> str:
        """The last part."""
        return self.relative.rpartition("/")[2]

    @property
    def parent(self) -> Beneath:
        """The folder that it is in."""
        return Beneath(self.root, self.relative.rpartition("/")[0])

    def with_name(self, name: str) -> Beneath:
        """Another name in the same folder."""
        return self.parent / name

    def open(self, flags: int, mode: int = 0o600) -> int:
        """A descriptor of the regular file; see os.open for `flags` and `mode`."""
        folder, _, name = self.relative.rpartition("/")
        parent = self._opened_at(folder.split("/") if folder else [], os.O_PATH)
        try:
            fd = os.open(name, flags & ~os.O_TRUNC | _SAFE, mode, dir_fd=parent)
        except OSError as error:
            raise self._told(error) from error
        finally:
            os.close(parent)
        try:
            self._require_ours(fd, is_written=bool(flags & (os.O_WRONLY | os.O_RDWR)))
            if flags & os.O_TRUNC:
                os.ftruncate(fd, 0)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def read(self, bytes_max: int) -> bytes:
        """The file's bytes. Raises UnsafeFileError for a file of more than `bytes_max`."""
        fd = self.open(os.O_RDONLY)
        with open(fd, "rb") as file:
            data = file.read(bytes_max + 1)
        if len(data) > bytes_max:
            raise UnsafeFileError(errno.EFBIG, f"it has more than {bytes_max} bytes", str(self.path))
        return data

    def write(self, data: bytes) -> None:
        """Make these the file's bytes durably, whole or not at all."""
        new = self.with_name(f"{self.name}.{secrets.token_hex(6)}.new")
        fd = new.open(os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        try:
            with open(fd, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            new.rename(self)
        except BaseException:
            with contextlib.suppress(OSError):
                new.unlink()
            raise
        self.parent.sync()

    def separate(self) -> None:
        """Put a copy of the file in its place, durably, where it has several names: a backup may have made them. So
        nothing that is written then changes what the other names show. The copy takes no more disk than the file.
        """
        if self.status().st_nlink == 1:
            return
        new = self.with_name(f"{self.name}.new")
        with contextlib.suppress(FileNotFoundError):
            new.unlink()
        with (
            open(self.open(os.O_RDONLY), "rb") as old,
            open(new.open(os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb") as file,
        ):
            _copy(old.fileno(), file.fileno())
            os.fsync(file.fileno())
        new.rename(self)
        self.parent.sync()

    def touch(self) -> float:
        """Set the file's time to now, by the clock of the file system, and return it in Unix seconds: the time of the
        last change, which nobody can set. Make the file if it is missing.
        """
        fd = self.open(os.O_WRONLY | os.O_CREAT)
        try:
            os.utime(fd)
            return os.fstat(fd).st_ctime
        finally:
            os.close(fd)

    def status(self) -> os.stat_result:
        """The status of the regular file, whoever owns it."""
        with self._opened_parent() as parent:
            found = os.stat(self.name, dir_fd=parent, follow_symlinks=False)
        if not stat.S_ISREG(found.st_mode):
            raise UnsafeFileError(errno.EPERM, "it is no regular file", str(self.path))
        return found

    def exists(self) -> bool:
        """Whether there is a regular file."""
        try:
            self.status()
        except (FileNotFoundError, UnsafeFileError):
            return False
        return True

    def is_folder(self) -> bool:
        """Whether there is a folder."""
        try:
            os.close(self._opened())
        except (FileNotFoundError, UnsafeFileError):
            return False
        return True

    def unlink(self) -> None:
        """Remove the name, whatever has it but a folder. Raises FileNotFoundError."""
        with self._opened_parent() as parent:
            os.unlink(self.name, dir_fd=parent)

    def rename(self, to: Beneath) -> None:
        """Give it another name, which replaces what has that name."""
        with self._opened_parent() as parent, to._opened_parent() as to_parent:
            os.rename(self.name, to.name, src_dir_fd=parent, dst_dir_fd=to_parent)

    def link(self, to: Beneath) -> None:
        """Give it a second name. Raises FileExistsError."""
        with self._opened_parent() as parent, to._opened_parent() as to_parent:
            os.link(self.name, to.name, src_dir_fd=parent, dst_dir_fd=to_parent, follow_symlinks=False)

    def make_folder(self, mode: int = 0o700) -> None:
        """Make the folder, and those that it is in, beneath the root. No error where it is there."""
        if not self.relative or self.is_folder():
            return
        self.parent.make_folder(mode)
        with self._opened_parent() as parent, contextlib.suppress(FileExistsError):
            os.mkdir(self.name, mode, dir_fd=parent)
        os.close(self._opened())

    def names(self) -> list[str]:
        """The names in the folder, in order."""
        fd = self._opened(os.O_RDONLY)
        try:
            return sorted(os.listdir(fd))  # noqa: PTH208 (a folder that is open)
        finally:
            os.close(fd)

    def first_names(self, most: int) -> tuple[list[str], bool]:
        """At most so many of the names in the folder, in no order, and whether these are all. Others may make very many
        there.
        """
        fd = self._opened(os.O_RDONLY)
        try:
            with os.scandir(fd) as entries:
                names = [entry.name for entry in itertools.islice(entries, most + 1)]
        finally:
            os.close(fd)
        return names[:most], len(names) <= most

    def sync(self) -> None:
        """Make the names in the folder survive power loss."""
        fd = self._opened(os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def _opened(self, flags: int = os.O_PATH) -> int:
        """A descriptor of the folder."""
        return self._opened_at(self.relative.split("/") if self.relative else [], flags)

    def _opened_at(self, parts: Sequence[str], flags: int) -> int:
        fd = os.open(self.root, os.O_DIRECTORY | os.O_CLOEXEC | (os.O_PATH if parts else flags))
        for number, part in enumerate(parts, start=1):
            above = fd
            try:
                fd = os.open(part, _FOLDER | (os.O_PATH if number < len(parts) else flags), dir_fd=above)
            except OSError as error:
                raise self._told(error) from error
            finally:
                os.close(above)
        return fd

    @contextlib.contextmanager
    def _opened_parent(self) -> Iterator[int]:
        fd = self.parent._opened()
        try:
            yield fd
        finally:
            os.close(fd)

    def _told(self, error: OSError) -> OSError:
        if error.errno not in _NO_FILE:
            return error
        return UnsafeFileError(errno.EPERM, "a link, or something else that is no file, has its name", str(self.path))

    def _require_ours(self, fd: int, *, is_written: bool) -> None:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise UnsafeFileError(errno.EPERM, "it is no regular file", str(self.path))
        if is_written and found.st_nlink > 1:  # another name of it may lie anywhere
            raise UnsafeFileError(errno.EPERM, f"it has {found.st_nlink} names", str(self.path))
        if found.st_uid == os.geteuid():
            return
        root = self.root.stat()
        if found.st_uid == root.st_uid or not root.st_mode & stat.S_IWOTH:
            return
        with contextlib.suppress(OSError):
            if found.st_uid == _owner_of_new_files(self.root):
                return
        raise UnsafeFileError(errno.EPERM, f"it belongs to another user ({found.st_uid})", str(self.path))


def _copy(source: int, target: int) -> None:
    """Copy the bytes that a file has now; its holes, which may be as long as anybody likes, stay holes."""
    at, nbytes = 0, os.fstat(source).st_size
    os.ftruncate(target, nbytes)
    while at < nbytes:
        try:
            at = os.lseek(source, at, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:  # a hole up to the end
                return
            raise
        end = min(os.lseek(source, at, os.SEEK_HOLE), nbytes)
        os.lseek(target, at, os.SEEK_SET)
        while at < end:
            copied = os.sendfile(target, source, at, end - at)
            if not copied:  # it has become shorter
                return
            at += copied


@functools.lru_cache(maxsize=64)
def _owner_of_new_files(root: Path) -> int:
    """The user who owns what this process makes there: a file server may write as somebody else."""
    folder = os.open(root, os.O_DIRECTORY | os.O_CLOEXEC | os.O_PATH)
    name = f".owner-{secrets.token_hex(6)}"
    try:
        fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=folder)
        owner = os.fstat(fd).st_uid
        os.close(fd)
        with contextlib.suppress(OSError):
            os.unlink(name, dir_fd=folder)
        return owner
    finally:
        os.close(folder)
