"""The prefix index: how many leading blocks of a prompt each engine holds.

Every block that an engine holds is known by our own name (`orchestrator.rules.chains`), with a bit for each engine, so
that one walk along a prompt's chain gives the count of all engines.

    a chain of 4 blocks   H0: engines a, b   H1: a, b   H2: a   H3: nobody   ->   a holds 3, b holds 2
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from objectcache.orchestrator.rules.block_holders import BlockHolders, Rest
from objectcache.orchestrator.rules.chains import next_hash, root_hash
from objectcache.orchestrator.rules.kv_events import (
    GPU,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Event,
    name_bytes,
    token_root,
)
from objectcache.orchestrator.rules.sliced_dict import SlicedDict

ENGINES_MAX = 1024
"""The index knows no more engines, each data-parallel rank counted for one."""
RANKS_MAX = 64
"""One engine has no more ranks."""
BLOCKS_MAX = 4_000_000
"""One engine has no more blocks, all its data-parallel ranks together."""
EXPECTED_S = 2.0
"""A request that was sent to an engine will have its blocks there soon. If no event says so after this time, the blocks
do not count any more.
"""
APPROXIMATE_S = 120.0
"""How long the blocks of a request count for an engine that sends no events."""
EXPECTED_MAX = 200_000
"""Blocks of requests that were sent, for one engine, all its ranks together, but a long prompt's for each rank; the
oldest are forgotten first,
"""
FORGOTTEN_AT_ONCE = 256
"""so many with one decision."""
EXPECTED_STEPS_MAX = 16_384
"""One decision follows so many expected blocks, of all engines and their ranks together."""


@dataclass(slots=True)
class _Engine:
    bit: int
    blocks_max: int
    expected_max: int
    block_tokens: int | None = None
    names: SlicedDict[bytes, bytes] = field(default_factory=SlicedDict)
    """Our names of its blocks, by its own as bytes, which Python hashes with a key: an engine could choose numbers so
    that each search goes through all of them.
    """
    name_count: int = 0
    counts: SlicedDict[bytes, int] = field(default_factory=SlicedDict)
    """How many of its own names stand for a block of ours."""
    expected: OrderedDict[bytes, float] = field(default_factory=OrderedDict)
    orphan_count: int = 0
    dropped_count: int = 0


class PrefixIndex:
    """The blocks of up to ENGINES_MAX engines. An engine's name stands for one data-parallel rank of it."""

    def __init__(self) -> None:
        self._engines: dict[str, _Engine] = {}
        self.holders = BlockHolders()

    @property
    def block_count(self) -> int:
        """Blocks that some engine holds."""
        return len(self.holders)

    def add_engine(self, name: str, rank_count: int = 1) -> None:
        """Make an engine known, or one of its `rank_count` data-parallel ranks. Raises ValueError where there are too
        many.
        """
        blocks_max = BLOCKS_MAX // max(1, rank_count)
        expected_max = max(EXPECTED_STEPS_MAX, EXPECTED_MAX // max(1, rank_count))
        known = self._engines.get(name)
        if known is not None:
            known.blocks_max, known.expected_max = blocks_max, expected_max
            return
        if len(self._engines) >= ENGINES_MAX:
            raise ValueError(f"more than {ENGINES_MAX} engines")
        self._engines[name] = _Engine(self.holders.new_bit(), blocks_max, expected_max)

    def remove_engine(self, name: str) -> None:
        """Forget an engine and its blocks."""
        engine = self._engines.get(name)
        if engine is not None:
            self.clear(name)
            del self._engines[name]
            self.holders.free_bit(engine.bit)

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
                        self._remove(engine, name_bytes(block))
            case AllBlocksCleared():
                self.clear(name)

    def restore(self, name: str, blocks: Iterable[tuple[bytes, bytes]]) -> None:
        """Take over what was written down of an engine's blocks: its own names, as `name_bytes` has them, and ours."""
        engine = self._engines[name]
        for block, prefix in blocks:
            if block not in engine.names and engine.name_count < engine.blocks_max:
                self._add(engine, block, prefix)

    def prefix_of(self, name: str, block: bytes) -> bytes | None:
        """Our name of an engine's block, of which `block` is the engine's own as `name_bytes` has it; None where the
        engine does not hold it.
        """
        return self._engines[name].names.of(block).get(block)

    def holds(self, name: str, block: bytes) -> bool:
        """Whether an engine holds a block, by its events."""
        return block in self._engines[name].counts

    def clear(self, name: str) -> bool:
        """The engine holds nothing; whether it held anything."""
        engine = self._engines[name]
        if not engine.name_count and not engine.expected:
            return False
        rest: list[Rest] = [*engine.names.slices, engine.expected]
        engine.bit = self.holders.clear(engine.bit, engine.counts.slices, rest)
        engine.name_count = 0
        engine.names, engine.counts, engine.expected = SlicedDict(), SlicedDict(), OrderedDict()
        return True

    def expect(self, name: str, chain: Sequence[bytes], now_s: float, for_s: float = EXPECTED_S) -> None:
        """A request with these blocks was sent to the engine."""
        engine = self._engines[name]
        expected = engine.expected
        until_s = now_s + for_s
        for block in chain:
            expected[block] = until_s
            expected.move_to_end(block)
        while len(expected) > engine.expected_max:
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
        counts = self.holders.counts_along(chain)
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

    def _store(self, engine: _Engine, event: BlockStored) -> None:
        engine.block_tokens = event.block_tokens
        if event.parent is None:
            salt, _ = token_root(event, 0)
            parent: bytes | None = root_hash(event.adapter, salt)
        else:
            before = name_bytes(event.parent)
            parent = engine.names.of(before).get(before)
        if parent is None:
            engine.orphan_count += len(event.names)
            return
        step = event.block_tokens
        for index, name in enumerate(event.names):
            _, extra = token_root(event, index)
            parent = next_hash(parent, event.tokens[index * step : (index + 1) * step], extra)
            block = name_bytes(name)
            if block in engine.names:
                continue
            if engine.name_count >= engine.blocks_max:
                engine.dropped_count += 1
                continue
            self._add(engine, block, parent)

    def _add(self, engine: _Engine, name: bytes, prefix: bytes) -> None:
        engine.names.of(name)[name] = prefix
        engine.name_count += 1
        counts = engine.counts.of(prefix)
        count = counts.get(prefix, 0)
        counts[prefix] = count + 1
        if not count:
            self.holders.hold(prefix, engine.bit)

    def _remove(self, engine: _Engine, name: bytes) -> None:
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
        self.holders.drop(block, engine.bit)


def _forget_past(expected: OrderedDict[bytes, float], now_s: float) -> None:
    """Some of those that are past, which count no more anyway: after a burst of long prompts all are past at once."""
    for _ in range(min(FORGOTTEN_AT_ONCE, len(expected))):
        block = next(iter(expected))
        if expected[block] > now_s:
            return
        del expected[block]
