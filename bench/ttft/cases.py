"""What is fetched, what is computed meanwhile, and how both are scaled to a machine. Pure.

    L num_layers   G chunk_tokens   S per_layer_chunk_bytes   N chunk_count   s layer_bytes = N*S
    c layer_compute_s   r* = s/c

Bytes and link are scaled by one factor, so a transfer takes as long as the paper's: S shrinks, N stays. A scale of
time, for trials, shortens the windows and shrinks S once more, at the same link.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from bench.content import STAMP_BYTES
from bench.paper import NUM_LAYERS, TOKEN_LAYER_BYTES, context_tokens, table_a1_a2, table_a8
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
    def title(self) -> str:
        """As the paper has it."""
        return _TITLES[self]


_TITLES = {
    System.OPT_LOCAL_LW: "opt-local-LW",
    System.LOCAL_DRAM_CW: "Local-DRAM-CW",
    System.LOCAL_DRAM_LW: "Local-DRAM-LW",
    System.S3_BATCH_CW: "S3Batch-CW",
    System.S3_AGG_LW: "S3Agg-LW",
}
S3_SYSTEMS = (System.S3_BATCH_CW, System.S3_AGG_LW)


@dataclass(frozen=True, slots=True)
class Scale:
    """`link` multiplies bytes and link, `time` windows and bytes."""

    link: float
    time: float = 1.0

    def slice_bytes(self, chunk_tokens: int) -> int:
        """S, rounded to whole bytes and large enough for a stamp."""
        return max(STAMP_BYTES, round(chunk_tokens * TOKEN_LAYER_BYTES * self.link * self.time))

    def link_bytes_per_s(self, unscaled_bytes_per_s: float) -> float:
        """The rate that stands for the paper's."""
        return unscaled_bytes_per_s * self.link


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
    def hit(self) -> str:
        """In percent: 87.5."""
        return f"{100 * self.hit_rate:g}"

    @property
    def zero_stall_bytes_per_s(self) -> float:
        """r*, unscaled."""
        unscaled_s = self.cached_tokens * TOKEN_LAYER_BYTES
        return zero_stall_rate_bytes_per_s(unscaled_s, self.compute_s / NUM_LAYERS)

    def layout(self, scale: Scale) -> ChunkLayout:
        """L, G and S."""
        return ChunkLayout(NUM_LAYERS, self.chunk_tokens, scale.slice_bytes(self.chunk_tokens))

    def layer_compute_s(self, scale: Scale) -> float:
        """c, as it is played."""
        return self.compute_s / NUM_LAYERS * scale.time

    def bound_s(self, scale: Scale, link_bytes_per_s: float | None) -> float:
        """Eq. 3 at a link of that rate, both as they are played; None: a link that takes no time."""
        windows_s = [self.layer_compute_s(scale)] * NUM_LAYERS
        layer_bytes = self.layout(scale).layer_bytes(self.chunk_count)
        transfer_s = 0.0 if link_bytes_per_s is None else layer_bytes / link_bytes_per_s
        return ttft_layerwise_s([transfer_s] * NUM_LAYERS, windows_s)


def make_case(context: str, hit_rate: float, chunk_tokens: int) -> Case:
    """Compute is Table A8's; at hit rates it does not have, the TTFT of Table A1 at its smaller chunk size stands in.

    Raises KeyError for what neither has, ValueError where the prefix is no whole number of chunks.
    """
    case = Case(context, hit_rate, chunk_tokens, _compute_s(context, hit_rate))
    if not case.cached_tokens or case.cached_tokens % chunk_tokens:
        raise ValueError(f"{case.cached_tokens} tokens are no whole number of chunks of {chunk_tokens}")
    return case


def _compute_s(context: str, hit_rate: float) -> float:
    for request in table_a8():
        if (request.context, request.hit_rate) == (context, hit_rate):
            return request.compute_s
    for row in table_a1_a2():
        if (row.model, row.gpu, row.context, row.hit_rate) == (MODEL, GPU, context, hit_rate):
            return row.ttft_s_by_chunk_tokens[BOUNDARY_CHUNK_TOKENS]
    raise KeyError(f"{context}, {hit_rate:.1%}")
