"""`bench replacing`: real streams of requests through the policies that encode, without a server: that of a bucket that
replaces chunks, and that of the DRAM tier.

A chunk that is missing is computed, or loaded from its home where it misses in memory. One that is there is read in its
form and decoded, and the quality that it has lost counts as `alpha_s` says. So each stream costs so many seconds with
each set of codecs, and what is asked for is which set costs least: none, one codec alone under the same policy, or the
default ones together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

from bench.core import options
from bench.core.experiment import Experiment, published
from bench.core.options import each, real
from bench.core.plots import Chart, Kind, draw
from bench.core.show import Json, Section, table
from bench.paper.tiers.replay import Stream, Trace, read
from descriptors.kv_forms import KvLayout
from objectcache.calibration.samples import progress_bar
from objectcache.cli.config_compression import DEFAULT_CODECS
from objectcache.kv_codecs.encoding import encoded_bytes_max
from objectcache.kv_codecs.layer import Codec
from storage_server.cache.policies.choice import Eviction, policy_of
from storage_server.cache.policies.ladder import COMPUTED_BYTES_PER_S, ChunkForm, Ladders
from storage_server.cache.policies.memory_trials import TryingMemoryPolicy
from storage_server.cache.policies.order import Request
from storage_server.cache.policies.reader_forms import ChunkUse
from storage_server.cache.policies.utility import UtilitySettings
from storage_server.planning.forms import Reading, shape_of

LAYOUT = KvLayout(32, 512, 1024, "bfloat16")
"""Chunks of 512 tokens, as the traces have them, of a model of 8 B parameters: 64 MiB each."""
SHAPE = shape_of(LAYOUT)
EXACT_BYTES = LAYOUT.nbytes
READ_BYTES_PER_S, HOME_BYTES_PER_S = 4e9, 1e9
"""The rate of an NVMe disk, under a bucket; and that of a home behind memory."""
SETS: Mapping[str, tuple[Codec, ...]] = {
    "none": (),
    **{codec.value: (codec,) for codec in DEFAULT_CODECS},
    "all three": tuple(DEFAULT_CODECS),
}


@dataclass(frozen=True, slots=True)
class ReplacingSettings:
    """Each trace is replayed at each capacity, as parts of all its chunks, for each worth of quality in seconds."""

    traces: tuple[Trace, ...] = options.choice("--traces", tuple(Trace), tuple(Trace))
    capacities: tuple[float, ...] = options.setting("--capacities", (0.1, 0.25, 0.5), (0.25,), each(real(1e-3, 1)))
    alphas_s: tuple[float, ...] = options.setting("--alphas-s", (1.0, 0.25, 0.1), (1.0,), each(real(0, 1e6)))
    request_count: int = options.count("--requests", 1 << 20, 400, text="of each trace at most")


def measure_replacing(settings: ReplacingSettings, origin: Mapping[str, Any]) -> Json:
    """Replay all of it, each case in one of as many processes as there are cores."""
    cases = [
        {"place": place, "trace": trace.value, "capacity": capacity, "alpha_s": alpha_s, "codecs": name}
        for place in REPLAYS
        for trace in settings.traces
        for capacity in settings.capacities
        for alpha_s in settings.alphas_s
        for name in SETS
    ]
    rows: list[Json] = []
    with progress_bar(len(cases), "replaying") as done, ProcessPoolExecutor() as pool:
        for case, seen in zip(cases, pool.map(partial(_replayed, settings.request_count), cases), strict=True):
            rows.append(case | seen)
            done(1)
    return published("replacing", origin, settings, None, rows=rows)


_read = cache(read)


def _replayed(request_count: int, case: Json) -> dict[str, Any]:
    stream = _read(Trace(case["trace"]), request_count)
    chunk_count = len({key for each in stream.requests for key in each.keys})
    capacity_bytes = int(case["capacity"] * EXACT_BYTES * chunk_count)
    return REPLAYS[case["place"]](stream, capacity_bytes, case["alpha_s"], SETS[case["codecs"]])


def replay_bucket(stream: Stream, capacity_bytes: int, alpha_s: float, codecs: Sequence[Codec]) -> dict[str, Any]:
    """The seconds that a stream costs with a bucket that replaces chunks, and the forms of its hits."""
    settings = _settings(codecs, alpha_s, READ_BYTES_PER_S)
    ladder = Ladders(settings).of(ChunkForm(LAYOUT))
    policy = policy_of(Eviction.REUSE_VALUE, capacity_bytes)
    asked, hits = 0, Counter[Codec]()
    for request in stream.requests:
        keys = request.keys
        asked += len(keys)
        for key in keys[: policy.hit_count(keys)]:
            rung = policy.resident(key).rung
            hits[Codec.EXACT if rung is None else rung.codec] += 1
        sizes_bytes = [EXACT_BYTES] * len(keys)
        policy.request(Request(request.now_s, keys, sizes_bytes, request.shared_count, dict.fromkeys(keys, ladder)))
        policy.encoded.clear()  # as if it were done at once
    missed_s = (asked - hits.total()) * EXACT_BYTES / COMPUTED_BYTES_PER_S
    return _costs(asked, hits, missed_s, settings, settings.home_bytes_per_s)


def replay_memory(stream: Stream, capacity_bytes: int, alpha_s: float, codecs: Sequence[Codec]) -> dict[str, Any]:
    """The seconds that a stream costs with a DRAM tier over a home that has everything, and the forms of its hits. A
    chunk that comes back in a better form is loaded once more.
    """
    settings = _settings(codecs, alpha_s, HOME_BYTES_PER_S)
    reading = Reading(SHAPE, LAYOUT.num_layers, tuple(codecs)) if codecs else None
    policy = TryingMemoryPolicy(capacity_bytes, settings)
    held: dict[tuple[str, int], Codec] = {}
    asked, again, hits = 0, 0, Counter[Codec]()
    for request in stream.requests:
        uses = [ChunkUse((str(key), 0), EXACT_BYTES) for key in request.keys]
        asked += len(uses)
        hits.update(held[use.key] for use in uses if use.key in held)
        decision = policy.request(request.now_s, uses, reading)
        again += len(set(decision.evicted).intersection(decision.admitted))
        for key in decision.evicted:
            del held[key]
        for key, encoding in {**decision.recoded, **decision.admitted}.items():
            held[key] = Codec.EXACT if encoding is None else encoding.codec
    missed_s = (asked - hits.total() + again) * EXACT_BYTES / settings.home_bytes_per_s
    return _costs(asked, hits, missed_s, settings, settings.memory_bytes_per_s)


REPLAYS: Mapping[str, Callable[[Stream, int, float, Sequence[Codec]], dict[str, Any]]] = {
    "bucket": replay_bucket,
    "memory": replay_memory,
}


def _settings(codecs: Sequence[Codec], alpha_s: float, home_bytes_per_s: float) -> UtilitySettings:
    figures = {codec: DEFAULT_CODECS[codec] for codec in codecs}
    return UtilitySettings(figures, alpha_s=alpha_s, home_bytes_per_s=home_bytes_per_s)


def _costs(
    asked: int, hits: Counter[Codec], missed_s: float, settings: UtilitySettings, bytes_per_s: float
) -> dict[str, Any]:
    read_s = lost = 0.0
    for codec, count in hits.items():
        figures = settings.codecs.get(codec)
        read_s += count * _nbytes(codec) / bytes_per_s
        if figures is not None:
            read_s += count * EXACT_BYTES / figures.decoded_bytes_per_s
            lost += count * (1 - figures.quality)
    return {
        "hit_rate": hits.total() / asked,
        "quality": 1 - lost / max(1, hits.total()),
        "missed_s": missed_s,
        "read_s": read_s,
        "lost_quality_s": settings.alpha_s * lost,
        "cost_s": missed_s + read_s + settings.alpha_s * lost,
        "hits": {codec.value: count for codec, count in sorted(hits.items(), key=lambda item: item[0].value)},
    }


def _nbytes(codec: Codec) -> int:
    return EXACT_BYTES if codec is Codec.EXACT else LAYOUT.num_layers * encoded_bytes_max(codec, SHAPE)


def show(result: Json) -> dict[str, Section]:
    """One line for each trace, capacity and worth of quality; the costs are over those without codecs."""
    lines = []
    for row in result["rows"]:
        if row["codecs"] == "none":
            lines.append({**row, "none": row, "over": {}})
        lines[-1]["over"][row["codecs"]] = row["cost_s"] / lines[-1]["none"]["cost_s"]
        lines[-1]["last"] = row
    return {
        "replayed": (
            table(
                lines,
                "place = place | trace = trace | capacity = capacity:.0% | alpha s = alpha_s:.3g",
                "hits, no codecs = none.hit_rate:.3 | hits, all three = last.hit_rate:.3",
                "quality of a hit = last.quality:.4",
                "cost over no codecs: kivi8-1 = over.kivi8-1:.3 | k8v4-1 = over.k8v4-1:.3 | kivi4-1 = over.kivi4-1:.3",
                "all three = over.all three:.3",
            ),
        )
    }


def plot(result: Json, path: Path) -> None:
    """Draw the cost of each set of codecs over none, by capacity."""
    draw(CHART, list(_drawn(result)), "replayed streams; cost over that without codecs", path)


def _drawn(result: Json) -> Iterator[Json]:
    none = 1.0
    for row in result["rows"]:
        none = row["cost_s"] if row["codecs"] == "none" else none
        over = row["cost_s"] / none
        panel = f"{row['place']}, {row['trace']}, alpha {row['alpha_s']:g} s"
        yield {**row, "panel": panel, "drawn": {"median": over, "min": over, "max": over}}


CHART = Chart(Kind.LINES, "capacity", "drawn", "", "codecs", column="panel", across_title="part of all chunks")
REPLACING = Experiment(
    name="replacing",
    help="real streams of requests through the policies that encode chunks, of a bucket and of memory",
    description="See what encoding chunks before they leave is worth. Replay traces through the policy of a bucket "
    "that replaces chunks, and of the DRAM tier, without codecs, with one alone, and with the default ones; nothing is "
    "stored, and encoding takes no time.",
    settings=ReplacingSettings,
    measure=measure_replacing,
    show=show,
    plot=plot,
)
