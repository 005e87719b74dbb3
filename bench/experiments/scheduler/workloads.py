"""Requests to simulate: the paper's workloads, random ones of a stated distribution, and arrivals in time. Pure but for
the file of a trace.

A random workload has 2 to 8 requests that come together; each has a context of 4K, 8K, 16K, 32K or 64K tokens and a
hit rate uniform from 0.125 to 0.95, and computes what a cost model fitted to Table A8 says. The link is 0.3 to 1.1
(uniform) of what all of them together need in order not to stall.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

import numpy as np

from bench.core.experiment import WrongUse
from bench.experiments.scheduler.simulation import Load, SimulatedRequest
from bench.paper.tables import NUM_LAYERS, TOKEN_LAYER_BYTES, table_a8, workload
from calibration.compute.cost_model import Fit, Observation, fit_cost_model, prefill_s
from descriptors.units import KIB
from storage_server.scheduler.flow import Tenant

REQUEST_COUNTS = (2, 8)
CONTEXTS = tuple(count * KIB for count in (4, 8, 16, 32, 64))
HIT_RATES = (0.125, 0.95)
LINK_PARTS = (0.3, 1.1)
COMPUTE_ERROR = 0.3
"""Stated compute times are wrong by up to this part, uniformly."""

BLOCK_TOKENS = 512
EXCERPT = Path(__file__).resolve().parent / "mooncake_conversation_excerpt.jsonl"


@cache
def table_a8_costs() -> Fit:
    """What a prefill of Llama 3.1 8B costs on the paper's A100, fitted to Table A8."""
    return fit_cost_model(
        [Observation(row.cached_tokens, row.context_tokens, row.compute_s * 1e6) for row in table_a8()]
    )


def make_request(cached_tokens: int, context_tokens: int, tenant: str, came_s: float = 0.0) -> SimulatedRequest:
    """Llama 3.1 8B with so many tokens cached. Raises ValueError where nothing is left to compute."""
    compute_s = prefill_s(table_a8_costs().costs, cached_tokens, context_tokens) / NUM_LAYERS
    layer_bytes = cached_tokens * TOKEN_LAYER_BYTES
    return SimulatedRequest(came_s, layer_bytes, NUM_LAYERS, compute_s, compute_s, Tenant(tenant))


def paper_batch(name: str) -> Load:
    """Workload A, B or C, unscaled. Raises KeyError for another."""
    found = workload(name)
    times_s = [(each, each.layer_compute_s) for each in found.requests]
    requests = [SimulatedRequest(0.0, each.layer_bytes, NUM_LAYERS, s, s, Tenant(each.name)) for each, s in times_s]
    return Load(requests, found.budget_bytes_per_s)


def random_batch(seed: int, index: int) -> Load:
    """Workload number `index` of that seed."""
    random = np.random.default_rng((seed, index))
    requests = _drawn(random, int(random.integers(REQUEST_COUNTS[0], REQUEST_COUNTS[1] + 1)))
    needed = sum(request.layer_bytes / request.compute_s for request in requests)
    return Load(requests, needed * float(random.uniform(*LINK_PARTS)))


def with_wrong_compute(batch: Load, seed: int, index: int) -> Load:
    """The same, each compute time stated wrong by up to COMPUTE_ERROR."""
    random = np.random.default_rng((seed, index, 1))
    factors = random.uniform(1 - COMPUTE_ERROR, 1 + COMPUTE_ERROR, len(batch.requests)).tolist()
    pairs = zip(batch.requests, factors, strict=True)
    return replace(batch, requests=[replace(each, stated_compute_s=each.compute_s * part) for each, part in pairs])


def poisson_load(count: int, tenant_count: int, link_bytes_per_s: float, part: float, seed: int) -> Load:
    """Requests of random_batch's kind that come at random, as many bytes a second as `part` of the link."""
    random = np.random.default_rng((seed, count))
    drawn = _drawn(random, count, tenant_count)
    mean_bytes = sum(each.layer_bytes * each.layer_count for each in drawn) / count
    came_s = np.cumsum(random.exponential(mean_bytes / (part * link_bytes_per_s), count)).tolist()
    pairs = zip(drawn, came_s, strict=True)
    return Load([replace(each, came_s=at_s) for each, at_s in pairs], link_bytes_per_s)


def batch_requests(count: int, seed: int) -> list[SimulatedRequest]:
    """Requests of random_batch's kind that come together, each of a tenant of its own."""
    return _drawn(np.random.default_rng((seed, count)), count)


def _drawn(random: np.random.Generator, count: int, tenant_count: int | None = None) -> list[SimulatedRequest]:
    contexts = random.choice(CONTEXTS, count)
    cached = np.round(random.uniform(*HIT_RATES, count) * contexts).astype(int)
    tokens = zip(cached.tolist(), contexts.tolist(), strict=True)
    return [make_request(*each, f"t{index % (tenant_count or count)}") for index, each in enumerate(tokens)]


class TraceEntry(NamedTuple):
    """One request of the trace, of which so many tokens are cached."""

    came_s: float
    context_tokens: int
    cached_tokens: int


def read_trace(path: Path, count_max: int | None = None) -> list[TraceEntry]:
    """The first requests of the file, by their time. Raises WrongUse for what cannot be read or is no such trace."""
    try:
        lines = path.read_text().splitlines()[:count_max]
    except (OSError, UnicodeDecodeError) as error:
        raise WrongUse(f"{path}: {error}") from None
    entries: list[TraceEntry] = []
    seen: set[int] = set()
    for number, line in enumerate(lines, 1):
        try:
            fields = json.loads(line)
            came_s, tokens = float(fields["timestamp"]) / 1e3, int(fields["input_length"])
            blocks = [int(block) for block in fields["hash_ids"]]
        except (ValueError, KeyError, TypeError) as error:
            raise WrongUse(f"{path}, line {number}: {error!r}") from None
        if tokens < 1 or came_s < 0:
            raise WrongUse(f"{path}, line {number}: {tokens} tokens at {came_s} s")
        known = sum(1 for _ in takewhile(seen.__contains__, blocks))
        entries.append(TraceEntry(came_s, tokens, min(known * BLOCK_TOKENS, tokens - 1)))
        seen.update(blocks)
    if not entries:
        raise WrongUse(f"{path}: no requests")
    return sorted(entries, key=lambda entry: entry.came_s)


def trace_requests(entries: Iterable[TraceEntry]) -> list[SimulatedRequest]:
    """Those that load something, each of a tenant of its own: the trace names none. Raises WrongUse without any."""
    requests = [
        make_request(cached, context, f"r{index}", came_s)
        for index, (came_s, context, cached) in enumerate(entries)
        if cached
    ]
    if not requests:
        raise WrongUse("no request of the trace finds anything cached")
    return requests
