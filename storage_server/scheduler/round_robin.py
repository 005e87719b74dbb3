"""Weighted deficit round robin: who sends next, so that bytes over time are in proportion to weights. Pure.

In each round a flow's deficit grows in proportion to its weight, and a flow whose deficit covers its next payload sends
it (Shreedhar and Varghese, 1995). Rounds here are as small as can be: who goes next is whose deficit is enough in the
earliest round, and rounds in which nobody sends are skipped. Nothing is saved up by a flow that has nothing to send.
"""

from __future__ import annotations

import heapq

from storage_server.scheduler.flow import Flow


class RoundRobin:
    """The flows that have something to send now."""

    def __init__(self) -> None:
        self._round = 0.0
        self._enough: dict[Flow, float] = {}
        """The round in which each flow's deficit will cover its next payload."""
        self._queue: list[tuple[float, int, Flow]] = []

    def __len__(self) -> int:
        return len(self._enough)

    def add(self, flow: Flow, weight: float) -> None:
        """It has a payload to send; a flow that is here already stays where it is."""
        if flow not in self._enough:
            enough = self._enough[flow] = self._round + flow.payload_bytes / weight
            heapq.heappush(self._queue, (enough, flow.number, flow))

    def remove(self, flow: Flow) -> None:
        """It has nothing to send, or is gone."""
        if self._enough.pop(flow, None) is not None and len(self._queue) > 2 * len(self._enough) + 8:
            self._queue = [entry for entry in self._queue if self._enough.get(entry[2]) == entry[0]]
            heapq.heapify(self._queue)

    def next(self) -> Flow | None:
        """Whose payload goes. Who has another is added again, at once to lose nothing."""
        while self._queue:
            enough, _, flow = heapq.heappop(self._queue)
            if self._enough.get(flow) == enough:
                del self._enough[flow]
                self._round = enough
                return flow
        self._round = 0.0
        return None


class TenantRoundRobin:
    """Round robin among tenants by weight, and evenly among the flows of each that have something to send now."""

    def __init__(self) -> None:
        self._tenants = RoundRobin()
        self._lanes: dict[str, RoundRobin] = {}
        self._heads: dict[str, Flow] = {}
        """Of each lane, who goes when its tenant's turn comes."""
        self._last: str | None = None
        """Whose turn it was: its flow may come back before its tenant waits for the next turn."""

    def __len__(self) -> int:
        """Flows it still knows of."""
        return sum(map(len, self._lanes.values())) + len(self._heads)

    @property
    def has_turns(self) -> bool:
        """Whether `next` finds somebody."""
        return len(self._tenants) > 0 or self._last in self._lanes

    def add(self, flow: Flow) -> None:
        """It has a payload to send; a flow that is here already stays where it is."""
        name = flow.tenant.name
        if self._heads.get(name) is not flow:
            self._lanes.setdefault(name, RoundRobin()).add(flow, 1.0)
            if name not in self._heads and name != self._last:
                self._offer(name)

    def remove(self, flow: Flow) -> None:
        """It has nothing to send, or is gone."""
        name = flow.tenant.name
        if self._heads.get(name) is flow:
            del self._heads[name]
            self._tenants.remove(flow)
            self._offer(name)
        elif name in self._lanes:
            self._lanes[name].remove(flow)

    def next(self) -> Flow | None:
        """Whose payload goes."""
        if self._last is not None:
            last, self._last = self._last, None
            self._offer(last)
        flow = self._tenants.next()
        if flow is not None:
            self._last = flow.tenant.name
            del self._heads[self._last]
        return flow

    def hold(self, flow: Flow) -> None:
        """Whose turn it was may not send: its tenant gets no turn before `offer`."""
        self._last = None
        self._heads[flow.tenant.name] = flow

    def offer(self, tenant_name: str) -> None:
        """A tenant that was held may send."""
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
