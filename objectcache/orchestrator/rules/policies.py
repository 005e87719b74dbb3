"""Which engine gets a request: our policy, that of the paper, and those that users run elsewhere, on one interface.

| policy | takes the engine | source |
|---|---|---|
| `ttft` | whose predicted first token, with the delay that it causes to others, costs least | ours |
| `paper` | of the session; else that holds the whole prompt; else the longest prefix; else the least loaded | 003 |
| `round_robin` | after the last one | |
| `least_load` | with the fewest requests | |
| `prefix_hash` | that the prompt's first blocks hash to, unless it has far more requests than others | like SGLang's |
| `kv_events` | with the best weighted score of held prefix and load | like llm-d's |

Every policy gets only engines that may take the request, and at least one.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from hashlib import blake2b
from typing import Protocol

from objectcache.orchestrator.rules.congestion import Congestion
from objectcache.orchestrator.rules.prediction import EngineState, Prediction, least_ttft_s, predict

NEAR_FACTOR = 1.05
NEAR_S = 0.005
"""Predictions are not better than this: among engines that are as near to the best, load and affinity decide."""
SESSIONS_MAX = 100_000
CROWDED_FACTOR, CROWDED_COUNT = 1.5, 4
"""An engine with more than so many times the fewest requests, and so many more, is crowded."""
SPREAD_BLOCKS = 4


@dataclass(frozen=True, slots=True)
class RouteRequest:
    """A request, as far as the decision needs it. `chain_start` is the name of the prompt's first block, empty where
    the prompt has no whole block. `session` is empty for a request without one.
    """

    request_id: str
    prompt_tokens: int
    output_tokens: int = 0
    session: str = ""
    chain_start: bytes = b""


@dataclass(frozen=True, slots=True)
class Decision:
    """The decision. `predictions` are those that were made, the chosen engine's first. `reason` says in a word why."""

    engine: str
    reason: str
    prediction: Prediction
    predictions: tuple[Prediction, ...] = ()


class RoutingPolicy(Protocol):
    """Chooses engines. A policy may remember what it chose; it reads no clock."""

    def choose(self, request: RouteRequest, engines: Sequence[EngineState]) -> Decision:
        """The engine for the request. `engines` is not empty."""
        ...

    def forget_engine(self, name: str) -> None:
        """The engine is gone: sessions do not go there any more."""
        ...


class Sessions:
    """The engine of each session, of the sessions that were used last. A tenant's sessions have its name and a line end
    before their own. Where there would be too many of all, the tenant that has most gives up its oldest one.
    """

    def __init__(self, sessions_max: int = SESSIONS_MAX) -> None:
        self._sessions_max = sessions_max
        self._engines: dict[str, OrderedDict[str, str]] = {}
        self._count = 0

    def engine(self, session: str) -> str | None:
        """Where the session was last."""
        mine = self._engines.get(_tenant_of(session))
        return None if mine is None else mine.get(session)

    def note(self, session: str, engine: str) -> None:
        """The session is there now."""
        if not session:
            return
        mine = self._engines.setdefault(_tenant_of(session), OrderedDict())
        self._count += session not in mine
        mine[session] = engine
        mine.move_to_end(session)
        if self._count > self._sessions_max:
            largest = max(self._engines, key=lambda each: len(self._engines[each]))
            oldest = next(iter(self._engines[largest]))
            self._forget(largest, oldest)

    def forget_engine(self, name: str) -> None:
        """No session is there any more."""
        gone = [(tenant, each) for tenant, mine in self._engines.items() for each in mine if mine[each] == name]
        for tenant, session in gone:
            self._forget(tenant, session)

    def _forget(self, tenant: str, session: str) -> None:
        del self._engines[tenant][session]
        self._count -= 1
        if not self._engines[tenant]:
            del self._engines[tenant]


class SessionsAsTheyAre(Sessions):
    """The same sessions, for a decision that is not to be remembered."""

    def __init__(self, sessions: Sessions) -> None:
        super().__init__()
        self._engines = sessions._engines

    def note(self, session: str, engine: str) -> None:
        """Remember nothing."""


