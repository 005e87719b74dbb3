"""Space for new bytes: small objects lie side by side in packed segments, large objects in files of their own.

A segment is append-only. It is not written to any more once it is full, after a restart, or after a failed write or
sync. Space is reserved before the bytes come, so many bodies can arrive in one segment at once; a body that fails
leaves a gap that no row names. At most 256 extents share a file (CASCADE, section III-D). Extents start at multiples of
4 KiB, as O_DIRECT needs.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from descriptors.errors import CallerError, ErrorCode
from descriptors.objects import BodyDigests
from descriptors.storage_api import Piece
from objectcache.adapters.beneath import Beneath
from storage_server.kernel.data.disk import Disk
from storage_server.kernel.data.extents import ExtentFiles
from storage_server.kernel.data.space import Space
from storage_server.kernel.rules.body_hashes import BodyHashes
from storage_server.kernel.rules.pins import Hole
from storage_server.planning.block_checksums import BlockChecksums
from storage_server.planning.extent import Extent, aligned

SEGMENT_EXTENTS_MAX = 256
Punch = Callable[[Sequence[Hole]], None]
"""Gives the space of locations back."""
RETIRE_BYTES_MIN = 1 << 20


class WriteFile:
    """A file that extents are written to. It closes when its last holder releases it; `on_closed` is then called with
    its id.
    """

    def __init__(
        self, place: Beneath, fd: int, disk: Disk, space: Space, punch: Punch, on_closed: Callable[[str], None]
    ) -> None:
        self.file_id = place.name
        self._space = space
        self._punch = punch
        self.fd = fd
        self.failed = False
        self._disk = disk
        self._on_closed = on_closed
        self._lock = threading.Lock()
        self._syncing = threading.Lock()
        self._holders = 1

    def reserve(self, nbytes: int) -> None:
        """Count the space of a body that is about to be written."""
        self._space.take(self.file_id, nbytes)

    def give_back(self, offset: int, nbytes: int, *, is_written: bool) -> None:
        """Give back the space of a body that failed: no row has named the bytes, and no row will."""
        if is_written:
            hole = self.file_id, offset, nbytes
            self._space.doom([hole])
            self._punch([hole])  # when nobody reads there: a delivery may have begun with them
        else:
            self._space.give_back(self.file_id, nbytes)

    def hold(self) -> None:
        """Add a holder."""
        with self._lock:
            self._holders += 1

    def release(self) -> None:
        """Remove a holder."""
        with self._lock:
            self._holders -= 1
            if self._holders:
                return
        with contextlib.suppress(OSError):
            os.close(self.fd)
        self._on_closed(self.file_id)

    def write(self, view: memoryview, offset: int, disk: Disk) -> None:
        """Write at `offset`. Raises OSError; after a failed write nothing is known of the file's bytes any more."""
        try:
            disk.write_all(self.fd, view, offset)
        except OSError:
            self.failed = True
            raise

    def sync(self) -> None:
        """Make the written bytes survive power loss. Raises OSError, and after the first failure always: nobody can
        tell which bytes a failed sync has dropped.
        """
        with self._syncing:  # of two concurrent syncs only one would get the error
            if self.failed:
                raise OSError(errno.EIO, "an earlier write or sync of this file failed")
            try:
                self._disk.sync(self.fd)
            except OSError:
                self.failed = True
                raise


@dataclass(slots=True)
class Pending:
    """The writes that must be durable before an index row may name their extent: `data`, if any, is written at `offset`
    of `file`, and the file is synced. `may_be_named` is true from the moment a change with them waits for the
    committer, until the change has ended without a row that names them: their space is given back then.
    """

    file: WriteFile
    data: memoryview
    offset: int
    may_be_named: bool = False


