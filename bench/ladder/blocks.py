"""The sizes of the ladder's steps, and the concurrency they are measured at."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from bench.ladder.bed import LadderSettings
from descriptors.units import KIB, MIB


@dataclass(frozen=True, slots=True)
class Concurrency:
    """The paper's C: threads, each with so many requests in flight."""

    threads: int
    in_flight_each: int

    @property
    def in_flight(self) -> int:
        """Requests in flight over all threads."""
        return self.threads * self.in_flight_each


@dataclass(frozen=True, slots=True)
class Ladder:
    """Block sizes, and how many requests are in flight."""

    block_bytes: tuple[int, ...]
    concurrency: tuple[Concurrency, ...]

    @property
    def in_flight_max(self) -> int:
        """Of the largest concurrency."""
        return max(each.in_flight for each in self.concurrency)


C1 = Concurrency(1, 1)
C8 = Concurrency(1, 8)
C32 = Concurrency(4, 8)
BLOCK_BYTES = (64 * KIB, 128 * KIB, 256 * KIB, 512 * KIB, MIB, 2 * MIB, 4 * MIB)


def ladder(settings: LadderSettings) -> Ladder:
    """The whole ladder, or a glimpse of it."""
    return Ladder((64 * KIB, MIB), (C8,)) if settings.is_smoke else Ladder(BLOCK_BYTES, (C8, C32))


def even_parts(count: int, parts: int) -> list[range]:
    """`range(count)` cut into at most `parts` consecutive ranges of nearly one length, none of them empty."""
    bounds = [count * part // parts for part in range(parts + 1)]
    return [range(first, end) for first, end in pairwise(bounds) if first < end]
