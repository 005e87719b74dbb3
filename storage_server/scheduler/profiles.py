"""Compute times for descriptors that state none. Pure.

A model is known by its shape: layers, and bytes of a token in a layer. Its prefill of tokens [h, P) costs
request_us + token_us*(P-h) + token_pair_us*(P^2-h^2)/2 in all layers together, as `objectcache calibrate --model` fits
it. P follows from the hit rate the profile assumes, as a descriptor names cached tokens only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from descriptors.descriptor import Descriptor


@dataclass(frozen=True, slots=True)
class ComputeProfile:
    """One model on one accelerator; costs in microseconds over all layers."""

    name: str
    num_layers: int
    token_layer_bytes: int
    request_us: float
    token_us: float
    token_pair_us: float
    hit_rate: float

    def layer_compute_s(self, cached_tokens: int) -> float:
        """c of one layer, in seconds, with so many tokens cached."""
        context = cached_tokens / self.hit_rate
        pairs = (context**2 - cached_tokens**2) / 2
        total_us = self.request_us + self.token_us * (context - cached_tokens) + self.token_pair_us * pairs
        return total_us / 1e6 / self.num_layers


def compute_s(descriptor: Descriptor, chunk_count: int, profiles: Sequence[ComputeProfile]) -> float | None:
    """c of one layer in seconds: the mean of what the descriptor states; else what a profile of the same shape says of
    its `chunk_count` chunks; None where neither does.
    """
    stated = descriptor.layer_compute_us
    if stated:
        return sum(stated) / len(stated) / 1e6
    token_bytes = descriptor.per_layer_chunk_bytes / descriptor.chunk_tokens
    for profile in profiles:
        if (profile.num_layers, profile.token_layer_bytes) == (descriptor.num_layers, token_bytes):
            return profile.layer_compute_s(chunk_count * descriptor.chunk_tokens)
    return None
