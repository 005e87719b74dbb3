"""`bench scheduler` on the command line, and its parts, one after the other.

The simulation at length: many random workloads, in a few processes, which say how often and by how much slack is
better; where this machine could not follow, a trace's arrivals and a thousand tenants over 800 Gbps; and what a
scheduling decision costs, by how many requests are active.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np

from bench.core import options
from bench.core.experiment import Experiment, need_nixl, plain, published
from bench.core.options import real
from bench.core.show import Json
from bench.paper.scheduler.cells import plot, ratios, show, simulation
from bench.paper.scheduler.live import LiveSettings, measure_live
from bench.paper.scheduler.simulation import (
    CALIBRATED,
    EQUAL,
    EQUAL_WORK_CONSERVING,
    EXCERPT,
    SLACK,
    VARIANTS,
    WORK_CONSERVING,
    Load,
    Simulated,
    SimulatedRequest,
    Variant,
    batch_requests,
    poisson_load,
    random_batch,
    read_trace,
    simulate,
    trace_requests,
    with_wrong_compute,
)
from descriptors.units import KIB, MIB, bytes_per_s_from_gbps
from nixl_client.client import Transport
from objectcache.calibration.samples import progress_bar, spread
from storage_server.delivery.scheduler.demand import Demand
from storage_server.delivery.scheduler.flow import Flow
from storage_server.delivery.scheduler.pool import EPOCH_S_MAX, Pool
from storage_server.planning.plan import GroupSizes

Outcome = Mapping[str, float]
DELAYS = ("delay_over_equal", "delay_over_equal_work_conserving")
PART = 20
"""Workloads that a process does at once."""
SCALE_VARIANTS = (EQUAL, CALIBRATED, *WORK_CONSERVING[::4], SLACK)
POISSON_LOAD = 0.9
COST_VARIANTS = (EQUAL, CALIBRATED, SLACK)
PAYLOAD_BYTES = 16 * MIB
"""A server's largest."""
LINK_BYTES_PER_S = bytes_per_s_from_gbps(100)
"""On which decisions are timed."""


def serve_trace(requests: Sequence[SimulatedRequest], load: float, gpu_count: int | None) -> list[dict[str, Any]]:
    """Every variant over a link of which the requests' bytes need `load` on the average; a layer is one payload."""
    span_s = max(1.0, max(request.came_s for request in requests) - min(request.came_s for request in requests))
    nbytes = sum(request.layer_bytes * request.layer_count for request in requests)
    return _serve("trace", Load(requests, nbytes / span_s / load), VARIANTS, gpu_count)


def serve_scale(tenant_count: int, request_count: int, link_bytes_per_s: float, seed: int) -> list[dict[str, Any]]:
    """All tenants at once, and Poisson arrivals of more requests than tenants; a layer is one payload."""
    batch = Load(batch_requests(tenant_count, seed), link_bytes_per_s)
    poisson = poisson_load(request_count, tenant_count, link_bytes_per_s, POISSON_LOAD, seed)
    return [*_serve("batch", batch, SCALE_VARIANTS), *_serve("poisson", poisson, SCALE_VARIANTS)]


def _serve(
    arrivals: str, load: Load, variants: Sequence[Variant], gpu_count: int | None = None
) -> list[dict[str, Any]]:
    """Times of each variant, and what the simulation itself took (`wall_s`). Epochs have the length that a server's
    have; a batch is one epoch however long it takes, since nobody waits.
    """
    served, count = [], len(load.requests)
    with progress_bar(count * len(variants), arrivals) as advance:
        for each in variants:
            began_s = time.perf_counter()
            found = simulate(load, each.pool_settings(epoch_s_max=EPOCH_S_MAX), gpu_count=gpu_count, ended=advance)
            wall_s = time.perf_counter() - began_s
            ttfts_s, added_s = (
                np.array([getattr(result, name) for result in found.results]) for name in ("ttft_s", "added_ttft_s")
            )
            served.append(
                {
                    "arrivals": arrivals,
                    "variant": each.name,
                    "request_count": count,
                    "link_bytes_per_s": load.link_bytes_per_s,
                    "ttft_mean_s": float(ttfts_s.mean()),
                    "ttft_p50_s": float(np.percentile(ttfts_s, 50)),
                    "ttft_p99_s": float(np.percentile(ttfts_s, 99)),
                    "added_mean_s": float(added_s.mean()),
                    "added_p99_s": float(np.percentile(added_s, 99)),
                    "duration_s": found.duration_s,
                    "wall_s": wall_s,
                    "requests_per_wall_s": count / wall_s,
                }
            )
    return served


