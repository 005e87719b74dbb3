"""The saving of one use for each byte of a chunk, compared with other bytes of the cache. Pure.

A use of a chunk saves its computing again: token_us + token_pair_us*h microseconds for the token behind h others
(storage_server.delivery.scheduler.profiles). So with

    growth = token_pair_us / (token_us * bytes of a token)

a byte that is `offset` bytes deep in its prefix saves 1 + growth*offset times as much as the first one. Besides, a use
saves work that does not depend on the chunk's size: its place in lookups and reads, a request where chunks come from
elsewhere. That counts as CHUNK_FRACTION of the bytes of an average chunk, so of two chunks that are used equally often
the larger one is worth less for each byte.

Example: the average chunk has 100 bytes and CHUNK_FRACTION is 0.02. A chunk of 10 bytes is worth 1 + 2/10 = 1.2 a byte,
one of 1,000 bytes 1.002; with growth 0.001, 500 bytes deep, 1.7 and 2.0.
"""

from __future__ import annotations

import math

CHUNK_FRACTION = 0.02
STEPS_PER_OCTAVE = 4
STEP_MAX = 80
"""Twenty doublings: the number of steps, and with it the number of cells, is bounded."""


class UseWorth:
    """Knows the sizes of the chunks so far. `growth` is 0 where a byte costs the same wherever in a prefix it is."""

    def __init__(self, growth: float = 0.0) -> None:
        if not 0 <= growth < math.inf:
            raise ValueError("growth is a number from 0")
        self._growth = growth
        self._chunk_count = 0
        self._nbytes = 0

    def note(self, nbytes: int) -> None:
        """Note the size of a chunk that is used."""
        self._chunk_count += 1
        self._nbytes += nbytes

    def step(self, offset_bytes: int, nbytes: int) -> int:
        """The worth of a chunk behind `offset_bytes` of its prefix, as a whole number of steps from 1, at a logarithmic
        scale. Chunks of one step have one worth.
        """
        average_bytes = self._nbytes / max(1, self._chunk_count)
        worth = 1 + CHUNK_FRACTION * average_bytes / nbytes + self._growth * (offset_bytes + nbytes / 2)
        return min(STEP_MAX, round(STEPS_PER_OCTAVE * math.log2(worth)))


def worth_of(step: int) -> float:
    """The worth of a step."""
    return float(2.0 ** (step / STEPS_PER_OCTAVE))
