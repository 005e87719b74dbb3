"""An object in a bounded cache, as the cache's books have it. Pure."""

from __future__ import annotations

from typing import NamedTuple

Name = tuple[str, str]
"""Bucket and key."""


class Entry(NamedTuple):
    """An object in the cache. `nbytes` is the space that it takes, `parent` the key of the chunk before, if known.
    `pinned_until` and `leased_until` are None for an object without a pin or a lease. An object that `is_dirty` exists
    only in this cache. Of one that `is_shared` a client has said that many prompts begin with it. One that
    `is_replaceable` may be replaced by an encoded one, and the pin tag of one that `has_idle_pin` had no effect. Times
    are Unix seconds.
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
    is_replaceable: bool = False
    has_idle_pin: bool = False

    @property
    def is_held(self) -> bool:
        """Whether it may not leave."""
        return self.is_dirty or self.pinned_until is not None or self.leased_until is not None
