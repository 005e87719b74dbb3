"""A link, its requests and their GPUs on a played clock: drives a `Pool` as a server would, and keeps what comes."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from bench.paper.tables import Workload
from storage_server.delivery.scheduler.demand import Demand
from storage_server.delivery.scheduler.flow import Flow, LinkTenant
from storage_server.delivery.scheduler.pool import Pool
from storage_server.planning.plan import GroupSizes

Floats = NDArray[np.float64]
MOVES_MAX = 200_000
CLOCK_STEP_S = 1e-9


@dataclass(frozen=True, slots=True)
class Asked:
    """A request: `compute_s` is what its GPU takes for a layer, `stated_s` what it says (`AS_IT_IS`: the truth).

    From `stops_s` to `reads_again_s` its client takes no bytes; at `leaves_s` it is gone.
    """

    at_s: float
    layer_bytes: int
    compute_s: float
    stated_s: float | None = -1.0
    layer_count: int = 32
    tenant: LinkTenant | None = None
    payload_bytes: int | None = None
    stops_s: float = math.inf
    reads_again_s: float = math.inf
    leaves_s: float = math.inf

    @property
    def said_s(self) -> float | None:
        """The c of its descriptor."""
        return self.compute_s if self.stated_s == -1.0 else self.stated_s


@dataclass(slots=True)
class Outcome:
    """What became of one request."""

    asked: Asked
    flow: Flow
    layers_s: list[float] = field(default_factory=list)
    """When each layer was there."""
    payloads: list[tuple[float, int]] = field(default_factory=list)
    """When each payload went, and its bytes."""
    rates: list[float] = field(default_factory=list)
    """Its rate at each payload."""

    @property
    def stall_s(self) -> float:
        """For how long its GPU waited, all layers there."""
        layers = np.arange(len(self.layers_s))
        return float((np.array(self.layers_s) - self.asked.at_s - layers * self.asked.compute_s).max())

    @property
    def ttft_s(self) -> float:
        """The time to the first token of a request whose layers are all there."""
        assert len(self.layers_s) == self.asked.layer_count
        return self.stall_s + self.asked.layer_count * self.asked.compute_s

    def sent_bytes(self, begin_s: float = -math.inf, end_s: float = math.inf) -> int:
        """In the interval, its end included."""
        return sum(count for at_s, count in self.payloads if begin_s < at_s <= end_s)


def of_workload(workload: Workload, error: Callable[[int], float] = lambda index: 1.0) -> list[Asked]:
    """The paper's requests, all at 0, each by a tenant of its own; `error` multiplies what is said of c."""
    return [
        Asked(0.0, request.layer_bytes, request.layer_compute_s, request.layer_compute_s * error(index))
        for index, request in enumerate(workload.requests)
    ]


def play(
    pool: Pool,
    asked: Sequence[Asked],
    *,
    late_s: Callable[[], float] = lambda: 0.0,
    jumps: Sequence[tuple[float, float]] = (),
    budgets: Sequence[tuple[float, float]] = (),
) -> list[Outcome]:
    """Play until all is over. Wake-ups come `late_s()` late; at each of `jumps` the pool's clock is put forward or back
    by so much, at each of `budgets` the link is made so fast; times are those of the world.
    """
    outcomes = [Outcome(each, _flow(index, each)) for index, each in enumerate(asked)]
    by_flow = {outcome.flow: outcome for outcome in outcomes}
    offset = 0.0
    order = itertools.count()
    events: list[tuple[float, int, Callable[[float], None]]] = []

    def at(when_s: float, what: Callable[[float], None]) -> None:
        if when_s < math.inf:
            heapq.heappush(events, (when_s, next(order), what))

    def take(flow: Flow, now: float) -> None:
        while flow.ahead_count:
            flow.ahead_count -= 1
            pool.resume(flow, now + offset)

    def come(outcome: Outcome) -> Callable[[float], None]:
        def joins(now: float) -> None:
            outcome.flow.came_s = now + offset
            pool.join(outcome.flow)

        return joins

    def jump(by_s: float) -> Callable[[float], None]:
        def jumps_by(now: float) -> None:
            nonlocal offset
            offset += by_s

        return jumps_by

    for outcome in outcomes:
        at(outcome.asked.at_s, come(outcome))
        at(outcome.asked.reads_again_s, lambda now, flow=outcome.flow: take(flow, now))  # type: ignore[misc]
        at(outcome.asked.leaves_s, lambda now, flow=outcome.flow: pool.leave(flow, now + offset))  # type: ignore[misc]
    for when_s, by_s in jumps:
        at(when_s, jump(by_s))
    for when_s, rate in budgets:
        at(when_s, lambda now, rate=rate: pool.set_budget(rate, now + offset))  # type: ignore[misc]

    now = 0.0
    for _ in range(MOVES_MAX):
        wake_s = max(now, pool.wake_at() - offset)
        next_s = events[0][0] if events else math.inf
        if min(wake_s, next_s) == math.inf:
            return outcomes
        if next_s <= wake_s:
            now = max(now, next_s)
            while events and events[0][0] <= now:
                heapq.heappop(events)[2](now)
        else:
            now = max(now + CLOCK_STEP_S, wake_s + late_s())
        for flow in pool.due(now + offset):
            outcome = by_flow[flow]
            sent = len(outcome.payloads)
            payloads = flow.layers[0].payloads
            size = payloads[sent % len(payloads)]
            outcome.payloads.append((now, size))
            outcome.rates.append(flow.rate_bytes_per_s)
            if (sent + 1) % len(payloads) == 0:
                outcome.layers_s.append(now)
            if not outcome.asked.stops_s <= now < outcome.asked.reads_again_s:
                take(flow, now)
    raise AssertionError("it never ends")


def _flow(number: int, asked: Asked) -> Flow:
    size = asked.payload_bytes or asked.layer_bytes
    payloads = (size,) * (asked.layer_bytes // size)
    rest = asked.layer_bytes % size
    tenant = asked.tenant or LinkTenant(f"tenant-{number}")
    demand = Demand(asked.layer_bytes, asked.layer_count, asked.said_s)
    layers = layers_of((*payloads, rest) if rest else payloads, asked.layer_count)
    return Flow(number, tenant, demand, layers, asked.at_s)


def layers_of(payloads: Sequence[int], layer_count: int) -> list[GroupSizes]:
    """Layers of payloads of these bytes."""
    return [GroupSizes(sum(payloads), payloads)] * layer_count
