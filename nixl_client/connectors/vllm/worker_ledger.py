"""A worker's ledger of what is to be written: bounded, in order, and void where blocks get other bytes.

Each method is an event, and returns instructions for the worker, in the order in which they are to be carried out.
Pure: time is an argument.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TypeAlias

from nixl_client.connectors.vllm.steps import StoreJob


@dataclass(frozen=True, slots=True)
class WriteJob:
    """Read the job's chunks out of their blocks and store them. `end` or `fail` must follow."""

    job: StoreJob


@dataclass(frozen=True, slots=True)
class StopReading:
    """The blocks of the job under way are about to get other bytes: begin no further read of them, and let a read that
    has begun end first.
    """

    job_id: int


@dataclass(frozen=True, slots=True)
class CountDropped:
    """So many chunks will not be written."""

    chunk_count: int


@dataclass(frozen=True, slots=True)
class TellRead:
    """Tell the scheduler that nothing reads the job's blocks any more."""

    job_id: int


@dataclass(frozen=True, slots=True)
class FreeBlocks:
    """Tell the engine that nothing reads the blocks of this ended request any more."""

    request_id: str


Instruction: TypeAlias = WriteJob | StopReading | CountDropped | TellRead | FreeBlocks


@dataclass(slots=True)
class _Entry:
    """A job, when it came, whether its blocks must not be read any more, and whether their reading is over."""

    job: StoreJob
    since_s: float
    is_void: bool = False
    is_read: bool = False


@dataclass(slots=True)
class Outbox:
    """The worker's results, until they are asked for: requests whose blocks are free, jobs that nothing reads any more,
    and chunks that were dropped.
    """

    freed: set[str] = field(default_factory=set)
    read_jobs: dict[int, int] = field(default_factory=dict)
    dropped_chunks: int = 0

    def put(self, instructions: Iterable[Instruction]) -> None:
        """Note what these instructions have the worker say."""
        for instruction in instructions:
            match instruction:
                case TellRead():
                    self.read_jobs[instruction.job_id] = 1
                case FreeBlocks():
                    self.freed.add(instruction.request_id)
                case CountDropped():
                    self.dropped_chunks += instruction.chunk_count


