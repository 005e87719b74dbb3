"""Dividing a request among the members of a cluster, and putting their answers together. Pure.

A prefix of 6 chunks, whose homes are members x and y:

    chunk    0  1  2  3  4  5          part 0: x, positions 0 2 3
    home     x  y  x  x  y  y          part 1: y, positions 1 4 5
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np

from descriptors.cluster import Member
from descriptors.descriptor import PART_VERSION, Delivery, Descriptor, OnMissing, Part
from descriptors.notices import Mode
from descriptors.placement import Indices, Placement


@dataclass(frozen=True, slots=True, eq=False)
class Share:
    """One member's chunks of a prefix: their positions in it, int64, ascending."""

    member: Member
    positions: Indices

    @property
    def chunk_count(self) -> int:
        """How many chunks the member has of the prefix."""
        return len(self.positions)


def shares(placement: Placement, bucket: str, keys: Sequence[str], without: Collection[str] = ()) -> list[Share]:
    """The shares of a prefix, each of at least one chunk, in the order in which the prefix first needs them. Members
    named in `without` get none. Raises ValueError where no member is left.
    """
    return shares_at(placement, bucket, keys, np.arange(len(keys)), without)


def shares_at(
    placement: Placement, bucket: str, keys: Sequence[str], positions: Indices, without: Collection[str] = ()
) -> list[Share]:
    """As `shares`, for those chunks of the prefix alone that are at `positions`."""
    homes = placement.homes(bucket, [keys[position] for position in positions.tolist()], without)
    _, first = np.unique(homes, return_index=True)
    found = [int(homes[index]) for index in sorted(first.tolist())]
    return [Share(placement.members[home], positions[homes == home]) for home in found]


def matched_of(parts: Sequence[Share], matched: Sequence[int], chunk_count: int) -> int:
    """How many chunks of the prefix, from the first, are stored, where the members have `matched` of theirs."""
    gaps = [int(part.positions[count]) for part, count in zip(parts, matched, strict=True) if count < part.chunk_count]
    return min(gaps, default=chunk_count)


def descriptor_of(
    whole: Descriptor,
    share: Share,
    index: int,
    count: int,
    mode: Mode | None = None,
    first_layer: int = 0,
    attempt: int = 0,
) -> Descriptor:
    """The descriptor for one part of a delivery whose chunks are all known to be there. `mode` is that of the delivery
    where it has begun.
    """
    positions = tuple(share.positions.tolist())
    keys = whole.chunk_keys
    return replace(
        whole,
        chunk_keys=tuple([keys[position] for position in positions]),
        on_missing=OnMissing.FAIL,
        delivery=whole.delivery if mode is None else Delivery(mode.value),
        version=PART_VERSION,
        part=Part(index, count, whole.chunk_count, positions, first_layer, attempt),
    )


def cut_to(descriptor: Descriptor, chunk_count: int) -> Descriptor:
    """The descriptor of the first `chunk_count` chunks, which are stored."""
    return replace(descriptor, chunk_keys=descriptor.chunk_keys[:chunk_count], on_missing=OnMissing.FAIL)
