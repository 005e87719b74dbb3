"""One link and everything that is delivered over it: layer-major requests in their pool, chunk-major ones in slots.
Pure: `now` is an argument.

Chunk-major requests go by weighted deficit round robin at their fraction of the link while the pool has requests, and
at all of it while it has none; the pool plans with the rest. So neither can starve the other.
"""

from __future__ import annotations

from collections import deque

from storage_server.scheduler.flow import Flow
from storage_server.scheduler.pool import Pool
from storage_server.scheduler.round_robin import RoundRobin
from storage_server.scheduler.serial import SerialLink
from storage_server.scheduler.settings import SchedulerSettings


class LinkSchedule:
    """The flows of one link of `budget_bytes_per_s`."""

    def __init__(self, settings: SchedulerSettings, budget_bytes_per_s: float) -> None:
        self._settings = settings
        self._budget = budget_bytes_per_s
        self.pool = Pool(settings.pool, self._pool_budget)
        self._ready = RoundRobin()
        self._chunkwise_link = SerialLink(budget_bytes_per_s, self._next_chunkwise, self._chunkwise_went)
        self._chunkwise: list[Flow] = []
        self._queued: deque[Flow] = deque()

    @property
    def _pool_budget(self) -> float:
        return self._budget * (1 - self._settings.chunkwise_fraction)

    @property
    def chunkwise_active_count(self) -> int:
        """Chunk-major requests in a slot."""
        return len(self._chunkwise)

    @property
    def chunkwise_queued_count(self) -> int:
        """Chunk-major requests that wait for a slot."""
        return len(self._queued)

    def join(self, flow: Flow, now: float) -> None:
        """A request comes; `due` admits it."""
        if flow.is_chunkwise:
            flow.share_tenant(1)
            self._queued.append(flow)
            self._fill_slots()
        else:
            self.pool.join(flow)
        self._set_rates(now)

    def leave(self, flow: Flow, now: float) -> None:
        """A request is over or given up; leaving twice does nothing."""
        if flow in self._chunkwise:
            self._chunkwise.remove(flow)
            self._ready.remove(flow)
            self._chunkwise_link.drop(flow)
            self._fill_slots()
        elif flow in self._queued:
            self._queued.remove(flow)
        else:
            self.pool.leave(flow, now)
        self._set_rates(now)

    def took(self, flow: Flow, now: float) -> None:
        """The transport took a payload of the flow."""
        flow.ahead_count -= 1
        if flow in self._chunkwise:
            self._make_ready(flow)
        else:
            self.pool.resume(flow, now)

    def set_budget(self, budget_bytes_per_s: float, now: float) -> None:
        """The link changes."""
        self._budget = budget_bytes_per_s
        self.pool.set_budget(self._pool_budget, now)
        self._set_rates(now)

    def due(self, now: float) -> list[Flow]:
        """Whose payloads go now; a flow appears once a payload."""
        going = self.pool.due(now) + self._chunkwise_link.due(now)
        for flow in going:
            if flow.is_over and flow in self._chunkwise:
                self._chunkwise.remove(flow)
                self._fill_slots()
        if going:
            self._set_rates(now)
            going += self._chunkwise_link.due(now)
        return going

    def wake_at(self) -> float:
        """When to ask again; infinity while nothing is under way."""
        return min(self.pool.wake_at(), self._chunkwise_link.wake_at())

    def flows(self) -> list[Flow]:
        """All of the pool's, then all others."""
        return [*self.pool.flows(), *self._chunkwise, *self._queued]

    def _fill_slots(self) -> None:
        while self._queued and len(self._chunkwise) < self._settings.chunkwise_slots:
            flow = self._queued.popleft()
            self._chunkwise.append(flow)
            self._make_ready(flow)

    def _make_ready(self, flow: Flow) -> None:
        if not flow.is_blocked and not self._chunkwise_link.carries(flow):
            self._ready.add(flow, flow.demand.weight)

    def _next_chunkwise(self, now: float) -> Flow | None:
        return self._ready.next()

    def _chunkwise_went(self, flow: Flow, now: float) -> None:
        self._make_ready(flow)

    def _set_rates(self, now: float) -> None:
        """Each side may use what the other leaves idle."""
        has_layerwise = self.pool.active_count > 0
        self._chunkwise_link.set_rate(self._budget * (self._settings.chunkwise_fraction if has_layerwise else 1), now)
        self.pool.set_link_rate(self._pool_budget if self._chunkwise else self._budget, now)
