"""What is asked of the engines: lengths, hit rates, and the tokens of every prompt. Pure.

A round has a base, tokens of its own that are stored up to the longest prefix of all. A prompt is a beginning of that
base and a suffix. Suffixes depend on the case alone: that the same suffix ends in other tokens in another round shows
that the KV of the prefix decides them.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

BLOCK_TOKENS = 32
"""What vLLM's blocks hold; on CPUs the least it allows."""


@dataclass(frozen=True, slots=True)
class Case:
    """Prompts of `context_tokens`, of which the share `hit_rate` is stored."""

    context_tokens: int
    hit_rate: float

    def __post_init__(self) -> None:
        exact = self.context_tokens * self.hit_rate
        if not 0 < self.hit_rate < 1 or exact % BLOCK_TOKENS:
            raise ValueError(f"{self.title}: the prefix must be whole blocks of {BLOCK_TOKENS} tokens")

    @property
    def prefix_tokens(self) -> int:
        """Tokens that are stored."""
        return int(self.context_tokens * self.hit_rate)

    @property
    def suffix_tokens(self) -> int:
        """Tokens that are not."""
        return self.context_tokens - self.prefix_tokens

    @property
    def title(self) -> str:
        """For people."""
        return f"{context_words(self.context_tokens)}, {self.hit_rate:.4g}"


def context_words(tokens: int) -> str:
    """4K for 4096."""
    return f"{tokens // 1024}K" if tokens % 1024 == 0 else str(tokens)


def make_cases(contexts: Sequence[int], hit_rates: Sequence[float]) -> tuple[Case, ...]:
    """All combinations. Raises ValueError for a prefix that is no whole number of blocks."""
    return tuple(Case(context, rate) for context in contexts for rate in hit_rates)


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
        return self.base(round_index, case.prefix_tokens) + self._tokens(case.title, case.suffix_tokens)

    def storing(self, round_index: int, count: int) -> list[int]:
        """A prompt that computes the first `count` tokens of the base and two more, without which engines do not
        count the last block as done.
        """
        return self.base(round_index, count) + self._tokens("end", 2)

    def _tokens(self, what: str, count: int) -> list[int]:
        generator = random.Random(f"{self.seed} {what}")
        return [generator.randrange(self.vocabulary) for _ in range(count)]
