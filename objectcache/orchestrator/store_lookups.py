"""Lookups in the store: how many chunks of a prompt it has, and at which rate it would deliver them now.

The keys are the engine's own: its connector publishes their namespaces, and which encoded chunks it takes. Engines with
the same deployment and bucket share a lookup, if they take the same ones. A store that does not answer in time counts
as empty; one that fails again and again is left alone for a while.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from descriptors.descriptor import Accept
from descriptors.errors import CallerError
from descriptors.layout import ChunkLayout
from descriptors.recompute import AdviceRequest, PrefillCosts
from nixl_client.client import Client
from nixl_client.connectors.vllm.naming import Deployment, KeyChain
from nixl_client.session.retries import Retries
from objectcache.adapters.breaker import Breaker
from objectcache.orchestrator.rules.engine_metrics import Published
from objectcache.orchestrator.rules.openai_requests import TokenIds
from objectcache.orchestrator.rules.prediction import Stored
from objectcache.orchestrator.settings import StoreSettings

KEYS_MAX = 65_536
"""Of one prompt, for all ranks of a deployment together."""
ENDPOINTS_MAX = 64
"""Stores that are asked; the one that was asked longest ago is forgotten first."""
THREADS = 16
ACTIVE_MAX = 4 * THREADS
"""Where so many lookups are under way, a further one would only wait: the request is routed without it."""
FAILURES_MAX = 3
PAUSE_S, PAUSE_S_MAX = 1.0, 30.0
"""After so many failures in a row the store is asked nothing for a while."""
WARN_EVERY_S = 60.0
"""A refusal comes with every prompt."""
LookupKey = tuple[Deployment, ChunkLayout, str, str, Accept | None]
"""The deployment, the shape of its chunks, its store's endpoint and bucket, and the encoded chunks it takes."""
_log = logging.getLogger(__name__)


def lookup_key(published: Published) -> LookupKey:
    """Everything that decides a lookup's answer: engines with the same key share it."""
    return published.deployment, published.layout, published.endpoint, published.bucket, published.accept


@dataclass(frozen=True, slots=True)
class _Store:
    """One endpoint. One that fails is left alone by itself."""

    client: Client
    breaker: Breaker


class StoreLookups:
    """The stores of some engines."""

    def __init__(self, settings: StoreSettings) -> None:
        self._settings = settings
        self._threads = ThreadPoolExecutor(THREADS, "objectcache-orchestrator-lookup")
        self._naming = ThreadPoolExecutor(1, "objectcache-orchestrator-naming")
        self._stores: OrderedDict[str, _Store] = OrderedDict()
        self._active_count = 0
        self._warned_s = -math.inf
        self.count = 0
        self.failure_count = 0

    async def find(self, published: Published, tokens: Sequence[int] | TokenIds, salt: str) -> Stored | None:
        """The store's answer; None where nothing is known. Prompts for an adapter are not looked up, since the names of
        their chunks depend on the adapter's weights.
        """
        if len(tokens) <= published.layout.chunk_tokens or self._active_count >= ACTIVE_MAX:
            return None
        try:
            store = self._store(self._settings.endpoint or published.endpoint)
        except ValueError as error:  # an engine may publish anything
            self.failure_count += 1
            _log.warning("a store that cannot be asked: %s", error)
            return None
        if store.breaker.is_open(time.monotonic()):
            return None
        self._active_count += 1
        try:
            keys = await self._named(published, tokens, salt)
            return None if keys is None else await self._asked(store, published, len(tokens), keys)
        finally:
            self._active_count -= 1

    async def _named(
        self, published: Published, tokens: Sequence[int] | TokenIds, salt: str
    ) -> list[tuple[str, ...]] | None:
        """The keys, from a thread, since a long prompt has many. None where they take too long or where there are none:
        that is the prompt's doing, and no failure of the store.
        """
        try:
            async with asyncio.timeout(self._settings.timeout_s):
                return await asyncio.get_running_loop().run_in_executor(
                    self._naming, self._keys, published, tokens, salt
                )
        except (ValueError, TimeoutError):
            return None

    async def _asked(
        self, store: _Store, published: Published, token_count: int, keys: Sequence[Sequence[str]]
    ) -> Stored | None:
        if store.breaker.wait_s(time.monotonic()) > 0:
            return None
        self.count += 1
        try:
            async with asyncio.timeout(self._settings.timeout_s):
                found = await asyncio.get_running_loop().run_in_executor(
                    self._threads, self._look_up, store, published, token_count, keys
                )
        except asyncio.CancelledError:
            store.breaker.gave_up()
            raise
        except CallerError as error:  # what an engine published is wrong: the store is well, and others ask it
            store.breaker.succeeded()
            self.failure_count += 1
            if time.monotonic() - self._warned_s > WARN_EVERY_S:
                self._warned_s = time.monotonic()
                _log.warning("a lookup for the bucket %s was refused: %s", published.bucket, error)
            return None
        except Exception as error:  # an answer may be anything
            self.failure_count += 1
            store.breaker.failed(time.monotonic())
            _log.warning("a lookup failed: %r", error)
            return None
        store.breaker.succeeded()
        return found

    def close(self) -> None:
        """Ask nothing more."""
        self._naming.shutdown(wait=False, cancel_futures=True)
        self._threads.shutdown(wait=False, cancel_futures=True)
        for store in self._stores.values():
            store.client.close()

    def _keys(self, published: Published, tokens: Sequence[int] | TokenIds, salt: str) -> list[tuple[str, ...]]:
        """The keys of each rank's chunks. Raises ValueError for what can have no keys."""
        deployment, chunk_tokens = published.deployment, published.layout.chunk_tokens
        count = min(len(tokens) // chunk_tokens, KEYS_MAX // deployment.rank_count)
        ranks = range(deployment.rank_count)
        return [KeyChain(deployment.namespace(rank, "", salt), chunk_tokens).keys(tokens, count) for rank in ranks]

    def _look_up(self, store: _Store, published: Published, token_count: int, keys: Sequence[Sequence[str]]) -> Stored:
        """The count of chunks and the rate. Costs of engines decide neither, and are not sent."""
        client, layout = store.client.in_bucket(published.bucket), published.layout
        request = AdviceRequest(token_count, layout, PrefillCosts(0.0))
        lease_s, accept = self._settings.lease_s, published.accept
        found = [client.advise(each, request, lease_s, accept=accept) for each in keys]
        count = min(matched for matched, _ in found)
        rate = min(advice.rate_bytes_per_s or 0.0 for _, advice in found) / len(keys)
        return Stored(count, layout, rate)

    def _store(self, endpoint: str) -> _Store:
        """The store of an endpoint, which an engine may have named."""
        known = self._stores.get(endpoint)
        if known is not None:
            self._stores.move_to_end(endpoint)
            return known
        made = self._stores[endpoint] = _Store(
            Client(
                endpoint,
                "",
                access_key=self._settings.access_key,
                secret_key=self._settings.secret_key,
                region=self._settings.region,
                timeout_s=max(1.0, self._settings.timeout_s),
                retries=Retries.of_engines(),
            ),
            Breaker(FAILURES_MAX, PAUSE_S, PAUSE_S_MAX),
        )
        if len(self._stores) > ENDPOINTS_MAX:
            self._threads.submit(self._stores.popitem(last=False)[1].client.close)
        return made
