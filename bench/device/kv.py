"""KV in the two forms it has here: the model's cache, and chunk objects. Needs torch.

A cache is bfloat16 of shape (L, 2, tokens, kv_heads, head_dim). One layer in a chunk is S bytes: keys, then values,
each (chunk_tokens, kv_heads, head_dim) (KV_L2TD, see descriptors.layout).
"""

from __future__ import annotations

import torch
from torch import Tensor

from bench.content import VerificationError

POISON = -1
"""As 16-bit integers: not a number in bfloat16, so that whatever is computed with it shows."""

WIDE = torch.int64
"""What is put in order is moved in elements of this size: a kernel computes an address for each."""


def poison(cache: Tensor) -> None:
    """Overwrite everything: what is right afterwards was loaded or computed since."""
    cache.view(torch.int16).fill_(POISON)


def chunks_of(cache: Tensor, chunk_tokens: int, first: int, count: int) -> Tensor:
    """Chunk objects `first` to `first + count`: uint8 of shape (count, L*S), on the cache's device."""
    layers, parts, _, heads, dim = cache.shape
    some = cache[:, :, first * chunk_tokens : (first + count) * chunk_tokens]
    cut = some.view(layers, parts, count, chunk_tokens, heads, dim)
    return cut.permute(2, 0, 1, 3, 4, 5).contiguous().flatten(1).view(torch.uint8)


def place_layer(cache: Tensor, layer_index: int, chunk_tokens: int, slices: Tensor) -> None:
    """One layer of the first chunks, uint8 of N*S bytes, into the cache."""
    wide = cache.view(WIDE)
    _, _, _, heads, width = wide.shape
    found = slices.view(WIDE).view(-1, 2, chunk_tokens, heads, width)
    into = wide[layer_index, :, : found.shape[0] * chunk_tokens]
    into.view(2, -1, chunk_tokens, heads, width).copy_(found.transpose(0, 1))


def place_chunks(cache: Tensor, first: int, chunk_tokens: int, chunks: Tensor) -> None:
    """Whole chunks from number `first` on, uint8 of their bytes one after the other, into all layers of the cache."""
    wide = cache.view(WIDE)
    layers, _, _, heads, width = wide.shape
    found = chunks.view(WIDE).view(-1, layers, 2, chunk_tokens, heads, width)
    count, start = found.shape[0], first * chunk_tokens
    into = wide[:, :, start : start + count * chunk_tokens]
    into.view(layers, 2, count, chunk_tokens, heads, width).copy_(found.permute(1, 2, 0, 3, 4, 5))


def verify_prefix(cache: Tensor, reference: Tensor, token_count: int) -> None:
    """Compare every bit of the first tokens' KV. Raises VerificationError with the first wrong layer."""
    for layer_index, (ours, theirs) in enumerate(zip(cache, reference, strict=True)):
        found, expected = (each[:, :token_count].view(torch.int16) for each in (ours, theirs))
        if not torch.equal(found, expected):
            raise VerificationError(f"layer {layer_index}: wrong KV on the device")
