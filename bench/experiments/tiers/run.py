"""`objectcache bench tiers` on the command line: every policy, at every size, on every stream; and CASCADE's tables."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from bench.beds.kv_stores.running import StoreName
from bench.core.experiment import Experiment, published
from bench.core.options import Options, filled, names, number, real, some_of
from bench.core.options import each as each_of
from bench.core.show import Json
from bench.core.targets import Target
from bench.experiments.tiers.bandwidth import measure_bandwidth
from bench.experiments.tiers.hashing import measure_hashing
from bench.experiments.tiers.layout import measure_layout
from bench.experiments.tiers.replay import CapacityExceeded, Contender, policy_of, replay
from bench.experiments.tiers.replayed import ReplaySettings, measure_ablation, measure_stores
from bench.experiments.tiers.sharing import Blocks, blocks_of, measure_sharing, sessions_of
from bench.experiments.tiers.show import plot, show
from bench.experiments.tiers.traces import Stream, Trace, read
from calibration.content import VerificationError
from calibration.samples import progress_bar

OVER_BEST_MIN = 0.99
"""Our hit rate over that of the best other online policy."""
GAP_CLOSED_MIN = 1 / 3
"""Of the difference between the best other online policy and the optimum, in caches of at most GAP_PERCENT_MAX."""
GAP_PERCENT_MAX = 5
SMOKE_REQUESTS = 300
ENDS = (Contender.REUSE_VALUE, Contender.OPTIMUM)


class Part(Enum):
    """By their names on the command line, which are also the keys of the result."""

    HIT_RATES = "hit_rates"
    TABLE_1 = "table_1"
    TABLE_2 = "table_2"
    TABLE_3 = "table_3"
    TABLE_4 = "table_4"
    TABLE_5 = "table_5"
    TABLE_6 = "table_6"


@dataclass(frozen=True, slots=True)
class TiersSettings:
    """`sizes_percent` are parts of the bytes that a stream's chunks have, each chunk once. The tables are CASCADE's:
    `block_count` blocks in Tables I and IV, prompts and sessions in II, III and V.
    """

    parts: tuple[Part, ...]
    traces: tuple[Trace, ...]
    sizes_percent: tuple[int, ...]
    policies: tuple[Contender, ...]
    request_count_max: int | None
    block_count: int
    prompt_count: int
    session_count: int
    replayed_prompt_count: int
    replayed_session_count: int
    stored_blocks_max: int
    token_bytes: int
    token_us: float
    stores: tuple[StoreName, ...]
    runs: int
    seed: int
    folder: Path | None

    @property
    def replay(self) -> ReplaySettings:
        """Of Tables III and V."""
        return ReplaySettings(
            self.replayed_prompt_count,
            self.replayed_session_count,
            self.token_bytes,
            self.token_us / 1e6,
            self.runs,
            self.seed,
            self.stores,
            self.folder,
        )


def measure_tiers(settings: TiersSettings, origin: Mapping[str, Any]) -> Json:
    """The chosen parts, with the targets. Wrong bytes, or a policy that keeps more than its capacity, are the problem
    of the result.
    """
    streams = {trace: read(trace, settings.request_count_max) for trace in settings.traces}
    tables: dict[Part, Callable[[], Json]] = {
        Part.TABLE_1: lambda: measure_layout(settings.folder, settings.block_count, settings.runs, settings.seed),
        Part.TABLE_2: lambda: measure_sharing(
            _workloads(settings, streams), settings.stored_blocks_max, settings.folder
        ),
        Part.TABLE_3: lambda: measure_stores(settings.replay),
        Part.TABLE_4: lambda: measure_bandwidth(settings.folder, settings.block_count, settings.runs, settings.seed),
        Part.TABLE_5: lambda: measure_ablation(settings.replay),
        Part.TABLE_6: lambda: measure_hashing(settings.folder, settings.runs, settings.seed),
    }
    found: dict[str, Any] = {}
    targets: list[Target] = []
    problem = None
    if Part.HIT_RATES in settings.parts:
        found["hit_rates"], targets, problem = _hit_rates(settings, streams)
    for part, measure in tables.items():
        if part in settings.parts and problem is None:
            try:
                found[part.value] = measure()
            except VerificationError as error:
                problem = f"{part.value}: {error}"
    counts = {trace.value: described(stream) for trace, stream in streams.items()}
    listed = [{**target.json(), "case": target.case, "side": target.side.value} for target in targets]
    return published("tiers", origin, settings, problem, streams=counts, **found, targets=listed)


def _workloads(settings: TiersSettings, streams: Mapping[Trace, Stream]) -> dict[str, Sequence[Blocks]]:
    """Table II's: prompts that share 2,048 and 8,192 tokens, and the recorded streams."""
    found: dict[str, Sequence[Blocks]] = {
        f"synthetic, {tokens} shared tokens": sessions_of(
            settings.prompt_count, settings.session_count, tokens, settings.seed
        )
        for tokens in (2048, 8192)
    }
    return found | {f"trace {trace.value}": blocks_of(stream) for trace, stream in streams.items()}


def _hit_rates(
    settings: TiersSettings, streams: Mapping[Trace, Stream]
) -> tuple[dict[str, dict[str, Json]], list[Target], str | None]:
    contenders = (*(each for each in settings.policies if each not in ENDS), *ENDS)
    step_count = sum(len(stream.requests) for stream in streams.values())
    hit_rates: dict[str, dict[str, Json]] = {}
    targets: list[Target] = []
    problem = None
    with progress_bar(step_count * len(settings.sizes_percent) * len(contenders), "requests") as advance:
        for trace, stream in streams.items():
            cells = hit_rates[trace.value] = {}
            for percent in settings.sizes_percent:
                capacity_bytes = stream.unique_bytes * percent // 100
                rates = {}
                for contender in contenders:
                    try:
                        served = replay(stream, policy_of(contender, capacity_bytes, stream), advance)
                    except CapacityExceeded as error:
                        problem = problem or f"{contender.value}, {trace.value}, {percent} %: {error}"
                        continue
                    rates[contender] = served.hit_rate
                cells[f"{percent} %"] = {"capacity_tokens": capacity_bytes, **compared(rates)}
                targets += targets_of(cells[f"{percent} %"], f"{trace.value}, {percent} %", percent)
    return hit_rates, targets, problem


