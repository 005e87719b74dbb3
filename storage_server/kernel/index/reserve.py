"""Reserve: disk space that is kept back, so that objects can be deleted from a full disk. A deletion needs space, too,
because it must be written to the index.
"""

from __future__ import annotations

import contextlib
import os

from objectcache.adapters.beneath import Beneath

RESERVE_BYTES = 8 << 20


class Reserve:
    """A file of RESERVE_BYTES beside the index. Used by one thread."""

    def __init__(self, directory: Beneath) -> None:
        self._place = directory / "reserve"
        self.is_gone = True
        self.was_needed = False

    def keep(self) -> None:
        """Allocate the reserve, where the disk has space for it."""
        if not self.is_gone:
            return
        try:
            fd = self._place.open(os.O_WRONLY | os.O_CREAT)
        except OSError:
            return
        try:
            os.posix_fallocate(fd, 0, RESERVE_BYTES)
            self.is_gone = self.was_needed = False
        except OSError:
            with contextlib.suppress(OSError):
                self._place.unlink()
        finally:
            os.close(fd)

    def give_up(self) -> bool:
        """Free the reserve's space until `keep` allocates it again; returns whether there was a reserve."""
        self.is_gone = True
        with contextlib.suppress(OSError):
            self._place.unlink()
            self.was_needed = True
        return self.was_needed
