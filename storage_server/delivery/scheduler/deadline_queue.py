"""The queue of slack-aware dispatch: the flow whose layer is due first goes first, among those that may send. Flows of
a tenant that has used its cap wait together until it may send again. Pure: `now` is an argument.

Example: flows A, B, C are due at 3 s, 1 s and 0 s, and C's tenant has used its cap until 0.95 s. At 0 s the queue gives
B, then A, then nothing. At 1 s it gives C.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict

from storage_server.delivery.scheduler.flow import Flow, LinkTenant
from storage_server.delivery.scheduler.tenant_meter import TenantMeter

Entry = tuple[float, int, Flow]


class DeadlineQueue:
    """Flows by deadline. The meter says whether a tenant with a cap may send."""

    def __init__(self, meter: TenantMeter) -> None:
        self._meter = meter
        self._dues: dict[Flow, float] = {}
        self._lanes: dict[LinkTenant | None, list[Entry]] = defaultdict(list)
        """One heap for each capped tenant, and one, under None, for all tenants without a cap."""
        self._heads: list[tuple[float, int, LinkTenant | None]] = []
        self._held: list[tuple[float, int, LinkTenant]] = []
        """Capped tenants, and the time before which each may not send."""

    def __len__(self) -> int:
        return len(self._dues)

    def push(self, flow: Flow, due_s: float) -> None:
        """Add a flow whose next payload is due at `due_s`. For a flow in the queue the new time replaces the old."""
        if self._dues.get(flow) == due_s:
            return
        self._dues[flow] = due_s
        lane = None if flow.tenant.rate_max_bytes_per_s is None else flow.tenant
        heapq.heappush(self._lanes[lane], (due_s, flow.number, flow))
        if self._lanes[lane][0][2] is flow:
            heapq.heappush(self._heads, (due_s, flow.number, lane))

    def discard(self, flow: Flow) -> None:
        """Take a flow out: it has no payload, or is gone."""
        self._dues.pop(flow, None)

    def clear(self, now: float) -> None:
        """Empty the queue."""
        self._dues.clear()
        self._lanes.clear()
        self._heads.clear()
        self._held.clear()
        self._meter.forget(now)

    def pop(self, now: float) -> Flow | None:
        """Take out the flow that is due first among those that may send now; None where there is none."""
        while self._held and self._held[0][0] <= now:
            self._offer(heapq.heappop(self._held)[2])
        while self._heads:
            due_s, number, tenant = heapq.heappop(self._heads)
            lane = self._lanes.get(tenant)
            if not lane or lane[0][:2] != (due_s, number):
                continue
            if self._dues.get(lane[0][2]) != due_s:
                heapq.heappop(lane)
                self._offer(tenant)
            elif tenant is not None and self._meter.free_s(tenant) > now:
                heapq.heappush(self._held, (self._meter.free_s(tenant), number, tenant))
            else:
                flow = heapq.heappop(lane)[2]
                del self._dues[flow]
                self._offer(tenant)
                return flow
        return None

    def charge(self, tenant: LinkTenant, sent_bytes: int, now: float) -> None:
        """Count the bytes that the tenant has sent against its cap."""
        self._meter.charge(tenant, sent_bytes, now)

    def free_s(self) -> float:
        """The time from which `pop` may find a flow; infinity where no flow waits."""
        if self._heads:
            return -math.inf
        return self._held[0][0] if self._held else math.inf

    def _offer(self, tenant: LinkTenant | None) -> None:
        if lane := self._lanes.get(tenant):
            heapq.heappush(self._heads, (lane[0][0], lane[0][1], tenant))
        else:
            self._lanes.pop(tenant, None)
