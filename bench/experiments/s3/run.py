"""`bench s3`: the same S3 load on our server, on peers, and on the cheapest senders there can be, in the same rounds.

Every round takes one sample of everything: for each cell (operation, size, requests in flight) every contender in turn,
starting with another one each round. The first round is not counted: it warms connections and caches and gives the
limits that are expected to hold. Bodies are compared with what was put and puts are read back, both untimed.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from bench.beds.memory import cpu_seconds
from bench.beds.processes import BaselineError, Child, running_program, start_children
from bench.beds.s3_jobs import LIST_NBYTES, Group, Job, Kind, Outcome
from bench.beds.s3_servers import Peer, PeerName, running_cheapest, running_moto, running_ours, running_rgw
from bench.core import options
from bench.core.experiment import Experiment, WrongUse, plain, published
from bench.core.lines import from_line, to_line
from bench.core.options import real
from bench.core.show import Json
from bench.experiments.s3.results import (
    RECEIVED,
    Cell,
    cells_of,
    expected_per_s,
    measurement_of,
    plot,
    rate_of,
    ratios,
    show,
)
from descriptors.units import GIB, KIB, MIB
from objectcache.calibration.samples import RoundTurns, interleaved, progress_bar

SMOKE_PEERS = (PeerName.OURS, PeerName.CANNED, PeerName.RAW_SOCKET)
OPERATIONS = (Kind.PUT, Kind.GET, Kind.LIST)
SIZES, SIZES_DEFAULT = (4 * KIB, 64 * KIB, 2 * MIB, 32 * MIB), "default: 4KiB,64KiB,2MiB,32MiB"
SECONDS = real(1e-6, 3600)
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
"""The environment of the load: no proxy may falsify loopback figures; and glibc keeps freed memory, so that bodies land
on pages that are there.
"""


@dataclass(frozen=True, slots=True)
class S3Settings:
    """What to measure. A sample ends after `seconds`, `requests_max` or `sample_bytes_max`, whichever is first, and has
    at least one request for each in flight. `workers` None: as many as there are cores.
    """

    nbytes: tuple[int, ...] = options.count("--sizes", SIZES, (4 * KIB, MIB), LIST_NBYTES + 1, GIB, text=SIZES_DEFAULT)
    in_flight: tuple[int, ...] = options.count("--in-flight", (8, 32), (2,), most=512)
    operations: tuple[Kind, ...] = options.choice("--operations", OPERATIONS, OPERATIONS)
    peers: tuple[PeerName, ...] = options.choice("--peers", PeerName, tuple(PeerName), SMOKE_PEERS)
    runs: int = options.runs(5)
    seconds: float = options.setting("--seconds", 1.0, 0.2, SECONDS, "length of a sample")
    requests_max: int = options.count("--requests", 20_000, 10, most=1 << 20, text="most in a sample")
    sample_bytes_max: int = options.count("--sample-bytes", GIB, 8 * MIB, MIB, 64 * GIB, text="most; default: 1GiB")
    list_keys: int = options.count("--list-keys", 100_000, 1100, least=0, most=1 << 20)
    list_seconds: float = options.setting("--list-seconds", 15.0, 15.0, SECONDS, "most for one list")
    load_processes: int = options.count("--load-processes", 1, most=64)
    is_signed: bool = options.flag("--unsigned-payload", "spare both sides the SHA-256 of bodies", given=False)
    seed: int = options.seed()
    disk_bytes: int = options.sized(256 * MIB, MIB)
    workers: int | None = options.count("--workers", None, most=1024, text="of our server; default: cores")
    serve_options: tuple[str, ...] = options.serve_options()
    moto_python: str = options.moto_python()
    folder: Path | None = options.folder()
    profile_folder: Path | None = options.setting(
        "--profile", None, None, Path, "sample our server's stacks there; needs py-spy"
    )

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
        """How many bytes the largest object has."""
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


def measure_s3(settings: S3Settings, origin: Mapping[str, Any]) -> Json:
    """Run the whole benchmark. What goes wrong at our server ends it and is the result's `problem`; a peer that fails
    is left out from there on and named. Raises FAILURES.
    """
    if importlib.util.find_spec("obstore") is None:
        raise WrongUse("the load is obstore: pip install obstore")
    if settings.profile_folder is not None:
        if _py_spy() is None:
            raise WrongUse("--profile needs py-spy: pip install py-spy")
        settings.profile_folder.mkdir(parents=True, exist_ok=True)
    disk, problem = probe_disk(settings.folder, settings.disk_bytes), None
    peers: list[Peer] = []
    absent: dict[str, str] = {}
    expected: dict[str, float] = {}
    samples: dict[Cell, dict[str, list[Json]]] = {}
    with ExitStack() as stack:
        bed = Bed(settings, stack)
        try:
            contenders = _start(settings, bed, peers, absent, stack)
            if settings.profile_folder is not None:
                for pid in (pid for peer in peers if peer.name is PeerName.OURS for pid in peer.processes()):
                    stack.enter_context(_profiled(pid, settings.profile_folder))
            for round_index, cell in interleaved(settings.cells, settings.runs, "measuring"):
                for contender in RoundTurns.ROTATING.ordered(contenders, round_index):
                    kind = contender.kind(cell)
                    if kind is None or contender.name in absent:
                        continue
                    with failure_of(contender.name, contender.peer, absent):
                        sample = bed.sample(contender, kind, cell)
                        if round_index > 0:
                            samples.setdefault(cell, {}).setdefault(contender.name, []).append(sample)
                        elif contender.peer.name is PeerName.CANNED:
                            expected[cell.name] = expected_per_s(cell, rate_of(cell.name, sample), disk)
        except SampleFailed as error:
            problem = str(error)
    measurements = {
        cell.name: {name: measurement_of(cell, some) for name, some in found.items()} for cell, found in samples.items()
    }
    spreads = ratios(measurements)
    result = published(
        "s3",
        origin,
        _described(settings),
        problem,
        peers={peer.name.value: {"version": peer.version, "durability": peer.durability} for peer in peers},
        absent=absent,
        disk=disk,
        expected_per_s=expected,
        ratios={name: ratio.median for name, ratio in spreads.items()},
        ratio_spreads=spreads,
        measurements=measurements,
    )
    return {"bench": "s3", "state": "warm", **result}


def _profiled(pid: int, folder: Path) -> AbstractContextManager[object]:
    """Sample the stacks of a process and its children from outside until the context ends. Folded stacks go to a file
    in `folder`, which speedscope and flame graphs read. The process is a little slower while it is watched; py-spy
    leaves out threads it takes for idle, but own time of `_worker` and `Runner.run` is still mostly waiting.
    """
    command = [_py_spy() or "py-spy", "record", "--pid", str(pid), "--subprocesses", "--threads", "--rate", "100"]
    command += ["--format", "raw", "--output", str(folder / "ours.folded")]
    return running_program(command, folder / "py-spy.log", number=signal.SIGINT)


def _py_spy() -> str | None:
    """The program, on the path or beside the interpreter; None when there is none."""
    return shutil.which("py-spy") or shutil.which("py-spy", path=str(Path(sys.executable).parent))


def _described(settings: S3Settings) -> Json:
    """The settings as plain values; where an interpreter lies says nothing of the measurement."""
    return {
        **plain(settings),
        "moto_python": Path(settings.moto_python).name,
        "client": f"obstore {metadata.version('obstore')}, threads, retries off, one PutObject a PUT",
        "populations": {str(nbytes): settings.population(nbytes) for nbytes in settings.nbytes},
    }


def probe_disk(folder: Path | None, nbytes: int) -> Json:
    """How fast plain files are written and synced where the stores will be: bytes/s with one sync at the end, and the
    median time of one small write with its sync.
    """
    piece = np.random.default_rng(0).integers(0, 256, min(nbytes, 4 * MIB), dtype=np.uint8)
    with tempfile.TemporaryFile(dir=folder) as file:
        started_s = time.monotonic()
        for _ in range(max(1, nbytes // piece.nbytes)):
            file.write(piece.data)
        file.flush()
        os.fdatasync(file.fileno())
        rate = file.tell() / (time.monotonic() - started_s)
        syncs_s = []
        for _ in range(32):
            started_s = time.monotonic()
            os.write(file.fileno(), piece[: 4 * KIB].data)
            os.fdatasync(file.fileno())
            syncs_s.append(time.monotonic() - started_s)
    return {"write_bytes_per_s": rate, "sync_s": float(np.median(syncs_s))}


@contextmanager
def failure_of(name: str, peer: Peer, absent: MutableMapping[str, str]) -> Iterator[None]:
    """Let a peer fail alone; what fails at our server is raised."""
    try:
        yield
    except SampleFailed as error:
        if peer.name is PeerName.OURS:
            raise
        absent[name] = str(error)


def _start(
    settings: S3Settings, bed: Bed, peers: list[Peer], absent: MutableMapping[str, str], stack: ExitStack
) -> list[Contender]:
    """The peers that work, filled, and our server once more with the raw socket's receiver. Raises BaselineError and
    SampleFailed for what is ours.
    """
    folder = settings.folder
    serve = ["--workers", str(settings.workers or len(os.sched_getaffinity(0))), *settings.serve_options]
    content = (settings.seed, settings.nbytes_max, settings.list_keys)
    starts: dict[PeerName, Callable[[], AbstractContextManager[Peer]]] = {
        PeerName.OURS: partial(running_ours, folder, serve),
        PeerName.RGW: partial(running_rgw, folder),
        PeerName.MOTO: partial(running_moto, settings.moto_python, folder),
        **{name: partial(running_cheapest, name, *content) for name in (PeerName.CANNED, PeerName.RAW_SOCKET)},
    }
    contenders = []
    with progress_bar(len(settings.peers), "starting") as advance:
        for name in settings.peers:
            advance(1)
            try:
                peers.append(peer := stack.enter_context(starts[name]()))
                if peer.stores:
                    bed.fill(peer)
            except (BaselineError, SampleFailed) as error:
                if name not in (PeerName.RGW, PeerName.MOTO):
                    raise
                absent[name.value] = str(error)
                continue
            contenders.append(Contender(name.value, peer, Kind.RAW if name is PeerName.RAW_SOCKET else Kind.GET))
            if name is PeerName.OURS:
                contenders.append(Contender(RECEIVED, peer, Kind.RECEIVE))
    return contenders


S3 = Experiment(
    name="s3",
    help="plain S3 requests: put, get and list, beside Ceph RGW and moto",
    description="See how plain S3 requests compare with other services. The same load, by obstore in processes of its "
    "own, on a server of ours, on Ceph RGW, on moto and on the cheapest senders there can be, in the same "
    "rounds.",
    settings=S3Settings,
    measure=measure_s3,
    show=show,
    plot=plot,
)
