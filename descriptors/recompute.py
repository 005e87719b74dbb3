"""Recompute or load: how much of a matched prefix is worth fetching, and in which order. Pure.

P context_tokens   n chunks loaded   h = n*G cached tokens   C(h) prefill of tokens [h, P)   c = C(h)/L   r rate

    recompute   C(0)
    chunkwise   request + n*chunk + n*L*S/r + C(h)
    layerwise   X_0 + (L-1)*max(X, c) + c       Eq. 3: X = layer + n*S/r, X_0 = request + n*chunk + X

Every n is weighed, up to the chunks that are stored and leave a token to compute, because a prefill computes at least
one token. No load is faster at a lower rate. So there is one rate below which every load is slower than recomputing:
the break-even.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from descriptors.descriptor import Delivery
from descriptors.layout import ChunkLayout

Floats = npt.NDArray[np.float64]
_US = 1e-6


class Choice(Enum):
    """How much of a stored prefix to load, and in which order. Where times are equal, the first choice in this order is
    taken.
    """

    RECOMPUTE = "recompute"
    CHUNKWISE = "chunkwise"
    LAYERWISE = "layerwise"
    PREFIX = "prefix"


@dataclass(frozen=True, slots=True)
class DeliveryCosts:
    """The costs of a delivery besides the offered rate: seconds for the request, for each chunk and for each layer
    (chunk-major has none), and the bytes/s that the transport can carry (0: no limit).
    """

    request_s: float = 0.0
    chunk_s: float = 0.0
    layer_s: float = 0.0
    bytes_per_s: float = 0.0


NO_COSTS = DeliveryCosts()


@dataclass(frozen=True, slots=True)
class PrefillCosts:
    """The prefill of tokens [h, P) takes request_us + token_us*(P-h) + token_pair_us*(P^2-h^2)/2."""

    token_us: float
    token_pair_us: float = 0.0
    request_us: float = 0.0

    def prefill_s(self, context_tokens: int, cached_tokens: Floats) -> Floats:
        """C(h) in seconds for each h."""
        rest = context_tokens - cached_tokens
        pairs = rest * (context_tokens + cached_tokens) / 2
        return (self.request_us + self.token_us * rest + self.token_pair_us * pairs) * _US


@dataclass(frozen=True, slots=True)
class MeasuredPrefill:
    """Prefill times measured at the prompt's own length: (cached_tokens, prefill_us), by cached_tokens, the first at 0.
    Between two points the time is interpolated. Beyond the last point it is that of the last point.
    """

    points: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        problem = measured_problem(self.points)
        if problem is not None:
            raise ValueError(problem)

    def prefill_s(self, context_tokens: int, cached_tokens: Floats) -> Floats:
        """C(h) in seconds for each h."""
        known, times_us = zip(*self.points, strict=True)
        prefill_us: Floats = np.interp(cached_tokens, known, times_us)
        return prefill_us * _US


def measured_problem(points: tuple[tuple[int, int], ...]) -> str | None:
    """The problem of a table of measured prefills; None where it is valid."""
    if not points or points[0][0] != 0:
        return "must begin at 0 cached tokens"
    if any(after[0] <= before[0] for before, after in pairwise(points)):
        return "must be in order of cached tokens, each once"
    return None


@dataclass(frozen=True, slots=True)
class AdviceRequest:
    """A prompt of `context_tokens`, the shape of its chunks and the cost of computing it. `bytes_per_s` is the rate
    that the caller knows of its own link (0: unknown). The costs are given for either order of delivery. The caller has
    the first `held_tokens` itself, and need not load their chunks; this is not sent, as a server need not know.
    """

    context_tokens: int
    layout: ChunkLayout
    prefill: PrefillCosts | MeasuredPrefill
    bytes_per_s: float = 0.0
    layer_major: DeliveryCosts = NO_COSTS
    chunk_major: DeliveryCosts = NO_COSTS
    held_tokens: int = 0

    @property
    def held_chunks(self) -> int:
        """Chunks that need no loading."""
        return self.held_tokens // self.layout.chunk_tokens


@dataclass(frozen=True, slots=True)
class Advice:
    """The advice to use the first `chunk_count` chunks and to compute the rest. Of those chunks, the ones that are not
    held are fetched with `delivery` (None: fetch nothing).

    `ttft_s` has the time of every possible choice: CHUNKWISE and LAYERWISE load as much as they can, PREFIX is the best
    of all shorter prefixes. `break_even_bytes_per_s` is the offered rate at which the best load takes as long as
    recomputing (None: no rate makes loading faster). `rate_bytes_per_s` is the rate that was assumed (None: not
    limited).
    """

    choice: Choice
    chunk_count: int
    delivery: Delivery | None
    ttft_s: dict[Choice, float]
    break_even_bytes_per_s: float | None
    rate_bytes_per_s: float | None


def advise(matched: int, request: AdviceRequest, offered_bytes_per_s: float = 0.0) -> Advice:
    """Advice on `matched` stored chunks, when the storage side offers this rate (0: not limited). The lower of the
    offered rate and the request's own is assumed; with neither, only the costs limit a load.
    """
    held, loadable = request.held_chunks, loadable_chunks(matched, request)
    rate = min((known for known in (offered_bytes_per_s, request.bytes_per_s) if known > 0), default=None)
    cached_tokens = np.arange(held, held + loadable + 1, dtype=np.float64) * request.layout.chunk_tokens
    cached_tokens[0] = request.held_tokens
    prefill_s = request.prefill.prefill_s(request.context_tokens, cached_tokens)
    recompute_s, computes_s = float(prefill_s[0]), prefill_s[1:]
    ttft_s = {Choice.RECOMPUTE: recompute_s}
    plans: dict[Choice, tuple[int, Delivery | None]] = {Choice.RECOMPUTE: (held, None)}
    if loadable:
        loads_s = np.stack([_chunkwise_s(request, computes_s, rate), _layerwise_s(request, computes_s, rate)])
        ttft_s |= {Choice.CHUNKWISE: float(loads_s[0, -1]), Choice.LAYERWISE: float(loads_s[1, -1])}
        plans |= {
            Choice.CHUNKWISE: (held + loadable, Delivery.CHUNK_MAJOR),
            Choice.LAYERWISE: (held + loadable, Delivery.LAYER_MAJOR),
        }
    if loadable > 1:
        shorter = int(loads_s[:, :-1].min(axis=0).argmin())
        way = int(loads_s[:, shorter].argmin())
        ttft_s[Choice.PREFIX] = float(loads_s[way, shorter])
        plans[Choice.PREFIX] = (held + shorter + 1, (Delivery.CHUNK_MAJOR, Delivery.LAYER_MAJOR)[way])
    choice = min(ttft_s, key=ttft_s.__getitem__)
    chunk_count, delivery = plans[choice]
    return Advice(
        choice=choice,
        chunk_count=chunk_count,
        delivery=delivery,
        ttft_s=ttft_s,
        break_even_bytes_per_s=_break_even(request, recompute_s, computes_s),
        rate_bytes_per_s=rate,
    )


def loadable_chunks(matched: int, request: AdviceRequest) -> int:
    """How many stored chunks can be loaded: those that are not held and leave a token to compute."""
    leaving_one = min(matched, (request.context_tokens - 1) // request.layout.chunk_tokens)
    return max(0, leaving_one - request.held_chunks)


def _chunkwise_s(request: AdviceRequest, computes_s: Floats, rate: float | None) -> Floats:
    costs, counts = request.chunk_major, _counts(computes_s)
    moving_s = counts * request.layout.chunk_bytes * _byte_s(costs, rate)
    return computes_s + (costs.request_s + counts * costs.chunk_s + moving_s)


def _layerwise_s(request: AdviceRequest, computes_s: Floats, rate: float | None) -> Floats:
    """Eq. 3 as the sum of computing, the first layer, and the stalls (Eq. 4) of the others."""
    costs, counts, layers = request.layer_major, _counts(computes_s), request.layout.num_layers
    layer_s = costs.layer_s + counts * request.layout.per_layer_chunk_bytes * _byte_s(costs, rate)
    stall_s: Floats = np.maximum(0.0, layer_s - computes_s / layers)
    return computes_s + (costs.request_s + counts * costs.chunk_s + layer_s) + (layers - 1) * stall_s


def _counts(computes_s: Floats) -> Floats:
    return np.arange(1, len(computes_s) + 1, dtype=np.float64)


def _byte_s(costs: DeliveryCosts, rate: float | None) -> float:
    """The seconds that a byte takes, at the lower of the offered rate and the transport's own."""
    return max(_inverse(rate or 0.0), _inverse(costs.bytes_per_s))


