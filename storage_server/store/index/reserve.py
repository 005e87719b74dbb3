"""Reserve: disk space that is kept back, so that objects can be deleted from a full disk. A deletion needs space, too,
because it must be written to the index.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

RESERVE_BYTES = 8 << 20


class Reserve:
    """A file of RESERVE_BYTES beside the index. Used by one thread."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / "reserve"
        self.is_gone = True
        self.was_needed = False

    def keep(self) -> None:
        """Allocate the reserve, where the disk has space for it."""
        if not self.is_gone:
            return
        try:
            fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError:
            return
        try:
            os.posix_fallocate(fd, 0, RESERVE_BYTES)
            self.is_gone = self.was_needed = False
        except OSError:
            self._path.unlink(missing_ok=True)
        finally:
            os.close(fd)

    def give_up(self) -> bool:
        """Free the reserve's space until `keep` allocates it again; returns whether there was a reserve."""
        self.is_gone = True
        with contextlib.suppress(OSError):
            self._path.unlink()
            self.was_needed = True
        return self.was_needed
