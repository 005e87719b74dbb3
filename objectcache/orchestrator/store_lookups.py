"""Lookups in the store: how many chunks of a prompt it has, and at which rate it would deliver them now.

The keys are the engine's own: its connector or its tier publishes how they are made, and which encoded chunks it takes.
Engines with the same names and bucket share a lookup, if they take the same chunks. A store that does not answer in
time counts as empty; one that fails again and again is left alone for a while. An engine decides what is asked for it,
and how long that takes, and may publish another name at any time: what fails, and the threads that wait, count for the
engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from descriptors.descriptor import Accept
from descriptors.errors import CallerError
from descriptors.layout import ChunkLayout
from descriptors.recompute import AdviceRequest, PrefillCosts
from nixl_client.client import Client
from nixl_client.connectors.vllm.naming import Deployment
from nixl_client.connectors.vllm_tier.rules.published import TierNames
from nixl_client.session.retries import Retries
from objectcache.adapters.breaker import Breaker
from objectcache.adapters.rare_warnings import RareWarnings
from objectcache.orchestrator.rules.engine_metrics import Published
from objectcache.orchestrator.rules.openai_requests import TokenIds
from objectcache.orchestrator.rules.prediction import StoredPrefix
from objectcache.orchestrator.settings import StoreSettings

KEYS_MAX = 65_536
"""One prompt has no more keys, for all ranks of a deployment together."""
ENDPOINTS_MAX = 64
"""Stores that are asked; the one that was asked longest ago is forgotten first."""
THREADS = 32
THREADS_OF_ONE = 8
"""For the lookups of one engine."""
RANKS_ASKED_MAX = 8
"""Ranks write a chunk's parts together: of many ranks the first, the last and some between are asked."""
KNOWN_MAX = 1024
"""Lookup keys that are known, and engines; those that were asked for longest ago are forgotten first."""
ACTIVE_MAX = 2 * THREADS
"""Where so many lookups are under way, a further one would only wait: the request is routed without it."""
FAILURES_MAX = 3
PAUSE_S, PAUSE_S_MAX = 1.0, 30.0
"""After so many failures in a row the store is asked nothing for a while."""
LookupKey = tuple[Deployment | TierNames, ChunkLayout, str, str, Accept | None]
"""The names of the engine's chunks, their shape, its store's endpoint and bucket, and the encoded chunks it takes."""
_K = TypeVar("_K")
_T = TypeVar("_T")
_log = logging.getLogger(__name__)


def lookup_key(published: Published) -> LookupKey:
    """Everything that decides a lookup's answer: engines with the same key share it."""
    return published.names, published.layout, published.endpoint, published.bucket, published.accept


def _breaker() -> Breaker:
    return Breaker(FAILURES_MAX, PAUSE_S, PAUSE_S_MAX)


class _Asker:
    """The lookups that are made for one engine, whatever it publishes."""

    def __init__(self) -> None:
        self.breaker = _breaker()
        self.threads = asyncio.Semaphore(THREADS_OF_ONE)
        self.turn = asyncio.Semaphore(1)
        """One prompt at a time has its chunks named, since all engines share one thread for that: they take turns."""
        self.active_count = 0


