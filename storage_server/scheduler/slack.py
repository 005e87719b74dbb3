"""Slack-aware dispatch: the layer whose planned deadline is earliest goes next, over the whole link. Pure: `now` is an
argument.

A request's plan (`slack_plan`) is the stall D its GPU is to bear; layer l is then due at start + D + l*c. Plans are
made anew when requests have come or were given up, the link has changed, or a layer was late. The link always carries
something while anything is left, so layers come before their deadlines where they can.

Only `COMPUTE_TRUST` of a compute time that a client states is counted on: one that is shorter than stated would
otherwise leave its GPU waiting for layers that were rightly thought not to be urgent.

A client that stops reading is not served, and what it was promised is put off by as long as it stopped, beyond
`CATCH_UP_S`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from storage_server.scheduler.deadline_queue import DeadlineQueue
from storage_server.scheduler.equal_share import EqualShare
from storage_server.scheduler.flow import Flow
from storage_server.scheduler.policies import Policy, allocate
from storage_server.scheduler.serial import CATCH_UP_S, SerialLink
from storage_server.scheduler.slack_plan import amend_stalls, plan_stalls
from storage_server.scheduler.slack_steps import Floats, Remaining
from storage_server.scheduler.tenant_meter import TenantMeter

COMPUTE_TRUST = 0.9
PLAN_S_PER_LAYER = 0.00015
PLAN_S_MIN = 0.02
PLAN_S_MAX = 2.0
"""Between plans: the more layers are left, the longer, so that planning takes a small part of a processor. Who comes
between two plans is given a place in the last one.
"""


@dataclass(slots=True)
class _Course:
    """Of one request: layer l is due at `start_s` + `stall_s` + l*`compute_s`, the time for which a layer is computed
    or, where that is longer, for which its tenant's cap carries one.
    """

    counted_s: float
    start_s: float
    compute_s: float = 0.0
    stall_s: float = math.inf
    incurred_s: float = 0.0
    blocked_s: float | None = None
    """Since when its transport is behind."""

    def set_pace(self, flow: Flow) -> None:
        """The tenant's cap may be split otherwise; the next layer is due when it was."""
        cap = flow.demand.rate_max_bytes_per_s
        compute_s = self.counted_s if cap is None else max(self.counted_s, flow.demand.layer_bytes / cap)
        self.start_s += flow.layer_index * (self.compute_s - compute_s)
        self.compute_s = compute_s

    def due_s(self, flow: Flow) -> float:
        """When the next payload's layer is due."""
        return self.start_s + self.stall_s + flow.layer_index * self.compute_s


