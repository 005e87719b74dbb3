"""One engine as the orchestrator sees it: probes, its metrics, its events, and the books of what was sent to it."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeGuard

import aiohttp

from descriptors.recompute import PrefillCosts
from objectcache.adapters.caller import CALLER
from objectcache.adapters.rare_warnings import RareWarnings
from objectcache.orchestrator.engine_blocks import EngineBlocks, Source
from objectcache.orchestrator.engine_calls import EngineCalls
from objectcache.orchestrator.engine_watchers import EngineWatchers
from objectcache.orchestrator.events_feed import FeedLog, FeedTurns
from objectcache.orchestrator.rules.books import EngineBooks
from objectcache.orchestrator.rules.engine_metrics import METRICS_BYTES_MAX, EngineReport, Published, read_metrics
from objectcache.orchestrator.rules.kv_events import KnownBatch
from objectcache.orchestrator.rules.liveness import EngineStatus, Liveness
from objectcache.orchestrator.rules.observed_costs import (
    EXACT,
    TOKEN_US_DEFAULT,
    Correction,
    ObservedCosts,
    ObservedSteps,
    Output,
)
from objectcache.orchestrator.rules.prefix_index import RANKS_MAX, PrefixIndex
from objectcache.orchestrator.settings import EngineSettings

REQUESTS_MAX_DEFAULT = 256
MODELS_EVERY_S = 2.0
SOURCES_EVERY_S = 10.0
PROBE_EJECTED_S = 2.0
"""An engine that takes no requests is probed so often."""
_RANK = re.compile("[0-9]{1,4}")
MODELS_MAX, TEXT_MAX = 1000, 1024
MODELS_BYTES_MAX = 256 << 10
ENDPOINT_CHARACTERS_MAX = 256
_log = logging.getLogger(__name__)


class Engine:
    """An engine that was registered. `run` keeps what is known of it up to date until it is cancelled."""

    def __init__(
        self,
        settings: EngineSettings,
        http: aiohttp.ClientSession,
        index: PrefixIndex,
        poll_s: float,
        probe_timeout_s: float,
        known: Mapping[str, KnownBatch] | None = None,
        log: FeedLog | None = None,
        headers: Mapping[str, str] | None = None,
        on_up: Callable[[], None] | None = None,
        turns: FeedTurns | None = None,
        is_needed: Callable[[], bool] | None = None,
    ) -> None:
        """`headers` go with every request of the orchestrator's own. `on_up` is called when the engine takes requests
        again, or takes them for other models. `is_needed` says whether no other one takes its requests now. For
        `known`, `log` and `turns` see EngineBlocks.
        """
        self.settings = settings
        self.name = settings.label
        self.url = settings.url.rstrip("/")
        self.liveness = Liveness()
        self.books = EngineBooks(settings.requests_max or REQUESTS_MAX_DEFAULT)
        self.observed = ObservedCosts(settings.token_us or TOKEN_US_DEFAULT)
        self.steps = ObservedSteps()
        self.report = EngineReport(0, 0)
        self.models: Mapping[str, Mapping[str, Any]] = {}
        """The engine's description of each of its models, by the model's name."""
        self.unmatched_count = 0
        """Requests in a row whose blocks did not come in events: the tokens may be others than the engine's."""
        turns = turns or FeedTurns()
        self._calls = EngineCalls(http, self.url, probe_timeout_s, headers, turns.sayings)
        self.warnings = RareWarnings(_log)
        self.blocks = EngineBlocks(
            name=self.name, index=index, known=known, log=log, turns=turns, warnings=self.warnings
        )
        self._poll_s = poll_s
        self._sources_s = 0.0
        self.watchers = EngineWatchers()
        self._refused: dict[str, bool] = {}
        """Models for which it has refused what another engine answers; whether it has not said since that it has them.
        """
        self._on_up = on_up
        self._is_needed = is_needed
        self._probed_s = float("-inf")
        self._is_asked = False
        self._models_s = -MODELS_EVERY_S

    @property
    def published(self) -> Published | None:
        """The deployment that its connector publishes."""
        return self.report.published

    @property
    def block_tokens(self) -> int | None:
        """The tokens of its blocks, as its events or its metrics say."""
        return self.blocks.block_tokens or self.report.block_tokens

    @property
    def prefill(self) -> PrefillCosts:
        """Its costs: those that its connector fitted, else those that were seen here."""
        published = self.published
        return self.observed.costs if published is None or published.prefill is None else published.prefill

    @property
    def correction(self) -> Correction:
        """The correction of its costs. Those that were seen here need none."""
        published = self.published
        return self.books.correction if published is not None and published.prefill is not None else EXACT

    def serves(self, model: str) -> bool:
        """Whether it has the model; an engine that has not said so yet is taken to have it."""
        return not model or ((not self.models or model in self.models) and not self._refused.get(model, False))

    def adapter(self, model: str) -> str:
        """The adapter that the model's name stands for at this engine; none for a model of its own."""
        return model if self.models.get(model, {}).get("parent") else ""

    def succeeded(self) -> None:
        """A probe or a request went well. Requests that wait for an engine are told where it takes requests again."""
        now_s = time.monotonic()
        took = self.liveness.takes_requests(now_s)
        self.liveness.succeeded(now_s)
        if not took and self.liveness.takes_requests(now_s) and self._on_up is not None:
            self._on_up()

    def failed(self, error: str, *, is_certain: bool = False, is_probe: bool = False) -> None:
        """A probe or a request failed. Requests that wait for an engine which is ejected are told."""
        now_s = time.monotonic()
        was_ejected = self.liveness.is_ejected(now_s)
        is_needed = False
        if not is_certain and not is_probe and self._is_needed is not None:
            is_needed = self._is_needed()  # looks at all engines: probes of a thousand that are down must not
        self.liveness.failed(now_s, error, is_certain=is_certain, is_probe=is_probe, is_needed=is_needed)
        if not was_ejected and self.liveness.is_ejected(now_s):
            self.warnings.warn("%s gets no requests for %.0f s: %.300r", self.name, self.liveness.ejected_s, error)
            self._sources_s = 0.0
            self.blocks.forget_expected()
            self.watchers.tell()

    def refused(self, model: str) -> None:
        """It has refused a request for a model of its own, which another engine has answered. An adapter may just have
        been unloaded there: it is asked for its models. One that says once more that it has the model is to blame.
        """
        if self._refused.get(model) is False:
            self.failed("it refuses what another engine answers")
        else:
            self._refused[model] = True
            self._models_s = -MODELS_EVERY_S

    def status(self) -> EngineStatus:
        """Its state now."""
        return self.liveness.status(time.monotonic())

    async def run(self) -> None:
        """Probe it and read its events until cancelled."""
        CALLER.set(self.name)  # large metrics of one engine take no turns of others
        try:
            while True:
                try:
                    if self.settings.events is not None and not self.blocks.feeds:
                        self.blocks.listen([(0, self.settings.events, self.settings.replay, self.settings.topic)])
                    await self._poll()
                    await self._find_events()
                    await self.blocks.tend()
                except Exception as error:
                    self.warnings.warn("polling %s failed", self.name, error=error)
                await asyncio.sleep(self._poll_s)
        finally:
            await self.blocks.stop()

    async def see_out(self) -> None:
        """Probe an engine that has left until no request is at it any more: where it fails, they are told."""
        while self.watchers:
            await self._is_well()
            await asyncio.sleep(self._poll_s)

    async def _find_events(self) -> None:
        """Ask an engine that is up where its events are, now and then: after a restart they may be elsewhere."""
        now_s = time.monotonic()
        if self.settings.events is not None or not self.liveness.takes_requests(now_s) or now_s < self._sources_s:
            return
        self._sources_s = now_s + SOURCES_EVERY_S
        host = self.url.split("://", 1)[-1].rsplit(":", 1)[0]
        said = await self._calls.json(
            "/kv_event_sources", lambda found: None if found is None else event_sources(found)
        )
        if said is None:
            return
        named, left_out_count = said
        if left_out_count:
            problem = "%s names %d sources of events that cannot be used: an endpoint is tcp://HOST:PORT"
            self.warnings.warn(problem, self.name, left_out_count)
        sources = [
            (rank, reachable(events, host), reachable(replay, host) if replay else None, topic)
            for rank, events, replay, topic in named
        ]
        self.blocks.found(sources)

    async def _poll(self) -> None:
        """One probe, and its metrics where it is up."""
        began_s = time.monotonic()
        is_ejected = self.liveness.status(began_s) is EngineStatus.EJECTED
        if is_ejected and began_s - self._probed_s < min(PROBE_EJECTED_S, 4 * self._poll_s):
            return
        self._probed_s = began_s
        if not await self._is_well():
            return
        if is_ejected:
            self.liveness.revived(time.monotonic())
        await self._read_metrics()
        if time.monotonic() - self._models_s >= MODELS_EVERY_S:
            await self._read_models()
        await self._have_published()
        self.succeeded()

    async def _is_well(self) -> bool:
        illness = await self._calls.illness()
        if illness is None:
            return True
        if illness.is_refused:
            self._process_ended()
        self.failed(illness.error, is_certain=illness.is_refused, is_probe=True)
        return False

    def _process_ended(self) -> None:
        """The process is another one, or none: it holds nothing, and may have other models and events elsewhere."""
        self.blocks.process_ended()
        self._sources_s, self._models_s = 0.0, -MODELS_EVERY_S

    async def _read_metrics(self) -> None:
        try:
            report = await self._calls.read("/metrics", METRICS_BYTES_MAX, read_metrics)
        except ValueError as error:
            self.warnings.warn("metrics of %s cannot be read: %.300r", self.name, error)
            return
        if report is None:
            return
        if report.started_at != self.report.started_at and self.report.started_at is not None:
            self._process_ended()
        self.report = report
        now_s = time.monotonic()
        self.books.correct(report.running, report.waiting, now_s)
        self.steps.note(Output(now_s, report.running, report.generated_tokens, report.answer_count))
        if self.settings.requests_max is None and self.report.running:
            is_full = self.report.waiting > 0  # as many run as it takes, be it for --max-num-seqs or for its KV blocks
            known = self.books.requests_max
            self.books.requests_max = self.report.running if is_full else max(known, self.report.running)

    async def _have_published(self) -> None:
        """Ask an engine with our connector for one token, once: it publishes its deployment after its first step."""
        if self.published is not None or not self.report.has_connector:
            self._is_asked = False
            return
        if self._is_asked or not self.models:
            return
        self._is_asked = True
        try:
            await self._calls.compute_token(next(iter(self.models)))
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            _log.info("%s gives no first token: %.300r", self.name, error)

    async def _read_models(self) -> None:
        said = await self._calls.json("/v1/models", models_in)
        if said is None:
            return
        found, left_out_count = said
        if left_out_count:
            problem = "%s names too many models: %d are left out behind the first %d KiB"
            self.warnings.warn(problem, self.name, left_out_count, MODELS_BYTES_MAX >> 10)
        is_changed = found != self.models or any(self._refused.values())
        if found != self.models:
            self.models = found
        self._refused = {model: False for model in self._refused if model in found}
        self._models_s = time.monotonic()
        if is_changed and self._on_up is not None and self.liveness.takes_requests(self._models_s):
            self._on_up()  # requests may wait for a model that it has now


