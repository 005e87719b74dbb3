"""A link: requests of the paper, scaled to what one request moves here, and rates for each; and from measured times
what the link moves and the margin it needs over r*, as rows of the result. Pure.

    s layer_bytes   c compute_s   r rate   r* = s/c zero-stall rate   delta = knee - r*, Eq. 7's margin

r* keeps its ratio to the link: the paper's is 100 Gbps, ours what one request moves. s and c shrink together, which
leaves r* as it is, until the layer is small enough for this machine's memory and the window short enough for
measuring often.

Each request is held to a rate and the time is taken at which each layer is there. Its TTFT follows: layer l is
computed from when it is there and layer l-1 is done, and for c. Nobody has to wait for c to know that, as the server
sends by rate, not by what the client computes. The knee is where TTFT, less the first layer's own transfer, stops
falling (calibration.knee): the smallest rate whose TTFT is within `TOLERANCE` of the largest rate's. With layers that
come exactly when the rate has carried them it lies a little below r*, by about the tolerance, and delta is 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import numpy as np

from descriptors.layout import ChunkLayout
from descriptors.units import KIB, MIB, bytes_per_s_from_gbps
from objectcache.calibration.knee import Sample, falling_curve, find_knee, without_first_layer
from objectcache.calibration.samples import Spread, spread
from storage_server.delivery.scheduler.policies import MARGIN_BYTES_PER_S

Row = Mapping[str, Any]
TOLERANCE = 0.02
"""Medians of a few requests of 20 to 200 ms on a machine that does other things too differ by about one percent."""
PAPER_LINK_BYTES_PER_S = bytes_per_s_from_gbps(100)
PAPER_NUM_LAYERS = 32
PAPER_TOKEN_LAYER_BYTES = 4096
PAPER_REQUESTS = {
    ("4K", 0.5): (2048, 0.18531),
    ("4K", 0.875): (3584, 0.06347),
    ("32K", 0.875): (28672, 0.76319),
    ("64K", 0.875): (57344, 2.42390),
}
"""Rows of Table A8 by context and hit rate: cached tokens, and the seconds that computing all layers takes."""
FULL_LAYOUT = ChunkLayout(32, 64, 256 * KIB)
MARGIN_SHARE = MARGIN_BYTES_PER_S / PAPER_LINK_BYTES_PER_S
"""The paper's margin as a part of its link."""


@dataclass(frozen=True, slots=True)
class PaperPoint:
    """A row of Table A8, and the most that a layer of it may have here."""

    context: str
    hit_rate: float
    layer_bytes_max: int

    @property
    def name(self) -> str:
        """As the tables of the paper have it."""
        return f"{self.context}, {100 * self.hit_rate:g}%"


@dataclass(frozen=True, slots=True)
class SweptRequest:
    """One request whose rate is swept: `chunk_count` chunks make layers of `layer_bytes`."""

    name: str
    chunk_count: int
    layer_bytes: int
    compute_s: float

    @property
    def zero_stall_bytes_per_s(self) -> float:
        """r*."""
        return self.layer_bytes / self.compute_s


