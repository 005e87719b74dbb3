"""Removing many objects in changes of few rows: everybody's writes wait for a change that is under way."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any

from descriptors.objects import ObjectInfo
from storage_server.kernel.index import transaction

EXTENTS_MAX = 1000
"""A change that deletes so many takes some tens of milliseconds."""
Change = Callable[..., Awaitable[Any]]
"""Carries out a function of a transaction, and gives its result."""


def never(info: ObjectInfo) -> bool:
    """No object stays."""
    return False


async def remove_versions(
    change: Change, bucket: str, versions: Mapping[str, int], stays: Callable[[ObjectInfo], bool] = never
) -> int:
    """Delete the keys of `versions` that still show these versions, are not dirty, and of which `stays` says no, which
    is asked in the committer's thread; returns how many did.
    """
    left, removed = list(versions.items()), 0
    while left:
        some = partial(transaction.remove_versions, bucket=bucket, versions=left, extents_max=EXTENTS_MAX, stays=stays)
        count, seen = await change(some)
        removed, left = removed + count, left[seen:]
    return removed


async def remove_keys(change: Change, bucket: str, keys: Sequence[str]) -> None:
    """Delete the objects of these keys, whatever they show. Raises CallerError(NoSuchBucket)."""
    while True:
        some = partial(transaction.remove_many, bucket=bucket, keys=keys, extents_max=EXTENTS_MAX)
        keys = keys[await change(some) :]
        if not keys:
            return
