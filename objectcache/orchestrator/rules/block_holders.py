"""The engines that hold each block, as bits of a number: one walk along a prompt gives the count of all of them."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass

from objectcache.orchestrator.rules.sliced_dict import SlicedDict

CLEARED_MAX = 1024
"""So many clearings may wait to be swept: as many as there are engines, which may all end at once."""
CLEARED_ENTRIES_MAX = 8_000_000
"""So many entries of what was cleared may wait to be swept: those of one engine with all the blocks that it may have.
Where there are more, no blocks are stored until some are swept.
"""
SWEEP_BLOCKS = 5_000
"""Some milliseconds."""
SWEPT_WITH_EACH = SWEEP_BLOCKS // 16
"""So many blocks are taken away when an engine's rank is cleared: an engine may clear 64 ranks at once."""
Rest = dict[bytes, bytes] | OrderedDict[bytes, float]


@dataclass(slots=True)
class _Cleared:
    """The blocks that an engine held before it was cleared. Its bit is still set at those of `counts`."""

    bit: int
    counts: list[dict[bytes, int]]
    rest: list[Rest]


class BlockHolders:
    """The blocks by our own names, each with the bits of its holders. A bit is given to one engine at a time."""

    def __init__(self) -> None:
        self._holders: SlicedDict[bytes, int] = SlicedDict()
        self._free_bits: list[int] = []
        self._bit_count = 0
        self._cleared: deque[_Cleared] = deque()
        self._cleared_count = 0

    @property
    def has_room(self) -> bool:
        """Whether blocks may be stored now: an engine that stores and clears them must not do so faster than they are
        taken away.
        """
        return self._cleared_count <= CLEARED_ENTRIES_MAX

    def __len__(self) -> int:
        return len(self._holders)

    def new_bit(self) -> int:
        """A bit that is set nowhere."""
        if self._free_bits:
            return self._free_bits.pop()
        self._bit_count += 1
        return self._bit_count - 1

    def free_bit(self, bit: int) -> None:
        """Nobody uses the bit any more, which is set nowhere."""
        self._free_bits.append(bit)

    def hold(self, block: bytes, bit: int) -> None:
        """The bit's engine holds the block."""
        holders = self._holders.of(block)
        holders[block] = holders.get(block, 0) | 1 << bit

    def drop(self, block: bytes, bit: int) -> None:
        """The bit's engine, which held the block, holds it no more."""
        holders = self._holders.of(block)
        holders[block] &= ~(1 << bit)
        if not holders[block]:
            del holders[block]

    def clear(self, bit: int, counts: list[dict[bytes, int]], rest: list[Rest]) -> int:
        """The bit's engine holds nothing any more. `sweep` takes its blocks away in small steps, because millions of
        them take seconds. The bit goes with the blocks, and another one is returned.
        """
        if len(self._cleared) >= CLEARED_MAX:
            self.sweep()
        self._cleared.append(_Cleared(bit, counts, rest))
        self._cleared_count += sum(map(len, counts)) + sum(map(len, rest))
        after = self.new_bit()
        self.sweep(SWEPT_WITH_EACH)
        return after

    def sweep(self, blocks_max: int = SWEEP_BLOCKS) -> bool:
        """Take away so many blocks of what was cleared; whether more is left."""
        while self._cleared and blocks_max > 0:
            old = self._cleared[0]
            while old.counts and blocks_max > 0:
                blocks_max -= 1
                if old.counts[-1]:
                    self._cleared_count -= 1
                    self.drop(old.counts[-1].popitem()[0], old.bit)
                else:
                    old.counts.pop()
            while old.rest and not old.counts and blocks_max > 0:
                blocks_max -= 1
                if old.rest[-1]:
                    self._cleared_count -= 1
                    old.rest[-1].popitem()
                else:
                    old.rest.pop()
            if not old.counts and not old.rest:
                self._cleared.popleft()
                self._free_bits.append(old.bit)
        return bool(self._cleared)

    def counts_along(self, chain: Sequence[bytes]) -> dict[int, int]:
        """For each bit the leading blocks of the chain that its engine holds; 0 is left out."""
        counts: dict[int, int] = {}
        alive = -1
        for index, block in enumerate(chain):
            after = alive & self._holders.of(block).get(block, 0)
            if alive != after and index:
                _note(counts, alive & ~after, index)
            alive = after
            if not alive:
                return counts
        if chain:
            _note(counts, alive, len(chain))
        return counts


def _note(counts: dict[int, int], bits: int, count: int) -> None:
    while bits:
        low = bits & -bits
        counts[low.bit_length() - 1] = count
        bits ^= low
