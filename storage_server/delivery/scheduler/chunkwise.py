"""The chunk-major side of a link: some requests hold a channel, and the others wait for one. Requests with a channel
send one payload after the other. Pure: `now` is an argument.

Channels are given to tenants in turn. Higher priorities come first, but every eighth channel (`OLDEST_EACH`) goes to
the oldest request, so that no request waits for ever. The tenants with channels share the link by weight
(`round_robin`).

A request that cannot send gives its channel up: its client has not read for `IDLE_S`, or its tenant has used its cap.
When a tenant without a channel comes, the tenant with the most channels gives its last one up, if its priority is no
higher. A request that gave its channel up is the first of its tenant to get a channel again.

    2 channels. Tenant A has requests A1, A2, A3:    channels A1 A2, waiting A3
    Tenant B comes with B1, and A gives A2's up:  channels A1 B1, waiting A2 A3
    A1 has all its bytes:                         channels B1 A2, waiting A3
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, OrderedDict, deque
from collections.abc import Iterator

from storage_server.delivery.scheduler.flow import Flow, LinkTenant
from storage_server.delivery.scheduler.round_robin import TenantRoundRobin
from storage_server.delivery.scheduler.serial import SerialLink
from storage_server.delivery.scheduler.tenant_meter import TenantMeter

IDLE_S = 0.05
OLDEST_EACH = 8


class WaitingFlows:
    """The requests that wait for a channel: in order of arrival for each tenant, and the tenants in turn."""

    def __init__(self) -> None:
        self._flows: dict[str, OrderedDict[Flow, None]] = {}
        self._turns: dict[int, deque[LinkTenant]] = {}
        """By priority: the tenants that may be given a channel."""
        self._in_turn: set[str] = set()
        self._count = 0
        self._given = 0

    def __len__(self) -> int:
        return self._count

    def __contains__(self, flow: Flow) -> bool:
        return flow in self._flows.get(flow.tenant.name, ())

    def flows(self) -> list[Flow]:
        """Every waiting request."""
        return [flow for flows in self._flows.values() for flow in flows]

    def add(self, flow: Flow, *, first: bool = False) -> None:
        """Let a request wait behind its tenant's other requests, or before them with `first`."""
        flows = self._flows.setdefault(flow.tenant.name, OrderedDict())
        flows[flow] = None
        self._count += 1
        if first:
            flows.move_to_end(flow, last=False)
        self.offer(flow.tenant)

    def remove(self, flow: Flow) -> None:
        """Take a request out."""
        flows = self._flows[flow.tenant.name]
        del flows[flow]
        self._count -= 1
        if not flows:
            del self._flows[flow.tenant.name]

    def offer(self, tenant: LinkTenant) -> None:
        """Give the tenant a turn, behind the other tenants of its priority."""
        if tenant.name in self._flows and tenant.name not in self._in_turn:
            self._in_turn.add(tenant.name)
            self._turns.setdefault(tenant.priority, deque()).append(tenant)

    def next_tenant(self) -> LinkTenant | None:
        """The tenant that is next, or None. This uses up its turn; `offer` gives it another."""
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

    def take(self, tenant: LinkTenant) -> Flow:
        """Take the tenant's first request out, for a channel. The tenant's next turn comes after the others' turns."""
        self._given += 1
        flow = next(iter(self._flows[tenant.name]))
        self.remove(flow)
        self.offer(tenant)
        return flow

    def _oldest(self, priority: int) -> float:
        """The number of the first request of the tenant that is next in this priority."""
        flows = self._flows.get(self._turns[priority][0].name)
        return next(iter(flows)).number if flows else -math.inf


