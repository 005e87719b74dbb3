"""A simulation of engines, a store and its link, which drives the orchestrator's own decisions. Pure.

Each engine computes prompts one after the other and holds the blocks it used last. Its streams put a token out in each
step: a step takes longer the more streams there are, and none is made while a prompt is computed. The store has every
block that was computed, the latest of them; the loads under way share its link equally, and it quotes each request the
share that one more load would have. 003's model (uncached tokens,
output tokens, block pools) is the case of one engine with a place and without a store.
"""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

import numpy as np

from descriptors.layout import ChunkLayout
from descriptors.recompute import DeliveryCosts, PrefillCosts
from objectcache.orchestrator.rules.books import EngineBooks, SentRequest
from objectcache.orchestrator.rules.kv_events import BlockRemoved, name_bytes
from objectcache.orchestrator.rules.policies import POLICIES, PolicyName, RouteRequest
from objectcache.orchestrator.rules.prediction import EngineState, StoredPrefix, predict, recompute_s
from objectcache.orchestrator.rules.prefix_index import PrefixIndex

NAME_BYTES = 8
LEAST_STEP_S = 1e-9
LAYOUT = ChunkLayout(32, 512, 2 << 20)
"""A chunk of 512 tokens of Llama 3.1 8B."""
COSTS = DeliveryCosts(request_s=0.002)


@dataclass(frozen=True, slots=True)
class SimulatedRequest:
    """A request: when it comes, the ids of its prompt's blocks, and its tokens."""

    at_s: float
    blocks: tuple[int, ...]
    prompt_tokens: int
    output_tokens: int
    session: str = ""


@dataclass(frozen=True, slots=True)
class SimulatedEngine:
    """An engine. `blocks_max` is its room, `decode_s` the time of a step with one stream, and `decode_growth_s` that of
    each stream more. It joins at `joins_at_s`. Decisions are made with `believed_token_us` where it is given.
    """

    token_us: float
    decode_s: float = 0.02
    requests_max: int = 64
    blocks_max: int = 2000
    lost_at_s: float | None = None
    believed_token_us: float | None = None
    decode_growth_s: float = 0.0
    joins_at_s: float = 0.0

    def step_s(self, stream_count: int) -> float:
        """The time of a step of so many streams, which is above 0."""
        return max(LEAST_STEP_S, self.decode_s + self.decode_growth_s * max(0, stream_count - 1))


@dataclass(frozen=True, slots=True)
class SimulatedStore:
    """The store: its room in blocks, and the rate of its link. Without a store `blocks_max` is 0."""

    blocks_max: int = 0
    link_bytes_per_s: float = 0.0
    layout: ChunkLayout = LAYOUT
    costs: DeliveryCosts = COSTS


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of a request. Tokens were held by the engine, loaded, or computed. `whole_s` is the time to its last
    token; None where its engine was lost before.
    """

    at_s: float
    ttft_s: float
    engine: int
    held_tokens: int
    loaded_tokens: int
    computed_tokens: int
    predicted_s: float
    attempt_count: int = 1
    whole_s: float | None = None


class _Kind(Enum):
    ARRIVAL = 0
    COMPUTED = 1
    LOADED = 4
    ENDED = 2
    LOST = 3


@dataclass(slots=True)
class _Running:
    request: SimulatedRequest
    number: int
    load_blocks: int = 0
    believed_blocks: int = 0
    """Blocks that the engine was taken to hold."""
    predicted_s: float = 0.0
    attempt_count: int = 1
    held_blocks: int = 0
    loaded_blocks: int = 0
    last_token: float = 0.0
    """How many tokens each stream of its engine has put out when this one ends."""
    outcome: int = 0
    """The place of its outcome."""


class _Link:
    """Loads that share a link equally: each has as many bytes/s as any other."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._left_bytes: dict[int, float] = {}
        self._at_s = 0.0
        self.version = 0
        """Counts the changes: the end of a load that was foretold before a change does not count."""

    @property
    def load_count(self) -> int:
        """Loads under way."""
        return len(self._left_bytes)

    def add(self, number: int, nbytes: float, now_s: float) -> None:
        """A load begins."""
        self._advance(now_s)
        self._left_bytes[number] = nbytes
        self.version += 1

    def take_ended(self, now_s: float) -> list[int]:
        """The loads that have come."""
        self._advance(now_s)
        ended = [number for number, left in self._left_bytes.items() if left <= 1.0]
        for number in ended:
            del self._left_bytes[number]
        self.version += bool(ended)
        return ended

    def next_end_s(self) -> float | None:
        """When the next load ends, if no other begins before."""
        if not self._left_bytes:
            return None
        return self._at_s + min(self._left_bytes.values()) * self.load_count / self._bytes_per_s

    def _advance(self, now_s: float) -> None:
        if self._left_bytes:
            moved = (now_s - self._at_s) * self._bytes_per_s / self.load_count
            for number in self._left_bytes:
                self._left_bytes[number] -= moved
        self._at_s = now_s


