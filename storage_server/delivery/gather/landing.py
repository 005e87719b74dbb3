"""Landing memory: what comes from another store lies here until it is written into a file behind the delivery, so that
a payload can go when its bytes have come. It is bounded; what it has no room for comes straight into the file.
"""

from __future__ import annotations

from objectcache.adapters.caller import CALLER
from objectcache.adapters.memory_area import Area, PrivateArea
from storage_server.planning.extent import aligned
from storage_server.planning.fair_shares import FairShares
from storage_server.planning.free_space import FreeSpace

MEMORY_FRACTION = 0.5
"""The part of the memory that one bucket may have, and of what other callers leave one caller: its reads must not take
all of it.
"""


class Landed:
    """The memory of one chunk. `take` returns it with one hold; the last `release` frees it."""

    def __init__(self, landing: Landing, bucket: str, caller: str, offset: int, nbytes: int) -> None:
        self._landing = landing
        self._bucket = bucket
        self._caller = caller
        self._offset = offset
        self._nbytes = nbytes
        self._hold_count = 1

    @property
    def is_held(self) -> bool:
        """Whether its bytes are still there."""
        return self._hold_count > 0

    @property
    def address(self) -> int:
        """The address of its first byte."""
        return self._landing.address + self._offset

    @property
    def view(self) -> memoryview:
        """All of it."""
        return self._landing.view[self._offset : self._offset + self._nbytes]

    def hold(self) -> None:
        """Add a holder; there must be one."""
        assert self.is_held
        self._hold_count += 1

    def release(self) -> None:
        """Remove a holder."""
        self._hold_count -= 1
        if not self._hold_count:
            self._landing._give_back(self._bucket, self._caller, self._offset, self._nbytes)


class Landing:
    """`nbytes` of memory, in `area` where one is given; the system provides a page at its first use. Used on one event
    loop.
    """

    def __init__(self, nbytes: int, area: Area | None = None) -> None:
        self.nbytes = nbytes
        self._free = FreeSpace(nbytes)
        self._shares = FairShares(nbytes, MEMORY_FRACTION)
        if nbytes:
            area = area or PrivateArea(nbytes)
            self.view = memoryview(area.map)[:nbytes]
            self.address = area.address

    @property
    def used_bytes(self) -> int:
        """The memory in bytes that chunks lie in."""
        return self._shares.held

    def take(self, bucket: str, nbytes: int) -> Landed | None:
        """Memory for a chunk of the bucket, which CALLER asks for; None where there is no room."""
        taken_bytes, caller = aligned(nbytes), CALLER.get()
        if taken_bytes > self._shares.left(bucket, caller):
            return None
        offset = self._free.take(taken_bytes)
        if offset is None:
            return None
        self._shares.take(bucket, caller, taken_bytes)
        return Landed(self, bucket, caller, offset, nbytes)

    def _give_back(self, bucket: str, caller: str, offset: int, nbytes: int) -> None:
        taken_bytes = aligned(nbytes)
        self._free.give_back(offset, taken_bytes)
        self._shares.give_back(bucket, caller, taken_bytes)
