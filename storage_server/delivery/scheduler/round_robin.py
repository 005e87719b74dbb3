"""Weighted deficit round robin: it chooses the next flow so that bytes over time are in proportion to weights. Pure.

In each round a flow's deficit grows in proportion to its weight, and a flow whose deficit covers its next payload sends
that payload (Shreedhar and Varghese, 1995). Rounds here are as small as can be: the next flow is the one whose deficit
suffices in the earliest round, and rounds in which no flow sends are skipped. A flow that has nothing to send saves
nothing up.

Example: A has weight 2, B weight 1, all payloads have one size. The order is A A B A A B.
"""

from __future__ import annotations

import heapq

from storage_server.delivery.scheduler.flow import Flow


class FlowRoundRobin:
    """The flows that have a payload to send now."""

    def __init__(self) -> None:
        self._round = 0.0
        self._enough: dict[Flow, float] = {}
        """The round in which each flow's deficit will cover its next payload."""
        self._queue: list[tuple[float, int, Flow]] = []

    def __len__(self) -> int:
        return len(self._enough)

    def add(self, flow: Flow, weight: float) -> None:
        """Add a flow that has a payload to send. A flow that is in the queue keeps its turn."""
        if flow not in self._enough:
            enough = self._enough[flow] = self._round + flow.payload_bytes / weight
            heapq.heappush(self._queue, (enough, flow.number, flow))

    def remove(self, flow: Flow) -> None:
        """Remove a flow that has nothing to send, or is gone."""
        if self._enough.pop(flow, None) is not None and len(self._queue) > 2 * len(self._enough) + 8:
            self._queue = [entry for entry in self._queue if self._enough.get(entry[2]) == entry[0]]
            heapq.heapify(self._queue)

    def next(self) -> Flow | None:
        """Take out the flow whose payload goes next. A flow with more payloads must be added again immediately, so that
        it does not miss its turn.
        """
        while self._queue:
            enough, _, flow = heapq.heappop(self._queue)
            if self._enough.get(flow) == enough:
                del self._enough[flow]
                self._round = enough
                return flow
        self._round = 0.0
        return None


class TenantRoundRobin:
    """Round robin among tenants by weight. The flows of one tenant that have a payload share its turns evenly."""

    def __init__(self) -> None:
        self._tenants = FlowRoundRobin()
        self._lanes: dict[str, FlowRoundRobin] = {}
        self._heads: dict[str, Flow] = {}
        """The flow of each tenant that goes when the tenant's turn comes."""
        self._last: str | None = None
        """The tenant of the last turn. Its flow may be added again before the tenant waits for its next turn."""

    def __len__(self) -> int:
        """How many flows it knows of."""
        return sum(map(len, self._lanes.values())) + len(self._heads)

    @property
    def has_turns(self) -> bool:
        """Whether `next` finds a flow."""
        return len(self._tenants) > 0 or self._last in self._lanes

    def add(self, flow: Flow) -> None:
        """Add a flow that has a payload to send. A flow that is in the queue keeps its turn."""
        name = flow.tenant.name
        if self._heads.get(name) is not flow:
            self._lanes.setdefault(name, FlowRoundRobin()).add(flow, 1.0)
            if name not in self._heads and name != self._last:
                self._offer(name)

    def remove(self, flow: Flow) -> None:
        """Remove a flow that has nothing to send, or is gone."""
        name = flow.tenant.name
        if self._heads.get(name) is flow:
            del self._heads[name]
            self._tenants.remove(flow)
            self._offer(name)
        elif name in self._lanes:
            self._lanes[name].remove(flow)

    def next(self) -> Flow | None:
        """Take out the flow whose payload goes next."""
        if self._last is not None:
            last, self._last = self._last, None
            self._offer(last)
        flow = self._tenants.next()
        if flow is not None:
            self._last = flow.tenant.name
            del self._heads[self._last]
        return flow

    def hold(self, flow: Flow) -> None:
        """Put the flow of the last turn back, because it may not send. Its tenant gets no turn before `offer`."""
        self._last = None
        self._heads[flow.tenant.name] = flow

    def offer(self, tenant_name: str) -> None:
        """Give turns again to a tenant that was held."""
        if (head := self._heads.get(tenant_name)) is not None:
            self._tenants.add(head, head.tenant.weight)

    def _offer(self, name: str) -> None:
        if (lane := self._lanes.get(name)) is None:
            return
        if (head := lane.next()) is None:
            del self._lanes[name]
        else:
            self._heads[name] = head
            self._tenants.add(head, head.tenant.weight)
