"""The link on a running server: a thin shell around LinkSchedule, which adds the clock and the waiting.

Every delivery holds a `LinkPlace`. The link lets the payloads of a place go, that is, be sent, one by one. Only a few
of them may be on their way to the transport at once, so that a client that stops reading stops using the link.
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
from storage_server.delivery.scheduler.admission import RETRY_AFTER_S_MAX, refuse_backlog
from storage_server.delivery.scheduler.demand import Demand
from storage_server.delivery.scheduler.flow import Flow
from storage_server.delivery.scheduler.link_schedule import LinkSchedule
from storage_server.delivery.scheduler.settings import SchedulerSettings
from storage_server.planning.plan import DeliveryPlan

_log = logging.getLogger(__name__)
WAKE_S_MIN = 0.001
"""No timer is set finer than this; a payload that therefore goes late is made up for."""


class LinkPlace:
    """One delivery on the link. The pipeline calls `wait_to_gather`, `wait_to_send`, `note_sent` for each payload, in
    order; payloads are counted from 0. Without a flow the link is not limited, and nothing waits.
    """

    def __init__(self, link: Link, flow: Flow | None) -> None:
        self._link = link
        self.flow = flow
        self._grant: Grant | None = None
        self._dispatched_count = 0
        self._taken_count = 0
        self._changed = asyncio.Event()
        self._early: set[int] = set()
        """Payloads that the link allowed to be gathered before their turn, and that have not been sent."""

    async def admitted(self) -> Grant:
        """Wait for the epoch that gives the delivery its rate."""
        if self.flow is not None and self.flow.is_chunkwise:
            return Grant()
        await self._until(lambda: self.flow is None or self._grant is not None)
        return self._grant or Grant()

    async def wait_to_gather(self, index: int, *, is_staged: bool) -> None:
        """Wait until payload `index` may be gathered.

        A delivery may hold one gathered payload. It may hold a second one only if the link allows it, because staging
        memory is shared; payloads that use no staging memory may always be gathered one payload ahead.
        """
        await self._until(lambda: self.flow is None or self._may_gather(index, is_staged=is_staged))

    async def wait_to_send(self, index: int) -> None:
        """Wait until payload `index` may be handed to the transport."""
        await self._until(lambda: self.flow is None or self._dispatched_count > index)

    def note_sent(self) -> None:
        """The transport has taken the next payload."""
        self._give_early(self._taken_count)
        self._taken_count += 1
        self._changed.set()
        if self.flow is not None:
            self._link.note_sent(self.flow)

    def dispatch(self) -> None:
        """Note that the link lets one more payload go."""
        self._dispatched_count += 1
        self._changed.set()

    def move_to(self, flow: Flow) -> None:
        """Continue under another flow, which a new schedule knows."""
        self.flow = flow
        self._changed.set()

    def free(self) -> None:
        """Lift the limit: from now on nothing waits."""
        self.flow = None
        self._changed.set()

    def check_again(self) -> None:
        """Wake the waiting tasks: the flow may have been admitted, or may gather ahead now."""
        if self._grant is None and self.flow is not None and self.flow.epoch:
            self._grant = Grant(int(self.flow.rate_bytes_per_s), self.flow.epoch)
        self._changed.set()

    def end(self) -> None:
        """End the place: it holds no gathered payload any more."""
        for index in list(self._early):
            self._give_early(index)

    def _may_gather(self, index: int, *, is_staged: bool) -> bool:
        if index > self._dispatched_count:
            return False
        if not is_staged or (index < self._dispatched_count and index == self._taken_count):
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
        self._wants_early: dict[LinkPlace, None] = {}
        self._schedule = _schedule(settings)
        self._places: dict[Flow, LinkPlace] = {}
        self._numbers = 0
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at_s = math.inf

    @property
    def delivery_count(self) -> int:
        """The deliveries that have a place on the link."""
        return len(self._places)

    @property
    def early_left(self) -> int:
        """How many more payloads may be gathered before their turn."""
        return self._early_left

    @asynccontextmanager
    async def place(self, access_key: str, plan: DeliveryPlan, compute_s: float | None) -> AsyncIterator[LinkPlace]:
        """Hold a place for a delivery. Its client computes each layer in `compute_s`; None when unknown.

        Raises ServerError(SlowDown) when too many bytes wait for the link already.
        """
        if self._schedule is None:
            yield LinkPlace(self, None)
            return
        now = time.monotonic()
        layer_bytes = -(-plan.delivery_bytes // plan.group_count)  # the mean: layers may differ in size
        demand = Demand(layer_bytes, plan.group_count, compute_s)
        self._refuse_backlog(access_key, plan.delivery_bytes)
        self._numbers += 1
        flow = Flow(
            self._numbers,
            self.settings.tenant(access_key),
            demand,
            plan.group_sizes,
            now,
            is_chunkwise=plan.mode is Mode.CHUNK_MAJOR,
        )
        place = LinkPlace(self, flow)
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

    def note_sent(self, flow: Flow) -> None:
        """The transport has taken a payload of the flow."""
        self._change(lambda schedule: schedule.note_sent(flow, time.monotonic()))

    def take_early(self, place: LinkPlace) -> bool:
        """Whether one more payload may be gathered before its turn. If not, the place is woken when it
        may ask again.
        """
        if not self._early_left:
            self._wants_early[place] = None
            return False
        self._wants_early.pop(place, None)
        self._early_left -= 1
        return True

    def give_early(self) -> None:
        """Give back one early payload: it has been sent, or is given up."""
        self._early_left += 1
        if self._wants_early:
            place = next(iter(self._wants_early))
            del self._wants_early[place]
            place.check_again()

    def reconfigure(self, settings: SchedulerSettings) -> None:
        """Use other settings from now on. Deliveries under way stay, at their new rates; deliveries that were not
        limited when they began stay unlimited.
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
        """The rate in bytes/s that a new request of the access key could expect, by weight; 0.0 means not limited."""
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
        """Whole seconds until a good part of the backlog will have been sent: the Retry-After of refused callers."""
        link = self.settings.link_bytes_per_s
        return 1 if link is None else max(1, min(RETRY_AFTER_S_MAX, math.ceil(self._queued_bytes() / link / 2)))

    def status(self) -> SchedulerStatus:
        """The link's rate, its deliveries and its backlog now."""
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
        """Cancel the timer."""
        if self._timer is not None:
            self._timer.cancel()

    def _refuse_backlog(self, access_key: str, delivery_bytes: int) -> None:
        """Raises ServerError(SlowDown) when too many bytes wait; one access key may fill half of the backlog."""
        link = self.settings.link_bytes_per_s or 1.0
        cap = self.settings.tenant(access_key).rate_max_bytes_per_s
        bytes_max = self.settings.queued_bytes_max
        own = sum(flow.left_bytes for flow in self._places if flow.tenant.name == access_key)
        refusal = refuse_backlog(self._queued_bytes(), delivery_bytes, bytes_max, link) or refuse_backlog(
            own, delivery_bytes, bytes_max // 2, min(link, cap or link), whose="of this access key"
        )
        if refusal is not None:
            raise refusal

    def _queued_bytes(self) -> int:
        return sum(flow.left_bytes for flow in self._places)

    def _replace_schedule(self) -> None:
        """Build a schedule from the new settings. Payloads that were dispatched stay dispatched."""
        self._schedule = _schedule(self.settings, self._schedule)
        places, self._places = self._places, {}
        for flow, place in places.items():
            if self._schedule is None:
                place.free()
                continue
            again = flow.for_another_schedule(self.settings.tenant(flow.tenant.name))
            place.move_to(again)
            self._places[again] = place

    def _join_again(self, schedule: LinkSchedule, now: float) -> None:
        for flow in self._places:
            if not flow.is_over:
                schedule.join(flow, now)

    def _change(self, change: Callable[[LinkSchedule], None]) -> None:
        """Make a change, let the payloads go that are due then, and set the timer for the next."""
        if self._schedule is None:
            return
        try:
            change(self._schedule)
            epoch = self._schedule.pool.epoch
            for flow in self._schedule.due(time.monotonic()):
                self._places[flow].dispatch()
            if self._schedule.pool.epoch != epoch:
                for place in self._places.values():
                    place.check_again()
            self._set_timer(self._schedule.wake_at())
        except Exception:
            self._give_up_pacing()

    def _give_up_pacing(self) -> None:
        """Free every delivery under way, because a fault of the scheduler must not stop deliveries."""
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
    """A new schedule; None without a link rate. It takes over from `before` what tenants have used of their caps."""
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
