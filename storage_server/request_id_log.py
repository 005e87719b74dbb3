"""The log of used request ids: two files that outlive the process. A signature stays valid for some time, so a server
that forgot its ids at a restart would carry out a replayed request.

A line is appended for each id before its request begins. The line is not synced: a power cut ends every agent, too, and
with it all memory that a replay could write to.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from adapters.beneath import Beneath

LINE_BYTES_MAX = 1024
WARN_EVERY_S = 60.0
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
        self._places = [Beneath(directory, f"request-ids.{number}") for number in range(2)]
        self._keep_s = keep_s
        self._current = 0
        self._since_s = 0.0
        self._is_loaded = False
        self._fd = -1
        self._flags = os.O_APPEND
        self._is_torn = False
        self._lost_count = 0
        self._warned_s = -math.inf

    def load(self, unix_s: float) -> list[UsedId]:
        """The ids that may still be replayed at `unix_s`. Opens the log for `append`."""
        found = [list(_read(place)) for place in self._places]
        newest = [max((used.unix_s for used in ids), default=0.0) for ids in found]
        self._current = int(newest[1] > newest[0])
        self._since_s = min((used.unix_s for used in found[self._current]), default=unix_s)
        self._is_loaded = True
        try:
            self._open()
        except OSError as error:
            self._warn(error, unix_s)
        return [used for ids in found for used in ids if used.unix_s > unix_s - self._keep_s]

    def append(self, used: UsedId) -> None:
        """Write an id to the log. After a disk error the id is forgotten at a restart, and a warning says so, at most
        once in WARN_EVERY_S.
        """
        if not self._is_loaded:
            return
        try:
            self._write(used)
        except OSError as error:
            self._lost_count += 1
            self._warn(error, used.unix_s)

    def close(self) -> None:
        self._is_loaded = False
        self._shut()

    def _write(self, used: UsedId) -> None:
        if not 0 <= used.unix_s - self._since_s <= self._keep_s:
            self._current, self._since_s, self._flags = 1 - self._current, used.unix_s, os.O_TRUNC
            self._shut()
        if self._fd < 0:
            self._open()
        line = json.dumps([used.unix_s, used.access_key, used.request_id]).encode() + b"\n"
        if self._is_torn:
            line = b"\n" + line  # so that a torn line does not spoil this one
        written = os.write(self._fd, line)
        self._is_torn = written < len(line)
        if self._is_torn:
            raise OSError(errno.ENOSPC, f"{written} of {len(line)} bytes were written")

    def _open(self) -> None:
        self._fd = self._places[self._current].open(os.O_WRONLY | os.O_CREAT | os.O_APPEND | self._flags)
        self._flags = os.O_APPEND

    def _shut(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _warn(self, error: OSError, unix_s: float) -> None:
        if 0 <= unix_s - self._warned_s < WARN_EVERY_S:
            return
        self._warned_s = unix_s
        _log.warning("request ids are not remembered across a restart (%d so far): %s", self._lost_count, error)


def _read(place: Beneath) -> Iterator[UsedId]:
    """The ids of every whole line; a torn line is passed over."""
    with contextlib.suppress(FileNotFoundError), open(place.open(os.O_RDONLY), "rb") as file:
        while line := file.readline(LINE_BYTES_MAX):
            with contextlib.suppress(ValueError, TypeError):
                unix_s, access_key, request_id = json.loads(line)
                yield UsedId(str(access_key), str(request_id), float(unix_s))
