"""`objectcache bench tiers` on the command line: every policy, at every size, on every stream; and CASCADE's tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from bench.core import options
from bench.core.experiment import Experiment, published
from bench.core.options import real
from bench.core.rounds import Target
from bench.core.show import Json
from bench.paper.kv_stores.running import StoreName
from bench.paper.tiers.bandwidth import measure_bandwidth
from bench.paper.tiers.blocks import (
    Blocks,
    blocks_of,
    measure_hashing,
    measure_layout,
    measure_sharing,
    sessions_of,
)
from bench.paper.tiers.replay import CapacityExceeded, Contender, Stream, Trace, policy_of, read, replay
from bench.paper.tiers.replayed import ReplaySettings, measure_ablation, measure_stores
from bench.paper.tiers.show import plot, show
from objectcache.calibration.content import VerificationError
from objectcache.calibration.samples import progress_bar

OVER_BEST_MIN = 0.99
"""Our hit rate over that of the best other online policy."""
GAP_CLOSED_MIN = 1 / 3
"""The part that is closed of the gap between the best other online policy and the optimum, in caches of at most
GAP_PERCENT_MAX."""
GAP_PERCENT_MAX = 5
ENDS = (Contender.REUSE_VALUE, Contender.OPTIMUM)
OTHERS = tuple(each for each in Contender if each not in ENDS)
SMOKE_STORES = (StoreName.OBJECTCACHE, StoreName.FILES)
SIZES_HELP = "capacities in percent of the stream's unique bytes"
REQUESTS_HELP = "the first requests of each stream only; default: all"
TOKEN_BYTES_HELP = "KV of a token in Tables III and V: the model of bench engine"
TOKEN_US_HELP = "microseconds that computing a token takes, as vLLM does for 2,048 tokens in bench engine"


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

    parts: tuple[Part, ...] = options.choice("--parts", Part, tuple(Part), text="what to measure")
    traces: tuple[Trace, ...] = options.choice("--traces", Trace, tuple(Trace), text="recorded streams")
    sizes_percent: tuple[int, ...] = options.count("--sizes", (1, 5, 10, 25), (5,), most=100, text=SIZES_HELP)
    policies: tuple[Contender, ...] = options.choice("--policies", OTHERS, OTHERS, text="beside ours and the optimum")
    request_count_max: int | None = options.count("--requests", None, 300, 2, 10_000_000, text=REQUESTS_HELP)
    block_count: int = options.count("--blocks", 100, 4, text="blocks of Tables I and IV")
    prompt_count: int = options.count("--prompts", 100, 3, text="shared prompts of Table II")
    session_count: int = options.count("--sessions", 50, 3, text="sessions of each prompt of Table II")
    replayed_prompt_count: int = options.count("--replayed-prompts", 10, 2, text="shared prompts of Tables III and V")
    replayed_session_count: int = options.count("--replayed-sessions", 10, 2, text="sessions of each, Tables III and V")
    stored_blocks_max: int = options.count(
        "--stored-blocks", 40_000, 100, text="that Table II stores, beside counting all"
    )
    token_bytes: int = options.count("--token-bytes", 8192, 1024, text=TOKEN_BYTES_HELP)
    token_us: float = options.setting("--token-us", 736.0, 20.0, real(0, 1e9), TOKEN_US_HELP)
    stores: tuple[StoreName, ...] = options.choice(
        "--stores", StoreName, tuple(StoreName), SMOKE_STORES, "of Table III"
    )
    runs: int = options.runs(5, text="rounds of the tables")
    seed: int = options.seed()
    settle_s: float = options.sized(2.0, 0.2)
    folder: Path | None = options.folder()

    @property
    def replay(self) -> ReplaySettings:
        """The replay of Tables III and V."""
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
        Part.TABLE_4: lambda: _bandwidth(settings),
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
    listed = [target.json("case", "side") for target in targets]
    return published("tiers", origin, settings, problem, streams=counts, **found, targets=listed)


def _bandwidth(settings: TiersSettings) -> Json:
    return measure_bandwidth(settings.folder, settings.block_count, settings.runs, settings.seed, settings.settle_s)


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


TIERS = Experiment(
    name="tiers",
    help="eviction policies on recorded request streams, and the tables of CASCADE's paper on this machine",
    description="Choose an eviction policy and a cache size, and compare stores. Plays recorded request streams "
    "through caches of several sizes under each eviction policy. A hit is a token of the leading run of "
    "chunks that are resident. The first half of a stream fills the cache, the second half is scored. The "
    "optimum knows the future. Then the tables of CASCADE's paper: layouts, deduplication, stores behind "
    "one adapter, the bandwidth of each tier, ours with parts left out, and hashing.",
    settings=TiersSettings,
    measure=measure_tiers,
    show=show,
    plot=plot,
    charts="DIR",
)
