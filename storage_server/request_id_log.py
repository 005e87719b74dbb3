"""The log of used request ids: two files that outlive the process. A signature stays valid for some time, so a server
that forgot its ids at a restart would carry out a replayed request.

A line is appended for each id before its request begins. The line is not synced: a power cut ends every agent, too, and
with it all memory that a replay could write to.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

LINE_BYTES_MAX = 1024
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class UsedId:
    """An access key's request id, and the time of day `unix_s` at which it was used."""

    access_key: str
    request_id: str
    unix_s: float


class RequestIdLog:
    """Files `request-ids.0` and `.1` of a directory. When the newer one spans `keep_s`, the older one
    is started anew.
    """

    def __init__(self, directory: Path, keep_s: float) -> None:
        self._paths = [directory / "request-ids.0", directory / "request-ids.1"]
        self._keep_s = keep_s
        self._current = 0
        self._since_s = 0.0
        self._fd = -1

    def load(self, unix_s: float) -> list[UsedId]:
        """The ids that may still be replayed at `unix_s`. Opens the log for `append`."""
        found = [list(_read(path)) for path in self._paths]
        newest = [max((used.unix_s for used in ids), default=0.0) for ids in found]
        self._current = int(newest[1] > newest[0])
        self._since_s = min((used.unix_s for used in found[self._current]), default=unix_s)
        self._open(os.O_APPEND)
        return [used for ids in found for used in ids if used.unix_s > unix_s - self._keep_s]

    def append(self, used: UsedId) -> None:
        """Write an id to the log. A disk error is logged only: the ids are then forgotten at a restart."""
        if self._fd < 0:
            return
        if not 0 <= used.unix_s - self._since_s <= self._keep_s:
            self._current, self._since_s = 1 - self._current, used.unix_s
            self._open(os.O_TRUNC)
        line = json.dumps([used.unix_s, used.access_key, used.request_id]) + "\n"
        with contextlib.suppress(OSError):
            os.write(self._fd, line.encode())

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _open(self, how: int) -> None:
        self.close()
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | how
            self._fd = os.open(self._paths[self._current], flags, 0o600)
        except OSError as error:
            _log.warning("request ids are not remembered across a restart: %s", error)


def _read(path: Path) -> Iterator[UsedId]:
    """The ids of every whole line; a torn line is passed over."""
    with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
        while line := file.readline(LINE_BYTES_MAX):
            with contextlib.suppress(ValueError, TypeError):
                unix_s, access_key, request_id = json.loads(line)
                yield UsedId(str(access_key), str(request_id), float(unix_s))
