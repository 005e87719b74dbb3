"""The model an engine runs: its shape, and from it the bytes of a token's KV. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Dtype(Enum):
    """Of weights, activations and KV."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


@dataclass(frozen=True, slots=True)
class Shape:
    """A Llama with seeded random weights. `initializer_range` is so large that attention decides tokens.

    Few attention heads to the width of the layers: attention over a long prefix, which no cache of KV saves, then has
    the part of the computation that it has in models of eight billion parameters.
    """

    num_layers: int = 4
    hidden: int = 1024
    intermediate: int = 4096
    heads: int = 4
    kv_heads: int = 4
    head_dim: int = 64
    vocabulary: int = 1024
    dtype: Dtype = Dtype.FLOAT32
    initializer_range: float = 0.05
    seed: int = 7

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise ValueError(f"{self.heads} heads cannot share {self.kv_heads} of KV evenly")

    @property
    def element_bytes(self) -> int:
        """Of one number."""
        return 4 if self.dtype is Dtype.FLOAT32 else 2

    @property
    def token_layer_bytes(self) -> int:
        """One token's keys and values in one layer."""
        return 2 * self.kv_heads * self.head_dim * self.element_bytes

    @property
    def token_bytes(self) -> int:
        """One token's keys and values."""
        return self.num_layers * self.token_layer_bytes

    @property
    def layer_weights(self) -> int:
        """Numbers in the matrices of one layer."""
        attention = 2 * (self.heads + self.kv_heads) * self.head_dim
        return self.hidden * (attention + 3 * self.intermediate)
