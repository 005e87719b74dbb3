"""A worker's books of what is to be written: bounded, in order, and void where blocks get other bytes. No clock."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from nixl_client.connectors.vllm.steps import Report, StoreJob


@dataclass(slots=True)
class Entry:
    """A job, when it came, whether its blocks must not be read any more, and whether that has been told."""

    job: StoreJob
    since_s: float
    is_void: bool = False
    is_read: bool = False


class StoreBook:
    """Jobs that wait, the one under way, and requests whose blocks are held for them. Not safe from several threads."""

    def __init__(self, queue_chunks: int, wait_s: float) -> None:
        self._queue_chunks = queue_chunks
        self._wait_s = wait_s
        self._waiting: deque[Entry] = deque()
        self._current: Entry | None = None
        self._unread: dict[str, int] = {}
        self._broken: set[str] = set()
        self._awaited: set[str] = set()
        self._ended: set[str] = set()
        self._ended_last: set[str] = set()
        self._report = Report()
        self._dropped_chunks = 0

    @property
    def waiting_chunks(self) -> int:
        """Chunks that wait."""
        return sum(entry.job.span.chunk_count for entry in self._waiting)

    @property
    def has_waiting(self) -> bool:
        """Whether a job waits."""
        return bool(self._waiting)

    @property
    def is_idle(self) -> bool:
        """Whether nothing waits and nothing is under way."""
        return not self._waiting and self._current is None

    def add(self, job: StoreJob, now_s: float) -> bool:
        """Take a job, or drop it: when too many chunks wait, or when an earlier chunk of its prefix was not written."""
        self._unread[job.request_id] = self._unread.get(job.request_id, 0) + 1
        entry = Entry(job, now_s)
        is_full = self.waiting_chunks + job.span.chunk_count > self._queue_chunks
        if job.request_id in self._broken or is_full:
            self._drop(entry)
            return False
        self._waiting.append(entry)
        return True

    def take(self) -> Entry | None:
        """The next job; `end` must follow, and `end_read` may come before it."""
        if self._current is not None or not self._waiting:
            return None
        self._current = self._waiting.popleft()
        return self._current

    def end_read(self, entry: Entry) -> None:
        """Nothing reads the job's blocks any more."""
        if not entry.is_read:
            entry.is_read = True
            self._note_read(entry.job)

    def end(self, entry: Entry) -> None:
        """The job is over. When blocks of it were void before they were read, its prefix is broken off."""
        self._current = None
        if entry.is_void:
            self.fail(entry.job.request_id)
        self.end_read(entry)
        self._forget_ended()

    def fail(self, request_id: str) -> None:
        """A chunk was not written: write no further chunks of this prefix."""
        self._broken.add(request_id)
        self._drop_waiting(lambda entry: entry.job.request_id == request_id)
        self._forget_ended()

    def void(self, blocks: frozenset[int] | None) -> Entry | None:
        """These blocks, or with None all, get other bytes now: drop the jobs that have not read them. Returns the job
        under way if it is one of them: a read that has begun must end before the bytes change, another must not begin.
        """

        def is_hit(entry: Entry) -> bool:
            return blocks is None or not blocks.isdisjoint(entry.job.span.blocks)

        self._drop_waiting(is_hit)
        entry = self._current
        if entry is None or entry.is_read or not is_hit(entry):
            return None
        entry.is_void = True
        return entry

    def expire(self, now_s: float, is_gathering: bool) -> None:
        """Drop what has waited too long, so that its blocks can be had again; the job under way too, unless it
        `is_gathering` at this moment.
        """
        self._drop_waiting(lambda entry: now_s - entry.since_s > self._wait_s)
        entry = self._current
        if entry is not None and not entry.is_read and not is_gathering and now_s - entry.since_s > self._wait_s:
            entry.is_void = True
            self.end_read(entry)

    def await_free(self, request_ids: Iterable[str]) -> None:
        """These requests have ended; `take_freed` names them once nothing reads their blocks."""
        self._awaited.update(request_ids)

    def take_freed(self) -> set[str]:
        """Requests that have ended and whose blocks nothing reads any more, each once."""
        freed = {request_id for request_id in self._awaited if request_id not in self._unread}
        self._awaited -= freed
        return freed

    def forget(self, request_ids: Iterable[str]) -> None:
        """These requests have ended: what is known of them goes with their last job, which may come in this step."""
        self._ended |= self._ended_last
        self._ended_last = set(request_ids)
        self._forget_ended()

    def take_report(self) -> Report:
        """Jobs read or dropped since the last report."""
        report, self._report = self._report, Report()
        return report

    def take_dropped(self) -> int:
        """Chunks dropped since the last call."""
        dropped, self._dropped_chunks = self._dropped_chunks, 0
        return dropped

    def _drop_waiting(self, is_dropped: Callable[[Entry], bool]) -> None:
        entries, self._waiting = self._waiting, deque()
        for entry in entries:
            if is_dropped(entry) or entry.job.request_id in self._broken:
                self._drop(entry)
            else:
                self._waiting.append(entry)

    def _drop(self, entry: Entry) -> None:
        self._broken.add(entry.job.request_id)
        self._dropped_chunks += entry.job.span.chunk_count
        self.end_read(entry)

    def _note_read(self, job: StoreJob) -> None:
        left = self._unread[job.request_id] - 1
        if left:
            self._unread[job.request_id] = left
        else:
            del self._unread[job.request_id]
        self._report.read_jobs[job.job_id] = 1

    def _forget_ended(self) -> None:
        current = self._current.job.request_id if self._current is not None else ""
        gone = {request_id for request_id in self._ended if request_id not in self._unread and request_id != current}
        self._ended -= gone
        self._broken -= gone
