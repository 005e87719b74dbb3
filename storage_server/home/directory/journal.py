"""Journals in a shared directory. Each writer appends to its own, and reads those of all others.

    DIR/writers/<writer>/journal-<generation>        frames of storage_server.home.directory.rules.records
    DIR/writers/<writer>/succession-<generation>     how it goes on from the generation before

A journal is written anew under the next generation when most of it is old. A reader goes to the newest generation and
reads it from its front, or goes on behind the front where it has read the generation before.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import partial

from awscrt.checksums import crc32c

from objectcache.adapters.beneath import Beneath, UnsafeFileError
from storage_server.home.directory.rules.records import (
    FRAME_BYTES_MAX,
    HEAD,
    NO_LIST,
    PIECE_BYTES,
    RECORD_BYTES_MAX,
    STAMP_MAX,
    WRONG_CHECKSUM,
    PassedOver,
    Record,
    are_zeros,
    decode,
    file_ids,
    lateness,
    records_in,
    rows_of,
    wanted_bytes,
    whole_frames,
)
from storage_server.home.directory.rules.succession import SUCCESSION_BYTES_MAX, Succession, decoded_succession
from storage_server.kernel.data.disk import Disk

STEP_BYTES = 4 << 20
STEP_ROWS = 8_000
"""So much is read at once."""
NAMES_MAX = 10_000
"""So many names are looked at in a folder that others may write to."""
LOOK_BYTES = 4096
"""A crash may leave zeros behind the last frame, up to STEP_BYTES. Of more, so many are looked at."""
PROVED_BYTES = 1 << 20
"""So much of a large frame is held while its checksum is computed."""
_NAME = re.compile(r"journal-(\d{1,9})\Z")
_SUCCESSION = re.compile(r"succession-(\d{1,9})(\.[0-9a-f]{12}\.new)?\Z")


@dataclass(slots=True)
class Rewrite:
    """A new generation of the own journal while it is written, behind `generation`. So far it has `end` bytes."""

    generation: int
    place: Beneath
    fd: int
    end: int = 0
    counts: bool = False
    """Whether it has its name."""

    def close(self) -> None:
        """Close the file. Later calls do nothing."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class OwnJournal:
    """The journal of this server. Used by one thread at a time, but for a rewrite; methods raise OSError."""

    def __init__(self, folder: Beneath, disk: Disk) -> None:
        self._folder = folder
        self._disk = disk
        self._fd = -1
        self.generation = 0
        self.end = 0
        """Where the next frame begins."""
        self._is_doubtful = False

    def open(self, generation: int, position: int, coming: tuple[int, int] = (0, 0)) -> None:
        """Open the newest generation, or make the first one, and cut a torn frame off. Of `generation` all up to
        `position` is known to be good, and of a generation that may have come to count since, what `coming` says.
        Where nothing is known of a journal that is there (the index was lost), a torn frame is refused, since good ones
        may lie behind a damaged length.
        """
        self.close()
        names = self._folder.names()
        self.generation = self._newest_of(names) or 1
        place = _place(self._folder, self.generation)
        self._fd = _own(place, os.O_CREAT)
        self._disk.sync_directory(self._folder)
        for name in names:  # what a crash has left of a rewrite
            succession = _SUCCESSION.match(name)
            is_other = succession is not None and (int(succession[1]) != self.generation or succession[2] is not None)
            if is_other or (name != place.name and _NAME.match(name.removesuffix(".new"))):
                self._remove_old(name)
        known = {coming[0]: coming[1], generation: position}
        self.end = known.get(self.generation, 0)
        self._find_end(may_cut=self.generation in known)

    def _newest_of(self, names: Iterable[str]) -> int | None:
        """The newest generation of the own journal that is a file: a neighbour may have given its name to a folder, and
        may have made any number of other names, of which readers of other servers look at few.
        """
        found = [int(match[1]) for match in map(_NAME.match, names) if match and (self._folder / match[0]).exists()]
        return max(found, default=None)

    def _remove_old(self, name: str) -> None:
        """Remove what is left of an older generation, if that is possible now; nobody reads it."""
        with contextlib.suppress(OSError):
            self._disk.unlink(self._folder / name)

    def find_end_again(self) -> None:
        """Find the end again after a write that failed; `end` is then behind all that others may have read."""
        if not self._is_doubtful:
            return
        successor = _place(self._folder, self.generation + 1)
        if successor.exists():  # it was written anew, and an error came when it had its name
            self._disk.sync_directory(self._folder)
            self._follow(successor, 0)
        self._find_end(may_cut=True)

    def append(self, frames: Sequence[bytes]) -> None:
        """Write frames durably. After an error some of them may be there all the same, and `end` says so."""
        if self._is_doubtful:
            raise OSError(errno.EIO, "the journal's end is not known")
        self.require_known()
        end = self.end
        try:
            for frame in frames:
                self._disk.write_all(self._fd, memoryview(frame), end)
                end += len(frame)
            self._disk.sync(self._fd)
        except OSError:
            self._is_doubtful = True
            with contextlib.suppress(OSError):
                self._find_end(may_cut=True)
            raise
        self.end = end

    def require_known(self) -> None:
        """Raises OSError where the journal is not at its place, or another server has written it: one that was started
        with a copy of this server's data directory.
        """
        self._require_place()
        if os.fstat(self._fd).st_size != self.end:
            raise OSError(errno.ESTALE, "another server writes this journal, or has shortened it")

    def _require_place(self) -> None:
        """Raises OSError where the open journal is not the one at its place: the file system was unmounted meanwhile,
        and others will never read what is written through the descriptor.
        """
        own, there = os.fstat(self._fd), _place(self._folder, self.generation).status()
        if (own.st_dev, own.st_ino) != (there.st_dev, there.st_ino):
            raise OSError(errno.ESTALE, "another file is in the journal's place: is the file system mounted?")

    def begin_rewrite(self, frames: Iterable[bytes]) -> Rewrite:
        """Write a new generation that begins with these frames; nobody reads it yet. May be called from any thread, one
        at a time, while the journal is written on.
        """
        self._require_place()
        place = _place(self._folder, self.generation + 1)
        new = place.with_name(place.name + ".new")
        self._disk.unlink(new)
        rewrite = Rewrite(self.generation, new, self._disk.create(new))
        try:
            self.add(rewrite, frames)
        except BaseException:
            self.give_up(rewrite)
            raise
        return rewrite

    def give_up(self, rewrite: Rewrite) -> None:
        """Close it, and delete it where it has not come to count."""
        rewrite.close()
        if not rewrite.counts:
            with contextlib.suppress(OSError):  # the next time
                self._disk.unlink(rewrite.place)

    def add(self, rewrite: Rewrite, frames: Iterable[bytes]) -> None:
        """Write more frames into it. May be called from any thread, one at a time."""
        for frame in frames:
            self._disk.write_all(rewrite.fd, memoryview(frame), rewrite.end)
            rewrite.end += len(frame)
        self._disk.sync(rewrite.fd)

    def tail(self, start: int, end: int) -> Iterator[bytes]:
        """The bytes [start, end) of the journal, which were written durably. May be called from any thread."""
        fd = _place(self._folder, self.generation).open(os.O_RDONLY)
        try:
            while start < end:
                piece = _read(fd, start, min(STEP_BYTES, end - start))
                if not piece:
                    raise OSError(errno.ESTALE, "the journal is shorter than it was")
                yield piece
                start += len(piece)
        finally:
            os.close(fd)

    def finish_rewrite(self, rewrite: Rewrite, succession: Succession | None = None) -> None:
        """The new generation counts from now on; without an error the old one is gone. Without `succession` readers
        begin at its front.
        """
        self.require_known()
        if rewrite.generation != self.generation:
            raise OSError(errno.ESTALE, "the journal was written anew meanwhile")
        place = _place(self._folder, self.generation + 1)
        if succession is not None:
            _succession(self._folder, self.generation + 1).write(succession.encoded())
        self._is_doubtful = True  # until it is known which of the two counts
        try:
            rewrite.place.rename(place)
        except OSError:
            if place.exists():  # others may have read it
                raise
            self._is_doubtful = False
            raise
        rewrite.counts = True
        self._disk.sync_directory(self._folder)
        self._follow(place, rewrite.end)
        self._is_doubtful = False
        for name in self._folder.names():
            match = _NAME.match(name) or _SUCCESSION.match(name)
            if match and int(match[1]) < self.generation:
                self._remove_old(name)

    def _follow(self, successor: Beneath, end: int) -> None:
        """Write on in the next generation. After an error the one before is still open."""
        fd = _own(successor)
        os.close(self._fd)
        self._fd, self.generation, self.end = fd, self.generation + 1, end

    def read(self, position: int) -> Iterator[ReadJournal]:
        """All from `position` to the end, some at a time."""
        place = JournalPlace(self.generation, position)
        while place.position < self.end:
            found = ReadJournal("", place)
            _read_on(self._fd, found, size=self.end, budget_bytes=STEP_BYTES, rows_max=STEP_ROWS, stamp_max=STAMP_MAX)
            if not found.pieces:
                raise OSError(errno.EBADMSG, f"the journal is damaged at {place.position}: {found.problem}")
            yield found
            place = found.end

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
            nbytes = whole_frames(data)
            if not nbytes:
                is_torn = self.end + wanted_bytes(data, 0) >= size or are_zeros(data)
                if not is_torn or not may_cut:
                    raise OSError(errno.EBADMSG, f"the journal is damaged at {self.end}")
                os.ftruncate(self._fd, self.end)
                self._disk.sync(self._fd)
                break
            if self._is_doubtful:
                self._disk.write_all(self._fd, memoryview(data)[:nbytes], self.end)
                self._disk.sync(self._fd)
            self.end += nbytes
        self._is_doubtful = False