class Segments:
    """Hands out space in segments. Methods run in worker threads; a new segment costs one create and one directory
    sync.
    """

    def __init__(
        self,
        files: ExtentFiles,
        disk: Disk,
        packed_bytes_max: int,
        space: Space,
        on_closed: Callable[[str], None],
    ) -> None:
        self._space = space
        self._files = files
        self._disk = disk
        self._on_closed = on_closed
        self._packed_bytes_max = packed_bytes_max
        self._lock = threading.RLock()
        self._current: WriteFile | None = None
        self._writing: set[str] = set()
        self._making = threading.Lock()
        self._made: set[Beneath] = set()
        self._used_bytes = 0
        self._extent_count = 0

    @property
    def packed_bytes_max(self) -> int:
        """The size of the largest body that goes into a segment. A larger body has a file of its own."""
        return self._packed_bytes_max

    @property
    def extents_max(self) -> int:
        """The most extents that share a file."""
        return SEGMENT_EXTENTS_MAX

    @property
    def bytes_max(self) -> int:
        """The largest size of a segment."""
        return SEGMENT_EXTENTS_MAX * self._packed_bytes_max

    def new_file(self) -> WriteFile:
        """A file that nobody else writes to. Its name is durable, and the caller holds it. Raises OSError."""
        file_id = self._files.new_id()
        place = self._files.place(file_id)
        self.make_directory(place.parent)
        try:
            fd = self._disk.create(place)
        except FileNotFoundError:  # somebody has deleted the folder: it was empty
            self._forget_directory(place.parent)
            self.make_directory(place.parent)
            fd = self._disk.create(place)
        try:
            self._disk.sync_directory(place.parent)
        except OSError:
            os.close(fd)
            with contextlib.suppress(OSError):
                self._disk.unlink(place)
            raise
        self._files.add(file_id)
        with self._lock:
            self._writing.add(file_id)
        return WriteFile(
            place=place, fd=fd, disk=self._disk, space=self._space, punch=self._files.punch, on_closed=self._closed
        )

    def make_directory(self, directory: Beneath) -> None:
        """Make a directory of extents, and the one that it is in, durably; a file in it is lost if the directory's name
        is. Raises OSError, FileNotFoundError where what they are in is gone: its file system is unmounted.
        """
        with self._making:
            for folder in (directory.parent, directory):
                if folder not in self._made:
                    if not folder.parent.is_folder():
                        raise FileNotFoundError(errno.ENOENT, "the folder that it is in is gone", str(folder))
                    folder.make_folder()
                    self._disk.sync_directory(folder.parent)
                    self._made.add(folder)

    def _forget_directory(self, directory: Beneath) -> None:
        with self._making:
            self._made -= {directory.parent, directory}

    def writer(self, nbytes: int, hashes: BodyHashes) -> ExtentWriter:
        """A writer for a body of `nbytes` (more than 0). Raises OSError."""
        if nbytes > self._packed_bytes_max:
            return ExtentWriter(self.new_file(), 0, nbytes, hashes, is_alone=True)
        with self._lock:
            segment = self._current
            if segment is None or segment.failed or not self._fits(nbytes):
                segment = self._next_segment()
            offset = self._used_bytes
            self._used_bytes += aligned(nbytes)
            self._extent_count += 1
            segment.hold()
        return ExtentWriter(segment, offset, nbytes, hashes)

    def writer_at_once(self, nbytes: int, hashes: BodyHashes) -> ExtentWriter | None:
        """The writer that `writer` would return, where no disk access is needed for it; otherwise None."""
        if nbytes > self._packed_bytes_max or not self._lock.acquire(blocking=False):
            return None
        try:
            if self._current is None or self._current.failed or not self._fits(nbytes):
                return None
            return self.writer(nbytes, hashes)
        finally:
            self._lock.release()

    def retire(self, file_id: str) -> None:
        """Note that no row names this file. If it is the current segment and not nearly empty, start another."""
        with self._lock:
            current = self._current
            if current is None or current.file_id != file_id or self._used_bytes < RETIRE_BYTES_MIN:
                return
            self._current = None
        current.release()

    def note_gone(self, file_ids: Collection[str]) -> None:
        """Note that these files are not at their places. Their folders may be gone, too, and what the current segment
        has taken is where nobody looks: another one is begun.
        """
        for file_id in file_ids:
            self._forget_directory(self._files.place(file_id).parent)
        with self._lock:
            if self._current is not None and self._current.file_id in file_ids:
                self._current.failed = True

    @property
    def written_count(self) -> int:
        """How many files may still get extents."""
        with self._lock:
            return len(self._writing)

    def is_written(self, file_id: str) -> bool:
        """Whether this file may still get extents, so that the index does not know all of them yet."""
        with self._lock:
            return file_id in self._writing

    def close(self) -> None:
        """Close the current segment. No more extents may be written."""
        with self._lock:
            last, self._current = self._current, None
        if last is not None:
            last.release()

    def _fits(self, nbytes: int) -> bool:
        return self._extent_count < self.extents_max and self._used_bytes + nbytes <= self.bytes_max

    def _next_segment(self) -> WriteFile:
        full, self._current = self._current, self.new_file()
        self._used_bytes = self._extent_count = 0
        if full is not None:
            full.release()
        return self._current

    def _closed(self, file_id: str) -> None:
        with self._lock:
            self._writing.discard(file_id)
        self._on_closed(file_id)


