"""What a scheduling decision costs, by how many requests are active: an epoch's plan, and each payload's turn."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from bench.progress import progress_bar
from bench.samples import Spread, spread
from bench.scheduler.simulation import SimulatedRequest
from bench.scheduler.variants import CALIBRATED, EQUAL, SLACK, Variant
from bench.scheduler.workloads import batch_requests
from descriptors.units import MIB, bytes_per_s_from_gbps
from storage_server.scheduler.demand import Demand
from storage_server.scheduler.flow import Flow
from storage_server.scheduler.pool import Pool

COST_VARIANTS: tuple[Variant, ...] = (EQUAL, CALIBRATED, SLACK)
PAYLOAD_BYTES = 16 * MIB
"""A server's largest."""
LINK_GBPS = 100.0


@dataclass(frozen=True, slots=True)
class DecisionCost:
    """Seconds of processor time: `plan` admits all requests in one epoch, `payload` is one more payload's turn.
    `transfer_s` is the time the payload takes on the link.
    """

    variant: Variant
    active_count: int
    plan: Spread
    payload: Spread
    transfer_s: float


def measure_costs(counts: Sequence[int], payload_count: int, runs: int, seed: int) -> list[DecisionCost]:
    """Of `payload_count` payloads while all requests are active, `runs` times."""
    link = bytes_per_s_from_gbps(LINK_GBPS)
    found = []
    with progress_bar(len(counts) * len(COST_VARIANTS) * runs, "decisions") as advance:
        for count in counts:
            requests = batch_requests(count, seed)
            for each in COST_VARIANTS:
                _measure(each, requests[:1], link, 1)
                plans, payloads = [], []
                for _ in range(runs):
                    plan_s, payload_s = _measure(each, requests, link, payload_count)
                    plans.append(plan_s)
                    payloads.append(payload_s)
                    advance(1)
                found.append(DecisionCost(each, count, spread(plans), spread(payloads), PAYLOAD_BYTES / link))
    return found


def _measure(
    variant: Variant, requests: Sequence[SimulatedRequest], link: float, payload_count: int
) -> tuple[float, float]:
    """Layers are made long, so that nobody ends meanwhile and only payloads' turns are taken."""
    pool = Pool(variant.pool_settings(), link)
    for index, request in enumerate(requests):
        per_layer = max(1, -(-request.layer_bytes // PAYLOAD_BYTES), -(-2 * payload_count // request.layer_count))
        layer_bytes = per_layer * PAYLOAD_BYTES
        compute_s = request.compute_s * layer_bytes / request.layer_bytes
        demand = Demand(layer_bytes, request.layer_count, compute_s)
        pool.join(Flow(index, request.tenant, demand, (PAYLOAD_BYTES,) * per_layer, 0.0))
    began_s = time.process_time()
    going = pool.due(0.0)
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
