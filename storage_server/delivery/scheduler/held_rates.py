"""Dispatch by rates: a request's payload is dispatched when its rate has carried it. Pure: `now` is an argument.

A payload is dispatched when its last byte would have crossed a link of the request's own rate r, so layer l arrives
(l+1)*s/r after the rate was given, to within the time of one wake-up. A wake-up that comes late, or a client that reads
late, is made up for, up to `CATCH_UP_S`. Payloads that are due together go by weighted deficit round robin over the
link's own clock, so that no more than the budget goes, beyond the payloads under way and `CATCH_UP_S`.

A client that has not read for longer than `CATCH_UP_S` does not use its rate. With work-conserving rates the next epoch
gives its rate to others, and a new epoch begins when the client reads again. With held rates the rate is kept for it.

Example: Equal, a budget of 100 bytes/s, two requests with payloads of 50 bytes. Each has 50 bytes/s, so both let a
payload go at 1 s, 2 s, 3 s, and so on.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

from storage_server.delivery.scheduler.flow import Flow
from storage_server.delivery.scheduler.policies import Policy, allocate
from storage_server.delivery.scheduler.round_robin import FlowRoundRobin
from storage_server.delivery.scheduler.tenant_meter import TenantMeter

CATCH_UP_S = 0.05


class HeldRates:
    """The rates that a policy gives to the requests of one link. They are computed anew only by `share`."""

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
        """The time at which each flow's next payload began to cross at the flow's own rate."""
        self._dues: dict[Flow, float] = {}
        self._queue: list[tuple[float, int, Flow]] = []
        self._ready = FlowRoundRobin()
        self._under_way_bytes = 0
        self._link_free_s = -math.inf
        self._behind: dict[Flow, float] = {}
        """Flows whose transport is behind, and since when; the longest first."""
        self._idle: set[Flow] = set()
        """Flows whose transport has been behind for longer than `CATCH_UP_S`."""
        self._used_bytes_per_s = 0.0
        self.wants_epoch = False
        """Whether a new epoch would change the rates, because a client has stopped or begun to read."""

    def __len__(self) -> int:
        """How many flows it knows of."""
        return len(self._began.keys() | self._dues.keys() | self._behind.keys() | self._idle)

    @property
    def used_bytes_per_s(self) -> float:
        """The part of the budget that is in use; the rest is idle."""
        return min(self._budget, max(0.0, self._used_bytes_per_s))

    def set_budget(self, budget_bytes_per_s: float, now: float) -> None:
        """Set the budget for the next `share`. Until then only the link's clock keeps to the new budget."""
        self._budget = budget_bytes_per_s

    def set_link_rate(self, rate_bytes_per_s: float, now: float) -> None:
        """Do nothing: rates are held, even when the link can carry more."""

    def share(self, flows: Sequence[Flow], now: float) -> None:
        """Give every flow its rate. Progress that the next payload has made at the old rate is kept."""
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
                self._note_behind(flow, now)
            else:
                self._set_due(flow)
        self._used_bytes_per_s = sum(flow.rate_bytes_per_s for flow in self._began if flow not in self._idle)

    def resume(self, flow: Flow, now: float) -> None:
        """Note that the transport takes payloads of the flow again."""
        if flow in self._began and flow not in self._dues and not flow.is_blocked:
            self._behind.pop(flow, None)
            if flow in self._idle:
                self._idle.remove(flow)
                self._used_bytes_per_s += flow.rate_bytes_per_s
                self.wants_epoch = self._is_work_conserving
            self._began[flow] = max(self._began[flow], now - CATCH_UP_S)
            self._set_due(flow)

    def remove(self, flow: Flow, now: float) -> None:
        """Remove a flow that is over or given up."""
        if self._began.pop(flow, None) is not None and flow not in self._idle:
            self._used_bytes_per_s -= flow.rate_bytes_per_s
        self._behind.pop(flow, None)
        self._idle.discard(flow)
        self._drop_due(flow)
        self._ready.remove(flow)

    def due(self, now: float) -> list[Flow]:
        """The flows whose next payloads go now, in order; a flow appears once for each payload."""
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
            self._dispatch_next(chosen, now)

    def wake_at(self) -> float:
        """The time at which to call `due` again; infinity while nothing is under way."""
        idle_s = next(iter(self._behind.values())) + CATCH_UP_S if self._behind else math.inf
        if len(self._ready):
            return min(idle_s, self._link_free_s)
        while self._queue and self._dues.get(self._queue[0][2]) != self._queue[0][0]:
            heapq.heappop(self._queue)
        return min(idle_s, max(self._queue[0][0], self._link_free_s) if self._queue else math.inf)

    def _dispatch_next(self, flow: Flow, now: float) -> None:
        earliest_s = now - CATCH_UP_S - self._under_way_bytes / self._budget
        self._link_free_s = max(self._link_free_s, earliest_s) + flow.payload_bytes / self._budget
        self._began[flow] = max(self._dues[flow], now - CATCH_UP_S)
        self._meter.charge(flow.tenant, flow.payload_bytes, now)
        self._drop_due(flow)
        flow.dispatch()
        if flow.is_blocked:
            self._note_behind(flow, now)
        else:
            self._set_due(flow)

    def _note_behind(self, flow: Flow, now: float) -> None:
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

    def _set_due(self, flow: Flow) -> None:
        """Compute the time at which the flow's next payload is due."""
        self._drop_due(flow)
        self._ready.remove(flow)
        due_s = self._dues[flow] = self._began[flow] + flow.payload_bytes / flow.rate_bytes_per_s
        self._under_way_bytes += flow.payload_bytes
        heapq.heappush(self._queue, (due_s, flow.number, flow))

    def _drop_due(self, flow: Flow) -> None:
        if self._dues.pop(flow, None) is not None:
            self._under_way_bytes -= flow.payload_bytes
