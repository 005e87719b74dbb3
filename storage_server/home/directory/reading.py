"""Reads of a shared directory straight into memory: each has a thread, and all together keep to a rate."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

from descriptors.errors import ErrorCode, ServerError
from objectcache.adapters.threads import finished
from storage_server.home.directory.rules.records import writer_of
from storage_server.home.fetch.bulk_reads import Into
from storage_server.home.rules.refusals import unreachable
from storage_server.kernel.data.file_threads import FileThreads
from storage_server.kernel.data.open_files import OpenFiles
from storage_server.kernel.data.replaceable_threads import CallProgress
from storage_server.planning.extent import CorruptExtentError, Extent, MissingFileError, in_one_file, read_object

BURST_S = 0.1
"""So much of a second's bytes may be read at once."""
WRITER_FRACTION = 0.25
"""Files of one server hold no more than this part of the threads: all of them may hang."""


class Rate:
    """At most `bytes_per_s` over any time longer than BURST_S; None for no limit. Used by any thread."""

    def __init__(self, bytes_per_s: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._bytes_per_s = bytes_per_s
        self._clock = clock
        self._lock = threading.Lock()
        self._free_at_s = float("-inf")

    def wait_s(self, nbytes: int) -> float:
        """Take so many bytes; how long to wait before they are read."""
        if self._bytes_per_s is None:
            return 0.0
        with self._lock:
            now_s = self._clock()
            begin_s = max(self._free_at_s, now_s - BURST_S)
            self._free_at_s = begin_s + nbytes / self._bytes_per_s
            return max(0.0, begin_s - now_s)


class SharedReads:
    """Reads of `files`, in at most `threads` threads. `read` is called on an event loop."""

    def __init__(self, files: OpenFiles, threads: int, bytes_per_s: float | None) -> None:
        self._files = files
        self._rate = Rate(bytes_per_s)
        self._threads = FileThreads(threads, max(1, int(WRITER_FRACTION * threads)), writer_of)
        self.failed_count = 0
        """How many reads the file system failed."""

    def read(self, extents: Sequence[Extent], start: int, into: Into, note_damage: Callable[[], None]) -> SharedRead:
        """Begin to read an object's bytes from `start` on. `note_damage` is called, in the reading thread, where they
        are not what was stored.
        """

        def in_file(at: int, nbytes: int) -> tuple[str, int]:
            return in_one_file(extents, start + at, nbytes)

        def read_piece(at: int, view: memoryview) -> None:
            try:
                read_object(self._files.read_into, extents, start + at, view)
            except MissingFileError as error:
                note_damage()
                raise ServerError(ErrorCode.INTERNAL_ERROR, "the object's file is gone", retryable=True) from error
            except CorruptExtentError as error:
                note_damage()
                problem = "the stored bytes fail their checksum"
                raise ServerError(ErrorCode.INTERNAL_ERROR, problem, retryable=True) from error
            except OSError as error:
                self.failed_count += 1
                raise unreachable(error.strerror or str(error)) from error

        return SharedRead(into, read_piece, in_file, self._rate, self._threads)

    def close(self) -> None:
        """Wait for the threads."""
        self._threads.close()


class SharedRead:
    """One read under way. `body` says when all of it lies there, and may raise ServerError. `end` it before its memory
    is used for anything else.
    """

    def __init__(
        self,
        into: Into,
        read_piece: Callable[[int, memoryview], None],
        in_one_file: Callable[[int, int], tuple[str, int]],
        rate: Rate,
        threads: FileThreads,
    ) -> None:
        self._into = into
        self._read_piece = read_piece
        self._in_one_file = in_one_file
        self._rate = rate
        self._threads = threads
        self._next_step = into.first_bytes
        self._progress = CallProgress()
        self._is_ended = False
        self.body: asyncio.Future[None] = asyncio.get_running_loop().create_task(self._read())
        self.body.add_done_callback(lambda body: body.cancelled() or body.exception())

    async def end(self) -> None:
        """Break the read off where it has not ended. On return no thread writes into its memory."""
        self._is_ended = True
        self.body.cancel()  # it may wait for its turn
        await finished(self.body)

    async def _read(self) -> None:
        """Read the bytes of one file after the other."""
        at, nbytes = 0, len(self._into.view)
        while at < nbytes:
            file_id, in_file = self._in_one_file(at, nbytes - at)
            await self._threads.run_on((file_id,), partial(self._run, at, at + in_file), self._progress)
            at += in_file

    def _run(self, at: int, file_end: int) -> None:
        view = self._into.view
        while at < file_end:
            if self._is_ended:
                raise unreachable("the read was broken off")
            end = min(self._next_step, file_end)
            pause_s = self._rate.wait_s(end - at)
            self._progress.note(pause_s)  # who waits for the rate does not hang
            time.sleep(pause_s)
            self._read_piece(at, view[at:end])
            at = end
            if at == self._next_step or at == len(view):
                self._next_step += self._into.step_bytes
                self._into.on_step(at)
