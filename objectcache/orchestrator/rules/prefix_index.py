"""The prefix index: how many leading blocks of a prompt each engine holds.

Every block that an engine holds is known by our own name (`orchestrator.rules.chains`), with a bit for each engine, so
that one walk along a prompt's chain gives the count of all engines.

    a chain of 4 blocks   H0: engines a, b   H1: a, b   H2: a   H3: nobody   ->   a holds 3, b holds 2
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from objectcache.orchestrator.rules.chains import next_hash, root_hash
from objectcache.orchestrator.rules.kv_events import (
    GPU,
    AllBlocksCleared,
    BlockName,
    BlockRemoved,
    BlockStored,
    Event,
    token_root,
)
from objectcache.orchestrator.rules.sliced_dict import SlicedDict

ENGINES_MAX = 1024
BLOCKS_MAX = 4_000_000
"""One engine has no more blocks, all its data-parallel ranks together."""
EXPECTED_S = 2.0
EXPECTED_STEPS_MAX = 16_384
"""One decision follows so many expected blocks, of all engines and their ranks together."""
"""A request that was sent to an engine will have its blocks there soon. If no event says so after this time, the blocks
do not count any more.
"""
APPROXIMATE_S = 120.0
"""How long the blocks of a request count for an engine that sends no events."""
CLEARED_MAX = 256
"""So many clearings may wait to be swept."""
SWEEP_BLOCKS = 5_000
"""Some milliseconds."""
EXPECTED_MAX = 200_000
FORGOTTEN_AT_ONCE = 256
"""Blocks of requests that were sent, for one engine; the oldest are forgotten first."""


@dataclass(slots=True)
class _Engine:
    bit: int
    blocks_max: int
    block_tokens: int | None = None
    names: SlicedDict[BlockName, bytes] = field(default_factory=SlicedDict)
    """Our names of its blocks, by its own."""
    name_count: int = 0
    counts: SlicedDict[bytes, int] = field(default_factory=SlicedDict)
    """How many of its own names stand for a block of ours."""
    expected: OrderedDict[bytes, float] = field(default_factory=OrderedDict)
    orphan_count: int = 0
    dropped_count: int = 0


@dataclass(slots=True)
class _Cleared:
    """The blocks that an engine held before it was cleared. Its bit is still set at these blocks."""

    bit: int
    counts: list[dict[bytes, int]]
    rest: list[dict[BlockName, bytes] | OrderedDict[bytes, float]]


class PrefixIndex:
    """The blocks of up to ENGINES_MAX engines. An engine's name stands for one data-parallel rank of it."""

    def __init__(self) -> None:
        self._engines: dict[str, _Engine] = {}
        self._holders: SlicedDict[bytes, int] = SlicedDict()
        self._free_bits: list[int] = []
        self._bit_count = 0
        self._cleared: deque[_Cleared] = deque()

    @property
    def block_count(self) -> int:
        """Blocks that some engine holds."""
        return len(self._holders)

    def add_engine(self, name: str, rank_count: int = 1) -> None:
        """Make an engine known, or one of its `rank_count` data-parallel ranks. Raises ValueError where there are too
        many.
        """
        blocks_max = BLOCKS_MAX // max(1, rank_count)
        if name in self._engines:
            self._engines[name].blocks_max = blocks_max
            return
        if len(self._engines) >= ENGINES_MAX:
            raise ValueError(f"more than {ENGINES_MAX} engines")
        self._engines[name] = _Engine(self._new_bit(), blocks_max)

    def remove_engine(self, name: str) -> None:
        """Forget an engine and its blocks."""
        engine = self._engines.get(name)
        if engine is not None:
            self.clear(name)
            del self._engines[name]
            self._free_bits.append(engine.bit)

    def block_tokens(self, name: str) -> int | None:
        """The tokens of each of the engine's blocks, by its events; None before the first."""
        return self._engines[name].block_tokens

    def orphan_count(self, name: str) -> int:
        """Blocks whose parent was not known, so that they could not be placed."""
        return self._engines[name].orphan_count

    def held_count(self, name: str) -> int:
        """The engine's blocks, by its events."""
        return len(self._engines[name].counts)

    def apply(self, name: str, event: Event) -> None:
        """Take an engine's event over. Blocks in other memory than the GPU's, and those of later cache groups, do not
        count. Raises ValueError for tokens that are no tokens.
        """
        engine = self._engines[name]
        match event:
            case BlockStored():
                if event.medium.upper() == GPU and event.group == 0:
                    self._store(engine, event)
            case BlockRemoved():
                if event.medium.upper() == GPU and event.group == 0:
                    for block in event.names:
                        self._remove(engine, block)
            case AllBlocksCleared():
                self.clear(name)

    def restore(self, name: str, blocks: Iterable[tuple[BlockName, bytes]]) -> None:
        """Take over what was written down of an engine's blocks: its own names, and ours."""
        engine = self._engines[name]
        for block, prefix in blocks:
            if block not in engine.names and engine.name_count < engine.blocks_max:
                self._add(engine, block, prefix)

    def prefix_of(self, name: str, block: BlockName) -> bytes | None:
        """Our name of an engine's block; None where the engine does not hold it."""
        return self._engines[name].names.of(block).get(block)

    def holds(self, name: str, block: bytes) -> bool:
        """Whether an engine holds a block, by its events."""
        return block in self._engines[name].counts

    def clear(self, name: str) -> bool:
        """The engine holds nothing; whether it held anything. Its bit goes with what it held, and `sweep` takes both
        away in small steps, because millions of blocks take seconds.
        """
        engine = self._engines[name]
        if not engine.name_count and not engine.expected:
            return False
        if len(self._cleared) >= CLEARED_MAX:
            self.sweep()
        self._cleared.append(_Cleared(engine.bit, engine.counts.slices, [*engine.names.slices, engine.expected]))
        engine.bit, engine.name_count = self._new_bit(), 0
        engine.names, engine.counts, engine.expected = SlicedDict(), SlicedDict(), OrderedDict()
        self.sweep()
        return True

    def sweep(self, blocks_max: int = SWEEP_BLOCKS) -> bool:
        """Take away so many blocks of what was cleared; whether more is left."""
        while self._cleared and blocks_max > 0:
            old = self._cleared[0]
            while old.counts and blocks_max > 0:
                blocks_max -= 1
                if old.counts[-1]:
                    self._drop_bit(old.counts[-1].popitem()[0], old.bit)
                else:
                    old.counts.pop()
            while old.rest and not old.counts and blocks_max > 0:
                blocks_max -= 1
                if old.rest[-1]:
                    old.rest[-1].popitem()
                else:
                    old.rest.pop()
            if not old.counts and not old.rest:
                self._cleared.popleft()
                self._free_bits.append(old.bit)
        return bool(self._cleared)

    def _new_bit(self) -> int:
        if self._free_bits:
            return self._free_bits.pop()
        self._bit_count += 1
        return self._bit_count - 1

    def expect(self, name: str, chain: Sequence[bytes], now_s: float, for_s: float = EXPECTED_S) -> None:
        """A request with these blocks was sent to the engine."""
        expected = self._engines[name].expected
        until_s = now_s + for_s
        for block in chain:
            expected[block] = until_s
            expected.move_to_end(block)
        while len(expected) > EXPECTED_MAX:
            expected.popitem(last=False)

    def forget_expected(self, name: str) -> None:
        """Prompts that were sent to the engine do not count any more: it has failed. It may have left before."""
        engine = self._engines.get(name)
        if engine is not None:
            engine.expected.clear()

    def names_of(self, engine: str) -> list[str]:
        """The names under which the index knows an engine and its data-parallel ranks."""
        return [name for name in self._engines if name == engine or name.startswith(f"{engine}#")]

    def held(self, chain: Sequence[bytes], now_s: float) -> dict[str, int]:
        """How many of the chain's blocks, from the first, each engine holds or is expected to hold."""
        return self.held_by(chain, now_s, self._engines)

    def held_by(self, chain: Sequence[bytes], now_s: float, names: Iterable[str]) -> dict[str, int]:
        """The same, for some of the engines."""
        counts = self._events_say(chain)
        found: dict[str, int] = {}
        steps = EXPECTED_STEPS_MAX
        for name in names:
            engine = self._engines.get(name)
            if engine is None:
                found[name] = 0
                continue
            count = counts.get(engine.bit, 0)
            expected = engine.expected
            if expected:
                _forget_past(expected, now_s)
                end = min(len(chain), count + steps)
                while count < end and (expected.get(chain[count], 0.0) > now_s or chain[count] in engine.counts):
                    count += 1
                    steps -= 1
            found[name] = count
        return found

    def _events_say(self, chain: Sequence[bytes]) -> dict[int, int]:
        """For each engine's bit the leading blocks that it holds, by its events; 0 is left out."""
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

    def _store(self, engine: _Engine, event: BlockStored) -> None:
        engine.block_tokens = event.block_tokens
        if event.parent is None:
            salt, _ = token_root(event, 0)
            parent: bytes | None = root_hash(event.adapter, salt)
        else:
            parent = engine.names.of(event.parent).get(event.parent)
        if parent is None:
            engine.orphan_count += len(event.names)
            return
        step = event.block_tokens
        for index, name in enumerate(event.names):
            _, extra = token_root(event, index)
            parent = next_hash(parent, event.tokens[index * step : (index + 1) * step], extra)
            if name in engine.names:
                continue
            if engine.name_count >= engine.blocks_max:
                engine.dropped_count += 1
                continue
            self._add(engine, name, parent)

    def _add(self, engine: _Engine, name: BlockName, prefix: bytes) -> None:
        engine.names.of(name)[name] = prefix
        engine.name_count += 1
        counts = engine.counts.of(prefix)
        count = counts.get(prefix, 0)
        counts[prefix] = count + 1
        if not count:
            holders = self._holders.of(prefix)
            holders[prefix] = holders.get(prefix, 0) | 1 << engine.bit

    def _remove(self, engine: _Engine, name: BlockName) -> None:
        block = engine.names.of(name).pop(name, None)
        if block is None:
            return
        engine.name_count -= 1
        counts = engine.counts.of(block)
        counts[block] -= 1
        if counts[block]:
            return
        del counts[block]
        engine.expected.pop(block, None)
        self._drop_bit(block, engine.bit)

    def _drop_bit(self, block: bytes, bit: int) -> None:
        holders = self._holders.of(block)
        holders[block] &= ~(1 << bit)
        if not holders[block]:
            del holders[block]


def _note(counts: dict[int, int], bits: int, count: int) -> None:
    while bits:
        low = bits & -bits
        counts[low.bit_length() - 1] = count
        bits ^= low


def _forget_past(expected: OrderedDict[bytes, float], now_s: float) -> None:
    """Some of those that are past, which count no more anyway: after a burst of long prompts all are past at once."""
    for _ in range(min(FORGOTTEN_AT_ONCE, len(expected))):
        block = next(iter(expected))
        if expected[block] > now_s:
            return
        del expected[block]
