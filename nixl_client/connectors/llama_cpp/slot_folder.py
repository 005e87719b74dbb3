"""The folder that llama.cpp's server and the proxy share: files of slots, which one writes and the other reads.

Others may write there, too: the server in a container, for example. A file that is mapped and made shorter by somebody
else ends the process that reads it, and a name that becomes a link between two opens leads to any file of this host. So
a file is opened once, never by a link, and is read and written piece by piece.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import uuid
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from nixl_client.connectors.llama_cpp.rules.slot_file import Bytes
from objectcache.adapters.beneath import Beneath

NAMES_MAX = 65_536
"""A start looks at no more names of the folder."""
FILE_MODE = 0o666
"""The process's umask takes bits away. The server that reads the file may be another user's."""
_OWN = re.compile(r"objectcache-[0-9a-f]*\.slot")
_log = logging.getLogger(__name__)


class SlotFile:
    """A file that is open, of `nbytes` when it was opened. Raises OSError, also where it has become shorter."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._nbytes = os.fstat(fd).st_size

    def __len__(self) -> int:
        return self._nbytes

    def __getitem__(self, place: slice) -> Bytes:
        start, end, _ = place.indices(self._nbytes)
        found = np.empty(max(0, end - start), np.uint8)
        rest = found.data
        while rest:
            count = os.preadv(self._fd, [rest], end - len(rest))
            if not count:
                raise OSError("a slot's file has become shorter while it was read")
            rest = rest[count:]
        return found

    def __setitem__(self, place: slice, data: Bytes) -> None:
        rest = data.data
        end = place.start + len(rest)
        while rest:
            rest = rest[os.pwrite(self._fd, rest, end - len(rest)) :]

    def reserve(self, nbytes: int) -> None:
        """Have room for so many bytes: in a full folder nothing is written in vain."""
        os.posix_fallocate(self._fd, 0, nbytes)
        self._nbytes = nbytes


class SlotFolder:
    """The proxy's own files in the folder. Methods raise OSError where nothing else is said."""

    def __init__(self, folder: Path) -> None:
        self._folder = Beneath(folder)

    def __str__(self) -> str:
        return str(self._folder)

    def clean(self) -> None:
        """Remove the files that a process left which was killed. A name that cannot be removed stays."""
        names, _ = self._folder.first_names(NAMES_MAX)
        for name in filter(_OWN.fullmatch, names):
            self.remove(name)

    def new_name(self) -> str:
        """A name for a file, which nobody can guess."""
        return f"objectcache-{uuid.uuid4().hex}.slot"

    @contextlib.contextmanager
    def read(self, name: str) -> Iterator[SlotFile]:
        """A file, open until the block ends."""
        with _open(self._folder / name, os.O_RDONLY) as file:
            yield file

    @contextlib.contextmanager
    def made(self, name: str) -> Iterator[SlotFile]:
        """A new file, open until the block ends."""
        with _open(self._folder / name, os.O_RDWR | os.O_CREAT | os.O_EXCL) as file:
            yield file

    def remove(self, name: str) -> None:
        """Remove a file, if it is there. Raises nothing: whoever may write the folder can put anything in its place."""
        try:
            (self._folder / name).unlink()
        except FileNotFoundError:
            return
        except OSError as error:
            _log.warning("%s stays in %s: %s", name, self._folder, error)


@contextlib.contextmanager
def _open(file: Beneath, flags: int) -> Iterator[SlotFile]:
    fd = file.open(flags, FILE_MODE)
    try:
        yield SlotFile(fd)
    finally:
        os.close(fd)
