"""What is measured, and the times that came of it. Pure.

W payload bytes = N*L*S   N chunk_count   L num_layers   G chunk_tokens   S per_layer_chunk_bytes
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bench.samples import State
from descriptors.layout import ChunkLayout
from descriptors.units import KIB, MIB


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
    """What to measure, `runs` counted rounds of it."""

    families: Sequence[Family]
    runs: int
    seed: int = 1

    @property
    def stored_bytes(self) -> int:
        """Of all families."""
        return sum(family.layout.payload_bytes(family.counts[-1]) for family in self.families)

    @property
    def payload_bytes_max(self) -> int:
        """The largest payload."""
        return max(family.layout.payload_bytes(family.counts[-1]) for family in self.families)


@dataclass(frozen=True, slots=True)
class Run:
    """One round of one payload in both orders, in seconds since the request: when all of it was there in chunk-major,
    and when each layer was in layer-major.
    """

    chunk_major_s: float
    layers_s: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Point:
    """One payload over one transport in one state."""

    family: str
    layout: ChunkLayout
    chunk_count: int
    transport: str
    state: State
    runs: tuple[Run, ...]

    @property
    def payload_bytes(self) -> int:
        """W."""
        return self.layout.payload_bytes(self.chunk_count)


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
