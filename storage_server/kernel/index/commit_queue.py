"""The queue of the committer's thread: changes whose callers wait, and words from any thread."""

from __future__ import annotations

import asyncio
import contextlib
import queue
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from descriptors.errors import ServerError
from storage_server.kernel.data.segments import Pending
from storage_server.kernel.index.transaction import Transaction

BATCH_MAX = 256


@dataclass(slots=True)
class Job:
    """One change, and the caller that waits for it."""

    change: Callable[[Transaction], Any]
    pending: Pending | None
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[Any]
    frees: bool = False
    result: Any = None
    failure: ServerError | None = None
    """Why the change is not to be carried out: its bytes could not be written."""
    error: BaseException | None = None
    is_settled: bool = False

    def settle(self) -> None:
        """Tell the caller, on its loop."""
        if self.future.cancelled():
            return
        if self.error is not None:
            self.future.set_exception(self.error)
        else:
            self.future.set_result(self.result)


@dataclass(slots=True)
class CommitBatch:
    """Changes that are carried out together, and files that may have lost their last row. `wants_sync` where somebody
    waits for space; `is_last` where nothing comes behind it.
    """

    jobs: list[Job] = field(default_factory=list)
    files: set[str] = field(default_factory=set)
    wants_sync: bool = False
    is_last: bool = False


class _Word:
    """In the queue, beside jobs and the names of files."""


_SYNC, _END = _Word(), _Word()


class CommitQueue:
    """A queue from any thread to one."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Job | str | _Word] = queue.SimpleQueue()

    def put(self, job: Job) -> None:
        """Have a change carried out."""
        self._queue.put(job)

    def consider(self, file_id: str) -> None:
        """Have a file looked at."""
        self._queue.put(file_id)

    def sync_soon(self) -> None:
        """Have everything synced."""
        self._queue.put(_SYNC)

    def end(self) -> None:
        """Nothing comes behind this."""
        self._queue.put(_END)

    def take(self, wait_s: float | None) -> CommitBatch:
        """Wait for something, for `wait_s` at most, and take all that has come, BATCH_MAX changes at most."""
        batch = CommitBatch()
        with contextlib.suppress(queue.Empty):
            item = self._queue.get(timeout=wait_s)
            while item is not _END:
                if isinstance(item, Job):
                    batch.jobs.append(item)
                elif isinstance(item, str):
                    batch.files.add(item)
                else:
                    batch.wants_sync = True
                if len(batch.jobs) == BATCH_MAX:
                    return batch
                item = self._queue.get_nowait()
            batch.is_last = True
        return batch


def answer(jobs: list[Job]) -> None:
    """Tell the callers that have not been told, each on its own loop."""
    unsettled = [job for job in jobs if not job.is_settled]
    for job in unsettled:
        job.is_settled = True
        if job.pending is not None:
            job.pending.file.release()
    for loop in {job.loop for job in unsettled}:
        with contextlib.suppress(RuntimeError):  # the loop is closed, so nobody waits any more
            loop.call_soon_threadsafe(_settle, [job for job in unsettled if job.loop is loop])


def _settle(jobs: list[Job]) -> None:
    for job in jobs:
        job.settle()
