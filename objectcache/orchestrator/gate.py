"""The gate: requests wait here for their turn (`orchestrator.rules.admission`), with the clock and the event loop."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from statistics import median

from objectcache.adapters.portions import Portions
from objectcache.orchestrator.rules.admission import Admission, AdmissionSettings, Tenant, Verdict, retry_after_s

SERVICES_MAX = 256
WITHOUT_ENGINE = "no engine takes requests, and too many requests wait for one already"


class TooBusyError(Exception):
    """The request was refused: `status` is 429 where its tenant or the queue is full, 503 where it waited too long."""

    def __init__(self, message: str, status: int, retry_after_s: int) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after_s = retry_after_s


class Place:
    """A place among the running requests, for as long as an engine works for the request. `waited_s` is how long the
    request has waited for the place.
    """

    def __init__(self, gate: Gate, request_id: str, began_s: float) -> None:
        self._gate: Gate | None = gate
        self._request_id = request_id
        self._placed_s = time.monotonic()
        self.waited_s = self._placed_s - began_s

    def give_back(self) -> None:
        """The engine has done its work, so another request may run, although the client may not have its answer yet.
        A second call does nothing.
        """
        gate, self._gate = self._gate, None
        if gate is not None:
            gate.ended(self._request_id, time.monotonic() - self._placed_s)

    def may_go_to(self, engine: str) -> bool:
        """Whether the request may go to the only engine that can answer it; empty where several can."""
        return self._gate is None or self._gate.admission.may_go_to(self._request_id, engine)

    def sent(self, engine: str) -> None:
        """The request goes to this engine, and is at no other one any more."""
        if self._gate is not None:
            self._gate.sent(self._request_id, engine)


class Gate:
    """Used on one event loop."""

    def __init__(self, settings: AdmissionSettings) -> None:
        self.admission = Admission(settings)
        self._without_engine: Counter[str] = Counter()
        """The requests of each tenant that wait until an engine takes requests."""
        self._turns: dict[str, asyncio.Future[bool]] = {}
        self._only: dict[str, Callable[[], str]] = {}
        """For each request that waits for the only engine that can answer it: which engine that is now."""
        self._looked_at: set[str] = set()
        """Those of them that are to be looked at again."""
        self._portions = Portions()
        self._services_s: deque[float] = deque(maxlen=SERVICES_MAX)
        self.refused_count = 0
        self.expired_count = 0

    @asynccontextmanager
    async def admitted(
        self, request_id: str, tenant: Tenant, tokens: int, until_s: float, only_engine: Callable[[], str]
    ) -> AsyncIterator[Place]:
        """Run the block when it is the request's turn, which it waits for until `until_s`. `only_engine` gives the only
        engine that can answer it at the time; empty where several can. Raises TooBusyError.
        """
        began_s = time.monotonic()
        try:
            await self._wait(request_id, tenant, tokens, only_engine, until_s - began_s)
        except BaseException:
            self.admission.end(request_id)
            self._start()
            raise
        place = Place(self, request_id, began_s)
        try:
            yield place
        finally:
            place.give_back()

    @contextmanager
    def without_engine(self, tenant: Tenant) -> Iterator[None]:
        """A request waits for an engine within the block, and has no place meanwhile. As many wait as are still free
        for others: the first tenant has half of `queue_max`, the next one half of the rest. Raises TooBusyError.
        """
        waiting = self._without_engine
        if waiting[tenant.name] >= self.admission.settings.queue_max - waiting.total():
            self.refused_count += 1
            raise TooBusyError(WITHOUT_ENGINE, 503, self._retry_after_s())
        waiting[tenant.name] += 1
        try:
            yield
        finally:
            waiting[tenant.name] -= 1
            if not waiting[tenant.name]:
                del waiting[tenant.name]

    @property
    def without_engine_count(self) -> int:
        """Requests that wait for an engine."""
        return self._without_engine.total()

    def ended(self, request_id: str, service_s: float) -> None:
        """A request has given its place back, which it had for `service_s`."""
        self._services_s.append(service_s)
        self.admission.end(request_id)
        self._start()

    def sent(self, request_id: str, engine: str) -> None:
        """A running request is at this engine now: the one where it was before may have room for another."""
        if self.admission.sent(request_id, engine):
            self._start()

    def engines_changed(self) -> None:
        """An engine takes requests again: some that wait for another one may go there."""
        for request_id in self._only:
            if request_id not in self._looked_at:
                self._looked_at.add(request_id)
                self._portions.add(partial(self._look_again, request_id))

    def _look_again(self, request_id: str) -> None:
        self._looked_at.discard(request_id)
        only_engine = self._only.get(request_id)
        if only_engine is not None:
            self.admission.reassign(request_id, only_engine())
            self._start()

    def set_share(self, tenant: Tenant) -> None:
        """A tenant has another share from now on, for its waiting requests, too."""
        self.admission.set_share(tenant)
        self._start()

    def _start(self) -> None:
        for started in self.admission.start():
            turn = self._turns.get(started.request_id)
            if turn is not None and not turn.done():
                turn.set_result(True)

    async def _wait(
        self, request_id: str, tenant: Tenant, tokens: int, only_engine: Callable[[], str], within_s: float
    ) -> None:
        engine = only_engine()
        verdict = self.admission.offer(request_id, tenant, tokens, engine)
        while self.admission.displaced:
            turn = self._turns.get(self.admission.displaced.pop())
            if turn is not None and not turn.done():
                turn.set_result(False)
        if verdict is Verdict.RUNS:
            return
        if verdict is Verdict.REFUSED:
            self.refused_count += 1
            waiting = self.admission.waiting_count
            raise TooBusyError(f"{waiting} requests wait already", 429, self._retry_after_s())
        turn = self._turns[request_id] = asyncio.get_running_loop().create_future()
        if engine:
            self._only[request_id] = only_engine
        try:
            async with asyncio.timeout(within_s):
                is_admitted = await turn
        except TimeoutError:
            self.expired_count += 1
            waited_s = self.admission.settings.deadline_s
            raise TooBusyError(f"the request was not admitted in {waited_s:g} s", 503, self._retry_after_s()) from None
        finally:
            del self._turns[request_id]
            self._only.pop(request_id, None)
        if not is_admitted:
            self.refused_count += 1
            problem = "a request of a higher priority, or of a tenant with fewer, has taken the place in the queue"
            raise TooBusyError(problem, 429, self._retry_after_s())

    def _retry_after_s(self) -> int:
        mean_service_s = median(self._services_s) if self._services_s else 1.0
        return retry_after_s(self.admission.waiting_count, self.admission.settings.active_max, mean_service_s)
