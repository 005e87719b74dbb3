"""`bench concurrency`: many descriptor GETs at once, by client processes that fetch at the same moment. Every transport
and count is in every round.

A wave is one round of so many fetches at once: of each `requests` when it was asked for, had its first layer and had
ended, in seconds since the wave began; the copy rate of the round; and the most memory that the server's processes had
of their own meanwhile, None where it could not be seen.

Jain's index of n rates x: (sum x)^2 / (n * sum x^2): 1 where all are served alike, 1/n where one is served alone
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.beds.baselines import MemoryCopy
from bench.beds.fetchers import Job, Order, fetch_at_once, fill, start_fetchers, warm_up
from bench.beds.memory import own_bytes, tree, watched
from bench.beds.processes import Child, shares
from bench.core import options
from bench.core.experiment import Experiment, WrongUse, need_nixl, published
from bench.core.plots import Chart, Kind, draw
from bench.core.show import Column, Json, Section, fixed, size, table
from descriptors.layout import ChunkLayout
from descriptors.units import GIB, KIB, MIB
from nixl_client.client import FETCHES_MAX, Transport
from objectcache.calibration.content import VerificationError
from objectcache.calibration.samples import interleaved, spread
from objectcache.calibration.servers import LocalServer, running_server
from storage_server.settings import StorageSettings

TRANSPORTS = (Transport.SHM, Transport.UCX, Transport.HTTP)


@dataclass(frozen=True, slots=True)
class ConcurrencySettings:
    """What to measure. N, L, G and S are of each fetch; `prefix_count` different payloads are stored."""

    counts: tuple[int, ...] = options.count("--counts", (1, 4, 16, 64), (1, 4), most=1024, text="fetches at once")
    transports: tuple[Transport, ...] = options.choice("--transports", TRANSPORTS, TRANSPORTS)
    workers: int = options.count("--workers", 1, most=256, text="of `objectcache serve`")
    processes: int = options.count("--processes", 4, 2, most=64, text="client processes")
    chunk_count: int = options.chunk_count(16, 4, "of a fetch")
    num_layers: int = options.num_layers(32, 4)
    chunk_tokens: int = options.sized(16)
    per_layer_chunk_bytes: int = options.slice_bytes(64 * KIB, 4 * KIB, "of a fetch")
    prefix_count: int = options.count("--prefixes", 8, 3, most=4096, text="different payloads")
    runs: int = options.runs(5)
    seed: int = options.seed()
    memcpy_bytes: int = options.sized(256 * MIB, 16 * MIB)
    dram_bytes: int | None = options.count("--dram-bytes", None, None, 0, 1024 * GIB, text="of `objectcache serve`")
    folder: Path | None = options.folder("for the store")

    def job(self, server: LocalServer) -> Job:
        """What each client process does; the busiest of them has the largest share of the largest count."""
        layout = ChunkLayout(self.num_layers, self.chunk_tokens, self.per_layer_chunk_bytes)
        busiest = shares(max(self.counts), self.processes)[0]
        shape = (self.chunk_count, layout, self.seed, self.prefix_count, busiest)
        return Job(server, self.transports, "concurrency", *shape)


def measure_concurrency(settings: ConcurrencySettings, origin: Mapping[str, Any]) -> Json:
    """Run it all; wrong bytes are the result's `problem`. Raises FAILURES."""
    need_nixl(Transport.UCX in settings.transports, "--transports shm,http")
    busiest = shares(max(settings.counts), settings.processes)[0]
    if busiest > FETCHES_MAX:
        raise WrongUse(f"{busiest} fetches in one process; a client makes at most {FETCHES_MAX} at once")
    serve = ["--workers", str(settings.workers)]
    storage = StorageSettings(data_dir=Path())
    if settings.dram_bytes is not None:
        serve += ["--dram-bytes", str(settings.dram_bytes)]
        storage = replace(storage, dram_bytes=settings.dram_bytes)
    with ExitStack() as stack:
        server = stack.enter_context(running_server(settings.folder, serve))
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


def level_of(transport: str, count: int, payload_bytes: int, waves: Sequence[Json]) -> dict[str, Any]:
    """All rounds of so many fetches at once over one transport, each of `payload_bytes`. The throughput is that of all
    together; Jain's index, over the fetches' own rates, and the ratio of completion times are the median rounds'.
    """
    ended_s = [[request["ended_s"] for request in wave["requests"]] for wave in waves]
    return {
        "transport": transport,
        "count": count,
        "payload_bytes": payload_bytes,
        "throughput_bytes_per_s": spread(_rates_bytes_per_s(payload_bytes, waves)),
        "jain": statistics.median(jain_index([payload_bytes / each_s for each_s in wave]) for wave in ended_s),
        "slowest_over_fastest": statistics.median(max(wave) / min(wave) for wave in ended_s),
        "ended_s": spread([each_s for wave in ended_s for each_s in wave]),
        "first_layer_s": spread([request["first_layer_s"] for wave in waves for request in wave["requests"]]),
        "memory_bytes_max": max((each["memory_bytes"] for each in waves if each["memory_bytes"]), default=None),
        "waves": waves,
    }