@dataclass(frozen=True, slots=True)
class JournalPlace:
    """How far a journal is read: where a frame of this generation begins, and how many bytes of the frame's payload are
    read. More than none are of a large frame only, whose checksum is right.
    """

    generation: int = 0
    position: int = 0
    inside: int = 0


@dataclass(slots=True)
class ReadJournal:
    """One read of a journal from `start` on: pieces, each with its end. `problem` says why reading ends there, None
    where the rest is not written yet.
    """

    writer: str
    start: JournalPlace
    pieces: list[tuple[JournalPlace, list[Record]]] = field(default_factory=list)
    problem: str | None = None
    error_number: int = 0
    """That of the system's error, where that is the problem."""
    hangs_since_s: float | None = None
    """Since when a read of it hangs, by the steady clock."""
    size: int = 0
    """How long the journal was."""
    nbytes: int = 0
    """How many bytes were read."""
    is_whole: bool = False
    """Whether the end of the journal was reached."""
    front: int = 0
    """How many bytes at the front of a new generation were passed by: they say what was known from the one before."""
    passed_over: PassedOver = field(default_factory=PassedOver)

    @property
    def end(self) -> JournalPlace:
        """How far it is read now."""
        return self.pieces[-1][0] if self.pieces else self.start

    @property
    def row_count(self) -> int:
        """How many rows were read, those of records that were passed over among them."""
        return self.passed_over.row_count + sum(rows_of(records) for _, records in self.pieces)


