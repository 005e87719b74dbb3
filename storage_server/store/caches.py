"""The caches of one store: what each takes, what the books know of an object, and the room that is kept free."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from descriptors.chunk_flags import is_flagged
from descriptors.errors import CallerError
from descriptors.headers import PREFIX_HEADER
from descriptors.pins import pinned_until
from descriptors.units import GIB, MIB
from storage_server.eviction.books import Books, Entry
from storage_server.planning.extent import ALIGNMENT_BYTES, aligned
from storage_server.store.data.space import Bound
from storage_server.store.replacer import layout_of
from storage_server.store.rows import KeyChange, KeyUse

AHEAD_FRACTION = 1 / 32
AHEAD_BYTES_MIN = 8 * MIB
AHEAD_BYTES_MAX = GIB


@dataclass(slots=True)
class Cache:
    """One cache. `bound` is None for the whole directory, which only `disk_bytes` bounds."""

    books: Books
    bound: Bound | None = None
    capacity_bytes: int | None = None
    sizes_bytes: dict[str, int] = field(default_factory=dict)
    used_bytes: int = 0
    is_replaced: bool = False
    """Whether its victims may be encoded: then there is as much room for those that wait as ahead of writes."""

    def note(self, change: KeyChange) -> None:
        """Count what a key of the bucket takes now."""
        self.used_bytes -= self.sizes_bytes.pop(change.key, 0)
        if change.version is not None:
            self.sizes_bytes[change.key] = change.nbytes
            self.used_bytes += change.nbytes


def entry_of(change: KeyChange, use: KeyUse | None) -> Entry:
    """The books' entry of an object. An object that was never used counts as used when it was put."""
    assert change.version is not None
    nbytes = max(ALIGNMENT_BYTES, aligned(change.nbytes))
    entry = Entry(
        change.version,
        nbytes,
        change.modified_at,
        change.modified_at,
        pinned_until=_pinned_until(change.attributes.tags),
        is_dirty=change.is_dirty,
        is_shared=is_flagged(change.attributes, PREFIX_HEADER),
        is_replaceable=layout_of(change.attributes.headers) is not None,
    )
    if use is None:
        return entry
    return replace(
        entry,
        used_at=max(change.modified_at, use.used_at),
        use_count=use.use_count,
        parent=use.parent,
        leased_until=use.leased_until,
    )


def _pinned_until(tags: Mapping[str, str]) -> float | None:
    """As descriptors.pins says; a date that an earlier release let pass pins without an end."""
    try:
        return pinned_until(tags)
    except CallerError:
        return math.inf


def spare_bytes_of(cache: Cache, capacity_bytes: int) -> int:
    """The room to keep ahead of writes, and for chunks that wait to be encoded."""
    return (1 + cache.is_replaced) * ahead_bytes_of(capacity_bytes)


def ahead_bytes_of(limit_bytes: int) -> int:
    """The room to keep ahead of writes."""
    return min(int(limit_bytes / 4), max(AHEAD_BYTES_MIN, min(AHEAD_BYTES_MAX, int(AHEAD_FRACTION * limit_bytes))))
