"""The pool of layerwise requests that share a link: the requests that are admitted, their epoch, and their dispatch.
Pure.

An epoch admits a batch of requests. With held rates, an epoch ends when all its requests have their bytes or after
`epoch_s_max`; rates are stable within it, a request that ends sooner frees its rate for the next epoch, and requests
that come meanwhile wait. With work-conserving rates, every arrival and every end begins an epoch; among many requests
one epoch serves several arrivals. A link without requests waits `gather_s` for further requests before it begins an
epoch.

Example: held rates, `gather_s` = 0.005, `epoch_s_max` = 1. Request A comes at 0 s and epoch 1 begins at 0.005 s.
Request B comes at 0.3 s. Epoch 2 begins when A has its bytes, or at 1.005 s.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from storage_server.delivery.scheduler.flow import Flow
from storage_server.delivery.scheduler.held_rates import HeldRates
from storage_server.delivery.scheduler.policies import MARGIN_BYTES_PER_S, Policy
from storage_server.delivery.scheduler.slack import SlackDispatch
from storage_server.delivery.scheduler.steady_clock import SteadyClock
from storage_server.delivery.scheduler.tenant_meter import TenantMeter

EPOCH_S_MAX = 1.0
EPOCH_S_PER_FLOW = 0.0002
"""The least time between work-conserving epochs, for each request. It bounds the cost of computing rates anew."""
GATHER_S = 0.005


@dataclass(frozen=True, slots=True)
class PoolSettings:
    """The pool's policy and its epochs. `policy` None is slack-aware dispatch, which is always work-conserving."""

    policy: Policy | None = None
    is_work_conserving: bool = False
    margin_bytes_per_s: float = MARGIN_BYTES_PER_S
    epoch_s_max: float = EPOCH_S_MAX
    gather_s: float | None = None

    @property
    def wait_s(self) -> float:
        """How long the first request of a link waits for others. If `gather_s` is unset: only where rates are held."""
        return self.gather_s if self.gather_s is not None else 0.0 if self.is_continuous else GATHER_S

    @property
    def is_continuous(self) -> bool:
        """Whether every arrival and every end of a request begins an epoch."""
        return self.policy is None or self.is_work_conserving


class PayloadDispatch(Protocol):
    """Decides when each payload goes. `HeldRates` and `SlackDispatch` implement it."""

    def __len__(self) -> int: ...

    @property
    def wants_epoch(self) -> bool: ...

    @property
    def used_bytes_per_s(self) -> float: ...

    def set_budget(self, budget_bytes_per_s: float, now: float) -> None: ...

    def set_link_rate(self, rate_bytes_per_s: float, now: float) -> None: ...

    def share(self, flows: Sequence[Flow], now: float) -> None: ...

    def resume(self, flow: Flow, now: float) -> None: ...

    def remove(self, flow: Flow, now: float) -> None: ...

    def due(self, now: float) -> list[Flow]: ...

    def wake_at(self) -> float: ...


