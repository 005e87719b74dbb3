"""Extents: where an object's bytes lie in immutable files, and reading them with proof.

    DIR/extents/<xx>/<id>    a file of one object, or a packed segment of many (storage_server.store.segments)

What counts is what the index names; bytes it does not name yet, or no longer, are nothing. A file is deleted when no
row names it, nobody writes it and nobody has it pinned.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import resource
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from storage_server.store.block_checksums import BLOCK_BYTES, first_bad_block
from storage_server.store.disk import Disk

IDLE_FILES_MAX = 512
_FILE_ID = re.compile(r"[0-9a-f]{32}\Z")
Read = Callable[[int, memoryview, int], int]


@dataclass(frozen=True, slots=True)
class Extent:
    """Bytes [offset, offset + nbytes) of a file, with the packed CRC-32C of each block. `object_offset` is where in
    its object they belong.
    """

    file_id: str
    offset: int
    nbytes: int
    checksums: bytes
    object_offset: int = 0


class CorruptExtentError(Exception):
    """Stored bytes are not what was written: too short, unreadable, or a block fails its checksum."""


class MissingFileError(CorruptExtentError):
    """A file the index names is not there."""

    def __init__(self, file_id: str) -> None:
        super().__init__(f"{file_id} is missing")
        self.file_id = file_id


def extent_path(directory: Path, file_id: str) -> Path:
    """Where a file of extents lies."""
    return directory / "extents" / file_id[:2] / file_id


class ExtentFiles:
    """Pins, open descriptors and deferred deletion. Methods may be called from any thread."""

    def __init__(self, directory: Path, open_files_max: int, disk: Disk) -> None:
        self._directory = directory
        self._disk = disk
        soft_limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._open_files_max = min(open_files_max, soft_limit // 2)
        self._lock = threading.Lock()
        self._live: set[str] = set()
        self._pins: Counter[str] = Counter()
        self._fds: OrderedDict[str, int] = OrderedDict()
        self._doomed: set[str] = set()
        self._holes: dict[str, list[tuple[int, int]]] = {}
        self._punched: dict[str, int] = {}
        self.punch_count = 0

    def start(self) -> None:
        """Make the directory; those in it come with their first files."""
        (self._directory / "extents").mkdir(parents=True, exist_ok=True)
        self._disk.sync_directory(self._directory)

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
        """A file that extents may name from now on."""
        with self._lock:
            self._live.add(file_id)

    def pin(self, file_ids: Iterable[str]) -> bool:
        """Keep these files readable until as many `unpin` calls; False, and nothing pinned, when one is gone already.

        A file goes only after the index stopped naming it: read the index again then.
        """
        wanted = list(file_ids)
        with self._lock:
            if not self._live.issuperset(wanted):
                return False
            self._pins.update(wanted)
            return True

    def unpin(self, file_ids: Iterable[str]) -> None:
        """Undo `pin`; the last one carries out a deferred deletion."""
        with self._lock:
            for file_id in file_ids:
                self._pins[file_id] -= 1
                if self._pins[file_id] > 0:
                    continue
                del self._pins[file_id]
                holes = self._holes.pop(file_id, [])
                if file_id in self._doomed:
                    self._doomed.discard(file_id)
                    self._remove(file_id)
                    continue
                for offset, nbytes in holes:
                    self._punch(file_id, offset, nbytes)
            self._close_idle(IDLE_FILES_MAX)

    def dispose(self, file_id: str) -> None:
        """Delete a file the index no longer names, now or when its last reader is done."""
        with self._lock:
            self._live.discard(file_id)
            if self._pins.get(file_id):
                self._doomed.add(file_id)
            else:
                self._remove(file_id)

    def punch(self, file_id: str, offset: int, nbytes: int) -> None:
        """Give back the space of bytes the index no longer names, now or when the file's last reader is done."""
        with self._lock:
            if file_id not in self._live:
                return
            if self._pins.get(file_id):
                self._holes.setdefault(file_id, []).append((offset, nbytes))
            else:
                self._punch(file_id, offset, nbytes)

    def read_into(self, extent: Extent, start: int, view: memoryview) -> None:
        """Fill `view` with the extent's bytes from `start` on; every byte has passed its block's checksum.

        Raises CorruptExtentError, or OSError when the file cannot be opened for want of descriptors or memory.
        """
        self._read_into(extent, start, view, self._disk.read)

    def read_cached_into(self, extent: Extent, start: int, view: memoryview) -> None:
        """As `read_into`, without waiting for the disk: raises BlockingIOError where that is needed."""
        self._read_into(extent, start, view, self._disk.read_cached)

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
        """Make a file's bytes survive power loss; fine when it is missing. Raises OSError."""
        try:
            fd, transient = self._descriptor(file_id)
        except CorruptExtentError:
            return
        try:
            self._disk.sync(fd)
        finally:
            if transient:
                os.close(fd)

    def held_descriptor(self, file_id: str) -> int:
        """A descriptor of a pinned file, open until it is unpinned. Raises OSError (EMFILE) when too many are open."""
        fd, transient = self._descriptor(file_id)
        if transient:
            os.close(fd)
            raise OSError(errno.EMFILE, "too many files are open")
        return fd

    @contextlib.contextmanager
    def lent(self, file_ids: Iterable[str]) -> Iterator[list[int]]:
        """Descriptors of pinned files until the block ends. Raises MissingFileError, OSError."""
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
                fd = self._disk.open(extent_path(self._directory, file_id))
            except FileNotFoundError as error:
                raise MissingFileError(file_id) from error
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

    def is_punched(self, extents: Iterable[Extent], since: int) -> bool:
        """Whether any of these files has given space back after `punch_count` was `since`."""
        if self.punch_count == since:
            return False
        with self._lock:
            return any(self._punched.get(file_id, 0) > since for file_id in {extent.file_id for extent in extents})

    def _punch(self, file_id: str, offset: int, nbytes: int) -> None:
        self.punch_count += 1
        self._punched[file_id] = self.punch_count
        with contextlib.suppress(OSError):  # the space comes back with the file, then
            self._disk.punch(extent_path(self._directory, file_id), offset, nbytes)

    def _remove(self, file_id: str) -> None:
        self._punched.pop(file_id, None)
        fd = self._fds.pop(file_id, None)
        if fd is not None:
            os.close(fd)
        with contextlib.suppress(OSError):  # what stays is swept at the next start
            self._disk.unlink(extent_path(self._directory, file_id))

    def count(self) -> int:
        """Files of extents in the directory."""
        return sum(1 for _ in self._stored())

    def sweep(self, live: set[str], *, set_aside: bool) -> int:
        """Know the files the index names. Others are what a crash left behind, and are removed; or moved to the
        directory set-aside, where it is not certain that the index knows of all. Returns how many that was.
        """
        with self._lock:
            self._live = set(live)
        unknown = [path for path in self._stored() if path.name not in live]
        aside = self._directory / "set-aside"
        if set_aside and unknown:
            aside.mkdir(exist_ok=True, mode=0o700)
        for path in unknown:
            if set_aside:
                path.rename(aside / path.name)
            else:
                path.unlink()
        return len(unknown)

    def _stored(self) -> Iterator[Path]:
        """What has the name of a file of ours; anything else in the directory is left alone."""
        return (path for path in (self._directory / "extents").glob("*/*") if _FILE_ID.match(path.name))

    def close(self) -> None:
        """Close every descriptor."""
        with self._lock:
            for fd in self._fds.values():
                os.close(fd)
            self._fds.clear()


