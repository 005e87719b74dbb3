"""What a delivery costs on this machine, fitted to measured times: what the scheduler has to reckon with. Pure.

    T = request + N*chunk + L*layer + W/rate          chunk-major: without the layers
    X_0 = request + N*chunk + layer + N*S/rate        the first layer of layer-major

Least squares of relative errors, so that small payloads count as much as large ones; no cost may be negative.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from bench.calibration.points import Point

GAIN_MIN, LOSS_MIN = 0.01, 1e-12
"""A further cost must explain something: N and W hardly differ where all chunks are of one size."""


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds for each request, chunk and layer, bytes/s for the rest; `error` is the median relative error."""

    request_s: float
    chunk_s: float
    layer_s: float
    bytes_per_s: float
    error: float


def chunk_major_costs(points: Sequence[Point]) -> Costs:
    """Of points of one transport and state. Raises ValueError where they fit nothing."""
    rows = [(1.0, point.chunk_count, 0.0, point.payload_bytes) for point in points]
    return fit(rows, [statistics.median(run.chunk_major_s for run in point.runs) for point in points])


def layer_major_costs(points: Sequence[Point]) -> Costs:
    """As `chunk_major_costs`."""
    rows: list[tuple[float, float, float, float]] = []
    times_s = []
    for point in points:
        layer_bytes = point.layout.layer_bytes(point.chunk_count)
        rows.append((1.0, point.chunk_count, point.layout.num_layers, point.payload_bytes))
        times_s.append(statistics.median(max(run.layers_s) for run in point.runs))
        rows.append((1.0, point.chunk_count, 1.0, layer_bytes))
        times_s.append(statistics.median(run.layers_s[0] for run in point.runs))
    return fit(rows, times_s)


def fit(rows: Sequence[tuple[float, float, float, float]], times_s: Sequence[float]) -> Costs:
    """Coefficients of (1, N, L, bytes), none negative. Raises ValueError where time does not grow with bytes."""
    measured = np.array(times_s)
    scaled = np.array(rows, dtype=np.float64) / measured[:, None]
    best: tuple[float, NDArray[np.float64]] | None = None
    others = [column for column in range(3) if scaled[:, column].any()]
    for size in range(len(others) + 1):
        for some in combinations(others, size):
            columns = [*some, 3]
            solved = np.linalg.lstsq(scaled[:, columns], np.ones(len(measured)), rcond=None)[0]
            if (solved <= 0).any():
                continue
            loss = float(((scaled[:, columns] @ solved - 1) ** 2).sum())
            if best is None or loss < best[0] * (1 - GAIN_MIN) - LOSS_MIN:
                coefficients = np.zeros(4)
                coefficients[columns] = solved
                best = loss, coefficients
    if best is None:
        raise ValueError("the times do not grow with the bytes")
    request_s, chunk_s, layer_s, byte_s = best[1].tolist()
    errors = np.abs(scaled @ best[1] - 1)
    return Costs(request_s, chunk_s, layer_s, 1 / byte_s, float(np.median(errors)))
