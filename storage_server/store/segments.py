"""Where new bytes go: small objects side by side in packed segments, large ones into files of their own.

A segment is append-only and never written again once it is full, or after a restart, or after a failed write or sync.
Space is reserved first, so many bodies arrive into one segment at once; a failed one leaves a gap that no row names.
At most 256 extents share a file (CASCADE, section III-D). Extents start at multiples of 4 KiB, as O_DIRECT needs.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from descriptors.errors import CallerError, ErrorCode
from descriptors.objects import BodyDigests
from descriptors.storage_api import Piece
from storage_server.store.block_checksums import BlockChecksums
from storage_server.store.body_hashes import BodyHashes
from storage_server.store.disk import Disk
from storage_server.store.extents import Extent, ExtentFiles, extent_path

SEGMENT_EXTENTS_MAX = 256
ALIGNMENT_BYTES = 4096
RETIRE_BYTES_MIN = 1 << 20


class WriteFile:
    """A file extents are written to. It closes when everyone who holds it has let go; then `on_closed` hears its id."""

    def __init__(self, path: Path, fd: int, disk: Disk, on_closed: Callable[[str], None]) -> None:
        self.file_id = path.name
        self._path = path
        self.fd = fd
        self.failed = False
        self._disk = disk
        self._on_closed = on_closed
        self._lock = threading.Lock()
        self._syncing = threading.Lock()
        self._holders = 1

    def give_back(self, offset: int, nbytes: int) -> None:
        """The space of a body that failed: no row has named it, and none will."""
        with contextlib.suppress(OSError):
            self._disk.punch(self._path, offset, nbytes)

    def hold(self) -> None:
        """One more holder."""
        with self._lock:
            self._holders += 1

    def release(self) -> None:
        """One holder less."""
        with self._lock:
            self._holders -= 1
            if self._holders:
                return
        with contextlib.suppress(OSError):
            os.close(self.fd)
        self._on_closed(self.file_id)

    def write(self, view: memoryview, offset: int, disk: Disk) -> None:
        """Raises OSError; what is behind a write that failed is not known any more."""
        try:
            disk.write_all(self.fd, view, offset)
        except OSError:
            self.failed = True
            raise

    def sync(self) -> None:
        """Make what was written survive power loss. Raises OSError, from then on always: what a failed sync dropped
        cannot be told from what it kept.
        """
        with self._syncing:  # of two at once only one would hear of an error
            if self.failed:
                raise OSError(errno.EIO, "an earlier write or sync of this file failed")
            try:
                self._disk.sync(self.fd)
            except OSError:
                self.failed = True
                raise


@dataclass(frozen=True, slots=True)
class Pending:
    """What a row must not be committed before: `data`, if any, written at `offset` of `file`, and the file synced."""

    file: WriteFile
    data: memoryview
    offset: int


class Segments:
    """Hands out space. Methods run in worker threads; a new segment costs one create and one directory sync."""

    def __init__(
        self,
        directory: Path,
        files: ExtentFiles,
        disk: Disk,
        packed_bytes_max: int,
        on_closed: Callable[[str], None],
    ) -> None:
        self._directory = directory
        self._files = files
        self._disk = disk
        self._on_closed = on_closed
        self._packed_bytes_max = packed_bytes_max
        self._lock = threading.RLock()
        self._current: WriteFile | None = None
        self._writing: set[str] = set()
        self._making = threading.Lock()
        self._made: set[Path] = set()
        self._used_bytes = 0
        self._extent_count = 0

    @property
    def packed_bytes_max(self) -> int:
        """What is larger has a file of its own."""
        return self._packed_bytes_max

    @property
    def extents_max(self) -> int:
        """How many extents share a file."""
        return SEGMENT_EXTENTS_MAX

    @property
    def bytes_max(self) -> int:
        """How large a segment may become."""
        return SEGMENT_EXTENTS_MAX * self._packed_bytes_max

    def new_file(self) -> WriteFile:
        """A file nobody else writes to, its name on the disk; the caller holds it. Raises OSError."""
        file_id = uuid.uuid4().hex
        path = extent_path(self._directory, file_id)
        self._make_directory(path.parent)
        fd = self._disk.create(path)
        try:
            self._disk.sync_directory(path.parent)
        except OSError:
            os.close(fd)
            with contextlib.suppress(OSError):
                self._disk.unlink(path)
            raise
        self._files.add(file_id)
        with self._lock:
            self._writing.add(file_id)
        return WriteFile(path, fd, self._disk, self._closed)

    def _make_directory(self, directory: Path) -> None:
        """Its name, too, must be on the disk before anything in it counts. Raises OSError."""
        with self._making:
            if directory in self._made:
                return
            directory.mkdir(exist_ok=True)
            self._disk.sync_directory(directory.parent)
            self._made.add(directory)

    def writer(self, nbytes: int, hashes: BodyHashes) -> ExtentWriter:
        """A place for `nbytes` (more than 0) of body. Raises OSError."""
        if nbytes > self._packed_bytes_max:
            return ExtentWriter(self.new_file(), 0, nbytes, hashes)
        with self._lock:
            segment = self._current
            if segment is None or segment.failed or not self._fits(nbytes):
                segment = self._next_segment()
            offset = self._used_bytes
            self._used_bytes += -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
            self._extent_count += 1
            segment.hold()
        return ExtentWriter(segment, offset, nbytes, hashes)

    def writer_at_once(self, nbytes: int, hashes: BodyHashes) -> ExtentWriter | None:
        """As `writer`, where that needs nothing of the disk; None where it does."""
        if nbytes > self._packed_bytes_max or not self._lock.acquire(blocking=False):
            return None
        try:
            if self._current is None or self._current.failed or not self._fits(nbytes):
                return None
            return self.writer(nbytes, hashes)
        finally:
            self._lock.release()

    def retire(self, file_id: str) -> None:
        """Nothing in this file is wanted any more: if it is the current segment and of some size, start another."""
        with self._lock:
            current = self._current
            if current is None or current.file_id != file_id or self._used_bytes < RETIRE_BYTES_MIN:
                return
            self._current = None
        current.release()

    def is_written(self, file_id: str) -> bool:
        """Whether extents may still be added to this file: then nothing is known of it from the index alone."""
        with self._lock:
            return file_id in self._writing

    def close(self) -> None:
        """No more extents."""
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
    """One body on its way to disk. `write` and `check` run in worker threads, in order; then `close`."""

    def __init__(self, file: WriteFile, offset: int, nbytes: int, hashes: BodyHashes) -> None:
        self.file = file
        self.hashes = hashes
        self._offset = offset
        self._nbytes = nbytes
        self._blocks = BlockChecksums()
        self._written_bytes = 0
        self._is_stored = False
        self._released = False

    def write(self, pieces: Iterable[Piece], disk: Disk) -> None:
        """Append. Raises CallerError(IncompleteBody) for more than was announced, OSError for what the disk says."""
        for piece in pieces:
            at = self._written_bytes
            self._take(piece)
            self.file.write(memoryview(piece), self._offset + at, disk)

    def keep(self, whole: Piece) -> Pending:
        """The whole body, to be written when its row is committed. Errors as in `check`."""
        self._take(whole)
        return Pending(self.file, memoryview(whole), self._offset)

    def pending(self) -> Pending:
        """What was written, to be synced when its row is committed."""
        return Pending(self.file, memoryview(b""), 0)

    def _take(self, piece: Piece) -> None:
        end = self._written_bytes + len(piece)
        if end > self._nbytes:
            raise CallerError(ErrorCode.INCOMPLETE_BODY, "the body is longer than announced", field="body")
        self.hashes.update(piece)
        self._blocks.update(piece)
        self._written_bytes = end

    def check(self, said: BodyDigests) -> None:
        """Raises CallerError: IncompleteBody, XAmzContentSHA256Mismatch, BadDigest."""
        if self._written_bytes != self._nbytes:
            raise CallerError(
                ErrorCode.INCOMPLETE_BODY,
                f"the body has {self._written_bytes} bytes, {self._nbytes} were announced",
                field="body",
            )
        self.hashes.check(said)

    def extent(self) -> Extent:
        """What was written; from now on it may be named."""
        self._is_stored = True
        return Extent(self.file.file_id, self._offset, self._nbytes, self._blocks.packed())

    def close(self) -> None:
        """Done, well or not; later calls do nothing."""
        if self._released:
            return
        self._released = True
        if not self._is_stored and self._written_bytes:
            self.file.give_back(self._offset, self._nbytes)
        self.file.release()