class Pool:
    """The layerwise requests of one link. `meter` is charged with the bytes of tenants that have a cap."""

    def __init__(self, settings: PoolSettings, budget_bytes_per_s: float, meter: TenantMeter | None = None) -> None:
        meter = TenantMeter() if meter is None else meter
        self._settings = settings
        self._is_continuous = settings.is_continuous
        self._dispatch: PayloadDispatch = (
            SlackDispatch(budget_bytes_per_s, settings.margin_bytes_per_s, meter)
            if settings.policy is None
            else HeldRates(
                settings.policy,
                settings.margin_bytes_per_s,
                budget_bytes_per_s,
                meter,
                is_work_conserving=settings.is_work_conserving,
            )
        )
        self._clock = SteadyClock()
        self._waiting: list[Flow] = []
        self._active: dict[Flow, None] = {}
        self._gathers_since_s: float | None = None
        self._tenant_counts: Counter[str] = Counter()
        """How many requests each tenant had when the epoch began."""
        self._epoch_began_s = -math.inf
        self._is_stale = False
        self.epoch = 0

    def __len__(self) -> int:
        """How many requests it knows of."""
        return max(len(self._waiting) + len(self._active), len(self._dispatch))

    @property
    def active_count(self) -> int:
        """How many requests have a rate and bytes left."""
        return len(self._active)

    @property
    def used_bytes_per_s(self) -> float:
        """The part of the link that is in use; the rest is idle."""
        return self._dispatch.used_bytes_per_s

    @property
    def waiting_count(self) -> int:
        """How many requests wait for an epoch."""
        return len(self._waiting)

    def flows(self) -> list[Flow]:
        """Every request."""
        return [*self._active, *self._waiting]

    def join(self, flow: Flow) -> None:
        """Add a request; `due` admits it."""
        self._waiting.append(flow)

    def leave(self, flow: Flow, now: float) -> None:
        """Remove a request that is over or given up. A second call does nothing."""
        if flow in self._active:
            self._end(flow, self._steady(now))
            self._is_stale = True
        elif flow in self._waiting:
            self._waiting.remove(flow)

    def resume(self, flow: Flow, now: float) -> None:
        """Note that the transport took a payload."""
        if flow in self._active:
            self._dispatch.resume(flow, self._steady(now))

    def set_budget(self, budget_bytes_per_s: float, now: float) -> None:
        """Set the link's budget and begin an epoch."""
        now = self._steady(now)
        self._dispatch.set_budget(budget_bytes_per_s, now)
        if self._active:
            self._begin(now)

    def set_link_rate(self, rate_bytes_per_s: float, now: float) -> None:
        """Set the rate that the link can carry for a while; it is no less than the budget. Plans stay as they are."""
        self._dispatch.set_link_rate(rate_bytes_per_s, self._steady(now))

    def due(self, now: float) -> list[Flow]:
        """The flows whose next payloads go now, in order; a flow appears once for each payload. Begins an epoch where
        it is time for one.
        """
        now = self._steady(now)
        if self._waiting and not self._active and self._gathers_since_s is None:
            self._gathers_since_s = now
        if now >= self._may_begin_s():
            self._begin(now)
        going = self._dispatch.due(now)
        ended = [flow for flow in going if flow.is_over and flow in self._active]
        for flow in dict.fromkeys(ended):
            self._end(flow, now)
            # A slack-aware plan knows when a request ends, but not that its tenant's other requests then weigh more.
            if self._settings.policy is not None or self._tenant_counts[flow.tenant.name] > 1:
                self._is_stale = True
        if ended and now >= self._may_begin_s():
            self._begin(now)
        return going

    def wake_at(self) -> float:
        """The time at which to call `due` again; infinity while nothing is under way."""
        return self._clock.callers_time(self._wake_s())

    def _wake_s(self) -> float:
        return min(self._dispatch.wake_at(), self._may_begin_s())

    def _steady(self, now: float) -> float:
        return self._clock.steady(now, self._wake_s())

    def _may_begin_s(self) -> float:
        """The time at which the next epoch may begin; infinity where an epoch would change nothing."""
        if not self._active:
            if not self._waiting:
                return math.inf
            since_s = self._gathers_since_s
            return -math.inf if since_s is None else since_s + self._settings.wait_s
        if not self._waiting and not self._is_stale and not self._dispatch.wants_epoch:
            return math.inf
        if self._is_continuous:
            return self._epoch_began_s + EPOCH_S_PER_FLOW * len(self._active)
        return self._epoch_began_s + self._settings.epoch_s_max

    def _end(self, flow: Flow, now: float) -> None:
        del self._active[flow]
        self._dispatch.remove(flow, now)

    def _begin(self, now: float) -> None:
        self.epoch += 1
        self._epoch_began_s = now
        self._is_stale = False
        self._gathers_since_s = None
        for flow in self._waiting:
            flow.epoch = self.epoch
            self._active[flow] = None
        self._waiting = []
        self._tenant_counts = Counter(flow.tenant.name for flow in self._active)
        for flow in self._active:
            flow.share_tenant(self._tenant_counts[flow.tenant.name])
        self._dispatch.share(list(self._active), now)
