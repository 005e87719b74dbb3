"""From measured times to Theta, how sure it is, and what a wrong one costs. Pure.

    W payload bytes   Theta threshold   C compute time of a layer   X transfer times (Eq. 3)

Chunk-major delivery: TTFT = when everything is there, plus L*C. Layer-major: Eq. 3 with the measured X. A threshold
(Eq. 2) costs, for each payload, what its choice takes longer than the better of both orders would. Theta is the
threshold of the least cost as a factor, in the geometric mean, which one disturbed round does not sway; between the two
sizes that enclose it, it lies where the orders are level.
Sizes are told apart by powers of two, so that no threshold is fitted between payloads that are nearly the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from bench.calibration.points import Point, Run
from bench.samples import State
from descriptors.ttft import ttft_chunkwise_s, ttft_layerwise_s

THETA_STEP_BYTES = 4096
RESAMPLES = 400
CONFIDENCE = 0.9
FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)
Floats = NDArray[np.float64]


class Side(Enum):
    """Where the crossing lies: among the measured sizes, or beyond them, where Theta is only a bound."""

    BETWEEN = "between"
    BELOW_ALL = "below_all"
    ABOVE_ALL = "above_all"


@dataclass(frozen=True, slots=True)
class Curve:
    """TTFT in seconds, modelled from measured transfers: a row for each round and a column for each size, ascending."""

    state: State
    transport: str
    compute_s: float
    families: tuple[str, ...]
    payload_bytes: NDArray[np.int64]
    chunk_major_s: Floats
    layer_major_s: Floats


@dataclass(frozen=True, slots=True)
class Theta:
    """`theta_bytes` and the interval in which it lies when rounds are drawn anew (bootstrap, `CONFIDENCE`)."""

    theta_bytes: int
    low_bytes: int
    high_bytes: int
    side: Side


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """What another threshold does to TTFT, relative to Theta's: in the geometric mean and at the payload hit hardest;
    and its mean cost over always choosing the better order. `factor` is None for the extremes: 0 (always layer-major)
    and infinite.
    """

    name: str
    factor: float | None
    theta_bytes: float
    mean_change: float
    worst_change: float
    worst_change_s: float
    worst_case: str
    mean_cost: float


def ttft_s(run: Run, compute_s: float) -> tuple[float, float]:
    """TTFT in seconds of (chunk-major, layer-major) for the same compute time in every layer."""
    ready_s = np.maximum.accumulate(np.array(run.layers_s))
    compute = [compute_s] * len(ready_s)
    transfers = np.diff(ready_s, prepend=0.0).tolist()
    all_at_once = [run.chunk_major_s] + [0.0] * (len(compute) - 1)
    return ttft_chunkwise_s(all_at_once, compute), ttft_layerwise_s(transfers, compute)


def make_curves(points: Sequence[Point], computes_s: Sequence[float]) -> list[Curve]:
    """One for each state, transport and compute time. Every point needs the same number of runs."""
    curves = []
    for state, transport in dict.fromkeys((point.state, point.transport) for point in points):
        some = [point for point in points if (point.state, point.transport) == (state, transport)]
        some.sort(key=lambda point: point.payload_bytes)
        sizes = np.array([point.payload_bytes for point in some], dtype=np.int64)
        families = tuple(point.family for point in some)
        for compute_s in computes_s:
            both = np.array([[ttft_s(run, compute_s) for run in point.runs] for point in some])
            curves.append(Curve(state, transport, compute_s, families, sizes, both[:, :, 0].T, both[:, :, 1].T))
    return curves


def find_theta(curves: Sequence[Curve], seed: int) -> Theta:
    """One Theta for all curves together. Raises ValueError without a curve."""
    sizes = _joined(curves, lambda curve: curve.payload_bytes).astype(np.int64)
    chunk, layer = (
        _joined(curves, lambda curve: curve.chunk_major_s),
        _joined(curves, lambda curve: curve.layer_major_s),
    )
    theta_bytes, side = _least_cost(sizes, np.median(chunk, axis=0), np.median(layer, axis=0))
    random = np.random.default_rng(seed)
    rounds = len(chunk)
    found = []
    for _ in range(RESAMPLES):
        drawn = random.integers(0, rounds, rounds)
        found.append(_least_cost(sizes, np.median(chunk[drawn], axis=0), np.median(layer[drawn], axis=0))[0])
    low, high = np.quantile(found, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2], method="nearest")
    return Theta(theta_bytes, min(int(low), theta_bytes), max(int(high), theta_bytes), side)


def sensitivities(curves: Sequence[Curve], theta_bytes: int) -> list[Sensitivity]:
    """A quarter to four times Theta, and no threshold at all."""
    found = [_sensitivity(curves, theta_bytes, f"Theta x {factor:g}", factor) for factor in FACTORS]
    found.append(_sensitivity(curves, theta_bytes, "always layer-major", None, 0.0))
    found.append(_sensitivity(curves, theta_bytes, "always chunk-major", None, math.inf))
    return found


def _sensitivity(
    curves: Sequence[Curve], theta_bytes: int, name: str, factor: float | None, other_bytes: float = 0.0
) -> Sensitivity:
    other_bytes = other_bytes if factor is None else theta_bytes * factor
    sizes = _joined(curves, lambda curve: curve.payload_bytes)
    chunk = np.median(_joined(curves, lambda curve: curve.chunk_major_s), axis=0)
    layer = np.median(_joined(curves, lambda curve: curve.layer_major_s), axis=0)
    chosen = np.where(sizes < theta_bytes, chunk, layer)
    other = np.where(sizes < other_bytes, chunk, layer)
    change = other / chosen - 1
    worst = int(change.argmax())
    return Sensitivity(
        name,
        factor,
        other_bytes,
        _mean_growth(other / chosen),
        float(change[worst]),
        float(other[worst] - chosen[worst]),
        _cases(curves)[worst],
        _mean_growth(other / np.minimum(chunk, layer)),
    )


def _least_cost(sizes: NDArray[np.int64], chunk: Floats, layer: Floats) -> tuple[int, Side]:
    """The threshold for medians of one column each."""
    gain = np.log(chunk / layer)
    octaves = np.round(np.log2(sizes))
    groups = [octaves == octave for octave in np.unique(octaves)]
    of_chunk = np.array([np.maximum(gain[group], 0).sum() for group in groups])
    of_layer = np.array([np.maximum(-gain[group], 0).sum() for group in groups])
    # cost of a split before group i: chunk-major below it, layer-major from it on
    costs = np.concatenate(([0.0], np.cumsum(of_chunk))) + np.concatenate((np.cumsum(of_layer[::-1])[::-1], [0.0]))
    split = int(costs.argmin())
    if split == 0:
        return int(sizes.min()), Side.BELOW_ALL
    if split == len(groups):
        return int(sizes.max()) + 1, Side.ABOVE_ALL
    below, above = groups[split - 1], groups[split]
    gains = [float(gain[group].mean()) for group in (below, above)]
    return _level(int(sizes[below].max()), int(sizes[above].min()), *gains), Side.BETWEEN


def _level(below_bytes: int, above_bytes: int, gain_below: float, gain_above: float) -> int:
    """Where the gain is zero, linear over log W; the middle where the two gains do not say."""
    share = -gain_below / (gain_above - gain_below) if gain_below < 0 < gain_above else 0.5
    theta_bytes = math.exp(math.log(below_bytes) * (1 - share) + math.log(above_bytes) * share)
    stepped = round(theta_bytes / THETA_STEP_BYTES) * THETA_STEP_BYTES
    return min(max(stepped, below_bytes + 1), above_bytes)


def _mean_growth(factors: Floats) -> float:
    return math.expm1(float(np.log(factors).mean()))


def _joined(curves: Sequence[Curve], of: Callable[[Curve], NDArray[np.int64] | Floats]) -> Floats:
    if not curves:
        raise ValueError("no curve, no threshold")
    return np.concatenate([of(curve) for curve in curves], axis=-1, dtype=np.float64)


def _cases(curves: Sequence[Curve]) -> list[str]:
    return [
        f"{size} bytes of {family} over {curve.transport}, {curve.state.value}, {curve.compute_s * 1e6:g} us a layer"
        for curve in curves
        for size, family in zip(curve.payload_bytes.tolist(), curve.families, strict=True)
    ]


def sign_changes(curve: Curve) -> int:
    """How often the better order changes along the curve's medians: 1 where there is one clear crossing."""
    gains = np.sign(np.median(curve.chunk_major_s, axis=0) - np.median(curve.layer_major_s, axis=0)).tolist()
    return sum(before != after for before, after in pairwise(gains))
