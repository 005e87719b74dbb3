"""Which chunks and which paged blocks hold the same tokens.

G tokens make a chunk, B tokens a block of the engine; one divides the other. Tokens are counted from the
prompt's start.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ChunkRange:
    """Chunks `first_chunk` to `end_chunk` and the blocks that hold tokens of them: `token_count` tokens, of which the
    first is the `chunk_skip`th of the first chunk and the `block_skip`th of the first block.
    """

    first_chunk: int
    end_chunk: int
    chunk_skip: int
    block_skip: int
    token_count: int
    blocks: tuple[int, ...]

    @property
    def chunk_count(self) -> int:
        """Chunks in the chunk_range."""
        return self.end_chunk - self.first_chunk


@dataclass(frozen=True, slots=True)
class Grid:
    """G and B."""

    chunk_tokens: int
    block_tokens: int

    def __post_init__(self) -> None:
        if self.chunk_tokens < 1 or self.block_tokens < 1:
            raise ValueError("chunks and blocks have at least one token")
        if self.chunk_tokens % self.block_tokens and self.block_tokens % self.chunk_tokens:
            raise ValueError(
                f"chunk_tokens {self.chunk_tokens} is no multiple and no divisor of the block size {self.block_tokens}"
            )

    def loadable_tokens(self, prompt_tokens: int, computed_tokens: int, matched_chunks: int, room_chunks: int) -> int:
        """How many tokens to load after the `computed_tokens` the engine has: whole blocks of what is stored, with at
        least one token left to compute, out of no more than `room_chunks` chunks.
        """
        if computed_tokens % self.block_tokens:
            return 0
        room_end = (computed_tokens // self.chunk_tokens + room_chunks) * self.chunk_tokens
        end = min(matched_chunks * self.chunk_tokens, prompt_tokens - 1, room_end)
        return max(0, end // self.block_tokens * self.block_tokens - computed_tokens)

    def load_range(self, computed_tokens: int, token_count: int, block_ids: Sequence[int]) -> ChunkRange:
        """The range to load for the `token_count` tokens after `computed_tokens`; both whole blocks. `block_ids` are
        all of the request's.
        """
        if computed_tokens % self.block_tokens or token_count % self.block_tokens:
            raise ValueError("the engine loads whole blocks")
        return self._range(computed_tokens, computed_tokens + token_count, block_ids)

    def store_range(self, first_chunk: int, end_chunk: int, block_ids: Sequence[int]) -> ChunkRange:
        """The range to read for these whole chunks."""
        return self._range(first_chunk * self.chunk_tokens, end_chunk * self.chunk_tokens, block_ids)

    def first_lost_block(self, chunk_range: ChunkRange, chunk_count: int) -> int:
        """Index, in `chunk_range.blocks`, of the first block that `chunk_count` chunks of a load do not fill."""
        tokens = max(0, chunk_count * self.chunk_tokens - chunk_range.chunk_skip)
        return min(len(chunk_range.blocks), tokens // self.block_tokens)

    def _range(self, start: int, end: int, block_ids: Sequence[int]) -> ChunkRange:
        blocks = tuple(block_ids[start // self.block_tokens : -(-end // self.block_tokens)])
        if len(blocks) != -(-end // self.block_tokens) - start // self.block_tokens or start >= end:
            raise ValueError(f"tokens {start} to {end} are not in {len(block_ids)} blocks of {self.block_tokens}")
        return ChunkRange(
            first_chunk=start // self.chunk_tokens,
            end_chunk=-(-end // self.chunk_tokens),
            chunk_skip=start % self.chunk_tokens,
            block_skip=start % self.block_tokens,
            token_count=end - start,
            blocks=blocks,
        )
