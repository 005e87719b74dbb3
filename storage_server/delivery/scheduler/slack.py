"""Slack-aware dispatch: the layer whose planned deadline is earliest goes next, over the whole link. Pure: `now` is an
argument.

The plan (`slack_plan`) says for each request how long its GPU shall stall: D. Layer l is then due at start + D + l*c.
Plans are made anew after requests have come or were given up, the link has changed, or a layer was late. The link is
never idle while a request has bytes left, so layers come before their deadlines where they can.

Example: start = 0, D = 0.2 s, stated compute time 0.1 s. The dispatch counts on c = 0.09 s (`COMPUTE_TRUST` = 0.9), so
layers 0, 1, 2 are due at 0.20, 0.29 and 0.38 s. The reason: if a GPU computed faster than its client stated, its layers
would come too late, although they were not late by the plan.

A client that stops reading is not served. Its deadlines are put off by the time for which it stopped, less
`CATCH_UP_S`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from storage_server.delivery.scheduler.deadline_queue import DeadlineQueue
from storage_server.delivery.scheduler.equal_share import EqualShare
from storage_server.delivery.scheduler.flow import Flow
from storage_server.delivery.scheduler.policies import Policy, allocate
from storage_server.delivery.scheduler.serial import CATCH_UP_S, SerialLink
from storage_server.delivery.scheduler.slack_plan import amend_stalls, plan_stalls
from storage_server.delivery.scheduler.slack_steps import Floats, Remaining
from storage_server.delivery.scheduler.tenant_meter import TenantMeter

COMPUTE_TRUST = 0.9
PLAN_S_PER_LAYER = 0.00015
PLAN_S_MIN = 0.02
PLAN_S_MAX = 2.0
"""Bounds in seconds of the time between plans, which grows with the layers left, so that planning takes a small part of
a processor. A request that comes between two plans gets a place in the last plan.
"""


@dataclass(slots=True)
class _Course:
    """The deadlines of one request: layer l is due at `start_s` + `stall_s` + l*`compute_s`. `compute_s` is the time in
    which a layer is computed or, where that takes longer, in which the tenant's cap carries a layer.
    """

    counted_s: float
    start_s: float
    compute_s: float = 0.0
    stall_s: float = math.inf
    incurred_s: float = 0.0
    blocked_s: float | None = None
    """The time since which the flow's transport is behind; None where it is not."""

    def set_pace(self, flow: Flow) -> None:
        """Set `compute_s` anew, because the tenant's cap may be split otherwise. The next layer's deadline stays."""
        cap = flow.demand.rate_max_bytes_per_s
        compute_s = self.counted_s if cap is None else max(self.counted_s, flow.demand.layer_bytes / cap)
        self.start_s += flow.layer_index * (self.compute_s - compute_s)
        self.compute_s = compute_s

    def due_s(self, flow: Flow) -> float:
        """The deadline of the next payload's layer."""
        return self.start_s + self.stall_s + flow.layer_index * self.compute_s


