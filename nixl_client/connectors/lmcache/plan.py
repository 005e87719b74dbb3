"""How LMCache's chunks are asked for: pure arithmetic.

A chunk of LMCache is [2, L, T, hidden] (or whatever one group of layers is in its memory), and LMCache wants all of it
or nothing. It is therefore stored as its bytes lie, and declared as a layout whose slices only keep the protocol's
limits. Taking it apart into layers (KV_L2TD) would cost a transposing copy at each end and serve nobody: other engines
name their chunks by other hashes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from descriptors.descriptor import CHUNK_COUNT_MAX, NUM_LAYERS_MAX, PER_LAYER_CHUNK_BYTES_MAX
from descriptors.layout import ChunkLayout
from descriptors.recompute import AdviceRequest, PrefillCosts, advise


@dataclass(frozen=True, slots=True)
class ChunkSize:
    """A chunk's tokens, its bytes on one rank, and how many ranks load at the same time."""

    tokens: int
    nbytes: int
    rank_count: int = 1

    @property
    def layout(self) -> ChunkLayout:
        """As far as times go: a chunk comes whole, as one layer would."""
        return ChunkLayout(1, self.tokens, self.nbytes)


def opaque_layout(chunk_bytes: int) -> ChunkLayout:
    """The layout with the fewest slices whose objects are `chunk_bytes` long. Raises ValueError where there is none."""
    least = -(-chunk_bytes // PER_LAYER_CHUNK_BYTES_MAX)
    for count in range(max(1, least), NUM_LAYERS_MAX + 1):
        if chunk_bytes > 0 and chunk_bytes % count == 0:
            return ChunkLayout(count, 1, chunk_bytes // count)
    raise ValueError(f"no layout has objects of {chunk_bytes} bytes")


def worth_loading(
    matched: int,
    chunk: ChunkSize,
    key_count: int,
    prefill: PrefillCosts,
    rate_bytes_per_s: float | None,
) -> int:
    """How many of `matched` chunks are sooner loaded than computed, at the rate the server offers one access key (None:
    it paces nothing). Of the prompt only the chunks asked for are known, as if it began and ended with them: what
    computing them takes is at least this much.
    """
    request = AdviceRequest(key_count * chunk.tokens + 1, chunk.layout, prefill)
    return advise(matched, request, (rate_bytes_per_s or 0.0) / chunk.rank_count).chunk_count


def batches(chunk_count: int, chunk_bytes: int, batch_bytes: int) -> Iterator[tuple[int, int]]:
    """First and end of each request: as many chunks as fit, at least one."""
    step = min(max(1, batch_bytes // chunk_bytes), CHUNK_COUNT_MAX)
    for first in range(0, chunk_count, step):
        yield first, min(first + step, chunk_count)


def partial_tokens(nbytes: int, token_bytes: int, chunk_tokens: int) -> int:
    """Tokens of a chunk that is not full; 0 for what is none."""
    tokens, odd = divmod(nbytes, token_bytes)
    return tokens if not odd and 0 < tokens < chunk_tokens else 0


class Breaker:
    """After a request that was not answered, no more for a while: an engine must not wait for a dead server each time.

    Times are monotonic seconds.
    """

    def __init__(self, retry_s: float) -> None:
        self._retry_s = retry_s
        self._closed_at_s = float("-inf")

    def is_open(self, now_s: float) -> bool:
        """Whether to ask nothing now."""
        return now_s < self._closed_at_s

    def trip(self, now_s: float) -> None:
        """A request was not answered."""
        self._closed_at_s = now_s + self._retry_s
