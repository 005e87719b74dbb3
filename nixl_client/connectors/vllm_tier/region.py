"""The primary tier's memory as a memfd that is made before vLLM would make its file: storage servers on this host may
then fill it, and it goes with the last process that has it, however that ends.

vLLM's processes find the memory by a path in /dev/shm. There a link leads to the memfd of whoever came first; the
others open what it leads to, as they would open the file.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import mmap
import os
import stat
from pathlib import Path

from nixl_client.connectors.vllm_tier.rules.card import CARD_BYTES, EngineCard, parse_card

_log = logging.getLogger(__name__)


class OfferedRegion:
    """The memory of one engine, and the link to it where this process has made it. Behind `rows_bytes` lies a card for
    each of `rank_count` workers.
    """

    def __init__(self, path: Path, rows_bytes: int, rank_count: int) -> None:
        """Make the memory, unless another process of the engine has. Raises PermissionError where another user has put
        something there, OSError where there is not so much memory, or an older file is in the way.
        """
        self._path = path
        self._rows_bytes = rows_bytes
        self._fd = -1
        self._is_ours = False
        size = -(-(rows_bytes + rank_count * CARD_BYTES) // mmap.PAGESIZE) * mmap.PAGESIZE
        if not _is_there(path):
            fd = _memory(size)
            try:
                path.symlink_to(f"/proc/{os.getpid()}/fd/{fd}")
                self._is_ours = True
            except FileExistsError:  # another rank was faster
                os.close(fd)
            except BaseException:
                os.close(fd)
                raise
            else:
                self._fd = fd
        if self._fd < 0:
            self._fd = _opened(path)
        if not is_sealed(self._fd) or os.fstat(self._fd).st_size < size:
            self.close()
            raise FileExistsError(f"{path} is there, and is not this engine's memory")

    def write_card(self, rank: int, card: EngineCard) -> None:
        """Leave a worker's card. Raises ValueError, OSError."""
        os.pwrite(self._fd, card.encode(), self._rows_bytes + rank * CARD_BYTES)

    def cards(self, rank_count: int) -> list[EngineCard | None]:
        """The cards of all workers, None for those that have left none. Raises ValueError for what is no card."""
        places = [self._rows_bytes + rank * CARD_BYTES for rank in range(rank_count)]
        return [parse_card(os.pread(self._fd, CARD_BYTES, place)) for place in places]

    def hide(self) -> None:
        """Remove the link, once all processes of the engine have opened the memory: then nothing is left of it when
        they have ended, however they end.
        """
        with contextlib.suppress(OSError):
            self._path.unlink()
        self._is_ours = False

    def close(self) -> None:
        """Let go of it; who has the memory keeps it."""
        if self._is_ours:
            self.hide()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def is_sealed(fd: int) -> bool:
    """Whether the descriptor is of a memfd that cannot shrink."""
    try:
        return bool(fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK)
    except OSError:
        return False


def _is_there(path: Path) -> bool:
    """Whether there is something at the path that leads somewhere. A link of ours whose process has ended is removed.
    Raises OSError for what belongs to another user.
    """
    try:
        found = path.lstat()
    except FileNotFoundError:
        return False
    if found.st_uid != os.getuid():
        raise PermissionError(f"{path} belongs to another user")
    if stat.S_ISLNK(found.st_mode) and not path.exists():
        _log.info("%s is left from an engine that has ended: it is made anew", path)
        path.unlink(missing_ok=True)
        return False
    return True


def _opened(path: Path) -> int:
    """The memory that another process of the engine has made. Another user may have put something in its place since
    it was looked at. Raises OSError.
    """
    if not _is_there(path):
        raise FileNotFoundError(f"{path} went away")
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    if os.fstat(fd).st_uid != os.getuid():
        os.close(fd)
        raise PermissionError(f"{path} leads to another user's file")
    return fd


def _memory(nbytes: int) -> int:
    """A memfd of so many bytes, all of them in place."""
    fd = os.memfd_create("objectcache-tier", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.posix_fallocate(fd, 0, nbytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    except BaseException:
        os.close(fd)
        raise
    return fd
