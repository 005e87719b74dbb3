"""`bench s3`: the same S3 load on our server, on peers, and on the cheapest senders there can be, in the same rounds.

Every round takes one sample of everything: for each cell (operation, size, requests in flight) every contender in turn,
starting with another one each round. The first round is not counted: it warms connections and caches and gives the
limits that are expected to hold. Bodies are compared with what was put and puts are read back, both untimed.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from bench.beds.processes import BaselineError, running_program
from bench.beds.s3_jobs import LIST_NBYTES, Kind
from bench.beds.s3_servers import Peer, PeerName, running_cheapest, running_moto, running_ours, running_rgw
from bench.core.experiment import Experiment, WrongUse, plain, published
from bench.core.options import Options, each, filled, names, number, real, some_of
from bench.core.show import Json
from bench.experiments.s3.bed import Bed, Contender, S3Settings, SampleFailed
from bench.experiments.s3.ratios import RECEIVED, Cell, expected_per_s, measurement_of, rate_of, ratios
from bench.experiments.s3.show import plot, show
from calibration.samples import Turns, interleaved, progress_bar
from descriptors.units import GIB, KIB, MIB

SMOKE_PEERS = (PeerName.OURS, PeerName.CANNED, PeerName.RAW_SOCKET)
OPERATIONS = (Kind.PUT, Kind.GET, Kind.LIST)


def measure_s3(settings: S3Settings, origin: Mapping[str, Any]) -> Json:
    """Run the whole benchmark. What goes wrong at our server ends it and is the result's `problem`; a peer that fails
    is left out from there on and named. Raises FAILURES.
    """
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
                for contender in Turns.ROTATING.ordered(contenders, round_index):
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


def _declare(options: Options) -> None:
    peers = tuple(PeerName)
    sizes, size = (4 * KIB, 64 * KIB, 2 * MIB, 32 * MIB), each(number(LIST_NBYTES + 1, GIB))
    seconds, count, nbytes = real(1e-6, 3600), number(1, 1 << 20), number(MIB, 64 * GIB)
    for name, field, parse, metavar, full, smoke, text in (
        ("--sizes", "nbytes", size, "LIST", sizes, (4 * KIB, MIB), "default: 4KiB,64KiB,2MiB,32MiB"),
        ("--in-flight", "in_flight", each(number(1, 512)), "LIST", (8, 32), (2,), "default: 8,32"),
        ("--operations", "operations", some_of(OPERATIONS), "LIST", OPERATIONS, OPERATIONS, "default: put,get,list"),
        ("--peers", "peers", some_of(peers), "LIST", peers, SMOKE_PEERS, f"default: {names(peers)}"),
        ("--seconds", "seconds", seconds, "S", 1.0, 0.2, "length of a sample; default: 1"),
        ("--requests", "requests_max", count, "COUNT", 20_000, 10, "most in a sample; default: 20000"),
        ("--sample-bytes", "sample_bytes_max", nbytes, "BYTES", GIB, 8 * MIB, "most in a sample; default: 1GiB"),
        ("--list-keys", "list_keys", number(0, 1 << 20), "COUNT", 100_000, 1100, "default: 100000"),
        ("--list-seconds", "list_seconds", seconds, "S", 15.0, 15.0, "most for one list; default: 15"),
        ("--load-processes", "load_processes", number(1, 64), "COUNT", 1, 1, "default: 1"),
    ):
        options.add(name, dest=field, type=parse, metavar=metavar, full=full, smoke=smoke, help=text)
    options.runs(5)
    options.flag("--unsigned-payload", "spare both sides the SHA-256 of bodies")
    options.add("--workers", type=number(1, 1024), metavar="COUNT", help="of our server; default: cores")
    options.serve_options()
    options.add("--moto", default=sys.executable, metavar="PYTHON", help="an interpreter that has moto[server]")
    options.seed()
    options.folder()
    options.add("--profile", type=Path, metavar="DIR", help="sample our server's stacks there; needs py-spy")


def _measure(options: argparse.Namespace, origin: Mapping[str, Any]) -> Json:
    if importlib.util.find_spec("obstore") is None:
        raise WrongUse("the load is obstore: pip install 'objectcache[bench]'")
    if options.profile is not None:
        if _py_spy() is None:
            raise WrongUse("--profile needs py-spy: pip install py-spy")
        options.profile.mkdir(parents=True, exist_ok=True)
    settings = filled(
        S3Settings,
        options,
        is_signed=not options.unsigned_payload,
        disk_bytes=MIB if options.smoke else 256 * MIB,
        moto_python=options.moto,
        profile_folder=options.profile,
    )
    return measure_s3(settings, origin)


S3 = Experiment(
    name="s3",
    help="plain S3 requests: put, get and list, beside Ceph RGW and moto",
    description="The same load, by obstore in processes of its own, on a server of ours, on Ceph RGW, on moto and on "
    "the cheapest senders there can be, in the same rounds.",
    declare=_declare,
    measure=_measure,
    show=show,
    plot=plot,
)
