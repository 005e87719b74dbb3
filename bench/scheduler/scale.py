"""The simulation where this machine could not follow: a trace's arrivals, and a thousand tenants over 800 Gbps."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bench.progress import progress_bar
from bench.scheduler.simulation import LinkSettings, SimulatedRequest, simulate
from bench.scheduler.variants import CALIBRATED, EQUAL, SLACK, VARIANTS, WORK_CONSERVING, Variant
from bench.scheduler.workloads import batch_requests, poisson_requests
from storage_server.scheduler.pool import EPOCH_S_MAX

SCALE_VARIANTS = (EQUAL, CALIBRATED, *WORK_CONSERVING[::4], SLACK)
POISSON_LOAD = 0.9


@dataclass(frozen=True, slots=True)
class Served:
    """One variant's service of many requests: TTFT and added TTFT in seconds, and what the simulation itself took."""

    arrivals: str
    variant: Variant
    request_count: int
    link_bytes_per_s: float
    ttft_mean_s: float
    ttft_p50_s: float
    ttft_p99_s: float
    added_mean_s: float
    added_p99_s: float
    duration_s: float
    wall_s: float

    @property
    def requests_per_wall_s(self) -> float:
        """How fast the simulation is."""
        return self.request_count / self.wall_s


def serve_trace(
    requests: Sequence[SimulatedRequest], load: float, gpu_count: int | None, payload_bytes_max: int | None
) -> list[Served]:
    """Every variant over a link of which the requests' bytes need `load` on the average."""
    span_s = max(1.0, max(request.came_s for request in requests) - min(request.came_s for request in requests))
    nbytes = sum(request.layer_bytes * request.layer_count for request in requests)
    return _serve("trace", requests, VARIANTS, nbytes / span_s / load, gpu_count, payload_bytes_max)


def serve_scale(tenant_count: int, request_count: int, link_bytes_per_s: float, seed: int) -> list[Served]:
    """All tenants at once, and Poisson arrivals of more requests than tenants; a layer is one payload."""
    batch = batch_requests(tenant_count, seed)
    poisson = poisson_requests(request_count, tenant_count, link_bytes_per_s, POISSON_LOAD, seed)
    return [
        *_serve("batch", batch, SCALE_VARIANTS, link_bytes_per_s, None, None),
        *_serve("poisson", poisson, SCALE_VARIANTS, link_bytes_per_s, None, None),
    ]


def _serve(
    arrivals: str,
    requests: Sequence[SimulatedRequest],
    variants: Sequence[Variant],
    link_bytes_per_s: float,
    gpu_count: int | None,
    payload_bytes_max: int | None,
) -> list[Served]:
    """With epochs of the length a server has; a batch is one epoch however long it takes, since nobody waits."""
    served = []
    with progress_bar(len(requests) * len(variants), arrivals) as advance:
        for each in variants:
            link = LinkSettings(link_bytes_per_s, each.pool_settings(epoch_s_max=EPOCH_S_MAX), payload_bytes_max)
            began_s = time.perf_counter()
            found = simulate(requests, [link], gpu_count, advance)
            wall_s = time.perf_counter() - began_s
            ttfts = np.array([result.ttft_s for result in found.results])
            added = np.array([result.added_ttft_s for result in found.results])
            served.append(
                Served(
                    arrivals=arrivals,
                    variant=each,
                    request_count=len(requests),
                    link_bytes_per_s=link_bytes_per_s,
                    ttft_mean_s=float(ttfts.mean()),
                    ttft_p50_s=float(np.percentile(ttfts, 50)),
                    ttft_p99_s=float(np.percentile(ttfts, 99)),
                    added_mean_s=float(added.mean()),
                    added_p99_s=float(np.percentile(added, 99)),
                    duration_s=found.duration_s,
                    wall_s=wall_s,
                )
            )
    return served
