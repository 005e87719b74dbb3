"""The optimizer: entries come in at their best, and where a tier is too full the move that costs the least utility for
the bytes that it frees is made: compress an entry further, demote it, or evict it. Source: AdaptCache (002), "policy
optimizer": marginal drop = (U before - U after) / bytes freed.

    DRAM is 64 KiB too full.  A: exact to 4 bits frees 88 KiB and costs 0.2    -> 0.0023 a KiB    this one
                              B: to disk frees 128 KiB and costs 0.9           -> 0.0070 a KiB

Changes are not free where exact bytes have to be loaded for them: an entry comes back exactly, or goes to a form that
is not made from its present one, only for more than that costs; and it goes at once to a form from which it will not
have to go on so for less.

This is the greedy solution of a multiple-choice knapsack over tiers. Each tier has a heap of its entries' cheapest
moves, so a decision looks at a few entries, not at all. An entry in the heap that has changed since is skipped.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush
from itertools import count

from storage_server.cache.policies.utility import Form, Key, TieredEntry, TierModel, TierPlacement, best_form, utility

PROMOTE_FRACTION = 0.05
"""An entry moves up only where that saves so much of its delay and lost quality: moves cost bandwidth, too."""

STALE_FACTOR, STALE_MIN = 4, 256
"""A heap is made anew when it has so many times the entries that are kept."""


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
        self.use_weight = 1.0
        """The weight of a use now, among the frequencies: a load costs as much as a use that takes its time."""

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

    def use(self, key: Key, frequency: float, forms: tuple[Form, ...] | None = None) -> list[Move]:
        """An entry's frequency is another one; its forms, too, where some are given, among which the present one is. It
        moves up where that gains enough.
        """
        known = self._kept.get(key)
        if known is None:
            return []
        before = known.placement
        if forms is not None:
            codec = known.entry.forms[before.form].codec
            before = replace(before, form=next(at for at, form in enumerate(forms) if form.codec == codec))
        entry = replace(known.entry, frequency=frequency, forms=known.entry.forms if forms is None else forms)
        moved: dict[Key, TierPlacement | None] = {key: before}
        wanted = best_form(entry, 0, self._tiers, self._alpha)
        gain = utility(entry, wanted, self._tiers, self._alpha) - utility(entry, before, self._tiers, self._alpha)
        cost = frequency * self._alpha - utility(entry, before, self._tiers, self._alpha)
        self._take_out(key)
        rises = wanted.tier < before.tier or wanted.form < before.form
        least = max(PROMOTE_FRACTION * cost, self._reload_cost(entry))
        self._set(entry, wanted if rises and gain > least else before)
        self._relieve(moved)
        return list(self._moves(moved))

    def scale(self, factor: float) -> None:
        """Multiply all frequencies, which changes no choice."""
        for kept in self._kept.values():
            kept.entry = replace(kept.entry, frequency=kept.entry.frequency * factor)
        self._heaps = [[(drop * factor, *rest) for drop, *rest in heap] for heap in self._heaps]  # type: ignore[misc]

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
        """The drop for each byte of encoding an entry further in its tier, and that form; None where none is smaller.
        Of the forms that cost the least it is the last one that costs no more than going on to it later.
        """
        nbytes = self._nbytes(entry, placement)
        found: list[tuple[float, float, TierPlacement]] = []
        for form in range(placement.form + 1, len(entry.forms)):
            after = TierPlacement(placement.tier, form)
            freed = nbytes - self._nbytes(entry, after)
            if freed > 0:
                value = utility(entry, after, self._tiers, self._alpha)
                paid = self._change_cost(entry, placement.form, form)
                found.append(((now - value + paid) / freed, value, after))
        if not found:
            return None
        first = min(found, key=lambda each: each[0])
        behind = found[found.index(first) + 1 :]
        for later in behind:
            if first[1] - later[1] < self._change_cost(entry, first[2].form, later[2].form):
                first = later
        return first[0], first[2]

    def _change_cost(self, entry: TieredEntry, before: int, after: int) -> float:
        """The cost of making one form from another that is larger."""
        is_made = before == 0 or entry.forms[before].codec in entry.forms[after].made_from
        return 0.0 if is_made else self._reload_cost(entry)

    def _reload_cost(self, entry: TieredEntry) -> float:
        return entry.reload_s * self.use_weight


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