def models_in(document: object) -> tuple[dict[str, Mapping[str, Any]], int] | None:
    """The same as `models_of`, of an engine's answer; None where it tells no models."""
    entries = document.get("data") if isinstance(document, dict) else None
    return models_of(entries) if isinstance(entries, list) else None


def models_of(entries: Sequence[object]) -> tuple[dict[str, Mapping[str, Any]], int]:
    """The descriptions of an engine's models by their names, of MODELS_BYTES_MAX in JSON, and the number of those that
    are left out. Everybody who asks for the models of all engines gets them.
    """
    found: dict[str, Mapping[str, Any]] = {}
    nbytes = 0
    for count, each in enumerate(map(model_of, entries)):
        nbytes += 0 if each is None else len(json.dumps(each))
        if nbytes > MODELS_BYTES_MAX or count == MODELS_MAX:
            return found, len(entries) - count
        if each is not None:
            found[each["id"]] = each
    return found, 0


def model_of(said: object) -> Mapping[str, Any] | None:
    """The part of an engine's description of a model that clients see: a few short values. None for no description."""
    if not isinstance(said, dict) or not isinstance(said.get("id"), str) or len(said["id"]) > TEXT_MAX:
        return None
    kinds: dict[str, type] = {
        "id": str, "object": str, "owned_by": str, "parent": str, "root": str, "created": int, "max_model_len": int,
    }  # fmt: skip
    found = {name: said[name] for name, kind in kinds.items() if type(said.get(name)) is kind}
    return {name: value for name, value in found.items() if len(str(value)) <= TEXT_MAX}


