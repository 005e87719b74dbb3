"""Journals that have more than others may be kept waiting for, or that answer slowly: they are read beside all others,
a piece in turn. One that hangs keeps no other from its turn.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from descriptors.errors import ObjectCacheError
from storage_server.home.directory.journal import ReadJournal
from storage_server.kernel.data import file_threads
from storage_server.kernel.data.file_threads import FileThreads

LATE_PAUSE_S = 1.0
"""For so long a late journal is left alone that cannot be read on."""
_log = logging.getLogger(__name__)


class LateJournals:
    """The writers whose journals are late. `read_piece` reads a piece of one, carries it out, and takes writers that
    are read to their ends from `writers`; `tell_changes` tells what that has changed. Used on one event loop.
    """

    def __init__(
        self, read_piece: Callable[[str], Awaitable[ReadJournal]], tell_changes: Callable[[], Awaitable[None]]
    ) -> None:
        self._read_piece = read_piece
        self._tell_changes = tell_changes
        self.threads = FileThreads(1, 1)
        self.writers: set[str] = set()
        self._pieces: dict[str, asyncio.Task[bool]] = {}
        """The pieces that are being read, by writers: more than one while files hang."""
        self._is_closed = False
        self._reading: asyncio.Task[None] | None = None

    def add(self, writer: str) -> None:
        """Nobody waits for this writer's journal until it is read to its end."""
        self.writers.add(writer)
        if not self._is_closed and (self._reading is None or self._reading.done()):
            self._reading = asyncio.create_task(self._read())

    async def close(self) -> None:
        """Stop."""
        self._is_closed = True
        running = [*self._pieces.values(), *([] if self._reading is None else [self._reading])]
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running)
        self.threads.close()

    async def _read(self) -> None:
        while self.writers:
            begun_s, pause_s = time.monotonic(), LATE_PAUSE_S
            for writer in sorted(self.writers - self._pieces.keys()):
                piece = self._pieces[writer] = asyncio.create_task(self._has_read(writer))
                await asyncio.wait([piece], timeout=file_threads.HANGS_S)
                if piece.done() and piece.result():
                    pause_s = time.monotonic() - begun_s
            await self._tell_changes()
            await asyncio.sleep(pause_s)

    async def _has_read(self, writer: str) -> bool:
        """Read a piece, and whether there was one."""
        try:
            return bool((await self._read_piece(writer)).pieces)
        except ObjectCacheError as error:
            _log.warning("the journal of %s: %s", writer, error)
        except Exception:
            _log.exception("the journal of %s could not be read; it is tried again", writer)
        finally:
            del self._pieces[writer]
        return False