def _inverse(bytes_per_s: float) -> float:
    return 1 / bytes_per_s if bytes_per_s > 0 else 0.0


def _break_even(request: AdviceRequest, recompute_s: float, computes_s: Floats) -> float | None:
    """Solve each load for the time that a byte may take; the longest such time gives the break-even rate.

    A chunkwise load is linear in that time. A layerwise load is the greater of two linear functions (no layer stalls,
    all do), so it reaches recompute_s at the lesser of their solutions.
    """
    layout, counts = request.layout, _counts(computes_s)
    layers, layer_bytes = layout.num_layers, counts * layout.per_layer_chunk_bytes
    chunk_major, layer_major = request.chunk_major, request.layer_major
    saved_s = recompute_s - computes_s - (chunk_major.request_s + counts * chunk_major.chunk_s)
    chunkwise = saved_s / (layers * layer_bytes)
    begun_s = layer_major.request_s + counts * layer_major.chunk_s
    hidden = (recompute_s - computes_s - begun_s - layer_major.layer_s) / layer_bytes
    stalled = (recompute_s - computes_s / layers - begun_s - layers * layer_major.layer_s) / (layers * layer_bytes)
    bearable = [
        float(byte_s)
        for costs, solved in ((chunk_major, chunkwise), (layer_major, np.minimum(hidden, stalled)))
        if (byte_s := solved.max(initial=0.0)) > 0 and byte_s >= _inverse(costs.bytes_per_s)
    ]
    rate = 1 / max(bearable) if bearable else math.inf
    return rate if math.isfinite(rate) else None
