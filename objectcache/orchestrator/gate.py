"""The gate: requests wait here for their turn (`orchestrator.rules.admission`), with the clock and the event loop."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from statistics import median

from objectcache.orchestrator.rules.admission import Admission, AdmissionSettings, Tenant, Verdict

SERVICES_MAX = 256


class TooBusyError(Exception):
    """The request was refused: `status` is 429 where its tenant or the queue is full, 503 where it waited too long."""

    def __init__(self, message: str, status: int, retry_after_s: int) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after_s = retry_after_s


class Gate:
    """Used on one event loop."""

    def __init__(self, settings: AdmissionSettings) -> None:
        self.admission = Admission(settings)
        self._turns: dict[str, asyncio.Future[bool]] = {}
        self._services_s: deque[float] = deque(maxlen=SERVICES_MAX)
        self.refused_count = 0
        self.expired_count = 0

    @asynccontextmanager
    async def admitted(self, request_id: str, tenant: Tenant, tokens: int) -> AsyncIterator[float]:
        """Run the block when it is the request's turn; gives the seconds that it waited. Raises TooBusyError."""
        began_s = time.monotonic()
        try:
            await self._wait(request_id, tenant, tokens)
            placed_s = time.monotonic()
            yield placed_s - began_s
            self._services_s.append(time.monotonic() - placed_s)
        finally:
            self.admission.end(request_id)
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

    async def _wait(self, request_id: str, tenant: Tenant, tokens: int) -> None:
        verdict = self.admission.offer(request_id, tenant, tokens)
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
        try:
            async with asyncio.timeout(self.admission.settings.deadline_s):
                is_admitted = await turn
        except TimeoutError:
            self.expired_count += 1
            waited_s = self.admission.settings.deadline_s
            raise TooBusyError(f"the request was not admitted in {waited_s:g} s", 503, self._retry_after_s()) from None
        finally:
            del self._turns[request_id]
        if not is_admitted:
            self.refused_count += 1
            problem = "a request of a higher priority, or of a tenant with fewer, has taken the place in the queue"
            raise TooBusyError(problem, 429, self._retry_after_s())

    def _retry_after_s(self) -> int:
        return self.admission.retry_after_s(median(self._services_s) if self._services_s else 1.0)
