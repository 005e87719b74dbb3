"""A disk that fails, writes short, or keeps a diary, as told."""

from __future__ import annotations

import errno
from pathlib import Path

from objectcache.adapters.beneath import Beneath
from storage_server.kernel.data.disk import Disk


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

    def create(self, place: Beneath) -> int:
        self.about_to("create", place.name)
        fd = super().create(place)
        self._names[fd] = place.name
        return fd

    def write(self, fd: int, view: memoryview, offset: int) -> int:
        self.about_to("write", self._names[fd])
        return super().write(fd, view[: self.write_bytes_max], offset)

    def sync(self, fd: int) -> None:
        self.about_to("sync", Path(f"/proc/self/fd/{fd}").readlink().name)
        super().sync(fd)

    def sync_directory(self, place: Beneath) -> None:
        self.about_to("sync_directory", place.name)
        super().sync_directory(place)

    def unlink(self, place: Beneath) -> None:
        self.about_to("unlink", place.name)
        super().unlink(place)

    def open(self, place: Beneath) -> int:
        self.about_to("open", place.name)
        return super().open(place)

    def read_cached(self, fd: int, view: memoryview, offset: int) -> int:
        self.about_to("read", Path(f"/proc/self/fd/{fd}").readlink().name)
        return super().read_cached(fd, view, offset)

    def read(self, fd: int, view: memoryview, offset: int) -> int:
        self.about_to("read", Path(f"/proc/self/fd/{fd}").readlink().name)
        return super().read(fd, view, offset)