def _tenant_of(session: str) -> str:
    tenant, end, _ = session.partition("\n")
    return tenant if end else ""


class LeastTtft:
    """Ours: least TTFT of the request, and least delay of others (orchestrator.rules.congestion). Among engines that
    are near the best, the session's own engine is taken, else the one with the fewest requests beside its bound, else
    the one that the prompt's first block hashes to, so that new prefixes spread and equal ones meet.
    """

    def __init__(self, sessions: Sessions | None = None, *, predicts_all: bool = False) -> None:
        """With `predicts_all` every engine's prediction is made, for people to read; otherwise only those that can be
        the best.
        """
        self._sessions = Sessions() if sessions is None else sessions
        self._predicts_all = predicts_all

    def choose(self, request: RouteRequest, engines: Sequence[EngineState]) -> Decision:
        states = {state.name: state for state in engines}
        predictions = self._predictions(request.prompt_tokens, engines)
        best_s = min(map(_cost_s, predictions))
        near = [each for each in predictions if _cost_s(each) <= max(best_s * NEAR_FACTOR, best_s + NEAR_S)]
        before = self._sessions.engine(request.session)

        def order(each: Prediction) -> tuple[bool, float, float, bytes]:
            state = states[each.engine]
            busy = state.active_count / max(1, state.requests_max)
            return each.engine != before, round(busy, 2), -each.held_tokens, _spread(request.chain_start, each.engine)

        chosen = min(near, key=order)
        reason = "affinity" if chosen.engine == before else "least cost" if _cost_s(chosen) == best_s else "least load"
        self._sessions.note(request.session, chosen.engine)
        others = sorted((each for each in predictions if each is not chosen), key=_cost_s)
        return Decision(chosen.engine, reason, chosen, (chosen, *others))

    def forget_engine(self, name: str) -> None:
        self._sessions.forget_engine(name)

    def _predictions(self, prompt_tokens: int, engines: Sequence[EngineState]) -> list[Prediction]:
        """Those that can be near the best. Engines in the same state but for their queues have the same terms."""
        made: dict[tuple[object, ...], Prediction] = {}
        congestion = Congestion.among(engines)

        def prediction(state: EngineState) -> Prediction:
            terms = (state.prefill, state.held_tokens, id(state.stored), state.correction)
            known = made.get(terms)
            if known is None:
                known = made[terms] = predict(prompt_tokens, state)
            others_s = congestion.others_s(known.compute_s, state)
            return replace(known, engine=state.name, queue_s=state.queue_s, others_s=others_s)

        if self._predicts_all:
            return [prediction(state) for state in engines]
        bounds = sorted(((least_ttft_s(prompt_tokens, state), at) for at, state in enumerate(engines)))
        found: list[Prediction] = []
        best_s = float("inf")
        for bound_s, at in bounds:
            if bound_s > max(best_s * NEAR_FACTOR, best_s + NEAR_S):
                break
            found.append(prediction(engines[at]))
            best_s = min(best_s, _cost_s(found[-1]))
        return found


class PaperOrder:
    """003: session affinity, then an exact hit, then the longest prefix, then the least loaded, and with the most room
    among equals. It counts tokens, and knows no times.
    """

    def __init__(self, sessions: Sessions | None = None) -> None:
        self._sessions = Sessions() if sessions is None else sessions

    def choose(self, request: RouteRequest, engines: Sequence[EngineState]) -> Decision:
        state, reason = self._choose(request, engines)
        self._sessions.note(request.session, state.name)
        return _route(request, state, reason)

    def forget_engine(self, name: str) -> None:
        self._sessions.forget_engine(name)

    def _choose(self, request: RouteRequest, engines: Sequence[EngineState]) -> tuple[EngineState, str]:
        before = self._sessions.engine(request.session)
        for state in engines:
            if state.name == before:
                return state, "affinity"
        longest = max(engines, key=lambda state: (state.held_tokens, *_least_loaded(state)))
        if longest.held_tokens >= request.prompt_tokens:
            return longest, "exact hit"
        if longest.held_tokens:
            return longest, "longest prefix"
        return max(engines, key=_least_loaded), "least load"


