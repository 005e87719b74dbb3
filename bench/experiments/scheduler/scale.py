"""The simulation at length: many random workloads, in a few processes, which say how often and by how much slack is
better; where this machine could not follow, a trace's arrivals and a thousand tenants over 800 Gbps; and what a
scheduling decision costs, by how many requests are active.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import numpy as np

from bench.core.experiment import plain
from bench.experiments.scheduler.simulation import Load, Simulated, SimulatedRequest, simulate
from bench.experiments.scheduler.variants import (
    CALIBRATED,
    EQUAL,
    EQUAL_WORK_CONSERVING,
    SLACK,
    VARIANTS,
    WORK_CONSERVING,
    Variant,
)
from bench.experiments.scheduler.workloads import batch_requests, poisson_load, random_batch, with_wrong_compute
from calibration.samples import progress_bar, spread
from descriptors.units import MIB, bytes_per_s_from_gbps
from storage_server.planning.plan import GroupSizes
from storage_server.scheduler.demand import Demand
from storage_server.scheduler.flow import Flow
from storage_server.scheduler.pool import EPOCH_S_MAX, Pool

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