def described(stream: Stream) -> dict[str, int | float]:
    """The size of a stream."""
    requests = stream.requests
    return {
        "request_count": len(requests),
        "scored_request_count": len(requests) - len(requests) // 2,
        "asked_tokens": sum(sum(each.sizes_bytes) for each in requests),
        "unique_tokens": stream.unique_bytes,
        "duration_s": requests[-1].now_s - requests[0].now_s if requests else 0.0,
    }


def compared(rates: Mapping[Contender, float]) -> dict[str, Any]:
    """The hit rates of one size, ours over the best other online policy, and how much of the gap ours closes. Both are
    None where there is nothing to divide by.
    """
    others = {contender: rate for contender, rate in rates.items() if contender not in ENDS}
    best = max(others, key=lambda contender: others[contender], default=None)
    ours, optimum = (rates.get(contender) for contender in ENDS)
    over_best = gap_closed = None
    if best is not None and ours is not None:
        over_best = ours / others[best] if others[best] else None
        if optimum is not None and optimum > others[best]:
            gap_closed = (ours - others[best]) / (optimum - others[best])
    return {"policies": rates, "best_other": best, "over_best_other": over_best, "gap_closed": gap_closed}


def targets_of(cell: Json, case: str, percent: int) -> list[Target]:
    """What one size has to reach."""
    found = [Target("over the best other online policy", OVER_BEST_MIN, cell["over_best_other"], case=case)]
    if percent <= GAP_PERCENT_MAX:
        found.append(Target("gap to the optimum closed", GAP_CLOSED_MIN, cell["gap_closed"], case=case))
    return found


def _declare(options: Options) -> None:
    traces, others = tuple(Trace), tuple(each for each in Contender if each not in ENDS)
    parts, stores = tuple(Part), tuple(StoreName)
    text = f"what to measure; default: {names(parts)}"
    options.add("--parts", type=some_of(parts), default=parts, metavar="LIST", help=text)
    text = f"recorded streams; default: {names(traces)}"
    options.add("--traces", type=some_of(traces), default=traces, metavar="LIST", help=text)
    text = "capacities in percent of the stream's unique bytes; default: 1,5,10,25"
    sizes = each_of(number(1, 100))
    options.add("--sizes", dest="sizes_percent", type=sizes, metavar="LIST", full=(1, 5, 10, 25), smoke=(5,), help=text)
    text = f"beside ours and the optimum; default: {names(others)}"
    options.add("--policies", type=some_of(others), default=others, metavar="LIST", help=text)
    text = "the first requests of each stream only; default: all"
    many = number(2, 10_000_000)
    options.add("--requests", dest="request_count_max", type=many, metavar="K", smoke=SMOKE_REQUESTS, help=text)
    for flag, name, full, smoke, text in (
        ("--blocks", "block_count", 100, 4, "blocks of Tables I and IV"),
        ("--prompts", "prompt_count", 100, 3, "shared prompts of Table II"),
        ("--sessions", "session_count", 50, 3, "sessions of each prompt of Table II"),
        ("--replayed-prompts", "replayed_prompt_count", 10, 2, "shared prompts of Tables III and V"),
        ("--replayed-sessions", "replayed_session_count", 10, 2, "sessions of each prompt of Tables III and V"),
        ("--stored-blocks", "stored_blocks_max", 40_000, 100, "blocks that Table II stores, beside counting all"),
        ("--token-bytes", "token_bytes", 8192, 1024, "KV of a token in Tables III and V: the model of bench engine"),
        ("--runs", "runs", 5, 1, "rounds of the tables"),
    ):
        kind, shown = number(1, 1 << 30), f"{text}; default: {full:,}"
        options.add(flag, dest=name, type=kind, metavar="K", full=full, smoke=smoke, help=shown)
    text = "microseconds that computing a token takes; default: 736, vLLM's for 2,048 tokens in bench engine"
    options.add("--token-us", dest="token_us", type=real(0, 1e9), default=736.0, metavar="US", help=text)
    text = f"of Table III; default: {names(stores)}"
    small = (StoreName.OBJECTCACHE, StoreName.FILES)
    options.add("--stores", type=some_of(stores), full=stores, smoke=small, metavar="LIST", help=text)
    options.add("--seed", type=number(0, 1 << 30), default=1, metavar="K", help="of the blocks; default: 1")
    text = "a folder for the stores; default: the system's temporary folder"
    options.add("--folder", type=Path, default=None, metavar="DIR", help=text)


def _measure(options: argparse.Namespace, origin: Mapping[str, Any]) -> Json:
    return measure_tiers(filled(TiersSettings, options), origin)


TIERS = Experiment(
    name="tiers",
    help="eviction policies on recorded request streams, and the tables of CASCADE's paper on this machine",
    description="Plays recorded request streams through caches of several sizes under each eviction policy. A hit is "
    "a token of the leading run of chunks that are resident. The first half of a stream fills the cache, the second "
    "half is scored. The optimum knows the future. Then the tables of CASCADE's paper: layouts, deduplication, stores "
    "behind one adapter, the bandwidth of each tier, ours with parts left out, and hashing.",
    declare=_declare,
    measure=_measure,
    show=show,
    plot=plot,
    charts="DIR",
)
