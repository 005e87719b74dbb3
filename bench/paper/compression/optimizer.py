"""002's optimizer: entries come in at their best, and where a tier is too full the move is made that costs the least
utility for the bytes that it frees: compress an entry further, demote it, or evict it. Source: AdaptCache (002),
"policy optimizer": marginal drop = (U before - U after) / bytes freed.

    DRAM is 64 KiB too full.  A: exact to 4 bits frees 88 KiB and costs 0.2    -> 0.0023 a KiB    this one
                              B: to disk frees 128 KiB and costs 0.9           -> 0.0070 a KiB

This is the greedy solution of a multiple-choice knapsack over tiers. Each tier has a heap of its entries' cheapest
moves, so a decision looks at a few entries, not at all. An entry in the heap that has changed since is skipped.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush
from itertools import count

from storage_server.cache.policies.utility import Form, use_cost_s

PROMOTE_FRACTION = 0.05
"""An entry moves up only where that saves so much of its delay and lost quality: moves cost bandwidth, too."""

STALE_FACTOR, STALE_MIN = 4, 256
"""A heap is made anew when it has so many times the entries that are kept."""
Key = Hashable


@dataclass(frozen=True, slots=True)
class TierModel:
    """A tier: its room, and the rate at which entries are loaded from it. The first tier is the fastest."""

    name: str
    capacity_bytes: int
    bytes_per_s: float


@dataclass(frozen=True, slots=True)
class TieredEntry:
    """An entry: its uses in a second as estimated, its forms, largest first, and the seconds to compute it again.
    Raises ValueError for forms that are not in this order.
    """

    key: Key
    frequency: float
    forms: tuple[Form, ...]
    recompute_s: float

    def __post_init__(self) -> None:
        sizes = [form.nbytes for form in self.forms]
        if not sizes or sizes != sorted(sizes, reverse=True) or sizes[-1] < 1:
            raise ValueError("an entry has forms, largest first")


@dataclass(frozen=True, slots=True)
class TierPlacement:
    """Where an entry is: the numbers of its tier and its form."""

    tier: int
    form: int


def utility(entry: TieredEntry, placement: TierPlacement | None, tiers: Sequence[TierModel], alpha: float) -> float:
    """U. `alpha` is the seconds that quality 1 is worth; None stands for an entry that is evicted."""
    if placement is None:
        return entry.frequency * (alpha - entry.recompute_s)
    bytes_per_s = tiers[placement.tier].bytes_per_s
    return entry.frequency * (alpha - use_cost_s(entry.forms[placement.form], bytes_per_s, alpha))


def best_form(entry: TieredEntry, tier: int, tiers: Sequence[TierModel], alpha: float) -> TierPlacement:
    """The form that has the most utility in a tier, whatever its room; of equal ones the smallest."""
    placements = [TierPlacement(tier, form) for form in range(len(entry.forms))]
    return max(reversed(placements), key=lambda placement: utility(entry, placement, tiers, alpha))


@dataclass(frozen=True, slots=True)
class Move:
    """An instruction: an entry is to be there; None: nowhere."""

    key: Key
    before: TierPlacement | None
    after: TierPlacement | None


@dataclass(slots=True)
class _Kept:
    entry: TieredEntry
    placement: TierPlacement
    stamp: int


class Optimizer:
    """The entries of some tiers. Methods return the moves to be carried out, in order."""

    def __init__(self, tiers: Sequence[TierModel], alpha: float) -> None:
        self._tiers = tuple(tiers)
        self._alpha = alpha
        self._kept: dict[Key, _Kept] = {}
        self._used_bytes = [0] * len(tiers)
        self._heaps: list[list[tuple[float, int, Key, int]]] = [[] for _ in tiers]
        self._stamps = count(1)
        self._order = count()

    @property
    def used_bytes(self) -> tuple[int, ...]:
        """The bytes in each tier."""
        return tuple(self._used_bytes)

    @property
    def total_utility(self) -> float:
        """The utility of all entries that are kept, over that of computing them again."""
        return sum(
            utility(each.entry, each.placement, self._tiers, self._alpha)
            - utility(each.entry, None, self._tiers, self._alpha)
            for each in self._kept.values()
        )

    def placement(self, key: Key) -> TierPlacement | None:
        """Where an entry is."""
        kept = self._kept.get(key)
        return None if kept is None else kept.placement

    def put(self, entry: TieredEntry) -> list[Move]:
        """An entry has come, or its forms or its frequency are others."""
        known = self._kept.get(entry.key)
        before = None if known is None else known.placement
        if known is not None:
            self._take_out(entry.key)
        start = best_form(entry, 0, self._tiers, self._alpha)
        if self._is_worth_keeping(entry, start):
            self._set(entry, start)
        moved = {entry.key: before}
        self._relieve(moved)
        return list(self._moves(moved))

    def use(self, key: Key, frequency: float) -> list[Move]:
        """An entry's frequency is another one. It moves up where that gains enough."""
        known = self._kept.get(key)
        if known is None:
            return []
        before = known.placement
        entry = replace(known.entry, frequency=frequency)
        moved: dict[Key, TierPlacement | None] = {key: before}
        wanted = best_form(entry, 0, self._tiers, self._alpha)
        gain = utility(entry, wanted, self._tiers, self._alpha) - utility(entry, before, self._tiers, self._alpha)
        cost = frequency * self._alpha - utility(entry, before, self._tiers, self._alpha)
        self._take_out(key)
        rises = wanted.tier < before.tier or wanted.form < before.form
        self._set(entry, wanted if rises and gain > PROMOTE_FRACTION * cost else before)
        self._relieve(moved)
        return list(self._moves(moved))

    def remove(self, key: Key) -> None:
        """An entry is gone."""
        if key in self._kept:
            self._take_out(key)

    def _moves(self, moved: dict[Key, TierPlacement | None]) -> Iterator[Move]:
        """Moves down before moves up, so that there is room."""
        found = [(key, before, self.placement(key)) for key, before in moved.items()]
        found = [each for each in found if each[1] != each[2]]
        found.sort(key=lambda each: -1 if each[2] is None else -each[2].tier)
        found.sort(key=lambda each: each[1] is None)
        return (Move(key, before, after) for key, before, after in found)

    def _is_worth_keeping(self, entry: TieredEntry, placement: TierPlacement) -> bool:
        kept = utility(entry, placement, self._tiers, self._alpha)
        return kept > utility(entry, None, self._tiers, self._alpha)

    def _nbytes(self, entry: TieredEntry, placement: TierPlacement) -> int:
        return entry.forms[placement.form].nbytes

    def _set(self, entry: TieredEntry, placement: TierPlacement) -> None:
        kept = self._kept[entry.key] = _Kept(entry, placement, next(self._stamps))
        self._used_bytes[placement.tier] += self._nbytes(entry, placement)
        drop, _ = self._cheapest(kept)
        heap = self._heaps[placement.tier]
        heappush(heap, (drop, next(self._order), entry.key, kept.stamp))
        if len(heap) > STALE_FACTOR * (len(self._kept) + STALE_MIN):
            heap[:] = [each for each in heap if self._is_current(each[2], each[3])]
            heapify(heap)

    def _is_current(self, key: Key, stamp: int) -> bool:
        kept = self._kept.get(key)
        return kept is not None and kept.stamp == stamp

    def _take_out(self, key: Key) -> _Kept:
        kept = self._kept.pop(key)
        self._used_bytes[kept.placement.tier] -= self._nbytes(kept.entry, kept.placement)
        return kept

    def _relieve(self, moved: dict[Key, TierPlacement | None]) -> None:
        for tier, model in enumerate(self._tiers):
            heap = self._heaps[tier]
            while self._used_bytes[tier] > model.capacity_bytes:
                _, _, key, stamp = heappop(heap)
                if not self._is_current(key, stamp):
                    continue
                kept = self._kept[key]
                _, after = self._cheapest(kept)
                moved.setdefault(key, kept.placement)
                self._take_out(key)
                if after is not None:
                    self._set(kept.entry, after)

    def _cheapest(self, kept: _Kept) -> tuple[float, TierPlacement | None]:
        """The drop for each byte of the entry's cheapest move out of its place, and that move."""
        entry, placement = kept.entry, kept.placement
        now = utility(entry, placement, self._tiers, self._alpha)
        nbytes = self._nbytes(entry, placement)
        gone = utility(entry, None, self._tiers, self._alpha)
        best: tuple[float, TierPlacement | None] = ((now - gone) / nbytes, None)
        further = self._further(entry, placement, now)
        if further is not None:
            best = min(best, further, key=lambda each: each[0])
        for tier in range(placement.tier + 1, len(self._tiers)):
            after = best_form(entry, tier, self._tiers, self._alpha)
            value = utility(entry, after, self._tiers, self._alpha)
            if value > gone:
                best = min(best, ((now - value) / nbytes, after), key=lambda each: each[0])
        return best

    def _further(self, entry: TieredEntry, placement: TierPlacement, now: float) -> tuple[float, TierPlacement] | None:
        """The drop for each byte of encoding an entry further in its tier, and that form."""
        nbytes = self._nbytes(entry, placement)
        found: list[tuple[float, TierPlacement]] = []
        for form in range(placement.form + 1, len(entry.forms)):
            after = TierPlacement(placement.tier, form)
            freed = nbytes - self._nbytes(entry, after)
            if freed > 0:
                found.append(((now - utility(entry, after, self._tiers, self._alpha)) / freed, after))
        return min(found, key=lambda each: each[0], default=None)