class RoundRobin:
    """One engine after the other."""

    def __init__(self) -> None:
        self._count = 0

    def choose(self, request: RouteRequest, engines: Sequence[EngineState]) -> Decision:
        state = engines[self._count % len(engines)]
        self._count += 1
        return _route(request, state, "round robin")

    def forget_engine(self, name: str) -> None:
        """Nothing is remembered."""


class LeastLoad:
    """The engine with the fewest requests; the turn goes around among equals."""

    def __init__(self) -> None:
        self._count = 0

    def choose(self, request: RouteRequest, engines: Sequence[EngineState]) -> Decision:
        self._count += 1
        start = self._count % len(engines)
        turned = [*engines[start:], *engines[:start]]
        return _route(request, min(turned, key=lambda state: state.active_count), "least load")

    def forget_engine(self, name: str) -> None:
        """Nothing is remembered."""


class PrefixHash:
    """Rendezvous hashing by the prompt's first block. Prompts that begin alike meet on one engine until that one is
    crowded; then the one with the fewest requests takes them.
    """

    def choose(self, request: RouteRequest, engines: Sequence[EngineState]) -> Decision:
        home = max(engines, key=lambda state: _spread(request.chain_start, state.name))
        fewest = min(engines, key=lambda state: state.active_count)
        if not request.chain_start:
            return _route(request, fewest, "least load")
        limit = max(fewest.active_count * CROWDED_FACTOR, fewest.active_count + CROWDED_COUNT)
        if home.active_count > limit:
            return _route(request, fewest, "crowded")
        return _route(request, home, "prefix hash")

    def forget_engine(self, name: str) -> None:
        """Nothing is remembered."""


class KvEventScore:
    """A weighted score of two parts between 0 and 1: held prefix (weight 2), and load (weight 1)."""

    PREFIX_WEIGHT, LOAD_WEIGHT = 2.0, 1.0

    def choose(self, request: RouteRequest, engines: Sequence[EngineState]) -> Decision:
        most = max(state.active_count for state in engines)

        def score(state: EngineState) -> tuple[float, bytes]:
            prefix = state.held_tokens / max(1, request.prompt_tokens)
            idle = 1.0 - state.active_count / most if most else 1.0
            return self.PREFIX_WEIGHT * prefix + self.LOAD_WEIGHT * idle, _spread(request.chain_start, state.name)

        return _route(request, max(engines, key=score), "score")

    def forget_engine(self, name: str) -> None:
        """Nothing is remembered."""


class PolicyName(Enum):
    """The policies by name."""

    TTFT = "ttft"
    PAPER = "paper"
    ROUND_ROBIN = "round_robin"
    LEAST_LOAD = "least_load"
    PREFIX_HASH = "prefix_hash"
    KV_EVENTS = "kv_events"


POLICIES: dict[PolicyName, Callable[[], RoutingPolicy]] = {
    PolicyName.TTFT: LeastTtft,
    PolicyName.PAPER: PaperOrder,
    PolicyName.ROUND_ROBIN: RoundRobin,
    PolicyName.LEAST_LOAD: LeastLoad,
    PolicyName.PREFIX_HASH: PrefixHash,
    PolicyName.KV_EVENTS: KvEventScore,
}


def _cost_s(prediction: Prediction) -> float:
    """The cost to go by: what is no number must not hide the engines that are well."""
    return prediction.cost_s if math.isfinite(prediction.cost_s) else math.inf


def _route(request: RouteRequest, state: EngineState, reason: str) -> Decision:
    prediction = predict(request.prompt_tokens, state)
    return Decision(state.name, reason, prediction, (prediction,))


def _least_loaded(state: EngineState) -> tuple[float, int]:
    return -state.active_count / max(1, state.requests_max), state.free_tokens or 0


def _spread(start: bytes, engine: str) -> bytes:
    return blake2b(start + engine.encode(), digest_size=8).digest()
