"""Dividing a request among the members of a cluster, and putting their answers together. Pure.

A prefix of 6 chunks, whose keepers are members x and y:

    chunk    0  1  2  3  4  5          portion 0: x, positions 0 2 3
    keeper     x  y  x  x  y  y          portion 1: y, positions 1 4 5
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import chain, repeat

import numpy as np

from descriptors.cluster import Member
from descriptors.descriptor import Delivery, Descriptor, OnMissing, Portion, version_of
from descriptors.errors import CHUNK_CODES, ChunkUnavailable
from descriptors.notices import Mode
from descriptors.placement import Indices, Placement
from descriptors.presence import Presence
from descriptors.tiers import Tier, TierRuns, runs_of


@dataclass(frozen=True, slots=True, eq=False)
class Holding:
    """One member's chunks of a prefix: their positions in it, int64, ascending."""

    member: Member
    positions: Indices

    @property
    def chunk_count(self) -> int:
        """How many chunks the member has of the prefix."""
        return len(self.positions)


def holdings(placement: Placement, bucket: str, keys: Sequence[str], without: Collection[str] = ()) -> list[Holding]:
    """The holdings of a prefix, each of at least one chunk, in the order in which the prefix first needs them. Members
    named in `without` get none. Raises ValueError where no member is left.
    """
    return holdings_at(placement, bucket, keys, np.arange(len(keys)), without)


def holdings_at(
    placement: Placement, bucket: str, keys: Sequence[str], positions: Indices, without: Collection[str] = ()
) -> list[Holding]:
    """As `holdings`, for those chunks of the prefix alone that are at `positions`."""
    keepers = placement.keepers(bucket, [keys[position] for position in positions.tolist()], without)
    _, first = np.unique(keepers, return_index=True)
    found = [int(keepers[index]) for index in sorted(first.tolist())]
    return [Holding(placement.members[keeper], positions[keepers == keeper]) for keeper in found]


def matched_of(portions: Sequence[Holding], matched: Sequence[int], chunk_count: int) -> int:
    """How many chunks of the prefix, from the first, are stored, where the members have `matched` of theirs."""
    gaps = [
        int(portion.positions[count])
        for portion, count in zip(portions, matched, strict=True)
        if count < portion.chunk_count
    ]
    return min(gaps, default=chunk_count)


def tiers_of(portions: Sequence[Holding], runs: Sequence[TierRuns], matched: int) -> TierRuns:
    """Where the first `matched` chunks of the prefix lie, where the members have told it of those of theirs that they
    have. A chunk that its member tells nothing of counts as being in the service.
    """
    tiers = [Tier.SERVICE] * matched
    for portion, told in zip(portions, runs, strict=True):
        own = chain.from_iterable(repeat(tier, count) for tier, count in told)
        for position, tier in zip(portion.positions.tolist(), own, strict=False):
            if position < matched:
                tiers[position] = tier
    return runs_of(tiers)


def present_of(portions: Sequence[Holding], told: Sequence[Presence], chunk_count: int) -> Presence:
    """Which of the chunks are stored, where the members have told it of theirs. A chunk that its member tells nothing
    of counts as missing.
    """
    present = np.zeros(chunk_count, dtype=bool)
    for portion, own in zip(portions, told, strict=True):
        present[portion.positions[: len(own)]] = own[: portion.chunk_count]
    return tuple(present.tolist())


def descriptor_of(
    whole: Descriptor,
    holding: Holding,
    index: int,
    count: int,
    mode: Mode | None = None,
    first_layer: int = 0,
    attempt: int = 0,
    on_missing: OnMissing = OnMissing.FAIL,
) -> Descriptor:
    """The descriptor for one portion of a delivery whose chunks are all known to be there. `mode` is that of the
    delivery where it has begun.
    """
    positions = tuple(holding.positions.tolist())
    keys, places = whole.chunk_keys, whole.places
    return replace(
        whole,
        chunk_keys=tuple([keys[position] for position in positions]),
        places=tuple([places[position] for position in positions]) if places else (),
        on_missing=on_missing,
        delivery=whole.delivery if mode is None else Delivery(mode.value),
        version=version_of(whole.accept, is_plain=False),
        portion=Portion(
            index=index,
            count=count,
            chunk_count=whole.chunk_count,
            positions=positions,
            first_layer=first_layer,
            attempt=attempt,
        ),
    )


def of_whole(error: ChunkUnavailable, positions: Indices) -> ChunkUnavailable:
    """A portion's error with the index of the chunk in the whole prefix."""
    if error.index is None or error.code not in CHUNK_CODES:
        return error
    return error.at(int(positions[error.index]))
