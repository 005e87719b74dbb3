"""How much of a prefix can be restored from the pages that are stored, by each pool's hit policy (SGLang,
`PoolHitPolicy` and `batch_exists_v2` of hicache_storage.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum


class HitPolicy(Enum):
    """The pages of a pool that must be there, so that a prefix of the KV pages can be restored. The values are
    SGLang's.
    """

    ALL_PAGES = "all_pages"
    """Every page of the prefix."""
    TRAILING_PAGES = "trailing_pages"
    """The last pages of the prefix: states and windows."""
    BLOCK_GROUPS = "block_groups"
    """None: such a pool is a second form of the same KV, and never shortens a hit."""


@dataclass(frozen=True, slots=True)
class PoolPages:
    """Which of the pages are stored for one pool beside the KV. `trailing_count` is the number of pages at the end of a
    prefix that TRAILING_PAGES asks for, 1 or more.
    """

    pool: str
    policy: HitPolicy
    is_stored: Sequence[bool]
    trailing_count: int = 1


@dataclass(frozen=True, slots=True)
class PageHits:
    """The longest prefix that can be restored, in pages; the pages found by pool; and every length of a prefix that can
    be restored, ascending. Ranks compare the lengths, since each may have other ones.
    """

    page_count: int
    by_pool: dict[str, int]
    restorable: tuple[int, ...]


def leading_count(is_stored: Sequence[bool]) -> int:
    """How many are there from the first on without a gap."""
    return next((index for index, there in enumerate(is_stored) if not there), len(is_stored))


def whole_pages(is_stored: Sequence[bool], part_count: int) -> list[bool]:
    """For each page whether all its parts are there; `is_stored` goes page by page."""
    return [all(is_stored[at : at + part_count]) for at in range(0, len(is_stored), part_count)]


def page_hits(kv_pool: str, kv_count: int, pools: Sequence[PoolPages]) -> PageHits:
    """The hits where `kv_count` pages of KV are there without a gap. A pool that is found nowhere is not named."""
    by_pool = {kv_pool: kv_count} if kv_count else {}
    restorable = list(range(1, kv_count + 1))
    for pool in pools:
        if pool.policy is HitPolicy.BLOCK_GROUPS or not restorable:
            continue
        lengths = _lengths(pool, kv_count)
        if lengths:
            by_pool[pool.pool] = max(lengths)
        restorable = [length for length in restorable if length in lengths]
    return PageHits(restorable[-1] if restorable else 0, by_pool, tuple(restorable))


def _lengths(pool: PoolPages, kv_count: int) -> set[int]:
    """The lengths of prefixes for which this pool has what it needs."""
    if pool.policy is HitPolicy.ALL_PAGES:
        return set(range(1, leading_count(pool.is_stored[:kv_count]) + 1))
    lengths, run = set(), 0
    for length, there in enumerate(pool.is_stored[:kv_count], start=1):
        run = run + 1 if there else 0
        if run >= min(length, max(1, pool.trailing_count)):
            lengths.add(length)
    return lengths