class ExtentWriter:
    """Writes one body. `write` and `check` run in worker threads, in order; then comes `close`."""

    def __init__(
        self, file: WriteFile, offset: int, nbytes: int, hashes: BodyHashes, *, is_alone: bool = False
    ) -> None:
        """A body that `is_alone` in its file gives its space back with the file, which nobody names then."""
        self._is_alone = is_alone
        self.file = file
        self.hashes = hashes
        self.offset = offset
        self._nbytes = nbytes
        self._blocks = BlockChecksums()
        self._written_bytes = 0
        self._pending: Pending | None = None
        self._released = False
        file.reserve(nbytes)

    def write(self, pieces: Iterable[Piece], disk: Disk) -> None:
        """Append pieces. Raises CallerError(IncompleteBody) for more bytes than announced, OSError from the disk."""
        for piece in pieces:
            at = self._written_bytes
            self._take(piece)
            self.file.write(memoryview(piece), self.offset + at, disk)

    def keep(self, whole: Piece) -> Pending:
        """Take the whole body, which is written when its row is committed. Raises what `check` raises."""
        self._take(whole)
        self._pending = Pending(self.file, memoryview(whole), self.offset)
        return self._pending

    def store(self, whole: Piece, blocks: BlockChecksums, disk: Disk) -> None:
        """Write a whole body whose checksums are known. Raises OSError."""
        self._blocks, self._written_bytes = blocks, len(whole)
        self.file.write(memoryview(whole), self.offset, disk)

    def words(self) -> bytes:
        """The packed checksums of the blocks written so far; the last one may be of a part of its block."""
        return self._blocks.packed()

    def pending(self) -> Pending:
        """The sync of the written bytes, which comes when the row is committed."""
        self._pending = self._pending or Pending(self.file, memoryview(b""), self.offset)
        return self._pending

    def _take(self, piece: Piece) -> None:
        end = self._written_bytes + len(piece)
        if end > self._nbytes:
            raise CallerError(ErrorCode.INCOMPLETE_BODY, "the body is longer than announced", field="body")
        self.hashes.update(piece)
        self._blocks.update(piece)
        self._written_bytes = end

    def check(self, said: BodyDigests) -> None:
        """Compare length and hashes. Raises CallerError: IncompleteBody, XAmzContentSHA256Mismatch, BadDigest."""
        if self._written_bytes != self._nbytes:
            raise CallerError(
                ErrorCode.INCOMPLETE_BODY,
                f"the body has {self._written_bytes} bytes, {self._nbytes} were announced",
                field="body",
            )
        self.hashes.check(said)

    def extent(self) -> Extent:
        """The extent of the written bytes."""
        return Extent(self.file.file_id, self.offset, self._nbytes, self._blocks.packed())

    def close(self) -> None:
        """End the body, complete or not. Later calls do nothing."""
        if self._released:
            return
        self._released = True
        if not self._is_alone and (self._pending is None or not self._pending.may_be_named):
            self.file.give_back(self.offset, self._nbytes, is_written=self._written_bytes > 0)
        self.file.release()
