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
from storage_server.scheduler.admission import RETRY_AFTER_S_MAX, refuse_backlog
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
        self._grant: Grant | None = None
        self._let_go_count = 0
        self._taken_count = 0
        self._changed = asyncio.Event()
        self._early: set[int] = set()
        """Payloads that were gathered by leave of the link."""

    async def admitted(self) -> Grant:
        """Wait for the epoch that gives the delivery its rate."""
        if self.flow is not None and self.flow.is_chunkwise:
            return Grant()
        await self._until(lambda: self.flow is None or self._grant is not None)
        return self._grant or Grant()

    async def near(self, index: int, *, is_staged: bool) -> None:
        """Wait until payload `index` may be gathered: when its turn has come and nothing before it is in hand, or, by
        leave of the link where memory is used that others need, up to one payload before its turn.
        """
        await self._until(lambda: self.flow is None or self._may_gather(index, is_staged=is_staged))

    async def turn(self, index: int) -> None:
        """Wait until payload `index` may go."""
        await self._until(lambda: self.flow is None or self._let_go_count > index)

    def took(self) -> None:
        """The transport has taken a payload."""
        self._give_early(self._taken_count)
        self._taken_count += 1
        self._changed.set()
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
        """The flow may have been admitted, or may gather."""
        if self._grant is None and self.flow is not None and self.flow.epoch:
            self._grant = Grant(int(self.flow.rate_bytes_per_s), self.flow.epoch)
        self._changed.set()

    def end(self) -> None:
        """Nothing is in hand any more."""
        for index in list(self._early):
            self._give_early(index)

    def _may_gather(self, index: int, *, is_staged: bool) -> bool:
        if index > self._let_go_count:
            return False
        if not is_staged or (index < self._let_go_count and index == self._taken_count):
            return True
        if self._link.take_early(self):
            self._early.add(index)
            return True
        return False

    def _give_early(self, index: int) -> None:
        if index in self._early:
            self._early.remove(index)
            self._link.give_early()

    async def _until(self, is_so: Callable[[], bool]) -> None:
        while not is_so():
            self._changed.clear()
            await self._changed.wait()


class Link:
    """The link of one storage server, on one event loop. `early_max` payloads may be gathered before their turn."""

    def __init__(self, settings: SchedulerSettings, early_max: int) -> None:
        self.settings = settings
        self._early_left = early_max
        self._wants_early: dict[Place, None] = {}
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
        self._refuse_backlog(access_key, demand.payload_bytes)
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
            self._change(lambda schedule: schedule.join(flow, now))
            yield place
        finally:
            self._wants_early.pop(place, None)
            place.end()
            if (flow_now := place.flow) is not None:
                self._places.pop(flow_now, None)
                self._change(lambda schedule: schedule.leave(flow_now, time.monotonic()))

    def took(self, flow: Flow) -> None:
        """The transport has taken a payload of the flow."""
        self._change(lambda schedule: schedule.took(flow, time.monotonic()))

    def take_early(self, place: Place) -> bool:
        """Whether one more payload may be gathered before its turn; if not, the place is told when to ask again."""
        if not self._early_left:
            self._wants_early[place] = None
            return False
        self._wants_early.pop(place, None)
        self._early_left -= 1
        return True

    def give_early(self) -> None:
        """A payload that was gathered early has gone, or is given up."""
        self._early_left += 1
        if self._wants_early:
            place = next(iter(self._wants_early))
            del self._wants_early[place]
            place.look()

    def reconfigure(self, settings: SchedulerSettings) -> None:
        """Go by other settings from now on: deliveries that are under way stay, at their new rates; those that were not
        limited when they began never are.
        """
        now = time.monotonic()
        old, self.settings = self.settings, settings
        if self._schedule is not None and settings.link_bytes_per_s is not None and _same_rules(old, settings):
            budget = settings.link_bytes_per_s
            self._change(lambda schedule: schedule.set_budget(budget, now))
        else:
            self._replace_schedule()
            self._change(lambda schedule: self._join_again(schedule, now))

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

    def drained_s(self) -> int:
        """When a good part of what waits will have gone, in whole seconds: for those who are told to come back."""
        link = self.settings.link_bytes_per_s
        return 1 if link is None else max(1, min(RETRY_AFTER_S_MAX, math.ceil(self._queued_bytes() / link / 2)))

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

    def _refuse_backlog(self, access_key: str, payload_bytes: int) -> None:
        """One access key may fill half of the backlog. Raises ServerError(SlowDown)."""
        link = self.settings.link_bytes_per_s or 1.0
        cap = self.settings.tenant(access_key).rate_max_bytes_per_s
        bytes_max = self.settings.queued_bytes_max
        own = sum(flow.left_bytes for flow in self._places if flow.tenant.name == access_key)
        refusal = refuse_backlog(self._queued_bytes(), payload_bytes, bytes_max, link) or refuse_backlog(
            own, payload_bytes, bytes_max // 2, min(link, cap or link), whose="of this access key"
        )
        if refusal is not None:
            raise refusal

    def _queued_bytes(self) -> int:
        return sum(flow.left_bytes for flow in self._places)

    def _replace_schedule(self) -> None:
        """Other rules: what was let go stays let go."""
        self._schedule = _schedule(self.settings, self._schedule)
        places, self._places = self._places, {}
        for flow, place in places.items():
            if self._schedule is None:
                place.free()
                continue
            again = flow.again(self.settings.tenant(flow.tenant.name))
            place.move_to(again)
            self._places[again] = place

    def _join_again(self, schedule: LinkSchedule, now: float) -> None:
        for flow in self._places:
            if not flow.is_over:
                schedule.join(flow, now)

    def _change(self, change: Callable[[LinkSchedule], None]) -> None:
        """Make a change, let go what is due then, and set the timer for what will be."""
        if self._schedule is None:
            return
        try:
            change(self._schedule)
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
        self._set_timer(math.inf)

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
        self._change(lambda schedule: None)


def _schedule(settings: SchedulerSettings, before: LinkSchedule | None = None) -> LinkSchedule | None:
    """A new one, which knows what tenants have used `before`."""
    if settings.link_bytes_per_s is None:
        return None
    return LinkSchedule(settings, settings.link_bytes_per_s, None if before is None else before.meter)


def _same_rules(old: SchedulerSettings, new: SchedulerSettings) -> bool:
    same = replace(
        old,
        link_bytes_per_s=new.link_bytes_per_s,
        queued_bytes_max=new.queued_bytes_max,
        profiles=new.profiles,
    )
    return same == new
