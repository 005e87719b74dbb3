"""What is fetched, what is computed meanwhile, and how both are scaled to a machine. Pure.

    L num_layers   G chunk_tokens   S per_layer_chunk_bytes   N chunk_count   s layer_bytes = N*S
    c layer_compute_s   r* = s/c

Bytes and link are scaled by one factor, so a transfer takes as long as the paper's: S shrinks, N stays. A scale of
time, for trials, shortens the windows and shrinks S once more, at the same link.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from bench.paper.tables import NUM_LAYERS, TOKEN_LAYER_BYTES, context_tokens, table_a1_a2, table_a8
from calibration.content import STAMP_BYTES
from descriptors.descriptor import Delivery
from descriptors.layout import ChunkLayout
from descriptors.ttft import ttft_layerwise_s, zero_stall_rate_bytes_per_s

MODEL = "Llama-3.1-8B"
GPU = "A100"
BOUNDARY_CHUNK_TOKENS = 16
CONTEXTS = ("4K", "64K")
HIT_RATES = (0.125, 0.5, 0.875)
CHUNK_TOKENS = (16, 64, 256)


class System(Enum):
    """Ways of getting a prefix's KV to where it is computed with (section 5.5): CW chunkwise, LW layerwise."""

    OPT_LOCAL_LW = "opt_local_lw"
    LOCAL_DRAM_CW = "local_dram_cw"
    LOCAL_DRAM_LW = "local_dram_lw"
    S3_BATCH_CW = "s3_batch_cw"
    S3_AGG_LW = "s3_agg_lw"

    @property
    def delivery(self) -> Delivery:
        """The order in which its bytes come."""
        chunkwise = (System.LOCAL_DRAM_CW, System.S3_BATCH_CW)
        return Delivery.CHUNK_MAJOR if self in chunkwise else Delivery.LAYER_MAJOR


S3_SYSTEMS = (System.S3_BATCH_CW, System.S3_AGG_LW)


@dataclass(frozen=True, slots=True)
class Scale:
    """`link` multiplies bytes and link, `time` windows and bytes."""

    link: float
    time: float = 1.0

    def link_bytes_per_s(self, unscaled_bytes_per_s: float | None) -> float | None:
        """The rate that stands for the paper's; None: not limited."""
        return None if unscaled_bytes_per_s is None else unscaled_bytes_per_s * self.link


@dataclass(frozen=True, slots=True)
class Case:
    """One workload. `compute_s` is the unscaled prefill of the tokens that missed, all layers."""

    context: str
    hit_rate: float
    chunk_tokens: int
    compute_s: float

    @property
    def cached_tokens(self) -> int:
        """Of the prefix that hits."""
        return round(context_tokens(self.context) * self.hit_rate)

    @property
    def chunk_count(self) -> int:
        """N."""
        return self.cached_tokens // self.chunk_tokens

    @property
    def zero_stall_bytes_per_s(self) -> float:
        """r*, unscaled."""
        unscaled_s = self.cached_tokens * TOKEN_LAYER_BYTES
        return zero_stall_rate_bytes_per_s(unscaled_s, self.compute_s / NUM_LAYERS)

    def layout(self, scale: Scale) -> ChunkLayout:
        """L, G and S, which is rounded to whole bytes and large enough for a stamp."""
        slice_bytes = round(self.chunk_tokens * TOKEN_LAYER_BYTES * scale.link * scale.time)
        return ChunkLayout(NUM_LAYERS, self.chunk_tokens, max(STAMP_BYTES, slice_bytes))

    def layer_compute_s(self, scale: Scale) -> float:
        """c, as it is played."""
        return self.compute_s / NUM_LAYERS * scale.time

    def bound_s(self, scale: Scale, link_bytes_per_s: float | None) -> float:
        """Eq. 3 as it is played at a link of that unscaled rate; None: a link that takes no time."""
        link = scale.link_bytes_per_s(link_bytes_per_s)
        transfer_s = 0.0 if link is None else self.layout(scale).layer_bytes(self.chunk_count) / link
        return ttft_layerwise_s([transfer_s] * NUM_LAYERS, [self.layer_compute_s(scale)] * NUM_LAYERS)


@dataclass(frozen=True, slots=True)
class Task:
    """One cell of a figure: a case, the system that fetches it, and the link's unscaled rate; None: not limited."""

    case: Case
    system: System
    link_bytes_per_s: float | None = None


def make_case(context: str, hit_rate: float, chunk_tokens: int) -> Case:
    """Compute is Table A8's; at hit rates it does not have, the TTFT of Table A1 at its smaller chunk size stands in.

    Raises KeyError for what neither has, ValueError where the prefix is no whole number of chunks.
    """
    rows = [row for row in table_a1_a2() if (row.model, row.gpu) == (MODEL, GPU)]
    known_s = {(row.context, row.hit_rate): row.ttft_s_by_chunk_tokens[BOUNDARY_CHUNK_TOKENS] for row in rows}
    known_s |= {(request.context, request.hit_rate): request.compute_s for request in table_a8()}
    case = Case(context, hit_rate, chunk_tokens, known_s[context, hit_rate])
    if not case.cached_tokens or case.cached_tokens % chunk_tokens:
        raise ValueError(f"{case.cached_tokens} tokens are no whole number of chunks of {chunk_tokens}")
    return case