def event_sources(document: object) -> tuple[list[Source], int]:
    """Rank, endpoint, replay endpoint and topic of each rank, of what vLLM's `/kv_event_sources` answers, and the
    number of ranks that are left out, because their endpoint is none of TCP or there are too many.
    """
    found: list[Source] = []
    left_out_count = 0
    ranks = (
        {int(rank): each for rank, each in document.items() if _RANK.fullmatch(str(rank))}
        if isinstance(document, dict)
        else {}
    )
    for rank, source in sorted(ranks.items(), key=lambda item: item[0]):
        if not isinstance(source, dict) or not source.get("enable_kv_cache_events"):
            continue
        events, replay, topic = source.get("endpoint"), source.get("replay_endpoint"), source.get("topic")
        if not is_endpoint(events) or len(found) == RANKS_MAX:
            left_out_count += 1
            continue
        found.append((rank, events, replay if is_endpoint(replay) else None, topic if isinstance(topic, str) else ""))
    return found, left_out_count


def is_endpoint(said: object) -> TypeGuard[str]:
    """Whether it may be a TCP endpoint. Logs have it, so it has no line ends and not any length."""
    is_text = isinstance(said, str) and len(said) <= ENDPOINT_CHARACTERS_MAX and said.isprintable()
    return is_text and str(said).startswith("tcp://")


def reachable(endpoint: str, host: str) -> str:
    """The endpoint as it is reached from here: an engine that listens on every address says `*`."""
    for every in ("*", "0.0.0.0", "[::]"):
        endpoint = endpoint.replace(f"tcp://{every}:", f"tcp://{host}:")
    return endpoint
