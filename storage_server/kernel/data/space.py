"""The bytes that a data directory takes, and the bound on them.

Counted is what the file system has allocated: the files of extents, each from the moment its space is reserved until
the space is given back, and all other files, which are measured after each commit where there is a bound.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from pathlib import Path

from descriptors.units import MIB
from storage_server.planning.extent import aligned

ROOM_BYTES = 16 * MIB
"""The index and its log may grow by so much between two measurements, besides their part of the bound."""
ROOM_FRACTION = 1 / 256
"""The index of a full directory grows with the bound: a chunk's row has 4 bytes for each 16 KiB."""
BLOCK_UNIT_BYTES = 512
OFFERED_FRACTION = 0.8
"""A cache that has no size takes this fraction of a file system: others write there, too."""


class Space:
    """Methods may be called from any thread."""

    def __init__(
        self, directory: Path, bound_bytes: int | None, free_bytes: Callable[[Path], int] | None = None
    ) -> None:
        self._directory = directory
        self._free_bytes = free_bytes
        self._is_derived = False
        self._lock = threading.Lock()
        self._of_files: Counter[str] = Counter()
        self._dying: Counter[str] = Counter()
        self._extent_bytes = 0
        self._dying_bytes = 0
        self._other_bytes = 0
        self._aside_bytes = 0
        self._folders = [directory]
        self.bound_bytes = bound_bytes
        self.freed: Callable[[], None] = lambda: None
        """Called when there may be more room."""

    def derive_bound(self) -> None:
        """Bound what has no bound by OFFERED_FRACTION of what the file system offers, which is what the files take now
        and what is free beside them. Bytes that others write there count from the next commit on.
        """
        if self.bound_bytes is None and self._free_bytes is not None:
            self._is_derived = True
            self._derive()

    def count_too(self, folder: Path) -> None:
        """Measure the files of this folder, too: somebody else writes there. Call it before `load`."""
        self._folders.append(folder)

    @property
    def used_bytes(self) -> int:
        """The bytes that all files take now."""
        return self._extent_bytes + self._other_bytes

    @property
    def extent_bytes(self) -> int:
        """The bytes that extents take now."""
        return self._extent_bytes

    @property
    def dying_bytes(self) -> int:
        """The bytes that are about to be given back."""
        return self._dying_bytes

    @property
    def kept_bytes(self) -> int:
        """The bytes that extents take, without the locations that are about to be given back."""
        return self._extent_bytes - self._dying_bytes

    @property
    def extent_bytes_max(self) -> int | None:
        """How many bytes extents may take, beside all other files and what these may grow by; None for no bound."""
        if self.bound_bytes is None:
            return None
        room_bytes = ROOM_BYTES + int(ROOM_FRACTION * self.bound_bytes)
        return max(0, self.bound_bytes - room_bytes - self._other_bytes)

    @property
    def has_index_room(self) -> bool:
        """Whether the index may grow. Objects without bytes, and changes of rows, take space there alone."""
        return self.bound_bytes is None or self.used_bytes + ROOM_BYTES // 2 <= self.bound_bytes

    def take(self, file_id: str, nbytes: int) -> None:
        """Count space in a file that is reserved for a body."""
        with self._lock:
            self._of_files[file_id] += aligned(nbytes)
            self._extent_bytes += aligned(nbytes)

    def doom(self, locations: Iterable[tuple[str, int, int]]) -> None:
        """Note that no row names these locations (file, offset, bytes) any more: they are given back as soon as nobody
        can be reading them.
        """
        with self._lock:
            for file_id, _, nbytes in locations:
                self._dying[file_id] += aligned(nbytes)
                self._dying_bytes += aligned(nbytes)

    def doom_file(self, file_id: str) -> None:
        """Note that a file is about to be deleted."""
        with self._lock:
            more = self._of_files.get(file_id, 0) - self._dying.get(file_id, 0)
            if more > 0:
                self._dying[file_id] += more
                self._dying_bytes += more

    def give_back(self, file_id: str, nbytes: int) -> None:
        """Note that the file system has got these bytes of a file back."""
        with self._lock:
            given = min(aligned(nbytes), self._of_files[file_id])
            self._of_files[file_id] -= given
            self._extent_bytes -= given
            self._survive(file_id, aligned(nbytes))
        self.freed()

    def forget(self, file_id: str) -> None:
        """Note that a file was deleted."""
        with self._lock:
            self._extent_bytes -= self._of_files.pop(file_id, 0)
            self._survive(file_id, self._dying[file_id])
        self.freed()

    def revive(self, file_id: str, nbytes: int | None = None) -> None:
        """Note that so many of a file's doomed bytes (None: all) stay for nobody knows how long: a reader has the file
        pinned, or other rows name it again.
        """
        with self._lock:
            self._survive(file_id, self._dying[file_id] if nbytes is None else aligned(nbytes))

    def load(self, extents: Collection[Path]) -> None:
        """Count the files that a start has found; `extents` are those that extents may name."""
        of_files: Counter[str] = Counter()
        aside_bytes = 0
        known = frozenset(extents)
        for folder, _, names in os.walk(self._directory):
            if Path(folder) in self._folders:
                continue
            for path in (Path(folder, name) for name in names):
                if path in known:
                    of_files[path.name] = _allocated(path)
                else:
                    aside_bytes += _allocated(path)
        with self._lock:
            self._of_files, self._extent_bytes, self._aside_bytes = of_files, of_files.total(), aside_bytes
        self.measure()

    def measure(self) -> None:
        """Count the files beside the directories."""
        total_bytes = self._aside_bytes
        for folder in self._folders:
            with suppress(FileNotFoundError), os.scandir(folder) as entries:
                for entry in entries:
                    with suppress(FileNotFoundError):
                        if not entry.is_dir(follow_symlinks=False):
                            total_bytes += entry.stat(follow_symlinks=False).st_blocks * BLOCK_UNIT_BYTES
        self._other_bytes = total_bytes
        if self._is_derived:
            self._derive()

    def _derive(self) -> None:
        assert self._free_bytes is not None
        with suppress(OSError):
            self.bound_bytes = int(OFFERED_FRACTION * (self.used_bytes + self._free_bytes(self._directory)))

    def _survive(self, file_id: str, nbytes: int) -> None:
        fewer = min(nbytes, self._dying[file_id])
        self._dying[file_id] -= fewer
        self._dying_bytes -= fewer
        if not self._dying[file_id]:
            del self._dying[file_id]


def _allocated(path: Path) -> int:
    with suppress(OSError):
        return path.lstat().st_blocks * BLOCK_UNIT_BYTES
    return 0
