"""Lookups beside the scheduler: a server that is slow to answer must not hold up the requests that run."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

from descriptors.descriptor import Accept
from descriptors.recompute import AdviceRequest
from nixl_client.client import Client
from nixl_client.connectors.counters import Counters
from nixl_client.connectors.vllm.options import VllmOptions

KEYS_MAX = 65_536
THREADS = 8
PENDING_MAX = 64
FIRST_WAIT_S = 0.02
"""How long the scheduler waits for an answer at first; most come in a few milliseconds."""
NEXT_WAIT_S = 0.002
"""And in each step after that, so that an engine that has nothing else to do does not spin."""
SILENCE_MAX_S = 60.0
Keys = tuple[tuple[str, ...], ...]
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FoundOnRanks:
    """How many chunks, from the first, are stored on every rank, and the rate the server offers one of them (0: it
    paces nothing, or was not asked).
    """

    chunk_count: int = 0
    rate_bytes_per_s: float = 0.0


@dataclass(frozen=True, slots=True)
class _Pending:
    future: Future[FoundOnRanks]
    since_s: float


class Lookups:
    """Lookups of how much of each request is stored, in threads. After a failure nothing is asked for `retry_s`, and
    after each further failure for twice as long as before, at most SILENCE_MAX_S. Used by the scheduler's thread.
    """

    def __init__(
        self,
        client: Client,
        options: VllmOptions,
        counters: Counters,
        accept: Accept | None = None,
        copies: int = 1,
    ) -> None:
        """Chunks that are stored encoded count as far as `accept` takes them. So many workers load each chunk."""
        self._client = client
        self._copies = copies
        self._accept = accept
        self._options = options
        self._counters = counters
        self._pool = ThreadPoolExecutor(THREADS, "objectcache-lookup")
        self._pending: dict[str, _Pending] = {}
        self._silent_until_s = 0.0
        self._silence_s = 0.0

    @property
    def is_silent(self) -> bool:
        """Whether nothing is asked for now."""
        return time.monotonic() < self._silent_until_s

    def ask(
        self, request_id: str, keys: Callable[[], Keys], compute: AdviceRequest | None = None
    ) -> FoundOnRanks | None:
        """How much is stored; None: not known yet, ask again. `keys` are each rank's; with `compute` the server is told
        what the engine's steps cost, and asked for its rate. A lookup that fails counts as nothing stored, since the
        engine can compute.
        """
        pending = self._pending.get(request_id)
        if pending is None:
            if len(self._pending) >= PENDING_MAX:
                return None
            try:
                asked = keys()
            except Exception as error:
                return self._fail(request_id, error)
            if not asked[0]:
                return FoundOnRanks()
            self._counters.add(lookups=1)
            pending = _Pending(self._pool.submit(self._look_up, asked, compute), time.monotonic())
            self._pending[request_id] = pending
            wait_s = FIRST_WAIT_S
        else:
            wait_s = NEXT_WAIT_S
        if request_id == next(iter(self._pending)):  # one wait a step, however many are asked for
            wait([pending.future], wait_s)
        waited_s = time.monotonic() - pending.since_s
        if not pending.future.done() and waited_s < self._options.lookup_timeout_s:
            return None
        self.forget(request_id)
        self._counters.add(lookup_s=waited_s)
        try:
            return pending.future.result(0)
        except Exception as error:
            return self._fail(request_id, error)

    def forget(self, request_id: str) -> None:
        """Nobody waits for the answer any more."""
        pending = self._pending.pop(request_id, None)
        if pending is not None:
            pending.future.cancel()

    def silence(self) -> None:
        """Ask nothing for a while: the store does not serve."""
        first_s = self._options.retry_s
        self._silence_s = min(max(2 * self._silence_s, first_s), max(first_s, SILENCE_MAX_S))
        self._silent_until_s = time.monotonic() + self._silence_s

    def end_silence(self) -> None:
        """The store serves: the next silence is a short one."""
        self._silence_s = 0.0

    def close(self) -> None:
        """Drop what is under way."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _look_up(self, keys: Sequence[Sequence[str]], compute: AdviceRequest | None) -> FoundOnRanks:
        """Ranks load at the same time: each has its part of the rate."""
        lease_s, accept = self._options.lease_s, self._accept
        if compute is None:
            return FoundOnRanks(min(self._client.lookup(each[:KEYS_MAX], lease_s, accept=accept) for each in keys))
        answers = [self._client.advise(each[:KEYS_MAX], compute, lease_s, accept=accept) for each in keys]
        rate = min(advice.rate_bytes_per_s or 0.0 for _, advice in answers)
        return FoundOnRanks(min(matched for matched, _ in answers), rate / (len(keys) * self._copies))

    def _fail(self, request_id: str, error: Exception) -> FoundOnRanks:
        _log.warning("request %s: the lookup failed, taken as a miss: %r", request_id, error)
        self._counters.add(lookup_failures=1)
        self.silence()
        return FoundOnRanks()
