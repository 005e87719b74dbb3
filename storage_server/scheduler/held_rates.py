"""Dispatch by rates: each request's payloads are let go when its rate has carried them. Pure: `now` is an argument.

A payload is let go when its last byte would have crossed a link of the request's own rate, so layer l is there at
(l+1)*s/r after the rate was given, to within the time of one wake-up. A wake-up that comes late, or a client that reads
late, is made up for, up to `CATCH_UP_S`. Payloads that are due together go by weighted deficit round robin over the
link's own clock: beyond the payloads that are under way and `CATCH_UP_S`, no more goes than the budget.

A client that has not read for longer than `CATCH_UP_S` does not use its rate. Work-conserving, others are given it at
the next epoch, and one begins when the client reads again; held, it is kept for it.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

from storage_server.scheduler.flow import Flow
from storage_server.scheduler.policies import Policy, allocate
from storage_server.scheduler.round_robin import RoundRobin
from storage_server.scheduler.tenant_meter import TenantMeter

CATCH_UP_S = 0.05


class HeldRates:
    """Rates by a policy for the requests of one link; solved anew only where `share` is called."""

    def __init__(
        self,
        policy: Policy,
        margin_bytes_per_s: float,
        budget_bytes_per_s: float,
        meter: TenantMeter | None = None,
        *,
        is_work_conserving: bool = False,
    ) -> None:
        self._policy = policy
        self._margin = margin_bytes_per_s
        self._budget = budget_bytes_per_s
        self._meter = TenantMeter() if meter is None else meter
        self._is_work_conserving = is_work_conserving
        self._began: dict[Flow, float] = {}
        """When each flow's next payload began to cross at its own rate."""
        self._dues: dict[Flow, float] = {}
        self._queue: list[tuple[float, int, Flow]] = []
        self._ready = RoundRobin()
        self._under_way_bytes = 0
        self._link_free_s = -math.inf
        self._behind: dict[Flow, float] = {}
        """Whose transport is behind, since when; in that order."""
        self._idle: set[Flow] = set()
        """Whose transport has been behind for longer than is made up for."""
        self._used_bytes_per_s = 0.0
        self.wants_epoch = False
        """Whether rates would be others if they were solved anew for those that use them."""

    def __len__(self) -> int:
        """Flows it still knows of."""
        return len(self._began.keys() | self._dues.keys() | self._behind.keys() | self._idle)

    @property
    def used_bytes_per_s(self) -> float:
        """Of the budget; what is left of it is idle."""
        return min(self._budget, max(0.0, self._used_bytes_per_s))

    def set_budget(self, budget_bytes_per_s: float, now: float) -> None:
        """For the next `share`; until then the link's clock alone keeps to it."""
        self._budget = budget_bytes_per_s

    def set_link_rate(self, rate_bytes_per_s: float, now: float) -> None:
        """Rates are held, whatever more the link carries."""

    def share(self, flows: Sequence[Flow], now: float) -> None:
        """Give every flow its rate; what has gone towards its next payload at its old rate counts."""
        self.wants_epoch = False
        if self._is_work_conserving:
            flows = [flow for flow in flows if flow not in self._idle]
        rates = allocate(self._policy, [flow.demand for flow in flows], self._budget, self._margin)
        for flow, rate in zip(flows, rates.tolist(), strict=True):
            began = self._began.get(flow, now)
            if began < now:
                began = now - (now - began) * (flow.rate_bytes_per_s / rate)
            flow.rate_bytes_per_s = rate
            self._began[flow] = began
            if flow.is_blocked:
                self._is_behind(flow, now)
            else:
                self._expect(flow)
        self._used_bytes_per_s = sum(flow.rate_bytes_per_s for flow in self._began if flow not in self._idle)

    def resume(self, flow: Flow, now: float) -> None:
        """The transport has room for the flow again."""
        if flow in self._began and flow not in self._dues and not flow.is_blocked:
            self._behind.pop(flow, None)
            if flow in self._idle:
                self._idle.remove(flow)
                self._used_bytes_per_s += flow.rate_bytes_per_s
                self.wants_epoch = self._is_work_conserving
            self._began[flow] = max(self._began[flow], now - CATCH_UP_S)
            self._expect(flow)

    def remove(self, flow: Flow, now: float) -> None:
        """The flow is over, or given up."""
        if self._began.pop(flow, None) is not None and flow not in self._idle:
            self._used_bytes_per_s -= flow.rate_bytes_per_s
        self._behind.pop(flow, None)
        self._idle.discard(flow)
        self._forget(flow)
        self._ready.remove(flow)

    def due(self, now: float) -> list[Flow]:
        """Whose payloads go now, in order; a flow appears once a payload."""
        self._find_idle(now)
        going: list[Flow] = []
        while True:
            while self._queue and self._queue[0][0] <= now:
                due_s, _, flow = heapq.heappop(self._queue)
                if self._dues.get(flow) == due_s:
                    self._ready.add(flow, flow.rate_bytes_per_s)
            if self._link_free_s > now or (chosen := self._ready.next()) is None:
                return going
            going.append(chosen)
            self._let_go(chosen, now)

    def wake_at(self) -> float:
        """When to ask again; infinity while nothing is under way."""
        idle_s = next(iter(self._behind.values())) + CATCH_UP_S if self._behind else math.inf
        if len(self._ready):
            return min(idle_s, self._link_free_s)
        while self._queue and self._dues.get(self._queue[0][2]) != self._queue[0][0]:
            heapq.heappop(self._queue)
        return min(idle_s, max(self._queue[0][0], self._link_free_s) if self._queue else math.inf)

    def _let_go(self, flow: Flow, now: float) -> None:
        earliest_s = now - CATCH_UP_S - self._under_way_bytes / self._budget
        self._link_free_s = max(self._link_free_s, earliest_s) + flow.payload_bytes / self._budget
        self._began[flow] = max(self._dues[flow], now - CATCH_UP_S)
        self._meter.charge(flow.tenant, flow.payload_bytes, now)
        self._forget(flow)
        flow.let_go()
        if flow.is_blocked:
            self._is_behind(flow, now)
        else:
            self._expect(flow)

    def _is_behind(self, flow: Flow, now: float) -> None:
        if not flow.is_over and flow not in self._idle:
            self._behind.setdefault(flow, now)

    def _find_idle(self, now: float) -> None:
        while self._behind:
            flow, since_s = next(iter(self._behind.items()))
            if since_s + CATCH_UP_S > now:
                return
            del self._behind[flow]
            self._idle.add(flow)
            self._used_bytes_per_s -= flow.rate_bytes_per_s
            self.wants_epoch = self._is_work_conserving

    def _expect(self, flow: Flow) -> None:
        """The flow's next payload is under way."""
        self._forget(flow)
        self._ready.remove(flow)
        due_s = self._dues[flow] = self._began[flow] + flow.payload_bytes / flow.rate_bytes_per_s
        self._under_way_bytes += flow.payload_bytes
        heapq.heappush(self._queue, (due_s, flow.number, flow))

    def _forget(self, flow: Flow) -> None:
        if self._dues.pop(flow, None) is not None:
            self._under_way_bytes -= flow.payload_bytes
