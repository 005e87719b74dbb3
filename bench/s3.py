"""`bench s3`: the same S3 load on our server, on peers, and on the cheapest senders there can be, in the same rounds.

Every round takes one sample of everything: for each cell (operation, size, requests in flight) every contender in turn,
starting with another one each round. The first round is not counted: it warms connections and caches and gives the
limits that are expected to hold. Bodies are compared with what was put and puts are read back, both untimed.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from bench.jobs import Kind
from bench.load_processes import LoadProcesses
from bench.machine import describe_commit, describe_machine
from bench.peers import (
    Peer,
    PeerName,
    PeerUnavailable,
    running_canned,
    running_moto,
    running_ours,
    running_raw_socket,
    running_rgw,
    serve_options,
)
from bench.profiler import sampled
from bench.progress import progress_bar
from bench.s3_bed import Bed, Contender, S3Settings, SampleFailed
from bench.s3_report import RECEIVED, Cell, Disk, Operation, S3Measurement, S3Report, S3Sample
from descriptors.units import KIB, MIB

LARGE_NBYTES = MIB
"""From here on a GET is compared with a raw socket."""


def measure_s3(settings: S3Settings) -> S3Report:
    """Run the whole benchmark. What goes wrong at our server ends it and is the report's `problem`; a peer that fails
    is left out from there on and named.

    Raises BaselineError, BenchServerError and OSError.
    """
    disk = probe_disk(settings.folder, settings.disk_bytes)
    absent: dict[str, str] = {}
    samples: dict[tuple[Cell, str], list[S3Sample]] = {}
    expected: dict[Cell, float] = {}
    problem = None
    peers: list[Peer] = []
    with ExitStack() as stack:
        load = LoadProcesses(settings.load_processes, settings.seed, settings.nbytes_max)
        stack.callback(load.close)
        bed = Bed(settings, load)
        try:
            peers = _start_peers(settings, stack, absent)
            _fill_all(bed, peers, absent)
            contenders = _contenders(peers, absent)
            if settings.profile_folder is not None:
                ours = (pid for peer in peers if peer.name is PeerName.OURS for pid in peer.processes())
                for pid in ours:
                    stack.enter_context(sampled(pid, settings.profile_folder))
            _run_rounds(settings, bed, contenders, disk, samples, expected, absent)
        except SampleFailed as error:
            problem = str(error)
    measurements = [S3Measurement(cell, name, tuple(taken)) for (cell, name), taken in samples.items() if taken]
    origin = {**describe_commit(), "machine": describe_machine()}
    described = {peer.name.value: {"version": peer.version, "durability": peer.durability} for peer in peers}
    return S3Report(origin, _described(settings), described, absent, measurements, expected, disk, problem)


def probe_disk(folder: Path | None, nbytes: int) -> Disk:
    """How fast plain files are written and synced where the stores will be."""
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
    return Disk(rate, float(np.median(syncs_s)))


def expected_per_s(cell: Cell, canned_per_s: float, disk: Disk) -> float:
    """The most to expect of any server that keeps what it acknowledges: what the load reaches against canned answers;
    for a PUT also what the disk takes, with one sync for everything in flight.
    """
    if cell.operation is not Operation.PUT:
        return canned_per_s
    return min(canned_per_s, disk.write_bytes_per_s / cell.nbytes, cell.in_flight / disk.sync_s)


def _run_rounds(
    settings: S3Settings,
    bed: Bed,
    contenders: Sequence[Contender],
    disk: Disk,
    samples: dict[tuple[Cell, str], list[S3Sample]],
    expected: dict[Cell, float],
    absent: dict[str, str],
) -> None:
    cells = settings.cells
    with progress_bar((settings.runs + 1) * len(cells) * len(contenders), "measuring") as advance:
        for round_index in range(settings.runs + 1):
            turn = round_index % len(contenders)
            for cell in cells:
                for contender in [*contenders[turn:], *contenders[:turn]]:
                    advance(1)
                    kind = contender.kind(cell)
                    if kind is None or contender.name in absent:
                        continue
                    with _failure_of(contender.name, contender.peer, absent):
                        sample = bed.sample(contender, kind, cell)
                        if round_index > 0:
                            samples.setdefault((cell, contender.name), []).append(sample)
                        elif contender.peer.name is PeerName.CANNED:
                            expected[cell] = expected_per_s(cell, sample.rate(cell), disk)


@contextmanager
def _failure_of(name: str, peer: Peer, absent: dict[str, str]) -> Iterator[None]:
    """Let a peer fail alone; what fails at our server is raised."""
    try:
        yield
    except SampleFailed as error:
        if peer.name is PeerName.OURS:
            raise
        absent[name] = str(error)


def _start_peers(settings: S3Settings, stack: ExitStack, absent: dict[str, str]) -> list[Peer]:
    nbytes_max, seed, folder = settings.nbytes_max, settings.seed, settings.folder
    starts = {
        PeerName.OURS: lambda: running_ours(folder, serve_options(settings.workers, settings.serve_options)),
        PeerName.RGW: lambda: running_rgw(folder),
        PeerName.MOTO: lambda: running_moto(settings.moto_python, folder),
        PeerName.CANNED: lambda: running_canned(seed, nbytes_max, settings.list_keys),
        PeerName.RAW_SOCKET: lambda: running_raw_socket(seed, nbytes_max),
    }
    peers = []
    with progress_bar(len(settings.peers), "starting") as advance:
        for name in settings.peers:
            try:
                peers.append(stack.enter_context(starts[name]()))
            except PeerUnavailable as error:
                absent[name.value] = str(error)
            advance(1)
    return peers


def _fill_all(bed: Bed, peers: Sequence[Peer], absent: dict[str, str]) -> None:
    with progress_bar(len(peers), "storing objects") as advance:
        for peer in peers:
            if peer.stores:
                with _failure_of(peer.name.value, peer, absent):
                    bed.fill(peer)
            advance(1)


def _contenders(peers: Sequence[Peer], absent: dict[str, str]) -> list[Contender]:
    """The peers that work, and our server once more with the raw socket's receiver."""
    s3 = ((Operation.PUT, Kind.PUT), (Operation.GET, Kind.GET), (Operation.LIST, Kind.LIST))
    contenders = []
    for peer in peers:
        if peer.name.value in absent:
            continue
        if peer.name is PeerName.RAW_SOCKET:
            contenders.append(Contender(peer.name.value, peer, ((Operation.GET, Kind.RAW),), LARGE_NBYTES))
            continue
        contenders.append(Contender(peer.name.value, peer, s3))
        if peer.name is PeerName.OURS:
            contenders.append(Contender(RECEIVED, peer, ((Operation.GET, Kind.RECEIVE),), LARGE_NBYTES))
    return contenders


def _described(settings: S3Settings) -> dict[str, Any]:
    """The settings as plain values."""
    described = asdict(settings)
    described["operations"] = [operation.value for operation in settings.operations]
    described["peers"] = [peer.value for peer in settings.peers]
    described |= {name: str(described[name]) for name in ("folder", "profile_folder") if described[name] is not None}
    described["client"] = f"obstore {metadata.version('obstore')}, threads, retries off, one PutObject a PUT"
    described["populations"] = {str(nbytes): settings.population(nbytes) for nbytes in settings.nbytes}
    return described
