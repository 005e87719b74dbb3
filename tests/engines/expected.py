"""What the caches must have hit, computed from tokens alone: G tokens to a chunk, B to a block of the engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tests.engines.messages import Prompt


@dataclass
class Caches:
    """What the engine's own blocks (`has_blocks`: prefix caching) and the store hold, as requests come one by one."""

    chunk_tokens: int
    block_tokens: int = 32
    has_blocks: bool = True
    blocks: set[tuple[str, tuple[int, ...]]] = field(default_factory=set)
    chunks: set[tuple[str, tuple[int, ...]]] = field(default_factory=set)

    def hit(self, prompt: Prompt) -> tuple[int, int]:
        """Tokens found in the engine's blocks, and those to be loaded after them."""
        found = _longest(self.blocks, prompt, self.block_tokens, len(prompt.tokens) - 1) if self.has_blocks else 0
        stored = _longest(self.chunks, prompt, self.chunk_tokens, len(prompt.tokens))
        end = min(stored, len(prompt.tokens) - 1) // self.block_tokens * self.block_tokens
        return found, max(0, end - found)

    def add(self, prompt: Prompt, output: Sequence[int]) -> None:
        """The request has run; the KV of its last token was never computed."""
        tokens = (*prompt.tokens, *output[:-1])
        self.blocks |= {(prompt.salt, prefix) for prefix in _prefixes(tokens, self.block_tokens)}
        self.chunks |= {(prompt.salt, prefix) for prefix in _prefixes(tokens, self.chunk_tokens)}

    def run(self, prompts: Sequence[Prompt], outputs: Sequence[Sequence[int]]) -> tuple[int, int]:
        """One by one: tokens found in the engine's blocks and tokens loaded, summed."""
        found = loaded = 0
        for prompt, output in zip(prompts, outputs, strict=True):
            hits = self.hit(prompt)
            found, loaded = found + hits[0], loaded + hits[1]
            self.add(prompt, output)
        return found, loaded

    def restarted(self) -> Caches:
        """The store outlives the engine."""
        return Caches(self.chunk_tokens, self.block_tokens, self.has_blocks, set(), set(self.chunks))


def _prefixes(tokens: tuple[int, ...], step: int) -> list[tuple[int, ...]]:
    return [tokens[:end] for end in range(step, len(tokens) + 1, step)]


def _longest(held: set[tuple[str, tuple[int, ...]]], prompt: Prompt, step: int, end_max: int) -> int:
    end = 0
    while end + step <= end_max and (prompt.salt, prompt.tokens[: end + step]) in held:
        end += step
    return end