class WorkerLedger:
    """Jobs that wait, the job under way, and requests whose blocks are held for them. At most `queue_chunks` chunks
    wait, each at most `wait_s`. Not safe from several threads.
    """

    def __init__(self, queue_chunks: int, wait_s: float) -> None:
        self._queue_chunks = queue_chunks
        self._wait_s = wait_s
        self._waiting: deque[_Entry] = deque()
        self._current: _Entry | None = None
        self._unread: dict[str, int] = {}
        self._broken: set[str] = set()
        self._awaited: set[str] = set()
        self._ended: set[str] = set()
        self._ended_last: set[str] = set()

    @property
    def waiting_chunks(self) -> int:
        """Chunks that wait."""
        return sum(entry.job.chunk_range.chunk_count for entry in self._waiting)

    @property
    def has_waiting(self) -> bool:
        """Whether a job waits."""
        return bool(self._waiting)

    @property
    def is_idle(self) -> bool:
        """Whether nothing waits and nothing is under way."""
        return not self._waiting and self._current is None

    def may_read(self, job_id: int) -> bool:
        """Whether the blocks of this job, if it is the one under way, still hold its chunks."""
        entry = self._current
        return entry is not None and entry.job.job_id == job_id and not entry.is_void

    def add(self, job: StoreJob, now_s: float) -> list[Instruction]:
        """A job came. It is dropped when too many chunks wait, or when an earlier chunk of its prefix was not
        written.
        """
        self._unread[job.request_id] = self._unread.get(job.request_id, 0) + 1
        entry = _Entry(job, now_s)
        is_full = self.waiting_chunks + job.chunk_range.chunk_count > self._queue_chunks
        if job.request_id in self._broken or is_full:
            return self._drop(entry)
        self._waiting.append(entry)
        return []

    def refuse(self, job: StoreJob, now_s: float) -> list[Instruction]:
        """A job came that must not be written, and no further chunk of its prefix either."""
        self._unread[job.request_id] = self._unread.get(job.request_id, 0) + 1
        self._broken.add(job.request_id)
        return self._end_read(_Entry(job, now_s))

    def begin_next(self) -> list[Instruction]:
        """The writer is free."""
        if self._current is not None or not self._waiting:
            return []
        self._current = self._waiting.popleft()
        return [WriteJob(self._current.job)]

    def end_read(self, job_id: int) -> list[Instruction]:
        """All chunks of the job under way have been read out of its blocks."""
        return self._end_read(self._under_way(job_id))

    def end(self, job_id: int) -> list[Instruction]:
        """The job under way is over. When its blocks became void before they were read, no further chunk of its prefix
        is written.
        """
        entry = self._under_way(job_id)
        self._current = None
        instructions: list[Instruction] = []
        if entry.is_void:
            self._broken.add(entry.job.request_id)
            instructions += self._drop_waiting(lambda other: other.job.request_id == entry.job.request_id)
        instructions += self._end_read(entry)
        self._forget_ended()
        return instructions

    def fail(self, job_id: int) -> list[Instruction]:
        """The job under way failed: no further chunk of its prefix is written."""
        self._under_way(job_id).is_void = True
        return self.end(job_id)

    def void(self, blocks: frozenset[int] | None) -> list[Instruction]:
        """These blocks, or with None all, get other bytes now: jobs that have not read them are dropped."""

        def is_hit(entry: _Entry) -> bool:
            return blocks is None or not blocks.isdisjoint(entry.job.chunk_range.blocks)

        instructions = self._drop_waiting(is_hit)
        entry = self._current
        if entry is not None and not entry.is_read and is_hit(entry):
            entry.is_void = True
            instructions.append(StopReading(entry.job.job_id))
        return instructions

    def expire(self, now_s: float, is_reading: bool) -> list[Instruction]:
        """Time has passed: a job that has waited too long is dropped, so that its blocks can be used again. So is the
        job under way, unless the writer `is_reading` its blocks at this moment.
        """
        instructions = self._drop_waiting(lambda entry: now_s - entry.since_s > self._wait_s)
        entry = self._current
        if entry is not None and not entry.is_read and not is_reading and now_s - entry.since_s > self._wait_s:
            entry.is_void = True
            instructions += self._end_read(entry)
        return instructions

    def await_free(self, request_ids: Iterable[str]) -> list[Instruction]:
        """These requests have ended, and the engine waits for their blocks."""
        self._awaited.update(request_ids)
        return self._free_read(sorted(self._awaited))

    def forget(self, request_ids: Iterable[str]) -> None:
        """These requests have ended: what is known of them goes with their last job, which may come in this step."""
        self._ended |= self._ended_last
        self._ended_last = set(request_ids)
        self._forget_ended()

    def _under_way(self, job_id: int) -> _Entry:
        if self._current is None or self._current.job.job_id != job_id:
            raise ValueError(f"job {job_id} is not under way")
        return self._current

    def _drop_waiting(self, is_dropped: Callable[[_Entry], bool]) -> list[Instruction]:
        instructions: list[Instruction] = []
        entries, self._waiting = self._waiting, deque()
        for entry in entries:
            if is_dropped(entry) or entry.job.request_id in self._broken:
                instructions += self._drop(entry)
            else:
                self._waiting.append(entry)
        return instructions

    def _drop(self, entry: _Entry) -> list[Instruction]:
        self._broken.add(entry.job.request_id)
        return [CountDropped(entry.job.chunk_range.chunk_count), *self._end_read(entry)]

    def _end_read(self, entry: _Entry) -> list[Instruction]:
        if entry.is_read:
            return []
        entry.is_read = True
        request_id = entry.job.request_id
        self._unread[request_id] -= 1
        if not self._unread[request_id]:
            del self._unread[request_id]
        return [TellRead(entry.job.job_id), *self._free_read([request_id])]

    def _free_read(self, request_ids: Iterable[str]) -> list[Instruction]:
        """Free those of these requests whose blocks are awaited and not read any more."""
        freed = [each for each in request_ids if each in self._awaited and each not in self._unread]
        self._awaited.difference_update(freed)
        return [FreeBlocks(request_id) for request_id in freed]

    def _forget_ended(self) -> None:
        current = self._current.job.request_id if self._current is not None else ""
        gone = {request_id for request_id in self._ended if request_id not in self._unread and request_id != current}
        self._ended -= gone
        self._broken -= gone