def read_journal(
    folder: Beneath,
    place: JournalPlace,
    budget_bytes: int = STEP_BYTES,
    rows_max: int = STEP_ROWS,
    stamp_max: int = STAMP_MAX,
) -> ReadJournal:
    """Read on behind `place`, in the newest generation; about `budget_bytes` and `rows_max` at most. See `decode`
    for `stamp_max`. Raises OSError.
    """
    journal = ReadJournal(folder.name, replace(place, generation=max(place.generation, 1)))
    try:
        fd = _newest_opened(folder, journal)
    except FileNotFoundError:  # it has no journal yet, or a newer one by now
        journal.is_whole = newest(folder) is None
        return journal
    try:
        journal.size = os.fstat(fd).st_size
        if journal.size < journal.start.position:
            journal.problem = f"it ends at {journal.size}, and was read to {journal.start.position}"
            return journal
        _read_on(fd, journal, size=journal.size, budget_bytes=budget_bytes, rows_max=rows_max, stamp_max=stamp_max)
        end = journal.end
        is_at_end = not journal.pieces or (not end.inside and end.position >= journal.size)
        journal.is_whole = journal.problem is None and is_at_end
        return journal
    finally:
        os.close(fd)


def read_front(
    folder: Beneath, place: JournalPlace, end: int, budget_bytes: int, rows_max: int, stamp_max: int
) -> ReadJournal:
    """Read on in the front of a generation, which ends at `end`. Raises OSError."""
    journal = ReadJournal(folder.name, place)
    fd = _place(folder, place.generation).open(os.O_RDONLY)
    try:
        _read_on(fd, journal, size=end, budget_bytes=budget_bytes, rows_max=rows_max, stamp_max=stamp_max)
    finally:
        os.close(fd)
    journal.is_whole = journal.end.position >= end
    return journal