class CappedTenants:
    """The tenants that have used their caps, until each may send again."""

    def __init__(self, meter: TenantMeter) -> None:
        self._meter = meter
        self._held: list[tuple[float, str, LinkTenant]] = []
        """A heap, by the time before which each may not send."""
        self._names: set[str] = set()

    @property
    def free_at(self) -> float:
        """The time at which the first of them may send again; infinity where there is none."""
        return self._held[0][0] if self._held else math.inf

    def is_held(self, tenant: LinkTenant, now: float) -> bool:
        """Whether the tenant has used its cap. If so, `freed` gives it when it may send again."""
        free_s = self._meter.free_s(tenant)
        if free_s <= now:
            return False
        if tenant.name not in self._names:
            self._names.add(tenant.name)
            heapq.heappush(self._held, (free_s, tenant.name, tenant))
        return True

    def freed(self, now: float) -> Iterator[LinkTenant]:
        """Take out the tenants that may send again."""
        while self._held and self._held[0][0] <= now:
            tenant = heapq.heappop(self._held)[2]
            self._names.discard(tenant.name)
            if not self.is_held(tenant, now):
                yield tenant


class Channels:
    """The requests with a channel, and how many each tenant has."""

    def __init__(self, count_max: int) -> None:
        self._count_max = count_max
        self._flows: dict[Flow, None] = {}
        self._counts: Counter[str] = Counter()
        self._could_give_up: dict[str, None] = {}
        """Tenants that hold channels and may not send, so that their channels can be given to others."""

    def __len__(self) -> int:
        return len(self._flows)

    def __contains__(self, flow: Flow) -> bool:
        return flow in self._flows

    def __iter__(self) -> Iterator[Flow]:
        return iter(self._flows)

    @property
    def may_serve_another(self) -> bool:
        """Whether a request can be given a channel."""
        return len(self._flows) < self._count_max or bool(self._could_give_up)

    def count_of(self, name: str) -> int:
        """The channels of a tenant."""
        return self._counts[name]

    def add(self, flow: Flow) -> None:
        """Give the request a channel."""
        self._flows[flow] = None
        self._counts[flow.tenant.name] += 1

    def remove(self, flow: Flow) -> None:
        """Take the request's channel away."""
        del self._flows[flow]
        self._counts[flow.tenant.name] -= 1
        if not self._counts[flow.tenant.name]:
            del self._counts[flow.tenant.name]
            self._could_give_up.pop(flow.tenant.name, None)

    def note_may_send(self, name: str, *, may_send: bool) -> None:
        """Note whether a tenant that holds channels may send now."""
        if may_send:
            self._could_give_up.pop(name, None)
        else:
            self._could_give_up[name] = None

    def to_give_up(self) -> list[Flow]:
        """Where all channels are taken: those of the first tenant that may not send, the last one first."""
        if len(self._flows) < self._count_max:
            return []
        name = next(iter(self._could_give_up))
        return [flow for flow in reversed(self._flows) if flow.tenant.name == name]


