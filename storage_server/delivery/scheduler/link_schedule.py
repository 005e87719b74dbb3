"""The schedule of one link: layer-major requests in the pool, chunk-major requests in channels. Pure: `now` is an
argument.

The chunk-major side has a fraction of the link while the pool sends, and all of it while the pool does not. The pool
plans with the rest of the link. So neither side can starve the other, and each uses what the other leaves idle. A side
that pauses for less than `IDLE_S`, for example because a transport is behind, does not count as idle. Otherwise the
other side's rate would go up and down with every payload.

Example: a budget of 100 bytes/s and `chunkwise_fraction` 0.1. The pool plans with 90. When its requests use 60, the
chunk-major side has 40; when they use 90, it has 10; when there are none, it has 100.
"""

from __future__ import annotations

import math

from storage_server.delivery.scheduler.chunkwise import IDLE_S, Chunkwise
from storage_server.delivery.scheduler.flow import Flow
from storage_server.delivery.scheduler.pool import Pool
from storage_server.delivery.scheduler.settings import SchedulerSettings
from storage_server.delivery.scheduler.tenant_meter import TenantMeter


class LinkSchedule:
    """The flows of one link of `budget_bytes_per_s`. `meter` knows how much of their caps tenants have used."""

    def __init__(
        self, settings: SchedulerSettings, budget_bytes_per_s: float, meter: TenantMeter | None = None
    ) -> None:
        self._settings = settings
        self._budget = budget_bytes_per_s
        self.meter = TenantMeter() if meter is None else meter
        self.pool = Pool(settings.pool, self._pool_budget, self.meter)
        self._chunkwise = Chunkwise(settings.chunkwise_deliveries_max, budget_bytes_per_s, self.meter)
        self._behind_s = -math.inf
        """The last time at which a payload was dispatched and the transport of its layer-major request was behind."""
        self._chunkwise_sent_s = -math.inf
        self._look_again_s = math.inf
        """The time at which a side that pauses will count as idle."""

    @property
    def _pool_budget(self) -> float:
        return self._budget * (1 - self._settings.chunkwise_fraction)

    @property
    def chunkwise_active_count(self) -> int:
        """How many chunk-major requests have a channel."""
        return self._chunkwise.active_count

    @property
    def chunkwise_queued_count(self) -> int:
        """How many chunk-major requests wait for a channel, or for their clients."""
        return self._chunkwise.queued_count

    def join(self, flow: Flow, now: float) -> None:
        """Add a request; `due` admits it."""
        if flow.is_chunkwise:
            self._chunkwise.join(flow, now)
        else:
            self.pool.join(flow)

    def leave(self, flow: Flow, now: float) -> None:
        """Remove a request that is over or given up. A second call does nothing."""
        if flow.is_chunkwise:
            self._chunkwise.leave(flow, now)
        else:
            self.pool.leave(flow, now)

    def note_sent(self, flow: Flow, now: float) -> None:
        """Note that the transport took a payload of the flow."""
        flow.ahead_count -= 1
        if flow.is_chunkwise:
            self._chunkwise.note_sent(flow, now)
        else:
            self.pool.resume(flow, now)

    def set_budget(self, budget_bytes_per_s: float, now: float) -> None:
        """Set the link's budget from now on."""
        self._budget = budget_bytes_per_s
        self.pool.set_budget(self._pool_budget, now)
        self._set_rates(now)

    def due(self, now: float) -> list[Flow]:
        """The flows whose next payloads go now; a flow appears once for each payload."""
        going = self.pool.due(now)
        if any(flow.is_blocked and not flow.is_over for flow in going):
            self._behind_s = now
        going += self._chunkwise.due(now)
        self._set_rates(now)
        return going

    def wake_at(self) -> float:
        """The time at which to call `due` again; infinity while nothing is under way."""
        return min(self.pool.wake_at(), self._chunkwise.wake_at(), self._look_again_s)

    def flows(self) -> list[Flow]:
        """Every flow: first those of the pool, then the chunk-major ones."""
        return [*self.pool.flows(), *self._chunkwise.flows()]

    def _set_rates(self, now: float) -> None:
        """Let each side use what the other leaves idle."""
        self._look_again_s = math.inf
        least = self._budget * self._settings.chunkwise_fraction
        self._chunkwise.set_rate(max(least, self._budget - self._used_by_pool(now)), now)
        self.pool.set_link_rate(self._pool_budget if self._is_chunkwise_using(now) else self._budget, now)

    def _used_by_pool(self, now: float) -> float:
        used = min(self._pool_budget, self.pool.used_bytes_per_s)
        if used or not self.pool.active_count or not self._pauses(self._behind_s, now):
            return used
        return self._pool_budget

    def _is_chunkwise_using(self, now: float) -> bool:
        if self._chunkwise.is_sending:
            self._chunkwise_sent_s = now
            return True
        is_empty = not self._chunkwise.active_count and not self._chunkwise.queued_count
        return not is_empty and self.pool.active_count > 0 and self._pauses(self._chunkwise_sent_s, now)

    def _pauses(self, since_s: float, now: float) -> bool:
        if now >= since_s + IDLE_S:
            return False
        self._look_again_s = min(self._look_again_s, since_s + IDLE_S)
        return True