def _read_on(fd: int, journal: ReadJournal, size: int, budget_bytes: int, rows_max: int, stamp_max: int) -> None:
    """Read whole small frames, or something of one large frame."""
    generation, position = journal.start.generation, journal.start.position
    if not journal.start.inside:
        if _is_hole(fd, position, size):
            return
        if size - position > STEP_BYTES and not any(_read(fd, position, LOOK_BYTES)):
            journal.problem = "zeros where a frame should be"
            journal.nbytes += LOOK_BYTES
            return
        data = _read(fd, position, min(budget_bytes, size - position))
        wanted = wanted_bytes(data, 0)
        if len(data) < wanted <= min(size - position, HEAD.size + PIECE_BYTES):
            data = _read(fd, position, wanted)
        found = decode(data, stamp_max, rows_max)
        journal.problem, journal.passed_over = found.problem, found.passed_over
        journal.nbytes += len(data)
        if found.passed_over.first is not None:
            at, reason = found.passed_over.first
            journal.passed_over.first = position + at, reason
        journal.pieces = [(JournalPlace(generation, position + end), records) for end, records in found.frames]
        if found.frames or found.problem or not HEAD.size + PIECE_BYTES < wanted <= size - position:
            return
        payload_bytes, checksum = HEAD.unpack_from(data)
        journal.nbytes += payload_bytes
        if _checksum(fd, position + HEAD.size, payload_bytes) != checksum:
            journal.problem = WRONG_CHECKSUM
            return
        if data[HEAD.size : HEAD.size + 1] != b"[":
            journal.passed_over.note(position, NO_LIST)
            journal.pieces.append((JournalPlace(generation, position + wanted), []))
            return
    _read_inside(fd, journal, budget_bytes, rows_max, stamp_max)


def _is_hole(fd: int, position: int, size: int) -> bool:
    """Whether nothing was ever written behind `position`: a file of any size then takes no disk, and is not read."""
    if position >= size:
        return False
    try:
        os.lseek(fd, position, os.SEEK_DATA)
    except OSError as error:
        return error.errno == errno.ENXIO
    return False


def _read_inside(fd: int, journal: ReadJournal, budget_bytes: int, rows_max: int, stamp_max: int) -> None:
    """Read on inside a large frame, a whole record at least."""
    position, inside = journal.start.position, max(journal.start.inside, 1)
    payload_bytes = wanted_bytes(_read(fd, position, HEAD.size), 0) - HEAD.size
    window, passed_before = max(budget_bytes, PIECE_BYTES), replace(journal.passed_over)
    while True:
        asked_bytes = min(window, payload_bytes - inside)
        data = _read(fd, position + HEAD.size + inside, asked_bytes)
        if len(data) < asked_bytes:
            raise OSError(errno.EBADMSG, "the journal has become shorter")
        journal.nbytes += len(data)
        is_end = inside + len(data) >= payload_bytes
        records, nbytes = records_in(data, partial(journal.passed_over.note, position), rows_max, is_end=is_end)
        if nbytes or is_end:
            break
        if window >= RECORD_BYTES_MAX:
            journal.passed_over.note(position, f"a record of more than {RECORD_BYTES_MAX} bytes")
            is_end, nbytes = True, len(data)
            break
        window *= 2
    journal.problem = lateness(records, stamp_max)
    if journal.problem is not None:
        journal.passed_over = passed_before
        return
    if is_end and nbytes == len(data):
        end = JournalPlace(journal.start.generation, position + HEAD.size + payload_bytes)
    else:
        end = JournalPlace(journal.start.generation, position, inside + nbytes)
    journal.pieces.append((end, records))


