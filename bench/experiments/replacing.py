"""`bench replacing`: real streams of requests through the policy of a bucket that replaces chunks, without a server.

A chunk that is missing is computed, one that is there is read in its form and decoded, and the quality that it has lost
counts as `alpha_s` says. So each stream costs so many seconds with each set of codecs, and what is asked for is which
set costs least: none, one codec alone under the same policy, or the default ones together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
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
from objectcache.kv_codecs.layer import Codec
from storage_server.cache.policies.choice import Eviction, policy_of
from storage_server.cache.policies.ladder import COMPUTED_BYTES_PER_S, ChunkForm, Ladder, Ladders
from storage_server.cache.policies.order import Request
from storage_server.cache.policies.utility_policy import UtilitySettings

LAYOUT = KvLayout(32, 512, 1024, "bfloat16")
"""Chunks of 512 tokens, as the traces have them, of a model of 8 B parameters: 64 MiB each."""
READ_BYTES_PER_S = 4e9
"""An NVMe disk's rate."""
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
    alphas_s: tuple[float, ...] = options.setting("--alphas-s", (1.0, 0.1), (1.0,), each(real(0, 1e6)))
    request_count: int = options.count("--requests", 1 << 20, 400, text="of each trace at most")


def measure_replacing(settings: ReplacingSettings, origin: Mapping[str, Any]) -> Json:
    """Replay all of it."""
    streams = {trace: read(trace, settings.request_count) for trace in settings.traces}
    places = [
        (trace, capacity, alpha_s, name)
        for trace in settings.traces
        for capacity in settings.capacities
        for alpha_s in settings.alphas_s
        for name in SETS
    ]
    rows: list[Json] = []
    with progress_bar(len(places), "replaying") as done:
        for trace, capacity, alpha_s, name in places:
            seen = replay(streams[trace], capacity, alpha_s, SETS[name])
            rows.append({"trace": trace.value, "capacity": capacity, "alpha_s": alpha_s, "codecs": name, **seen})
            done(1)
    return published("replacing", origin, settings, None, rows=rows)


def replay(stream: Stream, capacity: float, alpha_s: float, codecs: Sequence[Codec]) -> dict[str, Any]:
    """The seconds that a stream costs with a cache of `capacity` of all its chunks, and the forms of its hits."""
    figures = {codec: DEFAULT_CODECS[codec] for codec in codecs}
    settings = UtilitySettings(figures, alpha_s=alpha_s, home_bytes_per_s=READ_BYTES_PER_S)
    ladder = Ladders(settings).of(ChunkForm(LAYOUT))
    exact_bytes = ladder[0].nbytes
    chunks = {key for request in stream.requests for key in request.keys}
    policy = policy_of(Eviction.REUSE_VALUE, int(capacity * len(chunks) * exact_bytes))
    asked, hits = 0, Counter[Codec]()
    for request in stream.requests:
        keys = request.keys
        asked += len(keys)
        for key in keys[: policy.hit_count(keys)]:
            rung = policy.resident(key).rung
            hits[Codec.EXACT if rung is None else rung.codec] += 1
        sizes_bytes = [exact_bytes] * len(keys)
        policy.request(Request(request.now_s, keys, sizes_bytes, request.shared_count, dict.fromkeys(keys, ladder)))
        policy.encoded.clear()  # as if it were done at once
    computed_s = (asked - hits.total()) * exact_bytes / COMPUTED_BYTES_PER_S
    loaded_s = sum(count * _loaded_s(ladder, codec, settings) for codec, count in hits.items())
    lost = sum(count * (1 - DEFAULT_CODECS[codec].quality) for codec, count in hits.items() if codec in DEFAULT_CODECS)
    return {
        "hit_rate": hits.total() / asked,
        "quality": 1 - lost / max(1, hits.total()),
        "computed_s": computed_s,
        "loaded_s": loaded_s,
        "lost_quality_s": alpha_s * lost,
        "cost_s": computed_s + loaded_s + alpha_s * lost,
        "hits": {codec.value: count for codec, count in sorted(hits.items(), key=lambda item: item[0].value)},
    }


def _loaded_s(ladder: Ladder, codec: Codec, settings: UtilitySettings) -> float:
    nbytes = next(rung.nbytes for rung in ladder if rung.codec is codec)
    decoded_s = 0.0 if codec is Codec.EXACT else LAYOUT.nbytes / DEFAULT_CODECS[codec].decoded_bytes_per_s
    return nbytes / settings.home_bytes_per_s + decoded_s


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
                "trace = trace | capacity = capacity:.0% | alpha s = alpha_s:.3g | hits, no codecs = none.hit_rate:.3",
                "hits, all three = last.hit_rate:.3 | quality of a hit = last.quality:.4",
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
        panel = f"{row['trace']}, alpha {row['alpha_s']:g} s"
        yield {**row, "panel": panel, "drawn": {"median": over, "min": over, "max": over}}


CHART = Chart(Kind.LINES, "capacity", "drawn", "", "codecs", column="panel", across_title="part of all chunks")
REPLACING = Experiment(
    name="replacing",
    help="real streams of requests through the policy of a bucket that replaces chunks by encoded ones",
    description="See what encoding chunks before they leave is worth. Replay traces through the policy, without "
    "codecs, with one alone, and with the default ones; nothing is stored, and encoding takes no time.",
    settings=ReplacingSettings,
    measure=measure_replacing,
    show=show,
    plot=plot,
)
