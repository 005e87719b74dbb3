"""From measured times to what a link moves and the margin it needs over r*. Pure.

    s layer_bytes   c compute_s   r rate   r* = s/c   delta = knee - r*, Eq. 7's margin

Each request was held to a rate and the time was taken at which each layer was there. Its TTFT follows: layer l is
computed from when it is there and layer l-1 is done, and for c. Nobody has to wait for c to know that, as the server
sends by rate, not by what the client computes. The knee is where TTFT, less the first layer's own transfer, stops
falling (bench.ttft.knee): the smallest rate whose TTFT is within `TOLERANCE` of the largest rate's. With layers that
come exactly when the rate has carried them it lies a little below r*, by about the tolerance, and delta is 0.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bench.calibration.link_points import MARGIN_SHARE, SweptRequest
from bench.samples import Spread, spread
from bench.ttft.knee import Knee, Sample, falling_curve, find_knee, without_first_layer

TOLERANCE = 0.02
"""Medians of a few requests of 20 to 200 ms on a machine that does other things too differ by about one percent."""


@dataclass(frozen=True, slots=True)
class Held:
    """One request held to a rate: when each layer was there, in seconds since it was asked for."""

    rate_bytes_per_s: float
    layers_s: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Moved:
    """What went over one transport as fast as it could: `together_bytes_per_s` of several requests, all of them, and
    `single_bytes_per_s` of one alone, in each round.
    """

    together_bytes_per_s: tuple[float, ...]
    single_bytes_per_s: tuple[float, ...]

    @property
    def bytes_per_s(self) -> float:
        """What the link moves: the median round of the better of both."""
        return max(statistics.median(self.together_bytes_per_s), statistics.median(self.single_bytes_per_s))

    @property
    def rounds_bytes_per_s(self) -> Spread:
        """Of that of both."""
        return spread(max(self.together_bytes_per_s, self.single_bytes_per_s, key=statistics.median))


@dataclass(frozen=True, slots=True)
class Swept:
    """One request at all its rates, and where its knee is."""

    request: SweptRequest
    samples: tuple[Sample, ...]
    knee: Knee

    @property
    def margin_bytes_per_s(self) -> float:
        """delta; negative where less than r* is enough."""
        return self.knee.margin_bytes_per_s(self.request.zero_stall_bytes_per_s)

    def increase_at(self, rate_bytes_per_s: float) -> float:
        """TTFT at a rate over that at the largest, less one; first layers taken out."""
        curve = falling_curve(without_first_layer(self.samples, self.request.layer_bytes))
        return _at(curve, rate_bytes_per_s) / curve[-1].ttft_s - 1


@dataclass(frozen=True, slots=True)
class LinkFound:
    """One transport's link. `held` has the raw times of each request, as `swept` has their TTFTs."""

    transport: str
    moved: Moved
    swept: tuple[Swept, ...]
    held: tuple[tuple[Held, ...], ...]

    @property
    def margin_bytes_per_s(self) -> float:
        """One delta for the link: the median of the requests', none where that is negative."""
        return max(0.0, statistics.median(each.margin_bytes_per_s for each in self.swept))

    @property
    def margins_bytes_per_s(self) -> Spread:
        """Of the requests, negative ones as none."""
        return spread([max(0.0, each.margin_bytes_per_s) for each in self.swept])

    @property
    def paper_margin_bytes_per_s(self) -> float:
        """The paper's 5 Gbps of its 100, as the same part of what one request moves here."""
        return MARGIN_SHARE * statistics.median(self.moved.single_bytes_per_s)


def conclude_link(transport: str, moved: Moved, held: Mapping[SweptRequest, Sequence[Held]], seed: int) -> LinkFound:
    """Everything that follows. Raises ValueError for fewer than three rates, or without a request."""
    if not held:
        raise ValueError("no request was swept")
    swept = tuple(_sweep(request, times, seed) for request, times in held.items())
    return LinkFound(transport, moved, swept, tuple(tuple(times) for times in held.values()))


def played_ttft_s(layers_s: Sequence[float], compute_s: float) -> float:
    """End of the last layer's window, each of which begins when the layer is there and the one before is over."""
    there_s = ended_s = 0.0
    for layer_s in layers_s:
        there_s = max(there_s, layer_s)
        ended_s = max(there_s, ended_s) + compute_s
    return ended_s


def _sweep(request: SweptRequest, held: Sequence[Held], seed: int) -> Swept:
    samples = tuple(Sample(each.rate_bytes_per_s, played_ttft_s(each.layers_s, request.compute_s)) for each in held)
    knee = find_knee(without_first_layer(samples, request.layer_bytes), TOLERANCE, seed)
    return Swept(request, samples, knee)


def _at(curve: Sequence[Sample], rate_bytes_per_s: float) -> float:
    """The curve at a rate, linear over 1/r, and as at its ends beyond them."""
    before = curve[0]
    for each in curve:
        if each.rate_bytes_per_s >= rate_bytes_per_s:
            if each is before:
                return each.ttft_s
            width = 1 / before.rate_bytes_per_s - 1 / each.rate_bytes_per_s
            share = (1 / before.rate_bytes_per_s - 1 / rate_bytes_per_s) / width
            return before.ttft_s + share * (each.ttft_s - before.ttft_s)
        before = each
    return before.ttft_s
