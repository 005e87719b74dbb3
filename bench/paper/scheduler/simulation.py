"""A discrete-event model of a link, requests and GPUs around the scheduler that a server runs. Seeded by its requests.

The server's own `Pool` (storage_server.delivery.scheduler.pool) decides which payload goes when; the model adds what
is around it. A payload that the pool lets go is at the client at once: the pool does that when its last byte
would have crossed the link. A request's GPU computes layer l once the layer is there and layer l-1 is done. Requests
that find no GPU free wait for one, in order of arrival, and only then ask the server.

Layer l of a request that began at b is there at a_l; its GPU stalls for D = max over l of (a_l - b - l*c), so that
TTFT = (b - arrival) + D + L*c.

Requests are the paper's workloads, random ones of a stated distribution, and arrivals in time. A random workload has 2
to 8 requests that come together; each has a context of 4K, 8K, 16K, 32K or 64K tokens and a hit rate uniform from 0.125
to 0.95, and computes what a cost model fitted to Table A8 says. The link is 0.3 to 1.1 (uniform) of what all of them
together need in order not to stall.
"""

from __future__ import annotations

import heapq
import json
import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

import numpy as np

from bench.core.experiment import WrongUse
from bench.paper.tables import NUM_LAYERS, TOKEN_LAYER_BYTES, table_a8, workload
from descriptors.units import KIB
from objectcache.calibration.compute.cost_model import Fit, Observation, fit_cost_model, prefill_s
from storage_server.delivery.scheduler.demand import Demand
from storage_server.delivery.scheduler.flow import Flow, LinkTenant
from storage_server.delivery.scheduler.policies import MARGIN_BYTES_PER_S, Policy
from storage_server.delivery.scheduler.pool import Pool, PoolSettings
from storage_server.planning.plan import GroupSizes

EPOCH_S_MAX = 600.0
"""Longer than any epoch of these benchmarks: rates are held until all requests have their bytes."""


@dataclass(frozen=True, slots=True)
class Variant:
    """`policy` None is slack-aware dispatch, which is always work-conserving."""

    policy: Policy | None
    is_work_conserving: bool

    @property
    def name(self) -> str:
        """As in results."""
        if self.policy is None:
            return "slack"
        return f"{self.policy.value}/work-conserving" if self.is_work_conserving else self.policy.value

    def pool_settings(
        self, margin_bytes_per_s: float = MARGIN_BYTES_PER_S, gather_s: float = 0.0, epoch_s_max: float = EPOCH_S_MAX
    ) -> PoolSettings:
        """What a pool is made with."""
        return PoolSettings(self.policy, self.is_work_conserving, margin_bytes_per_s, epoch_s_max, gather_s)


HELD = tuple(Variant(policy, is_work_conserving=False) for policy in Policy)
WORK_CONSERVING = tuple(Variant(policy, is_work_conserving=True) for policy in Policy)
SLACK = Variant(None, is_work_conserving=True)
EQUAL = HELD[0]
EQUAL_WORK_CONSERVING = WORK_CONSERVING[0]
CALIBRATED = Variant(Policy.CALIBRATED_STALL_OPT, is_work_conserving=False)
VARIANTS = (*HELD, *WORK_CONSERVING, SLACK)


Ended = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class SimulatedRequest:
    """L layers of s bytes; each is computed in `compute_s`, of which the scheduler is told `stated_compute_s`."""

    came_s: float
    layer_bytes: int
    layer_count: int
    compute_s: float
    stated_compute_s: float
    tenant: LinkTenant


@dataclass(slots=True, eq=False)
class RequestResult:
    """A request that has begun, and in the end its times. `rate_bytes_per_s` is what it was offered at the beginning of
    its epoch: work-conserving pools change it later.
    """

    request: SimulatedRequest
    began_s: float
    payloads_in_layer: int
    payload_count: int = 0
    stall_s: float = 0.0
    rate_bytes_per_s: float = 0.0

    @property
    def end_s(self) -> float:
        """When the last layer is computed."""
        return self.began_s + self.stall_s + self.request.layer_count * self.request.compute_s

    @property
    def ttft_s(self) -> float:
        """With the wait for a GPU where there are few."""
        return self.end_s - self.request.came_s

    @property
    def added_ttft_s(self) -> float:
        """TTFT less the computing alone."""
        return self.ttft_s - self.request.layer_count * self.request.compute_s


@dataclass(frozen=True, slots=True)
class Load:
    """Requests, and the link that they share."""

    requests: Sequence[SimulatedRequest]
    link_bytes_per_s: float


