"""Requests to simulate: the paper's workloads, random ones of a stated distribution, and arrivals in time. Pure.

A random workload has 2 to 8 requests that come together; each has a context of 4K, 8K, 16K, 32K or 64K tokens and a
hit rate uniform from 0.125 to 0.95, and computes what a cost model fitted to Table A8 says. The link is 0.3 to 1.1
(uniform) of what all of them together need in order not to stall.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from bench.compute.cost_model import Fit, Observation, fit_cost_model, prefill_s
from bench.paper import NUM_LAYERS, TOKEN_LAYER_BYTES, table_a8, workload
from bench.scheduler.simulation import SimulatedRequest
from descriptors.units import KIB
from storage_server.scheduler.flow import Tenant

REQUEST_COUNTS = (2, 8)
CONTEXTS = tuple(count * KIB for count in (4, 8, 16, 32, 64))
HIT_RATES = (0.125, 0.95)
LINK_PARTS = (0.3, 1.1)
COMPUTE_ERROR = 0.3
"""Stated compute times are wrong by up to this part, uniformly."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Requests that come together, and their link."""

    requests: tuple[SimulatedRequest, ...]
    link_bytes_per_s: float


@cache
def table_a8_costs() -> Fit:
    """What a prefill of Llama 3.1 8B costs on the paper's A100, fitted to Table A8."""
    return fit_cost_model(
        [Observation(row.cached_tokens, row.context_tokens, row.compute_s * 1e6) for row in table_a8()]
    )


def make_request(
    cached_tokens: int, context_tokens: int, tenant: Tenant, came_s: float = 0.0, link_index: int = 0
) -> SimulatedRequest:
    """Llama 3.1 8B with so many tokens cached. Raises ValueError where nothing is left to compute."""
    compute_s = prefill_s(table_a8_costs().costs, cached_tokens, context_tokens) / NUM_LAYERS
    layer_bytes = cached_tokens * TOKEN_LAYER_BYTES
    return SimulatedRequest(came_s, layer_bytes, NUM_LAYERS, compute_s, compute_s, tenant, link_index)


def paper_batch(name: str) -> Batch:
    """Workload A, B or C, unscaled. Raises KeyError for another."""
    found = workload(name)
    return Batch(
        tuple(
            SimulatedRequest(
                0.0, each.layer_bytes, NUM_LAYERS, each.layer_compute_s, each.layer_compute_s, Tenant(each.name)
            )
            for each in found.requests
        ),
        found.budget_bytes_per_s,
    )


def random_batch(seed: int, index: int) -> Batch:
    """Workload number `index` of that seed."""
    random = np.random.default_rng((seed, index))
    count = int(random.integers(REQUEST_COUNTS[0], REQUEST_COUNTS[1] + 1))
    contexts = random.choice(CONTEXTS, count)
    hit_rates = random.uniform(*HIT_RATES, count)
    requests = tuple(
        make_request(round(float(hit_rate) * int(context)), int(context), Tenant(f"t{number}"))
        for number, (context, hit_rate) in enumerate(zip(contexts, hit_rates, strict=True))
    )
    needed = sum(request.layer_bytes / request.compute_s for request in requests)
    return Batch(requests, needed * float(random.uniform(*LINK_PARTS)))


def with_wrong_compute(batch: Batch, seed: int, index: int) -> Batch:
    """The same, each compute time stated wrong by up to COMPUTE_ERROR."""
    random = np.random.default_rng((seed, index, 1))
    factors = random.uniform(1 - COMPUTE_ERROR, 1 + COMPUTE_ERROR, len(batch.requests))
    return Batch(
        tuple(
            SimulatedRequest(
                each.came_s,
                each.layer_bytes,
                each.layer_count,
                each.compute_s,
                each.compute_s * float(factor),
                each.tenant,
                each.link_index,
            )
            for each, factor in zip(batch.requests, factors, strict=True)
        ),
        batch.link_bytes_per_s,
    )


def poisson_requests(
    count: int, tenant_count: int, link_bytes_per_s: float, load: float, seed: int, link_count: int = 1
) -> tuple[SimulatedRequest, ...]:
    """Requests of random_batch's kind that come at random, as many bytes a second as `load` of the links together."""
    random = np.random.default_rng((seed, count))
    contexts = random.choice(CONTEXTS, count)
    hit_rates = random.uniform(*HIT_RATES, count)
    cached = np.round(hit_rates * contexts).astype(int)
    mean_bytes = float(cached.mean()) * TOKEN_LAYER_BYTES * NUM_LAYERS
    came = np.cumsum(random.exponential(mean_bytes / (load * link_bytes_per_s * link_count), count))
    return tuple(
        make_request(int(cached[index]), int(contexts[index]), Tenant(f"t{index % tenant_count}"), float(came[index]),
                     index % link_count)
        for index in range(count)
    )  # fmt: skip


def batch_requests(count: int, seed: int) -> tuple[SimulatedRequest, ...]:
    """Requests of random_batch's kind that come together, each of a tenant of its own."""
    random = np.random.default_rng((seed, count))
    contexts = random.choice(CONTEXTS, count)
    cached = np.round(random.uniform(*HIT_RATES, count) * contexts).astype(int)
    return tuple(make_request(int(cached[index]), int(contexts[index]), Tenant(f"t{index}")) for index in range(count))


def needed_bytes_per_s(requests: Sequence[SimulatedRequest]) -> float:
    """What all of them together need in order not to stall."""
    return sum(request.layer_bytes / request.compute_s for request in requests)