class SlackDispatch:
    """Dispatch by deadlines for the requests of one link."""

    wants_epoch = False
    """Requests come and go in epochs; all else is seen to in plans."""

    def __init__(self, budget_bytes_per_s: float, margin_bytes_per_s: float, meter: TenantMeter) -> None:
        self._budget = budget_bytes_per_s
        self._margin = margin_bytes_per_s
        self._shadow = EqualShare(budget_bytes_per_s)
        self._link = SerialLink(budget_bytes_per_s, self._earliest, self._went)
        self._courses: dict[Flow, _Course] = {}
        self._queue = DeadlineQueue(meter)
        self._planned_s = -math.inf
        self._planned_layers = 0
        self._is_stale = False
        self._makes_up = False
        """The link stood idle while a transport was behind."""

    def __len__(self) -> int:
        """Flows it still knows of."""
        return max(len(self._courses), len(self._queue), len(self._shadow))

    @property
    def used_bytes_per_s(self) -> float:
        """Of the budget: all while something is on the link."""
        return self._budget if self._link.wake_at() < math.inf else 0.0

    def set_budget(self, budget_bytes_per_s: float, now: float) -> None:
        """The link carries so much from now on."""
        self._budget = budget_bytes_per_s
        self._shadow.set_rate(budget_bytes_per_s, now)
        self._link.set_rate(budget_bytes_per_s, now)

    def set_link_rate(self, rate_bytes_per_s: float, now: float) -> None:
        """The link carries so much for a while."""
        if rate_bytes_per_s != self._budget:
            self.set_budget(rate_bytes_per_s, now)
            self._is_stale = True

    def share(self, flows: Sequence[Flow], now: float) -> None:
        """These are the requests; make a plan for them."""
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
            self._shadow.join(flow.number, demand.layer_bytes, layers_left, course.compute_s, demand.weight, now)
        if now >= self._may_plan_s():
            self._plan(now)
        else:
            self._amend(come, now)
        for flow in come:
            due_s = self._courses[flow].due_s(flow)
            end_s = due_s + (flow.demand.layer_count - flow.layer_index - 1) * self._courses[flow].compute_s
            flow.rate_bytes_per_s = min(self._budget, flow.left_bytes / max(end_s - now, 1e-9))

    def resume(self, flow: Flow, now: float) -> None:
        """The transport has room for the flow again."""
        course = self._courses.get(flow)
        if course is None or flow.is_blocked:
            return
        course.start_s += self._put_off_s(course, now)
        self._makes_up |= course.blocked_s is not None
        course.blocked_s = None
        if not self._link.carries(flow):
            self._queue.push(flow, course.due_s(flow))

    def remove(self, flow: Flow, now: float) -> None:
        """The flow is over, or given up."""
        self._link.drop(flow)
        self._queue.discard(flow)
        self._courses.pop(flow, None)
        if flow.is_over:
            self._shadow.over(flow.number)
        else:
            self._shadow.abandon(flow.number, now)
        if not self._courses:
            self._shadow = EqualShare(self._budget)  # nobody is left to whom anything was promised

    def due(self, now: float) -> list[Flow]:
        """Whose payloads go now, in order; a flow appears once a payload."""
        going = self._link.due(now, makes_up=self._makes_up)
        self._makes_up = False
        if self._is_stale and now >= self._may_plan_s():
            self._plan(now)
        return going

    def wake_at(self) -> float:
        """When to ask again; infinity while nothing is under way."""
        at_s = self._link.wake_at()
        return at_s if at_s < math.inf else self._queue.free_s()

    def _earliest(self, now: float) -> Flow | None:
        return self._queue.pop(now)

    def _went(self, flow: Flow, now: float) -> None:
        """A payload has crossed; where it was its layer's last, that is when the layer is there."""
        course = self._courses[flow]
        self._queue.charge(flow.tenant, flow.layer_payloads[flow.payload_index - 1], now)
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
        """By how much a client that stopped reading is served later."""
        return 0.0 if course.blocked_s is None else max(0.0, now - course.blocked_s - CATCH_UP_S)

    def _may_plan_s(self) -> float:
        """When the next plan may be made."""
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
        """Keep to the last plan, with those who have come given a place in it."""
        self._is_stale = True
        flows, remaining, earlier = self._state(now)
        if flows:
            new = {id(flow) for flow in come}
            indices = [index for index, flow in enumerate(flows) if id(flow) in new]
            self._follow(flows, amend_stalls(remaining, self._budget, earlier, indices), now)

    def _state(self, now: float) -> tuple[list[Flow], list[Remaining], Floats]:
        """Who has something left, where they are, and their stalls as planned so far, or promised."""
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
        """The stalls that Calibrated Stall-opt would have from now on: a plan that `plan_stalls` must not fall behind
        where it keeps the promises.
        """
        rates = allocate(Policy.CALIBRATED_STALL_OPT, [flow.demand for flow in flows], self._budget, self._margin)
        firsts = np.array([each.first_bytes for each in remaining]) / rates
        laters = np.array([(each.layer_count - 1) * each.layer_bytes for each in remaining]) / rates
        due = np.array([each.first_due_s for each in remaining])
        computes = np.array([(each.layer_count - 1) * each.compute_s for each in remaining])
        incurred = np.array([each.stall_s for each in remaining])
        stalls: Floats = np.maximum(incurred, np.maximum(firsts - due, firsts + laters - due - computes))
        return stalls
