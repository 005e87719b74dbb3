"""`bench orchestrator`: the command, and sections and chart of its result."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from bench.beds.kv_peers.install import ENGINES
from bench.core import options
from bench.core.experiment import Experiment, WrongUse, plain, published
from bench.core.plots import Chart, Kind, draw
from bench.core.rounds import Side, Target, interval
from bench.core.show import Json, Section, table, targets
from bench.paper.orchestrator.cost import decisions, etcd_times, metadata_times, streams
from bench.paper.orchestrator.live import WrongTokensError, live, live_bed, serving
from bench.paper.orchestrator.model import model
from bench.paper.orchestrator.shared import live_shared, simulated_shared
from bench.paper.orchestrator.simulated import regret, simulated
from objectcache.calibration.samples import spread
from objectcache.orchestrator.rules.policies import PolicyName

OURS = PolicyName.TTFT.value
REMARKS = (
    "Simulated: engines compute 17,000 tokens/s one prompt after the other, hold 600 blocks of 512 tokens, and decode "
    "in 20 ms a token; outputs have their trace's average length; the store holds every block.",
    "Every policy is told the engines' true costs, but for the cases where those that are believed are half to double; "
    "`ttft` alone decides by them. Loads are advised by the same function for every policy. `kv_events` is a "
    "policy with weights of our own, and none of the peers' routers was run.",
    "Many engines have few requests each: of 4,000, 256 engines have sixteen.",
    "Live: vLLM on CPUs, each engine with one of the machine's two cores, which the store, the orchestrator and the "
    "clients share with them and get first; files in memory; the first four turns of conversations of the trace, at a "
    "sixteenth of their length.",
)


class Part(Enum):
    """The parts of the run."""

    MODEL = "model"
    COST = "cost"
    SIMULATED = "simulated"
    LIVE = "live"
    SERVING = "serving"
    SHARED = "shared"


REAL = frozenset({Part.LIVE, Part.SERVING, Part.SHARED})
"""Those with real engines."""


@dataclass(frozen=True, slots=True)
class OrchestratorBenchSettings:
    """The sizes of the run."""

    parts: tuple[Part, ...] = options.choice("--parts", Part, tuple(Part), (Part.MODEL, Part.COST, Part.SIMULATED))
    engine_counts: tuple[int, ...] = options.count("--engines", (8, 64, 256), (3,), text="simulated engines")
    request_count: int = options.count("--requests", 4000, 150, text="simulated requests of each case")
    regret_cases: int = options.count("--regret-cases", 200, 4, text="small cases against the best assignment")
    decision_engines: int = options.sized(64, 8)
    decision_blocks: int = options.sized(1_000_000, 20_000)
    decision_prompt_tokens: int = options.sized(4096, 512)
    decision_samples: int = options.sized(2000, 40)
    streams: int = options.count("--streams", 4000, 60, text="streams of 8 pieces through the orchestrator")
    at_once: int = options.sized(64, 8)
    entries: tuple[int, ...] = options.sized((100, 1000, 5000, 100_000), (100,))
    live_engines: int = options.count("--live-engines", 2, 2, text="real engines")
    live_requests: int = options.count("--live-requests", 32, 8, text="requests of each live run")
    rates: tuple[float, ...] = options.sized((2.0, 8.0), (1.0,))
    runs: int = options.runs(20, text="rounds of the live runs")
    serving_runs: int = options.sized(5, 1)
    shared_runs: int = options.sized(7, 1)
    shared_requests: int = options.sized(10, 2)
    seed: int = options.seed()
    processes: int = options.sized(2, 2)
    folder: Path | None = options.folder()


def measure_orchestrator(settings: OrchestratorBenchSettings, origin: Mapping[str, Any]) -> Json:
    """The parts that are asked for. Raises WrongUse, FAILURES."""
    parts, problem = settings.parts, None
    found: dict[str, Any] = {}
    if REAL & set(parts) and not ENGINES.is_installed:
        raise WrongUse("live, serving and shared need vLLM: run `make engines`")
    if Part.MODEL in parts:
        found["model"] = model()
    if Part.COST in parts:
        found["cost"] = _cost(settings)
    if Part.SIMULATED in parts:
        found["simulated"] = simulated(
            settings.engine_counts, settings.request_count, settings.seed, settings.processes
        )
        found["shared_simulated"] = simulated_shared()
        found["regret"] = spread(regret(range(settings.seed, settings.seed + settings.regret_cases)))
    if REAL & set(parts):
        try:
            with tempfile.TemporaryDirectory(prefix="objectcache-orchestrator-", dir=settings.folder) as name:
                found |= _live(settings, Path(name))
        except WrongTokensError as error:
            problem = str(error)
    return published(
        "orchestrator", origin, settings, problem, remarks=list(REMARKS),
        targets=[target.json("case", "side", "reason") for target in _targets(found)], **found,
    )  # fmt: skip


def _cost(settings: OrchestratorBenchSettings) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="objectcache-orchestrator-", dir=settings.folder) as name:
        return {
            "decision": decisions(
                settings.decision_engines, settings.decision_blocks, settings.decision_prompt_tokens,
                settings.decision_samples,
            ),
            "streams": streams(settings.streams, 8, settings.at_once),
            "metadata": metadata_times(settings.entries, Path(name)),
            "etcd": etcd_times(settings.entries, Path(name)),
        }  # fmt: skip


def _live(settings: OrchestratorBenchSettings, folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with live_bed(folder, settings.live_engines) as (engines, target, _):
        if Part.SERVING in settings.parts:
            found["serving"] = serving(engines, target, settings.serving_runs)
        if Part.SHARED in settings.parts:
            found["shared"] = live_shared(engines, target, settings.shared_requests, settings.shared_runs)
        if Part.LIVE in settings.parts:
            taken = live(
                engines, target, tuple(PolicyName), settings.rates, settings.live_requests, settings.runs, settings.seed
            )
            for row in taken:
                for each in row["policies"].values():
                    for key in SPREADS:
                        each[f"{key}_spread"] = spread(each[key])
                row |= _live_ratios(row["policies"])
            found["live"] = taken
    return found


PERCENTILES = ("ttft_p50", "ttft_p90")
SPREADS = (
    "ttft_p50_s",
    "ttft_p90_s",
    "ttft_slowest_s",
    "ttft_over_predicted",
    "requests_per_s",
    "hbm_hit_rate",
    "store_hit_rate",
)


def _live_ratios(policies: Mapping[str, Any]) -> dict[str, Any]:
    """The TTFT of each other policy over ours, round by round: the median, and its interval of 95 %."""
    return {
        f"{key}_over": {
            name: interval(
                [other / own for other, own in zip(each[f"{key}_s"], policies[OURS][f"{key}_s"], strict=True)]
            )
            for name, each in policies.items()
            if name != OURS
        }
        for key in PERCENTILES
    }


def _targets(found: Mapping[str, Any]) -> Iterator[Target]:
    if "cost" in found:
        cost = found["cost"]
        yield Target("a decision among the engines, µs", 1000, cost["decision"]["decision_us"], Side.AT_MOST)
        yield Target("added to a token of a stream, µs", 200, cost["streams"]["added_us_per_token"], Side.AT_MOST)
        yield Target("streams of 8 pieces a second and core", 1000, cost["streams"]["streams_per_core_s"])
    if "simulated" in found:
        for row in found["simulated"]:
            case = f"{row['trace']}, {row['engines']} engines, {row['arrivals']}, {row['kind']}, load {row['load']:g}"
            case += f", link {row['link_bytes_per_s'] * 1e-9:g} GB/s"
            if row["load"] >= 0.9:
                over = row["ttft_p90_over"]
                yield Target("p90 of the best other policy over ours, simulated", 1.3, over["ratio"], case=case)
        yield Target("mean TTFT over the best assignment of few requests, less one", 0.1, found["regret"], Side.AT_MOST)
    for policy in PolicyName:
        if "live" not in found or policy.value == OURS:
            continue
        for key in PERCENTILES:
            worst = min(found["live"], key=lambda row: row[f"{key}_over"][policy.value].median)
            what = f"{key.removeprefix('ttft_')} of {policy.value} over ours, live"
            yield Target(what, 1 / 1.05, worst[f"{key}_over"][policy.value], case=f"{worst['rate_per_s']:g} requests/s")


def show(result: Json) -> dict[str, Section]:
    """A section for each part."""
    sections: dict[str, Section] = {}
    if "simulated" in result:
        sections["simulated"] = _simulated(result)
    if "live" in result:
        sections["live"] = _live_section(result)
    if "serving" in result:
        sections["serving"] = _serving_section(result["serving"])
    if "shared_simulated" in result:
        sections["shared-simulated"] = _shared_simulated_section(result["shared_simulated"])
    if "shared" in result:
        sections["shared"] = _shared_section(result["shared"])
    if "cost" in result:
        sections["cost"] = _cost_section(result["cost"])
    if "model" in result:
        sections["model"] = _model_section(result["model"])
    sections["targets"] = (targets(result["targets"]), *result["remarks"])
    return sections


def _simulated(result: Json) -> Section:
    rows = [
        {
            "case": f"{row['trace']}, {row['arrivals']}, {row['kind']}, load {row['load']:g}, "
            f"link {row['link_bytes_per_s'] * 1e-9:g} GB/s",
            "engines": row["engines"],
            **{name: each["ttft_p90_s"] for name, each in row["policies"].items()},
            "p50": row["ttft_p50_over"]["ratio"],
            "p90": row["ttft_p90_over"]["ratio"],
            "best": row["ttft_p90_over"]["best_other"],
        }
        for row in result["simulated"]
    ]
    columns = " | ".join(f"{policy.value} = {policy.value}:ms" for policy in PolicyName)
    return (
        table(
            rows,
            f"p90 of TTFT in ms, simulated = case | engines = engines | {columns}",
            "best other over ours, p50 = p50:.2 | p90 = p90:.2 | best other = best",
        ),
    )


def _live_section(result: Json) -> Section:
    rows = []
    for row in result["live"]:
        for name, each in row["policies"].items():
            rows.append(
                {
                    "rate": row["rate_per_s"], "policy": name, "p50": each["ttft_p50_s_spread"],
                    "p90": each["ttft_p90_s_spread"], "slowest": each.get("ttft_slowest_s_spread"),
                    "per_s": each["requests_per_s_spread"], "hbm": each["hbm_hit_rate_spread"],
                    "store": each["store_hit_rate_spread"], "predicted": each["ttft_over_predicted_spread"],
                }
            )  # fmt: skip
    ratios = [
        {"rate": row["rate_per_s"], "policy": name, **{key: plain(over[f"{key}_over"][name]) for key in PERCENTILES}}
        for row in result["live"]
        for over in [_live_ratios(row["policies"])]
        for name in row["policies"]
        if name != OURS
    ]
    return (
        table(rows, "requests/s = rate | policy = policy | TTFT ms, p50 = p50:ms | p90 = p90:ms | slowest = slowest:ms",
              "done a second = per_s:.2 | tokens hit in HBM = hbm:.2 | in the store = store:.2",
              "TTFT over the predicted = predicted:.2"),
        table(ratios, "requests/s = rate | policy = policy | its p50 over ours, 95 % = ttft_p50:.2",
              "its p90 over ours, 95 % = ttft_p90:.2"),
        f"Ratios are of {result['settings']['runs']} rounds, in brackets 95 % of the medians of rounds drawn anew.",
    )  # fmt: skip


def _serving_section(found: Json) -> Section:
    steps = [{"step": name, **each} for name, each in found["steps"].items()]
    rows = [{"control": "none", **each} for each in found["at_once"]]
    rows.append({"control": "3 active", **found["controlled"]})
    return (
        table(steps, "request = step | total ms = total_ms | prompt = prompt_ms | decode = decode_ms",
              "cached tokens = cached_tokens"),
        table(rows, "at once = count | control = control | accepted = accepted | average ms = average_ms",
              "p95 ms = p95_ms | wall ms = wall_ms | requests/s = per_s:.2"),
    )  # fmt: skip


def _shared_simulated_section(found: Json) -> Section:
    rows = [
        {"case": case, "policy": policy, **each, "counts": ", ".join(map(str, each["requests_by_engine"]))}
        for case, policies in found.items()
        for policy, each in policies.items()
    ]
    return (
        "Every prompt begins with the same 2,048 tokens, and has 64 of its own; answers of 200 tokens, 10 requests/s.",
        table(rows, "one system prompt, simulated = case | policy = policy | requests of each engine = counts",
              "mean until the last token, s = whole_mean_s:.2 | p90 of TTFT, ms = ttft_p90_s:ms"),
    )  # fmt: skip


def _shared_section(found: Json) -> Section:
    rows = [
        {
            "policy": policy, **each, "over": plain(found["whole_mean_over_ours"].get(policy)),
            "before_all": _sums(each["before"]), "after_all": _sums(each["after"]),
        }
        for policy, each in found["policies"].items()
    ]  # fmt: skip
    return (
        f"{found['clients']} clients, one request after the other: 1,024 shared tokens and 64 of its own in each "
        "prompt, answers of 24. The last engine joins when half of the requests have ended.",
        table(rows, "one system prompt, real engines = policy | requests before = before_all | after = after_all",
              "mean until the last token, ms = whole_mean_s:ms | over ours, 95 % = over:.2",
              "TTFT ms, p50 = ttft_p50_s:ms | p90 = ttft_p90_s:ms"),
    )  # fmt: skip


def _sums(rounds: Sequence[Sequence[int]]) -> str:
    return ", ".join(str(sum(each)) for each in zip(*rounds, strict=True))


def _model_section(found: Json) -> Section:
    steps = [
        {
            "request": each["request"], "required": each["required_blocks"], "node": each["node"] or "refused",
            "before": " and ".join(map(str, each["free_before"].values())),
            "after": " and ".join(map(str, each["free_after"].values())),
        }
        for each in found["allocations"]
    ]  # fmt: skip
    together = found["at_once"]
    return (
        table(
            found["strategies"],
            "003's strategies = strategy | average ms = average_ms | of those admitted = admitted_average_ms",
            "p95 ms = p95_ms | hit rate = hit_rate | rejected = rejection_rate",
        ),
        table(
            steps,
            "003's allocations = request | blocks = required | free before = before",
            "node = node | free after = after",
        ),
        f"Of {together['offered']} requests at once, {together['admitted']} run and {together['refused']} are refused, "
        f"where {together['active_max']} may run and none may wait.",
    )


def _cost_section(cost: Json) -> Section:
    decision, stream = cost["decision"], cost["streams"]
    added = stream["added_us_per_token"]
    etcd = {row["entries"]: row for row in cost["etcd"] or ()}
    rows = [
        {**row, "etcd_write": etcd.get(row["entries"], {}).get("write_ms"),
         "etcd_recovery": etcd.get(row["entries"], {}).get("recovery_ms")}
        for row in cost["metadata"]
    ]  # fmt: skip
    return (
        f"A decision among {decision['engines']} engines that hold {decision['indexed_blocks']:,} blocks takes "
        f"{decision['decision_us']['median']:.0f} µs ({decision['decision_us']['min']:.0f} to "
        f"{decision['decision_us']['max']:.0f}); naming the blocks of {decision['prompt_tokens']:,} tokens before it "
        f"takes {decision['naming_us']['median']:.0f} µs.",
        f"A stream of {stream['pieces']} pieces takes {stream['cpu_us_per_stream']:.0f} µs of the orchestrator's core, "
        f"so a core carries {stream['streams_per_core_s']:.0f} a second; with client and engine on two cores it is "
        f"{stream['streams_per_s']:.0f}, and {stream['straight_streams_per_s']:.0f} without it. A token of a long "
        f"stream comes {added['median']:.1f} µs later ({added['min']:.1f} to {added['max']:.1f}).",
        table(
            rows,
            "entries = entries | write ms = write_ms | open = open_ms | 100 lookups = lookup_100_ms",
            "recovery ms = recovery_ms | etcd: write = etcd_write | recovery = etcd_recovery",
        ),
    )


CHART = Chart(Kind.BARS, "case", "ratio", "best other p90 over ours", "percentile", across_title="case")


def plot(result: Json, path: Path) -> None:
    """How much sooner ours is than the best other policy."""
    rows = [
        {"case": f"{row['trace'][:4]} {row['engines']} {row['kind'][:8]} {row['arrivals'][:7]}", "percentile": name,
         "ratio": row[key]["ratio"]}
        for row in result.get("simulated", ())
        for name, key in (("p50", "ttft_p50_over"), ("p90", "ttft_p90_over"))
    ]  # fmt: skip
    draw(CHART, rows, "orchestrator, simulated", path)


ORCHESTRATOR = Experiment(
    name="orchestrator",
    help="routing policies, simulated and with real engines; what a decision and a stream cost",
    description="Compare the orchestrator's policy with others on recorded requests, simulated and on real engines, "
    "and measure what it adds to a request.",
    settings=OrchestratorBenchSettings,
    measure=measure_orchestrator,
    show=show,
    plot=plot,
)
