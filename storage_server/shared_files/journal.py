"""Journals in a shared directory. Each writer appends to its own, and reads those of all others.

    DIR/writers/<writer>/journal-<generation>     frames of storage_server.shared_files.records

A journal is written anew under the next generation when most of it is old. A reader goes to the newest generation and
reads it from its front.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections.abc import Iterable
from pathlib import Path

from storage_server.shared_files.records import FRAME_BYTES_MAX, Record, decode, file_ids, wanted_bytes
from storage_server.store.data.disk import Disk

STEP_BYTES = 4 << 20
_NAME = re.compile(r"journal-(\d{1,9})\Z")


class OwnJournal:
    """The journal of this server. Used by one thread at a time; methods raise OSError."""

    def __init__(self, folder: Path, disk: Disk) -> None:
        self._folder = folder
        self._disk = disk
        self._fd = -1
        self.generation = 0
        self.end = 0
        """Where the next frame begins."""
        self._is_doubtful = False

    def open(self, generation: int, position: int) -> None:
        """Open the newest generation, or make the first one, and cut a torn frame off. Of `generation` all up to
        `position` is known to be good.
        """
        self.generation = newest(self._folder) or 1
        path = _path(self._folder, self.generation)
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._disk.sync_directory(self._folder)
        for old in list(self._folder.iterdir()):  # what a crash has left of a rewrite
            if old != path and _NAME.match(old.name.removesuffix(".new")):
                self._disk.unlink(old)
        self.end = position if self.generation == generation else 0
        self._find_end()

    def settle(self) -> None:
        """Find the end again after a write that failed; `end` is then behind all that others may have read."""
        if self._is_doubtful:
            self._find_end()

    def append(self, frame: bytes) -> None:
        """Write a frame durably. After an error the frame may be there all the same, and `end` says so."""
        if self._is_doubtful:
            raise OSError(errno.EIO, "the journal's end is not known")
        if os.fstat(self._fd).st_size != self.end:
            raise OSError(errno.ESTALE, "another server writes this journal, or has shortened it")
        try:
            self._disk.write_all(self._fd, memoryview(frame), self.end)
            self._disk.sync(self._fd)
        except OSError:
            self._is_doubtful = True
            with contextlib.suppress(OSError):
                self._find_end()
            raise
        self.end += len(frame)

    def rewrite(self, frames: Iterable[bytes]) -> None:
        """Begin a new generation with these frames; without an error the old one is gone."""
        path = _path(self._folder, self.generation + 1)
        new = path.with_name(path.name + ".new")
        self._disk.unlink(new)
        fd = self._disk.create(new)
        try:
            end = 0
            for frame in frames:
                self._disk.write_all(fd, memoryview(frame), end)
                end += len(frame)
            self._disk.sync(fd)
            os.rename(new, path)
            self._disk.sync_directory(self._folder)
        except OSError:
            os.close(fd)
            raise
        old = _path(self._folder, self.generation)
        os.close(fd)
        os.close(self._fd)
        self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self.generation, self.end, self._is_doubtful = self.generation + 1, end, False
        with contextlib.suppress(OSError):  # the next start removes it
            self._disk.unlink(old)

    def read(self, position: int) -> list[list[Record]]:
        """The frames from `position` to the end."""
        data = _read(self._fd, position, self.end - position)
        return [records for _, records in decode(data)[0]]

    def close(self) -> None:
        """Close the file."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _find_end(self) -> None:
        """Behind the last whole frame; what is torn behind it is cut off, since nobody can have read it."""
        size = os.fstat(self._fd).st_size
        if size < self.end:
            raise OSError(errno.ESTALE, "the journal is shorter than it was")
        while self.end < size:
            data = _front(self._fd, self.end, size)
            frames, _ = decode(data)
            if not frames:
                is_torn = self.end + wanted_bytes(data, 0) >= size or not any(data)
                if not is_torn:
                    raise OSError(errno.EBADMSG, f"the journal is damaged at {self.end}")
                os.ftruncate(self._fd, self.end)
                self._disk.sync(self._fd)
                break
            self.end += frames[-1][0]
        self._is_doubtful = False


class ReadJournal:
    """What was read of another writer's journal in one step: whole frames, and where they end. `problem` says why
    reading ends there, None where the rest is not written yet.
    """

    def __init__(self, folder: Path, generation: int, position: int) -> None:
        self.writer = folder.name
        self.generation = max(generation, 1)
        self.start = position
        self.frames: list[tuple[int, list[Record]]] = []
        self.problem: str | None = None
        self.is_whole = True
        """Whether the end of the file was reached."""
        try:
            fd = self._newest(folder)
        except FileNotFoundError:
            return
        try:
            size = os.fstat(fd).st_size
            if size < self.start:
                self.problem = f"it ends at {size}, and was read to {self.start}"
            elif size > self.start:
                data = _front(fd, self.start, size)
                found, self.problem = decode(data)
                self.frames = [(self.start + end, records) for end, records in found]
                self.is_whole = not found or self.frames[-1][0] >= size
        finally:
            os.close(fd)

    def _newest(self, folder: Path) -> int:
        """The newest generation, opened. A reader that is just behind finds the next one by its name."""
        if self.start:
            with contextlib.suppress(FileNotFoundError):
                fd = os.open(_path(folder, self.generation + 1), os.O_RDONLY | os.O_CLOEXEC)
                self.generation, self.start = self.generation + 1, 0
                return fd
            with contextlib.suppress(FileNotFoundError):
                return os.open(_path(folder, self.generation), os.O_RDONLY | os.O_CLOEXEC)
        generation = newest(folder) or 1
        if generation != self.generation:
            self.generation, self.start = generation, 0
        return os.open(_path(folder, generation), os.O_RDONLY | os.O_CLOEXEC)


def named_files(folder: Path) -> set[str]:
    """The files that a writer's journal names. Raises OSError."""
    found, generation, position = set[str](), 0, 0
    while True:
        journal = ReadJournal(folder, generation, position)
        for end, records in journal.frames:
            found |= file_ids(records)
            position = end
        if journal.is_whole or not journal.frames:
            return found
        generation = journal.generation


def newest(folder: Path) -> int | None:
    """The newest generation of the journal in a folder. Raises OSError."""
    found = [int(match[1]) for match in (_NAME.match(path.name) for path in folder.iterdir()) if match]
    return max(found, default=None)


def _path(folder: Path, generation: int) -> Path:
    return folder / f"journal-{generation}"


def _front(fd: int, at: int, size: int) -> bytes:
    """Some whole frames from `at` on, if there are any."""
    data = _read(fd, at, min(STEP_BYTES, size - at))
    wanted = wanted_bytes(data, 0)
    if len(data) < wanted <= min(size - at, FRAME_BYTES_MAX + STEP_BYTES):
        data = _read(fd, at, wanted)
    return data


def _read(fd: int, at: int, nbytes: int) -> bytes:
    pieces = []
    while nbytes > 0:
        piece = os.pread(fd, nbytes, at)
        if not piece:
            break
        pieces.append(piece)
        at, nbytes = at + len(piece), nbytes - len(piece)
    return b"".join(pieces)
