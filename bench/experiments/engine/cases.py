"""What to measure: the model's shape, lengths, hit rates, and the tokens of every prompt. Pure.

A round has a base, tokens of its own that are stored up to the longest prefix of all. A prompt is a beginning of that
base and a suffix. Suffixes depend on the case alone: that the same suffix ends in other tokens in another round shows
that the KV of the prefix decides them.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

BLOCK_TOKENS = 32
"""What vLLM's blocks hold; on CPUs the least it allows."""
OUTPUT_TOKENS = 4
"""Tokens that are compared; all but the first are decoded over the loaded KV."""


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
    def token_layer_bytes(self) -> int:
        """One token's keys and values in one layer."""
        return 2 * self.kv_heads * self.head_dim * (4 if self.dtype is Dtype.FLOAT32 else 2)

    @property
    def token_bytes(self) -> int:
        """One token's keys and values."""
        return self.num_layers * self.token_layer_bytes


@dataclass(frozen=True, slots=True)
class Case:
    """Prompts of `context_tokens`, of which the share `hit_rate` is stored. Raises ValueError for a prefix that is no
    whole number of blocks.
    """

    context_tokens: int
    hit_rate: float

    def __post_init__(self) -> None:
        if not 0 < self.hit_rate < 1 or self.context_tokens * self.hit_rate % BLOCK_TOKENS:
            raise ValueError(f"{self.title}: the prefix must be whole blocks of {BLOCK_TOKENS} tokens")

    @property
    def prefix_tokens(self) -> int:
        """Tokens that are stored."""
        return int(self.context_tokens * self.hit_rate)

    @property
    def title(self) -> str:
        """For people."""
        return f"{context_words(self.context_tokens)}, {self.hit_rate:.4g}"


def context_words(tokens: int) -> str:
    """4K for 4096."""
    return f"{tokens // 1024}K" if tokens % 1024 == 0 else str(tokens)


def by_case(measured: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Rows of a result: those of each case, by way."""
    cases: dict[tuple[int, float], dict[str, Any]] = {}
    for row in measured:
        cases.setdefault((row["context_tokens"], row["hit_rate"]), {})[row["way"]] = row
    return list(cases.values())


@dataclass(frozen=True, slots=True)
class Prompts:
    """The tokens of one run of the bench, all from its seed."""

    seed: int
    vocabulary: int

    def base(self, round_index: int, count: int) -> list[int]:
        """The first tokens of a round's base."""
        return self._tokens(f"base {round_index}", count)

    def prompt(self, case: Case, round_index: int) -> list[int]:
        """The prompt of a case in that round."""
        suffix = self._tokens(case.title, case.context_tokens - case.prefix_tokens)
        return self.base(round_index, case.prefix_tokens) + suffix

    def storing(self, round_index: int, count: int) -> list[int]:
        """A prompt that computes the first `count` tokens of the base and two more, without which engines do not
        count the last block as done.
        """
        return self.base(round_index, count) + self._tokens("end", 2)

    def _tokens(self, what: str, count: int) -> list[int]:
        generator = random.Random(f"{self.seed} {what}")
        return [generator.randrange(self.vocabulary) for _ in range(count)]
