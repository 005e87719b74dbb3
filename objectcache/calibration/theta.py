"""Theta: what is measured for it, the costs of a delivery fitted to the times that came of it, how sure Theta is, and
what a wrong one costs. Pure.

    W payload bytes = N*L*S   N chunk_count   L num_layers   G chunk_tokens   S per_layer_chunk_bytes
    C compute time of a layer   X transfer times (Eq. 3)

    T = request + N*chunk + L*layer + W/rate          chunk-major: without the layers
    X_0 = request + N*chunk + layer + N*S/rate        the first layer of layer-major

A point, a row of the result, is one payload over one transport in one state, measured in several rounds. A round has
seconds since the request: when all of it was there in chunk-major, and when each layer was in layer-major.

Chunk-major delivery: TTFT = when everything is there, plus L*C. Layer-major: Eq. 3 with the measured X. A threshold
(Eq. 2) costs, for each payload, what its choice takes longer than the better of both orders would. Theta is the
threshold of the least cost as a factor, in the geometric mean, which one disturbed round does not sway; between the two
sizes that enclose it, it lies where the orders are level.
Sizes are told apart by powers of two, so that no threshold is fitted between payloads that are nearly the same.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from descriptors.layout import ChunkLayout
from descriptors.ttft import ttft_chunkwise_s, ttft_layerwise_s
from descriptors.units import KIB, MIB
from objectcache.calibration.fitting import Floats, fitted
from objectcache.calibration.knee import Side
from objectcache.calibration.samples import State

Row = Mapping[str, Any]
Terms = tuple[tuple[float, float, float, float], float]
"""1, N, L and bytes, and the seconds that they took."""
GAIN_MIN = 0.01
"""A further cost must explain something: N and W hardly differ where all chunks are of one size."""
THETA_STEP_BYTES = 4096
RESAMPLES = 400
CONFIDENCE = 0.9
FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)


@dataclass(frozen=True, slots=True)
class Family:
    """Chunks of one model: payloads of about `payload_bytes_min` to `payload_bytes_max` are prefixes of the same
    chunks.
    """

    name: str
    layout: ChunkLayout
    payload_bytes_min: int
    payload_bytes_max: int

    @property
    def counts(self) -> list[int]:
        """N of each payload, doubling from one to the next."""
        chunk_bytes = self.layout.chunk_bytes
        counts = [max(1, self.payload_bytes_max // chunk_bytes)]
        while counts[-1] > 1 and counts[-1] // 2 * chunk_bytes >= self.payload_bytes_min:
            counts.append(counts[-1] // 2)
        return counts[::-1]


@dataclass(frozen=True, slots=True)
class CalibrationPlan:
    """The cases to measure, in `runs` counted rounds."""

    families: Sequence[Family]
    runs: int
    seed: int = 1

    @property
    def largest_bytes(self) -> list[int]:
        """The largest payload of each family; the others are parts of it."""
        return [family.layout.delivery_bytes(family.counts[-1]) for family in self.families]


def point_row(family: Family, chunk_count: int, transport: str, state: State) -> dict[str, Any]:
    """A point without a run yet."""
    where = {"family": family.name, "layout": asdict(family.layout), "chunk_count": chunk_count}
    return {**where, "transport": transport, "state": state.value, "runs": []}


def payload_bytes(point: Row) -> int:
    """W."""
    return ChunkLayout(**point["layout"]).delivery_bytes(point["chunk_count"])


def full_plan(runs: int) -> CalibrationPlan:
    """From 256 KiB to 512 MiB: few and many layers, small and large slices."""
    return CalibrationPlan(
        (
            Family("8 layers of 32 KiB", ChunkLayout(8, 16, 32 * KIB), 256 * KIB, 16 * MIB),
            Family("Qwen2.5-0.5B, G=16", ChunkLayout(24, 16, 8 * KIB), 256 * KIB, 64 * MIB),
            Family("Llama-3.1-8B, G=16", ChunkLayout(32, 16, 64 * KIB), 2 * MIB, 512 * MIB),
            Family("Llama-3.1-8B, G=128", ChunkLayout(32, 128, 512 * KIB), 16 * MIB, 256 * MIB),
        ),
        runs,
    )


def smoke_plan(runs: int) -> CalibrationPlan:
    """Whether it works, not how fast."""
    return CalibrationPlan(
        (
            Family("2 layers of 8 KiB", ChunkLayout(2, 16, 8 * KIB), 16 * KIB, 128 * KIB),
            Family("8 layers of 4 KiB", ChunkLayout(8, 16, 4 * KIB), 64 * KIB, 512 * KIB),
        ),
        runs,
    )


def costs(points: Sequence[Row]) -> dict[str, dict[str, float]]:
    """The costs of each order that fit points of one transport and state: seconds for each request, chunk and layer,
    bytes/s for the rest; `error` is the median relative error. Raises ValueError where the times do not grow with the
    bytes.
    """
    chunk, layer = list[Terms](), list[Terms]()
    for point in points:
        count, layers, nbytes = point["chunk_count"], point["layout"]["num_layers"], payload_bytes(point)
        runs = [(run["chunk_major_s"], max(run["layers_s"]), run["layers_s"][0]) for run in point["runs"]]
        all_s, last_s, first_s = map(median, zip(*runs, strict=True))
        chunk.append(((1.0, count, 0.0, nbytes), all_s))
        layer += [((1.0, count, layers, nbytes), last_s), ((1.0, count, 1.0, nbytes // layers), first_s)]
    return {"chunk_major": fit(chunk), "layer_major": fit(layer)}


def fit(observed: Sequence[Terms]) -> dict[str, float]:
    """Costs of (1, N, L, bytes), none negative. Raises ValueError where time does not grow with bytes."""
    rows, times_s = zip(*observed, strict=True)
    found = fitted(rows, times_s, needed=3, gain_min=GAIN_MIN)
    if found is None:
        raise ValueError("the times do not grow with the bytes")
    request_s, chunk_s, layer_s, byte_s = found.tolist()
    errors = np.abs(np.array(rows) @ found / np.array(times_s) - 1)
    seconds = {"request_s": request_s, "chunk_s": chunk_s, "layer_s": layer_s}
    return {**seconds, "bytes_per_s": 1 / byte_s, "error": float(np.median(errors))}


def ttft_s(run: Row, compute_s: float) -> tuple[float, float]:
    """TTFT in seconds of (chunk-major, layer-major) for the same compute time in every layer."""
    ready_s = np.maximum.accumulate(np.array(run["layers_s"]))
    compute = [compute_s] * len(ready_s)
    transfers = np.diff(ready_s, prepend=0.0).tolist()
    all_at_once = [run["chunk_major_s"]] + [0.0] * (len(compute) - 1)
    return ttft_chunkwise_s(all_at_once, compute), ttft_layerwise_s(transfers, compute)


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """A point at one compute time: TTFTs of its rounds in seconds, modelled from measured transfers."""

    point: Row
    payload_bytes: int
    compute_s: float
    chunk_major_s: Floats
    layer_major_s: Floats

    @property
    def curve(self) -> tuple[str, str, float]:
        """State, transport and compute time: what a case shares with those of other payloads."""
        return self.point["state"], self.point["transport"], self.compute_s


def by_place(points: Sequence[Row]) -> dict[tuple[str, str], list[Row]]:
    """The points of each state and transport, by payload."""
    found: dict[tuple[str, str], list[Row]] = {(point["state"], point["transport"]): [] for point in points}
    for point in sorted(points, key=payload_bytes):
        found[point["state"], point["transport"]].append(point)
    return found


def make_curves(points: Sequence[Row], computes_s: Sequence[float]) -> list[list[Case]]:
    """One for each state, transport and compute time, by payload. Every point needs the same number of runs."""

    def case(point: Row, compute_s: float) -> Case:
        chunk_s, layer_s = np.array([ttft_s(run, compute_s) for run in point["runs"]]).T
        return Case(point, payload_bytes(point), compute_s, chunk_s, layer_s)

    return [[case(point, each) for point in some] for some in by_place(points).values() for each in computes_s]


def find_theta(cases: Sequence[Case], seed: int) -> dict[str, Any]:
    """One Theta for all cases together: `theta_bytes`, the interval from `low_bytes` to `high_bytes` in which it lies
    when rounds are drawn anew (bootstrap, `CONFIDENCE`), and on which `side` of the payloads. Raises ValueError without
    a case.
    """
    sizes, chunk, layer = _joined(cases)
    theta_bytes, side = _least_cost(sizes, np.median(chunk, axis=0), np.median(layer, axis=0))
    random = np.random.default_rng(seed)
    found = []
    for _ in range(RESAMPLES):
        drawn = random.integers(0, len(chunk), len(chunk))
        found.append(_least_cost(sizes, np.median(chunk[drawn], axis=0), np.median(layer[drawn], axis=0))[0])
    low, high = np.quantile(found, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2], method="nearest")
    interval = {"low_bytes": min(int(low), theta_bytes), "high_bytes": max(int(high), theta_bytes)}
    return {"theta_bytes": theta_bytes, **interval, "side": side.value}


def sensitivities(cases: Sequence[Case], theta_bytes: int) -> list[dict[str, Any]]:
    """TTFT with other thresholds, relative to TTFT with Theta: a quarter to four times Theta, and none at all (`factor`
    None): in the geometric mean, and at the payload hit hardest; and their mean cost over always choosing the better
    order. `theta_bytes` is None where it is infinite.
    """
    others = [(f"Theta x {factor:g}", factor, theta_bytes * factor) for factor in FACTORS]
    none = [("always layer-major", None, 0.0), ("always chunk-major", None, math.inf)]
    sizes, *rounds_s = _joined(cases)
    chunk, layer = (np.median(each, axis=0) for each in rounds_s)
    chosen = np.where(sizes < theta_bytes, chunk, layer)
    found = []
    for name, factor, other_bytes in [*others, *none]:
        other = np.where(sizes < other_bytes, chunk, layer)
        change = other / chosen - 1
        worst = int(change.argmax())
        state, transport, compute_s = cases[worst].curve
        family, each_us = cases[worst].point["family"], f"{compute_s * 1e6:g} us"
        found.append(
            {
                "name": name,
                "factor": factor,
                "theta_bytes": other_bytes if math.isfinite(other_bytes) else None,
                "mean_change": _mean_growth(other / chosen),
                "worst_change": float(change[worst]),
                "worst_change_s": float(other[worst] - chosen[worst]),
                "worst_case": f"{sizes[worst]} bytes of {family} over {transport}, {state}, {each_us} a layer",
                "mean_cost": _mean_growth(other / np.minimum(chunk, layer)),
            }
        )
    return found


def _least_cost(sizes: NDArray[np.int64], chunk: Floats, layer: Floats) -> tuple[int, Side]:
    """The threshold for medians of one column each."""
    gain = np.log(chunk / layer)
    octaves = np.round(np.log2(sizes))
    groups = [octaves == octave for octave in np.unique(octaves)]
    of_chunk, of_layer = ([np.maximum(sign * gain[group], 0).sum() for group in groups] for sign in (1, -1))
    # cost of a split before group i: chunk-major below it, layer-major from it on
    costs_of = [sum(of_chunk[:split]) + sum(of_layer[split:]) for split in range(len(groups) + 1)]
    split = int(np.argmin(costs_of))
    if split == 0:
        return int(sizes.min()), Side.BELOW_ALL
    if split == len(groups):
        return int(sizes.max()) + 1, Side.ABOVE_ALL
    below, above = groups[split - 1], groups[split]
    below_bytes, above_bytes = int(sizes[below].max()), int(sizes[above].min())
    gain_below, gain_above = float(gain[below].mean()), float(gain[above].mean())
    # where the gain is zero, linear over log W; the middle where the two gains do not say
    share = -gain_below / (gain_above - gain_below) if gain_below < 0 < gain_above else 0.5
    level_bytes = math.exp(math.log(below_bytes) * (1 - share) + math.log(above_bytes) * share)
    stepped = round(level_bytes / THETA_STEP_BYTES) * THETA_STEP_BYTES
    return min(max(stepped, below_bytes + 1), above_bytes), Side.BETWEEN


def _mean_growth(factors: Floats) -> float:
    return math.expm1(float(np.log(factors).mean()))


def _joined(cases: Sequence[Case]) -> tuple[NDArray[np.int64], Floats, Floats]:
    """Sizes, and TTFTs of both orders by round and case."""
    if not cases:
        raise ValueError("no curve, no threshold")
    chunk, layer = (np.array([getattr(case, f"{order}_major_s") for case in cases]).T for order in ("chunk", "layer"))
    return np.array([case.payload_bytes for case in cases], dtype=np.int64), chunk, layer


def sign_changes(cases: Sequence[Case]) -> int:
    """How often the better order changes from payload to payload: 1 where there is one clear crossing."""
    gains = [np.sign(np.median(case.chunk_major_s) - np.median(case.layer_major_s)) for case in cases]
    return sum(bool(before != after) for before, after in pairwise(gains))