class PinSet:
    """The files one reader keeps readable."""

    def __init__(self, files: ExtentFiles) -> None:
        self._files = files
        self._file_ids: list[str] = []

    @property
    def count(self) -> int:
        """Pins held."""
        return len(self._file_ids)

    def keep(self, extents: Iterable[Extent]) -> bool:
        """Pin the files of these extents; False when one is gone, and the index must be read again."""
        file_ids = list({extent.file_id for extent in extents})
        if not self._files.pin(file_ids):
            return False
        self._file_ids.extend(file_ids)
        return True

    def release(self) -> None:
        """Give every pin back."""
        file_ids, self._file_ids = self._file_ids, []
        self._files.unpin(file_ids)


def read_object(
    read_into: Callable[[Extent, int, memoryview], None], extents: Sequence[Extent], start: int, view: memoryview
) -> None:
    """Fill `view` with the object's bytes from `start` on, across its extents; `read_into` is an ExtentFiles' own."""
    if len(extents) == 1 and extents[0].object_offset == 0 and start + len(view) <= extents[0].nbytes:
        read_into(extents[0], start, view)
        return
    for extent in extents:
        if not view:
            return
        skip = start - extent.object_offset
        if not 0 <= skip < extent.nbytes:
            continue
        count = min(len(view), extent.nbytes - skip)
        read_into(extent, skip, view[:count])
        view, start = view[count:], start + count
    if view:
        raise CorruptExtentError("the object's extents do not cover it")


def _read_blocks(fd: int, extent: Extent, start: int, view: memoryview, read: Read) -> None:
    """Whole blocks go straight into `view`; part of one block goes by way of a block of our own."""
    if start % BLOCK_BYTES == 0 and (len(view) % BLOCK_BYTES == 0 or start + len(view) == extent.nbytes):
        _read_whole_blocks(fd, extent, start, view, read)
        return
    at = start // BLOCK_BYTES * BLOCK_BYTES
    block = memoryview(bytearray(min(BLOCK_BYTES, extent.nbytes - at)))
    _read_whole_blocks(fd, extent, at, block, read)
    view[:] = block[start - at : start - at + len(view)]


def _read_whole_blocks(fd: int, extent: Extent, start: int, view: memoryview, read: Read) -> None:
    _fill(fd, extent, start, view, read)
    bad = first_bad_block(view, extent.checksums, start // BLOCK_BYTES)
    if bad is not None:
        raise CorruptExtentError(f"block {bad} of {extent.file_id} at {extent.offset} fails its checksum")


def _fill(fd: int, extent: Extent, start: int, view: memoryview, read: Read) -> None:
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
