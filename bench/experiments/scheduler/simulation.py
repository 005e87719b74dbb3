"""A discrete-event model of a link, requests and GPUs around the scheduler that a server runs. Seeded by its requests.

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

from storage_server.planning.plan import GroupSizes
from storage_server.scheduler.demand import Demand
from storage_server.scheduler.flow import Flow, Tenant
from storage_server.scheduler.pool import Pool, PoolSettings

Ended = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class SimulatedRequest:
    """L layers of s bytes; each is computed in `compute_s`, of which the scheduler is told `stated_compute_s`."""

    came_s: float
    layer_bytes: int
    layer_count: int
    compute_s: float
    stated_compute_s: float
    tenant: Tenant


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
        """Of all requests together, as Table A12 adds them up."""
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
