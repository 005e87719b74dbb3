"""The orchestrator's parts, joined: engines, index, policy, gate, metadata."""

from __future__ import annotations

import aiohttp

from objectcache.adapters.careful_session import careful_session
from objectcache.adapters.document_budget import DocumentBudget
from objectcache.adapters.loop_share import LoopShare
from objectcache.adapters.metrics import process_text
from objectcache.adapters.recent_bytes import RecentBytes
from objectcache.adapters.threads import computed
from objectcache.adapters.whole_answers import UNENCODED
from objectcache.orchestrator.access import Access
from objectcache.orchestrator.bodies import Bodies
from objectcache.orchestrator.dispatch import Dispatch
from objectcache.orchestrator.fleet import Fleet
from objectcache.orchestrator.gate import Gate
from objectcache.orchestrator.meter import Meter
from objectcache.orchestrator.orders import Orders
from objectcache.orchestrator.prefill import Prefill
from objectcache.orchestrator.readers import Readers
from objectcache.orchestrator.receipts import Receipts
from objectcache.orchestrator.registry import EtcdRegistry, Followers
from objectcache.orchestrator.response_cache import ResponseCache
from objectcache.orchestrator.router import Router
from objectcache.orchestrator.rules.kept_responses import KeptResponses
from objectcache.orchestrator.rules.policies import (
    POLICIES,
    PolicyName,
    RoutingPolicy,
    Sessions,
)
from objectcache.orchestrator.rules.prefix_index import PrefixIndex
from objectcache.orchestrator.settings import OrchestratorSettings
from objectcache.orchestrator.store_lookups import StoreLookups
from objectcache.orchestrator.token_checks import TokenChecks
from objectcache.orchestrator.tokens import TokenCache, Tokens
from objectcache.orchestrator.under_way import UnderWay
from objectcache.orchestrator.writing import Writing

CONNECTIONS_MAX = 8192
IDLE_S = 4.0
"""An idle connection to an engine is used no more after so long. Engines end theirs after 5 s by default. A request
that is on its way then fails, and there may be no other engine.
"""
METRICS_EVERY_S = 1.0
"""Anybody may ask for the metrics, and they are made no more often."""
PROBES_MAX = 1024
"""Probes have connections of their own: clients that read slowly may keep all others, and engines are well then."""


class Orchestrator:
    """Everything but the HTTP surface, which uses the parts. Made, started and stopped on the event loop that it runs
    on.
    """

    def __init__(
        self, settings: OrchestratorSettings, registry: EtcdRegistry | None = None, engine_key: str | None = None
    ) -> None:
        """`engine_key` is the API key that engines ask for. Raises MetadataError, OSError."""
        self.settings = settings
        self._registry = registry
        self.under_way = UnderWay()
        self.sessions = Sessions()
        self.index = PrefixIndex()
        self.policy = policy_of(settings.policy, self.sessions)
        self.gate = Gate(settings.admission)
        self.meter = Meter()
        self.metrics = RecentBytes(self._metrics_text, METRICS_EVERY_S)
        self.receipts = Receipts(settings.receipts_max)
        self.responses = ResponseCache(settings.response_cache_bytes, settings.response_cache_s)
        self.kept_responses = KeptResponses()
        self.answers = DocumentBudget(settings.bodies_bytes_max, settings.bodies_bytes_max // 2)
        """The memory of answers that clients have not taken: as much as that of requests' bodies."""
        self.deciding = LoopShare()
        self.readers = Readers(settings.tokenizer, share=self.deciding)
        self._lookups = None if settings.store is None else StoreLookups(settings.store)
        self.writing = None if settings.data is None else Writing(settings.data, self.index, self.sessions)
        self._http = _session(CONNECTIONS_MAX)
        self._probing = _session(PROBES_MAX)
        self.fleet = Fleet(
            settings=settings,
            http=self._probing,
            index=self.index,
            policy=self.policy,
            writing=self.writing,
            registry=registry,
            engine_headers={} if engine_key is None else {"Authorization": f"Bearer {engine_key}"},
            on_up=self.gate.engines_changed,
        )
        self.engines = self.fleet.engines
        self.roster = self.fleet.roster
        self.orders = Orders(self.engines, settings.tenants.values(), self.gate, self.writing, registry)
        self.access = Access(settings, self.orders, engine_key)
        self.bodies = Bodies(settings, self.readers, self.access, keeps_answers=self.responses.is_on)
        self.tokens = Tokens(self._http, TokenCache(settings.token_cache_bytes), self.readers)
        """Decisions about long prompts take milliseconds each, and many requests may be woken at once."""
        places_max = settings.admission.active_max
        self.router = Router(
            engines=self.engines,
            index=self.index,
            policy=self.policy,
            lookups=self._lookups,
            pins=self.orders.pins,
            places_max=places_max,
        )
        self.token_checks = TokenChecks(self.router, self.meter)
        self.dispatch = Dispatch(
            self._http, self.readers, settings.first_byte_timeout_s, settings.stream_idle_timeout_s
        )
        self.prefill = Prefill(self.roster, self.router, self.dispatch, self.deciding, settings.prefill_tokens_min)

    async def start(self) -> None:
        """Join the engines of the settings and those that were registered before. Raises ValueError, OSError,
        MetadataError.
        """
        await self.readers.start()
        await self.fleet.start()
        if self.writing is not None:
            self.writing.start()
        if self._registry is not None:
            orders = self.orders
            await self._registry.start(Followers(self.fleet.follow, orders.follow_pins, orders.follow_quotas))
            self.fleet.know_all()

    async def stop(self) -> None:
        """End everything."""
        await self.token_checks.stop()
        await self.fleet.stop()
        if self._registry is not None:
            await self._registry.close()
        if self.writing is not None:
            await self.writing.stop()
        if self._lookups is not None:
            self._lookups.close()
        await self._http.close()
        await self._probing.close()
        await self.readers.stop()

    async def _metrics_text(self) -> bytes:
        """Prometheus' text. The numbers of the process take time for every open connection, so a thread reads them."""
        return self.meter.text(self) + await computed(process_text, is_long=True)


def _session(connections_max: int) -> aiohttp.ClientSession:
    connector = aiohttp.TCPConnector(limit=connections_max, limit_per_host=0, keepalive_timeout=IDLE_S)
    return careful_session(connector, headers=UNENCODED)


def policy_of(name: PolicyName, sessions: Sessions) -> RoutingPolicy:
    """A policy that uses these sessions, if it uses any."""
    kind = POLICIES[name]
    return kind(sessions) if name in (PolicyName.TTFT, PolicyName.PAPER) else kind()  # type: ignore[call-arg]
