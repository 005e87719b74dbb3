"""The chunk-major side of a link: requests that wait for a slot, and those in one, one payload after the other. Pure:
`now` is an argument.

Slots are given to tenants in turn, those of higher priority first but for one slot in `OLDEST_EACH`, so that nobody
waits for ever; in slots, tenants share by weight (`round_robin`). Who cannot send, because its client has not read for
`IDLE_S` or its tenant has used its cap, makes room, and is the first of its tenant to get a slot again; so is the last
of the tenant with the most slots, where one that has none comes and its priority is no lower.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, OrderedDict, deque

from storage_server.scheduler.flow import Flow, Tenant
from storage_server.scheduler.round_robin import TenantRoundRobin
from storage_server.scheduler.serial import SerialLink
from storage_server.scheduler.tenant_meter import TenantMeter

IDLE_S = 0.05
OLDEST_EACH = 8


class WaitingRoom:
    """Who waits for a slot: each tenant's requests in order, and tenants in turn."""

    def __init__(self) -> None:
        self._flows: dict[str, OrderedDict[Flow, None]] = {}
        self._turns: dict[int, deque[Tenant]] = {}
        """By priority: tenants that may be given a slot."""
        self._in_turn: set[str] = set()
        self._count = 0
        self._given = 0

    def __len__(self) -> int:
        return self._count

    def __contains__(self, flow: Flow) -> bool:
        return flow in self._flows.get(flow.tenant.name, ())

    def flows(self) -> list[Flow]:
        """All of them."""
        return [flow for flows in self._flows.values() for flow in flows]

    def add(self, flow: Flow, *, first: bool = False) -> None:
        """It waits, behind its tenant's others or before them."""
        flows = self._flows.setdefault(flow.tenant.name, OrderedDict())
        flows[flow] = None
        self._count += 1
        if first:
            flows.move_to_end(flow, last=False)
        self.offer(flow.tenant)

    def remove(self, flow: Flow) -> None:
        """It waits no longer."""
        flows = self._flows[flow.tenant.name]
        del flows[flow]
        self._count -= 1
        if not flows:
            del self._flows[flow.tenant.name]

    def offer(self, tenant: Tenant) -> None:
        """The tenant may be given a slot."""
        if tenant.name in self._flows and tenant.name not in self._in_turn:
            self._in_turn.add(tenant.name)
            self._turns.setdefault(tenant.priority, deque()).append(tenant)

    def turn(self) -> Tenant | None:
        """Whose turn it is; without `offer` it has no other."""
        while self._turns:
            is_oldest = self._given % OLDEST_EACH == OLDEST_EACH - 1
            priority = min(self._turns, key=self._oldest) if is_oldest else max(self._turns)
            tenant = self._turns[priority].popleft()
            self._in_turn.discard(tenant.name)
            if not self._turns[priority]:
                del self._turns[priority]
            if tenant.name in self._flows:
                return tenant
        return None

    def take(self, tenant: Tenant) -> Flow:
        """The first of a tenant's requests is given a slot; the tenant's next turn is behind the others'."""
        self._given += 1
        flow = next(iter(self._flows[tenant.name]))
        self.remove(flow)
        self.offer(tenant)
        return flow

    def _oldest(self, priority: int) -> float:
        """The number of the first request of the tenant whose turn it would be."""
        flows = self._flows.get(self._turns[priority][0].name)
        return next(iter(flows)).number if flows else -math.inf