class Chunkwise:
    """The chunk-major requests of one link."""

    def __init__(self, channels: int, rate_bytes_per_s: float, meter: TenantMeter) -> None:
        self._meter = meter
        self._link = SerialLink(rate_bytes_per_s, self._choose, self._note_crossed)
        self._ready = TenantRoundRobin()
        self._channels = Channels(channels)
        self._waiting = WaitingFlows()
        self._stopped: dict[Flow, None] = {}
        """Requests without a channel because their clients do not read."""
        self._behind: dict[Flow, float] = {}
        """Requests with a channel whose transport is behind, and since when; the longest first."""
        self._capped = CappedTenants(meter)

    @property
    def active_count(self) -> int:
        """How many requests have a channel."""
        return len(self._channels)

    @property
    def queued_count(self) -> int:
        """How many requests have no channel."""
        return len(self._waiting) + len(self._stopped)

    @property
    def is_sending(self) -> bool:
        """Whether a payload is on the link."""
        return self._link.wake_at() < math.inf

    def flows(self) -> list[Flow]:
        """Every request."""
        return [*self._channels, *self._waiting.flows(), *self._stopped]

    def set_rate(self, rate_bytes_per_s: float, now: float) -> None:
        """Set the rate that the chunk-major side may use from now on."""
        self._link.set_rate(rate_bytes_per_s, now)

    def join(self, flow: Flow, now: float) -> None:
        """Add a request; `due` gives it a channel."""
        if flow.is_blocked:
            self._stopped[flow] = None
        else:
            self._waiting.add(flow)
            self._claim(flow, now)

    def leave(self, flow: Flow, now: float) -> None:
        """Remove a request that is over or given up. A second call does nothing."""
        self._stopped.pop(flow, None)
        if flow in self._waiting:
            self._waiting.remove(flow)
        elif flow in self._channels:
            self._link.drop(flow)
            self._take_channel(flow)
            self._give_channels(now)

    def note_sent(self, flow: Flow, now: float) -> None:
        """Note that the transport took a payload of the flow."""
        if flow.is_blocked:
            return
        if flow in self._stopped:
            del self._stopped[flow]
            self._waiting.add(flow, first=True)
            self._claim(flow, now)
        elif flow in self._channels:
            self._behind.pop(flow, None)
            if not self._link.carries(flow):
                self._ready.add(flow)

    def due(self, now: float) -> list[Flow]:
        """The flows whose next payloads go now, in order; a flow appears once for each payload."""
        self._let_stopped_give_up_channels(now)
        self._give_channels(now)
        return self._link.due(now)

    def wake_at(self) -> float:
        """The time at which to call `due` again; infinity while nothing is under way."""
        at_s = self._link.wake_at()
        if at_s == math.inf and self._ready.has_turns:
            return -math.inf
        if at_s == math.inf:
            at_s = self._capped.free_at
        if self._behind and len(self._waiting):
            at_s = min(at_s, next(iter(self._behind.values())) + IDLE_S)
        return at_s

    def _choose(self, now: float) -> Flow | None:
        self._return_turns(now)
        while (flow := self._ready.next()) is not None:
            if not self._capped.is_held(flow.tenant, now):
                return flow
            self._ready.hold(flow)
            self._channels.note_may_send(flow.tenant.name, may_send=False)
            self._give_channels(now)
        return None

    def _note_crossed(self, flow: Flow, now: float) -> None:
        self._meter.charge(flow.tenant, flow.dispatched_bytes, now)
        if flow.is_over:
            self._take_channel(flow)
            self._give_channels(now)
        elif flow.is_blocked:
            self._behind[flow] = now
        else:
            self._ready.add(flow)

    def _give_channels(self, now: float) -> None:
        self._return_turns(now)
        while self._channels.may_serve_another and (tenant := self._waiting.next_tenant()) is not None:
            if not self._capped.is_held(tenant, now):
                for flow in self._channels.to_give_up():
                    self._give_up_channel(flow)
                self._give_channel(self._waiting.take(tenant))

    def _claim(self, flow: Flow, now: float) -> None:
        """Find a channel for a waiting request. Where its tenant has none, a tenant that has several gives one up."""
        self._give_channels(now)
        count_of = self._channels.count_of
        if flow not in self._waiting or count_of(flow.tenant.name) or self._capped.is_held(flow.tenant, now):
            return
        last = {each.tenant.name: each for each in self._channels if not self._link.carries(each)}
        some = [each for each in last.values() if each.tenant.priority <= flow.tenant.priority]
        most = max(some, key=lambda each: count_of(each.tenant.name), default=None)
        if most is not None and count_of(most.tenant.name) > 1:
            self._give_up_channel(most)
            self._waiting.remove(flow)
            self._give_channel(flow)

    def _give_channel(self, flow: Flow) -> None:
        self._channels.add(flow)
        self._ready.add(flow)

    def _take_channel(self, flow: Flow) -> None:
        self._channels.remove(flow)
        self._behind.pop(flow, None)
        self._ready.remove(flow)

    def _let_stopped_give_up_channels(self, now: float) -> None:
        while self._behind:
            flow, since_s = next(iter(self._behind.items()))
            if since_s + IDLE_S > now:
                return
            self._take_channel(flow)
            self._stopped[flow] = None

    def _give_up_channel(self, flow: Flow) -> None:
        self._take_channel(flow)
        if flow.is_blocked:
            self._stopped[flow] = None
        else:
            self._waiting.add(flow, first=True)

    def _return_turns(self, now: float) -> None:
        """Give tenants their turns back whose caps allow them to send again."""
        for tenant in self._capped.freed(now):
            self._channels.note_may_send(tenant.name, may_send=True)
            self._ready.offer(tenant.name)
            self._waiting.offer(tenant)
