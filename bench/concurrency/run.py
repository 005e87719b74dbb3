"""Measuring: client processes that fetch at the same moment, every transport and count in every round."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from bench.baselines import MemoryCopy
from bench.child import BaselineError, Child
from bench.concurrency.fetcher import Job
from bench.concurrency.memory import MemoryWatch, own_bytes, tree
from bench.concurrency.waves import Level, RequestTimes, Wave, shares
from bench.content import VerificationError
from bench.progress import progress_bar
from bench.server import BenchServer, running_server
from descriptors.layout import ChunkLayout
from descriptors.units import MIB
from nixl_client.client import Transport
from storage_server.settings import StorageSettings

START_DELAY_S = 0.02
WARMING_ROUNDS = 3
SETTLE_S_MAX = 5.0
FILL_BYTES_PER_S = 256 * MIB
"""Surely slower than the server takes chunks into its memory: it proves their bytes first."""
FILL_BATCH_BYTES = 64 * MIB


@dataclass(frozen=True, slots=True)
class ConcurrencySettings:
    """What to measure. N, L, G and S are of each fetch; `prefix_count` different payloads are stored."""

    counts: tuple[int, ...]
    transports: tuple[str, ...]
    workers: int
    processes: int
    chunk_count: int
    num_layers: int
    chunk_tokens: int
    per_layer_chunk_bytes: int
    prefix_count: int
    runs: int
    seed: int
    memcpy_bytes: int
    dram_bytes: int | None = None
    folder: Path | None = None

    @property
    def layout(self) -> ChunkLayout:
        """L, G and S."""
        return ChunkLayout(self.num_layers, self.chunk_tokens, self.per_layer_chunk_bytes)

    def job(self, server: BenchServer) -> Job:
        """What each client process does; the busiest of them has the largest share of the largest count."""
        return Job(
            server.url,
            server.access_key,
            server.secret_key,
            self.transports,
            self.chunk_count,
            self.num_layers,
            self.chunk_tokens,
            self.per_layer_chunk_bytes,
            self.prefix_count,
            self.seed,
            shares(max(self.counts), self.processes)[0],
        )


@dataclass(frozen=True, slots=True)
class Concurrency:
    """What was found. `fixed_bytes` is the server's own memory before its first request; with what is configured on top
    of it, it is the bound its memory must keep.
    """

    levels: Sequence[Level]
    fixed_bytes: int | None
    bound_bytes: int | None
    server_processes: int
    problem: str | None = None


def measure_concurrency(settings: ConcurrencySettings) -> Concurrency:
    """Run it all; wrong bytes are the result's `problem`. Raises BaselineError, BenchServerError, ObjectCacheError."""
    options = ["--workers", str(settings.workers)]
    storage = StorageSettings(data_dir=Path())
    if settings.dram_bytes is not None:
        options += ["--dram-bytes", str(settings.dram_bytes)]
        storage = replace(storage, dram_bytes=settings.dram_bytes)
    with ExitStack() as stack:
        server = stack.enter_context(running_server(settings.folder, options))
        pids = tree(server.pid)
        fixed_bytes = own_bytes(pids)
        configured = storage.staging_bytes + storage.dram_bytes + storage.buffer_bytes
        bound_bytes = None if fixed_bytes is None else fixed_bytes + configured
        job = settings.job(server)
        _fill(server, job)
        children = _start(settings.processes, job, stack)
        copy = MemoryCopy(settings.memcpy_bytes)
        waves: dict[tuple[str, int], list[Wave]] = {
            (name, count): [] for name in settings.transports for count in settings.counts
        }
        try:
            _rounds(settings, children, pids, copy, waves)
            problem = None
        except VerificationError as error:
            problem = str(error)
        levels = [
            Level(name, count, job.payload_bytes, tuple(found)) for (name, count), found in waves.items() if found
        ]
        return Concurrency(levels, fixed_bytes, bound_bytes, len(pids), problem)


def _start(count: int, job: Job, stack: ExitStack) -> list[Child]:
    """Client processes, all at once; `stack` ends them."""

    def start(_: int) -> Child:
        child = Child("bench.concurrency.fetcher", job.to_line())
        stack.callback(child.close)
        return child

    with ThreadPoolExecutor(count) as starters:
        return list(starters.map(start, range(count)))


def _rounds(
    settings: ConcurrencySettings,
    children: Sequence[Child],
    pids: list[int],
    copy: MemoryCopy,
    waves: dict[tuple[str, int], list[Wave]],
) -> None:
    """Warm up, so that connections stand and what is to be in the DRAM tier is there; then count."""
    stored_bytes = settings.prefix_count * settings.layout.payload_bytes(settings.chunk_count)
    settle_s = min(SETTLE_S_MAX, stored_bytes / FILL_BYTES_PER_S)
    for round_index in range(WARMING_ROUNDS):
        for name in settings.transports:
            _wave(children, name, min(max(settings.counts), settings.prefix_count), pids, 1.0)
        if round_index and settings.dram_bytes != 0:
            time.sleep(settle_s)
    with progress_bar(settings.runs * len(waves), "fetching at once") as advance:
        for _ in range(settings.runs):
            rate = copy.nbytes / copy.run()
            for (name, count), found in waves.items():
                found.append(_wave(children, name, count, pids, rate))
                advance(1)


def _wave(children: Sequence[Child], transport: str, count: int, pids: list[int], memcpy_bytes_per_s: float) -> Wave:
    """One wave over as many processes as it has fetches. Raises VerificationError, BaselineError."""
    busy = [(child, share) for child, share in zip(children, shares(count, len(children)), strict=True) if share]
    first = 0
    for child, share in busy:
        child.tell(f"{transport} {first} {share}")
        first += share
    for child, _ in busy:
        child.answer()
    with MemoryWatch(pids) as memory:
        start_at_s = time.monotonic() + START_DELAY_S
        for child, _ in busy:
            child.tell(repr(start_at_s))
        answers = [json.loads(child.answer()) for child, _ in busy]
    for answer in answers:
        if "problem" in answer:
            raise (VerificationError if answer["wrong_bytes"] else BaselineError)(answer["problem"])
    times = tuple(RequestTimes(**each) for answer in answers for each in answer["times"])
    return Wave(times, memcpy_bytes_per_s, memory.peak_bytes)


def _fill(server: BenchServer, job: Job) -> None:
    batch = max(1, FILL_BATCH_BYTES // job.layout.chunk_bytes)
    with server.client(Transport.HTTP) as client, progress_bar(job.prefix_count, "storing chunks") as advance:
        for prefix_index, content in enumerate(job.contents()):
            keys = job.keys(prefix_index)
            for first in range(0, len(keys), batch):
                some = keys[first : first + batch]
                client.put_chunks(some, [content.chunk(first + index) for index in range(len(some))])
            advance(1)
