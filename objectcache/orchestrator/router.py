"""The router: gathers what is known of a request and of every engine, and has the policy decide."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from objectcache.orchestrator.engine import Engine
from objectcache.orchestrator.receipts import Receipt
from objectcache.orchestrator.roster import named
from objectcache.orchestrator.rules.admission import most_at_one
from objectcache.orchestrator.rules.books import Load, SentRequest
from objectcache.orchestrator.rules.chains import block_hashes, root_hash
from objectcache.orchestrator.rules.engine_metrics import Published
from objectcache.orchestrator.rules.openai_requests import Asked, TokenIds
from objectcache.orchestrator.rules.policies import Decision, RouteRequest, RoutingPolicy
from objectcache.orchestrator.rules.prediction import EngineState, StoredPrefix
from objectcache.orchestrator.rules.prefix_index import APPROXIMATE_S, EXPECTED_S, PrefixIndex
from objectcache.orchestrator.settings import Role
from objectcache.orchestrator.store_lookups import LookupKey, StoreLookups, lookup_key

BLOCK_TOKENS_DEFAULT = 16
CHAIN_TOKENS_MAX = 131_072
CHAIN_BLOCKS_MAX = 16_384
"""A decision needs no more of a prompt, for blocks of all sizes together, and naming more would hold the event loop.
Each size has its part: one engine with blocks of one token must not leave the others none.
"""


class NoEngineError(Exception):
    """No engine can take the request: now (`status` 503), because of its size (400), or of its model (404)."""

    def __init__(self, message: str, status: int = 503) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class Pin:
    """Prompts that begin in some way go to this engine, until then (Unix seconds; None: for good)."""

    engine: str
    until: float | None = None


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt whose tokens are known, with the store's answers, and its blocks' names by the tokens of a block and the
    adapter.
    """

    tokens: Sequence[int] | TokenIds
    model: str
    salt: str
    stored: Mapping[LookupKey, StoredPrefix | None]
    chains: dict[tuple[int, str], list[bytes]]
    blocks_max: int = CHAIN_BLOCKS_MAX
    """The blocks that are named of each size."""

    def chain(self, block_tokens: int, adapter: str = "") -> list[bytes]:
        """The names of its blocks, for blocks of so many tokens, computed with this adapter."""
        found = self.chains.get((block_tokens, adapter))
        if found is None:
            tokens = self.tokens[: min(CHAIN_TOKENS_MAX, block_tokens * self.blocks_max)]
            found = block_hashes(tokens, block_tokens, root_hash(adapter, self.salt))
            self.chains[block_tokens, adapter] = found
        return found


@dataclass(frozen=True, slots=True)
class Routed:
    """A decision, and the engine. `rank` is the data-parallel rank that holds most of the prompt; None: any. `prefix`
    is the name of the prompt's first block, by which it can be pinned; empty where it has no whole block.
    """

    engine: Engine
    decision: Decision
    rank: int | None = None
    index_name: str = ""
    prefix: str = ""


