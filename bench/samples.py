"""Samples and what they are of. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum


class State(Enum):
    """Where the chunks are: in the page cache, in the server's DRAM tier, there too with UCX over TCP, on disk only."""

    PAGE_CACHE = "page_cache"
    DRAM = "dram"
    TCP = "tcp"
    COLD = "cold"


@dataclass(frozen=True, slots=True)
class Sample:
    """One run: seconds until every byte was there, and until the first layer was, where that is a meaningful time."""

    duration_s: float
    first_layer_s: float | None = None


@dataclass(frozen=True, slots=True)
class Measurement:
    """Counted runs of one thing, each of `nbytes`, one for every round; `note` says what is not obvious about it.

    `chunk_tokens` is None for what does not depend on the chunks' size and was measured beside all of them.
    """

    name: str
    state: State
    chunk_tokens: int | None
    nbytes: int
    samples: tuple[Sample, ...]
    note: str = ""

    @property
    def key(self) -> str:
        """Tells it from all others of a report."""
        grain = "" if self.chunk_tokens is None else f"g{self.chunk_tokens}/"
        return f"{self.state.value}/{grain}{self.name}"

    def rates_bytes_per_s(self) -> list[float]:
        """Throughput of each run."""
        return [self.nbytes / sample.duration_s for sample in self.samples]

    @property
    def median_bytes_per_s(self) -> float:
        """Raises StatisticsError without a sample."""
        return statistics.median(self.rates_bytes_per_s())

    def first_layers_s(self) -> list[float]:
        """Of the runs that have one."""
        return [sample.first_layer_s for sample in self.samples if sample.first_layer_s is not None]


@dataclass(frozen=True, slots=True)
class Spread:
    """Median and extremes of the same samples."""

    median: float
    min: float
    max: float


def spread(values: Sequence[float]) -> Spread:
    """Median, least and greatest. Raises ValueError without a value."""
    if not values:
        raise ValueError("no samples")
    return Spread(statistics.median(values), min(values), max(values))
