"""Files of extents: pinned by readers, proved when read, and deleted when nobody needs them.

    DIR/extents/<xx>/<id>    a file of one object, or a packed segment of many (storage_server.kernel.data.segments)

Only bytes that the index names count. A file is deleted when no row names it, nobody writes to it and nobody has it
pinned.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import resource
import threading
import uuid
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TypeVar

from objectcache.adapters.beneath import Beneath, UnsafeFileError
from storage_server.kernel.data.disk import Disk
from storage_server.kernel.data.space import Space
from storage_server.planning.block_checksums import BLOCK_BYTES, first_bad_block
from storage_server.planning.extent import CorruptExtentError, Extent, MissingFileError, aligned

IDLE_FILES_MAX = 512
LOOKED_AT_ONCE = 4096
UNDELETED_AT_ONCE = 64
PUNCHED_MAX = 65_536
"""So many locations are remembered that were given back. A reader that began before the first of them reads again."""
FOLDER = "extents"
_T = TypeVar("_T")
_FILE_ID = re.compile(r"[0-9a-f]{32}\Z")
Read = Callable[[int, memoryview, int], int]
Location = tuple[str, int]
"""A file, and the offset of an extent in it."""
Hole = tuple[str, int, int]
"""A file, an offset in it, and how many bytes."""


def extent_place(directory: Path, file_id: str) -> Beneath:
    """The place of a file of extents in a data directory."""
    return Beneath(directory, f"{FOLDER}/{file_id[:2]}/{file_id}")


class ExtentFiles:
    """Pins, open descriptors and deferred deletion. Space that is given back is told to `space`. Methods may be called
    from any thread; a thread of its own deletes files and punches holes, because readers end on the event loop, and a
    file system may take long over a large file.
    """

    waits = False
    """Whether to pin a file may take long."""

    def __init__(
        self, directory: Path, open_files_max: int, disk: Disk, space: Space | None = None, direct_threads: int = 0
    ) -> None:
        self._directory = directory
        self.disk = disk
        self._space = space or Space(directory, None)
        soft_limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        limit = min(open_files_max, soft_limit // 2)
        self.direct_files_max = max(1, limit // 4 // direct_threads) if direct_threads else 0
        """How many files each of `direct_threads` may open once more while it reads them past the page cache."""
        self._open_files_max = limit - direct_threads * self.direct_files_max
        self._lock = threading.Lock()
        self._giver = ThreadPoolExecutor(1, "give-back")
        self._undeleted: list[str] = []
        self._live: set[str] = set()
        self._pins: Counter[str] = Counter()
        self._fds: OrderedDict[str, int] = OrderedDict()
        self._doomed: set[str] = set()
        self._whole: Counter[str] = Counter()
        self._locations: Counter[Location] = Counter()
        self._holes: dict[str, dict[int, int]] = {}
        self._punched: dict[Location, int] = {}
        self._forgotten_count = 0
        self.punch_count = 0
        """How many locations were given back since the start."""

    def place(self, file_id: str) -> Beneath:
        """Where a file lies."""
        return extent_place(self._directory, file_id)

    def new_id(self) -> str:
        """The id of a file that is about to be made."""
        return uuid.uuid4().hex

    def start(self) -> None:
        """Make the directory. Its subdirectories are made with their first files."""
        Beneath(self._directory, FOLDER).make_folder()
        self.disk.sync_directory(Beneath(self._directory))

    @property
    def open_count(self) -> int:
        """Descriptors open now."""
        with self._lock:
            return len(self._fds)

    @property
    def pinned_count(self) -> int:
        """Files pinned now."""
        with self._lock:
            return len(self._pins)

    def add(self, file_id: str) -> None:
        """Add a file that extents may name from now on."""
        with self._lock:
            self._live.add(file_id)

    def pin(self, file_ids: Iterable[str]) -> bool:
        """Keep these files readable, without new holes, until as many `unpin` calls. False, with nothing pinned, when a
        file is gone already.

        A file goes only after the index stopped naming it. So on False, read the index again.
        """
        wanted = list(file_ids)
        with self._lock:
            if not self._live.issuperset(wanted):
                return False
            self._pins.update(wanted)
            self._whole.update(wanted)
            return True

    def unpin(self, file_ids: Iterable[str]) -> None:
        """Undo `pin`. The last call for a file carries out deletions that had to wait."""
        with self._lock:
            released = list(file_ids)
            _decrease(self._whole, released)
            dead, holes = self._release(released)
        self._give_back(dead, holes)

    def pin_locations(self, locations: Sequence[Location]) -> bool:
        """As `pin`, for some extents of files; other locations in the files may become holes."""
        file_ids = {file_id for file_id, _ in locations}
        with self._lock:
            if not self._live.issuperset(file_ids):
                return False
            self._pins.update(file_ids)
            self._locations.update(locations)
            return True

    def unpin_locations(self, locations: Sequence[Location]) -> None:
        """Undo `pin_locations` of the same locations."""
        with self._lock:
            _decrease(self._locations, locations)
            dead, holes = self._release({file_id for file_id, _ in locations})
        self._give_back(dead, holes)

    def dispose(self, file_id: str) -> None:
        """Delete a file that the index no longer names, soon or when its last reader is done."""
        with self._lock:
            self._live.discard(file_id)
            if self._pins.get(file_id):
                self._doomed.add(file_id)
                self._space.revive(file_id)
                return
            self._space.doom_file(file_id)
        self._give_back([file_id], [])

    def punch(self, holes: Iterable[Hole]) -> None:
        """Give back the space of bytes that the index no longer names, soon or when their last reader is done."""
        free: list[Hole] = []
        with self._lock:
            for file_id, offset, nbytes in holes:
                if file_id not in self._live:
                    continue
                if self._is_read(file_id, offset):
                    self._holes.setdefault(file_id, {})[offset] = nbytes
                    self._space.revive(file_id, nbytes)
                else:
                    self._note_punched(file_id, offset)
                    free.append((file_id, offset, nbytes))
        self._give_back([], free)

    def settle(self) -> None:
        """Wait until what can be given back now is given back."""
        self._giver.submit(lambda: None).result()

    def withheld_bytes(self, extents: Sequence[Extent]) -> int:
        """How many bytes of these extents the index no longer names, and are there only as long as they are read. Reads
        begin and end meanwhile: the lock is held for a part at a time.
        """
        nbytes = 0
        for start in range(0, len(extents), LOOKED_AT_ONCE):
            with self._lock:
                if not self._doomed and not self._holes:
                    return nbytes
                nbytes += sum(
                    aligned(extent.nbytes)
                    for extent in extents[start : start + LOOKED_AT_ONCE]
                    if extent.file_id in self._doomed or extent.offset in self._holes.get(extent.file_id, ())
                )
        return nbytes

    def _is_read(self, file_id: str, offset: int) -> bool:
        return file_id in self._whole or (file_id, offset) in self._locations

    def _release(self, file_ids: Iterable[str]) -> tuple[list[str], list[Hole]]:
        """Unpin files once. Returns the files and holes that had to wait for it. Their bytes count as about to come
        back from the moment on at which no reader withholds them: else writers would be refused in between.
        """
        dead: list[str] = []
        free: list[Hole] = []
        for file_id in file_ids:
            self._pins[file_id] -= 1
            is_last = self._pins[file_id] <= 0
            if is_last:
                del self._pins[file_id]
                if file_id in self._doomed:
                    self._doomed.discard(file_id)
                    self._holes.pop(file_id, None)
                    self._space.doom_file(file_id)
                    dead.append(file_id)
                    continue
            holes = self._holes.get(file_id, {})
            for offset in [offset for offset in holes if not self._is_read(file_id, offset)]:
                self._note_punched(file_id, offset)
                hole = file_id, offset, holes.pop(offset)
                self._space.doom([hole])
                free.append(hole)
            if is_last:
                self._holes.pop(file_id, None)
        self._close_idle(IDLE_FILES_MAX)
        return dead, free

    def read_into(self, extent: Extent, start: int, view: memoryview) -> None:
        """Fill `view` with the extent's bytes from `start` on; every byte has passed its block's checksum.

        Raises CorruptExtentError, or OSError when the file cannot be opened for want of descriptors or memory.
        """
        self._read_into(extent, start, view, self.disk.read)

    def read_cached_into(self, extent: Extent, start: int, view: memoryview) -> None:
        """Read as `read_into` does, but never wait for the disk. Raises BlockingIOError where that is needed."""
        self._read_into(extent, start, view, self.disk.read_cached)

    def _read_into(self, extent: Extent, start: int, view: memoryview, read: Read) -> None:
        fd, transient = self._descriptor(extent.file_id)
        try:
            end = start + len(view)
            if start % BLOCK_BYTES == 0 and (end % BLOCK_BYTES == 0 or end == extent.nbytes):
                _read_whole_blocks(fd, extent, start, view, read)
                return
            for piece_start, piece in _by_blocks(extent, start, view):
                _read_blocks(fd, extent, piece_start, piece, read)
        finally:
            if transient:
                os.close(fd)

    def sync(self, file_id: str) -> None:
        """Make a file's bytes survive power loss; no error when the file is missing. Raises OSError."""
        try:
            fd, transient = self._descriptor(file_id)
        except CorruptExtentError:
            return
        try:
            self.disk.sync(fd)
        finally:
            if transient:
                os.close(fd)

    def held_descriptor(self, file_id: str) -> int:
        """A descriptor of a pinned file, open until the file is unpinned. Raises OSError (EMFILE) when too many are
        open.
        """
        fd, transient = self._descriptor(file_id)
        if transient:
            os.close(fd)
            raise OSError(errno.EMFILE, "too many files are open")
        return fd

    @contextlib.contextmanager
    def lent(self, file_ids: Iterable[str]) -> Iterator[list[int]]:
        """Lend descriptors of pinned files until the block ends. Raises MissingFileError, OSError."""
        lent: list[tuple[int, bool]] = []
        try:
            for file_id in file_ids:
                lent.append(self._descriptor(file_id))
            yield [fd for fd, _ in lent]
        finally:
            for fd, transient in lent:
                if transient:
                    os.close(fd)

    def _descriptor(self, file_id: str) -> tuple[int, bool]:
        with self._lock:
            fd = self._fds.get(file_id)
            if fd is not None:
                self._fds.move_to_end(file_id)
                return fd, False
        try:
            fd = self.disk.open(self.place(file_id))  # without the lock: a file server may take long to answer
        except FileNotFoundError as error:
            raise MissingFileError(file_id) from error
        except (UnsafeFileError, PermissionError, ValueError) as error:
            raise CorruptExtentError(f"{file_id} cannot be trusted: {error}") from error
        with self._lock:
            if file_id in self._fds:  # another thread has opened it meanwhile
                os.close(fd)
                self._fds.move_to_end(file_id)
                return self._fds[file_id], False
            self._close_idle(self._open_files_max - 1)
            if len(self._fds) >= self._open_files_max:
                return fd, True
            self._fds[file_id] = fd
            return fd, False

    def _close_idle(self, keep: int) -> None:
        """Close descriptors of unpinned files, the longest unused first, until `keep` are left."""
        if len(self._fds) <= keep:
            return
        for file_id in [name for name in self._fds if not self._pins.get(name)][: len(self._fds) - keep]:
            os.close(self._fds.pop(file_id))

    def is_punched(self, locations: Iterable[Location], since: int) -> bool:
        """Whether any of these locations may have been given back since `punch_count` was `since`."""
        if self.punch_count == since:
            return False
        with self._lock:
            return since < self._forgotten_count or any(
                self._punched.get(location, 0) > since for location in locations
            )

    def _note_punched(self, file_id: str, offset: int) -> None:
        self.punch_count += 1
        self._punched[file_id, offset] = self.punch_count
        if len(self._punched) > PUNCHED_MAX:
            self._forgotten_count = self._punched.pop(next(iter(self._punched)))

    def _give_back(self, dead: Sequence[str], holes: Sequence[Hole]) -> None:
        """Have files deleted and holes punched that nobody reads, and that no index names."""
        if dead or holes:
            try:
                self._giver.submit(partial(self._given_back, dead, holes))
            except RuntimeError:  # closed: the files are swept at the next start
                return

    def _given_back(self, dead: Sequence[str], holes: Sequence[Hole]) -> None:
        again, self._undeleted = self._undeleted[:UNDELETED_AT_ONCE], self._undeleted[UNDELETED_AT_ONCE:]
        for file_id, offset, nbytes in joined(holes):
            with contextlib.suppress(OSError):
                if self.disk.punch(self.place(file_id), offset, nbytes):
                    self._space.give_back(file_id, nbytes)
                    continue
            self._space.revive(file_id, nbytes)  # it comes back when the file is deleted
        for file_id in (*dead, *again):
            with self._lock:
                fd = self._fds.pop(file_id, None)
            if fd is not None:
                os.close(fd)
            try:
                self.disk.unlink(self.place(file_id))
                self._space.forget(file_id)
            except OSError:
                self._space.revive(file_id)
                self._undeleted.append(file_id)  # tried again with the next that go, or swept at the next start

    def count(self) -> int:
        """Files of extents in the directory."""
        return sum(1 for _ in self._stored())

    def sweep(self, live: set[str], *, set_aside: bool) -> int:
        """Take the files that the index names. A crash left the others behind: they are removed or, with `set_aside`,
        moved to the directory set-aside, for an index that may lack some files. Returns how many there were.
        """
        with self._lock:
            self._live = set(live)
        unknown = [place for place in self._stored() if place.name not in live]
        aside = Beneath(self._directory, "set-aside")
        if set_aside and unknown:
            aside.make_folder()
        for place in unknown:
            with contextlib.suppress(FileNotFoundError):  # the committer deletes what recovery has just freed
                if set_aside:
                    place.rename(aside / place.name)
                else:
                    place.unlink()
        self._space.load([place.path for place in self._stored()])
        return len(unknown)

    def _stored(self) -> Iterator[Beneath]:
        """The files whose names have the form of ours; other files in the directory are left alone."""
        return (place for place in places_in(Beneath(self._directory, FOLDER)) if _FILE_ID.match(place.name))

    def close(self) -> None:
        """Give back what is due, and close every descriptor."""
        self._giver.shutdown()
        with self._lock:
            for fd in self._fds.values():
                os.close(fd)
            self._fds.clear()


