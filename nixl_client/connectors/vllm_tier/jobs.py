"""The jobs of a tier: each is reported once, when nothing of the tier touches its slots any more."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class TierJob:
    """Chunks to move between the store and slots of the primary tier: `keys[i]`, by which the store has a chunk,
    `slots[i]` and `vllm_keys[i]`, by which vLLM has it, belong together.
    """

    job_id: int
    keys: tuple[bytes, ...]
    slots: tuple[int, ...]
    vllm_keys: tuple[bytes, ...]
    is_load: bool
    began_s: float
    content_class: str = ""


@dataclass(frozen=True, slots=True)
class TierJobEnd:
    """How a job ended: the keys that are there now, and the bytes that were moved."""

    job: TierJob
    done: frozenset[bytes]
    nbytes: int = 0
    seconds: float = 0.0

    @property
    def vllm_done(self) -> list[bytes]:
        """vLLM's keys of those that are there now."""
        return [theirs for key, theirs in zip(self.job.keys, self.job.vllm_keys, strict=True) if key in self.done]

    @property
    def is_good(self) -> bool:
        """Whether all of it is done."""
        return len(self.done) == len(self.job.keys)


@dataclass(slots=True)
class TierJobs:
    """The jobs that have begun, and those that have ended and are not reported. Safe from any thread."""

    _changed: threading.Condition = field(default_factory=threading.Condition)
    _running: dict[int, TierJob] = field(default_factory=dict)
    _ended: list[TierJobEnd] = field(default_factory=list)

    def begin(self, job: TierJob) -> None:
        """A job is taken."""
        with self._changed:
            self._running[job.job_id] = job

    def end(self, end: TierJobEnd) -> None:
        """A job is over. Only the first call for a job counts."""
        with self._changed:
            if self._running.pop(end.job.job_id, None) is not None:
                self._ended.append(end)
                self._changed.notify_all()

    def take(self) -> Sequence[TierJobEnd]:
        """The jobs that have ended since the last call."""
        with self._changed:
            taken, self._ended = self._ended, []
            return taken

    @property
    def running_count(self) -> int:
        """How many jobs have begun and not ended."""
        return len(self._running)

    @property
    def waiting_chunks(self) -> int:
        """The chunks of stores that have begun and not ended."""
        with self._changed:
            return sum(len(job.keys) for job in self._running.values() if not job.is_load)

    def wait_idle(self, timeout_s: float, is_over: Callable[[], bool] = lambda: False) -> bool:
        """Wait until no job runs, or until `is_over`; whether none does."""
        with self._changed:
            self._changed.wait_for(lambda: not self._running or is_over(), timeout_s)
            return not self._running
