"""The chunks that were removed lately, in a file from one run of the server to the next."""

from __future__ import annotations

import logging
import os
import threading

from objectcache.adapters.beneath import Beneath
from storage_server.home.rules.removed_chunks import RemovedChunks

BYTES_MAX = 256 << 20
"""REMOVED_MAX chunks with the longest keys, twice."""
RUNNING = b"running"
"""The file says so while the server runs: after a crash, or a run without remote DRAM, no copy of before it is
believed.
"""
CLOCK_AHEAD_S = 60.0
"""The start says so when the clock has been set back by more."""
_log = logging.getLogger(__name__)


class RemovedFile:
    """`file` has the chunks that `removed` knew when the server was stopped. Calls block."""

    def __init__(self, file: Beneath) -> None:
        self._file = file
        self._lock = threading.Lock()

    def take(self, removed: RemovedChunks, now_s: float) -> None:
        """Read the file of the run before into `removed`. From now on it has nothing to read until `keep`."""
        with self._lock:
            try:
                removed.load(self._file.read(BYTES_MAX), now_s)
            except FileNotFoundError:
                pass
            except (OSError, ValueError) as error:
                _log.warning("remote DRAM: no copy of before this start is used: %s", error)
                removed.before_s = now_s
            if removed.last_s > now_s + CLOCK_AHEAD_S:
                _log.warning(
                    "remote DRAM: the clock was %.0f s ahead when chunks were removed: no copies of them until then",
                    removed.last_s - now_s,
                )
            self._mark()

    def doubt(self) -> None:
        """Note that this run knows of no removal, so that the next one believes no copy of before it."""
        with self._lock:
            self._mark()

    def keep(self, removed: RemovedChunks, now_s: float) -> None:
        """Write them down: the server is stopped."""
        with self._lock:
            try:
                self._file.write(removed.dump(now_s))
            except OSError as error:
                _log.warning("remote DRAM: after a restart no copy of before it is used: %s", error)

    def _mark(self) -> None:
        """Write that the server runs. Where there is no room for that, empty the file, which takes none: the removals
        of the run before must not be read again after this one.
        """
        try:
            self._file.write(RUNNING)
        except OSError as error:
            try:
                with open(self._file.open(os.O_WRONLY | os.O_TRUNC), "wb") as file:
                    os.fsync(file.fileno())
            except OSError:
                _log.warning("remote DRAM: after a restart old copies may be used: %s", error)