def jain_index(rates: Sequence[float]) -> float:
    """From 1/n to 1. Raises ValueError without a rate."""
    if not rates:
        raise ValueError("no rates")
    return sum(rates) ** 2 / (len(rates) * sum(rate**2 for rate in rates))


def ratios(levels: Sequence[Json]) -> dict[str, float]:
    """Medians over the rounds that both have, since wrong bytes may end a round early: to the single fetch, and to
    memcpy.
    """
    rates = {
        (each["transport"], each["count"]): _rates_bytes_per_s(each["payload_bytes"], each["waves"]) for each in levels
    }
    found = {}
    for level in levels:
        transport, count = level["transport"], level["count"]
        mine, single = rates[transport, count], rates.get((transport, 1))
        copies = [wave["memcpy_bytes_per_s"] for wave in level["waves"]]
        found[f"{transport}_{count}_over_memcpy"] = _median_ratio(mine, copies)
        if single is not None and count != 1:
            found[f"{transport}_{count}_over_1"] = _median_ratio(mine, single)
    return found


def server_of(levels: Sequence[Json], processes: int, fixed_bytes: int | None, configured_bytes: int) -> dict[str, Any]:
    """The server's memory against its bound: `fixed_bytes`, which it had before its first request, and what is
    configured on top of that. None where it could not be seen.
    """
    peak_bytes = max((each["memory_bytes_max"] for each in levels if each["memory_bytes_max"]), default=None)
    bound_bytes = None if fixed_bytes is None else fixed_bytes + configured_bytes
    return {
        "processes": processes,
        "fixed_bytes": fixed_bytes,
        "bound_bytes": bound_bytes,
        "peak_bytes": peak_bytes,
        "is_within_bound": None if peak_bytes is None or bound_bytes is None else peak_bytes <= bound_bytes,
    }


def _rates_bytes_per_s(payload_bytes: int, waves: Sequence[Json]) -> list[float]:
    """The rates of all fetches of a wave together."""
    ended_s = [[request["ended_s"] for request in wave["requests"]] for wave in waves]
    return [len(wave) * payload_bytes / max(wave) for wave in ended_s]


def _median_ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=False))


def show(result: Json) -> dict[str, Section]:
    """One line for each transport and number of fetches, and the server's memory."""
    ratios, server = result["ratios"], result["server"]

    def over(level: Json, what: str) -> float | None:
        found: float | None = ratios.get(f"{level['transport']}_{level['count']}_over_{what}")
        return found

    memory = "the server's memory could not be seen"
    if server["is_within_bound"] is not None:
        memory = (
            f"the server's own memory, {server['processes']} processes: {size(server['peak_bytes'])} at most, "
            f"{'within' if server['is_within_bound'] else 'OVER'} the bound of {size(server['bound_bytes'])}: "
            f"{size(server['fixed_bytes'])} after its start, plus staging_bytes, dram_bytes and buffer_bytes"
        )
    return {
        "levels": (
            table(
                result["levels"],
                "over = transport | at once = count | GB/s, all together = throughput_bytes_per_s:GB/s",
                Column("over 1", lambda level: over(level, "1"), fixed(2)),
                Column("over memcpy", lambda level: over(level, "memcpy"), fixed(2)),
                "Jain = jain:.3 | slowest over fastest = slowest_over_fastest:.2 | ms until complete = ended_s:ms",
                "first layer = first_layer_s.median:ms | memory = memory_bytes_max:size",
            ),
            memory,
        )
    }


def plot(result: Json, path: Path) -> None:
    """Throughput and completion times over the number of fetches."""
    draw(CHART, list(_drawn(result)), "concurrency; medians, least and greatest", path)


def _drawn(result: Json) -> Iterator[Json]:
    """Each level twice: once for each panel."""
    for title, name, factor in PANELS:
        for level in result["levels"]:
            drawn = {key: value * factor for key, value in level[name].items()}
            yield {"panel": title, "transport": level["transport"], "count": level["count"], "drawn": drawn}


PANELS = (
    ("GB/s of all together, each round", "throughput_bytes_per_s", 1e-9),
    ("ms until each fetch was complete, all rounds", "ended_s", 1e3),
)
CHART = Chart(
    Kind.LINES, "count", "drawn", "", "transport", column="panel", across_title="fetches at once", is_log=True
)


CONCURRENCY = Experiment(
    name="concurrency",
    help="1, 4, 16 and 64 descriptor GETs at once: throughput, fairness and the server's memory",
    description="See what many readers at once get, each of them and together. Fetch different payloads at the same "
    "moment from several client processes over each transport.",
    settings=ConcurrencySettings,
    measure=measure_concurrency,
    show=show,
    plot=plot,
)
