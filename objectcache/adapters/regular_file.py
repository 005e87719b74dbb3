"""Files by paths at which somebody may have put something else: a FIFO keeps whoever opens it waiting for ever."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path


def read_regular(path: Path, bytes_max: int) -> bytes:
    """The bytes of a file, or of the one that a link leads to. Raises OSError, also for what is no file, and for a file
    of more than `bytes_max`.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(fd, "rb") as file:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "it is no file", str(path))
        said = file.read(bytes_max + 1)
    if len(said) > bytes_max:
        raise OSError(errno.EFBIG, f"it has more than {bytes_max} bytes", str(path))
    return said
