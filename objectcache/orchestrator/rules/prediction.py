"""The predicted TTFT of a request on one engine, term by term.

    TTFT = queue + routing + the least of    compute what the engine does not hold
                                             load what the store has, at the rate it offers, and compute the rest
                                             load a part of that, and compute the rest

The least is `descriptors.recompute.advise`: the same function by which engines decide on their own. The rate is what
the scheduler of the store's link quotes for a new request.
"""

from __future__ import annotations

from dataclasses import dataclass

from descriptors.layout import ChunkLayout
from descriptors.recompute import NO_COSTS, AdviceRequest, Choice, DeliveryCosts, PrefillCosts, advise
from objectcache.orchestrator.rules.observed_costs import EXACT, Correction

RATE_MIN_BYTES_PER_S = 1.0
ROUTING_S = 0.002
"""The time from a request's arrival to its dispatch, and of the way back of its first byte."""


@dataclass(frozen=True, slots=True)
class StoredPrefix:
    """The store's answer on a prompt, for one namespace. `rate_bytes_per_s` is the offered rate; 0 where nothing is
    paced.
    """

    chunk_count: int
    layout: ChunkLayout
    rate_bytes_per_s: float = 0.0
    costs: DeliveryCosts = NO_COSTS


@dataclass(slots=True)
class EngineState:
    """An engine, as far as the decision needs it; no decision changes it. `correction` is that of its prefill costs by
    what was seen, `waiting_count` the prompts that wait there, `arrivals_per_s` the rate of those that come, and
    `busy_share` the part of the time that their prefills take. `growth_s` is the time that one more stream takes from
    each other one, over its whole answer; None where that is not known.
    """

    name: str
    prefill: PrefillCosts
    queue_s: float = 0.0
    active_count: int = 0
    requests_max: int = 1
    held_tokens: int = 0
    stored: StoredPrefix | None = None
    free_tokens: int | None = None
    correction: Correction = EXACT
    waiting_count: int = 0
    arrivals_per_s: float = 0.0
    busy_share: float = 0.0
    growth_s: float | None = None


@dataclass(frozen=True, slots=True)
class Prediction:
    """The terms of an engine's TTFT. `load_chunks` is the chunk up to which the prefix is held or loaded; the engine
    loads those that it does not hold. `compute_s` is the prefill with its loads. `others_s` is no part of the TTFT: it
    is the delay of other requests, all together, where the policy counts it.
    """

    engine: str
    queue_s: float
    routing_s: float
    compute_s: float
    recompute_s: float
    held_tokens: int
    stored_tokens: int
    load_chunks: int
    load_tokens: int
    choice: Choice
    rate_bytes_per_s: float | None = None
    others_s: float = 0.0

    @property
    def cost_s(self) -> float:
        """The TTFT, and the delay of the others."""
        return self.ttft_s + self.others_s

    @property
    def ttft_s(self) -> float:
        """The sum."""
        return self.queue_s + self.routing_s + self.compute_s


def predict(prompt_tokens: int, state: EngineState, routing_s: float = ROUTING_S) -> Prediction:
    """The prediction for a prompt of at least one token. Of a prompt that an engine holds whole, the last token is
    computed again.
    """
    held_tokens = max(0, min(state.held_tokens, prompt_tokens - 1))
    prefill = state.correction.corrected(state.prefill)
    stored = state.stored
    if stored is None or not stored.chunk_count:
        compute_s = recompute_s(prompt_tokens, held_tokens, prefill)
        return Prediction(
            engine=state.name,
            queue_s=state.queue_s,
            routing_s=routing_s,
            compute_s=compute_s,
            recompute_s=compute_s,
            held_tokens=held_tokens,
            stored_tokens=0,
            load_chunks=0,
            load_tokens=0,
            choice=Choice.RECOMPUTE,
        )
    request = AdviceRequest(
        prompt_tokens, stored.layout, prefill, layer_major=stored.costs, chunk_major=stored.costs,
        held_tokens=held_tokens,
    )  # fmt: skip
    offered = max(RATE_MIN_BYTES_PER_S, stored.rate_bytes_per_s) if stored.rate_bytes_per_s > 0 else 0.0
    advice = advise(stored.chunk_count, request, offered)
    chunk_tokens = stored.layout.chunk_tokens
    is_loading = advice.choice is not Choice.RECOMPUTE
    return Prediction(
        engine=state.name,
        queue_s=state.queue_s,
        routing_s=routing_s,
        compute_s=advice.ttft_s[advice.choice],
        recompute_s=advice.ttft_s[Choice.RECOMPUTE],
        held_tokens=held_tokens,
        stored_tokens=stored.chunk_count * chunk_tokens,
        load_chunks=advice.chunk_count if is_loading else held_tokens // chunk_tokens,
        load_tokens=max(0, advice.chunk_count * chunk_tokens - held_tokens) if is_loading else 0,
        choice=advice.choice,
        rate_bytes_per_s=advice.rate_bytes_per_s,
    )


def least_ttft_s(prompt_tokens: int, state: EngineState, routing_s: float = ROUTING_S) -> float:
    """No prediction is below this: as if all that is stored were there at once."""
    stored_tokens = 0 if state.stored is None else state.stored.chunk_count * state.stored.layout.chunk_tokens
    there = max(0, min(max(state.held_tokens, stored_tokens), prompt_tokens - 1))
    return state.queue_s + routing_s + recompute_s(prompt_tokens, there, state.correction.corrected(state.prefill))


def recompute_s(prompt_tokens: int, held_tokens: int, prefill: PrefillCosts) -> float:
    """The prefill of the tokens behind those that are held (`PrefillCosts.prefill_s`, for one number)."""
    rest = prompt_tokens - held_tokens
    pairs = rest * (prompt_tokens + held_tokens) / 2
    return (prefill.request_us + prefill.token_us * rest + prefill.token_pair_us * pairs) * 1e-6
