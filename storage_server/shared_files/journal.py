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
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from objectcache.adapters.beneath import Beneath
from storage_server.shared_files.records import (
    FRAME_BYTES_MAX,
    STAMP_MAX,
    Decoded,
    Record,
    decode,
    file_ids,
    wanted_bytes,
)
from storage_server.store.data.disk import Disk

STEP_BYTES = 4 << 20
_NAME = re.compile(r"journal-(\d{1,9})\Z")


class OwnJournal:
    """The journal of this server. Used by one thread at a time; methods raise OSError."""

    def __init__(self, folder: Beneath, disk: Disk) -> None:
        self._folder = folder
        self._disk = disk
        self._fd = -1
        self.generation = 0
        self.end = 0
        """Where the next frame begins."""
        self._is_doubtful = False

    def open(self, generation: int, position: int) -> None:
        """Open the newest generation, or make the first one, and cut a torn frame off. Of `generation` all up to
        `position` is known to be good. Where nothing is known of a journal that is there (the index was lost), a torn
        frame is refused: what lies behind a damaged length may be good.
        """
        self.generation = newest(self._folder) or 1
        place = _place(self._folder, self.generation)
        self._fd = place.open(os.O_RDWR | os.O_CREAT)
        self._disk.sync_directory(self._folder)
        for name in self._folder.names():  # what a crash has left of a rewrite
            if name != place.name and _NAME.match(name.removesuffix(".new")):
                self._disk.unlink(self._folder / name)
        self.end = position if self.generation == generation else 0
        self._find_end(may_cut=self.end > 0 or not generation)

    def find_end_again(self) -> None:
        """Find the end again after a write that failed; `end` is then behind all that others may have read."""
        if not self._is_doubtful:
            return
        successor = _place(self._folder, self.generation + 1)
        if successor.exists():  # it was written anew, and an error came when it had its name
            self._disk.sync_directory(self._folder)
            os.close(self._fd)
            self._fd = successor.open(os.O_RDWR)
            self.generation, self.end = self.generation + 1, 0
        self._find_end(may_cut=True)

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
                self._find_end(may_cut=True)
            raise
        self.end += len(frame)

    def rewrite(self, frames: Iterable[bytes]) -> None:
        """Begin a new generation with these frames; without an error the old one is gone."""
        place = _place(self._folder, self.generation + 1)
        new = place.with_name(place.name + ".new")
        self._disk.unlink(new)
        fd = self._disk.create(new)
        try:
            end = 0
            for frame in frames:
                self._disk.write_all(fd, memoryview(frame), end)
                end += len(frame)
            self._disk.sync(fd)
        finally:
            os.close(fd)
        self._is_doubtful = True  # until it is known which of the two counts
        try:
            new.rename(place)
        except OSError:
            if place.exists():  # others may have read it
                raise
            self._is_doubtful = False
            raise
        self._disk.sync_directory(self._folder)
        os.close(self._fd)
        self._fd = place.open(os.O_RDWR)
        self.generation, self.end, self._is_doubtful = self.generation + 1, end, False
        for name in self._folder.names():
            match = _NAME.match(name)
            if match and int(match[1]) < self.generation:
                with contextlib.suppress(OSError):  # the next time
                    self._disk.unlink(self._folder / name)

    def read(self, position: int) -> Iterator[Decoded]:
        """The frames from `position` to the end, some at a time; offsets count from `position`, and from the end of
        those before.
        """
        while position < self.end:
            found = decode(_read_frames(self._fd, position, self.end))
            if not found.frames:
                raise OSError(errno.EBADMSG, f"the journal is damaged at {position}: {found.problem}")
            yield found
            position += found.frames[-1][0]

    def close(self) -> None:
        """Close the file."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _find_end(self, *, may_cut: bool) -> None:
        """Set `end` behind the last whole frame. A torn frame behind it is cut off, since no server can have read it.
        After a failed sync the system may have dropped the frames from its cache, so whole frames are then written and
        synced once more.
        """
        size = os.fstat(self._fd).st_size
        if size < self.end:
            raise OSError(errno.ESTALE, "the journal is shorter than it was")
        while self.end < size:
            data = _read_frames(self._fd, self.end, size)
            frames = decode(data).frames
            if not frames:
                is_torn = self.end + wanted_bytes(data, 0) >= size or not any(data)
                if not is_torn or not may_cut:
                    raise OSError(errno.EBADMSG, f"the journal is damaged at {self.end}")
                os.ftruncate(self._fd, self.end)
                self._disk.sync(self._fd)
                break
            if self._is_doubtful:
                self._disk.write_all(self._fd, memoryview(data[: frames[-1][0]]), self.end)
                self._disk.sync(self._fd)
            self.end += frames[-1][0]
        self._is_doubtful = False


@dataclass(slots=True)
class ReadJournal:
    """One read of another writer's journal: whole frames from `start` on, each with its end. `problem` says why reading
    ends there, None where the rest is not written yet.
    """

    writer: str
    generation: int = 1
    start: int = 0
    frames: list[tuple[int, list[Record]]] = field(default_factory=list)
    problem: str | None = None
    nbytes: int = 0
    """How many bytes were read."""
    is_whole: bool = False
    """Whether the end of the journal was reached."""
    bad_count: int = 0
    """How many records were passed over."""
    first_bad: tuple[int, str] | None = None
    """The offset of the first frame with such a record, and why it was passed over."""


def read_journal(
    folder: Beneath, generation: int, position: int, budget_bytes: int = STEP_BYTES, stamp_max: int = STAMP_MAX
) -> ReadJournal:
    """Read on behind `position` of `generation`, in the newest generation; about `budget_bytes` at most. See `decode`
    for `stamp_max`. Raises OSError.
    """
    journal = ReadJournal(folder.name, max(generation, 1), position)
    try:
        fd = _newest_opened(folder, journal)
    except FileNotFoundError:  # it has no journal yet, or a newer one by now
        journal.is_whole = newest(folder) is None
        return journal
    try:
        size = os.fstat(fd).st_size
        if size < journal.start:
            journal.problem = f"it ends at {size}, and was read to {journal.start}"
            return journal
        data = _read_frames(fd, journal.start, size, budget_bytes)
        found = decode(data, stamp_max)
        journal.problem, journal.nbytes, journal.bad_count = found.problem, len(data), found.bad_count
        if found.first_bad is not None:
            journal.first_bad = journal.start + found.first_bad[0], found.first_bad[1]
        journal.frames = [(journal.start + end, records) for end, records in found.frames]
        end = journal.frames[-1][0] if journal.frames else journal.start
        journal.is_whole = journal.problem is None and (not journal.frames or end >= size)
        return journal
    finally:
        os.close(fd)


def _newest_opened(folder: Beneath, journal: ReadJournal) -> int:
    """The newest generation, opened; of a newer one all is to be read. One that is just behind is found by its name."""
    if journal.start:
        with contextlib.suppress(FileNotFoundError):
            fd = _place(folder, journal.generation + 1).open(os.O_RDONLY)
            journal.generation, journal.start = journal.generation + 1, 0
            return fd
        with contextlib.suppress(FileNotFoundError):
            fd = _place(folder, journal.generation).open(os.O_RDONLY)
            if os.fstat(fd).st_size > journal.start:
                return fd
            os.close(fd)  # nothing is new, or it is an old one that could not be deleted
    generation = newest(folder) or 1
    if generation != journal.generation:
        journal.generation, journal.start = generation, 0
    return _place(folder, generation).open(os.O_RDONLY)


def named_files(folder: Beneath) -> set[str] | None:
    """The files that a writer's journal names; None where some of its records make no sense here, so that nobody knows
    what they name. Raises OSError.
    """
    found, generation, position = set[str](), 0, 0
    while True:
        journal = read_journal(folder, generation, position)
        if journal.bad_count:
            return None
        for end, records in journal.frames:
            found |= file_ids(records)
            position = end
        if journal.is_whole or not journal.frames:
            return found
        generation = journal.generation


def newest(folder: Beneath) -> int | None:
    """The newest generation of the journal in a folder. Raises OSError."""
    found = [int(match[1]) for match in map(_NAME.match, folder.names()) if match]
    return max(found, default=None)


def _place(folder: Beneath, generation: int) -> Beneath:
    return folder / f"journal-{generation}"


def _read_frames(fd: int, at: int, size: int, budget_bytes: int = STEP_BYTES) -> bytes:
    """Some whole frames from `at` on, if there are any."""
    data = _read(fd, at, min(budget_bytes, size - at))
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
