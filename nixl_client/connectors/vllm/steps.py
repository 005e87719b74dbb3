"""The scheduler's instructions to the workers in each step of the engine, and their reports."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from descriptors.recompute import DeliveryCosts, PrefillCosts
from nixl_client.connectors.compute_fit import NO_WORK, Work, longer, slower
from nixl_client.connectors.vllm.grid import ChunkRange


@dataclass(frozen=True, slots=True)
class LoadJob:
    """Load `chunk_range` for a request before this step's attention reads it. `keys` are its chunks', for each rank."""

    job_id: int
    request_id: str
    chunk_range: ChunkRange
    keys: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class StoreJob:
    """Write `chunk_range`, whole chunks that have been computed. `keys` are those of its chunks, for each rank.
    `is_repair` says that the objects stored under these keys cannot be read.
    """

    job_id: int
    request_id: str
    chunk_range: ChunkRange
    keys: tuple[tuple[str, ...], ...]
    is_repair: bool = False


@dataclass(frozen=True, slots=True)
class Grown:
    """The new blocks of a request, and the one before them; None at the beginning of its prompt."""

    block_before: int | None
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Step:
    """One step's work. `rewritten` are blocks whose bytes this step may change, all of them where `is_reset`; `awaited`
    are requests that have ended and whose blocks are free once nothing reads them. `work` is what the step computes,
    and `layer_compute_us` how long a layer of it should take (0: not known yet). With `costs` a load that is late is
    given up once its tokens are sooner computed. `grown` are requests with new blocks, where the reader takes a loss.
    """

    loads: tuple[LoadJob, ...] = ()
    stores: tuple[StoreJob, ...] = ()
    rewritten: frozenset[int] = frozenset()
    awaited: frozenset[str] = frozenset()
    is_reset: bool = False
    work: Work = NO_WORK
    layer_compute_us: int = 0
    costs: PrefillCosts | None = None
    grown: tuple[Grown, ...] = ()


@dataclass(slots=True)
class Report:
    """Store jobs whose blocks are not read any more, and load jobs that are over: how many workers say so, by job. By
    load job the first chunk of the prefix that is missing or damaged. How many loads failed for other reasons; those
    that came too late did not. The costs of the rank's steps and loads, where they have changed.
    """

    read_jobs: dict[int, int] = field(default_factory=dict)
    ended_loads: dict[int, int] = field(default_factory=dict)
    bad_chunks: dict[int, int] = field(default_factory=dict)
    failed_loads: int = 0
    costs: PrefillCosts | None = None
    load_costs: DeliveryCosts | None = None

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to tell."""
        return not self.read_jobs and not self.ended_loads and self.costs is None

    def add(self, other: Report) -> Report:
        """Both reports in one."""
        bad_chunks = dict(self.bad_chunks)
        for job_id, index in other.bad_chunks.items():
            bad_chunks[job_id] = min(index, bad_chunks.get(job_id, index))
        return Report(
            read_jobs=Counter(self.read_jobs) + Counter(other.read_jobs),
            ended_loads=Counter(self.ended_loads) + Counter(other.ended_loads),
            bad_chunks=bad_chunks,
            failed_loads=self.failed_loads + other.failed_loads,
            costs=slower(self.costs, other.costs),
            load_costs=longer(self.load_costs, other.load_costs),
        )