def joined(holes: Iterable[Hole]) -> list[Hole]:
    """The holes, aligned, with those that touch each other made one: each costs a call of the file system."""
    found: list[Hole] = []
    for file_id, offset, nbytes in sorted(holes):
        if found and found[-1][0] == file_id and offset <= found[-1][1] + found[-1][2]:
            end = max(found[-1][1] + found[-1][2], offset + aligned(nbytes))
            found[-1] = file_id, found[-1][1], end - found[-1][1]
        else:
            found.append((file_id, offset, aligned(nbytes)))
    return found


def places_in(extents: Beneath) -> Iterator[Beneath]:
    """List the places in all folders of a folder of extents."""
    with contextlib.suppress(FileNotFoundError, UnsafeFileError):
        for folder in extents.names():
            with contextlib.suppress(FileNotFoundError, UnsafeFileError):
                for name in (extents / folder).names():
                    yield extents / folder / name


class PinSet:
    """The pins of one reader."""

    def __init__(self, files: ExtentFiles) -> None:
        self._files = files
        self._locations: list[list[Location]] = []

    @property
    def count(self) -> int:
        """How many locations are pinned."""
        return sum(map(len, self._locations))

    def keep(self, extents: Iterable[Extent], since: int) -> bool:
        """Pin the extents. False when one is gone, or may have been given back since the count of punches was `since`;
        the index must then be read again.
        """
        locations = list({(extent.file_id, extent.offset) for extent in extents})
        if not self._files.pin_locations(locations):
            return False
        self._locations.append(locations)
        return not self._files.is_punched(locations, since)

    def release(self) -> None:
        """Give all pins back."""
        pinned, self._locations = self._locations, []
        for locations in pinned:
            self._files.unpin_locations(locations)


