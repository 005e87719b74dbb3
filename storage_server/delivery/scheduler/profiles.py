"""Compute times for descriptors that state none. Pure.

A model is known by its shape: layers, and bytes of a token in a layer. Its prefill of tokens [h, P) costs
request_us + token_us*(P-h) + token_pair_us*(P^2-h^2)/2 in all layers together, as `objectcache calibrate model` fits
the three numbers. P follows from the hit rate that the profile assumes, because a descriptor names cached tokens only.

Example: 10 layers, request_us = 10,000, token_us = 100, token_pair_us = 0, hit rate 0.5, h = 1,000 cached tokens. Then
P = 2,000, the prefill takes 10,000 + 100*1,000 = 110,000 us, and one layer 11 ms.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from descriptors.descriptor import Descriptor


@dataclass(frozen=True, slots=True)
class ComputeProfile:
    """The costs of one model on one accelerator, in microseconds over all layers."""

    name: str
    num_layers: int
    token_layer_bytes: int
    request_us: float
    token_us: float
    token_pair_us: float
    hit_rate: float

    def layer_compute_s(self, cached_tokens: int) -> float:
        """c, the compute time of one layer in seconds, when `cached_tokens` tokens are cached."""
        context = cached_tokens / self.hit_rate
        pairs = (context**2 - cached_tokens**2) / 2
        total_us = self.request_us + self.token_us * (context - cached_tokens) + self.token_pair_us * pairs
        return total_us / 1e6 / self.num_layers


def growth_of(profiles: Sequence[ComputeProfile]) -> float:
    """How much more computing a byte of KV costs for each byte before it in its prefix, over what the first byte costs:
    the least of all models; 0 without any.
    """
    return min(
        (
            profile.token_pair_us / (profile.token_us * profile.num_layers * profile.token_layer_bytes)
            for profile in profiles
            if profile.token_us
        ),
        default=0.0,
    )


def computed_rates(profiles: Sequence[ComputeProfile]) -> dict[tuple[int, int], float]:
    """The bytes of KV that each model computes in a second at the beginning of a prompt, by its layers and the bytes of
    a token in one of them: the least, where several have this shape.
    """
    rates: dict[tuple[int, int], float] = {}
    for profile in profiles:
        if profile.token_us > 0:
            shape = profile.num_layers, profile.token_layer_bytes
            rate = profile.num_layers * profile.token_layer_bytes * 1e6 / profile.token_us
            rates[shape] = min(rate, rates.get(shape, rate))
    return rates


def compute_s(descriptor: Descriptor, chunk_count: int, profiles: Sequence[ComputeProfile]) -> float | None:
    """c of one layer in seconds: the mean of the times that the descriptor states, or else the time that a profile of
    the same shape gives for its `chunk_count` chunks; None where there is neither.
    """
    stated = descriptor.layer_compute_us
    if stated:
        return sum(stated) / len(stated) / 1e6
    token_bytes = descriptor.per_layer_chunk_bytes / descriptor.chunk_tokens
    for profile in profiles:
        if (profile.num_layers, profile.token_layer_bytes) == (descriptor.num_layers, token_bytes):
            return profile.layer_compute_s(chunk_count * descriptor.chunk_tokens)
    return None
