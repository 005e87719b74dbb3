"""An object in a bounded cache, as the cache's books have it. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from storage_server.cache.policies.ladder import ChunkForm

Name = tuple[str, str]
"""Bucket and key."""


class Entry(NamedTuple):
    """An object in the cache. `nbytes` is the space that it takes, `parent` the key of the chunk before, if known.
    `pinned_until` and `leased_until` are None for an object without a pin or a lease. An object that `is_dirty` exists
    only in this cache. Of one that `is_shared` a client has said that many prompts begin with it. One that has a
    `form` may be encoded, or be so already; it may be that of `replaced_version`, encoded further. The pin tag of one
    that `has_idle_pin` had no effect. Times are Unix seconds.
    """

    version: int
    nbytes: int
    modified_at: float
    used_at: float
    use_count: int = 1
    parent: str | None = None
    pinned_until: float | None = None
    leased_until: float | None = None
    is_dirty: bool = False
    is_shared: bool = False
    form: ChunkForm | None = None
    replaced_version: int | None = None
    has_idle_pin: bool = False

    @property
    def is_held(self) -> bool:
        """Whether it may not leave."""
        return self.is_dirty or self.pinned_until is not None or self.leased_until is not None


@dataclass(frozen=True, slots=True)
class Victim:
    """An object that leaves the cache, unless it has another version by then."""

    bucket: str
    key: str
    entry: Entry
