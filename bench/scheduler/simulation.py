"""A discrete-event model of links, requests and GPUs around the scheduler that a server runs. Seeded by its requests.

Which payload goes when is decided by `storage_server.scheduler.pool.Pool`, the server's own; the model adds what a
server has around it. A payload that the pool lets go is at the client at once: the pool does that when its last byte
would have crossed the link. A request's GPU computes layer l once the layer is there and layer l-1 is done. Requests
that find no GPU free wait for one, in order of arrival, and only then ask the server.

Layer l of a request that began at b is there at a_l; its GPU stalls for D = max over l of (a_l - b - l*c), so that
TTFT = (b - arrival) + D + L*c.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from storage_server.scheduler.demand import Demand
from storage_server.scheduler.flow import Flow, Tenant
from storage_server.scheduler.pool import Pool, PoolSettings


@dataclass(frozen=True, slots=True)
class SimulatedRequest:
    """L layers of s bytes over link `link_index`; each is computed in `compute_s`, of which the scheduler is told
    `stated_compute_s` (None: nothing).
    """

    came_s: float
    layer_bytes: int
    layer_count: int
    compute_s: float
    stated_compute_s: float | None
    tenant: Tenant
    link_index: int = 0


@dataclass(frozen=True, slots=True)
class RequestResult:
    """`added_ttft_s` is TTFT less the computing alone: the GPU's stalls, and the wait for a GPU where there are few.
    `rate_bytes_per_s` is what was offered before layer 0.
    """

    ttft_s: float
    stall_s: float
    first_layer_s: float
    rate_bytes_per_s: float
    epoch: int
    added_ttft_s: float


@dataclass(frozen=True, slots=True)
class LinkSettings:
    """A server's link. Layers go in payloads of at most `payload_bytes_max`; None: a layer is one payload."""

    rate_bytes_per_s: float
    pool: PoolSettings
    payload_bytes_max: int | None = None


@dataclass(frozen=True, slots=True)
class Simulated:
    """One result for each request, in order; the model's seconds and how many payloads went."""

    results: tuple[RequestResult, ...]
    duration_s: float
    payload_count: int

    @property
    def added_ttft_s(self) -> float:
        """Of all requests together, as Table A12 adds them up."""
        return sum(each.added_ttft_s for each in self.results)


def simulate(
    requests: Sequence[SimulatedRequest],
    links: Sequence[LinkSettings],
    gpu_count: int | None = None,
    ended: Callable[[int], None] | None = None,
) -> Simulated:
    """Run all requests to their ends. `gpu_count` None: a GPU for each. `ended` hears when requests have their bytes.

    Raises ValueError on a request over a link that there is not.
    """
    if any(not 0 <= request.link_index < len(links) for request in requests):
        raise ValueError(f"requests over links that there are not; there are {len(links)}")
    run = _Run(requests, links, gpu_count, ended)
    run.to_end()
    return run.simulated()


@dataclass(slots=True, eq=False)
class _Progress:
    """Where a request that has begun is."""

    index: int
    request: SimulatedRequest
    pool: Pool
    began_s: float
    payloads_in_layer: int
    payload_count: int = 0
    first_layer_s: float = 0.0
    stall_s: float = 0.0
    rate_bytes_per_s: float = 0.0
    """Of its epoch's beginning: work-conserving pools change it later."""


class _Run:
    def __init__(
        self,
        requests: Sequence[SimulatedRequest],
        links: Sequence[LinkSettings],
        gpu_count: int | None,
        ended: Callable[[int], None] | None,
    ) -> None:
        self._requests = requests
        self._links = links
        self._pools = [Pool(link.pool, link.rate_bytes_per_s) for link in links]
        order = sorted(range(len(requests)), key=lambda index: requests[index].came_s)
        self._coming = deque(order)
        self._without_gpu: deque[int] = deque()
        self._free_gpus = len(requests) if gpu_count is None else gpu_count
        self._computing: list[float] = []
        self._progress: dict[Flow, _Progress] = {}
        self._results: dict[int, RequestResult] = {}
        self._ended = ended
        self._now = 0.0
        self._payload_count = 0

    def to_end(self) -> None:
        """Until every request has all its bytes."""
        while len(self._results) < len(self._requests):
            wakes = [pool.wake_at() for pool in self._pools]
            outside_s = self._outside_s()
            self._now = max(self._now, min(outside_s, *wakes))
            if outside_s <= self._now:
                self._happen_outside()
            for pool, wake_s in zip(self._pools, wakes, strict=True):
                if wake_s <= self._now or outside_s <= self._now:
                    self._send(pool)

    def simulated(self) -> Simulated:
        results = tuple(self._results[index] for index in range(len(self._requests)))
        return Simulated(results, self._now, self._payload_count)

    def _outside_s(self) -> float:
        """When the next request comes, or a GPU is free for one that waits."""
        coming_s = self._requests[self._coming[0]].came_s if self._coming else math.inf
        return min(coming_s, self._computing[0]) if self._computing else coming_s

    def _happen_outside(self) -> None:
        """All that happens now, before the pools hear of it: requests of one moment are one batch."""
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
        link = self._links[request.link_index]
        pool = self._pools[request.link_index]
        payloads = _payloads(request.layer_bytes, link.payload_bytes_max)
        demand = Demand(request.layer_bytes, request.layer_count, request.stated_compute_s)
        flow = Flow(index, request.tenant, demand, payloads, self._now)
        self._progress[flow] = _Progress(index, request, pool, self._now, len(payloads))
        pool.join(flow)

    def _send(self, pool: Pool) -> None:
        epoch = pool.epoch
        going = pool.due(self._now)
        if pool.epoch != epoch:
            self._note_rates(pool)
        for flow in going:
            self._payload_count += 1
            progress = self._progress[flow]
            progress.payload_count += 1
            layer_count, is_part = divmod(progress.payload_count, progress.payloads_in_layer)
            if not is_part:
                self._layer_is_there(flow, progress, layer_count - 1)
            flow.ahead_count -= 1
            pool.resume(flow, self._now)

    def _note_rates(self, pool: Pool) -> None:
        for flow in pool.flows():
            progress = self._progress[flow]
            if not progress.rate_bytes_per_s:
                progress.rate_bytes_per_s = flow.rate_bytes_per_s

    def _layer_is_there(self, flow: Flow, progress: _Progress, layer_index: int) -> None:
        request = progress.request
        late_s = self._now - progress.began_s - layer_index * request.compute_s
        progress.stall_s = max(progress.stall_s, late_s)
        if layer_index == 0:
            progress.first_layer_s = self._now
        if layer_index == request.layer_count - 1:
            self._finish(flow, progress)

    def _finish(self, flow: Flow, progress: _Progress) -> None:
        request = progress.request
        computing_s = request.layer_count * request.compute_s
        end_s = progress.began_s + progress.stall_s + computing_s
        heapq.heappush(self._computing, end_s)
        ttft_s = end_s - request.came_s
        self._results[progress.index] = RequestResult(
            ttft_s,
            progress.stall_s,
            progress.first_layer_s - request.came_s,
            progress.rate_bytes_per_s or flow.rate_bytes_per_s,
            flow.epoch,
            ttft_s - computing_s,
        )
        del self._progress[flow]
        if self._ended is not None:
            self._ended(1)


def _payloads(layer_bytes: int, payload_bytes_max: int | None) -> tuple[int, ...]:
    if payload_bytes_max is None or layer_bytes <= payload_bytes_max:
        return (layer_bytes,)
    whole, rest = divmod(layer_bytes, payload_bytes_max)
    return (payload_bytes_max,) * whole + ((rest,) if rest else ())
