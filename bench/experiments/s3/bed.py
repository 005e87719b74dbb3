"""Settings of `bench s3`, and how one sample is taken and checked."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from bench.beds.memory import cpu_seconds
from bench.beds.processes import Child, start_children
from bench.beds.s3_jobs import LIST_NBYTES, Group, Job, Kind, Outcome
from bench.beds.s3_servers import Peer, PeerName
from bench.core.lines import from_line, to_line
from bench.core.show import Json
from bench.experiments.s3.ratios import Cell, cells_of
from descriptors.units import MIB

POPULATION_BYTES = 256 * MIB
POPULATION_MAX = 1024
"""Objects that GETs cycle through: few enough to stay in every peer's cache."""
FILL_IN_FLIGHT = 32
GIVE_BACK_BYTES = 2 << 30
LARGE_NBYTES = MIB
"""From here on a GET is compared with a raw socket."""
JOB_TIMEOUT_S = 3600.0
ENVIRONMENT = {
    "NO_PROXY": "127.0.0.1",
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
}
"""Of the load: no proxy may falsify loopback figures; and glibc keeps freed memory, so that bodies land on pages that
are there.
"""


@dataclass(frozen=True, slots=True)
class S3Settings:
    """What to measure. A sample ends after `seconds`, `requests_max` or `sample_bytes_max`, whichever is first, and has
    at least one request for each in flight. `workers` None: as many as there are cores.
    """

    nbytes: tuple[int, ...]
    in_flight: tuple[int, ...]
    operations: tuple[Kind, ...]
    peers: tuple[PeerName, ...]
    runs: int
    seconds: float
    requests_max: int
    sample_bytes_max: int
    list_keys: int
    list_seconds: float
    load_processes: int
    is_signed: bool
    seed: int
    disk_bytes: int
    workers: int | None = None
    serve_options: tuple[str, ...] = ()
    moto_python: str = ""
    folder: Path | None = None
    profile_folder: Path | None = None

    @property
    def cells(self) -> list[Cell]:
        """Everything that is measured of one peer in a round."""
        cells = cells_of(self.nbytes, self.in_flight, self.operations)
        has_list = Kind.LIST in self.operations and self.list_keys > 0
        return [*cells, Cell(Kind.LIST, LIST_NBYTES, 1)] if has_list else cells

    def population(self, nbytes: int) -> int:
        """How many objects of a size GETs cycle through."""
        return max(1, min(POPULATION_MAX, POPULATION_BYTES // nbytes, self.requests_max))

    @property
    def nbytes_max(self) -> int:
        """Of the largest object."""
        return max(*self.nbytes, LIST_NBYTES)


class SampleFailed(Exception):
    """A request failed or bytes were wrong; the message says which."""


@dataclass(frozen=True, slots=True)
class Contender:
    """A peer, and how objects are got from it; where that is not by S3, it has a part only in GETs of large objects."""

    name: str
    peer: Peer
    gets: Kind = Kind.GET

    def kind(self, cell: Cell) -> Kind | None:
        """What the load does for this cell, None where this contender has no part in it."""
        if self.gets is Kind.GET:
            return cell.operation
        return self.gets if cell.operation is Kind.GET and cell.nbytes >= LARGE_NBYTES else None


class Bed:
    """Takes samples: the processes of the load, which `stack` ends, and how far each peer's numbering of fresh keys has
    come. Every method raises SampleFailed, and BaselineError when a process of the load is gone.
    """

    def __init__(self, settings: S3Settings, stack: ExitStack) -> None:
        self._settings = settings
        start = partial(Child, "bench.beds.s3_load", settings.seed, settings.nbytes_max, environment=ENVIRONMENT)
        self._load = start_children([start] * settings.load_processes, stack)
        self._next_number: dict[tuple[PeerName, int], int] = {}
        self._deleted_bytes: dict[PeerName, int] = {}

    def fill(self, peer: Peer) -> None:
        """Put what GETs and lists need."""
        settings = self._settings
        groups = []
        if Kind.GET in settings.operations:
            groups += [(Group.GET, nbytes, settings.population(nbytes)) for nbytes in settings.nbytes]
        if Kind.LIST in settings.operations and settings.list_keys:
            groups.append((Group.LIST, LIST_NBYTES, settings.list_keys))
        for group, nbytes, count in groups:
            in_flight = min(FILL_IN_FLIGHT, count)
            self._run(Job(Kind.PUT, peer.target, group, nbytes, in_flight, count, is_signed=settings.is_signed))

    def sample(self, contender: Contender, kind: Kind, cell: Cell) -> Json:
        """One sample, checked."""
        peer = contender.peer
        pids = peer.processes()
        before_s = cpu_seconds(pids)
        parts = self._run(self._job(peer, kind, cell))
        after_s = cpu_seconds(pids)
        if kind is Kind.PUT:
            self._check_and_delete(peer, cell, parts)
        outcomes = [outcome for _, outcome in parts]
        p50_s, p99_s = np.percentile(np.concatenate([each.latencies_s for each in outcomes]), (50, 99))
        return {
            "duration_s": max(each.ended_s for each in outcomes) - min(each.started_s for each in outcomes),
            "count": sum(each.count for each in outcomes),
            "items": sum(each.items for each in outcomes),
            "p50_s": float(p50_s),
            "p99_s": float(p99_s),
            "client_cpu_s": sum(each.cpu_s for each in outcomes),
            "server_cpu_s": None if before_s is None or after_s is None else after_s - before_s,
        }

    def _job(self, peer: Peer, kind: Kind, cell: Cell) -> Job:
        settings, group = self._settings, Group(cell.operation.value)
        count_max = max(cell.in_flight, min(settings.requests_max, settings.sample_bytes_max // cell.nbytes))
        job = Job(kind, peer.target, group, cell.nbytes, cell.in_flight, count_max, settings.seconds)
        job = replace(job, is_signed=settings.is_signed)
        if kind is Kind.LIST:
            keys = settings.list_keys
            return replace(job, count_max=keys, seconds=settings.list_seconds, population=keys)
        if kind is Kind.PUT:
            return replace(job, first=self._next_number.get((peer.name, cell.nbytes), 0))
        return replace(job, population=settings.population(cell.nbytes))

    def _check_and_delete(self, peer: Peer, cell: Cell, parts: Sequence[tuple[Job, Outcome]]) -> None:
        """Read every object of a sample back, then make room."""
        place = (peer.name, cell.nbytes)
        self._next_number[place] = max(job.first + put.count * job.stride for job, put in parts)
        if not peer.stores:
            return
        for job, put in parts:
            self._run(replace(job, kind=Kind.CHECK, count_max=put.count))
        deleted_bytes = self._deleted_bytes.get(peer.name, 0) + cell.nbytes * sum(put.count for _, put in parts)
        if deleted_bytes >= GIVE_BACK_BYTES:
            peer.give_back()
            deleted_bytes = 0
        self._deleted_bytes[peer.name] = deleted_bytes

    def _run(self, job: Job) -> list[tuple[Job, Outcome]]:
        """Do all of a job; what each process had to do, and what came of it."""
        parts = list(zip(self._load, job.divided(len(self._load)), strict=False))
        for child, part in parts:
            child.tell(to_line(part))
        done = [(part, from_line(Outcome, child.answer(timeout_s=JOB_TIMEOUT_S))) for child, part in parts]
        for _, outcome in done:
            if outcome.problem is not None:
                raise SampleFailed(outcome.problem)
        return done
