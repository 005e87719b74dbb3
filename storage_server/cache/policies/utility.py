"""The utility of keeping an entry in a tier with a codec. Source: AdaptCache (002), "utility definition".

    U = frequency * (alpha * quality - bytes / bandwidth - decoding)        kept
    U = frequency * (alpha * 1       - computing again)                    evicted: what is computed is exact
    U = frequency * (alpha * 1       - loading)                            kept in a form that the reader does not take

002's text says "the product of its estimated future occurrence frequency and its quality-delay weighted sum". The
formula that is printed there leaves the delay out of the brackets: Freq * (alpha * Quality) - size / Bandwidth, so that
an entry that is never used would still cost its loading time. The text is followed here. Decoding, computing again, and
readers that do not take a form are ours: 002 has the first in its estimator, counts no misses, and lets every reader
take every form.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

Key = Hashable


@dataclass(frozen=True, slots=True)
class Form:
    """One way to keep an entry: its bytes, its quality (1 for exact ones), and the seconds that decoding takes. From
    some encoded forms others are made without the exact bytes: `made_from` has their codecs. `taken` is the part of the
    uses whose readers take this form.
    """

    codec: str
    nbytes: int
    quality: float = 1.0
    decode_s: float = 0.0
    made_from: frozenset[str] = frozenset()
    taken: float = 1.0


@dataclass(frozen=True, slots=True)
class TierModel:
    """A tier: its room, and the rate at which entries are loaded from it. The first tier is the fastest."""

    name: str
    capacity_bytes: int
    bytes_per_s: float


@dataclass(frozen=True, slots=True)
class TieredEntry:
    """An entry: its uses in a second as estimated, its forms, largest first, and the seconds to compute it again.
    `reload_s` are the seconds that exact bytes have to be loaded where a change needs them, or a reader that does not
    take the form. Raises ValueError for forms that are not in this order.
    """

    key: Key
    frequency: float
    forms: tuple[Form, ...]
    recompute_s: float
    reload_s: float = 0.0

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
    form = entry.forms[placement.form]
    delay_s = form.nbytes / tiers[placement.tier].bytes_per_s + form.decode_s
    value = alpha * form.quality - delay_s
    if form.taken < 1:
        value = form.taken * value + (1 - form.taken) * (alpha - entry.reload_s)
    return entry.frequency * value


def best_form(entry: TieredEntry, tier: int, tiers: Sequence[TierModel], alpha: float) -> TierPlacement:
    """The form that has the most utility in a tier, whatever its room; of equal ones the smallest."""
    placements = [TierPlacement(tier, form) for form in range(len(entry.forms))]
    return max(reversed(placements), key=lambda placement: utility(entry, placement, tiers, alpha))
