"""What the scheduler's side tells the workers in each step of the engine, and what they answer."""

from __future__ import annotations

from dataclasses import dataclass, field

from nixl_client.connectors.vllm.plan import Span


@dataclass(frozen=True, slots=True)
class LoadJob:
    """Load `span` for a request before this step's attention reads it. `keys` are the span's, for each rank."""

    request_id: str
    span: Span
    keys: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class StoreJob:
    """Write `span`, whole chunks that have been computed. `keys` are the span's, for each rank. `is_repair` says that
    what is stored under the keys cannot be read.
    """

    job_id: int
    request_id: str
    span: Span
    keys: tuple[tuple[str, ...], ...]
    is_repair: bool = False


@dataclass(frozen=True, slots=True)
class Step:
    """One step's work. `rewritten` are blocks whose bytes this step may change, `awaited` requests that have ended and
    whose blocks are free once nothing reads them.
    """

    loads: tuple[LoadJob, ...] = ()
    stores: tuple[StoreJob, ...] = ()
    rewritten: frozenset[int] = frozenset()
    awaited: frozenset[str] = frozenset()


@dataclass(slots=True)
class Report:
    """Store jobs whose blocks are not read any more: how many workers say so, by job. And the first chunk that could
    not be loaded, missing or damaged, by request.
    """

    read_jobs: dict[int, int] = field(default_factory=dict)
    bad_chunks: dict[str, int] = field(default_factory=dict)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to tell."""
        return not self.read_jobs and not self.bad_chunks

    def add(self, other: Report) -> Report:
        """Both reports in one."""
        counts = dict(self.read_jobs)
        for job_id, count in other.read_jobs.items():
            counts[job_id] = counts.get(job_id, 0) + count
        bad_chunks = dict(self.bad_chunks)
        for request_id, index in other.bad_chunks.items():
            bad_chunks[request_id] = min(index, bad_chunks.get(request_id, index))
        return Report(counts, bad_chunks)
