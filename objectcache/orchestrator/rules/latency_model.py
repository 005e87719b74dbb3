"""The latency model of 003, and its golden tables.

    total = routing + (prompt - prefix hit) * prefill + output * decode

003 does not print its costs. These give its table: 5 ms of routing, 1 ms for each token computed, 10 ms for each put
out, prompts of 1,200 tokens with 20 put out, and prefixes of 840. The text has 980 ms for "prefix reuse" and hits of
555 ms, which 850 tokens would give; the table has 985, so hits of 565. Which requests are refused is decided by the
block pools (orchestrator.rules.block_pool): a node of 62 blocks, as in 003's trace, of 120 tokens each.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from objectcache.orchestrator.rules.block_pool import Allocation, BlockPools, required_blocks

NODE_BLOCKS, BLOCK_TOKENS = 62, 120


@dataclass(frozen=True, slots=True)
class LatencyCosts:
    """Milliseconds of routing, for each token that is computed, and for each that is put out."""

    routing_ms: float = 5.0
    prefill_ms: float = 1.0
    decode_ms: float = 10.0


@dataclass(frozen=True, slots=True)
class ModelRequest:
    """A request of the model, in tokens."""

    prompt_tokens: int = 1200
    output_tokens: int = 20
    prefix_hit_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Scenario:
    """A row of 003's strategy table. Of a refused request the latency is None."""

    name: str
    latencies_ms: tuple[float | None, ...]
    hit_count: int

    @property
    def average_ms(self) -> float:
        """As 003 counts: a refused request has taken 0 ms."""
        return sum(each or 0.0 for each in self.latencies_ms) / len(self.latencies_ms)

    @property
    def admitted_average_ms(self) -> float:
        """Over the requests that were admitted."""
        admitted = [each for each in self.latencies_ms if each is not None]
        return sum(admitted) / len(admitted)

    @property
    def p95_ms(self) -> float:
        """The nearest-rank percentile of the admitted ones."""
        admitted = sorted(each for each in self.latencies_ms if each is not None)
        return admitted[max(0, math.ceil(0.95 * len(admitted)) - 1)]

    @property
    def hit_rate(self) -> float:
        """The hit rate of all requests."""
        return self.hit_count / len(self.latencies_ms)

    @property
    def rejection_rate(self) -> float:
        """The rejection rate of all requests."""
        return sum(each is None for each in self.latencies_ms) / len(self.latencies_ms)


def latency_ms(request: ModelRequest, costs: LatencyCosts) -> float:
    """The model's latency."""
    computed = request.prompt_tokens - request.prefix_hit_tokens
    return costs.routing_ms + computed * costs.prefill_ms + request.output_tokens * costs.decode_ms


MISS = ModelRequest()
PREFIX_HIT = ModelRequest(prefix_hit_tokens=840)
EXACT_HIT = ModelRequest(prefix_hit_tokens=1200)
LARGE = ModelRequest(prompt_tokens=4000)
"""The request that does not fit beside the others."""


def admitted(requests: Sequence[ModelRequest], *, end: bool) -> list[ModelRequest | None]:
    """The requests with None in place of those that one node has no room for. Each still runs when the next one comes,
    or has ended by then and can be evicted.
    """
    pools = BlockPools({"node": NODE_BLOCKS})
    found: list[ModelRequest | None] = []
    for number, request in enumerate(requests):
        allocation = pools.allocate(str(number), required_blocks(request.prompt_tokens, BLOCK_TOKENS))
        found.append(request if isinstance(allocation, Allocation) else None)
        if end:
            pools.finish(str(number))
    return found


def strategy_table(costs: LatencyCosts | None = None) -> list[Scenario]:
    """003's five rows, derived from the model."""
    costs = LatencyCosts() if costs is None else costs

    def row(name: str, requests: Sequence[ModelRequest | None]) -> Scenario:
        latencies = tuple(None if each is None else latency_ms(each, costs) for each in requests)
        return Scenario(name, latencies, sum(each is not None and each.prefix_hit_tokens > 0 for each in requests))

    return [
        row("no cache", [MISS, MISS, MISS, MISS]),
        row("prefix reuse", [MISS, PREFIX_HIT, MISS, PREFIX_HIT]),
        row("exact cache", [EXACT_HIT, EXACT_HIT, EXACT_HIT, EXACT_HIT]),
        row("memory-aware", admitted([MISS, PREFIX_HIT, MISS, LARGE], end=False)),
        row("memory-aware, eviction", admitted([MISS, PREFIX_HIT, MISS, LARGE], end=True)),
    ]
