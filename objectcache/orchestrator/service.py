"""The orchestrator's parts, joined: engines, index, policy, gate, metadata."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import aiohttp
from aiohttp import web

from objectcache.adapters.document_budget import DocumentBudget
from objectcache.adapters.metrics import process_text
from objectcache.adapters.pieces import careful
from objectcache.adapters.whole_answers import UNENCODED
from objectcache.orchestrator.dispatch import AttemptFailed, Dispatch, Exchange, transfer_params
from objectcache.orchestrator.engine import Engine
from objectcache.orchestrator.events_feed import Turns
from objectcache.orchestrator.gate import Gate
from objectcache.orchestrator.metadata import NameTakenError
from objectcache.orchestrator.meter import Meter
from objectcache.orchestrator.orders import Orders
from objectcache.orchestrator.readers import Readers
from objectcache.orchestrator.receipts import Receipt, Receipts, described
from objectcache.orchestrator.registry import Engines, EtcdRegistry, Followers
from objectcache.orchestrator.response_cache import ResponseCache
from objectcache.orchestrator.router import NoEngineError, Prompt, Routed, Router
from objectcache.orchestrator.rules.kept_responses import KeptResponses
from objectcache.orchestrator.rules.openai_requests import Asked, RequestKind, TokenIds
from objectcache.orchestrator.rules.policies import (
    POLICIES,
    LeastTtft,
    PolicyName,
    RoutingPolicy,
    Sessions,
    SessionsAsTheyAre,
)
from objectcache.orchestrator.rules.prefix_index import PrefixIndex
from objectcache.orchestrator.settings import EngineSettings, OrchestratorSettings, Role, engine_settings
from objectcache.orchestrator.store_lookups import StoreLookups
from objectcache.orchestrator.tokens import TokenCache, Tokens
from objectcache.orchestrator.writing import Writing

UNMATCHED_MAX = 5
UNMATCHED_CHECK_S = 2.0
CONNECTIONS_MAX = 8192
RECEIPTS_TOLD = 32
"""A status has no more receipts; each may be asked for by its id."""
PREFILL_WAIT_S, PREFILL_STEP_S = 1.0, 0.05
"""A prefill engine writes its chunks behind its answer; so long they are waited for."""
_log = logging.getLogger(__name__)


class Orchestrator:
    """Everything but the HTTP surface. `start` and `stop` are called on the event loop that it runs on."""

    def __init__(
        self, settings: OrchestratorSettings, registry: EtcdRegistry | None = None, engine_key: str | None = None
    ) -> None:
        """`engine_key` is the API key that engines ask for. With a registry, engines are registered there, for others,
        too. Raises MetadataError, OSError.
        """
        self._settings = settings
        self._registry = registry
        self._engine_headers = {} if engine_key is None else {"Authorization": f"Bearer {engine_key}"}
        self._of_registry: set[str] = set()
        self._changing = asyncio.Lock()
        self.sessions = Sessions()
        self.index = PrefixIndex()
        self._turns = Turns()
        self.engines: dict[str, Engine] = {}
        self.gate = Gate(settings.admission)
        self.receipts = Receipts(settings.receipts_max)
        self.answers = DocumentBudget(settings.bodies_bytes_max, settings.bodies_bytes_max // 2)
        """The memory of answers that clients have not taken: as much as that of requests' bodies."""
        self.responses = ResponseCache(settings.response_cache_bytes, settings.response_cache_s)
        self.meter = Meter()
        self.readers = Readers(settings.tokenizer)
        self._policy = policy_of(settings.policy, self.sessions)
        self._lookups = None if settings.store is None else StoreLookups(settings.store)
        self._writing = None if settings.data is None else Writing(settings.data, self.index, self.sessions)
        self.orders = Orders(self.engines, settings.tenants.values(), self.gate, self._writing, registry)
        self._running: set[str] = set()
        self._kept = KeptResponses()
        self._up = asyncio.Event()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._checks: set[asyncio.Task[None]] = set()
        self._http: aiohttp.ClientSession | None = None
        self._tokens: Tokens | None = None
        self._dispatch: Dispatch | None = None
        self._router = Router(self.engines, self.index, self._policy, self._lookups, self.orders.pins)

    async def start(self) -> None:
        """Join the engines of the settings and those that were registered before. Raises ValueError, OSError."""
        settings = self._settings
        await self.readers.start()
        connector = careful(aiohttp.TCPConnector(limit=CONNECTIONS_MAX, limit_per_host=0))
        self._http = aiohttp.ClientSession(
            connector=connector, cookie_jar=aiohttp.DummyCookieJar(), headers=UNENCODED, auto_decompress=False
        )
        self._tokens = Tokens(self._http, TokenCache(settings.token_cache_bytes), self.readers)
        idle_s = settings.stream_idle_timeout_s
        self._dispatch = Dispatch(self._http, self.readers, settings.first_byte_timeout_s, idle_s)
        for each in settings.engines:
            await self._join(each)
        if self._writing is not None:
            for each, is_draining in self._writing.engines():
                if each.label not in self.engines:
                    if any(engine.url == each.url for engine in self.engines.values()):
                        continue  # an option or the config file has it under another name now
                    await self._join(each)
                self.engines[each.label].liveness.drain(is_wanted=is_draining)
            self._writing.start()
        if self._registry is not None:
            followers = Followers(self._registry_says, self.orders.follow_pins, self.orders.follow_quotas)
            await self._registry.start(followers)

    async def stop(self) -> None:
        """End everything."""
        for task in (*self._tasks.values(), *self._checks):
            task.cancel()
        await asyncio.gather(*self._tasks.values(), *self._checks, return_exceptions=True)
        if self._registry is not None:
            await self._registry.close()
        if self._writing is not None:
            await self._writing.stop()
        if self._lookups is not None:
            self._lookups.close()
        if self._http is not None:
            await self._http.close()
        await self.readers.stop()

    def is_serving(self, model: str = "") -> bool:
        """Whether some engine takes requests, for this model where one is named."""
        now_s = time.monotonic()
        return any(each.liveness.takes_requests(now_s) for each in self._decoding(model))

    def may_come(self, model: str) -> bool:
        """Whether no engine takes requests for the model now, and one may do so soon."""
        engines = self._decoding(model)
        return not self.is_serving(model) and any(not engine.liveness.is_draining for engine in engines)

    def no_engine(self, model: str) -> NoEngineError:
        """Why no engine takes requests for the model."""
        return self._router.no_engine(model)

    def _decoding(self, model: str) -> list[Engine]:
        engines = self.engines.values()
        return [each for each in engines if each.settings.role is not Role.PREFILL and each.serves(model)]

    async def engine_comes(self, within_s: float) -> bool:
        """Wait until an engine takes requests again; False where none does within that time."""
        try:
            async with asyncio.timeout(within_s):
                await self._up.wait()
        except TimeoutError:
            return False
        return True

    def _drained(self, name: str, *, is_wanted: bool) -> None:
        self.engines[name].liveness.drain(is_wanted=is_wanted)
        if not is_wanted:
            self._is_up()

    def _is_up(self) -> None:
        up, self._up = self._up, asyncio.Event()
        up.set()

    @property
    def checks_count(self) -> int:
        """Comparisons of prompts with events that are to come."""
        return len(self._checks)

    def begin(self, request_id: str, tenant_name: str) -> bool:
        """A request has come. False where one of this id is being answered, or another tenant's receipt has it."""
        kept = self.receipts.find(request_id)
        if request_id in self._running or (kept is not None and kept.tenant != tenant_name):
            return False
        self._running.add(request_id)
        return True

    def models(self) -> list[Mapping[str, Any]]:
        """The models of all engines, each once."""
        found: dict[str, Mapping[str, Any]] = {}
        for engine in self.engines.values():
            for name, document in engine.models.items():
                found.setdefault(name, document)
        return list(found.values())

    def identity(self, model: str) -> str:
        """The weights behind a model's name, as its engines say; empty where no engine is known to have the model. An
        answer that is kept is of this identity only.
        """
        cards = [engine.models[model] for engine in self.engines.values() if model in engine.models]
        return "\n".join(sorted({f"{each.get('root')} {each.get('parent')}" for each in cards}))

    async def tokens_of(self, asked: Asked, headers: Mapping[str, str], tenant: str = "") -> TokenIds:
        """A prompt's tokens. Raises NoTokensError."""
        assert self._tokens is not None
        now_s = time.monotonic()
        able = [
            engine
            for engine in self.engines.values()
            if engine.liveness.takes_requests(now_s) and engine.serves(asked.model)
        ]
        return await self._tokens.of(asked, able, headers, tenant)

    async def prompt(self, asked: Asked, tokens: Sequence[int] | TokenIds, receipt: Receipt) -> Prompt:
        """The prompt with the store's answers."""
        return await self._router.prompt(asked, tokens, receipt)

    def decide(
        self, asked: Asked, request_id: str, prompt: Prompt | None, tenant: str = "", *, without: Collection[str] = ()
    ) -> Routed:
        """The engine. Raises NoEngineError."""
        began_s = time.perf_counter()
        home = self._kept.engine(tenant, asked.previous) if asked.previous else None
        home = home if home in self.engines else None
        if asked.previous and home is None and self._settings.tenants:
            raise NoEngineError(f"no response {asked.previous!r} is known here", 404)
        routed = self._router.decide(asked, request_id, prompt, without=without, home=home)
        self.meter.decided(routed.decision, time.perf_counter() - began_s)
        return routed

    async def send(self, exchange: Exchange, routed: Routed, prompt: Prompt | None) -> web.StreamResponse:
        """One attempt; the engine's books have the request until it ends, however it ends."""
        assert self._dispatch is not None
        receipt, engine = exchange.receipt, routed.engine
        self._router.sent(routed, exchange.asked, receipt.request_id, prompt)
        is_complete = False
        try:
            response = await self._dispatch.send(exchange, routed)
            is_complete = response.status == 200 and not exchange.is_broken
            if is_complete and exchange.response_id:
                self._kept.note(exchange.tenant, exchange.response_id, engine.name)
            return response
        except AttemptFailed:
            self.meter.failed_over()
            raise
        finally:
            engine.books.end(receipt.request_id, time.monotonic(), is_complete=is_complete)
            if is_complete and prompt is not None:
                self._check_tokens(engine, prompt)
            if self._writing is not None and exchange.asked.session:
                self._writing.note_session(exchange.asked.session, engine.name)

    def blame(self, names: Sequence[str], model: str) -> None:
        """These engines have refused a request that another one has answered. One that does not say that it has the
        model is not to blame.
        """
        for name in names:
            if name in self.engines and model in self.engines[name].models:
                self.engines[name].failed("it refuses what another engine answers")

    async def prefilled(self, exchange: Exchange, prompt: Prompt | None) -> Prompt | None:
        """Where there are prefill engines and the prompt is long, have one compute it first; the decode engine then has
        it from the store, or from the prefill engine itself, whose `kv_transfer_params` go on with the request.
        """
        asked, receipt = exchange.asked, exchange.receipt
        if prompt is None or not asked.is_generating or not self._has_prefill():
            return prompt
        if len(prompt.tokens) < self._settings.prefill_tokens_min:
            return prompt
        assert self._dispatch is not None
        tried: list[str] = []
        while len(tried) < 2:
            try:
                routed = self._router.decide(asked, receipt.request_id, prompt, without=tried, role=Role.PREFILL)
            except NoEngineError:
                return prompt
            engine, prediction = routed.engine, routed.decision.prediction
            there = max(prediction.held_tokens, prediction.stored_tokens)
            if len(prompt.tokens) - there <= self._settings.prefill_tokens_min:
                return prompt
            tried.append(engine.name)
            self._router.sent(routed, asked, receipt.request_id, prompt)
            try:
                body = await self._dispatch.edited(exchange, *_prefill_changes(exchange, routed))
                answer = await self._dispatch.ask(engine, exchange.path, exchange.headers, body)
            except AttemptFailed as error:
                receipt.attempts.append({"engine": engine.name, "error": str(error), "role": "prefill"})
                continue
            finally:
                engine.books.end(receipt.request_id, time.monotonic(), is_complete=False)
            receipt.attempts.append({"engine": engine.name, "status": 200, "role": "prefill"})
            params = answer.get("kv_transfer_params")
            if isinstance(params, dict) and params:
                exchange.transfer_params = params
                return prompt
            return await self._stored(asked, prompt, receipt)
        return prompt

    def ended(self, receipt: Receipt) -> None:
        """A request is over."""
        self._running.discard(receipt.request_id)
        self.receipts.add(receipt)
        self.meter.ended(receipt)

    async def explain(self, asked: Asked, headers: Mapping[str, str]) -> dict[str, Any]:
        """The decision about a request, with every engine's terms; nothing is sent. Raises NoEngineError,
        NoTokensError.
        """
        tokens = asked.tokens
        if tokens is None and asked.to_tokenize is not None:
            tokens = await self.tokens_of(asked, headers)
        prompt = None if tokens is None or not len(tokens) else await self._router.prompt(asked, tokens)
        everything = LeastTtft(SessionsAsTheyAre(self.sessions), predicts_all=True)
        every = self._router.decide(asked, "", prompt, policy=everything)
        policy = everything if self._settings.policy is PolicyName.TTFT else self._policy
        chosen = every if policy is everything else self._router.decide(asked, "", prompt, policy=policy)
        return {
            "engine": chosen.engine.name,
            "reason": chosen.decision.reason,
            "policy": self._settings.policy.value,
            "prompt_tokens": None if tokens is None else len(tokens),
            "prefix": chosen.prefix or None,
            "candidates": [described(each) for each in every.decision.predictions],
        }

    async def register(self, document: Mapping[str, Any]) -> dict[str, Any]:
        """Join an engine, for good where there is a place for metadata. Raises ValueError, MetadataError."""
        settings = engine_settings(document)
        for known in self.engines.values():
            if (known.name == settings.label) != (known.url == settings.url):
                raise NameTakenError(f"the engine {known.name} has this name, or this URL")
        if self._registry is not None:
            await self._registry.add(settings)
        elif self._writing is not None:
            await self._writing.add_engine(settings)
        if self._registry is None:
            async with self._changing:
                if settings.label in self.engines:
                    await self._leave(settings.label)
                await self._join(settings)
        return {"name": settings.label, "url": settings.url}

    async def remove(self, name: str) -> None:
        """Forget an engine. Raises KeyError."""
        if name in self._of_registry and self._registry is not None:
            await self._registry.remove(name)
            return
        async with self._changing:
            await self._leave(name)
        if self._writing is not None:
            await self._writing.remove_engine(name)

    async def drain(self, name: str, *, is_wanted: bool) -> None:
        """Send an engine no new requests, or send them again. Raises KeyError, MetadataError."""
        settings = self.engines[name].settings
        self._drained(name, is_wanted=is_wanted)
        if name in self._of_registry and self._registry is not None:
            await self._registry.add(settings, is_draining=is_wanted)
        elif self._writing is not None:
            await self._writing.drain(name, is_wanted=is_wanted)

    def status(self) -> dict[str, Any]:
        """The state of everything, for people and programs."""
        now_s = time.monotonic()
        engines = []
        for engine in self.engines.values():
            load = engine.books.load(now_s)
            engines.append(
                {
                    "name": engine.name,
                    "url": engine.url,
                    "role": engine.settings.role.value,
                    "status": engine.liveness.status(now_s).value,
                    "last_error": engine.liveness.last_error,
                    "models": list(engine.models),
                    "active": load.active_count,
                    "waiting": load.waiting_count,
                    "queue_s": load.queue_s,
                    "requests_max": engine.books.requests_max,
                    "kv_tokens": engine.report.kv_tokens,
                    "blocks": sum(self.index.held_count(name) for name in engine.index_names),
                    "events": {name: feed.status.value for name, feed in engine.feeds.items()},
                    "event_gaps": sum(feed.gap_count for feed in engine.feeds.values()),
                    "token_us": engine.prefill.token_us,
                    "has_store": engine.published is not None,
                }
            )
        admission = self.gate.admission
        return {
            "policy": self._settings.policy.value,
            "engines": engines,
            "active": admission.active_count,
            "waiting": admission.waiting_count + self.gate.without_engine_count,
            "blocks": self.index.block_count,
            "receipts": [receipt.to_json() for receipt in self.receipts.last(RECEIPTS_TOLD)],
        }

    def metrics_text(self) -> bytes:
        """Prometheus' text."""
        return self.meter.text(self) + process_text()

    def _registry_says(self, engines: Engines) -> None:
        task = asyncio.create_task(self._follow_registry(dict(engines)))
        self._checks.add(task)
        task.add_done_callback(self._checks.discard)

    async def _follow_registry(self, engines: Engines) -> None:
        """Join and leave engines as the registry has them. Those of options and of the own file stay."""
        async with self._changing:
            for name in self._of_registry - set(engines):
                self._of_registry.discard(name)
                if name in self.engines:
                    await self._leave(name)
            for name, (settings, is_draining) in engines.items():
                known = self.engines.get(name)
                if known is not None and name not in self._of_registry:
                    continue
                if known is not None and known.settings != settings:
                    await self._leave(name)
                    known = None
                if known is None:
                    try:
                        await self._join(settings)
                    except ValueError as error:
                        _log.warning("the engine %s of the registry does not join: %s", name, error)
                        continue
                    self._of_registry.add(name)
                self._drained(name, is_wanted=is_draining)

    def _has_prefill(self) -> bool:
        """Whether some prefill engine takes requests."""
        now_s = time.monotonic()
        return any(
            engine.settings.role is Role.PREFILL and engine.liveness.takes_requests(now_s)
            for engine in self.engines.values()
        )

    async def _join(self, settings: EngineSettings) -> None:
        assert self._http is not None
        writing = self._writing
        name = settings.label
        if name in self.engines:
            raise ValueError(f"two engines have the name {name}")
        known = None if writing is None else await writing.warm(name)
        engine = self.engines[name] = Engine(
            settings,
            self._http,
            self.index,
            self._settings.poll_s,
            self._settings.probe_timeout_s,
            known,
            writing,
            self._engine_headers,
            self._is_up,
            self._turns,
        )
        self._tasks[name] = asyncio.create_task(engine.run())

    async def _leave(self, name: str) -> None:
        engine = self.engines.pop(name)
        task = self._tasks.pop(name)
        if self._writing is not None:
            await self._writing.flush()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        for each in self.index.names_of(engine.name):
            self.index.remove_engine(each)
        self._policy.forget_engine(name)

    async def _stored(self, asked: Asked, prompt: Prompt, receipt: Receipt) -> Prompt:
        """Wait until the store has the prompt, for a short while."""
        until_s = time.monotonic() + PREFILL_WAIT_S
        while True:
            found = await self._router.prompt(asked, prompt.tokens, receipt)
            stored = [each for each in found.stored.values() if each is not None]
            is_there = any(each.chunk_count >= (len(prompt.tokens) - 1) // each.layout.chunk_tokens for each in stored)
            if is_there or time.monotonic() >= until_s:
                return found
            await asyncio.sleep(PREFILL_STEP_S)

    def _check_tokens(self, engine: Engine, prompt: Prompt) -> None:
        """Some time after an answer the engine's events must show the prompt's first block; where they do not, again
        and again, the tokens here are others than the engine's.
        """

        async def check() -> None:
            await asyncio.sleep(UNMATCHED_CHECK_S)
            has_come = self._router.has_come(engine, prompt)
            if has_come is None:
                return
            engine.unmatched_count = 0 if has_come else engine.unmatched_count + 1
            if engine.unmatched_count == UNMATCHED_MAX:
                self.meter.mismatched()
                _log.warning(
                    "the blocks of %d prompts in a row did not show in the events of %s: the tokens that requests are"
                    " routed by are not the engine's own; is the tokenizer of its model?",
                    UNMATCHED_MAX,
                    engine.name,
                )

        if len(self._checks) < 1024:
            task = asyncio.create_task(check())
            self._checks.add(task)
            task.add_done_callback(self._checks.discard)


def policy_of(name: PolicyName, sessions: Sessions) -> RoutingPolicy:
    """A policy that uses these sessions, if it uses any."""
    kind = POLICIES[name]
    return kind(sessions) if name in (PolicyName.TTFT, PolicyName.PAPER) else kind()  # type: ignore[call-arg]


def _prefill_changes(exchange: Exchange, routed: Routed) -> tuple[tuple[str, ...], dict[str, Any]]:
    """The difference of a prefill engine's request, as fields to drop and to put: one token, no stream, and the KV is
    to be had by another engine.
    """
    dropped = (
        "stream_options",
        "max_completion_tokens",
        "max_output_tokens",
        "max_tokens",
        "min_tokens",
        "logprobs",
        "top_logprobs",
        "prompt_logprobs",
        "echo",
        "n",
        "best_of",
        "return_token_ids",
    )
    most = "max_output_tokens" if exchange.asked.kind is RequestKind.RESPONSES else "max_tokens"
    remote = {"do_remote_decode": True, "do_remote_prefill": False}
    params = {**transfer_params(exchange, routed), **remote}
    return dropped, {most: 1, "stream": False, "kv_transfer_params": params}