class SlackDispatch:
    """Dispatch by deadlines for the requests of one link."""

    wants_epoch = False
    """No epoch is asked for: the pool begins epochs when requests come and go, and plans react to everything else."""

    def __init__(self, budget_bytes_per_s: float, margin_bytes_per_s: float, meter: TenantMeter) -> None:
        self._budget = budget_bytes_per_s
        self._margin = margin_bytes_per_s
        self._shadow = EqualShare(budget_bytes_per_s)
        self._link = SerialLink(budget_bytes_per_s, self._earliest, self._note_crossed)
        self._courses: dict[Flow, _Course] = {}
        self._queue = DeadlineQueue(meter)
        self._planned_s = -math.inf
        self._planned_layers = 0
        self._is_stale = False
        self._makes_up = False
        """Whether the link was idle because a transport was behind."""

    def __len__(self) -> int:
        """How many flows it knows of."""
        return max(len(self._courses), len(self._queue), len(self._shadow))

    @property
    def used_bytes_per_s(self) -> float:
        """The part of the budget that is in use: all of it while a payload is on the link."""
        return self._budget if self._link.wake_at() < math.inf else 0.0

    def set_budget(self, budget_bytes_per_s: float, now: float) -> None:
        """Set the link's rate from now on."""
        self._budget = budget_bytes_per_s
        self._shadow.set_rate(budget_bytes_per_s, now)
        self._link.set_rate(budget_bytes_per_s, now)

    def set_link_rate(self, rate_bytes_per_s: float, now: float) -> None:
        """Set the link's rate for a while, and plan anew."""
        if rate_bytes_per_s != self._budget:
            self.set_budget(rate_bytes_per_s, now)
            self._is_stale = True

    def share(self, flows: Sequence[Flow], now: float) -> None:
        """Take these requests in and plan for them."""
        self._shadow.advance(now)
        weights = sum(flow.demand.weight for flow in flows)
        come = [flow for flow in flows if flow not in self._courses]
        for flow in flows:
            if (course := self._courses.get(flow)) is not None:
                self._shadow.reweigh(flow.number, flow.demand.weight, now)
                course.set_pace(flow)
        for flow in come:
            demand = flow.demand
            stated_s = demand.stated_compute_s
            if stated_s is None:
                stated_s = demand.layer_bytes * weights / (self._budget * demand.weight)
            course = self._courses[flow] = _Course(COMPUTE_TRUST * stated_s, now)
            course.set_pace(flow)
            layers_left = demand.layer_count - flow.layer_index
            self._shadow.join(
                flow.number,
                demand.layer_bytes,
                layer_count=layers_left,
                compute_s=course.compute_s,
                weight=demand.weight,
                now=now,
            )
        if now >= self._may_plan_s():
            self._plan(now)
        else:
            self._amend(come, now)
        for flow in come:
            due_s = self._courses[flow].due_s(flow)
            end_s = due_s + (flow.demand.layer_count - flow.layer_index - 1) * self._courses[flow].compute_s
            flow.rate_bytes_per_s = min(self._budget, flow.left_bytes / max(end_s - now, 1e-9))

    def resume(self, flow: Flow, now: float) -> None:
        """Note that the transport takes payloads of the flow again."""
        course = self._courses.get(flow)
        if course is None or flow.is_blocked:
            return
        course.start_s += self._put_off_s(course, now)
        self._makes_up |= course.blocked_s is not None
        course.blocked_s = None
        if not self._link.carries(flow):
            self._queue.push(flow, course.due_s(flow))

    def remove(self, flow: Flow, now: float) -> None:
        """Remove a flow that is over or given up."""
        self._link.drop(flow)
        self._queue.discard(flow)
        self._courses.pop(flow, None)
        if flow.is_over:
            self._shadow.drop_result(flow.number)
        else:
            self._shadow.abandon(flow.number, now)
        if not self._courses:
            self._shadow = EqualShare(self._budget)  # no flow is left that was promised a bound

    def due(self, now: float) -> list[Flow]:
        """The flows whose next payloads go now, in order; a flow appears once for each payload."""
        going = self._link.due(now, makes_up=self._makes_up)
        self._makes_up = False
        if self._is_stale and now >= self._may_plan_s():
            self._plan(now)
        return going

    def wake_at(self) -> float:
        """The time at which to call `due` again; infinity while nothing is under way."""
        at_s = self._link.wake_at()
        return at_s if at_s < math.inf else self._queue.free_s()

    def _earliest(self, now: float) -> Flow | None:
        return self._queue.pop(now)

    def _note_crossed(self, flow: Flow, now: float) -> None:
        """Note that a payload has crossed. With the last payload of a layer the layer has arrived."""
        course = self._courses[flow]
        self._queue.charge(flow.tenant, flow.dispatched_bytes, now)
        if flow.payload_index == 0:
            late_s = now - course.start_s - (flow.layer_index - 1) * course.compute_s
            course.incurred_s = max(course.incurred_s, late_s)
            if late_s > course.stall_s + CATCH_UP_S:
                self._is_stale = True
        if flow.is_blocked:
            course.blocked_s = now
        else:
            self._queue.push(flow, course.due_s(flow))

    def _put_off_s(self, course: _Course, now: float) -> float:
        """The seconds by which deadlines are put off, because the client stopped reading."""
        return 0.0 if course.blocked_s is None else max(0.0, now - course.blocked_s - CATCH_UP_S)

    def _may_plan_s(self) -> float:
        """The time from which the next plan may be made."""
        return self._planned_s + min(PLAN_S_MAX, max(PLAN_S_MIN, PLAN_S_PER_LAYER * self._planned_layers))

    def _plan(self, now: float) -> None:
        self._is_stale = False
        self._planned_s = now
        flows, remaining, earlier = self._state(now)
        self._planned_layers = sum(each.layer_count for each in remaining)
        if flows:
            starts = [self._by_rates(flows, remaining), earlier]
            self._follow(flows, plan_stalls(remaining, self._budget, starts), now)

    def _amend(self, come: Sequence[Flow], now: float) -> None:
        """Keep to the last plan, and give the new requests a place in it."""
        self._is_stale = True
        flows, remaining, earlier = self._state(now)
        if flows:
            new = {id(flow) for flow in come}
            indices = [index for index, flow in enumerate(flows) if id(flow) in new]
            self._follow(flows, amend_stalls(remaining, self._budget, earlier, indices), now)

    def _state(self, now: float) -> tuple[list[Flow], list[Remaining], Floats]:
        """The flows with bytes left, their remainders, and their stalls: as planned last, or as promised if less."""
        flows = [flow for flow in self._courses if not flow.is_over]
        promised = self._shadow.stalls()
        remaining = [self._remaining(flow, promised.get(flow.number, 0.0), now) for flow in flows]
        earlier = [
            min(self._courses[flow].stall_s, each.stall_max_s) for flow, each in zip(flows, remaining, strict=True)
        ]
        return flows, remaining, np.array(earlier)

    def _follow(self, flows: Sequence[Flow], stalls: Floats, now: float) -> None:
        self._queue.clear(now)
        for flow, stall_s in zip(flows, stalls.tolist(), strict=True):
            course = self._courses[flow]
            course.stall_s = stall_s
            if not flow.is_blocked and not self._link.carries(flow):
                self._queue.push(flow, course.due_s(flow))

    def _remaining(self, flow: Flow, promised_s: float, now: float) -> Remaining:
        course = self._courses[flow]
        demand = flow.demand
        first_due_s = course.start_s + self._put_off_s(course, now) + flow.layer_index * course.compute_s - now
        least_s = course.incurred_s
        if demand.rate_max_bytes_per_s is not None:
            least_s = max(least_s, flow.layer_left_bytes / demand.rate_max_bytes_per_s - first_due_s)
        return Remaining(
            first_bytes=flow.layer_left_bytes,
            layer_bytes=demand.layer_bytes,
            layer_count=demand.layer_count - flow.layer_index,
            first_due_s=first_due_s,
            compute_s=course.compute_s,
            stall_s=least_s,
            stall_max_s=max(promised_s, least_s),
            weight=demand.weight,
            priority=demand.priority,
            computing_s=demand.layer_count * course.compute_s,
        )

    def _by_rates(self, flows: Sequence[Flow], remaining: Sequence[Remaining]) -> Floats:
        """The stalls that Calibrated Stall-opt would give from now on. Where they keep the promises, the plan of
        `plan_stalls` must be at least as good.
        """
        rates = allocate(Policy.CALIBRATED_STALL_OPT, [flow.demand for flow in flows], self._budget, self._margin)
        firsts = np.array([each.first_bytes for each in remaining]) / rates
        laters = np.array([(each.layer_count - 1) * each.layer_bytes for each in remaining]) / rates
        due = np.array([each.first_due_s for each in remaining])
        computes = np.array([(each.layer_count - 1) * each.compute_s for each in remaining])
        incurred = np.array([each.stall_s for each in remaining])
        stalls: Floats = np.maximum(incurred, np.maximum(firsts - due, firsts + laters - due - computes))
        return stalls
