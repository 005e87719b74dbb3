"""Objects whose bytes were found damaged: a lookup that still counted them would have every client fail on them again.

Forgotten with the process, and where the object is other bytes by now.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from storage_server.store.extents import Extent

DAMAGED_MAX = 4096


class DamagedObjects:
    """At most DAMAGED_MAX of them, the oldest leaving first."""

    def __init__(self) -> None:
        self._extents: OrderedDict[tuple[str, str], tuple[Extent, ...]] = OrderedDict()

    def note(self, bucket: str, key: str, extents: Sequence[Extent]) -> None:
        """These extents of the object do not hold what was written."""
        self._extents[bucket, key] = tuple(extents)
        if len(self._extents) > DAMAGED_MAX:
            self._extents.popitem(last=False)

    def has(self, bucket: str, key: str, extents: Sequence[Extent]) -> bool:
        """Whether the object is damaged, as long as it is these extents."""
        return bool(self._extents) and self._extents.get((bucket, key)) == tuple(extents)
