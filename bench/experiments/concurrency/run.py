"""Measuring: client processes that fetch at the same moment, every transport and count in every round."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.beds.baselines import MemoryCopy
from bench.beds.fetchers import Job, Order, fetch_at_once, fill, start_fetchers, warm_up
from bench.beds.memory import own_bytes, tree, watched
from bench.beds.processes import Child, shares
from bench.core.experiment import Experiment, WrongUse, need_nixl, published
from bench.core.options import Options, each, filled, number, some_of
from bench.core.show import Json
from bench.experiments.concurrency.show import plot, show
from bench.experiments.concurrency.waves import level_of, ratios, server_of
from calibration.content import VerificationError
from calibration.samples import interleaved
from calibration.servers import LocalServer, running_server
from descriptors.layout import ChunkLayout
from descriptors.units import GIB, KIB, MIB
from nixl_client.client import FETCHES_MAX, Transport
from storage_server.settings import StorageSettings

TRANSPORTS = (Transport.SHM, Transport.UCX, Transport.HTTP)
CHUNK_TOKENS = 16


@dataclass(frozen=True, slots=True)
class ConcurrencySettings:
    """What to measure. N, L, G and S are of each fetch; `prefix_count` different payloads are stored."""

    counts: tuple[int, ...]
    transports: tuple[Transport, ...]
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

    def job(self, server: LocalServer) -> Job:
        """What each client process does; the busiest of them has the largest share of the largest count."""
        layout = ChunkLayout(self.num_layers, self.chunk_tokens, self.per_layer_chunk_bytes)
        busiest = shares(max(self.counts), self.processes)[0]
        shape = (self.chunk_count, layout, self.seed, self.prefix_count, busiest)
        return Job(server, self.transports, "concurrency", *shape)


def measure_concurrency(settings: ConcurrencySettings, origin: Mapping[str, Any]) -> Json:
    """Run it all; wrong bytes are the result's `problem`. Raises FAILURES."""
    options = ["--workers", str(settings.workers)]
    storage = StorageSettings(data_dir=Path())
    if settings.dram_bytes is not None:
        options += ["--dram-bytes", str(settings.dram_bytes)]
        storage = replace(storage, dram_bytes=settings.dram_bytes)
    with ExitStack() as stack:
        server = stack.enter_context(running_server(settings.folder, options))
        pids = tree(server.pid)
        fixed_bytes = own_bytes(pids)
        job = settings.job(server)
        fill(server, [job])
        children = start_fetchers([job] * settings.processes, stack)
        copy = MemoryCopy(settings.memcpy_bytes)
        places = [(transport, count) for transport in settings.transports for count in settings.counts]
        waves: dict[tuple[Transport, int], list[Json]] = {place: [] for place in places}
        cached_bytes = 0 if settings.dram_bytes == 0 else settings.prefix_count * job.payload_bytes
        problem, rate, rated = None, 1.0, 0
        try:
            most = min(max(settings.counts), settings.prefix_count)
            warm_up(lambda: [_wave(children, each, most, pids, 1.0) for each in settings.transports], cached_bytes)
            for round_index, place in interleaved(places, settings.runs, "fetching at once", uncounted=0):
                if round_index != rated:
                    rate, rated = copy.nbytes / copy.run(), round_index
                waves[place].append(_wave(children, *place, pids, rate))
        except VerificationError as error:
            problem = str(error)
    levels = [
        level_of(transport.value, count, job.payload_bytes, found)
        for (transport, count), found in waves.items()
        if found
    ]
    configured_bytes = storage.staging_bytes + storage.dram_bytes + storage.buffer_bytes
    return published(
        "concurrency",
        origin,
        settings,
        problem,
        ratios=ratios(levels),
        server=server_of(levels, len(pids), fixed_bytes, configured_bytes),
        levels=levels,
    )


def _wave(
    children: Sequence[Child], transport: Transport, count: int, pids: list[int], memcpy_bytes_per_s: float
) -> Json:
    """One wave over as many processes as it has fetches. Raises VerificationError, BaselineError."""
    orders, first = [], 0
    for child, share in zip(children, shares(count, len(children)), strict=True):
        if share:
            orders.append((child, Order(transport, first, share)))
            first += share
    with watched(pids) as peak_bytes:
        answers = fetch_at_once(orders)
    return {
        "requests": [
            {"asked_s": one.asked_s, "first_layer_s": one.ready_s[0], "ended_s": one.ttft_s}
            for seen in answers
            for one in seen
        ],
        "memcpy_bytes_per_s": memcpy_bytes_per_s,
        "memory_bytes": peak_bytes(),
    }


def _declare(options: Options) -> None:
    counts = (1, 4, 16, 64)
    for name, field, parse, metavar, full, smoke, text in (
        ("--counts", "counts", each(number(1, 1024)), "LIST", counts, (1, 4), "fetches at once; default: 1,4,16,64"),
        ("--transports", "transports", some_of(TRANSPORTS), "LIST", TRANSPORTS, TRANSPORTS, "default: shm,ucx,http"),
        ("--workers", "workers", number(1, 256), "COUNT", 1, 1, "of `objectcache serve`; default: 1"),
        ("--processes", "processes", number(1, 64), "P", 4, 2, "client processes; default: 4"),
        ("--prefixes", "prefix_count", number(1, 4096), "P", 8, 3, "different payloads; default: 8"),
    ):
        options.add(name, dest=field, type=parse, metavar=metavar, full=full, smoke=smoke, help=text)
    options.shape((16, 4), (32, 4), (64 * KIB, 4 * KIB), "of a fetch")
    options.add("--dram-bytes", type=number(0, 1024 * GIB), metavar="N", help="of `objectcache serve`")
    options.runs(5)
    options.seed()
    options.folder("for the store")


def _measure(options: argparse.Namespace, origin: Mapping[str, Any]) -> Json:
    need_nixl(Transport.UCX in options.transports, "--transports shm,http")
    busiest = shares(max(options.counts), options.processes)[0]
    if busiest > FETCHES_MAX:
        raise WrongUse(f"{busiest} fetches in one process; a client makes at most {FETCHES_MAX} at once")
    memcpy_bytes = 16 * MIB if options.smoke else 256 * MIB
    settings = filled(ConcurrencySettings, options, chunk_tokens=CHUNK_TOKENS, memcpy_bytes=memcpy_bytes)
    return measure_concurrency(settings, origin)


CONCURRENCY = Experiment(
    name="concurrency",
    help="1, 4, 16 and 64 descriptor GETs at once: throughput, fairness and the server's memory",
    description="Fetch different payloads at the same moment from several client processes over each transport.",
    declare=_declare,
    measure=_measure,
    show=show,
    plot=plot,
)
