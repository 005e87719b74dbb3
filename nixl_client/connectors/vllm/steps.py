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
    """Write `span`, whole chunks that have been computed. `keys` are the span's, for each rank."""

    job_id: int
    request_id: str
    span: Span
    keys: tuple[tuple[str, ...], ...]


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
    """Store jobs whose blocks are not read any more: how many workers say so, by job."""

    read_jobs: dict[int, int] = field(default_factory=dict)

    def add(self, other: Report) -> Report:
        """Both reports in one."""
        counts = dict(self.read_jobs)
        for job_id, count in other.read_jobs.items():
            counts[job_id] = counts.get(job_id, 0) + count
        return Report(counts)
