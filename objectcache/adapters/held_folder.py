"""A temporary folder that lasts as long as the process that made it, however the process ends.

Its process holds a lock (flock) on it, and the system gives the lock back when the process ends. So a folder whose lock
can be had belongs to nobody any more: the next process that makes a folder removes it.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_OPEN_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@contextmanager
def held_folder(prefix: str, place: Path) -> Iterator[Path]:
    """A new folder in `place` until the block ends; folders with this prefix whose processes have ended are removed.
    Raises OSError.
    """
    _remove_left_ones(prefix, place)
    folder, held = _made(prefix, place)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(held)


def _made(prefix: str, place: Path) -> tuple[Path, int]:
    """A folder, and the descriptor that holds its lock. Until it has the lock, another process may remove it."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=prefix, dir=place))
        with suppress(FileNotFoundError):
            held = os.open(folder, _OPEN_FLAGS)
            fcntl.flock(held, fcntl.LOCK_EX)
            if os.fstat(held).st_nlink:
                return folder, held
            os.close(held)


def _remove_left_ones(prefix: str, place: Path) -> None:
    for folder in place.glob(f"{prefix}*"):
        with suppress(OSError):  # it is somebody's, in use, or just removed by another
            held = os.open(folder, _OPEN_FLAGS)
            try:
                if os.fstat(held).st_uid == os.geteuid():
                    fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder)
            finally:
                os.close(held)
