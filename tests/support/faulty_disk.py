"""A disk that fails, writes short, or keeps a diary, as told."""

from __future__ import annotations

import errno
from pathlib import Path

from storage_server.store.data.disk import Disk


class FaultyDisk(Disk):
    """`fail[call]` is the errno the next calls of that name fail with; `diary` is what was done, in order."""

    def __init__(self) -> None:
        self.fail: dict[str, int] = {}
        self.write_bytes_max: int | None = None
        self.diary: list[tuple[str, str]] = []
        self._names: dict[int, str] = {}

    def about_to(self, call: str, name: str) -> None:
        if call in self.fail:
            raise OSError(self.fail[call], f"injected {errno.errorcode[self.fail[call]]}")
        self.diary.append((call, name))

    def create(self, path: Path) -> int:
        self.about_to("create", path.name)
        fd = super().create(path)
        self._names[fd] = path.name
        return fd

    def write(self, fd: int, view: memoryview, offset: int) -> int:
        self.about_to("write", self._names[fd])
        return super().write(fd, view[: self.write_bytes_max], offset)

    def sync(self, fd: int) -> None:
        self.about_to("sync", Path(f"/proc/self/fd/{fd}").readlink().name)
        super().sync(fd)

    def sync_directory(self, path: Path) -> None:
        self.about_to("sync_directory", path.name)
        super().sync_directory(path)

    def unlink(self, path: Path) -> None:
        self.about_to("unlink", path.name)
        super().unlink(path)

    def open(self, path: Path) -> int:
        self.about_to("open", path.name)
        return super().open(path)

    def read_cached(self, fd: int, view: memoryview, offset: int) -> int:
        self.about_to("read", Path(f"/proc/self/fd/{fd}").readlink().name)
        return super().read_cached(fd, view, offset)

    def read(self, fd: int, view: memoryview, offset: int) -> int:
        self.about_to("read", Path(f"/proc/self/fd/{fd}").readlink().name)
        return super().read(fd, view, offset)
