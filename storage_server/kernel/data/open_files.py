"""Open files of extents, and reads from them in which every byte is proved."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import resource
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator

from objectcache.adapters.beneath import Beneath, UnsafeFileError
from storage_server.kernel.data.disk import Disk
from storage_server.planning.block_checksums import BLOCK_BYTES, first_bad_block
from storage_server.planning.extent import CorruptExtentError, Extent, MissingFileError

Read = Callable[[int, memoryview, int], int]


class OpenFiles:
    """At most `open_files_max` descriptors, and no more than half of what the host allows, those less that
    `direct_threads` may open. A file stays open until it is deleted, or another needs its room. `place` says where a
    file lies, and `is_pinned` whether it keeps its room: that is asked under `lock`, which is held while a file becomes
    pinned. `errors_are_damage` says whether bytes that cannot be read count as damaged. Methods may be called from any
    thread.
    """

    def __init__(
        self,
        place: Callable[[str], Beneath],
        is_pinned: Callable[[str], bool],
        lock: threading.Lock,
        open_files_max: int,
        disk: Disk,
        direct_threads: int,
        *,
        errors_are_damage: bool,
    ) -> None:
        self._place = place
        self._is_pinned = is_pinned
        self._lock = lock
        self._disk = disk
        self._errors_are_damage = errors_are_damage
        soft_limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        limit = min(open_files_max, soft_limit // 2)
        self.direct_files_max = max(1, limit // 4 // direct_threads) if direct_threads else 0
        """How many files each of `direct_threads` may open once more while it reads them past the page cache."""
        self._open_files_max = limit - direct_threads * self.direct_files_max
        self._fds: OrderedDict[str, int] = OrderedDict()

    @property
    def count(self) -> int:
        """Descriptors open now."""
        with self._lock:
            return len(self._fds)

    def read_into(self, extent: Extent, start: int, view: memoryview) -> None:
        """Fill `view` with the extent's bytes from `start` on; every byte has passed its block's checksum.

        Raises CorruptExtentError, or OSError when the file cannot be opened for want of descriptors or memory, and
        for a failed read that does not count as damage.
        """
        self._read_into(extent, start, view, self._disk.read)

    def read_cached_into(self, extent: Extent, start: int, view: memoryview) -> None:
        """Read as `read_into` does, but never wait for the disk. Raises BlockingIOError where that is needed."""
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
        except BlockingIOError:
            raise
        except OSError as error:
            if not self._errors_are_damage:
                raise
            raise CorruptExtentError(f"{extent.file_id} cannot be read: {error.strerror}") from error
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
            self._disk.sync(fd)
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
            fd = self._disk.open(self._place(file_id))  # without the lock: a file server may take long to answer
        except FileNotFoundError as error:
            raise MissingFileError(file_id) from error
        except (UnsafeFileError, PermissionError, ValueError) as error:
            raise CorruptExtentError(f"{file_id} cannot be trusted: {error}") from error
        with self._lock:
            if file_id in self._fds:  # another thread has opened it meanwhile
                os.close(fd)
                self._fds.move_to_end(file_id)
                return self._fds[file_id], False
            self._make_room()
            if len(self._fds) >= self._open_files_max:
                return fd, True
            self._fds[file_id] = fd
            return fd, False

    def _make_room(self) -> None:
        """Close files that nobody reads, the longest unused first, until one more may be opened."""
        surplus = len(self._fds) + 1 - self._open_files_max
        if surplus > 0:
            idle = (file_id for file_id in self._fds if not self._is_pinned(file_id))
            for file_id in list(itertools.islice(idle, surplus)):  # no further ones are looked at: reads wait for this
                os.close(self._fds.pop(file_id))

    def forget(self, file_id: str) -> None:
        """Close a file that is about to be deleted."""
        with self._lock:
            fd = self._fds.pop(file_id, None)
        if fd is not None:
            os.close(fd)

    def close_deleted(self) -> None:
        """Close files that were deleted and that nobody here reads, because only then is their space free."""
        with self._lock:
            idle = [(name, fd) for name, fd in self._fds.items() if not self._is_pinned(name)]
            for name, _ in idle:
                del self._fds[name]
        for name, fd in idle:
            is_there = False
            with contextlib.suppress(OSError):  # without the lock: a file server may take long to answer
                is_there = os.fstat(fd).st_nlink > 0
            with self._lock:
                if is_there and name not in self._fds:
                    self._fds[name] = fd
                    self._fds.move_to_end(name, last=False)
                    continue
            os.close(fd)

    def close(self) -> None:
        """Close every descriptor."""
        with self._lock:
            for fd in self._fds.values():
                os.close(fd)
            self._fds.clear()


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
        count = read(fd, view, offset)
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