def measure_costs(counts: Sequence[int], payload_count: int, runs: int, seed: int) -> list[dict[str, Any]]:
    """Seconds of processor time, `runs` times: `plan` admits all requests in one epoch, `payload` is the turn of one of
    `payload_count` payloads while all requests are active. `transfer_s` is the payload's time on the link.
    """
    found = []
    with progress_bar(len(counts) * len(COST_VARIANTS) * runs, "decisions") as advance:
        for count in counts:
            requests = batch_requests(count, seed)
            for each in COST_VARIANTS:
                _decide(each, requests[:1], 1)
                times_s = []
                for _ in range(runs):
                    times_s.append(_decide(each, requests, payload_count))
                    advance(1)
                plans_s, payloads_s = zip(*times_s, strict=True)
                cost = {"plan": plain(spread(plans_s)), "payload": plain(spread(payloads_s))}
                transfer_s = PAYLOAD_BYTES / LINK_BYTES_PER_S
                found.append({"variant": each.name, "active_count": count, **cost, "transfer_s": transfer_s})
    return found


def _decide(variant: Variant, requests: Sequence[SimulatedRequest], payload_count: int) -> tuple[float, float]:
    """Layers are made long, so that nobody ends meanwhile and only payloads' turns are taken."""
    pool = Pool(variant.pool_settings(), LINK_BYTES_PER_S)
    for index, request in enumerate(requests):
        per_layer = max(1, -(-request.layer_bytes // PAYLOAD_BYTES), -(-2 * payload_count // request.layer_count))
        layer_bytes = per_layer * PAYLOAD_BYTES
        compute_s = request.compute_s * layer_bytes / request.layer_bytes
        demand = Demand(layer_bytes, request.layer_count, compute_s)
        layers = [GroupSizes(layer_bytes, (PAYLOAD_BYTES,) * per_layer)] * request.layer_count
        pool.join(Flow(index, request.tenant, demand, layers, 0.0))
    began_s = time.process_time()
    pool.due(0.0)
    plan_s = time.process_time() - began_s
    sent = 0
    began_s = time.process_time()
    while sent < payload_count:
        now = pool.wake_at()
        going = pool.due(now)
        for flow in going:
            flow.ahead_count -= 1
            pool.resume(flow, now)
        sent += len(going)
    return plan_s, (time.process_time() - began_s) / sent


def random_result(count: int, seed: int, processes: int) -> dict[str, Any]:
    """The summary of so many workloads, and each value of each of them."""
    outcomes = measure_random(count, seed, processes)
    values = {name: [round(each[name], 6) for each in outcomes] for name in outcomes[0]}
    return {"summary": summarize(outcomes), "workloads": values}


def measure_random(count: int, seed: int, processes: int) -> list[Outcome]:
    """Workloads 0 to count-1 of the seed, in order; the same whatever the processes."""
    parts = [range(first, min(first + PART, count)) for first in range(0, count, PART)]
    outcomes: list[Outcome] = []
    with (
        progress_bar(count, "random workloads") as advance,
        ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool,
    ):
        for found in (map if processes == 1 else pool.map)(_outcomes, [seed] * len(parts), parts):
            outcomes += found
            advance(len(found))
    return outcomes


def summarize(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Over all workloads, at least one. `lost_gain` is how much of (Equal - slack) wrong compute times cost, all
    workloads' seconds added up; `calibrated_over_slack_sums` is of such sums, too.
    """
    of = {name: np.array([each[name] for each in outcomes]) for name in outcomes[0]}
    better = of["calibrated_s"] / of["slack_s"]

    def lost_gain(of_variant: str) -> float:
        right_s, wrong_s = of[of_variant], of[f"wrong_{of_variant}"]
        gain_s = float((of["equal_s"] - right_s).sum())
        return float((wrong_s - right_s).sum()) / gain_s if gain_s > 0 else 0.0

    return {
        "count": len(outcomes),
        "calibrated_over_slack": plain(spread(better.tolist())),
        "mean_calibrated_over_slack": float(better.mean()),
        "calibrated_over_slack_sums": float(of["calibrated_s"].sum() / of["slack_s"].sum()),
        "p99_slack_over_calibrated": float(np.percentile(1 / better, 99)),
        "max_slack_over_calibrated": float((1 / better).max()),
        **{f"worst_{name}": float(of[name].max()) for name in DELAYS},
        "mean_wrong_calibrated_over_slack": float((of["wrong_calibrated_s"] / of["wrong_slack_s"]).mean()),
        "lost_gain": lost_gain("slack_s"),
        "lost_gain_calibrated": lost_gain("calibrated_s"),
        **{f"wrong_worst_{name}": float(of[f"wrong_{name}"].max()) for name in DELAYS},
    }


def _outcomes(seed: int, part: Sequence[int]) -> list[Outcome]:
    return [_outcome(seed, index) for index in part]


def _outcome(seed: int, index: int) -> Outcome:
    """One workload: added TTFT of all its requests together, in seconds, and the worst of their TTFTs under slack over
    that under Equal, where rates are held and where what is freed is shared again. `wrong_*`: with other compute times
    stated.
    """
    batch = random_batch(seed, index)
    equal, again = _run(batch, EQUAL), _run(batch, EQUAL_WORK_CONSERVING)
    found = {
        "request_count": float(len(batch.requests)),
        "equal_s": equal.added_ttft_s,
        "equal_work_conserving_s": again.added_ttft_s,
    }
    for stated, some in (("", batch), ("wrong_", with_wrong_compute(batch, seed, index))):
        slack = _run(some, SLACK)
        found[f"{stated}calibrated_s"] = _run(some, CALIBRATED).added_ttft_s
        found[f"{stated}slack_s"] = slack.added_ttft_s
        for delay, other in zip(DELAYS, (equal, again), strict=True):
            pairs = zip(slack.results, other.results, strict=True)
            found[f"{stated}{delay}"] = max(ours.ttft_s / theirs.ttft_s for ours, theirs in pairs)
    return found


def _run(batch: Load, variant: Variant) -> Simulated:
    return simulate(batch, variant.pool_settings(), PAYLOAD_BYTES)


SIMULATION, MANY = "simulation", 10_000_000
PAYLOAD_HELP = "of the simulated server's payloads for A, B and C; default: 16MiB"
TRACE_HELP = "a request trace in the form of Mooncake's FAST'25 release; default: 400 of its requests"
GPUS_HELP = "for the trace; default: one a request"


class Part(Enum):
    """By their names on the command line."""

    SIMULATION = "simulation"
    RANDOM = "random"
    LIVE = "live"
    COST = "cost"
    TRACE = "trace"
    SCALE = "scale"


@dataclass(frozen=True, slots=True)
class SchedulerSettings:
    """Which parts, and what each of them is given. `tenants` share `scale_gbps`, a link in Gbps."""

    parts: tuple[Part, ...] = options.choice("--parts", Part, tuple(Part))
    live: LiveSettings = options.nested(LiveSettings)
    payload_bytes_max: int = options.count(
        "--payload-bytes", 16 * MIB, least=64 * KIB, most=1024 * MIB, text=PAYLOAD_HELP, group=SIMULATION
    )
    random_count: int = options.count("--count", 10_000, 6, most=MANY, text="random workloads", group=SIMULATION)
    processes: int = options.count("--processes", 2, 1, most=256, text="for them", group=SIMULATION)
    trace: Path = options.setting("--trace", EXCERPT, EXCERPT, Path, TRACE_HELP, SIMULATION)
    trace_requests: int | None = options.count(
        "--trace-requests", None, 60, most=MANY, text="the first ones only", group=SIMULATION
    )
    trace_load: float = options.setting("--trace-load", 0.3, 0.3, real(0.001, 100), "of the link", SIMULATION)
    gpus: int | None = options.count("--gpus", None, most=1_000_000, text=GPUS_HELP, group=SIMULATION)
    tenants: int = options.count("--tenants", 1000, 20, most=100_000, text="at once", group=SIMULATION)
    scale_gbps: float = options.setting("--scale-gbps", 800.0, 800.0, real(1, 1e6), "the tenants' link", SIMULATION)
    cost_counts: tuple[int, ...] = options.sized((1, 10, 100, 1000), (1, 10))
    cost_payloads: int = options.sized(1000, 20)
    cost_runs: int = options.sized(3, 1)
    seed: int = options.seed()


def measure_scheduler(asked: SchedulerSettings, origin: Mapping[str, Any]) -> Json:
    """The parts, one after the other; wrong bytes of the live one are the problem of the result. Raises FAILURES."""
    parts, seed = asked.parts, asked.seed
    live = replace(asked.live, seed=seed)
    need_nixl(live.transport is Transport.UCX and Part.LIVE in parts, "--transport shm")
    entries = read_trace(asked.trace, asked.trace_requests) if Part.TRACE in parts else []
    arrivals = trace_requests(entries) if entries else []
    costs = {"cost_counts": asked.cost_counts, "cost_payloads": asked.cost_payloads, "cost_runs": asked.cost_runs}
    scale: dict[str, Any] = {
        "tenant_count": asked.tenants,
        "request_count": 3 * asked.tenants,
        "link_bytes_per_s": bytes_per_s_from_gbps(asked.scale_gbps),
    }
    variants = [each.name for each in live.variants]
    settings = {
        "parts": parts,
        "live": {
            **plain(live),
            "variants": variants,
            "per_layer_chunk_bytes": live.per_layer_chunk_bytes,
            "shrinks": "S",
        },
        "trace": {
            "file": asked.trace.name,
            "count_max": asked.trace_requests,
            "load": asked.trace_load,
            "gpu_count": asked.gpus,
            "payload_bytes_max": None,
        },
        "scale": scale,
        "payload_bytes_max": asked.payload_bytes_max,
        "random_count": asked.random_count,
        "processes": asked.processes,
        **costs,
        "seed": seed,
    }
    found: dict[str, Any] = {"ratios": {}, **dict.fromkeys(part.value for part in Part)}
    problem = None
    if Part.SIMULATION in parts:
        found["simulation"] = simulation(live.workloads, asked.payload_bytes_max)
    if Part.RANDOM in parts:
        found["random"] = random_result(asked.random_count, seed, asked.processes)
    if Part.LIVE in parts:
        found["live"], problem = measure_live(live)
        found["ratios"] = ratios(found["live"]["cells"])
    if Part.COST in parts:
        found["cost"] = measure_costs(asked.cost_counts, asked.cost_payloads, asked.cost_runs, seed)
    if Part.TRACE in parts:
        found["trace"] = serve_trace(arrivals, asked.trace_load, asked.gpus)
        found["trace_entry_count"] = len(entries)
    if Part.SCALE in parts:
        found["scale"] = serve_scale(**scale, seed=seed)
    return published("scheduler", origin, settings, problem, **found)


SCHEDULER = Experiment(
    name="scheduler",
    help="the paper's policies and slack-aware dispatch: simulated, on a server, on random workloads and traces",
    description="See what each policy adds to TTFT where requests share a link. Workloads A, B and C of the paper "
    "under every policy, with rates held and work-conserving, and under slack-aware dispatch: simulated "
    "unscaled, and on a real server with its transport and clients that play the compute windows.",
    settings=SchedulerSettings,
    measure=measure_scheduler,
    show=show,
    plot=plot,
    charts="DIR",
)