def _decrease(counts: Counter[_T], items: Iterable[_T]) -> None:
    """Count each item once less, and forget those that are counted no more."""
    for item in items:
        left = counts[item] - 1
        if left > 0:
            counts[item] = left
        else:
            del counts[item]


def _read_blocks(fd: int, extent: Extent, start: int, view: memoryview, read: Read) -> None:
    """Read whole blocks straight into `view`. A part of a block is read by way of a buffer for its whole block."""
    if start % BLOCK_BYTES == 0 and (len(view) % BLOCK_BYTES == 0 or start + len(view) == extent.nbytes):
        _read_whole_blocks(fd, extent, start, view, read)
        return
    at = start // BLOCK_BYTES * BLOCK_BYTES
    block = memoryview(bytearray(min(BLOCK_BYTES, extent.nbytes - at)))
    _read_whole_blocks(fd, extent, at, block, read)
    view[:] = block[start - at : start - at + len(view)]


def _read_whole_blocks(fd: int, extent: Extent, start: int, view: memoryview, read: Read) -> None:
    _read_exactly(fd, extent, start, view, read)
    bad = first_bad_block(view, extent.checksums, start // BLOCK_BYTES)
    if bad is not None:
        raise CorruptExtentError(f"block {bad} of {extent.file_id} at {extent.offset} fails its checksum")


def _read_exactly(fd: int, extent: Extent, start: int, view: memoryview, read: Read) -> None:
    offset = extent.offset + start
    while view:
        try:
            count = read(fd, view, offset)
        except BlockingIOError:
            raise
        except OSError as error:
            raise CorruptExtentError(f"{extent.file_id} cannot be read at {offset}: {error.strerror}") from error
        if count == 0:
            raise CorruptExtentError(f"{extent.file_id} ends before {offset + len(view)}")
        view, offset = view[count:], offset + count


def _by_blocks(extent: Extent, start: int, view: memoryview) -> list[tuple[int, memoryview]]:
    """Cut [start, start + len(view)) into part of a first block, whole blocks, and part of a last one."""
    pieces = []
    end = start + len(view)
    head_end = min(end, -(-start // BLOCK_BYTES) * BLOCK_BYTES)
    body_end = end if end == extent.nbytes else max(head_end, end // BLOCK_BYTES * BLOCK_BYTES)
    for first, last in ((start, head_end), (head_end, body_end), (body_end, end)):
        if first < last:
            pieces.append((first, view[first - start : last - start]))
    return pieces
