"""The link on a running server: a thin shell around LinkSchedule, with the clock and the waiting.

Every delivery holds a Place. Its payloads go when `turn` says so; what is let go but not yet taken by the transport is
bounded, so a client that stops reading stops using the link.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

from descriptors.messages import SchedulerStatus
from descriptors.notices import Mode
from descriptors.storage_api import Grant
from storage_server.gather.plan import DeliveryPlan
from storage_server.scheduler.admission import refuse_backlog
from storage_server.scheduler.demand import Demand
from storage_server.scheduler.flow import Flow
from storage_server.scheduler.link_schedule import LinkSchedule
from storage_server.scheduler.settings import SchedulerSettings

_log = logging.getLogger(__name__)
WAKE_S_MIN = 0.001
"""Timers are no finer; what comes late is made up for."""


class Place:
    """One delivery on the link. Payloads are counted from 0; `near`, `turn` and `took` are called for each, in order.
    Without a flow the link is not limited.
    """

    def __init__(self, link: Link, flow: Flow | None) -> None:
        self._link = link
        self.flow = flow
        self._let_go_count = 0
        self._changed = asyncio.Event()
        self._holds_early = False

    async def admitted(self) -> Grant:
        """Wait for the epoch that gives the delivery its rate."""
        if self.flow is None or self.flow.is_chunkwise:
            return Grant()
        await self._until(lambda: self.flow is None or self.flow.epoch > 0)
        return Grant() if self.flow is None else Grant(int(self.flow.rate_bytes_per_s), self.flow.epoch)

    async def near(self, index: int) -> None:
        """Wait until payload `index` may be gathered into memory that others could use: one ahead of its turn for
        deliveries that are being served, and for as many others as the link allows.
        """
        if self.flow is None or self._let_go_count >= max(index, 1):
            return
        if index == 0 and self._link.take_early():
            self._holds_early = True
            return
        await self._until(lambda: self.flow is None or self._let_go_count >= max(index, 1))

    async def turn(self, index: int) -> None:
        """Wait until payload `index` may go."""
        if self.flow is not None and self._let_go_count <= index:
            await self._until(lambda: self.flow is None or self._let_go_count > index)
        self.give_early()

    def took(self) -> None:
        """The transport has taken a payload."""
        if self.flow is not None:
            self._link.took(self.flow)

    def let_go(self) -> None:
        """One more payload may go."""
        self._let_go_count += 1
        self._changed.set()

    def move_to(self, flow: Flow) -> None:
        """The flow goes on as another one."""
        self.flow = flow
        self._changed.set()

    def free(self) -> None:
        """The link is not limited any more."""
        self.flow = None
        self._changed.set()

    def look(self) -> None:
        """The flow may have been admitted."""
        self._changed.set()

    def give_early(self) -> None:
        """Memory that was gathered into ahead of the first turn is in its turn now, or free."""
        if self._holds_early:
            self._holds_early = False
            self._link.give_early()

    async def _until(self, is_so: Callable[[], bool]) -> None:
        while not is_so():
            self._changed.clear()
            await self._changed.wait()


class Link:
    """The link of one storage server, on one event loop. `early_max` deliveries may gather before their first turn."""

    def __init__(self, settings: SchedulerSettings, early_max: int) -> None:
        self.settings = settings
        self._early_left = early_max
        self._schedule = _schedule(settings)
        self._places: dict[Flow, Place] = {}
        self._numbers = 0
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at_s = math.inf

    @asynccontextmanager
    async def place(self, access_key: str, plan: DeliveryPlan, compute_s: float | None) -> AsyncIterator[Place]:
        """Hold a place for a delivery, whose layers are computed in `compute_s` each.

        Raises ServerError(SlowDown) when too much waits already.
        """
        if self._schedule is None:
            yield Place(self, None)
            return
        now = time.monotonic()
        demand = Demand(plan.group_bytes, plan.group_count, compute_s)
        refusal = refuse_backlog(
            self._queued_bytes(),
            demand.payload_bytes,
            self.settings.queued_bytes_max,
            self.settings.link_bytes_per_s or 1.0,
        )
        if refusal is not None:
            raise refusal
        self._numbers += 1
        flow = Flow(
            self._numbers,
            self.settings.tenant(access_key),
            demand,
            plan.group_sizes,
            now,
            is_chunkwise=plan.mode is Mode.CHUNK_MAJOR,
        )
        place = Place(self, flow)
        self._places[flow] = place
        try:
            self._schedule.join(flow, now)
            self._pump()
            yield place
        finally:
            place.give_early()
            if (flow_now := place.flow) is not None and self._schedule is not None:
                del self._places[flow_now]
                self._schedule.leave(flow_now, time.monotonic())
                self._pump()

    def took(self, flow: Flow) -> None:
        """The transport has taken a payload of the flow."""
        if self._schedule is not None and flow in self._places:
            self._schedule.took(flow, time.monotonic())
            self._pump()

    def take_early(self) -> bool:
        """Whether one more delivery may gather before its first turn."""
        if not self._early_left:
            return False
        self._early_left -= 1
        return True

    def give_early(self) -> None:
        """A delivery that gathered early has its turn, or is gone."""
        self._early_left += 1

    def reconfigure(self, settings: SchedulerSettings) -> None:
        """Go by other settings from now on: deliveries that are under way stay, at their new rates; those that were not
        limited when they began never are.
        """
        now = time.monotonic()
        old, self.settings = self.settings, settings
        if self._schedule is not None and settings.link_bytes_per_s is not None and _same_rules(old, settings):
            self._schedule.set_budget(settings.link_bytes_per_s, now)
        else:
            self._replace_schedule(now)
        self._pump()

    def offered_rate_bytes_per_s(self, access_key: str) -> float:
        """What a request of the access key that came now could count on, by weight; 0.0 is not limited."""
        if self._schedule is None or self.settings.link_bytes_per_s is None:
            return 0.0
        tenant = self.settings.tenant(access_key)
        tenants = {flow.tenant.name: flow.tenant.weight for flow in self._places}
        own = sum(1 for flow in self._places if flow.tenant.name == access_key)
        tenants[access_key] = tenant.weight
        share = self.settings.link_bytes_per_s * tenant.weight / sum(tenants.values())
        if tenant.rate_max_bytes_per_s is not None:
            share = min(share, tenant.rate_max_bytes_per_s)
        return share / (own + 1)

    def status(self) -> SchedulerStatus:
        """What the link is doing."""
        schedule = self._schedule
        return SchedulerStatus(
            policy="slack" if self.settings.pool.policy is None else self.settings.pool.policy.value,
            rates="work-conserving" if self.settings.pool.is_continuous else "held",
            link_bytes_per_s=self.settings.link_bytes_per_s,
            margin_bytes_per_s=self.settings.pool.margin_bytes_per_s,
            epoch=0 if schedule is None else schedule.pool.epoch,
            layerwise_active=0 if schedule is None else schedule.pool.active_count,
            layerwise_waiting=0 if schedule is None else schedule.pool.waiting_count,
            chunkwise_active=0 if schedule is None else schedule.chunkwise_active_count,
            chunkwise_waiting=0 if schedule is None else schedule.chunkwise_queued_count,
            queued_bytes=self._queued_bytes(),
        )

    def close(self) -> None:
        """No timer is left."""
        if self._timer is not None:
            self._timer.cancel()

    def _queued_bytes(self) -> int:
        return sum(flow.left_bytes for flow in self._places)

    def _replace_schedule(self, now: float) -> None:
        self._schedule = _schedule(self.settings)
        places, self._places = self._places, {}
        for flow, place in places.items():
            if self._schedule is None:
                place.free()
                continue
            again = flow.again(self.settings.tenant(flow.tenant.name))
            place.move_to(again)
            self._places[again] = place
            if not again.is_over:
                self._schedule.join(again, now)

    def _pump(self) -> None:
        """Let go what is due, and set the timer for what will be."""
        if self._schedule is None:
            return
        try:
            epoch = self._schedule.pool.epoch
            for flow in self._schedule.due(time.monotonic()):
                self._places[flow].let_go()
            if self._schedule.pool.epoch != epoch:
                for place in self._places.values():
                    place.look()
            self._set_timer(self._schedule.wake_at())
        except Exception:
            self._give_up_pacing()

    def _give_up_pacing(self) -> None:
        """A fault of the scheduler must not stop deliveries: what is under way goes on unpaced."""
        _log.exception("the scheduler failed; %d deliveries go on unpaced", len(self._places))
        places, self._places = self._places, {}
        for place in places.values():
            place.free()
        self._schedule = _schedule(self.settings)

    def _set_timer(self, at_s: float) -> None:
        if self._timer is not None:
            if at_s == self._timer_at_s:
                return
            self._timer.cancel()
            self._timer = None
        self._timer_at_s = at_s
        if at_s < math.inf:
            delay_s = max(WAKE_S_MIN, at_s - time.monotonic())
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._woken)

    def _woken(self) -> None:
        self._timer = None
        self._pump()


def _schedule(settings: SchedulerSettings) -> LinkSchedule | None:
    return None if settings.link_bytes_per_s is None else LinkSchedule(settings, settings.link_bytes_per_s)


def _same_rules(old: SchedulerSettings, new: SchedulerSettings) -> bool:
    return replace(old, link_bytes_per_s=new.link_bytes_per_s) == new