class StoreLookups:
    """The stores of some engines."""

    def __init__(self, settings: StoreSettings) -> None:
        self._settings = settings
        self._threads = ThreadPoolExecutor(THREADS, "objectcache-orchestrator-lookup")
        self._naming = ThreadPoolExecutor(1, "objectcache-orchestrator-naming")
        self._stores: OrderedDict[str, Client] = OrderedDict()
        self._breakers: OrderedDict[LookupKey, Breaker] = OrderedDict()
        """A lookup that fails for one engine fails for all with the same key."""
        self._askers: OrderedDict[str, _Asker] = OrderedDict()
        self._active_count = 0
        self._warnings = RareWarnings(_log)
        self.count = 0
        self.failure_count = 0

    async def find(
        self, engines: Iterable[str], published: Published, tokens: Sequence[int] | TokenIds, salt: str
    ) -> StoredPrefix | None:
        """The store's answer for the engines that publish this; None where nothing is known. The lookup counts for the
        one of them that has fewest. Prompts for an adapter are not looked up, since the names of their chunks depend on
        the adapter's weights.
        """
        now_s = time.monotonic()
        breaker = _kept(self._breakers, lookup_key(published), _breaker)
        askers = [_kept(self._askers, engine, _Asker) for engine in engines]
        able = [each for each in askers if not each.breaker.is_open(now_s)]
        if not able or breaker.is_open(now_s):
            return None
        asker = min(able, key=lambda each: (each.breaker.is_trying, each.active_count))
        if len(tokens) <= published.layout.chunk_tokens or asker.active_count >= ACTIVE_MAX - self._active_count:
            return None
        try:
            store = self._store(self._settings.endpoint or published.endpoint)
        except ValueError as error:  # an engine may publish anything
            self.failure_count += 1
            self._warnings.warn("a store that cannot be asked: %.300r", error)
            return None
        self._active_count += 1
        asker.active_count += 1
        try:
            keys = await self._named(asker, published, tokens, salt)
            return (
                None
                if keys is None
                else await self._asked(
                    store, breaker, asker=asker, published=published, token_count=len(tokens), keys=keys
                )
            )
        finally:
            self._active_count -= 1
            asker.active_count -= 1

    async def _named(
        self, asker: _Asker, published: Published, tokens: Sequence[int] | TokenIds, salt: str
    ) -> list[tuple[str, ...]] | None:
        """The keys, from a thread, since a long prompt has many. None where they take too long or where there are none:
        that is the prompt's doing, and no failure of the store.
        """
        try:
            async with asyncio.timeout(self._settings.timeout_s):
                work = partial(self._keys, published, tokens, salt)
                return await _in_thread(self._naming, asker.turn, work)
        except (ValueError, TimeoutError):
            return None

    async def _asked(
        self,
        store: Client,
        breaker: Breaker,
        asker: _Asker,
        published: Published,
        token_count: int,
        keys: Sequence[Sequence[str]],
    ) -> StoredPrefix | None:
        if breaker.wait_s(time.monotonic()) > 0:
            return None
        if asker.breaker.wait_s(time.monotonic()) > 0:
            breaker.gave_up()
            return None
        breakers = (breaker, asker.breaker)
        self.count += 1
        try:
            async with asyncio.timeout(self._settings.timeout_s):
                until_s = time.monotonic() + self._settings.timeout_s
                work = partial(self._look_up, store, published, token_count, keys, until_s)
                found = await _in_thread(self._threads, asker.threads, work)
        except asyncio.CancelledError:
            for each in breakers:
                each.gave_up()
            raise
        except CallerError as error:  # what an engine published is wrong: the store is well, and others ask it
            for each in breakers:
                each.succeeded()
            self.failure_count += 1
            self._warnings.warn("a lookup for the bucket %.300r was refused: %.300r", published.bucket, error)
            return None
        except Exception as error:  # an answer may be anything
            self.failure_count += 1
            for each in breakers:
                each.failed(time.monotonic())
            self._warnings.warn("a lookup failed: %.300r", error)
            return None
        for each in breakers:
            each.succeeded()
        return found

    def close(self) -> None:
        """Ask nothing more."""
        self._naming.shutdown(wait=False, cancel_futures=True)
        self._threads.shutdown(wait=False, cancel_futures=True)
        for store in self._stores.values():
            store.close()

    def _keys(self, published: Published, tokens: Sequence[int] | TokenIds, salt: str) -> list[tuple[str, ...]]:
        """The keys of each rank's chunks. Raises ValueError for what can have no keys."""
        return named_chunks(published, tokens, salt)

    def _look_up(
        self,
        store: Client,
        published: Published,
        token_count: int,
        keys: Sequence[Sequence[str]],
        until_s: float,
    ) -> StoredPrefix:
        """The count of chunks and the rate. Costs of engines decide neither, and are not sent. No further rank is asked
        for when nobody waits for the answer any more, `until_s` by the monotonic clock. Raises TimeoutError then, and
        what the client raises.
        """
        client, layout = store.in_bucket(published.bucket), published.layout
        request = AdviceRequest(token_count, layout, PrefillCosts(0.0))
        lease_s, accept = self._settings.lease_s, published.accept
        found = []
        for each in keys:
            found.append(client.advise(each, request, lease_s, accept=accept))
            if time.monotonic() > until_s:
                raise TimeoutError("the store has not answered in time")
        count = min(min(matched, len(each)) for each, (matched, _) in zip(keys, found, strict=True))
        rate = min(advice.rate_bytes_per_s or 0.0 for _, advice in found) / published.names.rank_count
        return StoredPrefix(count, layout, rate)

    def _store(self, endpoint: str) -> Client:
        """The store of an endpoint, which an engine may have named."""
        known = self._stores.get(endpoint)
        if known is not None:
            self._stores.move_to_end(endpoint)
            return known
        made = self._stores[endpoint] = Client(
            endpoint,
            "",
            access_key=self._settings.access_key,
            secret_key=self._settings.secret_key,
            region=self._settings.region,
            timeout_s=max(1.0, self._settings.timeout_s),
            retries=Retries.of_engines(),
        )
        if len(self._stores) > ENDPOINTS_MAX:
            self._threads.submit(self._stores.popitem(last=False)[1].close)
        return made


def _kept(known: OrderedDict[_K, _T], key: _K, make: Callable[[], _T]) -> _T:
    """The value of a key, which is made where it is not known."""
    found = known.get(key)
    if found is None:
        found = known[key] = make()
        if len(known) > KNOWN_MAX:
            known.popitem(last=False)
    known.move_to_end(key)
    return found


def named_chunks(published: Published, tokens: Sequence[int] | TokenIds, salt: str) -> list[tuple[str, ...]]:
    """The keys of a prompt's chunks, for each rank that is asked, KEYS_MAX for all ranks together: an engine says how
    many tokens a chunk and a hash have, and how many ranks there are. Raises ValueError for what can have no keys.
    """
    names, chunk_tokens = published.names, published.layout.chunk_tokens
    count = min(len(tokens) // chunk_tokens, KEYS_MAX // (names.rank_count * names.hash_count(chunk_tokens)))
    ranks = _asked_ranks(names.rank_count)
    return [names.prompt_keys(rank, tokens, chunk_tokens, count, salt) for rank in ranks]


async def _in_thread(threads: ThreadPoolExecutor, places: asyncio.Semaphore, work: Callable[[], _T]) -> _T:
    """Do it in a thread. Its place is taken until it ends, also where nobody waits any more."""
    loop = asyncio.get_running_loop()

    def ended(_: Future[_T]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(places.release)

    await places.acquire()
    running = threads.submit(work)
    running.add_done_callback(ended)
    return await asyncio.wrap_future(running)


def _asked_ranks(rank_count: int) -> list[int]:
    """The ranks whose chunks are looked up, the first and the last among them."""
    if rank_count <= RANKS_ASKED_MAX:
        return list(range(rank_count))
    return [index * (rank_count - 1) // (RANKS_ASKED_MAX - 1) for index in range(RANKS_ASKED_MAX)]
