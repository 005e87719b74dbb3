"""`bench engine`: one of its questions, the command, and sections and chart of a result, whichever
question it answers.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from bench.core.experiment import Experiment, WrongUse, plain, published
from bench.core.lines import from_line, to_line
from bench.core.plots import Chart, Kind, draw
from bench.core.show import NOT_MEASURED, Block, Column, Json, Section, crossed, ms, table, verdict, written
from bench.experiments.engine.bed import why_no_engines
from bench.experiments.engine.beside import measure_beside
from bench.experiments.engine.measure import measure_engines
from bench.experiments.engine.paced import measure_advised, measure_stated
from bench.experiments.engine.ways import (
    BESIDE,
    BLOCK_TOKENS,
    CONNECTED,
    OURS,
    OUTPUT_TOKENS,
    TIERS,
    Case,
    EngineSettings,
    Shape,
    Way,
    by_case,
    context_words,
)
from descriptors.units import format_bytes
from objectcache.calibration.samples import spread

TITLES = {
    "recompute": "recompute",
    "objectcache_layerwise": "**ObjectCache layerwise**",
    "objectcache_chunkwise": "chunkwise",
    "objectcache_advised": "advised",
    "lmcache_cpu": "LMCache, its own memory",
    "lmcache_s3": "LMCache over S3 (our gateway)",
    "example_connector": "ExampleConnector",
    "example_connector_told": "the same, told the prefixes",
    "own_blocks": "own blocks: the floor",
    "objectcache_tier": "**ObjectCache tier**",
    "objectcache_tier_http": "the same, http",
    "vllm_fs_tier": "vLLM's fs tier",
    "vllm_obj_tier": "vLLM's obj tier (our gateway)",
    "objectcache_ahead": "loads ahead",
}
STATED = {
    "equal": "equal shares, freed bandwidth shared again",
    "profile": "slack, nothing stated, a static profile",
    "stated": "slack, stated",
    "liar": "slack, stated, one states a tenth",
}
HONEST = "honest_ttft_over_equal"
STATED_RATIOS = {
    "added_ttft_profile_over_stated": "added TTFT, static profile over stated",
    "added_ttft_equal_over_stated": "added TTFT, equal shares over stated",
    HONEST: "TTFT of the worst honest engine beside a liar, over equal shares: at most {bound:g}",
    "honest_ttft_over_stated": "the same, over that where nobody lies",
    "liar_ttft_over_stated": "the liar's TTFT over its own where it does not",
}


def show(result: Json) -> dict[str, Section]:
    """The sections of the question that was asked."""
    if "advised" in result:
        return _advised(result["advised"])
    if "stated_compute" in result:
        return {"stated": tuple(block for shared in result["stated_compute"] for block in _stated(shared))}
    if "beside" in result:
        return {"beside": tuple(_beside(result["beside"]))}
    order = {way: place for place, way in enumerate(TITLES)}
    rows = sorted(result["measurements"], key=lambda row: (row["context_tokens"], order[row["way"]]))
    rates = sorted({row["hit_rate"] for row in rows}, reverse=True)
    shape = from_line(Shape, to_line(result["settings"]["shape"]))
    if "lookups" in result:
        return {"remarks": ("\n".join(_remarks(result, rows, shape.token_bytes)),), "tier": tuple(_tier(result, rows))}
    return {
        "remarks": ("\n".join(_remarks(result, rows, shape.token_bytes)),),
        "engine": (*(_ttfts([row for row in rows if row["hit_rate"] == rate]) for rate in rates), _targets(result)),
        "cases": tuple(block for ways in by_case(rows) for block in _case(list(ways.values()), shape.token_bytes)),
    }


def _title(way: str) -> str:
    return TITLES.get(way, way.replace("_", " "))


def _ttfts(rows: Sequence[Json]) -> Block:
    return crossed(
        rows,
        f"TTFT in s, {rows[0]['hit_rate']:.1%} stored",
        down=lambda row: context_words(row["context_tokens"]),
        across=lambda row: _title(row["way"]),
        cell=lambda row: written(row["ttft_s"]["median"]),
    )


def ours_of(target: Json) -> str:
    """Which of our ways a target speaks of."""
    return _title(target["ours"]).replace("*", "").removeprefix("ObjectCache ")


def _tier(result: Json, rows: Sequence[Json]) -> Iterable[Block]:
    """The tiers beside each other."""
    for rate in sorted({row["hit_rate"] for row in rows}, reverse=True):
        yield _ttfts([row for row in rows if row["hit_rate"] == rate])
    yield table(
        result["targets"],
        "target = what | worst case = case | at least = limit:.2",
        Column("seen", lambda target: target["value"] or f"{NOT_MEASURED}: {target['reason']}"),
        "= is_met:verdict",
    )
    seen = result["lookups"]
    yield (
        f"One question for {seen['keys']} chunks takes {written(seen['seconds'], ms)} ms; target: under "
        f"{seen['limit_s'] * 1e3:g}: {verdict(seen['is_met'])}."
    )


def _beside(seen: Json) -> Iterable[Block]:
    """Decoders beside a load."""
    yield table(
        seen["rows"],
        Column(f"steps of {seen['decoders']} decoders, {seen['case']} stored; ms", lambda row: _title(row["way"])),
        Column("alone", lambda row: row["alone_s"]["median"], ms),
        Column("p99", lambda row: row["alone_s"]["p99"], ms),
        Column("beside", lambda row: row["beside_s"]["median"], ms),
        Column("p99", lambda row: row["beside_s"]["p99"], ms),
        Column("longest", lambda row: row["beside_s"]["max"], ms),
        Column("steps", lambda row: row["beside_s"]["count"]),
        Column("as long as without a load", lambda row: row["late"]),
        "TTFT, s = ttft_s:.3",
    )
    yield table(
        seen["targets"],
        f"target, {seen['turns']} loads = what",
        Column("at most", lambda target: target["limit"]),
        Column("seen", lambda target: target["value"] or NOT_MEASURED),
        "= is_met:verdict",
    )


def _targets(result: Json) -> Block:
    return table(
        result["targets"],
        "target, at 87.5 % = what | worst case = case",
        Column("ours, the better one", lambda target: "" if target["ours"] is None else ours_of(target)),
        "at least = limit:g",
        Column("seen", lambda target: target["value"] or f"{NOT_MEASURED}: {target['reason']}"),
        "= is_met:verdict",
    )


def _remarks(result: Json, rows: Sequence[Json], token_bytes: int) -> Iterable[str]:
    """What a reader must know."""
    for ready in [*result["engines"].values()][:1]:
        yield f"vLLM {ready['vllm']}, torch {ready['torch']}, {ready['threads']} threads, eager"
    yield f"Llama of the shape above, weights seeded: {token_bytes / 1024:g} KiB of KV a token"
    idle = max((row["idle_cpu_share_max"] for row in rows), default=0.0)
    yield (
        "TTFT is vLLM's, arrival to first token. Every engine is a process of its own; an idle one took at most "
        f"{idle:.1%} of a core. Stored KV is in memory or the page cache. Servers share the engines' cores"
    )
    is_seen = any(count > 1 for count in result["distinct_outputs"].values())
    yield (
        f"{OUTPUT_TOKENS} greedy tokens of every request are compared with those of recomputing; that other prefixes "
        "before the same suffix give other tokens was seen" + ("" if is_seen else " in no case")
    )
    for way, note in result["notes"].items():
        yield f"{_title(way)}: {result['not_run'].get(way, note)}"
    for target in result["targets"]:
        if target["ours"] is not None:
            yield f"{target['what']}: ours is {_title(target['ours'])}"


def _case(rows: Sequence[Json], token_bytes: int) -> Iterable[Block]:
    case = Case(rows[0]["context_tokens"], rows[0]["hit_rate"])
    kv_bytes = case.prefix_tokens * token_bytes
    yield f"{case.title} of it stored: {case.prefix_tokens} tokens, {format_bytes(kv_bytes)} of KV"
    yield table(
        rows,
        Column("", lambda row: _title(row["way"])),
        "TTFT, s = ttft_s:.3",
        Column("recompute over it", lambda row: None if row["way"] == "recompute" else row["recompute_over_it"]),
        "over own blocks, ms = over_own_blocks.added_s:ms | GB/s = over_own_blocks.rate_bytes_per_s:GB/s.2",
        *(Column(head, _counted(name), ms) for head, name in COUNTERS.items()),
        Column("samples", lambda row: len(row["samples"])),
    )


COUNTED = tuple(way.value for way in CONNECTED)
COUNTERS = {"lookup, ms": "lookup_s", "wait, ms": "load_wait_s", "copy, ms": "load_copy_s"}


def _counted(name: str) -> Callable[[Json], float | None]:
    """The median of what our connector counted; None for others."""

    def of(row: Json) -> float | None:
        seen = [sample["counters"].get(name, 0.0) for sample in row["samples"]]
        return statistics.median(seen) if row["way"] in COUNTED else None

    return of


def _advised(seen: Json) -> dict[str, Section]:
    """What is advised beside loading all and computing all, over paced links."""

    def ttft_s(way: str) -> Callable[[Json], Any]:
        return lambda link: asdict(spread(found)) if (found := link["ttfts_s"].get(way)) else NOT_MEASURED

    def rate(link: Json) -> str:
        return f"{link['factor']:g} ({link['link_bytes_per_s'] / 1e6:.1f} MB/s)"

    over = f"advised over the better: at most {seen['limit']:g}"
    links = table(
        seen["links"],
        Column(f"TTFT in s, {seen['case']} stored; link, of the break-even", rate),
        Column("recompute", ttft_s("recompute")),
        Column("load all", ttft_s("objectcache_layerwise")),
        Column("advised", ttft_s("objectcache_advised")),
        Column(over, lambda link: link["advised_over_best"] or NOT_MEASURED),
    )
    return {
        "break-even": (f"The break-even is {seen['break_even_bytes_per_s'] / 1e6:.2f} MB/s.",),
        "advised": (links, f"Target: {verdict(seen['is_met'])}."),
    }


def _stated(shared: Json) -> Iterable[Block]:
    """Engines on one link, by what they state of their compute times."""
    cases = f"{shared['engines']} engines ({'; '.join(shared['cases'])}), {shared['link_bytes_per_s'] / 1e6:.1f} MB/s"
    yield table(
        [name for name in STATED if name in shared["added_ttft_s"]],
        Column(cases, STATED.__getitem__),
        Column("added TTFT of all, s", shared["added_ttft_s"].__getitem__),
    )
    yield table(
        STATED_RATIOS,
        Column("ratio", lambda name: STATED_RATIOS[name].format(bound=shared["bound"])),
        Column("seen", lambda name: shared[name] or NOT_MEASURED),
        Column("", lambda name: verdict(shared["is_bound_kept"]) if name == HONEST else ""),
    )


def plot(result: Json, path: Path) -> None:
    """TTFTs of the ways side by side: a panel for each hit rate. The other questions have no chart."""
    draw(CHART, result.get("measurements", ()), "vLLM on CPU: TTFT by where the prefix comes from", path)


CHART = Chart(
    Kind.BARS,
    lambda row: context_words(row["context_tokens"]),
    "ttft_s",
    "TTFT, s (medians, least and greatest)",
    lambda row: _title(row["way"]).replace("*", ""),
    column=lambda row: f"{row['hit_rate']:.1%} stored",
    across_title="tokens of the prompt",
    is_log=True,
)


def _measure(asked: EngineSettings, origin: Mapping[str, Any]) -> Json:
    try:
        settings = settings_of(asked)
    except ValueError as error:
        raise WrongUse(str(error)) from error
    if (missing := why_no_engines()) is not None:
        raise WrongUse(missing)
    if settings.advised:
        advised = measure_advised(settings)
        return result_of(settings, origin, advised["problem"], advised=advised)
    if settings.beside:
        return result_of(settings, origin, **measure_beside(settings))
    if settings.stated:
        stated = measure_stated(settings)
        return result_of(settings, origin, stated[-1]["problem"], stated_compute=stated)
    return result_of(settings, origin, **measure_engines(settings))


def result_of(settings: EngineSettings, origin: Mapping[str, Any], problem: str | None, **found: Any) -> dict[str, Any]:
    """The result, which has always had its name under `benchmark` as well."""
    values = {**plain(settings), "block_tokens": BLOCK_TOKENS}
    for name in ("folder", "advised", "stated", "tier", "beside"):
        del values[name]
    return {"benchmark": "engine", **published("engine", origin, values, problem, **found)}


def settings_of(settings: EngineSettings) -> EngineSettings:
    """Recomputing is always among the ways, since it is what the tokens of all are compared with. Raises ValueError for
    what does not fit together.
    """
    if sum((settings.advised, settings.stated, settings.tier, settings.beside)) > 1:
        raise ValueError("--advised, --stated, --tier and --beside are questions of their own: ask one")
    if settings.tier or settings.beside:
        settings = replace(settings, ways=TIERS if settings.tier else BESIDE)
    ways = tuple(way for way in Way if way in settings.ways or way is Way.RECOMPUTE)
    settings = replace(settings, ways=ways)
    if settings.chunk_tokens % BLOCK_TOKENS and BLOCK_TOKENS % settings.chunk_tokens and set(OURS) & set(settings.ways):
        raise ValueError(f"--chunk-tokens must be a multiple or a divisor of the engine's {BLOCK_TOKENS}")
    if not settings.cases:
        raise ValueError("no cases")
    return settings


ENGINE = Experiment(
    name="engine",
    help="TTFT of vLLM on the CPU with stored prefixes: our connector, vLLM's own, LMCache, and recomputing",
    description="See what stored prefixes save vLLM on this machine. An engine for each way, side by side; in each "
    "round each stores a prefix of its own and answers prompts that begin with it. Every token is "
    "compared with that of recomputing. Needs the environment 'engines': python -m "
    "bench.beds.kv_peers.install engines.",
    settings=EngineSettings,
    measure=_measure,
    show=show,
    plot=plot,
)
