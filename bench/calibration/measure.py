"""Measuring: servers of our own, both orders of every payload over every transport, every byte compared."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from adapters.nixl_agent import NixlFailure
from bench.aggregate_bed import Bed, Chunks, warm
from bench.calibration.points import CalibrationPlan, Family, Point, Run
from bench.content import Bytes, Content, VerificationError, make_content, verify_payload
from bench.progress import progress_bar
from bench.samples import State
from bench.server import BenchServer, running_server
from descriptors.descriptor import Delivery
from descriptors.errors import ObjectCacheError
from descriptors.prefix_keys import Namespace, chunk_keys
from descriptors.units import MIB
from nixl_client.client import ObjectCacheClient, Transport
from nixl_client.shm_link import ShmUnavailableError
from storage_server.settings import StorageSettings

FETCH_TIMEOUT_S = 300.0
FILL_BATCH_BYTES = 64 * MIB
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
    """Where chunks that are asked for again are found: the DRAM tier, where it is large enough for all of these."""
    return State.DRAM if storage.dram_bytes >= plan.stored_bytes * 9 // 8 else State.PAGE_CACHE


def measure(plan: CalibrationPlan, states: Sequence[State], transports: Sequence[str], where: Where) -> Found:
    """Measure each state in a server of its own; `transports` are values of Transport.

    Raises BenchServerError, ObjectCacheError, NixlFailure, VerificationError, TimeoutError and OSError.
    """
    found = Found()
    stored = [(family, _make_chunks(family, plan.seed + index)) for index, family in enumerate(plan.families)]
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
        _fill(server, chunks)
    anyone = stack.enter_context(server.client(Transport.HTTP))
    buffer = anyone.allocate_buffer(plan.payload_bytes_max)
    clients = dict(_clients(server, transports, buffer, found, stack))
    if not clients:
        return
    files = _data_files(folder) if state is State.COLD else []
    bed = Bed(state, server, where.storage, {index: chunks for index, (_, chunks) in enumerate(stored)}, buffer, files)
    if state is State.DRAM:
        warm(bed, next(iter(clients.values())))
    tasks = [
        _Task(family, _prefix(chunks, count), transport, client, [])
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
    content = task.chunks.content
    buffer = bed.buffer[: task.chunks.payload_bytes]
    buffer.fill(0)
    bed.make_cold()
    started_s = time.monotonic()
    with task.client.fetch(task.chunks.keys, content.layout, bed.buffer, delivery=delivery) as fetch:
        result = fetch.wait(FETCH_TIMEOUT_S)
        layers = [fetch.wait_layer(index) for index in range(content.layout.num_layers)]
    if result.mode.value != delivery.value or fetch.transport is not task.transport:
        raise VerificationError(f"{result} over {fetch.transport} came of {delivery.value} over {task.transport}")
    verify_payload(buffer, content, delivery)
    return tuple(layer.ready_at_s - started_s for layer in layers)


def _clients(
    server: BenchServer,
    transports: Sequence[Transport],
    buffer: Bytes,
    found: Found,
    stack: ExitStack,
) -> Iterator[tuple[Transport, ObjectCacheClient]]:
    for transport in transports:
        client = stack.enter_context(server.client(transport))
        try:
            client.register_buffer(buffer)
        except (ImportError, NixlFailure, ShmUnavailableError, ObjectCacheError) as error:
            found.missing[transport.value] = str(error)
            continue
        yield transport, client


def _make_chunks(family: Family, seed: int) -> Chunks:
    count, layout = family.counts[-1], family.layout
    tokens = np.random.default_rng(seed).integers(0, 1 << 32, count * layout.chunk_tokens, dtype=np.uint32)
    namespace = Namespace(model=f"calibrate {seed}", dtype="uint8", block_tokens=layout.chunk_tokens)
    return Chunks(chunk_keys(namespace.text(), tokens, layout.chunk_tokens), make_content(count, layout, seed))


def _prefix(chunks: Chunks, count: int) -> Chunks:
    whole = chunks.content
    return Chunks(chunks.keys[:count], Content(whole.layout, count, whole.base, whole.stamps[:, :count]))


def _fill(server: BenchServer, chunks: Chunks) -> None:
    keys, content = chunks.keys, chunks.content
    batch = max(1, FILL_BATCH_BYTES // content.layout.chunk_bytes)
    with server.client(Transport.HTTP) as client, progress_bar(len(keys), "storing chunks") as advance:
        for first in range(0, len(keys), batch):
            some = keys[first : first + batch]
            client.put_chunks(some, [content.chunk(first + index) for index in range(len(some))])
            advance(len(some))


def _data_files(folder: Path) -> list[Path]:
    """What the store keeps bodies in; its index stays warm, as it does in a running server."""
    data = [file for file in sorted(folder.glob("objectcache-bench-*/data/**/*")) if file.is_file()]
    return [file for file in data if INDEX_NAME not in file.name and not file.is_symlink() and file.stat().st_size]
