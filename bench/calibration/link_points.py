"""What is measured about a link: requests of the paper, scaled to what one request moves, and rates for each. Pure.

    s layer_bytes   c compute_s   r* = s/c zero-stall rate   r rate

r* keeps its ratio to the link: the paper's is 100 Gbps, ours what one request moves. s and c shrink together, which
leaves r* as it is, until the layer is small enough for this machine's memory and the window short enough for
measuring often.
"""

from __future__ import annotations

from dataclasses import dataclass

from bench.paper import MARGIN_BYTES_PER_S, table_a8
from descriptors.layout import ChunkLayout
from descriptors.units import KIB, MIB, bytes_per_s_from_gbps

PAPER_LINK_BYTES_PER_S = bytes_per_s_from_gbps(100)
MARGIN_SHARE = MARGIN_BYTES_PER_S / PAPER_LINK_BYTES_PER_S
"""The paper's margin as a part of its link."""


@dataclass(frozen=True, slots=True)
class PaperPoint:
    """A row of Table A8, and the most that a layer of it may have here."""

    context: str
    hit_rate: float
    layer_bytes_max: int


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
    rate of every point, `sweep_runs` times. `factors` are rates over r*.
    """

    layout: ChunkLayout
    together: int
    together_chunks: int
    points: tuple[PaperPoint, ...]
    compute_s_max: float
    factors: tuple[float, ...]
    runs: int
    sweep_runs: int
    seed: int = 1

    @property
    def chunk_count(self) -> int:
        """Chunks that are stored: the requests that come together have different ones, the others the first of them."""
        return max([self.together * self.together_chunks, *map(self.chunks_max, self.points)])

    @property
    def stored_bytes(self) -> int:
        """Of all of them."""
        return self.layout.payload_bytes(self.chunk_count)

    def chunks_max(self, point: PaperPoint) -> int:
        """That the point's largest layer has."""
        return max(1, point.layer_bytes_max // self.layout.per_layer_chunk_bytes)

    def request(self, point: PaperPoint, single_bytes_per_s: float) -> SweptRequest:
        """The point on a link on which one request moves so much."""
        row = next(row for row in table_a8() if (row.context, row.hit_rate) == (point.context, point.hit_rate))
        star = row.zero_stall_bytes_per_s * single_bytes_per_s / PAPER_LINK_BYTES_PER_S
        wanted_bytes = star * min(row.layer_compute_s, self.compute_s_max)
        count = round(wanted_bytes / self.layout.per_layer_chunk_bytes)
        layer_bytes = self.layout.layer_bytes(max(1, min(count, self.chunks_max(point))))
        return SweptRequest(row.name, layer_bytes // self.layout.layer_bytes(1), layer_bytes, layer_bytes / star)

    def rates(self, request: SweptRequest, single_bytes_per_s: float) -> list[float]:
        """Ascending: those around r*, and r* with the paper's margin."""
        star = request.zero_stall_bytes_per_s
        return sorted({factor * star for factor in self.factors} | {star + MARGIN_SHARE * single_bytes_per_s})


def full_link_plan(runs: int) -> LinkPlan:
    """Llama 3.1 8B at G=64: layers of 1 to 8 MiB that need an eighth to six tenths of the link."""
    return LinkPlan(
        layout=ChunkLayout(32, 64, 256 * KIB),
        together=4,
        together_chunks=8,
        points=(
            PaperPoint("4K", 0.5, 2 * MIB),
            PaperPoint("64K", 0.875, MIB),
            PaperPoint("32K", 0.875, 4 * MIB),
            PaperPoint("4K", 0.875, 8 * MIB),
        ),
        compute_s_max=0.006,
        factors=(0.7, 0.85, 0.95, 1.0, 1.05, 1.1, 1.2, 1.35, 1.6),
        runs=runs,
        sweep_runs=runs,
    )


def smoke_link_plan(runs: int) -> LinkPlan:
    """Whether it works, not how fast."""
    return LinkPlan(
        layout=ChunkLayout(4, 16, 16 * KIB),
        together=2,
        together_chunks=2,
        points=(PaperPoint("4K", 0.5, 32 * KIB), PaperPoint("64K", 0.875, 64 * KIB)),
        compute_s_max=0.001,
        factors=(0.5, 1.0, 2.0),
        runs=runs,
        sweep_runs=runs,
    )
