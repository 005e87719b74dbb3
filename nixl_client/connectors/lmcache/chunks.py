"""LMCache's chunks as objects: their names, sizes and layouts. Pure.

A chunk's object is named lmcache/LABEL/NAMESPACE/HASH. HASH is LMCache's own hash of all tokens up to the chunk's end.
NAMESPACE is a digest of everything else that decides what a chunk's bytes mean, so that a mismatch is a miss. LABEL is
the model's name in safe characters, for people who list or delete by prefix; nothing depends on it.

A chunk of LMCache is [2, L, T, hidden] (or whatever one group of layers is in its memory), and LMCache uses all of it
or nothing. It is therefore stored as its bytes lie, and declared as a layout whose slices only keep the protocol's
limits. Taking it apart into layers (KV_L2TD) would cost a transposing copy at each end and serve nobody: other engines
name their chunks by other hashes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from descriptors.descriptor import CHUNK_COUNT_MAX, CHUNK_TOKENS_MAX, NUM_LAYERS_MAX, PER_LAYER_CHUNK_BYTES_MAX
from descriptors.layout import ChunkLayout
from descriptors.prefix_keys import LMCACHE_ROOT, label, metadata_of
from descriptors.recompute import AdviceRequest, PrefillCosts, advise
from objectcache.kv_codecs.layer import GROUP_MAX, WIDTH_MAX


@dataclass(frozen=True, slots=True)
class ChunkSpace:
    """The properties that chunks of one prefix have in common.

    `mode` tells LMCache's two modes apart, which hash differently. `rank` says which part of the KV it is in the words
    of the mode: world size and worker, or the packed rank and the group of layers. `tags` keep tenants apart.
    `layout` is the shape of a full chunk.
    """

    mode: str
    model: str
    rank: str
    dtype: str
    layout: str
    tags: tuple[tuple[str, str], ...] = ()

    def prefix(self) -> str:
        """The part of the names before the hash."""
        parts = (
            self.mode,
            self.model,
            self.rank,
            self.dtype,
            self.layout,
            *(part for tag in self.tags for part in tag),
        )
        text = "".join(f"{len(part)}:{part}" for part in parts)
        return f"{LMCACHE_ROOT}/{label(self.model)}/{hashlib.sha256(text.encode()).hexdigest()[:32]}/"

    def metadata(self) -> dict[str, str]:
        """The user metadata of its chunks."""
        return metadata_of({"model": self.model, "dtype": self.dtype, "layout": self.layout})


def object_name(space: ChunkSpace, chunk_hash: bytes | int) -> str:
    """The object of one chunk."""
    return space.prefix() + (chunk_hash.hex() if isinstance(chunk_hash, bytes) else f"{chunk_hash:x}")


@dataclass(frozen=True, slots=True)
class ChunkSize:
    """A chunk's tokens, its bytes in one lookup, and how many ranks load the same tokens by lookups of their own."""

    tokens: int
    nbytes: int
    rank_count: int = 1

    @property
    def layout(self) -> ChunkLayout:
        """As far as times go: a chunk comes whole, as one layer would."""
        return ChunkLayout(1, self.tokens, self.nbytes)


def joint_size(tokens: int, shard_bytes: Iterable[int]) -> ChunkSize:
    """The size of a chunk whose shards, one for each rank and group of layers, are looked up together: tokens count as
    loaded when all their shards are.
    """
    return ChunkSize(tokens, sum(shard_bytes))


def opaque_layout(chunk_bytes: int) -> ChunkLayout:
    """The layout with the fewest slices whose objects are `chunk_bytes` long. Raises ValueError where there is none."""
    least = -(-chunk_bytes // PER_LAYER_CHUNK_BYTES_MAX)
    for count in range(max(1, least), NUM_LAYERS_MAX + 1):
        if chunk_bytes > 0 and chunk_bytes % count == 0:
            return ChunkLayout(count, 1, chunk_bytes // count)
    raise ValueError(f"no layout has objects of {chunk_bytes} bytes")


def row_layout(shape: Sequence[int], element_bytes: int) -> ChunkLayout | None:
    """The layout by which codecs see a chunk [2, L, T, hidden]: one layer whose rows are tokens, layer by layer. Where
    these are more than a descriptor takes, 2, 4, 8 … tokens are one row; groups of channels are then made of each
    second, fourth … token. None where a group would have tokens of two layers, or there is no such layout.

        [2, 32, 256, 1024] of 2 bytes  ->  4,096 rows of 2,048 elements
    """
    if len(shape) != 4 or shape[0] != 2 or min(shape) < 1:
        return None
    layers, tokens, hidden = shape[1:]
    joined = 1
    while layers * tokens // joined > CHUNK_TOKENS_MAX:
        joined *= 2
    nbytes = 2 * layers * tokens * hidden * element_bytes
    if tokens % (GROUP_MAX * joined) or nbytes > PER_LAYER_CHUNK_BYTES_MAX or hidden * joined > WIDTH_MAX:
        return None
    return ChunkLayout(1, layers * tokens // joined, nbytes)


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
