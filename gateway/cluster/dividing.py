"""Dividing a request among the members, in a thread where its prefix is long: `gateway.cluster.split` for event loops.

A prefix may have 65,536 keys, of whoever signs the request. Hashing and scoring them keeps a processor for a tenth of a
second, and longer for many members.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TypeVar

import numpy as np

from descriptors.placement import CELLS_MAX, Indices, Placement
from gateway.cluster.split import Holding, holdings_at
from objectcache.adapters.threads import HERE_ITEMS_MAX, computed

_T = TypeVar("_T")


async def divided(
    placement: Placement, bucket: str, keys: Sequence[str], without: Collection[str] = (), at: Indices | None = None
) -> list[Holding]:
    """The holdings of a prefix, or of those of its chunks that are at the positions `at`, as `holdings_at` has them.
    Raises ValueError where no member is left.
    """
    positions, left_out = np.arange(len(keys)) if at is None else at, frozenset(without)
    is_long = len(positions) > HERE_ITEMS_MAX or len(positions) * len(placement.members) > CELLS_MAX
    return await computed(lambda: holdings_at(placement, bucket, keys, positions, left_out), is_long=is_long)


async def made_of(holding: Holding, make: Callable[[], _T]) -> _T:
    """`make()`, which names each key of a holding."""
    return await computed(make, is_long=holding.chunk_count > HERE_ITEMS_MAX)
