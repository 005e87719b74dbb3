"""Where the chunks of a prefix lie, as a lookup tells it: runs of chunks that lie in one tier, in order."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from itertools import groupby

TierRuns = tuple[tuple["Tier", int], ...]
"""Tiers with counts of chunks, each at least 1: (DRAM, 3), (DISK, 2) is a prefix of five chunks."""


class Tier(StrEnum):
    """Where a delivery would take a chunk from."""

    DRAM = "dram"
    """The memory of a storage server."""
    DISK = "disk"
    """Its data directory."""
    SERVICE = "service"
    """The service behind the cache alone."""


def runs_of(tiers: Iterable[Tier]) -> TierRuns:
    """The runs of chunks whose tiers are these."""
    return tuple((tier, sum(1 for _ in run)) for tier, run in groupby(tiers))


def counts_of(runs: TierRuns) -> dict[str, int]:
    """How many chunks lie in each tier, in the order of Tier, without tiers that have none."""
    return {tier.value: count for tier in Tier if (count := sum(many for each, many in runs if each is tier))}


def tier_fields(runs: TierRuns) -> list[tuple[str, int]]:
    """The JSON that `parse_tiers` reads."""
    return [(tier.value, count) for tier, count in runs]


def parse_tiers(fields: object, chunk_count: int) -> TierRuns:
    """The runs of a prefix of so many chunks. Raises ValueError and TypeError for anything else."""
    if not isinstance(fields, list) or len(fields) > chunk_count:
        raise ValueError("tiers is no list of as many runs as there are chunks")
    runs = tuple((Tier(tier), count) for tier, count in fields)
    if not all(type(count) is int and count > 0 for _, count in runs) or sum(count for _, count in runs) != chunk_count:
        raise ValueError("the runs of tiers do not add up to the chunks that matched")
    return runs