def upper_bound(entries: Sequence[TieredEntry], tiers: Sequence[TierModel], alpha: float, rounds: int = 400) -> float:
    """A bound that no placement of these entries exceeds, over computing all again: the dual of the linear relaxation.
    For prices λ ≥ 0 of a byte in each tier it is Σ max(U - λ·bytes) + Σ λ·capacity; the prices are found by steps along
    the subgradient.
    """
    prices = [0.0] * len(tiers)
    best = float("inf")
    choices = [
        [(None, 0, 0.0)]
        + [
            (
                tier,
                form.nbytes,
                utility(entry, TierPlacement(tier, at), tiers, alpha) - utility(entry, None, tiers, alpha),
            )
            for tier in range(len(tiers))
            for at, form in enumerate(entry.forms)
        ]
        for entry in entries
    ]
    scale = max((value / nbytes for each in choices for _, nbytes, value in each if nbytes), default=0.0)
    for number in range(1, rounds + 1):
        used, total = [0] * len(tiers), 0.0
        for each in choices:
            tier, nbytes, value = max(each, key=lambda one: one[2] - (0 if one[0] is None else prices[one[0]] * one[1]))
            total += value - (0 if tier is None else prices[tier] * nbytes)
            if tier is not None:
                used[tier] += nbytes
        best = min(best, total + sum(price * tier.capacity_bytes for price, tier in zip(prices, tiers, strict=True)))
        for at, model in enumerate(tiers):
            step = scale / number / max(1, model.capacity_bytes)
            prices[at] = max(0.0, prices[at] + step * (used[at] - model.capacity_bytes))
    return best