def _checksum(fd: int, at: int, nbytes: int) -> int:
    checksum, end = 0, at + nbytes
    while at < end:
        piece = _read(fd, at, min(PROVED_BYTES, end - at))
        if not piece:
            raise OSError(errno.EBADMSG, "the journal has become shorter")
        checksum = crc32c(piece, checksum)
        at += len(piece)
    return checksum


def _newest_opened(folder: Beneath, journal: ReadJournal) -> int:
    """The newest generation, opened; of a newer one all is to be read. One that is just behind is found by its name."""
    start = journal.start
    if start.position or start.inside:
        with contextlib.suppress(FileNotFoundError):
            fd = _place(folder, start.generation + 1).open(os.O_RDONLY)
            journal.start = JournalPlace(start.generation + 1)
            _pass_front(folder, fd, start, journal)
            return fd
        with contextlib.suppress(FileNotFoundError):
            fd = _place(folder, start.generation).open(os.O_RDONLY)
            if os.fstat(fd).st_size > start.position:
                return fd
            os.close(fd)  # nothing is new, or it is an old one that could not be deleted
    generation = newest(folder) or 1
    if generation != start.generation:
        journal.start = JournalPlace(generation)
    return _place(folder, generation).open(os.O_RDONLY)


def _pass_front(folder: Beneath, fd: int, known: JournalPlace, journal: ReadJournal) -> None:
    """Go on behind the front of the generation that `journal` is at, where that shows nothing new to whoever has read
    to `known`. A succession may be of another file than this generation's: a release that knows none has written that
    after a kill. So a frame must begin at the place.
    """
    generation = journal.start.generation
    try:
        succession = decoded_succession(_succession(folder, generation).read(SUCCESSION_BYTES_MAX))
    except OSError:  # it has none, or a newer generation has come
        return
    if succession is None or known.inside:
        return
    size = os.fstat(fd).st_size
    place = succession.place(known.generation, known.position, size)
    if place is not None and (place == size or _begins_frame(fd, place, journal)):
        journal.start, journal.front = JournalPlace(generation, place), place


def _begins_frame(fd: int, at: int, journal: ReadJournal) -> bool:
    """Whether a frame of at most one piece, with the right checksum, begins there. Its bytes count as read."""
    data = _read(fd, at, HEAD.size)
    wanted = wanted_bytes(data, 0)
    if HEAD.size < wanted <= HEAD.size + PIECE_BYTES:
        data = _read(fd, at, wanted)
    journal.nbytes += len(data)
    return len(data) == wanted > HEAD.size and crc32c(data[HEAD.size :]) == HEAD.unpack_from(data)[1]


def named_files(folder: Beneath, stored: Set[str]) -> set[str] | None:
    """The files of `stored` that a writer's journal names; None where some of its records make no sense here, so that
    nobody knows what they name. Raises OSError.
    """
    found, place = set[str](), JournalPlace()
    while True:
        journal = read_journal(folder, place)
        if journal.passed_over.count:
            return None
        for _, records in journal.pieces:
            found |= file_ids(records) & stored
        if journal.is_whole or not journal.pieces:
            return found
        place = journal.end


def newest(folder: Beneath) -> int | None:
    """The newest generation of the journal in a folder. Raises OSError."""
    names, are_all = folder.first_names(NAMES_MAX)
    if not are_all:
        raise OSError(errno.EFBIG, f"its folder has more than {NAMES_MAX} names")
    found = [int(match[1]) for match in map(_NAME.match, names) if match]
    return max(found, default=None)


def _own(place: Beneath, flags: int = 0) -> int:
    """A file of the own journal, opened to be written on. One with several names, which backups make, is copied."""
    try:
        return place.open(os.O_RDWR | flags)
    except UnsafeFileError:
        place.separate()
        return place.open(os.O_RDWR)


def _place(folder: Beneath, generation: int) -> Beneath:
    return folder / f"journal-{generation}"


def _succession(folder: Beneath, generation: int) -> Beneath:
    return folder / f"succession-{generation}"


def _read_frames(fd: int, at: int, size: int) -> bytes:
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
