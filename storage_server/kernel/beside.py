"""Reading a store that another process of this machine writes: the same index, the same immutable files.

In this process an open descriptor is the pin: the writer may delete a file as soon as its index no longer names the
file, and the open file stays readable. If a file is gone before it was opened, the index has changed, so it is asked
again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterable, Sequence
from pathlib import Path

from storage_server.kernel.data.bodies import BodyReader
from storage_server.kernel.data.buffers import BufferShare
from storage_server.kernel.data.disk import Disk
from storage_server.kernel.data.extents import ExtentFiles
from storage_server.kernel.data.file_threads import FileThreads
from storage_server.kernel.index.reader import IndexReader
from storage_server.kernel.reads import Reads
from storage_server.kernel.rules.pins import Location
from storage_server.planning.extent import CorruptExtentError

READ_THREADS = 4
_log = logging.getLogger(__name__)
DELETED_CHECK_INTERVAL_S = 1.0


class FilesBeside(ExtentFiles):
    """Extent files of a store that another process writes. This class never deletes a file."""

    def pin(self, file_ids: Iterable[str]) -> bool:
        wanted = list(file_ids)
        with self._lock:
            self._pins.pin(wanted, only_live=False)
        try:
            for file_id in wanted:
                self.open.held_descriptor(file_id)
        except (CorruptExtentError, OSError) as error:
            self.unpin(wanted)
            if isinstance(error, OSError):
                raise
            return False
        return True

    def pin_locations(self, locations: Sequence[Location]) -> bool:
        return self.pin({file_id for file_id, _ in locations})

    def unpin_locations(self, locations: Sequence[Location]) -> None:
        self.unpin({file_id for file_id, _ in locations})


class StoreBeside:
    """A store that another process writes; `reads` answers the calls that only read. `start` before
    use, `close` after.
    """

    def __init__(self, directory: Path, open_files_max: int, buffer_bytes: int) -> None:
        self._files = FilesBeside(directory, open_files_max, Disk())
        self._index = IndexReader(directory / "index.sqlite3")
        self._threads = FileThreads(READ_THREADS, READ_THREADS)
        self.reads = Reads(
            self._index, self._files, BodyReader(self._files.open, BufferShare(buffer_bytes), self._threads), None
        )
        self._closing: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin to look for deleted files."""
        self._closing = asyncio.create_task(self._close_deleted())

    async def close(self) -> None:
        """Finish running work and close every file."""
        if self._closing is not None:
            self._closing.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._closing
        self._threads.close()
        self._index.close()
        self._files.close()

    async def _close_deleted(self) -> None:
        while True:
            await asyncio.sleep(DELETED_CHECK_INTERVAL_S)
            try:
                self._files.open.close_deleted()
            except OSError:
                _log.exception("deleted files could not be closed")