class Chunkwise:
    """The chunk-major requests of one link."""

    def __init__(self, slots: int, rate_bytes_per_s: float, meter: TenantMeter) -> None:
        self._slots_max = slots
        self._meter = meter
        self._link = SerialLink(rate_bytes_per_s, self._choose, self._went)
        self._ready = TenantRoundRobin()
        self._slots: dict[Flow, None] = {}
        self._waiting = WaitingRoom()
        self._stopped: dict[Flow, None] = {}
        """Without a slot until their clients read."""
        self._behind: dict[Flow, float] = {}
        """In a slot, with the transport behind since then; in that order."""
        self._held: list[tuple[float, str, Tenant]] = []
        """Capped tenants that may not send before that time."""
        self._held_names: set[str] = set()
        self._slot_counts: Counter[str] = Counter()
        """By tenant."""
        self._could_make_room: dict[str, None] = {}
        """Tenants that hold slots and may not send."""

    @property
    def active_count(self) -> int:
        """Requests in a slot."""
        return len(self._slots)

    @property
    def queued_count(self) -> int:
        """Requests without one."""
        return len(self._waiting) + len(self._stopped)

    @property
    def is_sending(self) -> bool:
        """Whether something is on the link."""
        return self._link.wake_at() < math.inf

    def flows(self) -> list[Flow]:
        """All of them."""
        return [*self._slots, *self._waiting.flows(), *self._stopped]

    def set_rate(self, rate_bytes_per_s: float, now: float) -> None:
        """The chunk-major side may use so much of the link."""
        self._link.set_rate(rate_bytes_per_s, now)

    def join(self, flow: Flow, now: float) -> None:
        """A request comes; `due` gives it a slot."""
        if flow.is_blocked:
            self._stopped[flow] = None
        else:
            self._waiting.add(flow)
            self._claim(flow, now)

    def leave(self, flow: Flow, now: float) -> None:
        """A request is over or given up; leaving twice does nothing."""
        self._stopped.pop(flow, None)
        if flow in self._waiting:
            self._waiting.remove(flow)
        elif flow in self._slots:
            self._link.drop(flow)
            self._give_up(flow)
            self._fill(now)

    def took(self, flow: Flow, now: float) -> None:
        """The transport took a payload."""
        if flow.is_blocked:
            return
        if flow in self._stopped:
            del self._stopped[flow]
            self._waiting.add(flow, first=True)
            self._claim(flow, now)
        elif flow in self._slots:
            self._behind.pop(flow, None)
            if not self._link.carries(flow):
                self._ready.add(flow)

    def due(self, now: float) -> list[Flow]:
        """Whose payloads go now, in order; a flow appears once a payload."""
        self._let_stopped_make_room(now)
        self._fill(now)
        return self._link.due(now)

    def wake_at(self) -> float:
        """When to ask again; infinity while nothing is under way."""
        at_s = self._link.wake_at()
        if at_s == math.inf and self._ready.has_turns:
            return -math.inf
        if at_s == math.inf and self._held:
            at_s = self._held[0][0]
        if self._behind and len(self._waiting):
            at_s = min(at_s, next(iter(self._behind.values())) + IDLE_S)
        return at_s

    def _choose(self, now: float) -> Flow | None:
        self._free(now)
        while (flow := self._ready.next()) is not None:
            if not self._is_held(flow.tenant, now):
                return flow
            self._ready.hold(flow)
            self._could_make_room[flow.tenant.name] = None
            self._fill(now)
        return None

    def _went(self, flow: Flow, now: float) -> None:
        self._meter.charge(flow.tenant, flow.layer_payloads[flow.payload_index - 1], now)
        if flow.is_over:
            self._give_up(flow)
            self._fill(now)
        elif flow.is_blocked:
            self._behind[flow] = now
        else:
            self._ready.add(flow)

    def _fill(self, now: float) -> None:
        self._free(now)
        while self._may_have_room() and (tenant := self._waiting.turn()) is not None:
            if not self._is_held(tenant, now):
                if len(self._slots) >= self._slots_max:
                    self._let_tenant_make_room(next(iter(self._could_make_room)))
                self._give_slot(self._waiting.take(tenant))

    def _claim(self, flow: Flow, now: float) -> None:
        """It waits for a slot; where its tenant has none, one that has several makes room."""
        self._fill(now)
        if flow not in self._waiting or self._slot_counts[flow.tenant.name] or self._is_held(flow.tenant, now):
            return
        last = {each.tenant.name: each for each in self._slots if not self._link.carries(each)}
        some = [each for each in last.values() if each.tenant.priority <= flow.tenant.priority]
        most = max(some, key=lambda each: self._slot_counts[each.tenant.name], default=None)
        if most is not None and self._slot_counts[most.tenant.name] > 1:
            self._make_room(most)
            self._waiting.remove(flow)
            self._give_slot(flow)

    def _give_slot(self, flow: Flow) -> None:
        self._slots[flow] = None
        self._slot_counts[flow.tenant.name] += 1
        self._ready.add(flow)

    def _may_have_room(self) -> bool:
        return len(self._slots) < self._slots_max or bool(self._could_make_room)

    def _give_up(self, flow: Flow) -> None:
        del self._slots[flow]
        self._slot_counts[flow.tenant.name] -= 1
        if not self._slot_counts[flow.tenant.name]:
            del self._slot_counts[flow.tenant.name]
            self._could_make_room.pop(flow.tenant.name, None)
        self._behind.pop(flow, None)
        self._ready.remove(flow)

    def _let_stopped_make_room(self, now: float) -> None:
        while self._behind:
            flow, since_s = next(iter(self._behind.items()))
            if since_s + IDLE_S > now:
                return
            self._give_up(flow)
            self._stopped[flow] = None

    def _let_tenant_make_room(self, name: str) -> None:
        for flow in [flow for flow in reversed(self._slots) if flow.tenant.name == name]:
            self._make_room(flow)

    def _make_room(self, flow: Flow) -> None:
        self._give_up(flow)
        if flow.is_blocked:
            self._stopped[flow] = None
        else:
            self._waiting.add(flow, first=True)

    def _is_held(self, tenant: Tenant, now: float) -> bool:
        """Whether the tenant has used its cap; it is thought of when it may send again."""
        free_s = self._meter.free_s(tenant)
        if free_s <= now:
            return False
        if tenant.name not in self._held_names:
            self._held_names.add(tenant.name)
            heapq.heappush(self._held, (free_s, tenant.name, tenant))
        return True

    def _free(self, now: float) -> None:
        """Tenants whose time has come have their turns again."""
        while self._held and self._held[0][0] <= now:
            tenant = heapq.heappop(self._held)[2]
            self._held_names.discard(tenant.name)
            if not self._is_held(tenant, now):
                self._could_make_room.pop(tenant.name, None)
                self._ready.offer(tenant.name)
                self._waiting.offer(tenant)
