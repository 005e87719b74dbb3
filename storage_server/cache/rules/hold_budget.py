"""The bytes of caches that may not leave, and how many there may be. Pure."""

from __future__ import annotations


class HoldBudget:
    """The bytes that pins, leases and dirty objects hold in one cache, which count among those of `all_caches`, too."""

    def __init__(self, all_caches: HoldBudget | None = None) -> None:
        self._all_caches = all_caches
        self.nbytes = 0
        self.bytes_max: int | None = None
        """The most bytes that pins and leases may hold, dirty objects included. None: any amount."""

    def has_room(self, nbytes: int) -> bool:
        """Whether a pin or a lease may hold so many bytes more, in this cache and in all together."""
        if self.bytes_max is not None and self.nbytes + nbytes > self.bytes_max:
            return False
        return self._all_caches is None or self._all_caches.has_room(nbytes)

    def add(self, nbytes: int) -> None:
        """So many bytes more are held; below 0: so many less."""
        self.nbytes += nbytes
        if self._all_caches is not None:
            self._all_caches.add(nbytes)
