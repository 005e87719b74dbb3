"""Immutable extent files: written aside, synced, renamed into place; pinned while someone reads; unlinked after.

    DIR/tmp/<id>            being written
    DIR/extents/<xx>/<id>   complete; visible once the index refers to it

A pinned file outlives its object's deletion or overwriting. A pinned file's descriptor is opened at its first read and
closed with its last pin, so open files are bounded by what is being read.
"""

from __future__ import annotations

import errno
import hashlib
import os
import resource
import threading
import uuid
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from descriptors.errors import CallerError, ErrorCode, ServerError
from descriptors.storage_api import Piece


class ExtentWriter:
    """One extent being written; `open`, `write`, `finish` and `discard` run in worker threads. `finish` or `discard`
    ends it.
    """

    def __init__(self, directory: Path, nbytes: int) -> None:
        self.file_id = uuid.uuid4().hex
        self.nbytes = nbytes
        self.written_bytes = 0
        self._directory = directory
        self._temporary = directory / "tmp" / self.file_id
        self._md5 = hashlib.md5(usedforsecurity=False)
        self._sha256 = hashlib.sha256()
        self._fd = -1

    def open(self) -> None:
        """Create the temporary file. Raises OSError."""
        self._fd = os.open(self._temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)

    def write(self, pieces: Iterable[Piece], *, hash_sha256: bool) -> None:
        """Append. Raises CallerError(IncompleteBody) for more than was announced, OSError for what the disk says."""
        for piece in pieces:
            self.written_bytes += len(piece)
            if self.written_bytes > self.nbytes:
                raise CallerError(ErrorCode.INCOMPLETE_BODY, "the body is longer than announced", field="body")
            self._md5.update(piece)
            if hash_sha256:
                self._sha256.update(piece)
            left = memoryview(piece)
            while left:
                left = left[os.write(self._fd, left) :]

    def finish(self, sha256: str | None, md5: str | None) -> str:
        """Check length and digests, sync, move into place; the MD5 in hex.

        Raises CallerError (IncompleteBody, XAmzContentSHA256Mismatch, BadDigest) or OSError; nothing is left behind.
        """
        if self.written_bytes != self.nbytes:
            raise CallerError(
                ErrorCode.INCOMPLETE_BODY,
                f"the body has {self.written_bytes} bytes, {self.nbytes} were announced",
                field="body",
            )
        if sha256 is not None and self._sha256.hexdigest() != sha256:
            raise CallerError(
                ErrorCode.X_AMZ_CONTENT_SHA256_MISMATCH,
                "the body's SHA-256 is not the one that was signed",
                field="x-amz-content-sha256",
            )
        digest = self._md5.hexdigest()
        if md5 is not None and digest != md5:
            raise CallerError(ErrorCode.BAD_DIGEST, "the body's MD5 is not the one given", field="content-md5")
        os.fsync(self._fd)
        os.close(self._fd)
        self._fd = -1
        final = extent_path(self._directory, self.file_id)
        os.rename(self._temporary, final)
        _sync_directory(final.parent)
        return digest

    def discard(self) -> None:
        """Drop whatever was written; safe after any failure, and after `finish` for an extent never published."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        self._temporary.unlink(missing_ok=True)
        extent_path(self._directory, self.file_id).unlink(missing_ok=True)


def extent_path(directory: Path, file_id: str) -> Path:
    """Where a complete extent file lies."""
    return directory / "extents" / file_id[:2] / file_id


def _sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@dataclass(frozen=True, slots=True)
class Extent:
    """Where an object's bytes lie: [offset, offset + nbytes) of an immutable file."""

    file_id: str
    offset: int
    nbytes: int


