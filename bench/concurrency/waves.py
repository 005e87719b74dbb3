"""Waves of fetches that start together, and what their times say. Pure.

Jain's index of n rates x: (sum x)^2 / (n * sum x^2): 1 where all are served alike, 1/n where one is served alone
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from bench.report import Spread, spread


@dataclass(frozen=True, slots=True)
class RequestTimes:
    """One fetch, in seconds since its wave began: asked for, its first layer there, all of it there."""

    asked_s: float
    first_layer_s: float
    ended_s: float


@dataclass(frozen=True, slots=True)
class Wave:
    """One round of `count` fetches at once; `memcpy_bytes_per_s` is the round's copy rate. `memory_bytes` is the most
    the server's processes had of their own meanwhile, None where it could not be seen.
    """

    requests: tuple[RequestTimes, ...]
    memcpy_bytes_per_s: float
    memory_bytes: int | None


@dataclass(frozen=True, slots=True)
class Level:
    """All rounds of so many fetches at once over one transport, each of `payload_bytes`."""

    transport: str
    count: int
    payload_bytes: int
    waves: tuple[Wave, ...]

    def rates_bytes_per_s(self) -> list[float]:
        """Throughput of all fetches together, in each round."""
        return [
            len(wave.requests) * self.payload_bytes / max(request.ended_s for request in wave.requests)
            for wave in self.waves
        ]

    def jain(self) -> float:
        """The median round's index over its fetches' own rates."""
        return statistics.median(
            jain_index([self.payload_bytes / request.ended_s for request in wave.requests]) for wave in self.waves
        )

    def ended(self) -> Spread:
        """Completion times of all fetches of all rounds."""
        return spread([request.ended_s for wave in self.waves for request in wave.requests])

    def first_layers(self) -> Spread:
        """Times to the first layer of all fetches of all rounds."""
        return spread([request.first_layer_s for wave in self.waves for request in wave.requests])

    def slowest_over_fastest(self) -> float:
        """The median round's ratio of completion times."""
        return statistics.median(
            max(request.ended_s for request in wave.requests) / min(request.ended_s for request in wave.requests)
            for wave in self.waves
        )

    def memory_bytes_max(self) -> int | None:
        """Over the rounds."""
        seen = [wave.memory_bytes for wave in self.waves if wave.memory_bytes is not None]
        return max(seen) if seen else None


def jain_index(rates: Sequence[float]) -> float:
    """From 1/n to 1. Raises ValueError without a rate."""
    if not rates:
        raise ValueError("no rates")
    return sum(rates) ** 2 / (len(rates) * sum(rate**2 for rate in rates))


def ratios(levels: Sequence[Level]) -> dict[str, float]:
    """Medians over the rounds: to the single fetch, and to memcpy."""
    found = {}
    singles = {level.transport: level.rates_bytes_per_s() for level in levels if level.count == 1}
    for level in levels:
        rates = level.rates_bytes_per_s()
        copies = [wave.memcpy_bytes_per_s for wave in level.waves]
        name = f"{level.transport}_{level.count}"
        found[f"{name}_over_memcpy"] = _median_ratio(rates, copies)
        if level.transport in singles and level.count != 1:
            found[f"{name}_over_1"] = _median_ratio(rates, singles[level.transport])
    return found


def shares(count: int, processes: int) -> list[int]:
    """How many of `count` fetches each process makes, as evenly as it goes."""
    return [count // processes + (index < count % processes) for index in range(processes)]


def _median_ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
