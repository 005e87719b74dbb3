"""The log of used request ids: two files that outlive the process. A signature stays valid for some time, so a server
that forgot its ids at a restart would carry out a replayed request.

A line is appended for each id before its request begins. The line is not synced: a power cut ends every agent, too, and
with it all memory that a replay could write to. A file begins with the secret of the fingerprints
(storage_server.agents.rules.used_ids), which is the same in both.

    secret 00112233445566778899aabbccddeeff
    1764201600.123 0123456789abcdef
"""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import os
import secrets
from array import array
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from objectcache.adapters.beneath import Beneath
from storage_server.agents.rules.used_ids import SECRET_BYTES

LINE_BYTES_MAX = 128
LINES_MAX = 1 << 20
"""A start goes on with a file of so many ids at most, where the other one has none that counts."""
WARN_EVERY_S = 60.0
_log = logging.getLogger(__name__)


class _Used:
    """The secret of a file, fingerprints, and the time of day in Unix seconds at which each was used."""

    def __init__(self) -> None:
        self.secret: bytes | None = None
        self.fingerprints = array("Q")
        self.at_s = array("d")


class RequestIdLog:
    """Files `used-ids.0` and `.1` of a directory. When the newer one has been written to for `keep_s`, the older one is
    started anew. That time is steady: a clock that is set must not end a file whose ids still count.
    """

    def __init__(self, directory: Path, keep_s: float) -> None:
        self._places = [Beneath(directory, f"used-ids.{number}") for number in range(2)]
        self._keep_s = keep_s
        self._secret = secrets.token_bytes(SECRET_BYTES)
        self._current = 0
        self._began_s = -math.inf
        """When this process began to write to the current file, by the steady clock."""
        self._is_loaded = False
        self._fd = -1
        self._flags = os.O_APPEND
        self._is_torn = False
        self._lost_count = 0
        self._warned_s = -math.inf

    def load(self, unix_s: float, steady_s: float) -> tuple[bytes, Iterator[tuple[int, float]]]:
        """The secret, and the ids that may still be replayed at `unix_s`: fingerprints and the times of day at which
        they were used, about in order. Opens the log for `append`.
        """
        found = [_read(place) for place in self._places]
        newest = [max(used.at_s, default=-math.inf) for used in found]
        self._current = int(newest[1] > newest[0])
        used, other = found[self._current], found[1 - self._current]
        if used.secret is not None and used.at_s:
            self._secret = used.secret
            is_over = max(other.at_s, default=-math.inf) <= unix_s - self._keep_s
            if len(used.at_s) > LINES_MAX and is_over:
                # a server that is restarted more often than in `keep_s` would write to one file for ever
                self._current, self._flags = 1 - self._current, os.O_TRUNC
            else:
                self._is_torn = True  # its last line may have no end
            self._began_s = steady_s
        self._is_loaded = True
        try:
            self._open_for(steady_s)
        except OSError as error:
            self._warn(error, steady_s)
        oldest_s = unix_s - self._keep_s
        known = [each for each in (other, used) if each.secret == self._secret]
        pairs = chain.from_iterable(zip(each.fingerprints, each.at_s, strict=True) for each in known)
        return self._secret, (pair for pair in pairs if pair[1] > oldest_s)

    def append(self, fingerprint: int, unix_s: float, steady_s: float) -> None:
        """Write an id to the log. After a disk error the id is forgotten at a restart, and a warning says so, at most
        once in WARN_EVERY_S.
        """
        if not self._is_loaded:
            return
        try:
            self._open_for(steady_s)
            self._write(f"{unix_s:.3f} {fingerprint:016x}\n".encode())
        except OSError as error:
            self._lost_count += 1
            self._warn(error, steady_s)

    def close(self) -> None:
        self._is_loaded = False
        self._shut()

    def _open_for(self, steady_s: float) -> None:
        """Have a file open that may be written to now."""
        if steady_s - self._began_s > self._keep_s:
            self._shut()
            self._current, self._began_s, self._flags = 1 - self._current, steady_s, os.O_TRUNC
        if self._fd < 0:
            self._fd = self._places[self._current].open(os.O_WRONLY | os.O_CREAT | os.O_APPEND | self._flags)
            if self._flags == os.O_TRUNC:
                self._is_torn = False
                try:
                    self._write(f"secret {self._secret.hex()}\n".encode())
                except OSError:
                    self._shut()
                    raise
            self._flags = os.O_APPEND

    def _write(self, line: bytes) -> None:
        if self._is_torn:
            line = b"\n" + line  # so that a torn line does not spoil this one
        written = os.write(self._fd, line)
        self._is_torn = written < len(line)
        if self._is_torn:
            raise OSError(errno.ENOSPC, f"{written} of {len(line)} bytes were written")

    def _shut(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _warn(self, error: OSError, steady_s: float) -> None:
        if steady_s - self._warned_s < WARN_EVERY_S:
            return
        self._warned_s = steady_s
        _log.warning("request ids are not remembered across a restart (%d so far): %s", self._lost_count, error)


def _read(place: Beneath) -> _Used:
    """Read every whole line of a file. A torn line is passed over."""
    used = _Used()
    with contextlib.suppress(FileNotFoundError), open(place.open(os.O_RDONLY), "rb") as file:
        while line := file.readline(LINE_BYTES_MAX):
            with contextlib.suppress(ValueError, OverflowError):
                first, second = line.split()
                if first == b"secret":
                    secret = bytes.fromhex(second.decode())
                    used.secret = secret if len(secret) == SECRET_BYTES else None
                elif len(second) == 16 and line.endswith(b"\n") and math.isfinite(at_s := float(first)):
                    used.fingerprints.append(int(second, 16))
                    used.at_s.append(at_s)
    return used
