"""Reading a store that another process of this machine writes: the same index, the same immutable files.

Here an open descriptor is the pin: the writer may delete a file as soon as its index no longer names it, and what is
open stays readable. A file that is gone before it could be opened means that the index has changed: it is asked again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Iterable
from pathlib import Path

from storage_server.store.bodies import BodyReader
from storage_server.store.buffers import BufferShare
from storage_server.store.disk import Disk
from storage_server.store.extents import CorruptExtentError, ExtentFiles
from storage_server.store.io_threads import IoThreads
from storage_server.store.reader import IndexReader
from storage_server.store.reads import Reads

IO_THREADS = 4
_log = logging.getLogger(__name__)
DELETED_CHECK_INTERVAL_S = 1.0


class FilesBeside(ExtentFiles):
    """Extent files of another process's store; nothing here deletes one."""

    def pin(self, file_ids: Iterable[str]) -> bool:
        wanted = list(file_ids)
        with self._lock:
            self._pins.update(wanted)
        try:
            for file_id in wanted:
                self.held_descriptor(file_id)
        except (CorruptExtentError, OSError) as error:
            self.unpin(wanted)
            if isinstance(error, OSError):
                raise
            return False
        return True

    def close_deleted(self) -> None:
        """Let go of files that were deleted and that nobody here reads: their space is free only then."""
        with self._lock:
            for file_id in [name for name in self._fds if not self._pins.get(name)]:
                if os.fstat(self._fds[file_id]).st_nlink == 0:
                    os.close(self._fds.pop(file_id))


class StoreBeside:
    """`reads` answers what needs no writing. `start` before use, `close` after."""

    def __init__(self, directory: Path, open_files_max: int, buffer_bytes: int) -> None:
        self._files = FilesBeside(directory, open_files_max, Disk())
        self._index = IndexReader(directory / "index.sqlite3")
        self._io = IoThreads(IO_THREADS)
        self.reads = Reads(self._index, self._files, BodyReader(self._files, BufferShare(buffer_bytes), self._io), None)
        self._closing: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Watch for deleted files."""
        self._closing = asyncio.create_task(self._close_deleted())

    async def close(self) -> None:
        """Finish running work and close every file."""
        if self._closing is not None:
            self._closing.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._closing
        self._io.close()
        self._index.close()
        self._files.close()

    async def _close_deleted(self) -> None:
        while True:
            await asyncio.sleep(DELETED_CHECK_INTERVAL_S)
            try:
                self._files.close_deleted()
            except OSError:
                _log.exception("deleted files could not be let go of")
