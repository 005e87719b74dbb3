"""Settings of `bench s3`, and how one sample is taken and checked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bench.jobs import LIST_NBYTES, UNLIMITED_S, Job, Kind, Outcome, joined
from bench.load_processes import LoadProcesses
from bench.objects import Group
from bench.peers import Peer, PeerName, cpu_seconds
from bench.s3_report import Cell, Operation, S3Sample
from descriptors.units import MIB

POPULATION_BYTES = 256 * MIB
POPULATION_MAX = 1024
"""Objects that GETs cycle through: few enough to stay in every peer's cache."""
FILL_IN_FLIGHT = 32
CHECK_IN_FLIGHT = 4
GIVE_BACK_BYTES = 2 << 30


@dataclass(frozen=True, slots=True)
class S3Settings:
    """What to measure. A sample ends after `seconds`, `requests_max` or `sample_bytes_max`, whichever is first, and has
    at least one request for each in flight. `workers` None: as many as there are cores.
    """

    nbytes: tuple[int, ...]
    in_flight: tuple[int, ...]
    operations: tuple[Operation, ...]
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
        cells = [
            Cell(operation, nbytes, in_flight)
            for nbytes in self.nbytes
            for in_flight in self.in_flight
            for operation in (Operation.PUT, Operation.GET)
            if operation in self.operations
        ]
        has_list = Operation.LIST in self.operations and self.list_keys > 0
        return [*cells, Cell(Operation.LIST, LIST_NBYTES, 1)] if has_list else cells

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
    """A peer, and how it is asked."""

    name: str
    peer: Peer
    kinds: tuple[tuple[Operation, Kind], ...]
    nbytes_min: int = 0

    def kind(self, cell: Cell) -> Kind | None:
        """What the load does for this cell, None where this contender has no part in it."""
        return dict(self.kinds).get(cell.operation) if cell.nbytes >= self.nbytes_min else None


class Bed:
    """Takes samples: the load, and how far each peer's numbering of fresh keys has come."""

    def __init__(self, settings: S3Settings, load: LoadProcesses) -> None:
        self._settings = settings
        self._load = load
        self._next_number: dict[tuple[PeerName, int], int] = {}
        self._deleted_bytes: dict[PeerName, int] = {}

    def fill(self, peer: Peer) -> None:
        """Put what GETs and lists need."""
        if Operation.GET in self._settings.operations:
            for nbytes in self._settings.nbytes:
                self._put_all(peer, Group.GET, nbytes, self._settings.population(nbytes))
        if Operation.LIST in self._settings.operations and self._settings.list_keys:
            self._put_all(peer, Group.LIST, LIST_NBYTES, self._settings.list_keys)

    def sample(self, contender: Contender, kind: Kind, cell: Cell) -> S3Sample:
        """One sample, checked. Raises SampleFailed."""
        peer = contender.peer
        pids = peer.processes()
        before_s = cpu_seconds(pids)
        parts = self._run(self._job(peer, kind, cell))
        after_s = cpu_seconds(pids)
        if kind is Kind.PUT:
            self._check_and_delete(peer, cell, parts)
        outcome = joined([part for _, part in parts])
        p50_s, p99_s = np.percentile(np.frombuffer(outcome.latencies_s, dtype=np.float64), (50, 99))
        server_s = None if before_s is None or after_s is None else after_s - before_s
        return S3Sample(
            outcome.duration_s, outcome.count, outcome.items, float(p50_s), float(p99_s), outcome.cpu_s, server_s
        )

    def _job(self, peer: Peer, kind: Kind, cell: Cell) -> Job:
        settings = self._settings
        if kind is Kind.LIST:
            keys = settings.list_keys
            return self._new_job(peer, kind, Group.LIST, cell.nbytes, 1, keys, settings.list_seconds, population=keys)
        count_max = min(settings.requests_max, settings.sample_bytes_max // cell.nbytes)
        count_max = max(count_max, cell.in_flight)
        if kind is Kind.PUT:
            first = self._next_number.get((peer.name, cell.nbytes), 0)
            return self._new_job(
                peer, kind, Group.PUT, cell.nbytes, cell.in_flight, count_max, settings.seconds, first=first
            )
        population = settings.population(cell.nbytes)
        return self._new_job(
            peer, kind, Group.GET, cell.nbytes, cell.in_flight, count_max, settings.seconds, population=population
        )

    def _check_and_delete(self, peer: Peer, cell: Cell, parts: Sequence[tuple[Job, Outcome]]) -> None:
        """Read every object of a sample back, then make room."""
        place = (peer.name, cell.nbytes)
        self._next_number[place] = max(job.first + put.count * job.stride for job, put in parts)
        if not peer.stores:
            return
        batch = max(1, self._settings.sample_bytes_max // cell.nbytes)
        for job, put in parts:
            for start in range(0, put.count, batch):
                self._run(job.again(Kind.GET, start, min(batch, put.count - start), CHECK_IN_FLIGHT))
            self._run(job.again(Kind.DELETE, 0, put.count, 1))
        deleted_bytes = self._deleted_bytes.get(peer.name, 0) + cell.nbytes * sum(put.count for _, put in parts)
        if deleted_bytes >= GIVE_BACK_BYTES:
            peer.give_back()
            deleted_bytes = 0
        self._deleted_bytes[peer.name] = deleted_bytes

    def _put_all(self, peer: Peer, group: Group, nbytes: int, count: int) -> None:
        self._run(self._new_job(peer, Kind.PUT, group, nbytes, min(FILL_IN_FLIGHT, count), count))

    def _new_job(
        self,
        peer: Peer,
        kind: Kind,
        group: Group,
        nbytes: int,
        in_flight: int,
        count_max: int,
        seconds: float = UNLIMITED_S,
        *,
        first: int = 0,
        population: int | None = None,
    ) -> Job:
        is_signed = self._settings.is_signed
        target = peer.target
        return Job(kind, target, group, nbytes, in_flight, count_max, seconds, first, 1, population, is_signed)

    def _run(self, job: Job) -> list[tuple[Job, Outcome]]:
        parts = self._load.run(job)
        for _, outcome in parts:
            if outcome.problem is not None:
                raise SampleFailed(outcome.problem)
        return parts