@dataclass(frozen=True, slots=True)
class LinkPlan:
    """`together` requests of `together_chunks` chunks each say what the link moves, `runs` counted times; then every
    rate of every point, `sweep_runs` times. `factors` are rates over r*. By default Llama 3.1 8B at G=64: layers of 1
    to 8 MiB that need an eighth to six tenths of the link.
    """

    runs: int
    sweep_runs: int
    layout: ChunkLayout = FULL_LAYOUT
    together: int = 4
    together_chunks: int = 8
    points: tuple[PaperPoint, ...] = (
        PaperPoint("4K", 0.5, 2 * MIB),
        PaperPoint("64K", 0.875, MIB),
        PaperPoint("32K", 0.875, 4 * MIB),
        PaperPoint("4K", 0.875, 8 * MIB),
    )
    compute_s_max: float = 0.006
    factors: tuple[float, ...] = (0.7, 0.85, 0.95, 1.0, 1.05, 1.1, 1.2, 1.35, 1.6)
    seed: int = 1

    @property
    def chunk_count(self) -> int:
        """Chunks that are stored: the requests that come together have different ones, the others the first of them."""
        return max([self.together * self.together_chunks, *map(self.chunks_max, self.points)])

    @property
    def stored_bytes(self) -> int:
        """The bytes of all chunks together."""
        return self.layout.delivery_bytes(self.chunk_count)

    def chunks_max(self, point: PaperPoint) -> int:
        """That the point's largest layer has."""
        return max(1, point.layer_bytes_max // self.layout.per_layer_chunk_bytes)

    def request(self, point: PaperPoint, single_bytes_per_s: float) -> SweptRequest:
        """The point on a link on which one request moves so much."""
        cached_tokens, compute_s = PAPER_REQUESTS[point.context, point.hit_rate]
        layer_compute_s = compute_s / PAPER_NUM_LAYERS
        paper_star = cached_tokens * PAPER_TOKEN_LAYER_BYTES / layer_compute_s
        star = paper_star * single_bytes_per_s / PAPER_LINK_BYTES_PER_S
        wanted_bytes = star * min(layer_compute_s, self.compute_s_max)
        count = max(1, min(round(wanted_bytes / self.layout.layer_bytes(1)), self.chunks_max(point)))
        layer_bytes = self.layout.layer_bytes(count)
        return SweptRequest(point.name, count, layer_bytes, layer_bytes / star)

    def rates(self, request: SweptRequest, single_bytes_per_s: float) -> list[float]:
        """Ascending: those around r*, and r* with the paper's margin."""
        star = request.zero_stall_bytes_per_s
        return sorted({factor * star for factor in self.factors} | {star + MARGIN_SHARE * single_bytes_per_s})


def full_link_plan(runs: int) -> LinkPlan:
    """The plan that a machine is calibrated by."""
    return LinkPlan(runs, runs)


def smoke_link_plan(runs: int) -> LinkPlan:
    """Whether it works, not how fast."""
    points = (PaperPoint("4K", 0.5, 32 * KIB), PaperPoint("64K", 0.875, 64 * KIB))
    return LinkPlan(
        runs=runs,
        sweep_runs=runs,
        layout=ChunkLayout(4, 16, 16 * KIB),
        together=2,
        together_chunks=2,
        points=points,
        compute_s_max=0.001,
        factors=(0.5, 1.0, 2.0),
    )


def link_row(
    together_bytes_per_s: Sequence[float],
    single_bytes_per_s: Sequence[float],
    held: Mapping[SweptRequest, Sequence[Row]],
    seed: int,
) -> dict[str, Any]:
    """All that follows of one transport, raw samples included: what several requests, all of them, and what one alone
    moved in each round, and the knees of the requests that were held: each time to `rate_bytes_per_s`, with the seconds
    from asking until each layer was there in `layers_s`. The link moves the median round of the better of both; its
    margin is the median of the requests', none where that is negative; the paper's is 5 Gbps of its 100, as the same
    part of what one request moves here. Raises ValueError for fewer than three rates, or without a request.
    """
    if not held:
        raise ValueError("no request was swept")
    requests = [_swept_row(request, times, seed) for request, times in held.items()]
    margins = [each["margin_bytes_per_s"] for each in requests]
    return {
        "bytes_per_s": max(median(together_bytes_per_s), median(single_bytes_per_s)),
        "together_bytes_per_s": list(together_bytes_per_s),
        "single_bytes_per_s": list(single_bytes_per_s),
        "margin_bytes_per_s": max(0.0, median(margins)),
        "margins_bytes_per_s": asdict(spread([max(0.0, each) for each in margins])),
        "paper_margin_bytes_per_s": MARGIN_SHARE * median(single_bytes_per_s),
        "requests": requests,
    }


def rounds_of(link: Row) -> Spread:
    """The spread of what the link moves."""
    return spread(max(link["together_bytes_per_s"], link["single_bytes_per_s"], key=median))


def without_first(swept: Row) -> list[Sample]:
    """TTFTs of a swept request at its rates, first layers taken out."""
    return without_first_layer([Sample(**each) for each in swept["ttft_samples"]], swept["layer_bytes"])


def increase_at(swept: Row, rate_bytes_per_s: float) -> float:
    """TTFT of a swept request at a rate over that at the largest, less one; first layers taken out. Between measured
    rates it is linear over 1/r, and beyond them as at the ends.
    """
    curve = falling_curve(without_first(swept))[::-1]
    inverse = [1 / each.rate_bytes_per_s for each in curve]
    return float(np.interp(1 / rate_bytes_per_s, inverse, [each.ttft_s for each in curve])) / curve[0].ttft_s - 1


def played_ttft_s(layers_s: Sequence[float], compute_s: float) -> float:
    """End of the last layer's window, each of which begins when the layer is there and the one before is over."""
    there_s = ended_s = 0.0
    for layer_s in layers_s:
        there_s = max(there_s, layer_s)
        ended_s = max(there_s, ended_s) + compute_s
    return ended_s


def _swept_row(request: SweptRequest, held: Sequence[Row], seed: int) -> dict[str, Any]:
    samples = [Sample(each["rate_bytes_per_s"], played_ttft_s(each["layers_s"], request.compute_s)) for each in held]
    knee = find_knee(without_first_layer(samples, request.layer_bytes), TOLERANCE, seed)
    return {
        **asdict(request),
        "zero_stall_bytes_per_s": request.zero_stall_bytes_per_s,
        "knee": {**asdict(knee), "side": knee.side.value},
        "margin_bytes_per_s": knee.margin_bytes_per_s(request.zero_stall_bytes_per_s),
        "ttft_samples": [asdict(sample) for sample in samples],
        "held": list(held),
    }
