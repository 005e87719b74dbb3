"""Measuring: servers of our own, both orders of every payload over every transport, every byte compared."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from bench.aggregate_bed import Bed, Chunks, warm
from bench.calibration.fetching import chunks_of, fetch_checked, fill, part, state_of_warm
from bench.calibration.fetching import clients as clients_of
from bench.calibration.points import CalibrationPlan, Family, Point, Run
from bench.progress import progress_bar
from bench.samples import State
from bench.server import BenchServer, running_server
from descriptors.descriptor import Delivery
from nixl_client.client import ObjectCacheClient, Transport
from storage_server.settings import StorageSettings

INDEX_NAME = "index"


@dataclass(frozen=True, slots=True)
class Where:
    """`folder` is on the disk to be measured (None: the system's temporary folder); `storage` what servers run with,
    `config_text` the same as TOML.
    """

    folder: Path | None
    storage: StorageSettings
    config_text: str


@dataclass
class Found:
    """What was measured; `missing` gives reasons of transports that could not run, `remarks` say how a state came
    about.
    """

    points: list[Point] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)
    remarks: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Task:
    """One payload over one transport: `chunks` is a prefix of its family's."""

    family: Family
    chunks: Chunks
    transport: Transport
    client: ObjectCacheClient
    runs: list[Run]


def warm_state(plan: CalibrationPlan, storage: StorageSettings) -> State:
    """Of this plan's chunks."""
    return state_of_warm(plan.stored_bytes, storage)


def measure(plan: CalibrationPlan, states: Sequence[State], transports: Sequence[str], where: Where) -> Found:
    """Measure each state in a server of its own; `transports` are values of Transport.

    Raises BenchServerError, ObjectCacheError, NixlFailure, VerificationError, TimeoutError and OSError.
    """
    found = Found()
    stored = [(family, chunks_of(family, plan.seed + index)) for index, family in enumerate(plan.families)]
    for state in states:
        with ExitStack() as stack:
            folder = Path(
                stack.enter_context(tempfile.TemporaryDirectory(prefix="objectcache-calibrate-", dir=where.folder))
            )
            config = folder / "config.toml"
            config.write_text(where.config_text)
            options = ["--config", str(config)] + (["--dram-bytes", "0"] if state is not State.DRAM else [])
            server = stack.enter_context(running_server(folder, options))
            wanted = [Transport(name) for name in transports]
            _measure_state(plan, state, wanted, where, found, stored, server, folder, stack)
    return found


def _measure_state(
    plan: CalibrationPlan,
    state: State,
    transports: Sequence[Transport],
    where: Where,
    found: Found,
    stored: Sequence[tuple[Family, Chunks]],
    server: BenchServer,
    folder: Path,
    stack: ExitStack,
) -> None:
    for _, chunks in stored:
        fill(server, chunks)
    anyone = stack.enter_context(server.client(Transport.HTTP))
    buffer = anyone.allocate_buffer(plan.payload_bytes_max)
    clients = dict(clients_of(server, transports, buffer, found.missing, stack))
    if not clients:
        return
    files = _data_files(folder) if state is State.COLD else []
    bed = Bed(state, server, where.storage, {index: chunks for index, (_, chunks) in enumerate(stored)}, buffer, files)
    if state is State.DRAM:
        warm(bed, next(iter(clients.values())))
    tasks = [
        _Task(family, part(chunks, 0, count), transport, client, [])
        for family, chunks in stored
        for count in family.counts
        for transport, client in clients.items()
    ]
    with progress_bar((plan.runs + 1) * len(tasks), f"calibrating, {state.value}") as advance:
        for round_index in range(plan.runs + 1):
            for task in tasks:
                run = _one_round(bed, task, chunk_major_first=round_index % 2 == 0)
                if round_index > 0:
                    task.runs.append(run)
                advance(1)
    found.points += [
        Point(
            task.family.name, task.family.layout, len(task.chunks.keys), task.transport.value, state, tuple(task.runs)
        )
        for task in tasks
    ]
    if state is State.COLD:
        found.remarks[state.value] = f"dropped from the page cache before each; at most {max(bed.shares):.1%} stayed"
    else:
        found.remarks[state.value] = "from the server's DRAM tier" if state is State.DRAM else "from the page cache"


def _one_round(bed: Bed, task: _Task, *, chunk_major_first: bool) -> Run:
    """Both orders, in alternating sequence, so that neither always finds what the other left behind."""
    orders = [Delivery.CHUNK_MAJOR, Delivery.LAYER_MAJOR]
    times = {order: _fetch(bed, task, order) for order in (orders if chunk_major_first else orders[::-1])}
    return Run(max(times[Delivery.CHUNK_MAJOR]), times[Delivery.LAYER_MAJOR])


def _fetch(bed: Bed, task: _Task, delivery: Delivery) -> tuple[float, ...]:
    """When each layer was there, in seconds since the request."""
    bed.make_cold()
    return fetch_checked(task.client, task.transport, task.chunks, bed.buffer, delivery)


def _data_files(folder: Path) -> list[Path]:
    """What the store keeps bodies in; its index stays warm, as it does in a running server."""
    data = [file for file in sorted(folder.glob("objectcache-bench-*/data/**/*")) if file.is_file()]
    return [file for file in data if INDEX_NAME not in file.name and not file.is_symlink() and file.stat().st_size]