@dataclass(slots=True)
class _Engine:
    settings: SimulatedEngine
    books: EngineBooks
    waiting: deque[_Running] = field(default_factory=deque)
    computing: _Running | None = None
    decoding: dict[int, _Running] = field(default_factory=dict)
    held: OrderedDict[int, None] = field(default_factory=OrderedDict)
    is_lost: bool = False
    tokens: float = 0.0
    """Tokens that each stream has put out since the start, so that a stream ends at a number that is known."""
    stalled_s: float = 0.0
    """The time of a prompt that is computed before the next step."""
    at_s: float = 0.0
    next_end: int = -1
    """The order of the event that is the next end of a stream; earlier ones do not count."""

    def advance(self, now_s: float) -> None:
        """Let the streams go on until now."""
        passed_s = now_s - self.at_s
        stalled_s = min(passed_s, self.stalled_s)
        self.at_s, self.stalled_s = now_s, self.stalled_s - stalled_s
        self.tokens += (passed_s - stalled_s) / self.settings.step_s(len(self.decoding))

    def next_end_s(self) -> float | None:
        """When the next stream ends, if nothing changes before."""
        if not self.decoding:
            return None
        left = max(0.0, min(each.last_token for each in self.decoding.values()) - self.tokens)
        return self.at_s + self.stalled_s + left * self.settings.step_s(len(self.decoding))


