"""Files that a server reads again at SIGHUP, while it serves."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping
from threading import Thread
from typing import Generic, TypeAlias, TypeVar

_S = TypeVar("_S")
Apply: TypeAlias = Callable[[_S], None]
"""Has the server use what was read."""
_log = logging.getLogger(__name__)


class Rereading(Generic[_S]):
    """Reads files in a thread, and has `server` use them on the event loop. A FIFO in a file's place, or a file system
    that hangs, so holds up no request and no stop. `reads` are by the name of what they read. Used on one event loop.
    """

    def __init__(self, server: _S, reads: Mapping[str, Callable[[], Apply[_S]]]) -> None:
        self._server = server
        self._reads = reads
        self._loop = asyncio.get_running_loop()
        self._is_reading = self._is_wanted = False

    def again(self) -> None:
        """Read everything again, and once more after a reading that is under way. Files that cannot be read change
        nothing.
        """
        if self._is_reading:
            self._is_wanted = True
            _log.warning("SIGHUP: files are still being read since the one before")
            return
        self._is_reading = True
        Thread(target=self._read, name="objectcache-reread", daemon=True).start()

    def _read(self) -> None:
        found: dict[str, Apply[_S]] = {}
        for what, read in self._reads.items():
            try:
                found[what] = read()
            except Exception as error:
                _stays(what, error)
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._apply, found)

    def _apply(self, found: Mapping[str, Apply[_S]]) -> None:
        for what, apply in found.items():
            try:
                apply(self._server)
            except Exception as error:
                _stays(what, error)
        self._is_reading, is_wanted, self._is_wanted = False, self._is_wanted, False
        if is_wanted:
            self.again()


def _stays(what: str, error: Exception) -> None:
    _log.error("SIGHUP: %s stay as they were: %s", what, error)