@dataclass(frozen=True, slots=True)
class Simulated:
    """One result for each request, in order, and the model's seconds."""

    results: tuple[RequestResult, ...]
    duration_s: float

    @property
    def added_ttft_s(self) -> float:
        """The added time of all requests together, as Table A12 adds them up."""
        return sum(each.added_ttft_s for each in self.results)


def simulate(
    load: Load,
    pool: PoolSettings,
    payload_bytes_max: int | None = None,
    gpu_count: int | None = None,
    ended: Ended = lambda _: None,
) -> Simulated:
    """Run all requests to their ends, layers in payloads of at most `payload_bytes_max` (None: a layer is one payload).
    `gpu_count` None: a GPU for each. `ended` hears of requests with all bytes.
    """
    return _Run(load, Pool(pool, load.link_bytes_per_s), payload_bytes_max, gpu_count, ended).to_end()


class _Run:
    def __init__(
        self, load: Load, pool: Pool, payload_bytes_max: int | None, gpu_count: int | None, ended: Ended
    ) -> None:
        self._requests, self._pool, self._payload_bytes_max, self._ended = load.requests, pool, payload_bytes_max, ended
        self._coming = deque(sorted(range(len(self._requests)), key=lambda index: self._requests[index].came_s))
        self._without_gpu: deque[int] = deque()
        self._free_gpus = gpu_count or len(self._requests)
        self._computing: list[float] = []
        self._active: dict[Flow, RequestResult] = {}
        self._results: dict[int, RequestResult] = {}
        self._now = 0.0

    def to_end(self) -> Simulated:
        """Until every request has all its bytes."""
        while self._active or len(self._results) < len(self._requests):
            coming_s = self._requests[self._coming[0]].came_s if self._coming else math.inf
            outside_s = min(coming_s, self._computing[0]) if self._computing else coming_s
            self._now = max(self._now, min(outside_s, self._pool.wake_at()))
            if outside_s <= self._now:
                self._happen_outside()
            self._send()
        return Simulated(tuple(self._results[index] for index in range(len(self._requests))), self._now)

    def _happen_outside(self) -> None:
        """All that happens now, before the pool hears of it: requests of one moment are one batch."""
        while self._computing and self._computing[0] <= self._now:
            heapq.heappop(self._computing)
            self._free_gpus += 1
        while self._coming and self._requests[self._coming[0]].came_s <= self._now:
            self._without_gpu.append(self._coming.popleft())
        while self._without_gpu and self._free_gpus:
            self._free_gpus -= 1
            self._begin(self._without_gpu.popleft())

    def _begin(self, index: int) -> None:
        request = self._requests[index]
        largest = self._payload_bytes_max or request.layer_bytes
        whole, rest = divmod(request.layer_bytes, largest)
        payloads = (largest,) * whole + ((rest,) if rest else ())
        demand = Demand(request.layer_bytes, request.layer_count, request.stated_compute_s)
        layers = [GroupSizes(request.layer_bytes, payloads)] * request.layer_count
        flow = Flow(index, request.tenant, demand, layers, self._now)
        self._active[flow] = self._results[index] = RequestResult(request, self._now, len(payloads))
        self._pool.join(flow)

    def _send(self) -> None:
        epoch = self._pool.epoch
        going = self._pool.due(self._now)
        if self._pool.epoch != epoch:
            for flow in self._pool.flows():
                self._active[flow].rate_bytes_per_s = self._active[flow].rate_bytes_per_s or flow.rate_bytes_per_s
        for flow in going:
            result = self._active[flow]
            result.payload_count += 1
            layer_count, is_part = divmod(result.payload_count, result.payloads_in_layer)
            if not is_part:
                late_s = self._now - result.began_s - (layer_count - 1) * result.request.compute_s
                result.stall_s = max(result.stall_s, late_s)
            if result.payload_count == result.payloads_in_layer * result.request.layer_count:
                result.rate_bytes_per_s = result.rate_bytes_per_s or flow.rate_bytes_per_s
                heapq.heappush(self._computing, result.end_s)
                del self._active[flow]
                self._ended(1)
            flow.ahead_count -= 1
            self._pool.resume(flow, self._now)


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
    return SimulatedRequest(came_s, layer_bytes, NUM_LAYERS, compute_s, compute_s, LinkTenant(tenant))


def paper_batch(name: str) -> Load:
    """Workload A, B or C, unscaled. Raises KeyError for another."""
    found = workload(name)
    times_s = [(each, each.layer_compute_s) for each in found.requests]
    requests = [SimulatedRequest(0.0, each.layer_bytes, NUM_LAYERS, s, s, LinkTenant(each.name)) for each, s in times_s]
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
