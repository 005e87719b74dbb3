"""Admission: how many requests run, who waits, and in which order.

A request runs at once while fewer than `active_max` run. Otherwise it waits, at most `queue_max` of all tenants. In a
full queue a request takes the place of one of lower priority, or of a tenant that has more than its share of the queue;
where there is none, it is refused. Waiting requests of the highest priority go first. Among tenants of one priority it
is deficit round robin over tokens: in each round a tenant may start requests of `weight` times QUANTUM_TOKENS, so a
tenant with short prompts is not held up by one with long prompts. While several of them wait, a tenant that runs less
than its share of `active_max` goes before one that runs its share already, because requests that take long would
otherwise collect the places. An eighth of the places is left to tenants that run few requests, however long those of
the others take. `orchestrator.gate` has the clock and ends what waits too long.

A request that only one engine can answer runs while that engine has less than half of `active_max`. Otherwise it waits,
and those behind it that may go elsewhere run: an engine that answers nothing would else collect all places. So does a
running request for which one engine is left, since others have refused it or are gone: it waits anew, without a place.

Source of deficit round robin: Shreedhar and Varghese, SIGCOMM 1995.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import Enum

QUANTUM_TOKENS = 2048
FEW_PART, FEW_TENANTS = 64, 8
"""A tenant that runs less than a 64th of `active_max` runs few requests. Places for 8 such tenants are left to those
that run few: one tenant's requests may take hours, and all of them may have come before anybody else's.
"""
TENANT_QUEUE_FRACTION = 0.5
"""One tenant has no more than this fraction of the queue where others have requests in it."""


@dataclass(frozen=True, slots=True)
class AdmissionSettings:
    """`active_max` and `queue_max` count requests; 0 for `queue_max` refuses at once. `deadline_s` is the longest
    wait.
    """

    active_max: int = 1024
    queue_max: int = 4096
    deadline_s: float = 30.0


@dataclass(frozen=True, slots=True)
class Tenant:
    """The share of a tenant: `weight` beside others of its priority; a higher `priority` goes first. `active_max`
    bounds its running requests; None: only the bound of all.
    """

    name: str
    weight: float = 1.0
    priority: int = 0
    active_max: int | None = None


@dataclass(frozen=True, slots=True)
class Waiting:
    """A request that waits. `engine` is the only one that can answer it; empty where several can. `number` is the order
    in which requests came.
    """

    request_id: str
    tenant: Tenant
    tokens: int
    engine: str = ""
    number: int = 0


class Verdict(Enum):
    """The fate of a request when it comes."""

    RUNS = "runs"
    WAITS = "waits"
    REFUSED = "refused"


@dataclass(slots=True)
class _Queue:
    tenant: Tenant
    by_engine: dict[str, OrderedDict[str, Waiting]] = field(default_factory=dict)
    """By the only engine that can answer a request, and by request, first come first: a crowd that hangs up must not
    cost a search each.
    """
    count: int = 0
    deficit_tokens: float = 0.0

    def add(self, waiting: Waiting) -> None:
        self.by_engine.setdefault(waiting.engine, OrderedDict())[waiting.request_id] = waiting
        self.count += 1

    def remove(self, waiting: Waiting) -> None:
        same = self.by_engine[waiting.engine]
        del same[waiting.request_id]
        self.count -= 1
        if not same:
            del self.by_engine[waiting.engine]

    def first(self, has_room: Callable[[str], bool]) -> Waiting | None:
        """The one whose turn comes next, of those whose engines have room."""
        firsts = (next(iter(same.values())) for engine, same in self.by_engine.items() if has_room(engine))
        return min(firsts, key=lambda each: each.number, default=None)

    def last(self) -> Waiting:
        """The one that gives its place up: the last for the engine for which most wait."""
        return next(reversed(max(self.by_engine.values(), key=len).values()))


def most_at_one(active_max: int) -> int:
    """The running requests that one engine has, where others can take the rest."""
    return max(1, active_max // 2)


def left_to_few(active_max: int) -> int:
    """The places for tenants that run few requests."""
    return FEW_TENANTS * (active_max // FEW_PART)


def retry_after_s(waiting_count: int, active_max: int, mean_service_s: float) -> int:
    """When a refused request should come again: the time in which the queue is worked off, from 1 to 60."""
    return max(1, min(60, round((waiting_count + 1) * mean_service_s / max(1, active_max))))


class Admission:
    """The running and waiting requests."""

    def __init__(self, settings: AdmissionSettings) -> None:
        self.settings = settings
        self._active: dict[str, tuple[str, str]] = {}
        """The tenant of each running request, and its engine; empty where that is not known yet."""
        self._active_by_tenant: dict[str, int] = {}
        self._active_by_engine: Counter[str] = Counter()
        self._offered_count = 0
        self._active_tenants: dict[str, Tenant] = {}
        """The tenants that run requests, with their shares."""
        self._queues: OrderedDict[str, _Queue] = OrderedDict()
        self._waiting: dict[str, Waiting] = {}
        self.displaced: list[str] = []
        """Requests that waited, and whose places others have taken: tell them, and empty the list."""

    @property
    def active_count(self) -> int:
        """Running requests."""
        return len(self._active)

    @property
    def waiting_count(self) -> int:
        """Waiting requests."""
        return len(self._waiting)

    def offer(self, request_id: str, tenant: Tenant, tokens: int, engine: str = "") -> Verdict:
        """A request has come. A tenant that has waiting requests cannot overtake them with a new one, unless their
        engines have no room. `engine` is the only one that can answer the request; empty where several can.
        """
        queue = self._queues.get(tenant.name)
        has_room = self._has_room(tenant) and self._has_engine_room(engine)
        is_first = queue is None or queue.first(self._has_engine_room) is None
        if has_room and is_first and not self._waits_above(tenant.priority):
            self._begin(request_id, tenant, engine)
            return Verdict.RUNS
        is_full = len(self._waiting) >= self.settings.queue_max
        is_crowding = _is_crowding(queue, len(self._waiting), self.settings.queue_max)
        if is_full or is_crowding:
            last = self._victim(tenant, queue) if is_full and not is_crowding else None
            last = self._own_victim(queue, engine) if last is None else last
            if last is None:
                return Verdict.REFUSED
            self.displaced.append(last.request_id)
            self.end(last.request_id)
            queue = self._queues.get(tenant.name)
        if queue is None:
            queue = self._queues[tenant.name] = _Queue(tenant)
        self._offered_count += 1
        waiting = Waiting(request_id, tenant, max(1, tokens), engine, self._offered_count)
        queue.add(waiting)
        self._waiting[request_id] = waiting
        return Verdict.WAITS

    def reassign(self, request_id: str, engine: str) -> None:
        """A request that waits can be answered by this engine alone now; empty where several can. `start` may have more
        to start then.
        """
        waiting = self._waiting.get(request_id)
        if waiting is None or waiting.engine == engine:
            return
        queue = self._queues[waiting.tenant.name]
        queue.remove(waiting)
        self._waiting[request_id] = changed = replace(waiting, engine=engine)
        queue.add(changed)

    def may_go_to(self, request_id: str, engine: str) -> bool:
        """Whether a running request may go to the only engine that can answer it now: it is there, or there is room."""
        running = self._active.get(request_id)
        return (running is not None and running[1] == engine) or self._has_engine_room(engine)

    def sent(self, request_id: str, engine: str) -> bool:
        """A running request is at this engine now. Returns whether it has left another one, where `start` may have more
        to start then.
        """
        running = self._active.get(request_id)
        if running is None:
            return False
        tenant, before = running
        self._leave_engine(before)
        self._active[request_id] = tenant, engine
        self._active_by_engine[engine] += 1
        return before not in ("", engine)

    def set_share(self, tenant: Tenant) -> None:
        """A tenant has another share: `start` may have more to start."""
        queue = self._queues.get(tenant.name)
        if queue is not None:
            queue.tenant = tenant
        if tenant.name in self._active_tenants:
            self._active_tenants[tenant.name] = tenant

    def end(self, request_id: str) -> None:
        """The request runs no more, or waits no more."""
        running = self._active.pop(request_id, None)
        if running is not None:
            tenant, engine = running
            self._leave_engine(engine)
            self._active_by_tenant[tenant] -= 1
            if not self._active_by_tenant[tenant]:
                del self._active_by_tenant[tenant], self._active_tenants[tenant]
            return
        waiting = self._waiting.pop(request_id, None)
        if waiting is not None:
            queue = self._queues[waiting.tenant.name]
            queue.remove(waiting)
            self._forget_empty(queue)

    def start(self) -> list[Waiting]:
        """Those that run from now on, in order."""
        started: list[Waiting] = []
        while (waiting := self._next()) is not None:
            self._begin(waiting.request_id, waiting.tenant, waiting.engine)
            started.append(waiting)
        return started

    def _next(self) -> Waiting | None:
        if len(self._active) >= self.settings.active_max:  # thousands of tenants wait, and many requests end at once
            return None
        firsts = {
            name: first
            for name, queue in self._queues.items()
            if self._has_room(queue.tenant) and (first := queue.first(self._has_engine_room)) is not None
        }
        if not firsts:
            return None
        able = [self._queues[name] for name in firsts]
        priority = max(queue.tenant.priority for queue in able)
        able = self._below_share([queue for queue in able if queue.tenant.priority == priority], priority)
        while True:
            for queue in able:
                waiting = firsts[queue.tenant.name]
                if queue.deficit_tokens >= waiting.tokens:
                    queue.remove(waiting)
                    del self._waiting[waiting.request_id]
                    queue.deficit_tokens -= waiting.tokens
                    self._queues.move_to_end(queue.tenant.name)
                    self._forget_empty(queue)
                    return waiting
            # as many rounds at once as the nearest one needs
            rounds = min(
                (firsts[queue.tenant.name].tokens - queue.deficit_tokens) / _quantum(queue.tenant) for queue in able
            )
            for queue in able:
                queue.deficit_tokens += max(rounds, 1e-9) * _quantum(queue.tenant)

    def _below_share(self, able: list[_Queue], priority: int) -> list[_Queue]:
        """Those whose tenants run less than their shares of `active_max` among the tenants of this priority that run or
        wait; all of them where no tenant does, so that no place stays empty.
        """
        if len(able) == 1:
            return able
        tenants = {each.name: each for each in self._active_tenants.values() if each.priority == priority}
        tenants |= {queue.tenant.name: queue.tenant for queue in able}
        each_weight = (self.settings.active_max - left_to_few(self.settings.active_max)) / sum(
            tenant.weight for tenant in tenants.values()
        )
        below = [
            queue
            for queue in able
            if self._active_by_tenant.get(queue.tenant.name, 0) < each_weight * queue.tenant.weight
        ]
        return below or able

    def _begin(self, request_id: str, tenant: Tenant, engine: str) -> None:
        self._active[request_id] = tenant.name, engine
        self._active_by_engine[engine] += 1
        self._active_tenants[tenant.name] = tenant
        self._active_by_tenant[tenant.name] = self._active_by_tenant.get(tenant.name, 0) + 1

    def _has_room(self, tenant: Tenant) -> bool:
        """Whether the tenant may have another place. Where there are no API keys, everybody is one tenant without a
        name, for whom nothing is left.
        """
        own = self._active_by_tenant.get(tenant.name, 0)
        is_few = not tenant.name or own < self.settings.active_max // FEW_PART
        free = self.settings.active_max - len(self._active)
        has_place = free > (0 if is_few else left_to_few(self.settings.active_max))
        return has_place and (tenant.active_max is None or own < tenant.active_max)

    def _has_engine_room(self, engine: str) -> bool:
        return not engine or self._active_by_engine[engine] < most_at_one(self.settings.active_max)

    def _leave_engine(self, engine: str) -> None:
        self._active_by_engine[engine] -= 1
        if not self._active_by_engine[engine]:
            del self._active_by_engine[engine]

    def _waits_above(self, priority: int) -> bool:
        """Whether requests that go first, or whose turn is as near, wait for a place and could have it."""
        return any(
            queue.tenant.priority >= priority
            and self._has_room(queue.tenant)
            and queue.first(self._has_engine_room) is not None
            for queue in self._queues.values()
        )

    def _victim(self, tenant: Tenant, queue: _Queue | None) -> Waiting | None:
        """The request that gives its place up: the last one of the lowest priority below the tenant's own; or else of
        the tenant of the same priority that has most for its weight, and more than the tenant would have then.
        """

        def share(each: _Queue) -> float:
            return each.count / each.tenant.weight

        full = [each for each in self._queues.values() if each is not queue]
        lowest = min((each.tenant.priority for each in full), default=tenant.priority)
        if lowest < tenant.priority:
            return max((each for each in full if each.tenant.priority == lowest), key=share).last()
        most = max((each for each in full if each.tenant.priority == tenant.priority), key=share, default=None)
        own = (0 if queue is None else queue.count) + 1
        return most.last() if most is not None and share(most) > own / tenant.weight else None

    def _own_victim(self, queue: _Queue | None, engine: str) -> Waiting | None:
        """The tenant's own request that gives its place up: the last one for another engine, for which more wait than
        for this one.
        """
        if queue is None:
            return None
        last = queue.last()
        most, own = len(queue.by_engine[last.engine]), len(queue.by_engine.get(engine, ()))
        return last if last.engine and last.engine != engine and most > own + 1 else None

    def _forget_empty(self, queue: _Queue) -> None:
        """An idle tenant saves no turns up."""
        if not queue.count:
            del self._queues[queue.tenant.name]


def _quantum(tenant: Tenant) -> float:
    return QUANTUM_TOKENS * tenant.weight


def _is_crowding(queue: _Queue | None, waiting_count: int, queue_max: int) -> bool:
    """Whether a tenant has its part of the queue, where others have requests in it."""
    own = 0 if queue is None else queue.count
    return own < waiting_count and own >= TENANT_QUEUE_FRACTION * queue_max