class ExtentFiles:
    """Pins, open descriptors and deferred deletion of extent files. Methods may be called from any thread."""

    def __init__(self, directory: Path, open_files_max: int) -> None:
        self._directory = directory
        soft_limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._open_files_max = min(open_files_max, soft_limit // 2)
        self._planning = threading.Lock()
        self._lock = threading.Lock()
        self._pins: Counter[str] = Counter()
        self._fds: dict[str, int] = {}
        self._doomed: set[str] = set()
        for name in ("tmp", *(f"extents/{index:02x}" for index in range(256))):
            (directory / name).mkdir(parents=True, exist_ok=True)
        _sync_directory(directory / "extents")
        _sync_directory(directory)

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

    def pin(self, file_ids: Iterable[str]) -> None:
        """Keep these files readable until as many `unpin` calls."""
        with self._lock:
            self._pins.update(file_ids)

    def unpin(self, file_ids: Iterable[str]) -> None:
        """Undo `pin`; the last one closes the file and carries out a deferred deletion."""
        with self._lock:
            for file_id in file_ids:
                self._pins[file_id] -= 1
                if self._pins[file_id] > 0:
                    continue
                del self._pins[file_id]
                fd = self._fds.pop(file_id, None)
                if fd is not None:
                    os.close(fd)
                if file_id in self._doomed:
                    self._doomed.discard(file_id)
                    extent_path(self._directory, file_id).unlink(missing_ok=True)

    def dispose(self, file_id: str) -> None:
        """Unlink a file no object refers to any more, now or when its last reader is done."""
        with self._planning, self._lock:
            if self._pins.get(file_id):
                self._doomed.add(file_id)
            else:
                extent_path(self._directory, file_id).unlink(missing_ok=True)

    def read_into(self, file_id: str, offset: int, view: memoryview) -> None:
        """Fill `view` from a pinned file. Raises OSError, or EOFError when the file is too short."""
        fd, transient = self._descriptor(file_id)
        try:
            while view:
                count = os.preadv(fd, [view], offset)
                if count == 0:
                    raise EOFError(f"extent {file_id} ends before {offset + len(view)}")
                view, offset = view[count:], offset + count
        finally:
            if transient:
                os.close(fd)

    def _descriptor(self, file_id: str) -> tuple[int, bool]:
        fd = self._fds.get(file_id)
        if fd is not None:
            return fd, False
        with self._lock:
            fd = self._fds.get(file_id)
            if fd is not None:
                return fd, False
            fd = os.open(extent_path(self._directory, file_id), os.O_RDONLY)
            if len(self._fds) >= self._open_files_max:
                return fd, True
            self._fds[file_id] = fd
            return fd, False

    def sweep(self, live: set[str]) -> int:
        """Remove what a crash left: unfinished files and extents no object refers to. Returns how many."""
        removed = 0
        for leftover in (self._directory / "tmp").iterdir():
            leftover.unlink()
            removed += 1
        for path in (self._directory / "extents").glob("*/*"):
            if path.name not in live:
                path.unlink()
                removed += 1
        return removed

    def close(self) -> None:
        """Close every descriptor."""
        with self._lock:
            for fd in self._fds.values():
                os.close(fd)
            self._fds.clear()


class PinSet:
    """The files one reader keeps readable.

    `with pins.planning(): read the index; pins.keep(...)` is one step as `dispose` sees it, so what the index named is
    pinned before a later overwrite or delete can unlink it. Pins taken are given back by `release`.
    """

    def __init__(self, files: ExtentFiles) -> None:
        self._files = files
        self._file_ids: list[str] = []

    def planning(self) -> threading.Lock:
        """The lock to hold from before the index read until `keep` returns."""
        return self._files._planning

    def keep(self, extents: Iterable[Extent | None]) -> None:
        """Pin the files of these extents."""
        file_ids = [extent.file_id for extent in extents if extent is not None]
        self._files.pin(file_ids)
        self._file_ids.extend(file_ids)

    def release(self) -> None:
        """Give every pin back."""
        file_ids, self._file_ids = self._file_ids, []
        self._files.unpin(file_ids)


def disk_error(error: OSError, what: str) -> ServerError:
    """The answer for an operating-system error on the data directory."""
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return ServerError(ErrorCode.SLOW_DOWN, "too many files are open", retryable=True)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return ServerError(ErrorCode.INSUFFICIENT_STORAGE, f"no space left while {what}", retryable=True)
    return ServerError(ErrorCode.INTERNAL_ERROR, f"the disk failed while {what}", retryable=True)
