"""The queue of the committer's thread: changes whose callers wait, and words from any thread.

Callers take turns, each with its own changes in their order, so one caller's many changes do not stand in front of
another's one.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
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
    caller: str = ""
    result: Any = None
    failure: ServerError | None = None
    """Why the change is not to be carried out: its bytes could not be written."""
    error: BaseException | None = None
    is_written: bool = False
    """Whether its bytes were written, or could not be."""
    is_left: bool = False
    """Whether the transaction before it was long enough, so that it waits for another one."""
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
    waits for space.
    """

    jobs: list[Job] = field(default_factory=list)
    files: set[str] = field(default_factory=set)
    wants_sync: bool = False


class _Word:
    """In the queue, beside jobs and the names of files."""


_SYNC, _END = _Word(), _Word()


class CommitQueue:
    """A queue from any thread to one, which takes from it and puts back."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Job | str | _Word] = queue.SimpleQueue()
        self._waiting: OrderedDict[str, deque[Job]] = OrderedDict()
        """By callers: the first one is next."""
        self._is_ended = False

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

    @property
    def is_over(self) -> bool:
        """Whether it was ended, and all that came before was taken."""
        return self._is_ended and not self._waiting

    def take(self, wait_s: float | None) -> CommitBatch:
        """Wait for something, for `wait_s` at most, and take of all that has come BATCH_MAX changes at most."""
        batch = CommitBatch()
        with contextlib.suppress(queue.Empty):
            item = self._queue.get_nowait() if self._waiting or self._is_ended else self._queue.get(timeout=wait_s)
            while True:
                if isinstance(item, Job):
                    self._waiting.setdefault(item.caller, deque()).append(item)
                elif isinstance(item, str):
                    batch.files.add(item)
                elif item is _SYNC:
                    batch.wants_sync = True
                else:
                    self._is_ended = True
                item = self._queue.get_nowait()
        while self._waiting and len(batch.jobs) < BATCH_MAX:
            caller, jobs = self._waiting.popitem(last=False)
            batch.jobs.append(jobs.popleft())
            if jobs:
                self._waiting[caller] = jobs
        return batch

    def put_back(self, jobs: Sequence[Job]) -> None:
        """Have these changes, which were taken last, carried out before all others."""
        for job in reversed(jobs):
            self._waiting.setdefault(job.caller, deque()).appendleft(job)
            self._waiting.move_to_end(job.caller, last=False)


def answer(jobs: Sequence[Job]) -> None:
    """Tell the callers that have not been told, each on its own loop, but for those of changes that are left."""
    unsettled = [job for job in jobs if not (job.is_settled or job.is_left)]
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
