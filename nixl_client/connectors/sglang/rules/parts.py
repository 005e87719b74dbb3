"""Where the parts of pages lie in host memory, and which parts one request brings.

A page of a host pool lies in one place or in a few: with keys and values apart in two, a state in one for each of its
tensors. All parts that have one size and lie in one allocation go in one request.

    allocation   |k0|k1|k2|k3|…|v0|v1|v2|v3|…|        pages 3 and 1: k3 v3 k1 v1, one descriptor with four places
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

PARTS_MAX = 4
"""A page in more parts is stored as one object: with layers apart there would be dozens of small ones a page."""
Addresses = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class HostAllocation:
    """Contiguous host memory of a pool: its first address, and its size."""

    start: int
    nbytes: int

    def holds(self, address: int, nbytes: int) -> bool:
        """Whether these bytes are in it."""
        return self.start <= address and address + nbytes <= self.start + self.nbytes


@dataclass(frozen=True, slots=True)
class PartGroup:
    """Parts of `nbytes` bytes each in one allocation, by their numbers in a page."""

    allocation_index: int
    nbytes: int
    parts: tuple[int, ...]


def part_groups(
    addresses: Sequence[int], part_bytes: Sequence[int], allocations: Sequence[HostAllocation]
) -> tuple[PartGroup, ...]:
    """The groups of one page's parts, of which each is in one allocation. Raises ValueError for parts that lie in none,
    for empty ones, and for more than PARTS_MAX.
    """
    if len(addresses) != len(part_bytes) or not 1 <= len(addresses) <= PARTS_MAX or min(part_bytes) < 1:
        raise ValueError(f"a page of {len(addresses)} parts of {list(part_bytes)} bytes")
    groups: dict[tuple[int, int], list[int]] = {}
    for number, (address, nbytes) in enumerate(zip(addresses, part_bytes, strict=True)):
        found = [index for index, each in enumerate(allocations) if each.holds(address, nbytes)]
        if not found:
            raise ValueError(f"part {number} of a page lies in no allocation of its pool")
        largest = max(found, key=lambda index: allocations[index].nbytes)
        groups.setdefault((largest, nbytes), []).append(number)
    return tuple(PartGroup(index, nbytes, tuple(parts)) for (index, nbytes), parts in groups.items())


def places(group: PartGroup, addresses: Addresses, allocation: HostAllocation) -> list[int]:
    """The offsets in the allocation of a group's parts, page by page; `addresses` are int64 of shape (pages, parts).
    Raises ValueError where one is not in the allocation, or two overlap: the bytes of somebody else would be written.
    """
    offsets: Addresses = addresses[:, group.parts].ravel() - allocation.start
    if offsets.size:
        ordered = np.sort(offsets)
        if ordered[0] < 0 or ordered[-1] + group.nbytes > allocation.nbytes:
            raise ValueError("a page lies outside of its pool's memory")
        if (np.diff(ordered) < group.nbytes).any():
            raise ValueError("two pages of a request share memory")
    return [int(offset) for offset in offsets]


def portions(count: int, nbytes: int, portion_bytes: int, count_max: int) -> list[tuple[int, int]]:
    """The requests for `count` objects of `nbytes` each: their first object and the end, as many to a request as fit
    `portion_bytes`, one at least, and at most `count_max`.
    """
    step = min(max(1, portion_bytes // nbytes), count_max)
    return [(first, min(first + step, count)) for first in range(0, count, step)]