class Router:
    """Decides among `engines`. Used on one event loop."""

    def __init__(
        self,
        engines: Mapping[str, Engine],
        index: PrefixIndex,
        policy: RoutingPolicy,
        lookups: StoreLookups | None,
        pins: Mapping[str, Pin],
        places_max: int,
    ) -> None:
        """`places_max` requests may be with engines. One engine gets no more than half of them where others can take
        the rest, and a request that only one can answer waits for it without a place (`rules.admission`). All prefill
        engines together get no more than half of them, since other engines compute prompts, too.
        Else one that is well and answers nothing would keep everybody out.
        """
        self._engines = engines
        self._most_at_one = most_at_one(places_max)
        self._index = index
        self._lookups = lookups
        self._pins = pins
        self.policy = policy

    async def prompt(self, asked: Asked, tokens: Sequence[int] | TokenIds, receipt: Receipt | None = None) -> Prompt:
        """Look the prompt up in the stores of the engines that could take it."""
        began_s = time.monotonic()
        wanted: dict[LookupKey, Published] = {}
        engines: dict[LookupKey, list[str]] = {}
        if self._lookups is not None:
            for engine in self._engines.values():
                if engine.published is not None and engine.serves(asked.model) and not engine.adapter(asked.model):
                    key = lookup_key(engine.published)
                    wanted.setdefault(key, engine.published)
                    engines.setdefault(key, []).append(engine.name)
        found: Sequence[StoredPrefix | None] = ()
        if wanted and self._lookups is not None:
            lookups = self._lookups
            found = await asyncio.gather(
                *(lookups.find(engines[key], each, tokens, asked.salt) for key, each in wanted.items())
            )
        if receipt is not None:
            receipt.lookup_s = time.monotonic() - began_s
        stored = dict(zip(wanted, found, strict=True))
        kinds = {(self._block_tokens(engine), engine.adapter(asked.model)) for engine in self._engines.values()}
        return Prompt(
            tokens=tokens,
            model=asked.model,
            salt=asked.salt,
            stored=stored,
            chains={},
            blocks_max=CHAIN_BLOCKS_MAX // max(1, len(kinds)),
        )

    def decide(
        self,
        asked: Asked,
        request_id: str,
        prompt: Prompt | None,
        *,
        role: Role = Role.BOTH,
        without: Collection[str] = (),
        policy: RoutingPolicy | None = None,
        home: str | None = None,
    ) -> Routed:
        """The engine for a request; `home` names the only one that can answer it. Raises NoEngineError."""
        now_s = time.monotonic()
        able = [
            engine
            for engine in self._engines.values()
            if engine.name not in without
            and engine.liveness.takes_requests(now_s)
            and engine.serves(asked.model)
            and engine.settings.role is role
            and (home is None or engine.name == home)
        ]
        if role is Role.PREFILL and self._prefill_count() >= self._most_at_one:
            able = []
        elif home is None:
            able = [each for each in able if each.books.active_count < self._most_at_one] or able
            able = named(able, asked.model)
        if not able and home is not None and home in self._engines:
            raise NoEngineError(f"the engine that has the earlier response, {home}, takes no requests now")
        if not able:
            raise self.no_engine(asked.model)
        prompt_tokens = max(1, asked.prompt_tokens if prompt is None else len(prompt.tokens))
        sequence_tokens = (0 if prompt is None else len(prompt.tokens)) + asked.sequence_tokens
        able = self._large_enough(able, sequence_tokens, is_sure=not asked.is_counted_by_engine)
        loads = {engine.name: self._load(engine, prompt_tokens, asked.output_tokens, now_s) for engine in able}
        held, names = self._held(able, prompt, now_s)
        stored = self._offers(prompt, now_s)
        states = [self._state(engine, held[engine.name], stored, loads[engine.name]) for engine in able]
        start = b"" if prompt is None else next(iter(self._start(prompt, able)), b"")
        pin = self._pins.get(start.hex()) if start else None
        if pin is not None and (pin.until is None or time.time() < pin.until):
            states = [state for state in states if state.name == pin.engine] or states
        decision = (policy or self.policy).choose(
            RouteRequest(request_id, prompt_tokens, asked.output_tokens, asked.session, start), states
        )
        engine = self._engines[decision.engine]
        name = names.get(decision.engine, engine.blocks.names[0])
        rank = engine.blocks.ranks.get(name) if len(engine.blocks.names) > 1 else None
        return Routed(engine, decision, rank, name, start.hex())

    def sent(self, routed: Routed, asked: Asked, request_id: str, prompt: Prompt | None) -> None:
        """The request is on its way to the engine: its blocks will be there soon."""
        now_s, engine, prediction = time.monotonic(), routed.engine, routed.decision.prediction
        prompt_tokens = asked.prompt_tokens if prompt is None else len(prompt.tokens)
        tokens = prompt_tokens + engine.report.output_tokens(asked.output_tokens)
        # of a prompt without tokens the prediction says nothing, and who asks for tokens has nothing computed
        is_known = prompt is not None and asked.is_generating
        predicted_s = prediction.ttft_s if is_known else 0.0
        has_load = is_known and prediction.load_tokens > 0
        work_s = engine.correction.work_s(prediction.compute_s) if is_known else 0.0
        engine.books.send(
            SentRequest(
                request_id=request_id,
                tokens=tokens,
                work_s=work_s,
                predicted_s=predicted_s,
                sent_s=now_s,
                is_stream=asked.is_stream,
                has_load=has_load,
            )
        )
        if prompt is not None and asked.is_generating and routed.index_name in engine.blocks.names:
            chain = self._chain(engine, prompt)
            self._index.expect(routed.index_name, chain, now_s, EXPECTED_S if engine.blocks.is_live else APPROXIMATE_S)

    def first_block(self, engine: Engine, prompt: Prompt | None) -> bytes | None:
        """The name of the prompt's first block at an engine; None where it has no whole block."""
        chain = [] if prompt is None else self._chain(engine, prompt)
        return chain[0] if chain else None

    def has_come(self, engine: Engine, first_block: bytes) -> bool | None:
        """Whether the engine's events show a prompt's first block; None where events do not say."""
        if not engine.blocks.is_live or self._engines.get(engine.name) is not engine:
            return None
        return any(self._index.holds(name, first_block) for name in engine.blocks.names)

    def _chain(self, engine: Engine, prompt: Prompt) -> list[bytes]:
        """The names of the prompt's blocks at an engine, by what it says of its blocks and of the model."""
        return prompt.chain(self._block_tokens(engine), engine.adapter(prompt.model))

    def _start(self, prompt: Prompt, able: Sequence[Engine]) -> list[bytes]:
        """The name of the prompt's first block, by which it is pinned and spread, whatever a single engine says."""
        count = sum(bool(engine.adapter(prompt.model)) for engine in able)
        adapter = prompt.model if 2 * count > len(able) else ""
        first = prompt.tokens[:BLOCK_TOKENS_DEFAULT]
        return block_hashes(first, BLOCK_TOKENS_DEFAULT, root_hash(adapter, prompt.salt))

    def _block_tokens(self, engine: Engine) -> int:
        return engine.block_tokens or BLOCK_TOKENS_DEFAULT

    def _held(
        self, able: Sequence[Engine], prompt: Prompt | None, now_s: float
    ) -> tuple[dict[str, int], dict[str, str]]:
        """The tokens that each engine holds, and the name in the index of the rank that holds most."""
        tokens = {engine.name: 0 for engine in able}
        best_names: dict[str, str] = {}
        if prompt is None:
            return tokens, best_names
        alike: dict[tuple[int, str], list[Engine]] = {}
        for engine in able:
            alike.setdefault((self._block_tokens(engine), engine.adapter(prompt.model)), []).append(engine)
        for (block_tokens, adapter), engines in alike.items():
            names = [name for engine in engines for name in engine.blocks.names]
            counts = self._index.held_by(prompt.chain(block_tokens, adapter), now_s, names)
            for engine in engines:
                if len(engine.blocks.names) == 1:
                    best_names[engine.name] = engine.blocks.names[0]
                    tokens[engine.name] = counts[engine.blocks.names[0]] * block_tokens
                    continue
                most = max(counts[name] for name in engine.blocks.names)
                equal = [name for name in engine.blocks.names if counts[name] == most]
                best_names[engine.name] = equal[len(prompt.tokens) % len(equal)]  # a new prompt goes to any rank
                tokens[engine.name] = most * block_tokens
        return tokens, best_names

    def _large_enough(self, able: Sequence[Engine], sequence_tokens: int, *, is_sure: bool) -> list[Engine]:
        """Those that could have KV for the largest answer. Where no engine is large enough for that, a request whose
        tokens are sure is refused with NoEngineError, and any other may go to all of them.
        """
        rooms = {engine.name: engine.report.kv_tokens for engine in able}
        large = [engine for engine in able if (room := rooms[engine.name]) is None or room >= sequence_tokens]
        if not large and not is_sure:
            return list(able)
        if not large:
            had = ", ".join(f"{name} {room}" for name, room in rooms.items())
            raise NoEngineError(f"the request needs KV for {sequence_tokens} tokens; engines have {had}", 400)
        return large

    def _load(self, engine: Engine, prompt_tokens: int, allowed_tokens: int, now_s: float) -> Load:
        """The engine's load, with the wait for KV blocks. A wait turns away only those that have a shorter one
        elsewhere.
        """
        load, room = engine.books.load(now_s), engine.report.kv_tokens
        need_tokens = prompt_tokens + engine.report.output_tokens(allowed_tokens)
        if room is None or load.tokens + need_tokens <= room:
            return load
        return load._replace(queue_s=max(load.queue_s, engine.books.room_wait_s(need_tokens, room, now_s)))

    def _prefill_count(self) -> int:
        """The requests of ours that prefill engines have."""
        return sum(each.books.active_count for each in self._engines.values() if each.settings.role is Role.PREFILL)

    def _offers(self, prompt: Prompt | None, now_s: float) -> dict[LookupKey, StoredPrefix | None]:
        """The store's answers. Each rate is shared with the loads that wait for their turn at their engines."""
        if prompt is None:
            return {}
        waiting: Counter[LookupKey] = Counter()
        for engine in self._engines.values():
            if engine.published is not None:
                waiting[lookup_key(engine.published)] += engine.books.waiting_loads(now_s)
        return {
            key: None if each is None else replace(each, rate_bytes_per_s=each.rate_bytes_per_s / (1 + waiting[key]))
            for key, each in prompt.stored.items()
        }

    def _state(
        self, engine: Engine, held_tokens: int, offers: Mapping[LookupKey, StoredPrefix | None], load: Load
    ) -> EngineState:
        published = engine.published
        stored = None if published is None else offers.get(lookup_key(published))
        if stored is not None and published is not None:  # what others have asked, at this engine's own costs
            stored = replace(stored, costs=published.loads)
        room = engine.report.kv_tokens
        return EngineState(
            name=engine.name,
            prefill=engine.prefill,
            queue_s=load.queue_s,
            active_count=load.active_count,
            requests_max=engine.books.requests_max,
            held_tokens=held_tokens,
            stored=stored,
            free_tokens=None if room is None else max(0, room - load.tokens),
            correction=engine.correction,
            waiting_count=load.waiting_count,
            arrivals_per_s=load.arrivals_per_s,
            busy_share=load.busy_share,
            growth_s=engine.steps.growth_s,
        )

    def no_engine(self, model: str) -> NoEngineError:
        """Why no engine takes requests for a model."""
        if not self._engines:
            return NoEngineError("no engine is registered")
        known = {name for engine in self._engines.values() for name in engine.models}
        if model and known and model not in known:
            return NoEngineError(f"no engine has the model {model!r}", 404)
        states = ", ".join(f"{engine.name} is {engine.status().value}" for engine in self._engines.values())
        return NoEngineError(f"no engine can take requests: {states}")
