"""Objects whose bytes were found damaged. A lookup stops before them, because every client that fetched one would fail.

An entry is forgotten when the process ends, and has no effect when the object has other extents by now.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from storage_server.planning.extent import Extent

DAMAGED_MAX = 4096


class DamagedObjects:
    """At most DAMAGED_MAX damaged objects; the oldest entry leaves first."""

    def __init__(self) -> None:
        self._extents: OrderedDict[tuple[str, str], tuple[Extent, ...]] = OrderedDict()

    @property
    def count(self) -> int:
        """How many objects are known to be damaged."""
        return len(self._extents)

    def note(self, bucket: str, key: str, extents: Sequence[Extent]) -> None:
        """Remember that these extents of the object do not hold what was written."""
        self._extents[bucket, key] = tuple(extents)
        if len(self._extents) > DAMAGED_MAX:
            self._extents.popitem(last=False)

    def has(self, bucket: str, key: str, extents: Sequence[Extent]) -> bool:
        """Whether the object is known to be damaged, and still has these extents."""
        return bool(self._extents) and self._extents.get((bucket, key)) == tuple(extents)