class Simulation:
    """One run of one policy. `block_tokens` is the tokens of each of a prompt's blocks."""

    def __init__(
        self,
        engines: Sequence[SimulatedEngine],
        policy: PolicyName,
        store: SimulatedStore | None = None,
        block_tokens: int = 512,
    ) -> None:
        self._engines = [_Engine(each, EngineBooks(each.requests_max)) for each in engines]
        self._policy = POLICIES[policy]()
        self._store = SimulatedStore() if store is None else store
        self._block_tokens = block_tokens
        self._index = PrefixIndex()
        self._names = [str(at) for at in range(len(engines))]
        for name in self._names:
            self._index.add_engine(name)
        self._stored: OrderedDict[int, None] = OrderedDict()
        self._link = _Link(self._store.link_bytes_per_s)
        self._loading: dict[int, tuple[int, _Running, float, float]] = {}
        """Each load's engine, request, beginning, and the time to compute the rest."""
        self._events: list[tuple[float, int, _Kind, int, _Running | None]] = []
        self._order = itertools.count()
        self._outcomes: list[Outcome] = []
        self._mean_output_tokens = 0.0

    def run(self, requests: Sequence[SimulatedRequest]) -> list[Outcome]:
        """The outcomes of all requests, in the order of their first bytes."""
        self._mean_output_tokens = float(np.mean([each.output_tokens for each in requests]))
        for number, request in enumerate(requests):
            self._at(request.at_s, _Kind.ARRIVAL, -1, _Running(request, number))
        for at, engine in enumerate(self._engines):
            if engine.settings.lost_at_s is not None:
                self._at(engine.settings.lost_at_s, _Kind.LOST, at, None)
        while self._events:
            now_s, order, kind, at, running = heapq.heappop(self._events)
            if kind is _Kind.ARRIVAL and running is not None:
                self._arrive(running, now_s)
            elif kind is _Kind.LOADED:
                if at == self._link.version:
                    self._loaded(now_s)
            elif kind is _Kind.LOST:
                self._lose(at, now_s)
            elif self._engines[at].is_lost:
                continue
            elif kind is _Kind.ENDED:
                if order == self._engines[at].next_end:
                    self._ended(at, now_s)
            elif running is not None:
                self._computed(at, running, now_s)
        return self._outcomes

    def _at(self, at_s: float, kind: _Kind, engine: int, running: _Running | None) -> int:
        order = next(self._order)
        heapq.heappush(self._events, (at_s, order, kind, engine, running))
        return order

    def _arrive(self, running: _Running, now_s: float) -> None:
        request = running.request
        chain = [_name(block) for block in request.blocks]
        able = [
            at for at, engine in enumerate(self._engines) if not engine.is_lost and engine.settings.joins_at_s <= now_s
        ]
        held = self._index.held_by(chain, now_s, [self._names[at] for at in able])
        stored = self._stored_prefix(request, now_s)
        states = []
        for at in able:
            engine = self._engines[at]
            load = engine.books.load(now_s)
            believed_us = engine.settings.believed_token_us
            states.append(
                EngineState(
                    name=self._names[at],
                    prefill=PrefillCosts(engine.settings.token_us if believed_us is None else believed_us),
                    queue_s=load.queue_s,
                    active_count=load.active_count,
                    requests_max=engine.settings.requests_max,
                    held_tokens=held[self._names[at]] * self._block_tokens,
                    stored=stored,
                    correction=engine.books.correction,
                    waiting_count=load.waiting_count,
                    arrivals_per_s=load.arrivals_per_s,
                    busy_share=load.busy_share,
                    growth_s=engine.settings.decode_growth_s * self._mean_output_tokens,
                )
            )
        start = chain[0] if chain else b""
        decision = self._policy.choose(
            RouteRequest(str(running.number), request.prompt_tokens, request.output_tokens, request.session, start),
            states,
        )
        at = int(decision.engine)
        engine, prediction = self._engines[at], decision.prediction
        running.load_blocks, running.predicted_s = prediction.load_chunks, prediction.ttft_s
        running.believed_blocks = prediction.held_tokens // self._block_tokens
        tokens = request.prompt_tokens + request.output_tokens
        has_load = prediction.load_tokens > 0
        work_s = engine.books.correction.work_s(prediction.compute_s)
        engine.books.send(SentRequest(str(running.number), tokens, work_s, prediction.ttft_s, now_s, has_load=has_load))
        self._index.expect(decision.engine, chain, now_s)
        engine.waiting.append(running)
        self._begin(at, now_s)

    def _stored_prefix(self, request: SimulatedRequest, now_s: float) -> StoredPrefix | None:
        if not self._store.blocks_max:
            return None
        count = next((at for at, block in enumerate(request.blocks) if block not in self._stored), len(request.blocks))
        waiting = sum(engine.books.waiting_loads(now_s) for engine in self._engines if not engine.is_lost)
        rate = self._store.link_bytes_per_s / (self._link.load_count + 1) / (1 + waiting)
        whole = min(count, request.prompt_tokens // self._block_tokens)
        return StoredPrefix(whole, self._store.layout, rate, self._store.costs)

    def _begin(self, at: int, now_s: float) -> None:
        """Let an idle engine with a free place compute the next prompt."""
        engine = self._engines[at]
        if engine.computing is not None or not engine.waiting or len(engine.decoding) >= engine.settings.requests_max:
            return
        running = engine.computing = engine.waiting.popleft()
        request = running.request
        blocks = request.blocks[: (request.prompt_tokens - 1) // self._block_tokens]
        held = next((index for index, block in enumerate(blocks) if block not in engine.held), len(blocks))
        stored = next((index for index, block in enumerate(blocks) if block not in self._stored), len(blocks))
        if held < running.believed_blocks:  # as the connector does
            running.load_blocks = self._decided_anew(request, held, stored, engine.settings.token_us)
        loaded = max(0, min(running.load_blocks, stored) - held)
        there = (held + loaded) * self._block_tokens
        compute_s = recompute_s(request.prompt_tokens, there, PrefillCosts(engine.settings.token_us))
        running.held_blocks, running.loaded_blocks = held, loaded
        engine.advance(now_s)
        engine.stalled_s = compute_s
        self._foretell_end(at)
        if not loaded:
            self._at(now_s + compute_s, _Kind.COMPUTED, at, running)
            return
        self._loading[running.number] = at, running, now_s, compute_s
        self._link.add(running.number, loaded * self._store.layout.chunk_bytes, now_s)
        self._foretell()

    def _decided_anew(self, request: SimulatedRequest, held: int, stored: int, token_us: float) -> int:
        """The engine holds fewer blocks than it was taken to, and decides itself, at the rate that the link has now."""
        rate = self._store.link_bytes_per_s / (self._link.load_count + 1)
        offer = StoredPrefix(stored, self._store.layout, rate, self._store.costs)
        state = EngineState("", PrefillCosts(token_us), held_tokens=held * self._block_tokens, stored=offer)
        return predict(request.prompt_tokens, state).load_chunks

    def _foretell(self) -> None:
        end_s = self._link.next_end_s()
        if end_s is not None:
            self._at(end_s, _Kind.LOADED, self._link.version, None)

    def _loaded(self, now_s: float) -> None:
        """Loads have come. Layers were computed beside them, one behind the one that came."""
        layers = self._store.layout.num_layers
        for number in self._link.take_ended(now_s):
            at, running, began_s, compute_s = self._loading.pop(number)
            load_s = now_s - began_s + self._store.costs.request_s
            took_s = max(compute_s + load_s / layers, load_s + compute_s / layers)
            self._at(max(now_s, began_s + took_s), _Kind.COMPUTED, at, running)
        self._foretell()

    def _computed(self, at: int, running: _Running, now_s: float) -> None:
        """The first token is there."""
        engine, request = self._engines[at], running.request
        engine.computing = None
        engine.books.first_byte(str(running.number), now_s)
        held, loaded = (count * self._block_tokens for count in (running.held_blocks, running.loaded_blocks))
        running.outcome = len(self._outcomes)
        self._outcomes.append(
            Outcome(
                at_s=request.at_s,
                ttft_s=now_s - request.at_s,
                engine=at,
                held_tokens=held,
                loaded_tokens=loaded,
                computed_tokens=request.prompt_tokens - held - loaded,
                predicted_s=running.predicted_s,
                attempt_count=running.attempt_count,
            )
        )
        self._hold(engine, self._names[at], request.blocks)
        self._keep(request.blocks)
        engine.advance(now_s)
        running.last_token = engine.tokens + request.output_tokens
        engine.decoding[running.number] = running
        self._foretell_end(at)
        self._begin(at, now_s)

    def _foretell_end(self, at: int) -> None:
        engine = self._engines[at]
        end_s = engine.next_end_s()
        if end_s is not None:
            engine.next_end = self._at(end_s, _Kind.ENDED, at, None)

    def _ended(self, at: int, now_s: float) -> None:
        """The stream with the fewest tokens to come has ended."""
        engine = self._engines[at]
        engine.advance(now_s)
        running = min(engine.decoding.values(), key=lambda each: each.last_token)
        del engine.decoding[running.number]
        whole_s = now_s - running.request.at_s
        self._outcomes[running.outcome] = replace(self._outcomes[running.outcome], whole_s=whole_s)
        engine.books.end(str(running.number), now_s, is_complete=True)
        self._foretell_end(at)
        self._begin(at, now_s)

    def _lose(self, at: int, now_s: float) -> None:
        """The engine is gone; requests without a first byte are sent again, those that decode are lost for good."""
        engine = self._engines[at]
        engine.is_lost = True
        again = [*([engine.computing] if engine.computing is not None else []), *engine.waiting]
        self._index.remove_engine(self._names[at])
        self._policy.forget_engine(self._names[at])
        for running in again:
            self._arrive(replace(running, attempt_count=running.attempt_count + 1), now_s)

    def _hold(self, engine: _Engine, name: str, blocks: Sequence[int]) -> None:
        new = [block for block in blocks if block not in engine.held]
        for block in reversed(blocks):
            engine.held[block] = None
            engine.held.move_to_end(block)
        self._index.restore(name, ((name_bytes(block), _name(block)) for block in new))
        gone = []
        while len(engine.held) > engine.settings.blocks_max:
            gone.append(engine.held.popitem(last=False)[0])
        if gone:
            self._index.apply(name, BlockRemoved(tuple(gone)))

    def _keep(self, blocks: Sequence[int]) -> None:
        if not self._store.blocks_max:
            return
        for block in reversed(blocks):
            self._stored[block] = None
            self._stored.move_to_end(block)
        while len(self._stored) > self._store.blocks_max:
            self._stored.popitem(last=False)


def summary(outcomes: Sequence[Outcome]) -> dict[str, float]:
    """TTFT percentiles in seconds, and the parts of all prompt tokens that were held, loaded and computed."""
    ttfts = np.array([each.ttft_s for each in outcomes])
    held, loaded, computed = (
        float(sum(getattr(each, name) for each in outcomes))
        for name in ("held_tokens", "loaded_tokens", "computed_tokens")
    )
    whole = max(1.0, held + loaded + computed)
    p50, p90, p99 = (float(each) for each in np.percentile(ttfts, (50, 90, 99)))
    return {
        "count": len(outcomes),
        "ttft_p50_s": p50,
        "ttft_p90_s": p90,
        "ttft_p99_s": p99,
        "ttft_mean_s": float(ttfts.mean()),
        "whole_mean_s": float(np.mean([each.whole_s for each in outcomes if each.whole_s is not None])),
        "held": held / whole,
        "loaded": loaded / whole,
        "computed": computed / whole,
    }


def with_bursts(
    requests: Sequence[SimulatedRequest], rate_per_s: float, burst: int, seed: int
) -> list[SimulatedRequest]:
    """The same requests at other times: groups of up to `burst` come at once, and groups as a Poisson process. With a
    burst of 1 it is one of requests.
    """
    random = np.random.default_rng(seed)
    found, now_s, at = [], 0.0, 0
    while at < len(requests):
        size = int(random.integers(1, burst + 1))
        now_s += float(random.exponential((1 + burst) / 2 / rate_per_s))
        found += [replace(each, at_s=now_s) for each in requests[at : at + size]]
        at += size
    return found


def _name(block: int) -> bytes:
    return block.to_bytes(NAME_BYTES, "little")
